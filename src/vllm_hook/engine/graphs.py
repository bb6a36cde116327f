"""CUDA graphs of the V2 model runner: two sets of full graphs, and steps that need Python in between.

A launch at every armed site costs a few microseconds each, in every decode step, also when no row
is anybody's. Full graphs are therefore captured twice, without our launches and with them, and a
step without rows of ours replays the first. The same compiled code makes both: the ops look at
``live`` while they are captured. A step that uses few of the armed sites replays a part of the second
(:mod:`.graph_parts`).

The two graphs of a size are captured one right after the other, on one stream and from the same
state of the memory pool, so that their activations and the workspace of the products lie at the
same addresses. Where these lie decides about 1 % of a step at batch 1 (docs/performance.md): sets
captured one after the other differ by that, by chance. So the pairs of the smallest sizes are also
captured in pools of their own, timed, and the fastest is kept.

Two kinds of step need the host while the model runs: conditions that are decided once for a request
(a launch more, see :mod:`vllm_hook.ops.triton_site`), and attention steering (it acts behind the
attention kernel). They are dispatched to a mode in which Python runs there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from .graph_parts import ROOM, GraphParts, Sites

#: What a step needs of the dispatcher.
ANY_GRAPH, PYTHON_AT_ATTENTION, NO_GRAPH = 0, 1, 2
#: Pairs of at most so many tokens are captured in up to so many places, while so much memory is left.
SMALL, PLACES = 4, 4
#: Bytes of such a pool with its graphs: seen on an 8B model 2 MB at 1 and 2 rows, 22 MB at 4.
POOL = 10 << 20
#: Places differ by .6 to 1.3 % or next to nothing. Times whose ratio is below this differ.
FASTER = 0.995


class GraphSets:
    """Wraps one runner's graph manager. ``active`` and ``need`` are set before each step; ``used`` tells
    which sites it uses."""

    def __init__(
        self, manager: Any, set_live: Callable[[bool], None], used: Callable[[], Sites | None] = lambda: None
    ) -> None:
        self._manager: Any = manager
        self._set_live: Any = set_live
        self._used: Any = used
        self._parts = GraphParts()
        self.hooked: dict[Any, Any] = {}
        self.plain: dict[Any, Any] | None = None
        #: Milliseconds of the pairs of small sizes, that of the shared pool first.
        self.places: dict[Any, list[float]] = {}
        self._unused: list[tuple[Any, Any]] = []
        self.active = False
        self.need = ANY_GRAPH
        self.again = 0  # bytes that the second set and other places will take, as a memory profile tells
        self._capture, self._dispatch, self._run = manager.capture, manager.dispatch, manager.run_fullgraph
        manager.capture = self.capture
        manager.dispatch = self.dispatch
        manager.run_fullgraph = self.run_fullgraph

    def release(self) -> None:
        """Let go of the manager and of all graphs: both hold the memory of their pools."""
        if self._manager is None:
            return
        for name in ("capture", "dispatch", "run_fullgraph"):
            delattr(self._manager, name)
        self._manager = self._set_live = self._used = None
        self._capture = self._dispatch = self._run = None
        self.hooked, self.plain, self._unused = {}, None, []
        self._parts.clear()

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all graphs with our launches, the full ones also without. After a memory profile, whose
        graphs vLLM drops, only :attr:`again` is left."""
        manager = self._manager
        every = manager._capture_descs
        full = every.get(CUDAGraphMode.FULL)
        profile = manager._max_full_descs_to_capture is not None
        if full and not profile:
            self._parts.clear()
            self.hooked, self.plain = {}, {}
            most = 2 * (len(full) + self._further(full))
            manager._capture_descs = {**every, CUDAGraphMode.FULL: _Counted(most, self._in_pairs(full))}
        pool = manager.pool
        self._set_live(True)
        try:
            with self._parts.watching():
                self._capture(*args, **kwargs)
        finally:
            self._set_live(False)
            manager._capture_descs, manager.pool = every, pool
        if self.plain is not None:
            manager.graphs = self.hooked
        if manager._capture_mem_samples:  # a memory profile: of a few graphs, the later ones are typical
            again = len(full or ()) * max(manager._capture_mem_samples[-1], 1 << 20)
            self.again = again + self._further(full or ()) * POOL
        if profile:
            self.release()

    def _in_pairs(self, descs: Sequence[Any]) -> Iterator[Any]:
        """What vLLM's manager is to capture next; what it has captured is taken from it in between."""
        for desc in descs:
            yield from self._pair(desc)
            if self._is_small(desc):
                yield from self._elsewhere(desc)

    def _pair(self, desc: Any) -> Iterator[Any]:
        """With our launches, then without."""
        assert self.plain is not None
        self._parts.keep = self._is_free()
        yield desc
        self.hooked[desc] = self._manager.graphs.pop(desc)
        if self._parts.keep:
            self._parts.take(self.hooked[desc])
        self._parts.keep = False
        self._set_live(False)
        yield desc
        self.plain[desc] = self._manager.graphs.pop(desc)
        self._set_live(True)

    def _is_free(self) -> bool:
        """Whether graphs are nobody else's. Several GPUs register the buffers of all graphs with each other,
        and a sleep mode that takes graphs along has a pool of its own."""
        config = self._manager.vllm_config
        return not (config.parallel_config.world_size_across_dp > 1 or config.use_cumem_cudagraph_pool)

    def _is_small(self, desc: Any) -> bool:
        """Whether to look for a better place."""
        return bool(desc.num_tokens <= SMALL and self._is_free())

    def _further(self, descs: Sequence[Any]) -> int:
        """How many pairs may be captured in pools of their own."""
        return (PLACES - 1) * sum(self._is_small(desc) for desc in descs)

    def _elsewhere(self, desc: Any) -> Iterator[Any]:
        """The pair again, in pools of its own, until one is faster than another.

        Graphs that are not used stay alive with the rest: PyTorch keeps one workspace for the products of all
        graphs that were captured on a stream, and frees it with the first of them (pytorch issue 193402)."""
        assert self.plain is not None
        shared, found = self._manager.pool, [(self.hooked[desc], self.plain[desc])]
        took = [0.0]
        while len(found) < PLACES and min(took) >= FASTER * max(took):
            if torch.cuda.mem_get_info()[0] < ROOM:
                break
            self._manager.pool = current_platform.graph_pool_handle()
            yield from self._pair(desc)
            found.append((self.hooked[desc], self.plain[desc]))
            took = self._times(desc, found)
        self._manager.pool = shared
        best = took.index(min(took)) if min(took) < FASTER * took[0] else 0
        self.hooked[desc], self.plain[desc] = found.pop(best)
        self.places[desc], self._unused = took, [*self._unused, *found]

    def _times(self, desc: Any, pairs: list[tuple[Any, Any]]) -> list[float]:
        """Milliseconds of each pair, in turn. What vLLM prepared for the capture is still in place."""
        rounds = []
        for _ in range(4):
            rounds.append([sum(self._replay_time(desc, graph) for graph in pair) for pair in pairs])
        return [statistics.median(own) for own in zip(*rounds[1:], strict=True)]

    def _replay_time(self, desc: Any, graph: Any, times: int = 4) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        kept, self._manager.graphs = self._manager.graphs, {desc: graph}
        try:
            self._run(desc)
            begin.record()
            for _ in range(times):
                self._run(desc)
            end.record()
            end.synchronize()
        finally:
            self._manager.graphs = kept
        return float(begin.elapsed_time(end)) / times

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
        self._manager.graphs = self._of_sites(desc) if self.active else self.plain
        try:
            return self._run(desc)
        finally:
            self._manager.graphs = self.hooked

    def _of_sites(self, desc: Any) -> dict[Any, Any]:
        part = self._parts.find(self.hooked[desc], self._used)
        return self.hooked if part is None else {desc: part}


class _Counted:
    """An iterator that knows its length, for vLLM's progress bar."""

    def __init__(self, number: int, each: Iterator[Any]) -> None:
        self._number, self._each = number, each

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        return self._each
