"""Two sets of full graphs, captured in pairs, on a stand-in for vLLM's graph manager."""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from vllm_hook.engine.graphs import GraphSets

SIZES = [8, 4, 1]


class Manager:
    """Captures and replays like vLLM's: a full graph is what was captured, and whether launches were live."""

    def __init__(self, full: bool = True) -> None:
        self.graphs: dict[int, tuple[int, bool]] = {}
        self._capture_descs: dict[CUDAGraphMode, Any] = {CUDAGraphMode.PIECEWISE: [512, 64]}
        if full:
            self._capture_descs[CUDAGraphMode.FULL] = list(SIZES)
        self._capture_mem_samples: list[int] | None = None
        self._max_full_descs_to_capture: int | None = None
        self.live = False
        self.told: list[tuple[int, bool]] = []
        self.fails_at: int | None = None

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
                    self.graphs[desc] = (desc, self.live)
                    if self._capture_mem_samples is not None:
                        self._capture_mem_samples.append(desc << 20)

    def dispatch(self, *args: Any, **kwargs: Any) -> None: ...

    def run_fullgraph(self, desc: int) -> tuple[int, bool]:
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
        assert [manager.run_fullgraph(size) for size in SIZES] == [(size, active) for size in SIZES]
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


def test_a_memory_profile_captures_a_few_and_tells_what_the_second_set_takes() -> None:
    manager = Manager()
    manager._max_full_descs_to_capture, manager._capture_mem_samples = 2, []
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert manager.told == [(512, True), (64, True), (8, True), (4, True)]
    assert sets.again == len(SIZES) * (4 << 20)
    assert sets.plain is None


def test_a_second_capture_replaces_the_first() -> None:
    manager = Manager()
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    manager.graphs.clear()
    manager.capture()
    assert sets.plain == {size: (size, False) for size in SIZES}
    assert sets.hooked == {size: (size, True) for size in SIZES}


def test_without_full_graphs_there_is_one_set() -> None:
    manager = Manager(full=False)
    sets = GraphSets(manager, manager.set_live)
    manager.capture()
    assert sets.plain is None
    assert manager.told == [(512, True), (64, True)]


def test_a_capture_that_fails_leaves_launches_off() -> None:
    manager = Manager()
    manager.fails_at = 4
    descs = manager._capture_descs
    GraphSets(manager, manager.set_live)
    with pytest.raises(MemoryError):
        manager.capture()
    assert not manager.live
    assert manager._capture_descs is descs
