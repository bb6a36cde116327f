"""Every private name of vLLM that this package touches, and the versions it was proven on.

An unknown version is refused by name, never guessed at: a moved method would otherwise make
observation silently wrong.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..errors import UnsupportedError

SUPPORTED_VERSIONS = ("0.32.0",)

#: (module, class, method, parameters that we rely on). Checked when an engine is configured.
SYMBOLS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("vllm.config", "VllmConfig", "compute_hash", ()),
    ("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", ()),
    ("vllm.v1.engine.llm_engine", "LLMEngine", "__init__", ("vllm_config",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM", "__init__", ("vllm_config",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM", "add_request", ("request_id", "prompt", "params")),
    ("vllm.v1.engine.input_processor", "InputProcessor", "__init__", ()),
    ("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", ("prompt", "params", "resumable")),
    ("vllm.v1.engine.output_processor", "OutputProcessor", "add_request", ("request",)),
    ("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs", ("engine_core_outputs",)),
    ("vllm.v1.engine.output_processor", "OutputProcessor", "abort_requests", ("request_ids", "internal")),
    ("vllm.v1.engine.output_processor", "RequestState", "_new_completion_output", ("finish_reason",)),
    ("vllm.v1.engine.output_processor", "RequestState", "_new_request_output", ("outputs",)),
    ("vllm.outputs", "RequestOutput", "add", ("next_output", "aggregate")),
    ("vllm.renderers.base", "BaseRenderer", "render_chat", ("conversations", "chat_params")),
    ("vllm.renderers.base", "BaseRenderer", "render_chat_async", ("conversations", "chat_params")),
    ("vllm.renderers.base", "BaseRenderer", "render_messages", ("messages", "params")),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "__init__", ()),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "update_from_output",
        ("scheduler_output", "model_runner_output"),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_computed_blocks", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_computed_blocks_for_connector", ("request",)),
    (
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        "find_longest_cache_hit",
        ("max_cache_hit_length",),
    ),
    (
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader",
        "get_all_weights",
        ("model_config", "model"),
    ),
    ("vllm.v1.worker.gpu_worker", "Worker", "load_model", ()),
    ("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model", ()),
    ("vllm.v1.worker.gpu_worker", "Worker", "shutdown", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_prepare_inputs", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "sample_tokens", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_dummy_run", ("num_tokens",)),
)


def vllm_version() -> str:
    """The version of the installed vLLM, whichever distribution it came from."""
    return str(import_module("vllm").__version__)


def check_vllm() -> None:
    """Raise :class:`UnsupportedError` naming the version or the symbols that do not fit."""
    version = vllm_version().split("+")[0]
    if version not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"vLLM {version} is not supported by this version of vLLM Hook; supported: "
            f"{', '.join(SUPPORTED_VERSIONS)}. Install one, or take vllm_hook out of additional_config"
        )
    missing = [problem for symbol in SYMBOLS if (problem := _problem(*symbol))]
    if missing:
        raise UnsupportedError(f"vLLM {version} lacks what vLLM Hook needs: {'; '.join(missing)}")


def _problem(module: str, cls: str, method: str, parameters: tuple[str, ...]) -> str | None:
    try:
        function: Any = getattr(getattr(import_module(module), cls), method)
    except (ImportError, AttributeError):
        return f"{module}.{cls}.{method}"
    function = inspect.unwrap(function)
    lost = [p for p in parameters if p not in inspect.signature(function).parameters]
    return f"{module}.{cls}.{method}({', '.join(lost)})" if lost else None
