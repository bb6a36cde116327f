"""Launches cut out of a captured graph, on a stand-in for CUDA's graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook.engine import graph_parts
from vllm_hook.engine.graph_parts import ASKED, MOST, GraphParts
from vllm_hook.ops import library

OK = (0,)


class Cuda:
    """Graphs are {node: set of nodes that it follows}; the nodes of a clone have names of their own."""

    def __init__(self) -> None:
        self.graphs: dict[int, dict[int, set[int]]] = {}
        self.instantiated: dict[int, dict[int, set[int]]] = {}
        self.replayed: list[int] = []
        self.last = 0
        self.fails = False
        self.cudaGraph_t = self.cudaGraphNode_t = int

    def new(self, graph: dict[int, set[int]]) -> int:
        self.graphs[len(self.graphs) + 1] = graph
        return len(self.graphs)

    def cudaStreamGetCaptureInfo(self, stream: int) -> Any:
        return (*OK, 1, 7, 1, [self.last, 0], [None, None], 1)

    def cudaGraphClone(self, graph: int) -> Any:
        if self.fails:
            return 801, None
        here = self.graphs[graph]
        at = 1000 * (len(self.graphs) + 1)
        return *OK, self.new({n + at: {m + at for m in before} for n, before in here.items()})

    def cudaGraphNodeFindInClone(self, node: int, clone: int) -> Any:
        return *OK, node + 1000 * clone

    def _of(self, node: int) -> dict[int, set[int]]:
        return next(graph for graph in self.graphs.values() if node in graph)

    def _told(self, found: set[int], most: int) -> Any:
        nodes = sorted(found)
        return (*OK, [*nodes, *[0] * (most - len(nodes))] if most else [], [], len(nodes))

    def cudaGraphNodeGetDependencies(self, node: int, most: int = 0) -> Any:
        return self._told(self._of(node)[node], most)

    def cudaGraphNodeGetDependentNodes(self, node: int, most: int = 0) -> Any:
        return self._told({n for n, before in self._of(node).items() if node in before}, most)

    def cudaGraphDestroyNode(self, node: int) -> Any:
        graph = self._of(node)
        del graph[node]
        for before in graph.values():
            before.discard(node)
        return OK

    def cudaGraphAddDependencies(
        self, graph: int, first: list[int], then: list[int], edges: None, n: int
    ) -> Any:
        assert first[0] not in self.graphs[graph][then[0]], "CUDA refuses an edge that is there"
        self.graphs[graph][then[0]].add(first[0])
        return OK

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        at = 1000 * graph
        found = {n - at: {m - at for m in before} for n, before in self.graphs[graph].items()}
        self.instantiated[graph] = found
        return *OK, graph

    def cudaGraphDestroy(self, graph: int) -> Any:
        self.graphs[graph] = {}
        return OK

    def cudaGraphLaunch(self, made: int, stream: int) -> Any:
        self.replayed.append(made)
        return OK

    def cudaGraphExecDestroy(self, made: int) -> Any:
        del self.instantiated[made]
        return OK


class Kept:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept, self.instances, self.raw = keep_graph, 0, 0

    def instantiate(self) -> None:
        self.instances += 1

    def raw_cuda_graph(self) -> int:
        return self.raw


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(graph_parts, "_runtime", lambda: made)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    return made


def captured(cuda: Cuda, parts: GraphParts, graph: dict[int, set[int]], sites: dict[int, int]) -> Kept:
    """A graph of these nodes, those of ``sites`` launched by us."""
    with parts.watching():
        parts.keep = True
        kept = torch.cuda.CUDAGraph()
        for site, node in sites.items():
            cuda.last = node
            assert library.launched is not None
            library.launched(site)
        kept.raw = cuda.new(graph)
        parts.take(kept)
        parts.keep = False
        assert not torch.cuda.CUDAGraph().kept
        assert torch.cuda.CUDAGraph(keep_graph=True).kept
    assert (torch.cuda.CUDAGraph, library.launched) == (Kept, None)
    return kept


#: 1 to 9 in line, with our launches at 2, 4, 6 and 8.
LINE: dict[int, set[int]] = {n: {n - 1} if n > 1 else set() for n in range(1, 10)}
SITES = {0: 2, 1: 4, 2: 6, 3: 8}


def test_a_part_has_the_launches_that_are_used(cuda: Cuda) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    assert (graph.kept, graph.instances) == (True, 1)
    found = [parts.find(graph, frozenset({2})) for _ in range(ASKED + 2)]
    assert found[: ASKED - 1] == [None] * (ASKED - 1)
    part = found[-1]
    assert part is not None
    assert part is found[ASKED - 1], "made once"
    part.replay()
    (made,) = cuda.replayed
    assert cuda.instantiated[made] == {1: set(), 3: {1}, 5: {3}, 6: {5}, 7: {6}, 9: {7}}
    assert cuda.graphs[graph.raw] == LINE
    parts.clear()
    assert not cuda.instantiated
    assert parts.find(graph, frozenset({2})) is None


@pytest.mark.parametrize(
    "sites", [None, frozenset({0, 1, 2, 3}), frozenset({0, 2}), frozenset({1, 9}), frozenset({9})]
)
def test_all_launches_are_replayed_where_a_part_is_not_worth_it(cuda: Cuda, sites: Any) -> None:
    """Unknown sites (9) may have been captured in a way that we did not see."""
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    assert [parts.find(graph, sites) for _ in range(2 * ASKED)] == [None] * 2 * ASKED
    assert parts.find(Kept(), frozenset({2})) is None


def test_there_are_not_too_many(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_parts, "MOST", 2)
    assert MOST > 2
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    asked = [frozenset({site}) for site in SITES]
    for _ in range(ASKED):
        found = [parts.find(graph, sites) for sites in asked]
    assert [part is not None for part in found] == [True, True, False, False]


def test_what_comes_once_is_forgotten(cuda: Cuda) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, {n: set() for n in range(41)}, {n: n for n in range(40)})
    for a in range(40):
        for b in range(40):
            parts.find(graph, frozenset({a, b}))
    assert len(parts._asked) <= 8 * MOST
    assert not parts._made


def test_where_a_graph_cannot_be_cut_all_launches_are_replayed(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    cuda.fails = True
    for _ in range(3 * ASKED):
        assert parts.find(graph, frozenset({2})) is None
    assert len(caplog.records) == 1
    assert "CUDA says 801" in str(caplog.records[0].exc_info)


def test_a_capture_that_fails_leaves_nothing_changed(cuda: Cuda) -> None:
    parts = GraphParts()

    def fails() -> None:
        with parts.watching():
            parts.keep = True
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert (torch.cuda.CUDAGraph, library.launched, parts.keep) == (Kept, None, False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_runs_after_what_stays(data: st.DataObject) -> None:
    """Of any graph: the nodes that are left follow each other as before."""
    n = data.draw(st.integers(2, 9))
    graph = {i: data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(n)}
    cut = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))

    def follows(graph: dict[int, set[int]], node: int) -> set[int]:
        return {m for before in graph[node] for m in {before} | follows(graph, before)}

    cuda = Cuda()
    whole = cuda.new({i: set(before) for i, before in graph.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_parts, "_runtime", lambda: cuda)
        graph_parts.Part(SimpleNamespace(raw_cuda_graph=lambda: whole), sorted(cut))
    (found,) = cuda.instantiated.values()
    assert found.keys() == graph.keys() - cut
    for node in found:
        assert follows(found, node) == follows(graph, node) - cut
