"""CUDA graphs of the V2 model runner: two sets of full graphs, and steps that need Python in between.

A launch at every armed site costs a few microseconds each, in every decode step, also when no row
is anybody's. Full graphs are therefore captured twice, without our launches and with them, and a
step without rows of ours replays the first. The same compiled code makes both: the ops look at
``live`` while they are captured.

Two kinds of step need the host while the model runs: conditions that are decided once for a request
(a launch more, see :mod:`vllm_hook.ops.triton_site`), and attention steering (it acts behind the
attention kernel). They are dispatched to a mode in which Python runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode

#: What a step needs of the dispatcher.
ANY_GRAPH, PYTHON_AT_ATTENTION, NO_GRAPH = 0, 1, 2


class GraphSets:
    """Wraps one runner's graph manager. ``active`` and ``need`` are set before each step."""

    def __init__(self, manager: Any, set_live: Callable[[bool], None]) -> None:
        self._manager = manager
        self._set_live = set_live
        self.hooked: dict[Any, Any] = {}
        self.plain: dict[Any, Any] | None = None
        self.active = False
        self.need = ANY_GRAPH
        self.again = 0  # bytes that the second set will take, as a memory profile tells
        self._capture, self._dispatch, self._run = manager.capture, manager.dispatch, manager.run_fullgraph
        manager.capture = self.capture
        manager.dispatch = self.dispatch
        manager.run_fullgraph = self.run_fullgraph

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all graphs with our launches, then the full ones again without."""
        manager = self._manager
        self._set_live(True)
        try:
            self._capture(*args, **kwargs)
        finally:
            self._set_live(False)
        full = manager._capture_descs.get(CUDAGraphMode.FULL)
        if manager._capture_mem_samples:  # a memory profile: of a few graphs, the later ones are typical
            self.again = len(full or ()) * max(manager._capture_mem_samples[-1], 1 << 20)
        if not full or manager._max_full_descs_to_capture is not None:
            return
        self.hooked, manager.graphs = manager.graphs, {}
        every, manager._capture_descs = manager._capture_descs, {CUDAGraphMode.FULL: full}
        try:
            self._capture(*args, **{**kwargs, "progress_bar_desc": "Capturing CUDA graphs without hooks"})
        finally:
            manager._capture_descs = every
        self.plain, manager.graphs = manager.graphs, self.hooked

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.need == ANY_GRAPH:
            return self._dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        if self.need == PYTHON_AT_ATTENTION:  # full graphs are for uniform batches, or bounded ones
            kwargs["max_query_len"] = None
            found = self._dispatch(num_reqs, num_tokens, None, *args, **kwargs)
            if found.cg_mode != CUDAGraphMode.FULL:
                return found
        captured, self._manager._graphs_captured = self._manager._graphs_captured, False
        try:
            return self._dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        finally:
            self._manager._graphs_captured = captured

    def run_fullgraph(self, desc: Any) -> Any:
        if self.plain is None:
            return self._run(desc)
        self._manager.graphs = self.hooked if self.active else self.plain
        try:
            return self._run(desc)
        finally:
            self._manager.graphs = self.hooked
