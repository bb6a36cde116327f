"""The V1 model runner (the CPU build's default)."""

from __future__ import annotations

from typing import Any

from ..runtime.plan import BatchView
from .runner import RunnerHook


class V1Adapter:
    """Wraps one runner instance: other engines of the process are not touched."""

    def __init__(self, runner: Any, hook: RunnerHook) -> None:
        self.runner = runner
        self.hook = hook
        hook.adapter = self
        self._prepare_inputs = runner._prepare_inputs
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        self._initialize_kv_cache = runner.initialize_kv_cache
        runner._prepare_inputs = self.prepare_inputs
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens
        runner.initialize_kv_cache = self.initialize_kv_cache

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.hook.bind_kv_cache(kv_cache_config)
        return out

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.hook.begin(scheduler_output, lambda new: 0)
        try:
            out = self._execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            self.hook.cancel()
            raise
        self.hook.forward_done()
        return out

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._prepare_inputs(scheduler_output, *args, **kwargs)
        runner = self.runner
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.hook.tracker.resume(req_id, runner.requests[req_id].num_tokens)
        batch = runner.input_batch
        n = batch.num_reqs
        self.hook.prepare(
            BatchView(
                req_ids=batch.req_ids,
                starts=runner.query_start_loc.np[: n + 1].tolist(),
                first=batch.num_computed_tokens_cpu[:n].tolist(),
            )
        )
        return out

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.attach(self._sample_tokens(*args, **kwargs))

    def input_ids(self) -> Any:
        return self.runner.input_ids.gpu

    def block_row(self, group: int, batch_index: int) -> Any:
        return self.runner.input_batch.block_table[group].block_table.np[batch_index]
