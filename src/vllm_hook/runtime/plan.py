"""BatchView x requests -> StepPlan: which rows of this step go where. Pure, numpy only.

Everything is keyed by (request, observation, absolute position), never by order of arrival.
Chunked prefill, preemption, re-ordered batches and rows run twice need no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from .requests import Lane, Ranges, RequestState, Watch

Rows = np.ndarray
Index = slice | np.ndarray


@dataclass(frozen=True)
class BatchView:
    """The rows of a step. Request i owns rows ``starts[i]:starts[i + 1]``, the first of them at
    absolute position ``first[i]``."""

    req_ids: Sequence[str]
    starts: Sequence[int]
    first: Sequence[int]


class Piece(NamedTuple):
    """Rows of one request within a lane: its rows [a:b]."""

    req_id: str
    batch_index: int
    watch: Watch
    a: int
    b: int


@dataclass(frozen=True)
class LanePlan:
    """``index[table]`` finds the lane's rows, in the order of its pieces, in buffers that follow a table.
    ``positions`` are those of all rows; ``members`` are (request, index of the observation) of each piece;
    ``decode``: each has one row, of a token that was generated."""

    lane: Lane
    pieces: tuple[Piece, ...]
    index: Mapping[int, Index]
    positions: np.ndarray
    decode: bool = False
    members: tuple[tuple[str, int], ...] = ()

    def at(self, piece: Piece) -> np.ndarray:
        """Positions of a piece."""
        return self.positions[piece.a : piece.b]


@dataclass(frozen=True)
class StepPlan:
    """``tables[t]`` are the rows of the step that a site following table t takes; no row twice."""

    tables: tuple[Rows, ...]
    table_of: Mapping[tuple[str, int], int]
    lanes: tuple[LanePlan, ...]


class Planner:
    """Plans steps. Most steps decode one token of each request of the step before: then the same rows are
    taken, one position further, and nothing has to be looked up again for each request."""

    def __init__(self) -> None:
        self._last: tuple[int, BatchView, StepPlan | None] | None = None
        self._more = 0.0  # steps for which the last plan holds on, if the batch does
        self._ran = 0  # steps that went by since

    def plan(self, version: int, view: BatchView, states: Mapping[str, RequestState]) -> StepPlan | None:
        """As :func:`make_plan`. ``version`` changes with ``states``."""
        if self._last is not None and self._ran < self._more:
            known, old, plan = self._last
            ran = self._ran + 1
            if (
                known == version
                and list(view.req_ids) == old.req_ids
                and view.starts == old.starts
                and view.first == [at + ran for at in old.first]
            ):
                self._ran = ran
                return plan and _moved(plan, ran)
        self.sync(states)
        plan = make_plan(view, states)
        self._more, self._ran = _steady(view, states), 0
        # The engine may go on to use its list of requests.
        kept = replace(view, req_ids=list(view.req_ids))
        self._last = (version, kept, plan) if self._more else None
        return plan

    def sync(self, states: Mapping[str, RequestState]) -> None:
        """Before a request is resumed: note which rows were run in steps that were not looked at."""
        if self._last is None or not self._ran:
            return
        _, view, _ = self._last
        for req_id, first in zip(view.req_ids, view.first, strict=True):
            if (state := states.get(req_id)) is not None:
                state.high = max(state.high, first + self._ran + 1)
        self._last = None


def _moved(plan: StepPlan, steps: int) -> StepPlan:
    """The plan some steps later. Tables stay the same objects, so that nobody needs to compare them."""
    lanes = tuple(
        LanePlan(lane.lane, lane.pieces, lane.index, lane.positions + steps, lane.decode, lane.members)
        for lane in plan.lanes
    )
    return StepPlan(plan.tables, plan.table_of, lanes)


def _steady(view: BatchView, states: Mapping[str, RequestState]) -> float:
    """For how many further steps of one row a request the same requests are watched at the same sites."""
    more = inf
    for i, req_id in enumerate(view.req_ids):
        state = states.get(req_id)
        if state is None:
            continue
        first = view.first[i]
        if view.starts[i + 1] - view.starts[i] != 1 or first < state.skip_below:
            return 0
        if first < state.prompt:  # the next step is the first that decodes
            return 0
        for watch in state.watches:
            for a, b in watch.rows:
                if a > first:
                    more = min(more, a - first - 1)
                elif b is not None and b > first:
                    more = min(more, b - first - 1)
    return more


class _Wanted:
    """What one lane takes in a step: (request, place in the batch, its watch, position or positions, what to
    add for the rows). ``decode`` as in :class:`LanePlan`; ``several``: not all are single positions."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, Watch, Any, int]] = []
        self.decode, self.several = True, False

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, and the rows of the step in which they are."""
        shifts = [shift for *_, shift in self.entries]
        if not self.several:  # most steps: nothing is made for each request
            single = np.array([at for _, _, _, at, _ in self.entries], dtype=np.int32)
            return single, single + np.array(shifts, dtype=np.int32)
        parts = [np.atleast_1d(np.asarray(at, dtype=np.int32)) for _, _, _, at, _ in self.entries]
        rows = [part + shift for part, shift in zip(parts, shifts, strict=True)]
        return np.concatenate(parts), np.concatenate(rows)

    def pieces(self) -> tuple[Piece, ...]:
        if not self.several:
            return tuple([Piece(r, i, watch, k, k + 1) for k, (r, i, watch, _, _) in enumerate(self.entries)])
        ends = np.cumsum([np.size(at) for _, _, _, at, _ in self.entries]).tolist()
        return tuple(
            Piece(req_id, i, watch, a, b)
            for (req_id, i, watch, _, _), a, b in zip(self.entries, [0, *ends], ends, strict=False)
        )


def make_plan(view: BatchView, states: Mapping[str, RequestState]) -> StepPlan | None:
    """Plan a step; None when it holds no row that anybody asked for."""
    found: dict[Lane, _Wanted] = {}
    for i, req_id in enumerate(view.req_ids):
        state = states.get(req_id)
        if state is None:
            continue
        first, start = view.first[i], view.starts[i]
        stop = first + view.starts[i + 1] - start
        state.high = max(state.high, stop)
        if first >= state.end:
            continue
        low = max(first, state.skip_below)
        for watch in state.watches:
            at = _wanted_within(watch.rows, low, stop)
            if at is None:
                continue
            wanted = found.get(watch.lane)
            if wanted is None:
                wanted = found[watch.lane] = _Wanted()
            single = isinstance(at, int)
            wanted.entries.append((req_id, i, watch, at, start - first))
            wanted.several |= not single
            wanted.decode &= first >= state.prompt and single
    if not found:
        return None
    positions = {lane: wanted.positions() for lane, wanted in found.items()}
    tables, table_of = _share_tables({lane: rows for lane, (_, rows) in positions.items()})
    lanes = []
    for lane, wanted in found.items():
        own, rows = positions[lane]
        index = {t: _locate(rows, tables[t]) for t in {table_of[key] for key in lane.taps}}
        members = tuple([(r, w.index) for r, _, w, _, _ in wanted.entries])
        lanes.append(LanePlan(lane, wanted.pieces(), index, own, wanted.decode, members))
    return StepPlan(tuple(tables), table_of, tuple(lanes))


def _wanted_within(ranges: Ranges, low: int, high: int) -> int | np.ndarray | None:
    """The position of ``ranges`` within [low, high), or positions if there are several."""
    if len(ranges) == 1 or low + 1 == high:  # most steps: no array is made for each request
        for a, b in ranges:
            a, b = max(a, low), high if b is None else min(b, high)
            if a + 1 == b:
                return a
            if a < b:
                return np.arange(a, b, dtype=np.int32)
        return None
    at = positions_within(ranges, low, high)
    if at.size > 1:
        return at
    return int(at[0]) if at.size else None


def positions_within(ranges: Ranges, low: int, high: int) -> np.ndarray:
    """Positions of ``ranges`` within [low, high), ascending; the ranges are sorted and disjoint."""
    runs = [
        np.arange(max(a, low), high if b is None else min(b, high), dtype=np.int32)
        for a, b in ranges
        if a < high and (b is None or b > low)
    ]
    if not runs:
        return np.empty(0, dtype=np.int32)
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _share_tables(rows: Mapping[Lane, Rows]) -> tuple[list[Rows], dict[tuple[str, int], int]]:
    """One table per distinct set of lanes that meet at a site, holding the union of their rows."""
    if len(rows) == 1:
        [(lane, own)] = rows.items()
        return [_distinct([own])], dict.fromkeys(lane.taps, 0)
    lanes_at: dict[tuple[str, int], list[Lane]] = {}
    for lane in rows:
        for key in lane.taps:
            lanes_at.setdefault(key, []).append(lane)
    ids: dict[tuple[Lane, ...], int] = {}
    table_of = {key: ids.setdefault(tuple(lanes), len(ids)) for key, lanes in lanes_at.items()}
    members = list(ids)
    tables = [_distinct([rows[lane] for lane in m]) for m in members]
    return tables, table_of


def _distinct(parts: Sequence[Rows]) -> Rows:
    """The union of rows, each once. One lane may hold a row twice: two observations can be equal but for
    their rows."""
    if len(parts) == 1 and (np.diff(parts[0]) > 0).all():
        return parts[0]
    return np.unique(np.concatenate(parts))


def _locate(rows: Rows, table: Rows) -> Index:
    return slice(0, len(rows)) if np.array_equal(rows, table) else np.searchsorted(table, rows)
