"""The device memory of interventions: vectors, flags, and the tables of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..ops import edit as op
from ..sites import Armed, ModelFacts, site
from .edit_limits import GATES, ROW_GATES
from .edit_plan import AttendPiece, EditPlan
from .edit_state import (
    Attend,
    EditState,
    Filter,
    Gate,
    RowEdit,
    Slots,
    group_places,
    initial_flag,
)
from .requests import Ranges
from .shard import Shard


def edit_bytes(armed: Armed, facts: ModelFacts, rows: int, requests: int, slots: int) -> int:
    """Bytes of the vectors and flags of the armed edits; 0 without any."""
    if not armed.edit_places():
        return 0
    return EditBank(facts, rows, requests, slots, torch.device("meta")).bytes()


#: Interventions that are kept when their last request has ended, for the next that intervenes alike.
STATES_KEPT = 256


class VectorSource(Protocol):
    """Where vectors come from, by the digest of their content."""

    def vector(self, digest: str) -> Tensor: ...


class EditBank:
    """Vectors by slot (one bank a width) and gate flags: what interventions hold while requests run."""

    def __init__(
        self,
        facts: ModelFacts,
        rows: int,
        requests: int,
        slots: int,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self._facts, self._shard = facts, shard or Shard()
        # The front end counts what running requests hold and frees it a moment before the worker does,
        # and preempted requests keep their flags: hence twice.
        self.flag_slots = Slots(2 * GATES * requests, "gates")
        self.row_flag_slots = Slots(2 * ROW_GATES, "gates by row")
        slots = 2 * slots
        self.vector_slots = {
            "stream": Slots(slots, "vectors", keep=True),
            "head": Slots(slots, "vectors of head sites", keep=True),
        }

        def table(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        shared = {
            "flags": table(self.flag_slots.capacity),
            "acc": table(self.flag_slots.capacity),
            "row_flags": table(self.row_flag_slots.capacity, rows),
        }
        self.state = {
            "stream": op.EditState(**shared, bank=table(slots, facts.hidden)),
            "head": op.EditState(**shared, bank=table(slots, facts.head_dim)),
        }
        self.attends: Mapping[int, Sequence[AttendPiece]] = {}
        self._shared: dict[str, EditState] = {}

    def bytes(self) -> int:
        tensors = {id(t): t for state in self.state.values() for t in state.tensors()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    # -- requests ---------------------------------------------------------------------------

    def admit(
        self, data: Sequence[Mapping[str, Any]], vectors: VectorSource, digest: str | None = None
    ) -> EditState:
        """Give a request its slots. All or nothing: what is too much leaves nothing behind. ``digest`` of
        the data: if requests with the same run, or ran lately, there may be nothing to work out."""
        known = None if digest is None else self._shared.get(digest)
        if known is not None and (known.users or self._take_again(known)):
            known.users += 1
            return known
        taken: list[tuple[Slots, Any, int]] = []
        try:
            state = self._admit(data, vectors, taken)
        except BaseException:
            for slots, key, _ in taken:
                slots.give_back(key, keep=False)
            raise
        if digest is not None and not state.has_own:
            state.digest = digest
            self._shared[digest] = state
            if len(self._shared) > STATES_KEPT:
                resting = next((d for d, s in self._shared.items() if not s.users), digest)
                del self._shared[resting]
        return state

    def _take_again(self, state: EditState) -> bool:
        """The slots of a state that nobody uses, if they still hold what they did."""
        if any(slots.find(key) != slot for slots, key, slot in state.taken):
            return False
        for slots, key, _ in state.taken:
            slots.take(key)
        return True

    def _admit(
        self, data: Sequence[Mapping[str, Any]], vectors: VectorSource, taken: list[tuple[Slots, Any, int]]
    ) -> EditState:
        own = object()  # flags are never shared: they are taken under a key of this request alone

        def vector(kind: str, digest: str) -> int:
            slot, new = self.vector_slots[kind].take(digest)
            taken.append((self.vector_slots[kind], digest, slot))
            if new:
                self.state[kind].bank[slot].copy_(vectors.vector(digest))
            return slot

        def flag(slots: Slots, which: Any) -> int:
            key = (own, which)
            slot, _ = slots.take(key)
            taken.append((slots, key, slot))
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
            here = self._shard.heads(self._facts, kv=e["site"] in ("k", "v")) if kind == "head" else range(1)
            entries = tuple(
                _entry(a, here, vector(kind, a[1]), vector(kind, a[2]), gate, token_flag)
                for a in e["atoms"]
                if a[5] in here
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
        """A request has ended."""
        if not state.users:
            return
        state.users -= 1
        if state.users:
            return
        for slots, key, _ in state.taken:
            slots.give_back(key)
        if state.digest is not None and self._shared.get(state.digest) is state:  # the last to be forgotten
            self._shared[state.digest] = self._shared.pop(state.digest)

    def used(self) -> dict[str, int]:
        """Slots in use, for leak tests and status."""
        return {
            "vectors": sum(s.used for s in self.vector_slots.values()),
            "gates": self.flag_slots.used + self.row_flag_slots.used,
        }

    # -- steps ------------------------------------------------------------------------------

    def load(self, plan: EditPlan, input_ids: Tensor) -> None:
        """Set the flags of rows chosen by token. ``input_ids``: tokens of this step's rows, on the device."""
        flags = self.state["stream"].row_flags
        for row_flag in plan.row_flags:
            flags[row_flag].zero_()
        for token_flag, rows, filters in plan.token_rows:
            index = self.send(rows).long()
            passed = torch.ones(len(rows), dtype=torch.bool, device=flags.device)
            for ids, sure in filters:
                hit = torch.isin(input_ids[index], self.send(np.asarray(ids)))
                passed &= hit | self.send(sure)
            flags[token_flag, index] = passed.float()
        self.attends = plan.attends

    def send(self, values: np.ndarray) -> Tensor:
        """To the device in stream order, without waiting for it."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        device = self.state["stream"].flags.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def open_rows(self, piece: AttendPiece) -> Tensor | None:
        """Which rows of a piece its gates let through, on the device; None: all."""
        state, attend = self.state["stream"], piece.attend
        if attend.token_flag < 0 and attend.gate is None:
            return None
        rows = self.send(piece.rows).long()
        keep = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        if attend.token_flag >= 0:
            keep &= state.row_flags[attend.token_flag, rows] > 0
        if attend.gate is not None:
            flags = state.row_flags[attend.gate.flag, rows] if attend.gate.per_row else None
            keep &= (state.flags[attend.gate.flag] > 0) if flags is None else (flags > 0)
        return keep

    def clear(self) -> None:
        """The step is over: nothing steers attention."""
        self.attends = {}


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
    atom: Sequence[Any], own: range, u: int, v: int, gate: Gate | None, token_flag: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    kind, _, _, act, keep_norm, head, a, b, c, theta = atom
    gate_kind = op.NO_GATE if gate is None else op.BY_ROW if gate.per_row else op.LATCHED
    at = head - own.start  # heads of other ranks are edited there
    ints = (kind, u, v, act, int(keep_norm), at, gate_kind, -1 if gate is None else gate.flag, token_flag)
    return ints, (a, b, c, theta)


def _open_ranges(ranges: Sequence[Sequence[int]]) -> Ranges:
    return tuple((a, None if b < 0 else b) for a, b in ranges)
