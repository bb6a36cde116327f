"""Vector slots: shared by content, given back, refused at admission when full."""

import gc
import random

import pytest
import torch

from conftest import hook_llm
from editing import Tensors, compare
from prompts import greedy, token_prompts
from vllm_hook.errors import CapacityError

pytestmark = pytest.mark.engine

SLOTS, VECTORS = 64, 264


def adding(name, vector, **more):
    edit = {"site": "resid_post", "layers": [1], "method": "add", "vector": vector, "strength": 1.0}
    return {"schema": 1, "name": name, "intervene": {"e": {**edit, **more}}}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    tensors = Tensors(tmp_path_factory.mktemp("vectors"), 64, 32)
    g = torch.Generator().manual_seed(5)
    tensors.put("many", {f"v{i}": torch.randn(64, generator=g) * 2 for i in range(VECTORS)})
    return tensors


@pytest.fixture(scope="module")
def llm(tiny_dir, tensors):
    programs = [adding(f"p{i}", tensors.ref(f"v{i}", "many")) for i in range(VECTORS)]
    gated = adding(
        "gated", tensors.ref("v0", "many"), positions="generated", when={"observe": "c", "above": 0.0}
    )
    gated["observe"] = {
        "c": {
            "site": "resid_post",
            "layers": [0],
            "positions": "last_prompt",
            "reduce": {"projection": tensors.ref("v1", "many")},
        }
    }
    with hook_llm(tiny_dir("llama"), programs=[*programs, gated], max_num_seqs=SLOTS) as llm:
        yield llm


def slots(llm):
    """Slots in use once the worker has heard of the last finish, with the next step."""
    gc.collect()
    llm.generate([{"prompt_token_ids": [3, 4]}], greedy(1), hook=False, use_tqdm=False)
    return llm.llm.llm_engine.collective_rpc("vllm_hook_rpc", args=("status",))[0]["slots"]


@pytest.fixture(autouse=True)
def nothing_left(llm):
    yield
    assert slots(llm) == {"vectors": 0, "gates": 0}
    assert not llm.frontend._vectors


def finish(llm, at=None, ids=()):
    """Step until all are done; abort ``ids`` after step ``at``."""
    engine, done, step = llm.llm.llm_engine, {}, 0
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        step += 1
        if step == at:
            engine.abort_request(list(ids))
    return done


def test_ten_thousand_strengths_over_64_vectors(llm, tiny_reference, tensors):
    """Scalars take no slot: no refusal, no growth, nothing left, and each has its own vector and strength."""
    r = random.Random(0)
    sizes, prompts = set(), [{"prompt_token_ids": [10 + i % 400, 20, 30]} for i in range(500)]
    plain = llm.generate(prompts, greedy(1), hook=False, use_tqdm=False)
    served = judged = changed = 0
    for round in range(20):
        vectors = r.sample(range(VECTORS), SLOTS)  # other ones each time, 64 at once
        hooks = [
            {"use": [f"p{vectors[i % SLOTS]}"], "set": {"e.strength": r.uniform(-4, 4)}} for i in range(500)
        ]
        outs = llm.generate(prompts, greedy(1), hook=hooks, use_tqdm=False)
        assert not any(o.hook.errors for o in outs)
        for i in r.sample(range(500), 10):
            vector, strength = vectors[i % SLOTS], hooks[i]["set"]["e.strength"]
            program = adding(hooks[i]["use"][0], tensors.ref(f"v{vector}", "many"), strength=strength)
            figure = compare(tiny_reference, outs[i], [program], tensors)
            assert figure["wrong"] is None, hooks[i]
            judged += figure["equal"]
            changed += outs[i].outputs[0].token_ids != plain[i].outputs[0].token_ids
        served += len(outs)
        del outs
        if round % 5 == 4:
            assert slots(llm) == {"vectors": 0, "gates": 0}
            sizes.add(llm.sites()["bytes"])
    assert len(sizes) == 1
    assert served == 10_000
    assert judged >= 190  # of 200; a near tie says nothing
    assert changed >= 100  # of 200: weak strengths leave the token as it is


def test_results_that_are_kept_hold_no_slot(llm):
    kept = []
    for i in range(0, 3 * SLOTS, 8):
        hooks = [f"p{i + j}" for j in range(8)]
        kept += llm.generate(token_prompts([4] * 8), greedy(1), hook=hooks, use_tqdm=False)
    assert len(kept) == 3 * SLOTS


def test_two_hundred_distinct_vectors_at_once(llm, tiny_reference, tensors):
    """64 are served; the others are refused with the numbers, and harm nobody."""
    engine, prompts, refused = llm.llm.llm_engine, token_prompts([5] * 200, seed=3), []
    for i, prompt in enumerate(prompts):
        try:
            engine.add_request(f"v-{i}", prompt, llm._with_hook(greedy(3), f"p{i}"))
        except CapacityError as error:
            refused.append((i, str(error)))
    assert [i for i, _ in refused] == list(range(SLOTS, 200))
    assert all("needs 1 more vector slots; 0 of 64 are free" in message for _, message in refused)
    engine.add_request(
        "shared", prompts[0], llm._with_hook(greedy(3), {"use": ["p7"], "set": {"e.strength": 2.0}})
    )
    engine.add_request("plain", prompts[0], llm._with_hook(greedy(3), False))
    done = finish(llm)
    assert len(done) == SLOTS + 2
    for i in range(SLOTS):
        program = adding(f"p{i}", tensors.ref(f"v{i}", "many"))
        figure = compare(tiny_reference, done[f"v-{i}"], [program], tensors)
        assert figure["wrong"] is None
        assert figure["errors"] == {}
    program = adding("p7", tensors.ref("v7", "many"), strength=2.0)
    assert compare(tiny_reference, done["shared"], [program], tensors)["wrong"] is None
    assert compare(tiny_reference, done["plain"], [], tensors)["wrong"] is None
    # Once they are done there is room again.
    out = llm.generate(prompts[:1], greedy(3), hook="p199", use_tqdm=False)[0]
    assert (
        compare(tiny_reference, out, [adding("p199", tensors.ref("v199", "many"))], tensors)["wrong"] is None
    )


def test_one_request_that_needs_more_than_there_are(llm):
    use = [f"p{i}" for i in range(SLOTS + 1)]
    with pytest.raises(CapacityError, match="needs 65 more vector slots; 64 of 64 are free"):
        llm.generate(token_prompts([4]), greedy(1), hook={"use": use}, use_tqdm=False)


def test_abort_gives_slots_back(llm):
    engine = llm.llm.llm_engine
    for i, prompt in enumerate(token_prompts([5] * (SLOTS - 1), seed=4)):  # the condition takes one
        engine.add_request(f"a-{i}", prompt, llm._with_hook(greedy(20), "gated" if i == 0 else f"p{i}"))
    done = finish(llm, at=3, ids=[f"a-{i}" for i in range(0, SLOTS, 2)])
    assert len([o for o in done.values() if o.outputs[0].finish_reason != "abort"]) == SLOTS // 2 - 1


def test_abort_before_the_first_step(llm):
    engine = llm.llm.llm_engine
    for i, prompt in enumerate(token_prompts([5] * 8, seed=4)):
        engine.add_request(f"w-{i}", prompt, llm._with_hook(greedy(2), f"p{i}"))
    assert len(llm.frontend._vectors) == 8
    engine.abort_request([f"w-{i}" for i in range(8)])
    done = finish(llm)
    assert {o.outputs[0].finish_reason for o in done.values()} <= {"abort"}
    assert not any(o.outputs[0].token_ids for o in done.values())
    del done
    assert slots(llm) == {"vectors": 0, "gates": 0}
    assert len(llm.frontend._vectors) == 0


def test_abort_while_waiting(llm, tiny_reference, tensors):
    """More requests than run at once; some are aborted before their turn, and the others get it."""
    engine, scheduler = llm.llm.llm_engine, llm.llm.llm_engine.engine_core.engine_core.scheduler
    prompts = token_prompts([5] * (SLOTS + 8), seed=4)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"w-{i}", prompt, llm._with_hook(greedy(4), f"p{i % 16}"))
    engine.step()
    waiting = {request.request_id.partition("-")[2].partition("-")[0] for request in scheduler.waiting}
    aborted = {i for i in range(SLOTS + 8) if i % 2 and str(i) in waiting}
    assert len(aborted) >= 4
    engine.abort_request([f"w-{i}" for i in aborted])
    done = finish(llm)
    complete = {name: o for name, o in done.items() if o.outputs[0].finish_reason != "abort"}
    assert set(complete) == {f"w-{i}" for i in range(SLOTS + 8) if i not in aborted}
    for name, out in complete.items():
        number = int(name.partition("-")[2]) % 16
        program = adding(f"p{number}", tensors.ref(f"v{number}", "many"))
        figure = compare(tiny_reference, out, [program], tensors)
        assert (figure["wrong"], figure["errors"], len(figure["tokens"])) == (None, {}, 4)
    del done, complete, out
    assert slots(llm) == {"vectors": 0, "gates": 0}


def test_preemption_gives_slots_back(llm, tiny_reference, tensors):
    """Preempted requests keep their vectors for their return, and give them back at the end."""
    scheduler = llm.llm.llm_engine.engine_core.engine_core.scheduler
    llm.reset_prefix_cache()
    pool, times = scheduler.kv_cache_manager.block_pool, []
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 14)
    original = scheduler._preempt_request

    def counting(request, *args, **kwargs):
        times.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = counting
    try:
        names = [f"p{i}" for i in range(8)]
        outs = llm.generate(token_prompts([30] * 8, seed=8), greedy(40), hook=names, use_tqdm=False)
    finally:
        scheduler._preempt_request = original
        pool.free_blocks(held)
    assert times
    for i, out in enumerate(outs):
        program = adding(f"p{i}", tensors.ref(f"v{i}", "many"))
        assert compare(tiny_reference, out, [program], tensors)["wrong"] is None
