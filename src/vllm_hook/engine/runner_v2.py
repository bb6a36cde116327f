"""The V2 model runner (every GPU's default).

It keeps no sampling parameters, sorts the batch anew each step, and removes preempted requests to
re-send them as new ones; the tracker knows them again by their id.
"""

from __future__ import annotations

from typing import Any

from ..runtime.plan import BatchView
from .runner import RunnerHook


class V2Adapter:
    """Wraps one runner instance: other engines of the process are not touched."""

    def __init__(self, runner: Any, hook: RunnerHook) -> None:
        self.runner = runner
        self.hook = hook
        hook.adapter = self
        self._prepare_inputs = runner.prepare_inputs
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        self._initialize_kv_cache = runner.initialize_kv_cache
        runner.prepare_inputs = self.prepare_inputs
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens
        runner.initialize_kv_cache = self.initialize_kv_cache

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.hook.bind_kv_cache(kv_cache_config)
        return out

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return self._execute_model(scheduler_output, *args, **kwargs)
        self.hook.begin(scheduler_output, lambda new: len(new.prefill_token_ids))
        try:
            out = self._execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            self.hook.cancel()
            raise
        self.hook.forward_done()
        return out

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._prepare_inputs(*args, **kwargs)
        self.hook.prepare(
            BatchView(
                req_ids=batch.req_ids,
                starts=batch.query_start_loc_np[: batch.num_reqs + 1].tolist(),
                first=batch.num_computed_tokens_np[: batch.num_reqs].tolist(),
            )
        )
        return batch

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.attach(self._sample_tokens(*args, **kwargs))

    def input_ids(self) -> Any:
        return self.runner.input_buffers.input_ids

    def block_row(self, group: int, batch_index: int) -> Any:
        return self.runner.block_tables.input_block_tables[group][batch_index]
