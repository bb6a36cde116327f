"""From the buffers of a step to rows on the host: gather, reduce, copy. Runs after the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..ops import attention as ops_attention
from ..ops import reference
from ..ops.reference import AttentionRule
from ..sites import ModelFacts, site
from .buffers import SiteBank
from .plan import LanePlan, Piece, StepPlan


@dataclass(frozen=True)
class Record:
    """Rows of one observation (by index within its request) from one step. Host tensors.

    values: stream [layers, rows, d]; head [layers, rows, heads, d_head]; reduced [layers, rows], for an
    SAE [layers, rows, features];
    attention_mass [heads, rows, spans]; attention [heads, rows, keys].
    """

    index: int
    positions: np.ndarray
    values: Tensor


@dataclass(frozen=True)
class KeyReader:
    """How to read one layer's keys: see :mod:`vllm_hook.ops.attention`."""

    page_keys: ops_attention.PageKeys
    page_values: ops_attention.PageKeys
    page_size: int
    group: int
    rule: AttentionRule


class Pages(Protocol):
    """What the engine knows of its KV cache."""

    def reader(self, layer: int) -> KeyReader: ...

    def pages(self, layer: int, batch_index: int, keys: int) -> Sequence[int]:
        """Page numbers, in order, that hold the first ``keys`` keys of a request of this step."""
        ...


def collect(plan: StepPlan, bank: SiteBank, facts: ModelFacts, pages: Pages) -> dict[str, list[Record]]:
    """Rows of a step by request id."""
    records: dict[str, list[Record]] = {}
    for lane_plan in plan.lanes:
        if site(lane_plan.lane.site).kind == "attention":
            _collect_attention(lane_plan, plan, bank, facts, pages, records)
            continue
        values = _reduced(lane_plan, _lane_rows(lane_plan, plan, bank, facts))
        for piece in lane_plan.pieces:
            _add(records, piece, values[:, piece.a : piece.b])
    return records


def _add(records: dict[str, list[Record]], piece: Piece, values: Tensor) -> None:
    records.setdefault(piece.req_id, []).append(Record(piece.watch.index, piece.positions, values))


def _lane_rows(lane_plan: LanePlan, plan: StepPlan, bank: SiteBank, facts: ModelFacts) -> Tensor:
    """[layers, rows, *row shape]: a fresh tensor, since the buffers are written again in the next step."""
    lane = lane_plan.lane
    per_layer = []
    for layer in lane.layers:
        key = (lane.tap_site, layer)
        per_layer.append(bank.rows(key, _index(lane_plan, plan.table_of[key])))
    rows = torch.stack(per_layer)
    shape = facts.row_shape(lane.site)
    if len(shape) > 1:
        rows = rows.view(*rows.shape[:2], *shape)
        if lane.heads is not None:
            rows = rows[:, :, list(lane.heads)]
    return rows.float() if lane.dtype == "float32" else rows


def _reduced(lane_plan: LanePlan, rows: Tensor) -> Tensor:
    """One float32 number a row where the lane is reduced (for an SAE, one for each feature)."""
    reduce = lane_plan.lane.reduce
    if reduce is None:
        return rows
    if reduce[0] == "norm":
        norms: Tensor = rows.float().norm(dim=-1)
        return norms
    t = lane_plan.pieces[0].watch.reducer
    assert t is not None
    if reduce[0] == "probe":
        return reference.probe(rows, t["weight"], t["bias"], t.get("mean"), t.get("scale"))
    if reduce[0] == "sae":
        return reference.sae(rows, t["encoder"], t["bias"], t.get("centre"), t.get("threshold"))
    function = {"projection": reference.projection, "cosine": reference.cosine}[reduce[0]]
    return function(rows, t["vector"])


def _index(lane_plan: LanePlan, table: int) -> slice | Tensor:
    index = lane_plan.index[table]
    return index if isinstance(index, slice) else torch.from_numpy(index)


def _collect_attention(
    lane_plan: LanePlan,
    plan: StepPlan,
    bank: SiteBank,
    facts: ModelFacts,
    pages: Pages,
    records: dict[str, list[Record]],
) -> None:
    """Layer by layer, each request against its own pages; rows of ``heads`` in the order they are listed."""
    lane = lane_plan.lane
    assert lane.heads is not None
    keys_of = {piece.req_id: int(piece.positions[-1]) + 1 for piece in lane_plan.pieces}
    out = {
        id(piece): _attention_output(piece, len(lane.heads), keys_of[piece.req_id])
        for piece in lane_plan.pieces
    }
    for layer in sorted({layer for layer, _ in lane.heads}):
        key = ("q", layer)
        q = bank.rows(key, _index(lane_plan, plan.table_of[key])).view(-1, facts.heads, facts.head_dim)
        where = [i for i, (at, _) in enumerate(lane.heads) if at == layer]
        heads = [lane.heads[i][1] for i in where]
        reader = pages.reader(layer)
        for piece in lane_plan.pieces:
            args = (
                pages.pages(layer, piece.batch_index, keys_of[piece.req_id]),
                reader.page_keys,
                reader.page_size,
                reader.group,
                reader.rule,
            )
            rows, positions = q[piece.a : piece.b], piece.positions.tolist()
            if lane.site == "attention_mass":
                out[id(piece)][where] = ops_attention.attention_mass(
                    rows, positions, heads, piece.watch.spans, *args
                )
                continue
            for a, b in ops_attention.row_blocks(positions, len(heads)):
                block = ops_attention.attention_rows(rows[a:b], positions[a:b], heads, *args)
                out[id(piece)][where, a:b, : block.shape[-1]] = block
    for piece in lane_plan.pieces:
        _add(records, piece, out[id(piece)])


def _attention_output(piece: Piece, heads: int, keys: int) -> Tensor:
    width = len(piece.watch.spans) if piece.watch.lane.site == "attention_mass" else keys
    return torch.zeros(heads, piece.b - piece.a, width, dtype=torch.float32)
