"""Two sets of full graphs, captured in pairs, on a stand-in for vLLM's graph manager."""

import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.config import CUDAGraphMode

from vllm_hook.engine import graphs
from vllm_hook.engine.graphs import GraphSets


class Size(NamedTuple):
    num_tokens: int


class Graph(NamedTuple):
    size: Size
    live: bool
    pool: Any

    def instantiate(self) -> None: ...


SIZES = [Size(32), Size(16), Size(8)]


class Manager:
    """Captures and replays like vLLM's: a full graph is what was captured, and whether launches were live."""

    def __init__(self, full: bool = True, sizes: list[Size] = SIZES) -> None:
        self.graphs: dict[Size, tuple[Size, bool, Any]] = {}
        self._capture_descs: dict[CUDAGraphMode, Any] = {CUDAGraphMode.PIECEWISE: [512, 64]}
        if full:
            self._capture_descs[CUDAGraphMode.FULL] = list(sizes)
        self._capture_mem_samples: list[int] | None = None
        self._max_full_descs_to_capture: int | None = None
        self.live = False
        self.told: list[tuple[Any, bool]] = []
        self.fails_at: Size | None = None
        self.pool = "shared"
        alone = SimpleNamespace(world_size_across_dp=1)
        self.vllm_config = SimpleNamespace(parallel_config=alone, use_cumem_cudagraph_pool=False)

    def set_live(self, live: bool) -> None:
        self.live = live

    def capture(self) -> None:
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            descs = self._capture_descs.get(mode, [])
            if mode == CUDAGraphMode.FULL and self._max_full_descs_to_capture is not None:
                descs = descs[: self._max_full_descs_to_capture]
            for desc in descs:
                if desc == self.fails_at:
                    raise MemoryError
                self.told.append((desc, self.live))
                if mode == CUDAGraphMode.FULL:
                    assert desc not in self.graphs
                    self.graphs[desc] = Graph(desc, self.live, self.pool)
                    if self._capture_mem_samples is not None:
                        self._capture_mem_samples.append(desc.num_tokens << 20)

    def dispatch(self, *args: Any, **kwargs: Any) -> None: ...

    def run_fullgraph(self, desc: Size) -> tuple[Size, bool, Any]:
        return self.graphs[desc]


def test_the_graphs_of_a_size_are_captured_one_after_the_other() -> None:
    manager = Manager()
    descs = manager._capture_descs
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    pairs = [(size, live) for size in SIZES for live in (True, False)]
    assert manager.told == [(512, True), (64, True), *pairs]
    assert not manager.live
    assert manager._capture_descs is descs
    for active in (True, False, True):
        sets.active = active
        assert [manager.run_fullgraph(size) for size in SIZES] == [(size, active, "shared") for size in SIZES]
    assert set(manager.graphs) == set(SIZES)  # what vLLM asks it for


def test_the_progress_that_vllm_shows_counts_both() -> None:
    from tqdm import tqdm

    manager = Manager()
    seen = []
    capture = manager.capture

    def watched() -> None:
        seen.append(tqdm(manager._capture_descs[CUDAGraphMode.FULL], disable=True).total)
        capture()

    manager.capture = watched  # type: ignore[method-assign]
    GraphSets(manager, manager.set_live).capture()
    assert seen == [2 * len(SIZES)]


@pytest.mark.usefixtures("no_collection")
def test_a_memory_profile_captures_a_few_and_tells_what_the_second_set_takes() -> None:
    manager = Manager()
    manager._max_full_descs_to_capture, manager._capture_mem_samples = 2, []
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert manager.told == [(512, True), (64, True), (Size(32), True), (Size(16), True)]
    assert sets.again == len(SIZES) * (16 << 20)
    assert sets.plain is None
    # vLLM drops the manager, and with it the pool of these graphs, before it makes the real cache.
    gone = weakref.ref(manager)
    del manager
    assert gone() is None


@pytest.mark.usefixtures("no_collection")
def test_graphs_die_when_they_are_released() -> None:
    manager = Manager()
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    gone = weakref.ref(manager)
    sets.release()
    sets.release()
    assert (sets.hooked, sets.plain) == ({}, None)
    del manager
    assert gone() is None


def test_a_second_capture_replaces_the_first() -> None:
    manager = Manager()
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    manager.graphs.clear()
    manager.capture()
    assert sets.plain == {size: (size, False, "shared") for size in SIZES}
    assert sets.hooked == {size: (size, True, "shared") for size in SIZES}


def test_without_full_graphs_there_is_one_set() -> None:
    manager = Manager(full=False)
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert sets.plain is None
    assert manager.told == [(512, True), (64, True)]


def test_a_capture_that_fails_leaves_launches_off() -> None:
    manager = Manager()
    manager.fails_at = Size(16)
    descs = manager._capture_descs
    GraphSets(manager, manager.set_live)
    with pytest.raises(MemoryError):
        manager.capture()
    assert not manager.live
    assert manager._capture_descs is descs


SMALL = [Size(8), Size(4), Size(2), Size(1)]
#: Milliseconds of a graph with launches, by size and place; without them it takes .1 less.
TOOK = {
    4: {"shared": 4.50, "pool 1": 4.51, "pool 2": 4.45},
    2: {"shared": 4.45, "pool 3": 4.50},
    1: {"shared": 4.45, "pool 4": 4.46, "pool 5": 4.44, "pool 6": 4.46},
}


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(1, 99))
    monkeypatch.setattr(
        graphs.current_platform, "graph_pool_handle", lambda: f"pool {next(made)}", raising=False
    )
    monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 34))

    def took(sets: GraphSets, desc: Size, graph: tuple[Size, bool, str]) -> float:
        size, live, place = graph
        assert size == desc
        return TOOK[size.num_tokens][place] - 0.1 * (not live)

    monkeypatch.setattr(GraphSets, "_replay_time", took)


def kept(sets: GraphSets) -> dict[int, str]:
    assert sets.plain is not None
    assert list(sets.plain) == list(sets.hooked) == SMALL
    for graphs_, live in ((sets.hooked, True), (sets.plain, False)):
        assert [(size, was) for size, was, _ in graphs_.values()] == [(size, live) for size in SMALL]
    of = {desc.num_tokens: place for desc, (_, _, place) in sets.hooked.items()}
    assert of == {desc.num_tokens: place for desc, (_, _, place) in sets.plain.items()}, "pairs lie together"
    return of


@pytest.mark.usefixtures("places")
def test_pairs_of_small_sizes_are_kept_where_they_are_fastest() -> None:
    manager = Manager(sizes=SMALL)
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    # One row is a thousandth faster elsewhere: no other level.
    assert kept(sets) == {8: "shared", 4: "pool 2", 2: "shared", 1: "shared"}
    tried = {desc.num_tokens: len(took) for desc, took in sets.places.items()}
    assert tried == {4: 3, 2: 2, 1: 4}, "until one is faster than another"
    assert sets.places[Size(4)] == pytest.approx([8.9, 8.92, 8.8])
    assert manager.pool == "shared"
    assert not manager.live
    assert set(manager.graphs) == set(SMALL)
    assert [live for _, live in manager.told[2:]] == [True, False] * (4 + 2 + 1 + 3)


@pytest.mark.usefixtures("places")
def test_graphs_that_are_not_used_live_on() -> None:
    """PyTorch frees the workspace of all products captured on a stream with any graph of that stream."""
    manager = Manager(sizes=SMALL)
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert sets.plain is not None
    alive = [*sets.hooked.values(), *sets.plain.values(), *(graph for pair in sets._unused for graph in pair)]
    assert len(set(alive)) == len(manager.told) - 2 == 20


def test_a_memory_profile_reckons_with_other_places() -> None:
    manager = Manager(sizes=SMALL)
    manager._max_full_descs_to_capture, manager._capture_mem_samples = 2, []
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert manager.told[2:] == [(Size(8), True), (Size(4), True)]
    assert sets.again == 4 * (4 << 20) + 3 * 3 * graphs.POOL


@pytest.mark.usefixtures("places")
def test_the_progress_counts_other_places_too() -> None:
    manager = Manager(sizes=SMALL)
    sets = GraphSets(manager, manager.set_live)
    told = []
    capture = sets._capture

    def watched() -> None:
        told.append(len(manager._capture_descs[CUDAGraphMode.FULL]))
        capture()

    sets._capture = watched
    manager.capture()
    assert told == [2 * (4 + 3 * 3)]  # at most


@pytest.mark.parametrize("why", ["more GPUs", "a pool of sleep mode", "memory"])
@pytest.mark.usefixtures("places")
def test_pairs_are_captured_once_where_places_cannot_be_tried(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(sizes=SMALL)
    if why == "more GPUs":
        manager.vllm_config.parallel_config.world_size_across_dp = 2
    elif why == "a pool of sleep mode":
        manager.vllm_config.use_cumem_cudagraph_pool = True
    else:
        monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 34))
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert kept(sets) == dict.fromkeys((8, 4, 2, 1), "shared")
    assert len(manager.told) == 2 + 8


@pytest.mark.usefixtures("places")
def test_a_capture_that_fails_elsewhere_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(sizes=SMALL)
    GraphSets(manager, manager.set_live)

    def full() -> str:
        manager.fails_at = Size(4)
        return "pool"

    monkeypatch.setattr(graphs.current_platform, "graph_pool_handle", full, raising=False)
    with pytest.raises(MemoryError):
        manager.capture()
    assert manager.pool == "shared"
    assert not manager.live
