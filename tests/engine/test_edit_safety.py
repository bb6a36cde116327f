"""What must not go wrong silently: gates set before their first row, failures of a worker, values that
overflow, limits that are checked where a request is made."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from conftest import hook_llm
from vllm_hook import CapacityError, ProgramError, UnsupportedError

pytestmark = pytest.mark.engine
STREAM = {"site": "resid_post", "layers": [2]}
GATE = {"site": "resid_post", "layers": [0], "positions": "last_prompt"}
ATTEND = {"site": "attention", "heads": [[1, 0]], "method": "attend", "rows": "all"}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("vectors") / "v.safetensors"
    save_file({"v": torch.randn(64), "w": torch.randn(64)}, file)
    return str(file)


@pytest.fixture(scope="module")
def llm(tiny_dir, vectors):
    arm = {site: {"layers": "all"} for site in ("embed", "resid_pre", "resid_post")}
    attends = {"schema": 1, "name": "attends", "spans": {"s": {"tokens": [1, 4]}}}
    attends["intervene"] = {"a": {**ATTEND, "keys": ["s"], "weight": 2.0}}
    with hook_llm(tiny_dir("llama"), programs=[attends], arm=arm, max_num_batched_tokens=32) as engine:
        yield engine


def prompt(n, seed=0):
    r = random.Random(seed)
    return {"prompt_token_ids": [r.randrange(10, 500) for _ in range(n)]}


def run(llm, prompts, hook):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    return llm.generate(prompts, params, hook=hook, use_tqdm=False)


def same(a, b):
    a, b = a.outputs[0], b.outputs[0]
    return (list(a.token_ids), a.cumulative_logprob) == (list(b.token_ids), b.cumulative_logprob)


def gated(vectors, name, **when):
    edit = {**STREAM, "method": "add", "vector": f"{vectors}#v", "strength": 5.0}
    edit |= {"positions": ["last_prompt", "generated"], "when": {"observe": "c", **when}}
    observe = {"c": {**GATE, "reduce": {"projection": f"{vectors}#w"}}}
    return {"schema": 1, "name": name, "observe": observe, "intervene": {"e": edit}}


def test_a_gate_is_set_before_a_first_chunk_without_edited_rows(llm, vectors):
    llm.load_program(gated(vectors, "open", above=-1e8))
    llm.load_program(gated(vectors, "shut", above=1e8))
    llm.load_program(gated(vectors, "all-open", above=-1e8, over="all"))
    long = prompt(100)  # four chunks; only the last holds a row of condition or edit
    llm.reset_prefix_cache()
    plain = run(llm, [long], False)[0]
    opened = run(llm, [prompt(20, 1)], "open")[0]  # leaves its flag slot open
    assert not opened.hook.errors
    llm.reset_prefix_cache()
    assert same(run(llm, [long], "shut")[0], plain)
    for name in ("open", "all-open"):
        llm.reset_prefix_cache()
        assert not same(run(llm, [long], name)[0], plain)


def test_what_a_failed_edit_left_in_the_prefix_cache_is_not_used(llm, vectors, monkeypatch):
    edit = {**STREAM, "layers": [1], "method": "add", "vector": f"{vectors}#v", "strength": 5.0}
    llm.load_program({"schema": 1, "name": "steer", "intervene": {"e": edit}})
    wanted = prompt(70, 2)
    llm.reset_prefix_cache()
    right = run(llm, [wanted], "steer")[0]
    llm.reset_prefix_cache()
    hook = llm.llm.llm_engine.model_executor.driver_worker.worker._vllm_hook
    with monkeypatch.context() as broken:
        broken.setattr(
            hook.edits, "load", lambda *a: (_ for _ in ()).throw(RuntimeError("broken on purpose"))
        )
        failed = run(llm, [wanted], "steer")[0]
    assert "broken on purpose" in failed.hook.errors["steer"]
    again = run(llm, [wanted], "steer")[0]
    assert (again.num_cached_tokens, again.hook.errors) == (0, {})
    assert list(again.outputs[0].token_ids) == list(right.outputs[0].token_ids)


@pytest.mark.parametrize("strength", [1e39, 1e12, -1e30])
def test_a_strength_that_could_overflow_is_refused(llm, vectors, strength):
    edit = {**STREAM, "method": "add", "vector": f"{vectors}#v"}
    with pytest.raises(ProgramError, match=r"intervene\.e.*limit is 1e\+09"):
        llm.load_program({"schema": 1, "name": "huge", "intervene": {"e": {**edit, "strength": strength}}})
    llm.load_program({"schema": 1, "name": "sane", "intervene": {"e": edit}})
    with pytest.raises(ProgramError, match=r"intervene\.e.*limit is 1e\+09"):
        run(llm, [prompt(5)], {"use": ["sane"], "set": {"e.strength": strength}})
    assert not run(llm, [prompt(5)], "sane")[0].hook.errors


def test_attend_weights_and_overlaps_are_refused(llm):
    with pytest.raises(ProgramError, match="weight"):
        run(llm, [prompt(8)], {"use": ["attends"], "set": {"a.weight": 1e300}})
    two = {"schema": 1, "name": "two", "spans": {"s": {"tokens": [1, 4]}, "t": {"tokens": [3, 6]}}}
    two["intervene"] = {n: {**ATTEND, "keys": [n], "weight": 2.0} for n in ("s", "t")}
    llm.load_program(two)
    with pytest.raises(ProgramError, match="two attend edits of head"):
        run(llm, [prompt(8)], "two")
    union = {**two, "name": "union", "intervene": {"a": {**ATTEND, "keys": ["s", "t"], "weight": 2.0}}}
    whole = {**union, "name": "whole", "spans": {"s": {"tokens": [1, 6]}, "t": {"tokens": [1, 2]}}}
    llm.load_program(union)
    llm.load_program(whole)
    a, b = (run(llm, [prompt(30, 3)], name)[0] for name in ("union", "whole"))
    assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
    assert a.outputs[0].cumulative_logprob == pytest.approx(b.outputs[0].cumulative_logprob, abs=1e-4)


def test_limits_are_checked_at_admission(llm, vectors):
    edit = {**STREAM, "method": "add", "vector": f"{vectors}#v"}
    many = {f"e{i}": {**edit, "positions": {"token_ids": [i]}} for i in range(65)}
    llm.load_program({"schema": 1, "name": "many-rows", "intervene": many})
    with pytest.raises(CapacityError, match="65"):
        run(llm, [prompt(8)], "many-rows")
    reduce = {"projection": f"{vectors}#w"}
    observe = {f"c{i}": {**GATE, "layers": [i % 2], "reduce": reduce} for i in range(9)}
    gates = {
        f"e{i}": {**edit, "positions": "generated", "when": {"observe": f"c{i}", "above": float(i)}}
        for i in range(9)
    }
    llm.load_program({"schema": 1, "name": "many-gates", "observe": observe, "intervene": gates})
    with pytest.raises(CapacityError, match="limit is"):
        run(llm, [prompt(8)], "many-gates")
    assert run(llm, [prompt(8)], False)[0].outputs[0].token_ids


def test_set_and_spans_without_a_program_are_refused(llm):
    for spec in ({"set": {"e.strength": 1.0}}, {"spans": {"s": [0, 1]}}):
        params = SamplingParams(max_tokens=1, extra_args={"hook": {"use": [], **spec}})
        with pytest.raises(ProgramError, match="no program is in use"):
            llm.llm.generate([prompt(5)], params, use_tqdm=False)


def test_fields_that_are_not_available_and_numbers_out_of_range_name_the_field(llm, vectors):
    before = {"schema": 1, "name": "b", "observe": {"h": {**STREAM, "positions": "all", "before": True}}}
    with pytest.raises(
        UnsupportedError, match=r"observe\.h\.before: .* rows are read after the edits at their site"
    ):
        llm.load_program(before)
    big = {"schema": 1, "name": "t", "observe": {"h": {**STREAM, "positions": {"token_ids": [2**70]}}}}
    with pytest.raises(ProgramError, match=r"observe\.h\.positions"):
        llm.load_program(big)


def test_the_embedding_is_read_before_the_first_blocks_edits(llm, vectors):
    edit = {"site": "resid_pre", "layers": [0], "method": "add", "vector": f"{vectors}#v", "strength": 3.0}
    sites = {s: {"site": s, "positions": "all"} for s in ("embed",)} | {
        "pre": {"site": "resid_pre", "layers": [0], "positions": "all"}
    }
    llm.load_program({"schema": 1, "name": "look", "observe": sites})
    llm.load_program({"schema": 1, "name": "pre", "intervene": {"e": edit}})
    plain = run(llm, [prompt(9)], "look")[0].hook.observed
    edited = run(llm, [prompt(9)], {"use": ["look", "pre"]})[0].hook.observed
    assert torch.equal(edited["embed"].values[:, :9], plain["embed"].values[:, :9])
    assert not torch.equal(edited["look/pre"].values[:, :9], plain["pre"].values[:, :9])
