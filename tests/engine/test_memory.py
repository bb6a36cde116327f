"""Nothing grows: resident size over 2,000 observed requests, and nothing is left when they are gone."""

import ctypes
import gc
import random
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from conftest import ARM_ALL, hook_llm

pytestmark = pytest.mark.engine

PROGRAM = {
    "schema": 1,
    "name": "watch",
    "spans": {"start": {"tokens": [0, 2]}},
    "observe": {
        "state": {"site": "resid_post", "layers": "all", "positions": "all"},
        "attention": {"site": "attention_mass", "layers": "all", "rows": "all", "keys": ["start"]},
    },
}


def resident():
    """Resident bytes of this process, without what the allocator merely keeps."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def observe(llm, count, hook="watch", seed=0):
    r = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [r.randrange(10, 500) for _ in range(r.randrange(3, 12))]} for _ in range(count)
    ]
    return llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), hook=hook, use_tqdm=False
    )


@pytest.fixture(scope="module")
def llm(tiny_dir):
    # Few KV blocks: each is touched early, so that the cache itself does not grow in resident memory.
    with hook_llm(tiny_dir("llama"), programs=[PROGRAM], arm=ARM_ALL, num_gpu_blocks_override=64) as llm:
        yield llm


def settle(llm):
    """The engine forgets a finished request with its next step; messages to workers go with a request."""
    for _ in range(2):
        observe(llm, 1, hook=False)
        gc.collect()


def parts(llm):
    engine = llm.llm.llm_engine
    core = engine.engine_core.engine_core
    return engine, core.scheduler, core.model_executor.driver_worker.worker._vllm_hook


def test_resident_size_after_2000_requests_is_that_after_200(llm):
    for i in range(15):  # plain vLLM itself grows by 4 % in its first 2,000 requests (primitive caches)
        observe(llm, 100, hook=False, seed=1000 + i)
    for i in range(2):
        assert all(not o.hook.errors for o in observe(llm, 100, seed=i))
    early = resident()
    for i in range(18):
        observe(llm, 100, seed=2 + i)
    late = resident()
    print(f"resident {early / 1e6:.0f} -> {late / 1e6:.0f} MB")
    assert late <= early * 1.02
    settle(llm)
    engine, scheduler, runner = parts(llm)
    assert runner.tracker.states == {}
    assert scheduler._vllm_hook._pending == {}
    assert engine.output_processor.request_states == {}
    assert llm.frontend._in_use.total() == 0


def test_results_and_collectors_go_with_their_outputs(llm, monkeypatch):
    from vllm_hook.engine import receive

    seen = []
    real = receive.Collector

    def recording(context, end):
        collector = real(context, end)
        seen.append(weakref.ref(collector))  # its context serves the next request that is alike
        return collector

    monkeypatch.setattr(receive, "Collector", recording)
    outs = observe(llm, 20)
    results = [weakref.ref(o.hook) for o in outs]
    assert len(seen) == 20
    assert all(r() is not None for r in results)
    del outs
    settle(llm)
    assert [r for r in results if r() is not None] == []
    assert [r for r in seen if r() is not None] == []


def test_memory_would_be_missed(llm):
    """The measure sees results that are kept: 2 % of this process is found."""
    before = resident()
    kept = torch.ones(int(before * 0.05) // 4)
    assert resident() > before * 1.02
    assert kept.numel() > 0


def test_programs_leave_no_tensors(llm, tmp_path):
    """Load, use, replace by other content, unload: the worker holds what is loaded, no more."""
    _, _, runner = parts(llm)

    def probe(value):
        save_file({"weight": torch.full((64,), value), "bias": torch.zeros(1)}, tmp_path / "p.safetensors")
        reduce = {"probe": str(tmp_path / "p.safetensors")}
        return {
            "schema": 1,
            "name": "probing",
            "observe": {"logit": {"site": "resid_post", "layers": [1], "positions": "all", "reduce": reduce}},
        }

    assert runner.tracker.tensors == {}
    values = []
    for value in (1.0, 2.0, 2.0):
        llm.load_program(probe(value))
        settle(llm)
        assert len(runner.tracker.tensors) == 1
        values.append(observe(llm, 1, hook="probing")[0].hook.observed["logit"].values)
    torch.testing.assert_close(values[1], 2 * values[0])
    assert torch.equal(values[2], values[1])
    llm.unload_program("probing")
    settle(llm)
    assert runner.tracker.tensors == {}
    assert [name for name, _ in llm.programs()] == ["watch"]


def test_running_requests_keep_the_program_they_began_with(llm, tmp_path):
    """A program replaced while a request runs: the request keeps its digest and its probe to the end."""

    def program(value):
        path = tmp_path / f"{value}.safetensors"
        save_file({"weight": torch.full((64,), value), "bias": torch.zeros(1)}, path)
        return {
            "schema": 1,
            "name": "swap",
            "observe": {
                "logit": {
                    "site": "resid_post",
                    "layers": [1],
                    "positions": "all",
                    "reduce": {"probe": str(path)},
                },
                "state": {"site": "resid_post", "layers": [1], "positions": "all", "dtype": "float32"},
            },
        }

    _, first = llm.load_program(program(1.0))
    engine = llm.llm.llm_engine
    params = llm._with_hook(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), "swap")
    engine.add_request("swapped", {"prompt_token_ids": list(range(20, 28))}, params)
    engine.step()
    engine.step()
    _, second = llm.load_program(program(3.0))
    assert first != second
    outs = []
    while engine.has_unfinished_requests():
        outs += engine.step()
    result = outs[-1].hook
    assert result.programs == [("swap", first)]
    torch.testing.assert_close(
        result.observed["logit"].values, result.observed["state"].values.sum(-1), rtol=1e-4, atol=1e-3
    )
    llm.unload_program("swap")


def test_the_model_and_our_buffers_end_with_the_engine(tiny_dir):
    """Also where somebody keeps the engine's objects, as vLLM promises it to callers in its process."""
    with hook_llm(tiny_dir("llama"), programs=[PROGRAM]) as llm:
        observe(llm, 1)
        hook = parts(llm)[2]
        kept = [weakref.ref(hook.model), weakref.ref(hook.bank), weakref.ref(hook.edits)]
        del hook
    worker = llm.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert [ref() for ref in kept] == [None, None, None]
    assert not hasattr(worker, "_vllm_hook")
