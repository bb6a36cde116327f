"""Launches cut out of a captured graph, on a stand-in for CUDA's graphs."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode

from vllm_hook.engine import graph_parts
from vllm_hook.engine.graph_parts import ASKED, GraphParts
from vllm_hook.engine.graphs import GraphSets
from vllm_hook.ops import library
from vllm_hook.runtime.area import AreaSize, StepArea

OK = (0,)


class Cuda:
    """Graphs are {node: set of nodes that it follows}; the nodes of a clone have names of their own."""

    def __init__(self) -> None:
        self.graphs: dict[int, dict[int, set[int]]] = {}
        self.instantiated: dict[int, dict[int, set[int]]] = {}
        self.replayed: list[int] = []
        self.last = self.made = 0
        self.fails, self.capturing = False, True
        self.cudaGraph_t = self.cudaGraphNode_t = int

    def new(self, graph: dict[int, set[int]]) -> int:
        self.made += 1
        self.graphs[self.made] = graph
        return self.made

    def cudaStreamGetCaptureInfo(self, stream: int) -> Any:
        return (*OK, 1, 7, 1, [self.last, 0], [None, None], 1)

    def cudaGraphClone(self, graph: int) -> Any:
        if self.fails:
            return 801, None
        here = self.graphs[graph]
        at = 1000 * (self.made + 1)
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
        del self.graphs[graph]
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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 33, 1 << 34))
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


def ask(parts: GraphParts, graph: Any, *sites: int) -> Any:
    return parts.find(graph, lambda: frozenset(sites))


def test_a_part_has_the_launches_that_are_used(cuda: Cuda) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    assert (graph.kept, graph.instances) == (True, 1)
    found = [ask(parts, graph, 2) for _ in range(ASKED + 2)]
    assert found[: ASKED - 1] == [None] * (ASKED - 1)
    part = found[-1]
    assert part is not None
    assert part is found[ASKED - 1], "made once"
    part.replay()
    (made,) = cuda.replayed
    assert cuda.instantiated[made] == {1: set(), 3: {1}, 5: {3}, 6: {5}, 7: {6}, 9: {7}}
    assert cuda.graphs == {graph.raw: LINE}, "what it was made from is not kept"
    parts.clear()
    assert not cuda.instantiated
    assert ask(parts, graph, 2) is None


@pytest.mark.parametrize("sites", [None, (0, 1, 2, 3), (0, 2), (1, 9), (9,)])
def test_all_launches_are_replayed_where_a_part_is_not_worth_it(cuda: Cuda, sites: Any) -> None:
    """Unknown sites (9) may have been captured in a way that we did not see."""
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    used = frozenset(sites) if sites is not None else None
    assert [parts.find(graph, lambda: used) for _ in range(2 * ASKED)] == [None] * 2 * ASKED


def test_nobody_asks_which_sites_are_used_where_no_graph_is_kept(cuda: Cuda) -> None:
    def used() -> Any:
        raise AssertionError

    assert GraphParts().find(Kept(), used) is None


def test_launches_that_are_not_captured_are_not_cut(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a warm-up run, and those of a graph that will not be taken."""
    parts = GraphParts()
    with parts.watching():
        assert library.launched is not None
        library.launched(0)
        parts.keep = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        library.launched(0)
        graph = torch.cuda.CUDAGraph()
        parts.take(graph)
    assert parts._nodes[graph] == {}


def test_a_launch_tells_the_number_of_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_hook.ops import triton_site

    area = StepArea(
        AreaSize({("resid_post", n): 4 for n in range(5)}, frozenset(), 0, 0), torch.device("cpu")
    )
    area.set_live(True)
    told: list[Any] = []
    monkeypatch.setattr(triton_site, "launch_site", lambda *args, **kwargs: told.append("launch"))
    monkeypatch.setattr(library, "launched", told.append)
    h, fired, buf = torch.zeros(4, 8), torch.zeros(1, dtype=torch.int32), torch.zeros(4, 8)
    for n in (3, 0):
        library._cuda(h, None, None, fired, area.live, area.headers["resid_post", n], area.step, buf)
    assert told == ["launch", 3, "launch", 0]


def test_a_graph_has_its_own_launches(cuda: Cuda) -> None:
    parts = GraphParts()
    first = captured(cuda, parts, dict(LINE), SITES)
    second = captured(
        cuda, parts, {n + 100: set() for n in range(1, 10)}, {s: n + 100 for s, n in SITES.items()}
    )
    for graph, left in ((second, {101, 103, 105, 107, 108, 109}), (first, {1, 3, 5, 7, 8, 9})):
        cuda.replayed.clear()
        [ask(parts, graph, 3) for _ in range(ASKED)]
        ask(parts, graph, 3).replay()
        assert cuda.instantiated[cuda.replayed[0]].keys() == left


def test_launches_of_the_graph_before_are_not_those_of_the_next(cuda: Cuda) -> None:
    parts = GraphParts()
    with parts.watching():
        for sites in (SITES, {}):
            parts.keep = True
            for site, cuda.last in sites.items():
                assert library.launched is not None
                library.launched(site)
            graph = torch.cuda.CUDAGraph()
            parts.take(graph)
    assert parts._nodes[graph] == {}


def test_there_are_not_too_many(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_parts, "MOST", 2)
    monkeypatch.setattr(graph_parts, "UNUSED", 100)
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    for site in (0, 1, 2):
        found = [ask(parts, graph, site) for _ in range(ASKED)]
        assert (found[-1] is not None) == (site < 2)
    for _ in range(101):
        assert ask(parts, graph, 0) is not None
    assert len(cuda.instantiated) == 2
    found = [ask(parts, graph, 2) for _ in range(ASKED)]  # in the place of the one that was not used since
    assert found[-1] is not None
    assert len(cuda.instantiated) == 2
    assert ask(parts, graph, 0) is not None
    assert ask(parts, graph, 1) is None


def test_none_is_made_where_memory_is_short(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (graph_parts.ROOM - 1, 1 << 34))
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    assert [ask(parts, graph, 2) for _ in range(3 * ASKED)] == [None] * 3 * ASKED
    assert not cuda.instantiated


def test_what_comes_once_is_forgotten(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_parts, "KNOWN", 50)
    parts = GraphParts()
    graph = captured(cuda, parts, {n: set() for n in range(41)}, {n: n for n in range(40)})
    for a in range(40):
        for b in range(40):
            ask(parts, graph, a, b)
            ask(parts, graph, 39)
    assert len(parts._asked) <= 50
    assert {sites for _, sites in parts._made} == {frozenset({39})}


def test_where_a_graph_cannot_be_cut_all_launches_are_replayed(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    cuda.fails = True
    for _ in range(3 * ASKED):
        assert ask(parts, graph, 2) is None
    assert len(caplog.records) == 1
    assert "CUDA says 801" in str(caplog.records[0].exc_info)


def test_parts_that_are_there_stay_when_no_more_can_be_made(cuda: Cuda) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    part = [ask(parts, graph, 2) for _ in range(ASKED)][-1]
    cuda.fails = True
    [ask(parts, graph, 3) for _ in range(ASKED)]
    assert part is not None
    assert ask(parts, graph, 2) is part


def test_a_part_that_is_not_released_does_not_hold_the_others(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = GraphParts()
    graph = captured(cuda, parts, dict(LINE), SITES)
    for site in SITES:
        [ask(parts, graph, site) for _ in range(ASKED)]
    asked: list[int] = []
    monkeypatch.setattr(cuda, "cudaGraphExecDestroy", lambda made: (asked.append(made), (700,))[1])
    for part in parts._made.values():
        part._destroy = cuda.cudaGraphExecDestroy
    parts.clear()
    parts.clear()
    assert len(asked) == len(set(asked)) == len(SITES)
    assert len(caplog.records) == len(SITES)


def test_captures_of_two_engines_do_not_meet(cuda: Cuda) -> None:
    first, second = GraphParts(), GraphParts()
    with first.watching():
        with second.watching():
            assert library.launched == second._launched
        assert library.launched == first._launched
        first.keep = True
        assert torch.cuda.CUDAGraph().kept
    assert (torch.cuda.CUDAGraph, library.launched) == (Kept, None)


def test_a_capture_that_fails_leaves_nothing_changed(cuda: Cuda) -> None:
    parts = GraphParts()

    def fails() -> None:
        with parts.watching():
            parts.keep = True
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert (torch.cuda.CUDAGraph, library.launched, parts.keep) == (Kept, None, False)


class Size(NamedTuple):
    num_tokens: int


class Manager:
    """As vLLM's graph manager: warms up, captures, and replays what it is told to."""

    def __init__(self, cuda: Cuda, gpus: int = 1) -> None:
        self.cuda, self.graphs, self.live, self.pool = cuda, {}, False, "shared"
        self._capture_descs = {CUDAGraphMode.FULL: [Size(32), Size(8)]}
        self._max_full_descs_to_capture = self._capture_mem_samples = None
        config = SimpleNamespace(world_size_across_dp=gpus)
        self.vllm_config = SimpleNamespace(parallel_config=config, use_cumem_cudagraph_pool=False)

    def set_live(self, live: bool) -> None:
        self.live = live

    def capture(self) -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            for self.cuda.capturing in (False, True):
                for site, node in SITES.items() if self.live else ():
                    self.cuda.last = node if self.cuda.capturing else 777
                    if library.launched is not None:
                        library.launched(site)
            self.graphs[desc] = torch.cuda.CUDAGraph()
            self.graphs[desc].raw = self.cuda.new(dict(LINE)) if self.live else 0

    def dispatch(self, *args: Any, **kwargs: Any) -> None: ...

    def run_fullgraph(self, desc: Size) -> Any:
        return self.graphs[desc]


def test_a_step_replays_the_part_of_its_sites(cuda: Cuda) -> None:
    manager = Manager(cuda)
    used: list[Any] = [frozenset({2})]
    sets = GraphSets(manager, manager.set_live, lambda: used[0])
    manager.capture()
    assert all(graph.kept and graph.instances == 1 for graph in sets.hooked.values())
    assert sets.plain is not None
    assert not any(graph.kept for graph in sets.plain.values())

    def run(desc: Size, active: bool = True) -> Any:
        sets.active = active
        found = [manager.run_fullgraph(desc) for _ in range(ASKED + 1)][-1]
        assert manager.graphs is sets.hooked
        return found

    for desc in (Size(32), Size(8)):
        part = run(desc)
        assert cuda.instantiated[part._exec].keys() == {1, 3, 5, 6, 7, 9}
        assert run(desc, active=False) is sets.plain[desc]
        assert run(desc) is part
    used[0] = frozenset()
    assert cuda.instantiated[run(Size(8))._exec].keys() == {1, 3, 5, 7, 9}
    for used[0] in (None, frozenset(SITES)):
        assert run(Size(8)) is sets.hooked[Size(8)]
    used[0] = frozenset({2})
    manager.capture()
    assert not cuda.instantiated
    assert cuda.instantiated[run(Size(32))._exec].keys() == {1, 3, 5, 6, 7, 9}
    sets.release()
    assert not cuda.instantiated
    assert not sets._parts._nodes


def test_graphs_that_are_not_only_ours_stay_as_they_are(cuda: Cuda) -> None:
    manager = Manager(cuda, gpus=2)
    sets = GraphSets(manager, manager.set_live, lambda: frozenset({2}))
    manager.capture()
    sets.active = True
    assert {manager.run_fullgraph(Size(8)) for _ in range(2 * ASKED)} == {sets.hooked[Size(8)]}
    assert not any(graph.kept for graph in sets.hooked.values())


def test_a_release_that_fails_keeps_nothing(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(cuda)
    sets = GraphSets(manager, manager.set_live, lambda: frozenset({2}))
    manager.capture()
    sets.active = True
    monkeypatch.setattr(cuda, "cudaGraphExecDestroy", lambda made: (700,))
    [manager.run_fullgraph(Size(8)) for _ in range(ASKED)]
    sets.release()
    sets.release()
    assert (sets.hooked, sets.plain, sets._parts._made) == ({}, None, {})


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
