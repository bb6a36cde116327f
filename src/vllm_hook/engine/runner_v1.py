"""The V1 model runner (the CPU build's default)."""

from __future__ import annotations

from typing import Any

from ..runtime.plan import BatchView
from .adapter import RunnerAdapter


class V1Adapter(RunnerAdapter):
    """On GPUs only without CUDA graphs: captured steps would need both sets (see :mod:`.graphs`)."""

    prepare = "_prepare_inputs"

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run_step(lambda new: 0, scheduler_output, *args, **kwargs)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._prepare_inputs(scheduler_output, *args, **kwargs)
        runner = self.runner
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.hook.resume(req_id, runner.requests[req_id].num_tokens)
        batch = runner.input_batch
        n = batch.num_reqs
        self.hook.prepare(
            lambda: BatchView(
                req_ids=batch.req_ids,
                starts=runner.query_start_loc.np[: n + 1].tolist(),
                first=batch.num_computed_tokens_cpu[:n].tolist(),
            )
        )
        return out

    def input_ids(self) -> Any:
        return self.runner.input_ids.gpu

    def block_table(self, group: int) -> Any:
        return self.runner.input_batch.block_table[group].get_device_tensor(self.runner.input_batch.num_reqs)

    def block_row(self, group: int, batch_index: int) -> Any:
        return self.runner.input_batch.block_table[group].block_table.np[batch_index]
