"""The V2 model runner (every GPU's default).

It keeps no sampling parameters, sorts the batch anew each step, and removes preempted requests to
re-send them as new ones; the tracker knows them again by their id.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode

from ..runtime.plan import BatchView
from .adapter import RunnerAdapter
from .graphs import ANY_GRAPH, GraphSets
from .runner import RunnerHook


class V2Adapter(RunnerAdapter):
    prepare = "prepare_inputs"
    graphs: GraphSets | None = None

    def __init__(self, runner: Any, hook: RunnerHook) -> None:
        super().__init__(runner, hook)
        self._profile_cudagraph_memory = runner.profile_cudagraph_memory
        runner.profile_cudagraph_memory = self.profile_cudagraph_memory

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner makes a new graph manager with each cache."""
        self.let_go()
        out = super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        manager = self.runner.cudagraph_manager
        on_gpu = self.hook.device.type == "cuda"
        area = self.hook.bank.area
        self.graphs = GraphSets(manager, area.set_live, area.used) if on_gpu and manager else None
        return out

    def profile_cudagraph_memory(self) -> int:
        """vLLM's estimate, and what the second set of full graphs adds to it."""
        found = int(self._profile_cudagraph_memory())
        again, self.graphs = self.graphs.again if self.graphs is not None else 0, None
        return found + again

    def let_go(self) -> None:
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            if self.graphs is not None:
                self.graphs.active, self.graphs.need = self.hook.proving, ANY_GRAPH
            if not self.hook.proving:
                self.hook.bank.clear()
            return self._execute_model(scheduler_output, *args, **kwargs)
        return self.run_step(lambda new: len(new.prefill_token_ids), scheduler_output, *args, **kwargs)

    def before_step(self, scheduler_output: Any) -> None:
        if self.graphs is None:
            return
        self.graphs.active, self.graphs.need = False, self.hook.needs(scheduler_output)

    def prepare_inputs(
        self, scheduler_output: Any, state: Any, batch_desc: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch = self._prepare_inputs(scheduler_output, state, batch_desc, *args, **kwargs)
        active = self.hook.prepare(
            lambda: BatchView(
                req_ids=batch.req_ids,
                starts=batch.query_start_loc_np[: batch.num_reqs + 1].tolist(),
                first=batch.num_computed_tokens_np[: batch.num_reqs].tolist(),
            ),
            eager=batch_desc.cg_mode == CUDAGraphMode.NONE,
        )
        if self.graphs is not None:
            self.graphs.active = active
        return batch

    def input_ids(self) -> Any:
        return self.runner.input_buffers.input_ids

    def block_table(self, group: int) -> Any:
        return self.runner.block_tables.input_block_tables[group]

    def block_row(self, group: int, batch_index: int) -> Any:
        return self.block_table(group)[batch_index]
