"""Which rows of a step get which edits: requests' interventions -> tables of the edit kernel.

The worker's half of :mod:`vllm_hook.runtime.edits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from .edit_state import Attend, EditState, Gate, Place, RowEdit
from .plan import BatchView, positions_within
from .requests import Ranges


@dataclass(frozen=True)
class AttendPiece:
    """Rows of one step that one :class:`Attend` changes, at ``positions``, of request ``batch_index``."""

    attend: Attend
    batch_index: int
    rows: np.ndarray
    positions: np.ndarray


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
