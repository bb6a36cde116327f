"""The step's tables in one piece of memory: packed on the host, sent in one copy, read by every site.

Layout and offsets: :mod:`vllm_hook.ops.edit`. On a GPU the host writes one of a few pinned pieces
in turn and the copy is queued on the main stream, behind the last forward pass that reads the old
contents and before the one that reads the new. Nothing waits for the device, except when the host
is several steps ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..errors import CapacityError
from ..ops import edit as op
from .edit_limits import CONDITIONS_A_ROW
from .edit_plan import EditPlan
from .plan import StepPlan

Place = tuple[str, int]

#: Pinned copies: the host may be this many steps ahead of the device before it has to wait.
RING = 3


@dataclass(frozen=True)
class AreaSize:
    """Rows that each site may be asked for in a step, which sites can be edited, and the most
    entries and conditions of a step."""

    rows: Mapping[Place, int]
    edited: frozenset[Place]
    entries: int
    conditions: int

    def ints(self) -> int:
        total = op.HEADER_SIZE * len(self.rows)
        total += op.ENTRY_SIZE * self.entries + op.COND_SIZE * self.conditions
        for place, rows in self.rows.items():
            total += rows * (op.RECORD_SIZE + 1 + (CONDITIONS_A_ROW + 1 if place in self.edited else 0))
        return total


class StepArea:
    """``live``, ``headers[place]`` and ``step`` are what sites take as inputs; all start idle."""

    def __init__(self, size: AreaSize, device: torch.device) -> None:
        ints = size.ints()
        self.places = list(size.rows)
        self._numbers = {place: i for i, place in enumerate(self.places)}
        self.step = torch.zeros(ints, dtype=torch.int32, device=device)
        self.live = torch.zeros(1, dtype=torch.int32, device="meta" if device.type == "meta" else "cpu")
        self._live = np.empty(1) if device.type == "meta" else self.live.numpy()
        self.headers = {
            place: self.step[op.HEADER_SIZE * i : op.HEADER_SIZE * (i + 1)]
            for i, place in enumerate(self.places)
        }
        self._on_device = device.type == "cuda"
        pieces = RING if self._on_device else 1
        self._host = (
            [torch.zeros(ints, dtype=torch.int32, pin_memory=True) for _ in range(pieces)]
            if self._on_device
            else [self.step]
        )
        self._sent: list[torch.cuda.Event | None] = [None] * pieces
        self._turn = 0
        self._dirty = False
        self._mode = 0  # what live holds
        self._kind = 1
        self._last: tuple[StepPlan | None, EditPlan | None] | None = None
        self._used: frozenset[int] | None = None
        self._packed: WeakKeyDictionary[EditPlan, tuple[np.ndarray, bool]] = WeakKeyDictionary()

    def bytes(self) -> int:
        return self.step.numel() * 4

    def load(self, taps: StepPlan | None, edits: EditPlan | None) -> None:
        """Make the sites follow these plans in the next forward pass."""
        if self._same(taps, edits):
            self._say(self._kind)
            return
        self._turn = (self._turn + 1) % len(self._host)
        if (event := self._sent[self._turn]) is not None:
            event.synchronize()
        host = self._host[self._turn]
        end, latched = self._write(host.numpy(), taps, edits)
        if self._on_device:
            self.step[:end].copy_(host[:end], non_blocking=True)
            event = self._sent[self._turn] = self._sent[self._turn] or torch.cuda.Event()
            event.record()
        self._kind = 2 if latched else 1
        self._say(self._kind)
        self._dirty = True
        self._last, self._used = (taps, edits), None

    def used(self) -> frozenset[int] | None:
        """Numbers of the sites that may have something to do in this step; None: any."""
        if self._used is None and self._last is not None:
            taps, edits = self._last
            tables = [taps.table_of] if taps is not None else []
            tables += [edits.table_of, edits.cond_table_of] if edits is not None else []
            places = {place for table in tables for place in table}
            self._used = frozenset(self._numbers[place] for place in places if place in self._numbers)
        return self._used

    def _write(self, out: np.ndarray, taps: StepPlan | None, edits: EditPlan | None) -> tuple[int, bool]:
        """The tables of a step. How many words they are, and whether conditions are decided by them."""
        again = edits if taps is None and edits is not None and edits.kept else None
        if again is not None and again in self._packed:
            words, latched = self._packed[again]
            out[: len(words)] = words
            return len(words), latched
        packer = _Packer(out, len(self.places))
        packer.edits(edits)
        for i, place in enumerate(self.places):
            packer.site(i, place, taps, edits)
        if again is not None:
            self._packed[again] = out[: packer.end].copy(), packer.latched
        return packer.end, packer.latched

    def _same(self, taps: StepPlan | None, edits: EditPlan | None) -> bool:
        """Whether the device still holds exactly these tables."""
        if not self._on_device or not self._dirty or self._last is None:
            return False
        old_taps, old_edits = self._last
        if edits is not old_edits or (taps is None) != (old_taps is None):
            return False
        if taps is None or old_taps is None:
            return True
        if taps.tables is old_taps.tables and taps.table_of is old_taps.table_of:
            return True
        return (
            taps.table_of == old_taps.table_of
            and len(taps.tables) == len(old_taps.tables)
            and all(map(np.array_equal, taps.tables, old_taps.tables))
        )

    def _say(self, mode: int) -> None:
        if mode != self._mode:
            self._live[0] = mode
            self._mode = mode

    def set_live(self, live: bool) -> None:
        """Whether ops launch at all; their tables may be empty."""
        self._say(int(live))

    def rest(self) -> None:
        """The forward pass is queued: nothing is active any more. Its tables stay until it has run."""
        self._say(0)
        if not self._on_device:
            self.clear()

    def clear(self) -> None:
        """Make every site idle, also where a captured graph reads the tables: dummy and capture runs,
        and steps without rows of ours."""
        self._say(0)
        if self._dirty:
            self.step[: op.HEADER_SIZE * len(self.places)].zero_()
            self._dirty = False
            self._last = self._used = None

    def probe(self) -> None:
        """Every site takes row 0 and changes nothing: shows that its op runs at all."""
        if not self.places:
            return
        host = np.zeros(op.HEADER_SIZE * len(self.places) + op.RECORD_SIZE, dtype=np.int32)
        at = op.HEADER_SIZE * len(self.places)
        for i in range(len(self.places)):
            host[op.HEADER_SIZE * i : op.HEADER_SIZE * i + 2] = at, 1  # a record of zeros, here as well
        self.step[: len(host)].copy_(torch.from_numpy(host))
        self._say(1)
        self._dirty = True
        self._last = self._used = None


class _Packer:
    def __init__(self, out: np.ndarray, places: int) -> None:
        self.out = out
        self.end = op.HEADER_SIZE * places
        self.out[: self.end] = 0
        self.latched = False
        self.chain_at = self.chain_n = self.chain_path = np.empty(0, dtype=np.int32)
        self.cond_at = np.empty(0, dtype=np.int32)
        self._tables: dict[tuple[int, int, int], np.ndarray] = {}

    def put(self, values: np.ndarray) -> int:
        """Append int32s; where they start."""
        start, stop = self.end, self.end + values.size
        if stop > len(self.out):
            raise CapacityError(f"a step needs {stop} words of tables, {len(self.out)} are reserved")
        self.out[start:stop] = values.reshape(-1)
        self.end = stop
        return start

    def edits(self, plan: EditPlan | None) -> None:
        """Entries and conditions of the step, shared by all sites."""
        if plan is None:
            return
        entries = np.zeros((len(plan.entry_int), op.ENTRY_SIZE), dtype=np.int32)
        entries[:, : op.A] = plan.entry_int
        entries[:, op.A : op.THETA + 1] = plan.entry_float.view(np.int32)
        self.chain_at = self.put(entries) + op.ENTRY_SIZE * plan.chain_start[:-1]
        self.chain_n = np.diff(plan.chain_start)
        self.chain_path = _paths(entries, plan.chain_start, self.chain_n)
        conds = np.zeros((len(plan.cond_int), op.COND_SIZE), dtype=np.int32)
        conds[:, : op.PER_ROW + 1] = plan.cond_int
        conds[:, op.COND_C : op.COUNT + 1] = plan.cond_float.view(np.int32)
        start = self.put(conds)
        self.cond_at = np.arange(len(conds), dtype=np.int32) * op.COND_SIZE + start

    def site(self, index: int, place: Place, taps: StepPlan | None, edits: EditPlan | None) -> None:
        tap = taps.table_of.get(place, -1) if taps is not None else -1
        edit = edits.table_of.get(place, -1) if edits is not None else -1
        cond = edits.cond_table_of.get(place, -1) if edits is not None else -1
        if tap < 0 and edit < 0 and cond < 0:
            return
        key = (tap, edit, cond)
        if key not in self._tables:
            self._tables[key] = self._table(
                taps.tables[tap] if taps is not None and tap >= 0 else None,
                edits.tables[edit] if edits is not None and edit >= 0 else None,
                edits if cond >= 0 else None,
                cond,
            )
        self.out[op.HEADER_SIZE * index : op.HEADER_SIZE * (index + 1)] = self._tables[key]

    def _table(
        self,
        taken: np.ndarray | None,
        edited: tuple[np.ndarray, np.ndarray] | None,
        plan: EditPlan | None,
        cond: int,
    ) -> np.ndarray:
        """The header of a site that follows these tables."""
        latched, by_row, which = self._conditions(plan, cond)
        parts = [
            rows for rows in (taken, edited[0] if edited is not None else None, by_row) if rows is not None
        ]
        rows = parts[0] if len(parts) == 1 and by_row is None else np.unique(np.concatenate([_NONE, *parts]))
        records = np.zeros((len(rows), op.RECORD_SIZE), dtype=np.int32)
        records[:, op.ROW] = rows
        records[:, op.DST] = -1
        if taken is not None:
            records[_find(rows, taken), op.DST] = np.arange(len(taken))
        if edited is not None:
            at = _find(rows, edited[0])
            records[at, op.ENTRIES] = self.chain_at[edited[1]]
            records[at, op.N_ENTRIES] = self.chain_n[edited[1]]
            records[at, op.PATH] = self.chain_path[edited[1]]
        if by_row is not None:
            start = self.put(self.cond_at[which])
            own, first, count = np.unique(by_row, return_index=True, return_counts=True)
            at = _find(rows, own)
            records[at, op.CONDS] = start + first
            records[at, op.N_CONDS] = count
            records[at, op.PATH] = op.GENERAL
        header = np.zeros(op.HEADER_SIZE, dtype=np.int32)
        header[: op.FIRST_RECORD] = self.put(records), len(rows), *latched
        if taken is not None:
            header[op.TAKEN : op.N_TAKEN + 1] = self.put(taken), len(taken)
        if len(rows):
            header[op.FIRST_RECORD : op.FIRST_ENTRIES] = records[0]
            at = records[0, op.ENTRIES]
            copied = op.ENTRY_SIZE * min(op.COPIED_ENTRIES, records[0, op.N_ENTRIES])
            header[op.FIRST_ENTRIES : op.FIRST_ENTRIES + copied] = self.out[at : at + copied]
        return header

    def _conditions(
        self, plan: EditPlan | None, cond: int
    ) -> tuple[tuple[int, int], np.ndarray | None, np.ndarray]:
        """The list of latched conditions, and rows (sorted) with the condition by row that reads each."""
        if plan is None:
            return (0, 0), None, _NONE
        rows, which = plan.cond_tables[cond]
        per_row = plan.cond_int[which, op.PER_ROW] != 0
        offsets = []
        for c in np.unique(which[~per_row]):
            own = rows[which == c]
            at = self.put(own)
            self.out[self.cond_at[c] + op.ROWS : self.cond_at[c] + op.N_ROWS + 1] = at, len(own)
            offsets.append(self.cond_at[c])
        latched = (0, 0)
        if offsets:
            self.latched = True
            latched = (self.put(np.asarray(offsets, dtype=np.int32)), len(offsets))
        if not per_row.any():
            return latched, None, _NONE
        order = np.argsort(rows[per_row], kind="stable")
        return latched, rows[per_row][order], which[per_row][order]


_NONE = np.empty(0, dtype=np.int32)


def _paths(entries: np.ndarray, chain_start: np.ndarray, chain_n: np.ndarray) -> np.ndarray:
    """What each chain needs of the kernel."""
    general = (entries[:, [op.KIND, op.ACT, op.KEEP_NORM, op.GATE_KIND]] != 0).any(1)
    general |= entries[:, op.ROW_GATE] >= 0
    need = np.where(general, op.GENERAL, np.where(entries[:, op.B] != 0, op.PRODUCTS, op.SUMS_ONLY))
    own = np.full(len(chain_n), op.SUMS_ONLY)
    np.maximum.at(own, np.repeat(np.arange(len(chain_n)), chain_n), need)
    return np.where(chain_n > op.COPIED_ENTRIES, op.GENERAL, own)


def _find(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray | slice:
    """Where ``wanted`` rows stand in ``rows`` (the same array, or sorted and distinct)."""
    return slice(None) if rows is wanted else np.searchsorted(rows, wanted)
