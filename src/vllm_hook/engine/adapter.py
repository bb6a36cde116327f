"""What the adapters of vLLM's two model runners share: which methods are wrapped, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .runner import RunnerHook

#: Words on the stack of a call that gets a piece of CPython's stack to itself, and leaves as many to what
#: it calls: more than half of the next power of two of 4 KB.
_ROOM = 9000


def _roomy(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with room on the interpreter's stack.

    CPython keeps the frames of Python functions in pieces of 16 KB. A call that needs a new piece maps it,
    and its return unmaps it: 8 us, each time. Where a piece ends depends on all frames above, and on how
    large they are; that of a compiled model grows with its sites. Steps that run layer by layer call the
    same functions in every layer: with 32 sites on an H200 attention was such a call, and a prompt of 64
    tokens took a tenth longer.
    """
    return call(*args, **kwargs)


_roomy.__code__ = _roomy.__code__.replace(co_stacksize=_ROOM)


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
            if scheduler_output.total_num_scheduled_tokens > len(scheduler_output.num_scheduled_tokens):
                out = _roomy(self._execute_model, scheduler_output, *args, **kwargs)
            else:  # decodes, in one graph
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
