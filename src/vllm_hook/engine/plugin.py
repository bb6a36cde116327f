"""Entry point of ``vllm.general_plugins``: runs in every process of vLLM, before anything is built.

It wraps six functions through which every engine passes. Each wrapper calls the original and then
looks whether this engine's configuration has a ``vllm_hook`` section; without one nothing else
happens. All further changes are made on the objects of a configured engine, never on classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_installed = False


def register() -> None:
    """Install the wrappers; more calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.worker_base import WorkerBase

    from . import truncate

    _after(EngineArgs, "create_engine_config", _complete)
    _after(Scheduler, "__init__", _scheduler)
    _after(WorkerBase, "__init__", _worker)
    _wrap_llm_engine(LLMEngine)
    _after(AsyncLLM, "__init__", _async_llm)
    _wrap_hash(VllmConfig)
    truncate.install(_after)


def _after(owner: type, name: str, then: Callable[[Any, Any], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        then(self, out)
        return out

    setattr(owner, name, wrapper)


def _wrap_llm_engine(engine_class: type) -> None:
    """An engine in one process hands its rows over as tensors: say so before its scheduler is made."""
    original = engine_class.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from .settings import mark_local, raw_config

        given = signature.bind(self, *args, **kwargs).arguments
        config = given["vllm_config"]
        if raw_config(config) is not None and not given.get("multiprocess_mode", False):
            mark_local(config)
        original(self, *args, **kwargs)
        if raw_config(config) is not None:
            from .control import attach_sync

            attach_sync(self)

    engine_class.__init__ = __init__  # type: ignore[misc]


def _wrap_hash(config_class: type) -> None:
    """Our part of the compile-cache key is what shapes the graph, not names of programs."""
    original = config_class.compute_hash  # type: ignore[attr-defined]

    @functools.wraps(original)
    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .settings import CONFIG_KEY, cache_factors, raw_config

        if raw_config(self) is None:
            return original(self, *args, **kwargs)
        whole = self.additional_config
        self.additional_config = {**whole, CONFIG_KEY: cache_factors(self)}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.additional_config = whole

    config_class.compute_hash = compute_hash  # type: ignore[attr-defined]


def _complete(_: Any, config: Any) -> None:
    from .settings import complete_config, raw_config

    if raw_config(config) is not None:
        from .compat import check_vllm

        check_vllm()
        complete_config(config)


def _scheduler(scheduler: Any, _: None) -> None:
    from .scheduler import hook_scheduler

    hook_scheduler(scheduler)


def _worker(worker: Any, _: None) -> None:
    """Not ``WorkerWrapperBase.init_worker``: a spawned worker loads plug-ins within that very call."""
    from .settings import raw_config

    if raw_config(worker.vllm_config) is None:
        return
    from .worker import arm_after_load

    arm_after_load(worker)


def _async_llm(engine: Any, _: None) -> None:
    from .settings import raw_config

    if raw_config(engine.vllm_config) is not None:
        from .control import attach_async

        attach_async(engine)
