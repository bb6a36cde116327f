"""The device memory of the armed sites: row tables and one buffer per site and layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import CapacityError
from ..ops.site import SiteTap
from ..sites import Armed, ModelFacts
from .plan import StepPlan

Key = tuple[str, int]


def tap_sites(armed: Armed) -> dict[Key, str]:
    """(site, layer) -> rows for every tap that ``armed`` needs; attention needs the queries."""
    taps: dict[Key, str] = {}
    for name, layer, rows in armed:
        key = ("q" if name == "attention" else name, layer)
        taps[key] = "all" if "all" in (rows, taps.get(key)) else rows
    return taps


def buffer_bytes(armed: Armed, facts: ModelFacts, last: int, every: int, item: int) -> int:
    """Bytes of the site buffers and their row tables. ``last``/``every``: rows of the two capacities;
    ``item``: bytes a value."""
    taps = tap_sites(armed)
    total = 4 * len(taps) * (1 + every)
    for (name, _), rows in taps.items():
        width = 1
        for size in facts.row_shape(name):
            width *= size
        total += width * item * (last if rows == "last" else every)
    return total


class SiteBank:
    """Taps by (site, layer), and the tables that tell them each step which rows to take.

    All sites are idle after construction and after :meth:`clear`: profile, dummy and capture runs
    see nothing of a former step.
    """

    def __init__(
        self,
        armed: Armed,
        facts: ModelFacts,
        last_rows: int,
        all_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        taps = tap_sites(armed)
        self.tables = torch.zeros(max(len(taps), 1), 1 + all_rows, dtype=torch.int32, device=device)
        self._table_ids = torch.full((max(len(taps), 1),), -1, dtype=torch.int32, device=device)
        self._slot = {key: i for i, key in enumerate(taps)}
        self.taps: dict[Key, SiteTap] = {}
        for (name, layer), rows in taps.items():
            width = 1
            for size in facts.row_shape(name):
                width *= size
            slot = self._slot[name, layer]
            self.taps[name, layer] = SiteTap(
                self.tables,
                self._table_ids[slot : slot + 1],
                last_rows if rows == "last" else all_rows,
                width,
                dtype,
            )
        self._active = False

    def bytes(self) -> int:
        """Device memory held, in bytes."""
        tensors = [self.tables, self._table_ids, *(tap.buf for tap in self.taps.values())]
        return sum(t.numel() * t.element_size() for t in tensors)

    def load(self, plan: StepPlan) -> None:
        """Make the sites follow ``plan`` in the next forward pass."""
        for key, table in plan.table_of.items():
            rows = len(plan.tables[table])
            if rows > self.taps[key].buf.shape[0]:
                raise CapacityError(
                    f"{rows} rows at site {key[0]} of layer {key[1]} in one step, "
                    f"{self.taps[key].buf.shape[0]} armed"
                )
        host = self.tables.numpy()
        for t, table_rows in enumerate(plan.tables):
            host[t, 0] = len(table_rows)
            host[t, 1 : 1 + len(table_rows)] = table_rows
        ids = self._table_ids.numpy()
        ids[:] = -1
        for key, t in plan.table_of.items():
            ids[self._slot[key]] = t
        self._active = True

    def clear(self) -> None:
        """Make every site idle."""
        if self._active:
            self._table_ids.fill_(-1)
            self._active = False

    def prove(self, run: Callable[[], None]) -> list[Key]:
        """Run one forward with every site taking row 0; the sites whose op did not fire."""
        before = {key: int(tap.fired) for key, tap in self.taps.items()}
        self.tables[0, 0] = 1
        self.tables[0, 1] = 0
        self._table_ids.fill_(0)
        try:
            run()
        finally:
            self._table_ids.fill_(-1)
        return [key for key, tap in self.taps.items() if int(tap.fired) == before[key]]

    def rows(self, key: Key, index: slice | Tensor) -> Tensor:
        """Rows taken at a site in this step: [n, width], a view where ``index`` is a slice."""
        return self.taps[key].buf[index]
