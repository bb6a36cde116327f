"""The device memory of the armed sites: a buffer for the rows that each takes, and the step's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from ..errors import CapacityError
from ..ops.site import Site
from ..sites import Armed, ModelFacts, site
from .area import AreaSize, StepArea
from .edit_bank import EditBank, edit_bytes
from .edit_limits import step_limits
from .edit_plan import EditPlan
from .plan import StepPlan

Key = tuple[str, int]

#: The buffers of a site's layers lie in one piece, each at a multiple of so many bytes: compiled code
#: makes a copy of an input at an odd address.
ALIGN = 256
#: Sets of layers of which is remembered where their rows lie: as many as loaded programs observe.
_SLICES_KEPT = 1024


def tap_sites(armed: Armed) -> dict[Key, str]:
    """(site, layer) -> rows for every tap that ``armed`` needs; attention needs the queries."""
    taps: dict[Key, str] = {}
    for name, layer, rows in armed:
        key = ("q" if name == "attention" else name, layer)
        taps[key] = "all" if "all" in (rows, taps.get(key)) else rows
    return taps


def site_bytes(
    armed: Armed, facts: ModelFacts, last: int, every: int, requests: int, slots: int, item: int
) -> int:
    """Bytes of device memory of all armed sites. ``last``/``every``: rows of the two capacities;
    ``item``: bytes a value."""
    size = _area_size(armed, last, every, requests)
    rows = sum(
        _padded(prod(facts.row_shape(name)), last if kind == "last" else every, item) * item
        for (name, _), kind in tap_sites(armed).items()
    )
    return rows + 4 * size.ints() + edit_bytes(armed, facts, every, requests, slots)


def _padded(width: int, rows: int, item: int) -> int:
    """Values that a buffer takes up."""
    return -(-width * rows * item // ALIGN) * ALIGN // item


def _area_size(armed: Armed, last: int, every: int, requests: int) -> AreaSize:
    edited = armed.edit_places()
    rows = {key: last if kind == "last" else every for key, kind in tap_sites(armed).items()}
    rows.update(dict.fromkeys(sorted(edited), every))
    entries, conditions = step_limits(requests) if edited else (0, 0)
    return AreaSize(rows, edited, entries, conditions)


class SiteBank:
    """Sites by (site, layer), and the tables that tell them each step what to do with which row.

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
        edits: EditBank | None = None,
        requests: int = 1,
    ) -> None:
        self.device = device
        self.area = StepArea(_area_size(armed, last_rows, all_rows, requests), device)
        self.taken: dict[Key, Tensor] = {}
        self._stacks: dict[Key, tuple[Tensor, int]] = {}
        self._slices: dict[tuple[Key, ...], tuple[Tensor, slice] | None] = {}
        self._fitting: object = None  # tables that were found to fit
        layers: dict[tuple[str, int], list[Key]] = {}
        for key, kind in tap_sites(armed).items():
            layers.setdefault((key[0], last_rows if kind == "last" else all_rows), []).append(key)
        for (name, rows), keys in layers.items():
            width = prod(facts.row_shape(name))
            whole = torch.zeros(len(keys), _padded(width, rows, dtype.itemsize), dtype=dtype, device=device)
            stack = whole[:, : rows * width].view(len(keys), rows, width)
            self._stacks.update({key: (stack, i) for i, key in enumerate(sorted(keys))})
            self.taken.update({key: stack[i] for i, key in enumerate(sorted(keys))})
        edited = armed.edit_places()
        self.sites = {
            key: Site(
                self.area.live,
                header,
                self.area.step,
                self.taken.get(key),
                edits.state[site(key[0]).kind] if edits is not None and key in edited else None,
            )
            for key, header in self.area.headers.items()
        }

    def bytes(self) -> int:
        """Device memory held, in bytes."""
        stacks = {id(stack): stack for stack, _ in self._stacks.values()}.values()
        return sum(t.untyped_storage().nbytes() for t in stacks) + self.area.bytes()

    def load(self, plan: StepPlan | None, edits: EditPlan | None = None) -> None:
        """Make the sites follow these plans in the next forward pass."""
        if plan is not None and plan.tables is not self._fitting:
            for key, table in plan.table_of.items():
                rows = len(plan.tables[table])
                if rows > self.taken[key].shape[0]:
                    raise CapacityError(
                        f"{rows} rows at site {key[0]} of layer {key[1]} in one step, "
                        f"{self.taken[key].shape[0]} armed"
                    )
            self._fitting = plan.tables
        self.area.load(plan, edits)

    def clear(self) -> None:
        """Make every site idle."""
        self.area.clear()

    def prove(self, run: Callable[[], None]) -> list[Key]:
        """Run one forward with every site taking row 0; the sites whose op did not fire."""
        before = {key: int(s.fired) for key, s in self.sites.items()}
        self.area.probe()
        try:
            run()
        finally:
            self.area.clear()
        return [key for key, s in self.sites.items() if int(s.fired) == before[key]]

    def rows(self, key: Key, index: slice | Tensor) -> Tensor:
        """Rows taken at a site in this step: [n, width], a view where ``index`` is a slice."""
        return self.taken[key][index]

    def rows_of(self, keys: tuple[Key, ...], indices: Sequence[slice | Tensor]) -> tuple[Tensor, bool]:
        """Rows taken at several layers of a site, [layers, n, width], and whether that is a view.
        ``indices``: one for each layer, or one for all."""
        index = indices[0]
        if len(indices) == 1 and (rows := self.together(keys, index)) is not None:
            return rows, isinstance(index, slice)
        each = indices if len(indices) > 1 else [index] * len(keys)
        return torch.stack([self.rows(*own) for own in zip(keys, each, strict=True)]), False

    def together(self, keys: tuple[Key, ...], index: slice | Tensor) -> Tensor | None:
        """The same without gathering layer by layer, where they lie at even distances; else None."""
        own = self._together(keys)
        return None if own is None else own[0][own[1], index]

    def samples(self) -> list[tuple[str, Tensor]]:
        """For each piece of memory that rows are taken into: its site and one row of it, [1, 1, width]."""
        stacks = {id(stack): (key[0], stack[:1, :1]) for key, (stack, _) in self._stacks.items()}
        return [*stacks.values()]

    def _together(self, keys: tuple[Key, ...]) -> tuple[Tensor, slice] | None:
        """The piece of memory that holds the rows of all these layers, and where in it they are, if they lie
        there at even distances."""
        if keys not in self._slices:
            stack, first = self._stacks[keys[0]]
            places = [self._stacks[key][1] for key in keys]
            step = places[1] - first if len(places) > 1 else 1
            even = step > 0 and places == [*range(first, first + step * len(places), step)]
            if len(self._slices) >= _SLICES_KEPT:
                self._slices.clear()
            alike = even and all(self._stacks[key][0] is stack for key in keys)
            self._slices[keys] = (stack, slice(first, places[-1] + 1, step)) if alike else None
        return self._slices[keys]
