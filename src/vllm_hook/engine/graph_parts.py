"""Parts of captured graphs: a decode step replays the launches of the sites that it uses, no others.

A launch at a site with nothing to do takes 1 to 2 us in every step. A graph that was captured with all of
them is therefore kept as CUDA's description of it; which sites a step uses is known before it runs, and
for a set of sites that comes up again a second graph is instantiated from the same description with the
other launches cut out. (A node that is only disabled still costs .8 us of the 1.5 that an idle launch
takes, measured on an H200.) What runs at the same addresses stays the same, nothing is captured again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..ops import library

logger = logging.getLogger(__name__)

#: A part is made when it has been asked for so often, if it leaves out so many launches: that takes 1 to
#: 5 ms of the step, and 2 MB on the device.
ASKED, WORTH = 8, 3
#: Parts at a time, while so much memory is left. Another takes the place of one that the last so many steps
#: with rows of ours did not use.
MOST, ROOM, UNUSED = 64, 512 << 20, 10_000
#: Sets of sites of which is remembered how often they were asked for.
KNOWN = 1024

Sites = frozenset[int]
_capturing = threading.RLock()


class GraphParts:
    """Parts of the graphs of one manager, by size and sites.

    Cutting out a launch that may start before its predecessor ends (see :mod:`vllm_hook.ops.triton_site`)
    leaves an ordinary edge from that predecessor to what follows; disabling it would leave none that waits.
    """

    def __init__(self) -> None:
        self.keep = False  # whether graphs that are captured now will be taken
        self._captured: dict[int, int] = {}
        self._nodes: dict[Any, dict[int, int]] = {}  # graph -> site -> node
        self._made: dict[tuple[Any, Sites], Part] = {}  # the one used last at the end
        self._asked: dict[tuple[Any, Sites], int] = {}
        self._steps = 0
        self._works = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Graphs are captured within."""
        cuda: Any = torch.cuda
        with _capturing:
            new, launched = cuda.CUDAGraph, library.launched
            cuda.CUDAGraph = lambda keep_graph=False: new(keep_graph or self.keep)
            library.launched = self._launched
            try:
                yield
            finally:
                cuda.CUDAGraph, library.launched = new, launched
                self.keep, self._captured = False, {}

    def _launched(self, site: int) -> None:
        if self.keep and self._works and torch.cuda.is_current_stream_capturing():
            try:
                self._captured[site] = _last_node()
            except Exception:
                self._stop()

    def take(self, graph: Any) -> None:
        """The graph that was captured last."""
        graph.instantiate()
        self._nodes[graph], self._captured = self._captured, {}

    def find(self, graph: Any, used: Callable[[], Sites | None]) -> Part | None:
        """The part of ``graph`` with the launches of the sites that are ``used``, if there is one."""
        if not (nodes := self._nodes.get(graph)) or (sites := used()) is None:
            return None
        self._steps += 1
        key = graph, sites
        if (part := self._made.pop(key, None)) is not None:
            self._made[key] = part
            part.used = self._steps
            return part
        if not self._works or len(nodes.keys() - sites) < WORTH or not nodes.keys() >= sites:
            return None
        asked = self._asked.pop(key, 0) + 1
        if asked < ASKED:
            self._asked[key] = asked
            if len(self._asked) > KNOWN:
                del self._asked[next(iter(self._asked))]
            return None
        return self._make(key, [nodes[site] for site in nodes.keys() - sites])

    def _make(self, key: tuple[Any, Sites], without: Sequence[int]) -> Part | None:
        try:
            if len(self._made) >= MOST:
                oldest = next(iter(self._made))
                if self._steps - self._made[oldest].used < UNUSED:
                    return None
                self._made.pop(oldest).release()
            if torch.cuda.mem_get_info()[0] < ROOM:
                return None
            part = self._made[key] = Part(key[0], without, self._steps)
        except Exception:
            self._stop()
            return None
        return part

    def _stop(self) -> None:
        self._works = False
        logger.warning("decode steps launch idle sites too: their graphs cannot be cut", exc_info=True)

    def clear(self) -> None:
        made, self._made, self._nodes, self._asked = self._made, {}, {}, {}
        for part in made.values():
            try:
                part.release()
            except Exception:
                logger.warning("a graph was not released", exc_info=True)


class Part:
    """A graph without some of its nodes. ``used``: the step that used it last."""

    def __init__(self, graph: Any, without: Sequence[int], used: int = 0) -> None:
        cuda = _runtime()
        clone = _ok(cuda.cudaGraphClone(cuda.cudaGraph_t(graph.raw_cuda_graph())))
        try:
            for node in without:
                _cut(clone, _ok(cuda.cudaGraphNodeFindInClone(cuda.cudaGraphNode_t(node), clone)))
            self._exec = _ok(cuda.cudaGraphInstantiate(clone, 0))
        finally:
            cuda.cudaGraphDestroy(clone)
        self._launch, self._destroy = cuda.cudaGraphLaunch, cuda.cudaGraphExecDestroy
        self.used = used

    def replay(self) -> None:
        _ok(self._launch(self._exec, torch.cuda.current_stream().cuda_stream))

    def release(self) -> None:
        _ok(self._destroy(self._exec))


def _cut(graph: Any, node: Any) -> None:
    """Take a node out: what followed it follows what it followed."""
    cuda = _runtime()
    before, after = (
        _neighbours(query, node)
        for query in (cuda.cudaGraphNodeGetDependencies, cuda.cudaGraphNodeGetDependentNodes)
    )
    _ok(cuda.cudaGraphDestroyNode(node))
    for later in after:
        there = {int(n) for n in _neighbours(cuda.cudaGraphNodeGetDependencies, later)}
        for earlier in before:
            if int(earlier) not in there:
                _ok(cuda.cudaGraphAddDependencies(graph, [earlier], [later], None, 1))


def _neighbours(query: Callable[..., Any], node: Any) -> Sequence[Any]:
    count = _ok(query(node))[-1]
    return _ok(query(node, count))[0][:count] if count else ()


def _last_node() -> int:
    """The node that was captured last on the current stream."""
    info = _ok(_runtime().cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream))
    (node,) = info[3][: info[-1]]  # status, id, graph, nodes, their edges, number of nodes
    return int(node)


def _ok(result: Sequence[Any]) -> Any:
    """What a call of CUDA returned besides its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA says {status}")
    return values[0] if len(values) == 1 else values


def _runtime() -> Any:
    """PyTorch for CUDA comes with it."""
    from cuda.bindings import runtime

    return runtime
