"""Which rows of a step get which edits: requests' interventions -> tables of the edit kernel.

The worker's half of :mod:`vllm_hook.runtime.edits`. Vectors and gate flags live in slots; a slot of
a vector is shared by content and counted, a flag belongs to one condition of one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import CapacityError
from ..ops import edit as op
from .plan import BatchView, positions_within
from .requests import Ranges

Place = tuple[str, int]


@dataclass(frozen=True)
class Gate:
    """A condition of one request: where it is read, at which rows, and the flag that it writes."""

    place: Place
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    rows: Ranges
    per_row: bool
    flag: int


@dataclass(frozen=True)
class Attend:
    """``method: attend`` of one request: heads by layer, key ranges, a weight or a mass."""

    heads: Mapping[int, tuple[int, ...]]
    span: tuple[tuple[int, int], ...]
    weight: float | None
    mass: float | None
    rows: Ranges
    gate: Gate | None
    token_flag: int


@dataclass(frozen=True)
class AttendPiece:
    """Rows of one step that one :class:`Attend` changes, at ``positions``, of request ``batch_index``."""

    attend: Attend
    batch_index: int
    rows: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Filter:
    """Lets through the positions in ``sure`` and those whose token is listed."""

    token_ids: tuple[int, ...]
    sure: Ranges


@dataclass(frozen=True)
class RowEdit:
    """One intervention of one request. ``entries`` are (ints, floats) of the kernel with slots filled in;
    with ``filters``, ``token_flag`` says row by row which rows pass all of them."""

    places: tuple[Place, ...]
    rows: Ranges
    entries: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
    gate: Gate | None
    filters: tuple[Filter, ...]
    token_flag: int


class Slots:
    """``capacity`` numbered slots for keys, shared and counted. With ``keep``, a slot that nobody uses any
    more stays what it was until it is needed for another key: what it holds need not be filled in again."""

    def __init__(self, capacity: int, what: str, keep: bool = False) -> None:
        self.capacity, self.what, self._keep = capacity, what, keep
        self._free: dict[int, Any] = dict.fromkeys(range(capacity))  # with their former keys, oldest first
        self._slot: dict[Any, int] = {}
        self._uses: Counter[Any] = Counter()

    def take(self, key: Any) -> tuple[int, bool]:
        """The slot of a key, and whether it has to be filled."""
        new = key not in self._slot
        if new:
            if not self._free:
                raise CapacityError(f"all {self.capacity} slots for {self.what} are in use")
            slot = next(iter(self._free))
            self._slot.pop(self._free[slot], None)
            self._slot[key] = slot
        self._free.pop(self._slot[key], None)
        self._uses[key] += 1
        return self._slot[key], new

    def give_back(self, key: Any, keep: bool = True) -> None:
        """One use less. Not ``keep``: the slot may not hold what it should."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            keep = keep and self._keep
            slot = self._slot[key] if keep else self._slot.pop(key)
            self._free[slot] = key if keep else None

    def find(self, key: Any) -> int | None:
        """The slot that holds what belongs to a key, in use or not."""
        return self._slot.get(key)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)


@dataclass(eq=False)
class EditState:
    """The interventions of one request and the slots it holds (``taken``: whose, key, number); or of several
    that intervene alike (``digest``), if nothing of it is a request's own: ``users`` of them."""

    edits: tuple[RowEdit, ...]
    groups: tuple[tuple[tuple[Place, ...], tuple[int, ...]], ...]
    taken: tuple[tuple[Slots, Any, int], ...]
    attends: tuple[Attend, ...] = ()
    digest: str | None = None
    users: int = 1
    gates: tuple[Gate, ...] = field(init=False)
    filtered: tuple[RowEdit, ...] = field(init=False)
    steady_from: int = field(init=False)
    steady: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        """What every step asks, worked out once. From ``steady_from`` on no range begins or ends any more:
        ``steady`` are the edits that then hold, by group."""
        own = {(e.gate.per_row, e.gate.flag): e.gate for e in self.edits if e.gate is not None}
        self.gates = tuple(own.values())
        self.filtered = tuple(e for e in self.edits if e.filters)
        ranges = [r for e in self.edits for r in e.rows] + [r for gate in self.gates for r in gate.rows]
        ends = [x for r in ranges for x in r if x is not None]
        self.steady_from = max(ends, default=0)
        self.steady = tuple(
            tuple(k for k, m in enumerate(members) if any(b is None for _, b in self.edits[m].rows))
            for _, members in self.groups
        )

    @property
    def has_own(self) -> bool:
        """Whether it has flags, which belong to one request."""
        return bool(self.gates or self.filtered or self.attends)

    def is_steady(self, position: int) -> bool:
        """Whether all rows from ``position`` on are treated alike, whatever their tokens."""
        return not self.filtered and not self.attends and position >= self.steady_from

    def decides_from(self, position: int) -> bool:
        """Whether a condition that is decided once may read rows from ``position`` on."""
        return any(b is None or b > position for gate in self.gates if not gate.per_row for _, b in gate.rows)


#: Number, first row, count, and the chain or condition of each of these rows.
_Run = tuple[int, int, int, int]
#: Flag to write, its rows, and for each filter the tokens and which rows pass whatever their token is.
TokenRows = tuple[int, np.ndarray, tuple[tuple[tuple[int, ...], np.ndarray], ...]]


@dataclass(frozen=True, eq=False)
class EditPlan:
    """One step. ``tables[t]`` = (rows, chain of each row); ``cond_tables[t]`` = (rows, condition of each)."""

    tables: tuple[tuple[np.ndarray, np.ndarray], ...]
    table_of: Mapping[Place, int]
    chain_start: np.ndarray
    entry_int: np.ndarray
    entry_float: np.ndarray
    cond_tables: tuple[tuple[np.ndarray, np.ndarray], ...]
    cond_table_of: Mapping[Place, int]
    cond_int: np.ndarray
    cond_float: np.ndarray
    token_rows: tuple[TokenRows, ...]
    row_flags: tuple[int, ...]
    attends: Mapping[int, Sequence[AttendPiece]]
    kept: bool = False  # it may come again


#: Plans that are kept, and the most editing requests and rows of a step whose plan is: a chat that goes on,
#: or the next with the same program, meets the same again; large batches do not, and need not wait for the
#: host, and neither do long prompts.
PLANS_KEPT, KEPT_REQUESTS, KEPT_ROWS = 64, 8, 512


class EditPlanner:
    """Plans steps, and keeps the last plan: while the same requests decode on, nothing of it changes. Of
    small batches it keeps those before, too, for requests that intervene alike at the same places."""

    def __init__(self) -> None:
        self._key: tuple[int, list[str], list[int]] | None = None
        self._plan: EditPlan | None = None
        self._known: dict[tuple[Any, ...], EditPlan | None] = {}

    def plan(
        self,
        version: int,
        view: BatchView,
        states: Mapping[str, EditState],
        seen: Callable[[], Mapping[str, int]],
    ) -> EditPlan | None:
        """As :func:`make_edit_plan`. ``version`` changes whenever a request comes or goes."""
        key = (version, list(view.req_ids), list(view.starts))
        if key == self._key:
            return self._plan
        plan = self._planned(view, states, seen)
        steady = all(
            (state := states.get(req_id)) is None or state.is_steady(int(first))
            for req_id, first in zip(view.req_ids, view.first, strict=True)
        )
        self._key, self._plan = (key, plan) if steady else (None, None)
        return plan

    def _planned(
        self, view: BatchView, states: Mapping[str, EditState], seen: Callable[[], Mapping[str, int]]
    ) -> EditPlan | None:
        alike = _alike(view, states)
        if alike is None:
            return make_edit_plan(view, states, seen())
        if alike in self._known:
            plan = self._known.pop(alike)
        else:
            made = make_edit_plan(view, states, {})
            plan = made and replace(made, kept=True)
            if len(self._known) >= PLANS_KEPT:
                del self._known[next(iter(self._known))]
        self._known[alike] = plan  # the last one used is the last to go
        return plan


def _alike(view: BatchView, states: Mapping[str, EditState]) -> tuple[Any, ...] | None:
    """All that the plan of a step depends on, if the requests that edit are few and hold nothing of their
    own: what each does, and where its rows begin and end, in its text and in the batch."""
    if len(states) > KEPT_REQUESTS or view.starts[-1] > KEPT_ROWS:
        return None
    found: list[Any] = []
    for i, req_id in enumerate(view.req_ids):
        state = states.get(req_id)
        if state is not None:
            if state.digest is None:
                return None
            first = int(view.first[i])
            found += state, min(first, state.steady_from), view.starts[i], view.starts[i + 1]
    return tuple(found)


def make_edit_plan(
    view: BatchView, states: Mapping[str, EditState], seen: Mapping[str, int]
) -> EditPlan | None:
    """Plan a step; None when it edits nothing. ``seen``: condition rows below it were evaluated
    before a preemption, and their outcome is kept."""
    builder = _Builder()
    for i, req_id in enumerate(view.req_ids):
        state = states.get(req_id)
        if state is not None:
            first, start = int(view.first[i]), int(view.starts[i])
            stop = first + int(view.starts[i + 1]) - start
            builder.request(i, state, first, stop, start - first, max(first, seen.get(req_id, 0)))
    return builder.plan()


class _Builder:
    def __init__(self) -> None:
        self.rows: dict[tuple[Place, ...], list[_Run]] = {}
        self.conds: dict[tuple[Place, ...], list[_Run]] = {}
        self.chains: list[int] = [0]
        self.chain_of: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self.ints: list[tuple[int, ...]] = []
        self.floats: list[tuple[float, ...]] = []
        self.cond_ints: list[tuple[int, ...]] = []
        self.cond_floats: list[tuple[float, ...]] = []
        self.token_rows: list[TokenRows] = []
        self.row_flags: set[int] = set()
        self.attends: dict[int, list[AttendPiece]] = {}
        self._pieces = 0

    def request(self, i: int, state: EditState, first: int, stop: int, shift: int, fresh_from: int) -> None:
        for edit in state.filtered:
            positions = positions_within(edit.rows, first, stop)
            if positions.size:
                passing = tuple(
                    (f.token_ids, np.isin(positions, positions_within(f.sure, first, stop)))
                    for f in edit.filters
                )
                self.token_rows.append((edit.token_flag, positions + shift, passing))
                self.row_flags.add(edit.token_flag)
        for gate in state.gates:
            self.gate(gate, first, stop, shift, fresh_from)
        for attend in state.attends:
            positions = positions_within(attend.rows, first, stop)
            if positions.size:
                for layer in attend.heads:
                    piece_at = AttendPiece(attend, i, positions + shift, positions)
                    self.attends.setdefault(layer, []).append(piece_at)
        for group, (places, members) in enumerate(state.groups):
            if first >= state.steady_from:
                active = state.steady[group]
                segments = [(first, stop, active)] if active else []
            else:
                segments = _segments([state.edits[m].rows for m in members], first, stop)
            for a, b, active in segments:
                key = (id(state), group, active)  # requests that intervene alike have one state
                chain = self.chain_of.get(key)
                if chain is None:
                    chain = self.chain_of[key] = self.chain([state.edits[members[k]] for k in active])
                self.put(self.rows, places, a + shift, b - a, chain)

    def put(
        self,
        where: dict[tuple[Place, ...], list[_Run]],
        places: tuple[Place, ...],
        row: int,
        count: int,
        index: int,
    ) -> None:
        where.setdefault(places, []).append((self._pieces, row, count, index))
        self._pieces += 1

    def gate(self, gate: Gate, first: int, stop: int, shift: int, fresh_from: int) -> None:
        low = first if gate.per_row else fresh_from
        runs = [
            (max(a, low), stop if b is None else min(b, stop))
            for a, b in gate.rows
            if max(a, low) < stop and (b is None or b > low)
        ]
        if gate.per_row:
            self.row_flags.add(gate.flag)
        if runs:
            self.cond_ints.append(gate.ints)
            self.cond_floats.append(gate.floats)
            for a, b in runs:
                self.put(self.conds, (gate.place,), a + shift, b - a, len(self.cond_ints) - 1)

    def chain(self, edits: Sequence[RowEdit]) -> int:
        for edit in edits:
            for ints, floats in edit.entries:
                self.ints.append(ints)
                self.floats.append(floats)
        self.chains.append(len(self.ints))
        return len(self.chains) - 2

    def plan(self) -> EditPlan | None:
        if not self.rows and not self.conds and not self.attends:
            return None
        tables, table_of = _share(self.rows)
        cond_tables, cond_table_of = _share(self.conds)
        return EditPlan(
            tables=tables,
            table_of=table_of,
            chain_start=np.asarray(self.chains, dtype=np.int32),
            entry_int=np.asarray(self.ints, dtype=np.int32).reshape(-1, 9),
            entry_float=np.asarray(self.floats, dtype=np.float32).reshape(-1, 4),
            cond_tables=cond_tables,
            cond_table_of=cond_table_of,
            cond_int=np.asarray(self.cond_ints, dtype=np.int32).reshape(-1, 6),
            cond_float=np.asarray(self.cond_floats, dtype=np.float32).reshape(-1, 3),
            token_rows=tuple(self.token_rows),
            row_flags=tuple(sorted(self.row_flags)),
            attends=self.attends,
        )


def _segments(ranges: Sequence[Ranges], first: int, stop: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut [first, stop) where the set of ranges that hold changes: (a, b, which of them hold)."""
    cuts = {first, stop}
    for each in ranges:
        for a, b in each:
            cuts.update(x for x in (a, b) if x is not None and first < x < stop)
    edges = sorted(cuts)
    out = []
    for a, b in pairwise(edges):
        active = tuple(
            k for k, each in enumerate(ranges) if any(x <= a and (y is None or a < y) for x, y in each)
        )
        if active:
            out.append((a, b, active))
    return out


def _share(
    runs: Mapping[tuple[Place, ...], list[_Run]],
) -> tuple[tuple[tuple[np.ndarray, np.ndarray], ...], dict[Place, int]]:
    """Places with the same runs share a table of (rows, index of each row)."""
    lists_at: dict[Place, list[int]] = {}
    for number, places in enumerate(runs):
        for place in places:
            lists_at.setdefault(place, []).append(number)
    lists = list(runs.values())
    ids: dict[tuple[int, ...], int] = {}
    table_of = {place: ids.setdefault(tuple(own), len(ids)) for place, own in lists_at.items()}
    return tuple([_table([run for number in own for run in lists[number]]) for own in ids]), table_of


def _table(runs: list[_Run]) -> tuple[np.ndarray, np.ndarray]:
    """Rows, in the order in which they were planned, and the index of each."""
    _, first, count, index = np.asarray(sorted(runs), dtype=np.int32).T
    if (count > 1).any():
        within = np.arange(count.sum(), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
        first, index = np.repeat(first, count) + within.astype(np.int32), np.repeat(index, count)
    return np.ascontiguousarray(first), np.ascontiguousarray(index)


class Places(tuple[Place, ...]):
    """Places that edits have in common; hashed once, since each step sorts its rows by them."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


#: Requests that intervene at the same places have one tuple of them, which is then found by identity.
_places = lru_cache(maxsize=1024)(Places)


def group_places(edits: Sequence[RowEdit]) -> tuple[tuple[tuple[Place, ...], tuple[int, ...]], ...]:
    """(places, edits that meet there in order) for one request: places with the same edits together."""
    at: dict[Place, list[int]] = {}
    for i, edit in enumerate(edits):
        for place in edit.places:
            at.setdefault(place, []).append(i)
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place, members in at.items():
        groups.setdefault(tuple(members), []).append(place)
    return tuple((_places(tuple(places)), members) for members, places in groups.items())


def initial_flag(over: int) -> float:
    """A latched flag before its first row: ``all`` starts true, the others false."""
    return 1.0 if over == op.ALL else 0.0
