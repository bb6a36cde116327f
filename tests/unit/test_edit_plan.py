"""Interventions of a step -> tables, against brute force: which row gets which edits in which order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_hook.errors import CapacityError
from vllm_hook.ops import edit as op
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.edit_limits import CONDITIONS_A_ROW
from vllm_hook.runtime.edit_plan import EditPlan, make_edit_plan
from vllm_hook.runtime.edit_state import EditState, Slots
from vllm_hook.runtime.plan import BatchView
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("tiny", layers=4, heads=4, kv_heads=2, head_dim=8, hidden=16)
PLACES = [("resid_post", layer) for layer in range(4)]
ROWS = 48


class Vectors:
    def vector(self, digest: str) -> torch.Tensor:
        return torch.full((16,), float(digest))


def bank(requests: int = 4, rows: int = ROWS, slots: int = 16) -> EditBank:
    return EditBank(FACTS, rows, requests, slots, torch.device("cpu"))


def edit(strength: float = 1.0, vector: str = "1", **more: Any) -> dict[str, Any]:
    atom = [0, vector, vector, 0, False, 0, strength, 0.0, 0.0, 0.0]
    plain = {
        "site": "resid_post",
        "layers": [1],
        "rows": [[0, -1]],
        "filters": [],
        "gate": None,
        "attend": None,
    }
    return {**plain, "atoms": [atom], **more}


def gate(rows: list[list[int]], **more: Any) -> dict[str, Any]:
    plain = {
        "site": "resid_post",
        "layer": 0,
        "kind": 2,
        "u": "1",
        "c": 0.0,
        "bound": 1.0,
        "above": True,
        "over": 0,
    }
    return {**plain, "per_row": False, "count": 4, "rows": rows, "filter": None, **more}


def load(b: EditBank, plan: EditPlan, tokens: torch.Tensor, rows: int = ROWS) -> StepArea:
    """The step's tables, packed for all places."""
    size = AreaSize(dict.fromkeys(PLACES, rows), frozenset(PLACES), 64, 64)
    area = StepArea(size, torch.device("cpu"))
    b.load(plan, tokens)
    area.load(None, plan)
    return area


def tables(area: StepArea, place: tuple[str, int]) -> dict[int, list[float]]:
    """Row -> strengths of its edits in order, read from the tables as the kernel reads them."""
    step = area.step
    at, n, *_ = area.headers[place].tolist()
    found: dict[int, list[float]] = {}
    for i in range(at, at + n * op.RECORD_SIZE, op.RECORD_SIZE):
        row, first, count = (int(step[i + part]) for part in (op.ROW, op.ENTRIES, op.N_ENTRIES))
        assert row not in found
        found[row] = [float(step[first + e * op.ENTRY_SIZE + op.A].view(torch.float32)) for e in range(count)]
    return found


ranges = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.just(-1), st.integers(1, 12))).map(
        lambda r: [r[0], -1 if r[1] < 0 else r[0] + r[1]]
    ),
    max_size=3,
)
requests = st.lists(
    st.lists(st.tuples(ranges, st.sets(st.integers(0, 3), min_size=1)), max_size=4), min_size=1, max_size=4
)


def within(position: int, rows: list[list[int]]) -> bool:
    return any(a <= position and (b < 0 or position < b) for a, b in rows)


@settings(max_examples=80, deadline=None)
@given(requests, st.integers(0, 10_000))
def test_any_requests_and_chunks_against_brute_force(asked: list[Any], seed: int) -> None:
    r = random.Random(seed)
    b = bank()
    numbers = iter(range(1, 1000))
    data = [
        [edit(float(next(numbers)), rows=rows, layers=sorted(layers)) for rows, layers in edits]
        for edits in asked
    ]
    states: dict[str, EditState] = {f"r{i}": b.admit(edits, Vectors()) for i, edits in enumerate(data)}
    lengths = [r.randint(1, 12) for _ in asked]
    first = [r.randint(0, 25) for _ in asked]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    plan = make_edit_plan(BatchView([*states], starts, first), states, {})
    ids = torch.zeros(ROWS, dtype=torch.int32)
    area = (
        load(b, plan, ids)
        if plan is not None
        else StepArea(AreaSize(dict.fromkeys(PLACES, 1), frozenset(), 0, 0), torch.device("cpu"))
    )
    for place in PLACES:
        want: dict[int, list[float]] = {}
        for i, edits in enumerate(data):
            for offset in range(lengths[i]):
                mine = [
                    e["atoms"][0][6]
                    for e in edits
                    if place[1] in e["layers"] and within(first[i] + offset, e["rows"])
                ]
                if mine:
                    want[starts[i] + offset] = mine
        assert tables(area, place) == want
    for state in states.values():
        b.release(state)
    assert b.used() == {"vectors": 0, "gates": 0}


def step(
    b: EditBank, data: list[dict[str, Any]], rows: int, tokens: list[int] | None = None, first: int = 0
) -> Any:
    state = b.admit(data, Vectors())
    plan = make_edit_plan(BatchView(["r"], [0, rows], [first]), {"r": state}, {})
    assert plan is not None
    return plan, load(b, plan, torch.tensor(tokens or [0] * rows, dtype=torch.int32), rows)


def test_many_pieces_with_the_same_edits_are_one_chain() -> None:
    """A selector by token id cuts a long prompt into many pieces; tables must not grow with them."""
    b = bank(requests=1, rows=200)
    plan, area = step(b, [edit(rows=[[i, i + 1] for i in range(0, 200, 2)])], 200)
    assert len(plan.chain_start) == 2
    assert tables(area, ("resid_post", 1)) == {i: [1.0] for i in range(0, 200, 2)}


def test_edits_that_share_a_condition_share_its_flag() -> None:
    b = bank(requests=1, rows=8)
    same = gate([[0, 8]])
    plan, _ = step(b, [edit(gate=same, rows=[[7, -1]]), edit(2.0, gate=same, layers=[2], rows=[[7, -1]])], 8)
    assert b.used()["gates"] == 1
    assert len(plan.cond_int) == 1


def test_several_conditions_read_every_row_of_a_full_step() -> None:
    b = bank(requests=1, rows=8)
    many = [edit(gate=gate([[0, 8]], bound=float(i)), rows=[[7, -1]]) for i in range(CONDITIONS_A_ROW)]
    _, area = step(b, many, 8)
    _, _, at, n = area.headers["resid_post", 0].tolist()[:4]
    conditions = area.step[at : at + n].tolist()
    read = [area.step[c + op.ROWS : c + op.N_ROWS + 1].tolist() for c in conditions]
    assert [area.step[a : a + rows].tolist() for a, rows in read] == [[*range(8)]] * CONDITIONS_A_ROW


def test_tables_beyond_what_is_reserved_are_refused() -> None:
    b = bank(requests=1, rows=8)
    state = b.admit([edit()], Vectors())
    plan = make_edit_plan(BatchView(["r"], [0, 8], [0]), {"r": state}, {})
    area = StepArea(AreaSize({("resid_post", 1): 4}, frozenset(), 1, 0), torch.device("cpu"))
    with pytest.raises(CapacityError, match="128 words of tables, 100 are reserved"):
        area.load(None, plan)


def test_conditions_below_what_was_seen_are_not_read_again() -> None:
    b = bank()
    state = b.admit([edit(gate=gate([[0, 6]], over=2), rows=[[5, -1]])], Vectors())
    for seen, want in ((0, [0, 1, 2, 3]), (2, [2, 3]), (9, [])):
        plan = make_edit_plan(BatchView(["r"], [0, 4], [0]), {"r": state}, {"r": seen})
        assert (plan.cond_tables[0][0].tolist() if plan is not None else []) == want


def test_token_filters_of_an_edit_and_of_its_condition_both_hold() -> None:
    b = bank()
    mine = {"token_ids": [1, 2], "sure": [[0, 1]]}
    condition = gate([[0, -1]], per_row=True, filter={"token_ids": [2, 3], "sure": [[0, 2]]})
    plan, _ = step(
        b, [edit(gate=condition, filters=[mine, condition["filter"]])], 6, tokens=[9, 1, 2, 3, 1, 2]
    )
    flag = plan.token_rows[0][0]
    assert b.state["stream"].row_flags[flag, :6].tolist() == [1, 1, 1, 0, 0, 1]


def test_slots_are_shared_counted_and_refused_when_full() -> None:
    slots = Slots(2, "vectors")
    a, new = slots.take("a")
    assert new
    assert slots.take("a") == (a, False)
    b, _ = slots.take("b")
    assert {a, b} == {0, 1}
    with pytest.raises(CapacityError, match="all 2 slots for vectors"):
        slots.take("c")
    slots.give_back("a")
    assert slots.used == 2
    slots.give_back("a")
    assert slots.used == 1
    assert slots.take("c") == (a, True)


def test_a_request_that_is_too_much_leaves_nothing_behind() -> None:
    b = bank(slots=3)
    kept = b.admit([edit(vector="1"), edit(vector="2")], Vectors())
    with pytest.raises(CapacityError):  # the worker has room for twice what the front end lets in
        b.admit([edit(vector=v, gate=gate([[0, 4]])) for v in "2345678"], Vectors())
    assert b.used() == {"vectors": 2, "gates": 0}
    b.release(kept)
    b.release(kept)  # twice does no harm
    assert b.used() == {"vectors": 0, "gates": 0}


def test_a_slot_that_could_not_be_filled_is_filled_by_the_next() -> None:
    """Its number may have held another vector."""
    b, known = bank(slots=1), {v: torch.full((16,), float(v)) for v in "123"}

    class Source:
        def vector(self, digest: str) -> torch.Tensor:
            return known[digest]

    for v in "12":
        b.release(b.admit([edit(vector=v)], Source(), v))
    for wrong in (None, torch.ones(3)):
        if wrong is not None:
            known["4"] = wrong
        with pytest.raises((KeyError, RuntimeError)):
            b.admit([edit(vector="3"), edit(vector="4")], Source(), "34")
        with pytest.raises((KeyError, RuntimeError)):
            b.admit([edit(vector="4")], Source(), "4")
        assert b.used()["vectors"] == 0
    known["4"] = torch.full((16,), 4.0)
    for v in "4321":
        state = b.admit([edit(vector=v)], Source(), v)
        assert b.state["stream"].bank[state.taken[0][2]].tolist() == [float(v)] * 16
        b.release(state)


def test_requests_that_intervene_alike_share_what_is_worked_out() -> None:
    b = bank(slots=3)
    alike = [b.admit([edit(vector="1")], Vectors(), "a") for _ in range(3)]
    other = b.admit([edit(vector="2")], Vectors(), "b")
    assert alike[0] is alike[1] is alike[2] is not other
    assert b.used() == {"vectors": 2, "gates": 0}
    for left in (1, 1, 0):
        b.release(alike[0])
        assert b.used()["vectors"] == 1 + left
    again = b.admit([edit(vector="1")], Vectors(), "a")
    assert again is alike[0]  # nobody has needed its slot since
    assert b.used()["vectors"] == 2
    b.release(again)
    assert b.used()["vectors"] == 1
    new = b.admit([edit(vector=v) for v in "345678"[: b.vector_slots["stream"].capacity - 1]], Vectors())
    b.release(new)
    again = b.admit([edit(vector="1")], Vectors(), "a")
    assert again is not alike[0]  # its slot was another's
    slot = again.taken[0][2]
    assert torch.equal(b.state["stream"].bank[slot], Vectors().vector("1"))
    b.release(again)
    b.release(other)
    assert b.used() == {"vectors": 0, "gates": 0}
    flagged = [edit(gate=gate([[0, 6]], over=2), rows=[[5, -1]])]
    first, second = (b.admit(flagged, Vectors(), "c") for _ in range(2))
    assert first.gates[0].flag != second.gates[0].flag  # a condition is one request's own


def test_requests_that_intervene_alike_share_one_chain_and_others_do_not() -> None:
    b = bank(requests=8)
    alike = {name: b.admit([edit(vector="1")], Vectors(), "a") for name in "pq"}
    states = {**alike, "r": b.admit([edit(2.0, vector="1")], Vectors(), "b")}
    plan = make_edit_plan(BatchView([*"prq"], [0, 1, 2, 3], [4, 5, 6]), states, {})
    assert plan is not None
    assert plan.entry_float[:, 0].tolist() == [1.0, 2.0]
    [(rows, chains)] = plan.tables
    assert (rows.tolist(), chains.tolist()) == ([0, 1, 2], [0, 1, 0])


def test_states_of_ended_requests_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_hook.runtime.edit_bank.STATES_KEPT", 2)
    b = bank(slots=3)
    running = b.admit([edit(vector="1")], Vectors(), "a")
    for digest in "bcd":
        b.release(b.admit([edit(vector="1", rows=[[0, ord(digest)]])], Vectors(), digest))
    assert list(b._shared) == ["a", "d"]
    assert b.admit([edit(vector="1")], Vectors(), "a") is running


@pytest.mark.parametrize("keep", [False, True])
@settings(max_examples=200, deadline=None)
@example(events=[(True, 0), (True, 1), (False, 0), (True, 0), *[(True, key) for key in (2, 3, 4, 5)]])
@given(events=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_slots_against_a_multiset(keep: bool, events: list[tuple[bool, int]]) -> None:
    slots, held = Slots(6, "vectors", keep), []
    holds: dict[int, int] = {}  # what a slot was filled with last
    for take, key in events:
        if take:
            if len({*held, key}) > 6:
                with pytest.raises(CapacityError):
                    slots.take(key)
            else:
                slot, new = slots.take(key)
                assert new or holds[slot] == key
                assert keep or new == (key not in held)
                assert not (new and key in held)
                holds[slot] = key
                held.append(key)
        elif key in held:
            held.remove(key)
            slots.give_back(key)
        assert slots.used == len(set(held))
