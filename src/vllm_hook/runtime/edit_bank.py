"""The device memory of interventions: vectors, flags, and the tables of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import CapacityError
from ..ops import edit as op
from ..ops.site import SiteEdit
from ..sites import Armed, ModelFacts, site
from .edit_limits import CHAINS, CONDITIONS_A_ROW, ENTRIES, GATES, ROW_GATES
from .edit_plan import (
    Attend,
    AttendPiece,
    EditPlan,
    EditState,
    Filter,
    Gate,
    RowEdit,
    Slots,
    group_places,
    initial_flag,
)
from .requests import Ranges

Place = tuple[str, int]


def edit_bytes(armed: Armed, facts: ModelFacts, rows: int, requests: int, slots: int) -> int:
    """Bytes of the tables and vectors that the armed edits take; 0 without any."""
    places = [place for place in armed.edits if place[0] != "attention"]
    if not places:
        return 0
    with torch.device("meta"):
        return EditBank(places, facts, rows, requests, slots, torch.device("meta")).bytes()


class VectorSource(Protocol):
    """Where vectors come from, by the digest of their content."""

    def vector(self, digest: str) -> Tensor: ...


class EditBank:
    """Vectors by slot (one bank a width), gate flags, and the tables that sites follow in a step."""

    def __init__(
        self,
        places: Sequence[Place],
        facts: ModelFacts,
        rows: int,
        requests: int,
        slots: int,
        device: torch.device,
    ) -> None:
        chains, entries = CHAINS * requests, ENTRIES * requests
        # The front end counts what running requests hold and frees it a moment before the worker does,
        # and preempted requests keep their flags: hence twice.
        self.flag_slots = Slots(2 * GATES * requests, "gates")
        self.row_flag_slots = Slots(2 * ROW_GATES, "gates by row")
        slots = 2 * slots
        self.vector_slots = {"stream": Slots(slots, "vectors"), "head": Slots(slots, "vectors of head sites")}
        n = max(len(places), 1)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        shared: dict[str, Tensor] = {
            "edit_tables": table(n, 2, 1 + rows),
            "chain_start": table(chains + 1),
            "entry_int": table(entries, 9),
            "entry_float": table(entries, 4, dtype=torch.float32),
            "cond_tables": table(n, 2, 1 + CONDITIONS_A_ROW * rows),
            "cond_int": table(chains, 6),
            "cond_float": table(chains, 3, dtype=torch.float32),
            "flags": table(self.flag_slots.capacity, dtype=torch.float32),
            "acc": table(self.flag_slots.capacity, dtype=torch.float32),
            "row_flags": table(self.row_flag_slots.capacity, rows, dtype=torch.float32),
        }
        self.state = {
            "stream": op.EditState(**shared, bank=table(slots, facts.hidden, dtype=torch.float32)),
            "head": op.EditState(**shared, bank=table(slots, facts.head_dim, dtype=torch.float32)),
        }
        self._site_ids = torch.full((n, 2), -1, dtype=torch.int32, device=device)
        self._slot = {place: i for i, place in enumerate(places)}
        self.edits = {
            (name, layer): SiteEdit(self.state[site(name).kind].tensors(), self._site_ids[i])
            for i, (name, layer) in enumerate(places)
        }
        self.attends: Mapping[int, Sequence[AttendPiece]] = {}
        self._active = False

    def bytes(self) -> int:
        tensors = {id(t): t for state in self.state.values() for t in state.tensors()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    # -- requests ---------------------------------------------------------------------------

    def admit(self, data: Sequence[Mapping[str, Any]], vectors: VectorSource) -> EditState:
        """Give a request its slots. All or nothing: what is too much leaves nothing behind."""
        taken: list[tuple[Slots, Any]] = []
        try:
            return self._admit(data, vectors, taken)
        except BaseException:
            for slots, key in taken:
                slots.give_back(key)
            raise

    def _admit(
        self, data: Sequence[Mapping[str, Any]], vectors: VectorSource, taken: list[tuple[Slots, Any]]
    ) -> EditState:
        own = object()  # flags are never shared: they are taken under a key of this request alone

        def vector(kind: str, digest: str) -> int:
            slot, new = self.vector_slots[kind].take(digest)
            taken.append((self.vector_slots[kind], digest))
            if new:
                self.state[kind].bank[slot].copy_(vectors.vector(digest))
            return slot

        def flag(slots: Slots, which: Any) -> int:
            key = (own, which)
            slot, _ = slots.take(key)
            taken.append((slots, key))
            return slot

        edits = []
        attends = []
        gates: dict[str, Gate] = {}  # edits of a request that have the same condition share its flag
        for i, e in enumerate(data):
            g, gate = e["gate"], None
            if g is not None:
                same = json.dumps(g, sort_keys=True)
                if same not in gates:
                    number = flag(self.row_flag_slots if g["per_row"] else self.flag_slots, ("gate", i))
                    if not g["per_row"]:
                        self.state["stream"].flags[number] = initial_flag(g["over"])
                        self.state["stream"].acc[number] = 0.0
                    gates[same] = _gate(g, vector("stream", g["u"]), number)
                gate = gates[same]
            filters = tuple(Filter(tuple(f["token_ids"]), _open_ranges(f["sure"])) for f in e["filters"])
            token_flag = flag(self.row_flag_slots, ("tokens", i)) if filters else -1
            kind = site(e["site"]).kind
            entries = tuple(
                _entry(a, vector(kind, a[1]), vector(kind, a[2]), gate, token_flag) for a in e["atoms"]
            )
            if e["attend"] is not None:
                attends.append(_attend(e, gate, token_flag))
            edits.append(
                RowEdit(
                    places=() if e["attend"] is not None else tuple((e["site"], n) for n in e["layers"]),
                    rows=_open_ranges(e["rows"]),
                    entries=entries,
                    gate=gate,
                    filters=filters,
                    token_flag=token_flag,
                )
            )
        return EditState(tuple(edits), group_places(edits), tuple(taken), tuple(attends))

    def release(self, state: EditState) -> None:
        for slots, key in state.taken:
            slots.give_back(key)
        state.taken = ()

    def used(self) -> dict[str, int]:
        """Slots in use, for leak tests and status."""
        return {
            "vectors": sum(s.used for s in self.vector_slots.values()),
            "gates": self.flag_slots.used + self.row_flag_slots.used,
        }

    # -- steps ------------------------------------------------------------------------------

    def load(self, plan: EditPlan, input_ids: Tensor) -> None:
        """Make the sites follow ``plan``. ``input_ids``: tokens of this step's rows, on the device."""
        shared = self.state["stream"]
        for what, need, have in (
            ("chains", len(plan.chain_start), shared.chain_start.shape[0]),
            ("edits", len(plan.entry_int), shared.entry_int.shape[0]),
            ("conditions", len(plan.cond_int), shared.cond_int.shape[0]),
            ("places with conditions", len(plan.cond_tables), shared.cond_tables.shape[0]),
            (
                "condition rows at one place",
                max((len(rows) for rows, _ in plan.cond_tables), default=0),
                shared.cond_tables.shape[2] - 1,
            ),
        ):
            if need > have:
                raise CapacityError(f"{need} {what} in one step, {have} reserved")
        _fill(shared.edit_tables, plan.tables)
        _fill(shared.cond_tables, plan.cond_tables)
        for target, values in (
            (shared.chain_start, plan.chain_start),
            (shared.entry_int, plan.entry_int),
            (shared.entry_float, plan.entry_float),
            (shared.cond_int, plan.cond_int),
            (shared.cond_float, plan.cond_float),
        ):
            target[: len(values)].copy_(torch.from_numpy(values))
        for row_flag in plan.row_flags:
            shared.row_flags[row_flag].zero_()
        for token_flag, rows, filters in plan.token_rows:
            index = torch.from_numpy(rows).long()
            passed = torch.ones(len(rows), dtype=torch.bool)
            for ids, sure in filters:
                hit = torch.isin(input_ids[index], torch.tensor(ids, device=input_ids.device))
                passed &= hit | torch.from_numpy(sure)
            shared.row_flags[token_flag, index] = passed.float()
        self._site_ids.fill_(-1)
        for place, t in plan.table_of.items():
            self._site_ids[self._slot[place], 0] = t
        for place, t in plan.cond_table_of.items():
            self._site_ids[self._slot[place], 1] = t
        self.attends = plan.attends
        self._active = True

    def open_rows(self, piece: AttendPiece) -> np.ndarray:
        """Which rows of a piece its gates let through. Reads flags on the host: CPU only."""
        state, attend = self.state["stream"], piece.attend
        rows = torch.from_numpy(piece.rows).long()
        keep = torch.ones(len(rows), dtype=torch.bool)
        if attend.token_flag >= 0:
            keep &= state.row_flags[attend.token_flag, rows] > 0
        if attend.gate is not None:
            flags = state.row_flags[attend.gate.flag, rows] if attend.gate.per_row else None
            keep &= (state.flags[attend.gate.flag] > 0) if flags is None else (flags > 0)
        return np.flatnonzero(keep.numpy())

    def clear(self) -> None:
        """Make every site identity: dummy, profile and capture runs edit nothing."""
        if self._active:
            self._site_ids.fill_(-1)
            self.attends = {}
            self._active = False

    def prove(self, run: Callable[[], None]) -> list[Place]:
        """Run one forward in which every site follows a table without rows; the sites that did not."""
        before = {place: int(edit.fired) for place, edit in self.edits.items()}
        self.state["stream"].edit_tables[0, :, 0] = 0
        self._site_ids[:, 0] = 0
        try:
            run()
        finally:
            self._site_ids.fill_(-1)
        return [place for place, edit in self.edits.items() if int(edit.fired) == before[place]]


def _fill(tables: Tensor, values: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    host = tables.numpy()
    for t, (rows, which) in enumerate(values):
        n = len(rows)
        host[t, :, 0] = n
        host[t, 0, 1 : 1 + n] = rows
        host[t, 1, 1 : 1 + n] = which


def _gate(g: Mapping[str, Any], u: int, flag: int) -> Gate:
    ints = (g["kind"], u, g["over"], int(g["above"]), flag, int(g["per_row"]))
    floats = (g["c"], g["bound"], float(max(g["count"], 1)))
    return Gate((g["site"], g["layer"]), ints, floats, _open_ranges(g["rows"]), g["per_row"], flag)


def _attend(e: Mapping[str, Any], gate: Gate | None, token_flag: int) -> Attend:
    heads: dict[int, tuple[int, ...]] = {}
    for layer, head in e["attend"]["heads"]:
        heads[layer] = (*heads.get(layer, ()), head)
    return Attend(
        heads=heads,
        span=tuple((a, b) for a, b in e["attend"]["span"]),
        weight=e["attend"]["weight"],
        mass=e["attend"]["mass"],
        rows=_open_ranges(e["rows"]),
        gate=gate,
        token_flag=token_flag,
    )


def _entry(
    atom: Sequence[Any], u: int, v: int, gate: Gate | None, token_flag: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    kind, _, _, act, keep_norm, head, a, b, c, theta = atom
    gate_kind = op.NO_GATE if gate is None else op.BY_ROW if gate.per_row else op.LATCHED
    ints = (kind, u, v, act, int(keep_norm), head, gate_kind, -1 if gate is None else gate.flag, token_flag)
    return ints, (a, b, c, theta)


def _open_ranges(ranges: Sequence[Sequence[int]]) -> Ranges:
    return tuple((a, None if b < 0 else b) for a, b in ranges)
