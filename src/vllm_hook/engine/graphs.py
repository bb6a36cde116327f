"""CUDA graphs of the V2 model runner: two sets of full graphs, and steps that need Python in between.

A launch at every armed site costs a few microseconds each, in every decode step, also when no row
is anybody's. Full graphs are therefore captured twice, without our launches and with them, and a
step without rows of ours replays the first. The same compiled code makes both: the ops look at
``live`` while they are captured.

The two graphs of a size are captured one right after the other, on one stream and from the same
state of the memory pool, so that their activations and the workspace of the products lie at the
same addresses. Where these lie decides about 1 % of a step at batch 1 (docs/performance.md): sets
captured one after the other differ by that, by chance.

Two kinds of step need the host while the model runs: conditions that are decided once for a request
(a launch more, see :mod:`vllm_hook.ops.triton_site`), and attention steering (it acts behind the
attention kernel). They are dispatched to a mode in which Python runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        """Capture all graphs with our launches, the full ones also without."""
        manager = self._manager
        every = manager._capture_descs
        full = every.get(CUDAGraphMode.FULL)
        profile = manager._max_full_descs_to_capture is not None
        if full and not profile:
            self.hooked, self.plain = {}, {}
            manager._capture_descs = {**every, CUDAGraphMode.FULL: _Twice(full, self._take)}
        self._set_live(True)
        try:
            self._capture(*args, **kwargs)
        finally:
            self._set_live(False)
            manager._capture_descs = every
        if self.plain is not None:
            manager.graphs = self.hooked
        if manager._capture_mem_samples:  # a memory profile: of a few graphs, the later ones are typical
            self.again = len(full or ()) * max(manager._capture_mem_samples[-1], 1 << 20)

    def _take(self, desc: Any) -> None:
        """A full graph was captured: with our launches at first, then without."""
        assert self.plain is not None
        hooked = desc not in self.hooked
        (self.hooked if hooked else self.plain)[desc] = self._manager.graphs.pop(desc)
        self._set_live(not hooked)

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


class _Twice:
    """Descriptors, each two times in a row; ``done`` is called after each."""

    def __init__(self, descs: Sequence[Any], done: Callable[[Any], None]) -> None:
        self._descs, self._done = descs, done

    def __len__(self) -> int:
        return 2 * len(self._descs)

    def __iter__(self) -> Iterator[Any]:
        for desc in self._descs:
            for _ in range(2):
                yield desc
                self._done(desc)
