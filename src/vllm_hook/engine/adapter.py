"""What the adapters of vLLM's two model runners share: which methods are wrapped, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .runner import RunnerHook


class RunnerAdapter:
    """Wraps one runner instance: other engines of the process are not touched.

    ``prepare``: name of the runner's method after which the batch of a step is laid out.
    """

    prepare: str

    def __init__(self, runner: Any, hook: RunnerHook) -> None:
        self.runner = runner
        self.hook = hook
        hook.adapter = self  # type: ignore[assignment]  # subclasses describe the batch
        self._prepare_inputs = getattr(runner, self.prepare)
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        self._initialize_kv_cache = runner.initialize_kv_cache
        setattr(runner, self.prepare, self.prepare_inputs)
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens
        runner.initialize_kv_cache = self.initialize_kv_cache

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.hook.bind_kv_cache(kv_cache_config)
        return out

    def run_step(
        self,
        known_tokens: Callable[[Any], int],
        scheduler_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """One real step: our sites are active in its forward pass and nowhere else."""
        self.hook.begin(scheduler_output, known_tokens)
        self.before_step(scheduler_output)
        try:
            out = self._execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            self.hook.cancel()
            raise
        self.hook.forward_done()
        return out

    def let_go(self) -> None:
        """Keep nothing on the device alive: another cache is made, or the engine is shut down."""

    def before_step(self, scheduler_output: Any) -> None:
        """Requests are known, nothing is laid out yet."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.attach(self._sample_tokens(*args, **kwargs))
