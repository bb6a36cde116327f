"""Environment and shared engines. One engine serves many tests: a start costs seconds to a minute."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost ten times on busy cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes may run side by side
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
)
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

#: With a GPU the same tests run there: compiled, with CUDA graphs, on the V2 model runner.
GPU = torch.cuda.is_available()
if GPU:
    os.environ.setdefault("VLLM_FLOAT32_MATMUL_PRECISION", "highest")  # as exact as fp32 can be
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA is in use here already
    # Else the compiler picks kernels by their time, and two engines that compile apart differ in bits.
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

#: Files that take minutes each: begun first, so that no worker is left with one at the end.
LONG = ("notebooks", "compile_cache", "triton", "rerank", "readme")
LONG += ("edit_runners", "passive", "sites", "runners")

#: Arms every site of every layer for every row.
EVERY_SITE = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z")
ARM_ALL = {site: {"layers": "all", "rows": "all"} for site in (*EVERY_SITE, "final_norm", "attention")}
TINY_ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "dtype": "float32",
    "enforce_eager": True,
}


#: What replaces or joins the settings of a test's engine on a GPU.
GPU_ENGINE: dict[str, Any] = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What dies in the test dies of reference counts alone."""
    gc.disable()
    yield
    gc.enable()


def stop_engine(llm: Any) -> None:
    """Shut a ``HookLLM`` or ``vllm.LLM`` down, but not the process groups, which other engines of this
    process share."""
    engine = getattr(llm, "llm", llm).llm_engine
    with mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"):
        engine.engine_core.shutdown()
    gc.collect()


@contextmanager
def hook_llm(model: str | Path, **kwargs: Any) -> Iterator[Any]:
    """A ``HookLLM`` on a tiny model, float32 unless said otherwise; eager on a CPU."""
    from vllm_hook.llm import HookLLM

    llm = HookLLM(str(model), **{**TINY_ENGINE, **kwargs, **(GPU_ENGINE if GPU else {})})
    try:
        yield llm
    finally:
        stop_engine(llm)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands set defaults in the environment: here in a copy."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def build(
    tmp_path: Path, tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``build(command, out, ..)`` on the tiny Llama, with the command's own data or other rows."""
    from builds import run_build

    monkeypatch.chdir(tmp_path)
    return partial(run_build, tmp_path, tiny_dir("llama"))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_dir(kind)``: folder of a tiny random model, made once a session."""
    import tiny

    made: dict[str, Path] = {}

    def folder(kind: str = "llama") -> Path:
        if kind not in made:
            made[kind] = tiny.make_tiny(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from vllm_hook.demo.model import smollm2

    return smollm2(progress=False)


@pytest.fixture(scope="session")
def tiny_llama(tiny_dir: Callable[..., Path]) -> Iterator[Any]:
    """Eager fp32 engine of the tiny Llama with every site armed."""
    with hook_llm(tiny_dir("llama"), arm=ARM_ALL) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_reference(tiny_dir: Callable[..., Path]) -> Any:
    from oracle import Reference

    return Reference(tiny_dir("llama"))


@pytest.fixture
def use(tiny_llama: Any) -> Iterator[Callable[..., Any]]:
    """``use(observe, spans=..., ...)``: load a program of these observations, removed after the test."""
    loaded = []

    def load(observe: dict[str, Any], name: str = "", **more: Any) -> str:
        program = {"schema": 1, "name": name or f"test-{len(loaded)}", "observe": observe, **more}
        tiny_llama.load_program(program)
        loaded.append(program["name"])
        return program["name"]

    yield load
    for name in set(loaded):
        if name in tiny_llama.frontend.programs:
            tiny_llama.unload_program(name)
