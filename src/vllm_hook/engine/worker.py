"""Arms a worker: after the model is loaded, before its first forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from ..errors import UnsupportedError
from ..runtime.shard import Shard
from . import graph_pass
from .runner import RunnerHook
from .runner_v1 import V1Adapter
from .runner_v2 import V2Adapter
from .settings import read_settings

#: Attribute of a vLLM Worker that holds our state; absent on engines that are not configured.
WORKER_KEY = "_vllm_hook"


def arm_after_load(worker: Any) -> None:
    """A worker of a configured engine was made: arm it when its model is loaded, and answer our calls."""
    load_model = worker.load_model

    def load_and_arm(*args: Any, **kwargs: Any) -> Any:
        graph_pass.install(worker.vllm_config)
        out = load_model(*args, **kwargs)
        _arm(worker)
        return out

    def call(method: str, *args: Any) -> Any:
        return rpc(worker, method, *args)

    worker.load_model = load_and_arm
    worker.vllm_hook_rpc = call


def _arm(worker: Any) -> None:
    """Buffers are allocated here, so that vLLM's memory profile sees them."""
    settings = read_settings(worker.vllm_config)
    if settings is None or hasattr(worker, WORKER_KEY):
        return
    runner = worker.model_runner
    if runner.device.type == "cuda" and not worker.use_v2_model_runner and not _eager(worker.vllm_config):
        raise UnsupportedError(
            "vLLM Hook does not support the V1 model runner with CUDA graphs; use enforce_eager=True, or a "
            "set-up that runs on V2 (VLLM_USE_V2_MODEL_RUNNER=1)"
        )
    hook = RunnerHook(settings, runner.get_model(), worker.model_config.dtype, runner.device, tensor_shard())
    (V2Adapter if worker.use_v2_model_runner else V1Adapter)(runner, hook)
    setattr(worker, WORKER_KEY, hook)
    warm_up, shut_down = worker.compile_or_warm_up_model, worker.shutdown

    def compile_or_warm_up_model() -> Any:
        """Every armed op must fire in a forward pass as the engine will run it."""
        times = warm_up()
        hook.prove(lambda: runner._dummy_run(1))
        return times

    def shutdown() -> None:
        if hasattr(worker, WORKER_KEY):
            delattr(worker, WORKER_KEY)
            hook.close()
        shut_down()

    worker.compile_or_warm_up_model = compile_or_warm_up_model
    worker.shutdown = shutdown


def _eager(config: Any) -> bool:
    return bool(config.model_config.enforce_eager)


def tensor_shard() -> Shard:
    """This rank under tensor parallelism."""
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return Shard()

    def join(x: Tensor, kv_heads: int | None) -> Tensor:
        """[..., local heads, d] -> [..., heads, d]; of KV heads held by several ranks, one copy each."""
        whole: Tensor = tensor_model_parallel_all_gather(x.contiguous(), dim=-2)
        if kv_heads is None or kv_heads >= size:
            return whole
        return whole[..., :: size // kv_heads, :]

    return Shard(get_tensor_model_parallel_rank(), size, join, tensor_model_parallel_all_reduce)


def rpc(worker: Any, method: str, *args: Any) -> Any:
    """Entry of ``collective_rpc("vllm_hook_rpc", args=(method, ...))``."""
    hook: RunnerHook | None = getattr(worker, WORKER_KEY, None)
    if hook is None:
        return None
    if method == "status":
        return hook.status()
    if method == "set_tensors":
        return hook.set_tensors(*args)
    raise ValueError(f"unknown method {method!r}")
