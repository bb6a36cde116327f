"""Whole steps without an engine: requests that run together do not meet in flags, tables or buffers."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_hook.engine import settings
from vllm_hook.engine.graphs import ANY_GRAPH, NO_GRAPH, PYTHON_AT_ATTENTION
from vllm_hook.engine.runner import RunnerHook
from vllm_hook.errors import UnsupportedError
from vllm_hook.ops import edit as op
from vllm_hook.runtime.area import StepArea
from vllm_hook.runtime.buffers import SiteBank, _area_size
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.edit_plan import EditPlanner, make_edit_plan
from vllm_hook.runtime.plan import BatchView, Planner, make_plan
from vllm_hook.runtime.requests import PAYLOAD_KEY, Lane, RequestState, Tracker, Watch, packed
from vllm_hook.sites import Armed
from worlds import FACTS, PLACES, World, on_cpu, play

CPU = torch.device("cpu")


class Ones:
    def vector(self, digest):
        return torch.ones(20)


def gate(**more):
    plain = {"site": "resid_post", "layer": 0, "kind": op.LINEAR, "u": "u", "c": 0.0, "bound": 1.0}
    plain |= {"above": True, "over": op.ANY, "per_row": False, "count": 1, "rows": [[0, 1]], "filter": None}
    return {**plain, **more}


def edit(layer, gate=None, rows=((1, -1),)):
    atoms = [[0, "a", "a", 0, False, 0, 10.0, 0.0, 0.0, 0.0]]
    return {
        "site": "resid_post", "layers": [layer], "rows": [list(r) for r in rows], "filters": [],
        "atoms": atoms, "gate": gate, "attend": None,
    }  # fmt: skip


class Small:
    """Sites of the residual stream of both layers; ``step`` gives each request's row of layer 1."""

    def __init__(self, requests=4):
        self.edits = EditBank(FACTS, 16, requests, 8, CPU)
        armed = Armed.of_edits("resid_post", [0, 1])
        self.bank = SiteBank(armed, FACTS, 4, 16, torch.float32, CPU, self.edits, requests)
        self.states = {}

    def add(self, name, data):
        self.states[name] = self.edits.admit(data, Ones())

    def step(self, *rows):
        """``rows``: (request, position, value of its row)."""
        view = BatchView([r for r, _, _ in rows], [*range(len(rows) + 1)], [p for _, p, _ in rows])
        self.bank.load(None, make_edit_plan(view, {r: self.states[r] for r, _, _ in rows}, {}))
        for layer in (0, 1):
            h = torch.tensor([[value] * 20 for _, _, value in rows])
            self.bank.sites["resid_post", layer](h)
        self.bank.area.rest()
        return {r: float(h[i, 0]) for i, (r, _, _) in enumerate(rows)}


def test_conditions_by_row_one_after_the_other_in_a_small_engine():
    """Their flags are numbered apart from those of latched conditions, of which a small engine has fewer."""
    world = Small(requests=1)
    for n in range(130):
        world.add("a", [edit(1, gate(per_row=True, rows=[[0, -1]]), rows=((0, -1),))])
        assert world.step(("a", 0, 5.0 * (n % 2))) == {"a": 15.0 if n % 2 else 0.0}
        world.edits.release(world.states.pop("a"))


def test_a_latched_condition_and_one_by_row_are_both_read():
    world = Small()
    by_row, latched = gate(per_row=True, rows=[[0, -1]]), gate(rows=[[0, 1]])
    world.add("a", [edit(1, by_row, rows=((0, -1),)), edit(1, latched)])
    assert {g.per_row for g in world.states["a"].gates} == {True, False}
    assert world.step(("a", 0, 5.0)) == {"a": 15.0}
    assert world.step(("a", 1, 5.0)) == {"a": 25.0}
    assert world.step(("a", 2, 0.0)) == {"a": 10.0}


def test_a_condition_reads_rows_of_its_own_request_only_when_resumed_with_a_smaller_chunk():
    """Rows below 4 were read before the preemption; the first chunk afterwards ends below that."""
    world = Small()
    world.add("a", [edit(1, gate(rows=[[0, 6]]), rows=((6, -1),))])
    world.add("b", [edit(1)])
    plan = make_edit_plan(BatchView(["a", "b"], [0, 2, 5], [0, 0]), world.states, {"a": 4})
    assert plan is not None
    assert not plan.cond_tables
    plan = make_edit_plan(BatchView(["a", "b"], [0, 3, 6], [2, 3]), world.states, {"a": 4})
    [(rows, _)] = plan.cond_tables
    assert rows.tolist() == [2]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_requests_with_gates_on_a_later_edit_have_flags_of_their_own(order):
    """The first edit has no gate, the second waits for the prompt: true for a, false for b."""
    world, value = Small(), {"a": 5.0, "b": -5.0}
    for name in order:
        world.add(name, [edit(0), edit(1, gate())])
        world.step((name, 0, value[name]))
    assert world.step(("a", 1, 0.0), ("b", 1, 0.0)) == {"a": 10.0, "b": 0.0}
    assert world.step(("b", 2, 0.0), ("a", 2, 0.0)) == {"a": 10.0, "b": 0.0}


def test_conditions_by_row_alone_at_their_place_are_all_read():
    """Two conditions for each of three requests, and nothing else at their site: six pairs, three rows."""
    world = Small()
    both = [gate(per_row=True, rows=[[0, -1]], bound=b) for b in (1.0, 2.0)]
    for name in "abc":
        world.add(name, [edit(1, g, rows=((0, -1),)) for g in both])
    plan = make_edit_plan(BatchView([*"abc"], [0, 1, 2, 3], [0, 0, 0]), world.states, {})
    world.bank.load(None, plan)
    assert world.bank.area.headers["resid_post", 0].tolist()[op.N_RECORDS] == 3
    assert world.step(*[(name, 1, 5.0) for name in "abc"]) == dict.fromkeys("abc", 25.0)


@pytest.mark.parametrize("edited", [False, True])
def test_two_observations_that_differ_in_rows_only(edited):
    world = World(on_cpu)
    lane = Lane("resid_post", (1,))
    data = [edit(1, rows=((0, -1),))] if edited else []
    world.add("r", data, [Watch(0, lane, ((5, None),)), Watch(1, lane, ((0, None),))])
    hidden = {place: torch.zeros(6, 20 if place[0] == "resid_post" else 21) for place in PLACES}
    hidden["resid_post", 1] = torch.arange(6.0)[:, None].expand(6, 20).contiguous()
    changed, rows = world.step(
        BatchView(["r"], [0, 6], [0]), hidden, torch.zeros(6, 20), torch.zeros(6, dtype=torch.int32)
    )
    want = changed["resid_post", 1]
    assert edited == (not torch.equal(want, hidden["resid_post", 1]))
    found = {r.index: r for r in rows["r"]}
    assert found[0].positions.tolist() == [5]
    assert torch.equal(found[0].values[0], want[5:])
    assert torch.equal(found[1].values[0], want)


def test_a_kept_plan_is_not_kept_over_what_changes():
    world, planner = Small(), EditPlanner()
    world.add("a", [edit(1, rows=((2, 3), (5, -1)))])
    at = [
        planner.plan(0, BatchView(["a"], [0, 1], [p]), world.states, dict) is not None
        for p in (1, 2, 3, 4, 5, 6)
    ]
    assert at == [False, True, False, False, True, True]
    kept = planner.plan(0, BatchView(["a"], [0, 1], [7]), world.states, dict)
    assert planner.plan(0, BatchView(["a"], [0, 1], [8]), world.states, dict) is kept
    assert planner.plan(1, BatchView(["a"], [0, 1], [9]), world.states, dict) is not kept
    assert planner.plan(1, BatchView(["b"], [0, 1], [9]), world.states, dict) is None


@pytest.mark.parametrize("seed", range(5))
def test_plans_that_are_kept_say_what_new_ones_would(seed):
    """Requests that intervene alike or not, in small batches of any order and place, on tables that are
    written again: the planner that keeps plans and the area that keeps words, against new ones."""
    r = random.Random(seed)
    kinds = [
        [edit(0), edit(1, rows=((3, 6), (8, -1)))],
        [edit(1, rows=((2, 5),))],
        [edit(0, rows=((0, -1),)), edit(1, gate())],  # flags of its own
    ]
    edits = EditBank(FACTS, 64, 8, 16, CPU)
    states = {
        name: edits.admit(kinds[kind], Ones(), str(kind))
        for name, kind in zip("abcde", (0, 0, 1, 1, r.choice([1, 2])), strict=True)
    }
    armed = Armed.of_edits("resid_post", [0, 1])
    kept, new = (StepArea(_area_size(armed, 8, 64, 8), CPU) for _ in range(2))
    planner, hits = EditPlanner(), 0
    for _ in range(300):
        ids = r.sample("abcdex", r.randint(1, 3))
        n = [r.choice([1, 1, 4]) for _ in ids]
        view = BatchView(ids, [0, *np.cumsum(n).tolist()], [r.choice([0, 1, 2, 7, 9, 30]) for _ in ids])
        plan = planner.plan(r.choice([0, 1]), view, states, dict)
        want = make_edit_plan(view, states, {})
        assert (plan is None) == (want is None)
        hits += plan is not None and plan in kept._packed
        for area, own in ((kept, plan), (new, want)):
            area.clear()
            area.step.zero_()
            area.load(None, own)
        assert torch.equal(kept.step, new.step)
    assert hits > 20
    assert len(planner._known) <= 64


def test_long_prompts_are_planned_anew():
    """Their tables would take megabytes, and they seldom come again."""
    edits = EditBank(FACTS, 1024, 8, 16, CPU)
    states = {"a": edits.admit([edit(0)], Ones(), "a")}
    area = StepArea(_area_size(Armed.of_edits("resid_post", [0]), 8, 1024, 8), CPU)
    planner = EditPlanner()
    for rows, kept in ((512, True), (513, False)):
        plan = planner.plan(0, BatchView(["a"], [0, rows], [0]), states, dict)
        area.load(None, plan)
        assert (plan.kept, plan in planner._known.values(), plan in area._packed) == (kept,) * 3


def test_which_steps_cannot_run_as_captured_graphs():
    """Steps that decide a condition once need the host in between, and steering of attention behind the
    attention kernel; no others do, however many requests are steered."""
    tracker = Tracker(EditBank(FACTS, 16, 8, 8, CPU))
    tracker.vectors = {name: {"p": torch.ones(20)} for name in ("a", "u")}
    hook = SimpleNamespace(tracker=tracker)
    attend = {"heads": [[0, 0]], "span": [[0, 2]], "weight": 0.5, "mass": False}
    steered = {
        "plain": edit(1), "by row": edit(1, gate(per_row=True, rows=[[0, -1]])),
        "once": edit(1, gate(rows=[[0, 4]])), "attention": {**edit(0), "atoms": [], "attend": attend},
    }  # fmt: skip
    for name, edits in steered.items():
        data = {"watch": [], "edit": {"edits": [edits], "digest": None}, "prompt": 8}
        tracker.add(name, {PAYLOAD_KEY: packed(data)}, 8)

    def need(new=(), **running):
        cached = SimpleNamespace(req_ids=[*running], num_computed_tokens=[*running.values()])
        fresh = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new]
        step = SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=fresh)
        return RunnerHook.needs(hook, step)

    assert need(new=["plain", "by row", "other"]) == ANY_GRAPH
    assert need(new=["plain", "once"]) == need(once=3) == NO_GRAPH
    assert need(once=4, plain=9) == ANY_GRAPH  # decided
    assert need(plain=9, attention=9) == PYTHON_AT_ATTENTION
    assert need(attention=9, once=2) == NO_GRAPH
    tracker.finish(["attention"])
    assert need(plain=9, attention=9) == ANY_GRAPH


class Steps:
    """A runner's hook without an engine: ``took`` what each step is told to take. Batches are laid out
    only when asked for (``laid_out``)."""

    def __init__(self):
        self.hook = object.__new__(RunnerHook)
        self.hook.tracker = Tracker(EditBank(FACTS, 16, 8, 8, CPU))
        self.hook.plans, self.hook.edit_plans, self.hook._over = Planner(), EditPlanner(), -1
        self.hook.bank = SimpleNamespace(clear=lambda: self.told.append(None), load=self._load)
        self.hook.transfer = SimpleNamespace(wait_for_buffers=lambda: None)
        self.told, self.laid_out = [], 0

    def _load(self, plan, edit_plan):
        assert edit_plan is None
        self.told.append(plan)

    def took(self, view):
        def lay_out():
            self.laid_out += 1
            return view

        active = self.hook.prepare(lay_out, eager=False)
        plan = self.told.pop()
        assert not self.told
        assert active == (plan is not None)
        return rows_of(plan)


def rows_of(plan):
    """(request, observation, position) of all rows of a plan."""
    if plan is None:
        return []
    return sorted(
        (piece.req_id, piece.watch.index, int(p))
        for lane in plan.lanes
        for piece in lane.pieces
        for p in lane.at(piece)
    )


@pytest.mark.parametrize("seed", range(40))
def test_steps_after_the_last_watched_row_take_nothing_and_all_others_what_they_should(seed):
    r = random.Random(seed)
    steps, oracle = Steps(), Tracker(EditBank(FACTS, 16, 8, 8, CPU))
    trackers = (steps.hook.tracker, oracle)
    running, number = {}, 0  # id -> [next position, prompt]
    for step in range(150):
        if len(running) < 3 and r.random() < (0.4 if step < 40 or step > 110 else 0.02):
            name, prompt = f"r{number}", r.randint(2, 9)
            number += 1
            last = [[prompt - 1, prompt]]
            rows = r.choice([last, last, [[0, prompt]], [[1, 2], [prompt + 3, prompt + 5]], [[prompt, -1]]])
            watch = {"site": "resid_post", "layers": [1], "heads": None, "reduce": None, "dtype": None}
            watched = [] if r.random() < 0.3 else [{**watch, "rows": rows, "spans": []}]
            data = {"watch": watched, "edit": None, "prompt": prompt}
            for tracker in trackers:
                tracker.add(name, {PAYLOAD_KEY: packed(data)}, prompt)
            running[name] = [0, prompt]
        for name in [*running]:
            if r.random() < 0.02:
                for tracker in trackers:
                    tracker.finish([name])
                del running[name]
            elif r.random() < 0.02 and running[name][0] > running[name][1]:  # preempted, and back again
                steps.hook.plans.sync(steps.hook.tracker.states)
                for tracker in trackers:
                    tracker.resume(name, running[name][0] + 1)
                running[name][0] = 0
        batch = [name for name in running if r.random() < 0.9]
        counts = [max(1, min(r.randint(1, 6), running[n][1] - running[n][0])) for n in batch]
        starts = [0, *np.cumsum(counts).tolist()]
        view = BatchView(batch, starts, [running[n][0] for n in batch])
        assert steps.took(view) == rows_of(make_plan(view, oracle.states))
        for name, count in zip(batch, counts, strict=True):
            running[name][0] += count


def test_a_batch_is_not_laid_out_when_nothing_will_be_asked_of_it():
    steps = Steps()
    watch = {"site": "resid_post", "layers": [1], "heads": None, "reduce": None, "dtype": None, "spans": []}
    for name in ("a", "b"):
        data = {"watch": [{**watch, "rows": [[3, 4]]}], "edit": None, "prompt": 4}
        steps.hook.tracker.add(name, {PAYLOAD_KEY: packed(data)}, 4)
    assert steps.took(BatchView(["a", "b"], [0, 4, 8], [0, 0])) == [("a", 0, 3), ("b", 0, 3)]
    assert steps.took(BatchView(["a"], [0, 1], [4])) == []  # b waits
    assert steps.took(BatchView(["a", "b"], [0, 1, 2], [5, 4])) == []
    seen = steps.laid_out
    for at in range(6, 20):
        assert steps.took(BatchView(["a", "b"], [0, 1, 2], [at, at - 1])) == []
    assert steps.laid_out == seen
    steps.hook.tracker.finish(["a"])
    assert steps.took(BatchView(["b"], [0, 1], [30])) == []
    assert steps.laid_out == seen + 1


def test_a_lane_takes_no_hash_to_another_process():
    """Text hashes to something else there."""
    lane = Lane("resid_post", (1, 2))
    assert hash(lane) == hash(Lane("resid_post", (1, 2)))
    sent = pickle.loads(pickle.dumps(lane))
    assert sent == lane
    assert "_hash" not in vars(sent)


def test_a_request_that_cannot_be_read_holds_no_slots():
    bank = EditBank(FACTS, 16, 4, 8, CPU)
    tracker = Tracker(bank)
    tracker.set_tensors("p", {"edit:a": {"vector": torch.ones(20)}})
    watch = {
        "site": "resid_post", "layers": [0], "heads": None, "reduce": ["probe", "p/gone"], "dtype": None,
        "rows": [[0, -1]], "spans": [],
    }  # fmt: skip
    data = {"watch": [watch], "edit": {"edits": [edit(0)]}, "prompt": 3}
    with pytest.raises(KeyError):
        tracker.add("r", {PAYLOAD_KEY: packed(data)}, 0)
    assert bank.used() == {"vectors": 0, "gates": 0}
    assert not tracker.states


def test_a_prompt_row_is_not_read_again_for_a_condition_after_a_resume():
    """Resumed with no token of its own, a request runs its last prompt row again: taken anew, as a row
    whose token might have been a draft; conditions have read it."""
    tracker = Tracker(EditBank(FACTS, 16, 4, 8, CPU))
    tracker.states["r"] = RequestState((), prompt=6, high=6)
    tracker.resume("r", 6)
    assert (tracker.states["r"].skip_below, tracker.states["r"].decided_below) == (5, 6)


@pytest.mark.parametrize("seed", range(25))
def test_random_worlds_run(seed):
    """All rows that were asked for come, once; the kernels are compared on the same worlds elsewhere."""
    for (view, _, rows), *_ in play(seed, [on_cpu]):
        for req_id, records in rows.items():
            assert req_id in view.req_ids
            assert all(r.values.shape[1] == len(r.positions) for r in records)
            assert len({r.index for r in records}) == len(records)


def drafting(is_async=False, adaptive=False):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        speculative_config=SimpleNamespace(enable_adaptive_verification=adaptive),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        lora_config=None,
        model_config=SimpleNamespace(runner_type="generate"),
    )


def test_drafts_with_asynchronous_scheduling_are_refused():
    config = drafting(is_async=True)
    with pytest.raises(UnsupportedError, match="speculative decoding with asynchronous scheduling"):
        settings._refuse(config)
    settings._refuse(drafting())


def test_drafts_whose_number_the_device_decides_are_refused():
    from vllm.config import SpeculativeConfig

    assert SpeculativeConfig.enable_adaptive_verification is False
    with pytest.raises(UnsupportedError, match=r"enable_adaptive_verification=True .*\(False works\)"):
        settings._refuse(drafting(adaptive=True))


def test_several_front_ends_are_refused():
    from vllm.config import ParallelConfig

    config = drafting()
    config.parallel_config = ParallelConfig(_api_process_count=2)
    with pytest.raises(UnsupportedError, match=r"api_server_count=2 \(1 works\)"):
        settings._refuse(config)
    config.parallel_config = ParallelConfig()
    settings._refuse(config)


def test_the_rust_front_end_is_refused(monkeypatch):
    from vllm import envs

    envs.disable_envs_cache()  # an engine of this process may have read them
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedError, match=r"VLLM_USE_RUST_FRONTEND=1 \(0 works\)"):
        settings._refuse(drafting())
