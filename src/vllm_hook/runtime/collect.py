"""From the buffers of a step to rows by request: gather and reduce on the device, split on the host.

:func:`collect` runs right after the forward pass and never waits for the device; :func:`split` runs
when the values have come to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
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
from .rows import Chunk, Record
from .shard import Shard
from .transfer import Transfer


@dataclass(frozen=True)
class Taken:
    """Values of one lane in one step: [layers, rows of all pieces, ...]; with ``shapes``, one for each
    piece, a flat tensor that holds them one after the other, so that the rows of a request lie together
    and need no gathering on the host; or ``parts``, host tensors of the pieces. ``lent``: the values are in
    memory that is used again once they have been split."""

    lane_plan: LanePlan
    values: Tensor | None
    shapes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[Tensor, ...] = ()
    lent: bool = False


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

    def paged(self, layer: int) -> ops_attention.PagedKeys:
        """The cache of a layer as the GPU kernels read it."""
        ...


def collect(
    plan: StepPlan,
    bank: SiteBank,
    facts: ModelFacts,
    pages: Pages | None,
    transfer: Transfer | None = None,
    shard: Shard | None = None,
) -> list[Taken]:
    """Values of a step, lane by lane, still on the device. ``facts``: of the whole model."""
    shard = shard or Shard()
    taken = []
    for lane_plan in plan.lanes:
        sent = transfer.arrived(lane_plan) if transfer is not None else None
        if sent is not None:
            taken.append(Taken(lane_plan, None, parts=tuple(sent)))
        elif site(lane_plan.lane.site).kind == "attention":
            assert pages is not None
            taken.append(_attention(lane_plan, plan, bank, facts, pages, shard))
        elif transfer is not None and (few := _few(lane_plan, bank, facts, transfer, shard)) is not None:
            taken.append(few)
        else:
            taken.append(_stream_or_heads(lane_plan, plan, bank, facts, shard))
    return taken


def split(taken: Sequence[Taken]) -> tuple[dict[str, list[Record]], list[Chunk]]:
    """Rows of a step from values on the host: by request id; and of many requests together, where each has
    one."""
    records: dict[str, list[Record]] = {}
    chunks = []
    for t in taken:
        if (chunk := _chunk(t)) is not None:
            chunks.append(chunk)
            continue
        if t.lent and t.values is not None:
            t = replace(t, values=t.values.clone())
        for piece, own in zip(t.lane_plan.pieces, _by_piece(t), strict=True):
            records.setdefault(piece.req_id, []).append(
                Record(piece.watch.index, t.lane_plan.at(piece), own, t.values is None)
            )
    return records, chunks


def _by_piece(t: Taken) -> Sequence[Tensor]:
    if t.values is None:
        return t.parts
    if not t.shapes:
        return [t.values[:, piece.a : piece.b] for piece in t.lane_plan.pieces]
    if len(set(t.shapes)) == 1:
        return t.values.view(len(t.shapes), *t.shapes[0]).unbind()
    parts = t.values.split([prod(shape) for shape in t.shapes])
    return [part.view(shape) for part, shape in zip(parts, t.shapes, strict=True)]


def _chunk(t: Taken) -> Chunk | None:
    """One row of each of many requests."""
    plan, values = t.lane_plan, t.values
    n = len(plan.pieces)
    if values is None or n < 2 or n != len(plan.positions) or len(set(t.shapes)) > 1:
        return None
    if plan.lane.site == "attention":  # as many keys as positions: alike by chance
        return None
    rows = values.view(n, *t.shapes[0]).squeeze(2) if t.shapes else values.movedim(1, 0)
    chunk = Chunk(plan.members, plan.positions, rows)
    # Pinned memory is for the next steps.
    return replace(chunk, values=rows.clone()) if t.lent or chunk.small else chunk


def _stream_or_heads(
    lane_plan: LanePlan, plan: StepPlan, bank: SiteBank, facts: ModelFacts, shard: Shard
) -> Taken:
    if lane_plan.lane.reduce is not None or not _alike(lane_plan):
        return Taken(lane_plan, _reduced(lane_plan, _rows(lane_plan, plan, bank, facts, shard)))
    rows = _rows(lane_plan, plan, bank, facts, shard, pieces=len(lane_plan.pieces))
    return Taken(lane_plan, rows.reshape(-1), (tuple(rows.shape[1:]),) * len(lane_plan.pieces))


def _few(
    lane_plan: LanePlan, bank: SiteBank, facts: ModelFacts, transfer: Transfer, shard: Shard
) -> Taken | None:
    """Few rows that lie together, sent to the host by one kernel; None if these are not such."""
    lane, pieces, index = lane_plan.lane, lane_plan.pieces, next(iter(lane_plan.index.values()))
    kind = lane.reduce[0] if lane.reduce is not None else None
    heads = site(lane.site).kind == "head"
    if lane.heads is not None or (heads and (kind is not None or shard.size > 1)) or shard.rank:
        return None
    if len(lane_plan.index) > 1 or not isinstance(index, slice):
        return None
    n, layers = len(lane_plan.positions), len(lane.layers)
    like = bank.taken[lane.taps[0]]
    width, dtype = like.shape[1], like.dtype
    if kind is not None or lane.dtype == "float32":
        dtype = torch.float32
    size = layers * n * (width if kind is None else 1)
    if not transfer.sends_few(kind, size * dtype.itemsize) or (kind is None and n > len(pieces)):
        return None
    rows = bank.together(lane.taps, index)
    if rows is None:
        return None
    values = transfer.send_few(rows, size, dtype, kind, pieces[0].watch.reducer)
    if kind is not None:
        return Taken(lane_plan, values.view(layers, n), lent=True)
    return Taken(lane_plan, values, ((layers, 1, *facts.row_shape(lane.site)),) * n, lent=True)


def _alike(lane_plan: LanePlan) -> bool:
    """Whether all pieces have as many rows."""
    return lane_plan.decode or len({piece.b - piece.a for piece in lane_plan.pieces}) == 1


def _rows(
    lane_plan: LanePlan, plan: StepPlan, bank: SiteBank, facts: ModelFacts, shard: Shard, pieces: int = 0
) -> Tensor:
    """[layers, rows, *row shape], or for ``pieces`` of equal length [pieces, layers, rows of one, *row
    shape]: a fresh tensor, since the buffers are written again in the next step; or what is there, if it
    will be reduced."""
    lane, keys = lane_plan.lane, lane_plan.lane.taps
    index = {t: _on(i, bank.device) for t, i in lane_plan.index.items()}
    one = len(index) == 1
    rows, view = bank.rows_of(keys, [*index.values()] if one else [index[plan.table_of[key]] for key in keys])
    if pieces:
        rows = rows.view(len(keys), pieces, -1, rows.shape[-1]).transpose(0, 1)
    if site(lane.site).kind == "head":
        kv = lane.site in ("k", "v")
        rows = rows.view(*rows.shape[:-1], len(shard.heads(facts, kv)), facts.head_dim)
        rows = shard.join(rows, facts.kv_heads if kv else None)
        if lane.heads is not None:
            rows, view = rows[..., list(lane.heads), :], False
    if lane.reduce is not None:
        return rows
    if lane.dtype == "float32" and rows.dtype != torch.float32:
        return rows.float().contiguous()
    return rows.clone(memory_format=torch.contiguous_format) if view else rows.contiguous()


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
        return reference.probe(rows, t["weight"], t["bias"], t.get("mean"), t.get("scale"), _dot)
    if reduce[0] == "sae":
        return reference.sae(rows, t["encoder"], t["bias"], t.get("centre"), t.get("threshold"))
    # reference.projection and reference.cosine, with what they divide by worked out once
    along = _dot(rows, t["unit"])
    return along if reduce[0] == "projection" else along / rows.float().norm(dim=-1).clamp_min(1e-30)


def _dot(x: Tensor, vector: Tensor) -> Tensor:
    """[..., D] x [D], float32."""
    return x.float() @ vector


def _on(index: slice | np.ndarray, device: torch.device) -> slice | Tensor:
    if isinstance(index, slice):
        return index
    host = torch.from_numpy(index)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _attention(
    lane_plan: LanePlan, plan: StepPlan, bank: SiteBank, facts: ModelFacts, pages: Pages, shard: Shard
) -> Taken:
    """For each piece [heads as listed, rows, spans or keys], layer by layer from the KV cache."""
    lane, pieces = lane_plan.lane, lane_plan.pieces
    assert lane.heads is not None
    mass = lane.site == "attention_mass"
    shapes = tuple(
        (len(lane.heads), p.b - p.a, len(p.watch.spans) if mass else int(lane_plan.at(p)[-1]) + 1)
        for p in pieces
    )
    flat = torch.zeros(sum(map(prod, shapes)), dtype=torch.float32, device=bank.device)
    own = shard.heads(facts, kv=False)
    heads: dict[int, list[tuple[int, int]]] = {}
    for place, (layer, head) in enumerate(lane.heads):
        if head in own:
            heads.setdefault(layer, []).append((head - own.start, place))
    rows = {
        layer: bank.rows(("q", layer), _on(lane_plan.index[plan.table_of["q", layer]], bank.device)).view(
            -1, len(own), facts.head_dim
        )
        for layer in sorted(heads)
    }
    if bank.device.type == "cuda":
        _read_paged(lane_plan, heads, rows, mass, pages, flat, len(lane.heads))
    else:
        parts = [v.view(shape) for v, shape in zip(flat.split([*map(prod, shapes)]), shapes, strict=True)]
        for layer, members in heads.items():
            for piece, out in zip(pieces, parts, strict=True):
                positions = lane_plan.at(piece).tolist()
                _read_pages(
                    piece, positions, rows[layer][piece.a : piece.b], members, mass, pages, layer, out
                )
    return Taken(lane_plan, shard.total(flat), shapes)


def _read_pages(
    piece: Piece,
    positions: list[int],
    q: Tensor,
    members: list[tuple[int, int]],
    mass: bool,
    pages: Pages,
    layer: int,
    out: Tensor,
) -> None:
    """CPU: one layer of one request against its own pages."""
    heads, where = [head for head, _ in members], [place for _, place in members]
    reader = pages.reader(layer)
    args = (
        pages.pages(layer, piece.batch_index, positions[-1] + 1),
        reader.page_keys,
        reader.page_size,
        reader.group,
        reader.rule,
    )
    if mass:
        out[where] = ops_attention.attention_mass(q, positions, heads, piece.watch.spans, *args)
        return
    for a, b in ops_attention.row_blocks(positions, len(heads)):
        block = ops_attention.attention_rows(q[a:b], positions[a:b], heads, *args)
        out[where, a:b, : block.shape[-1]] = block


def _read_paged(
    lane_plan: LanePlan,
    heads: dict[int, list[tuple[int, int]]],
    rows: dict[int, Tensor],
    mass: bool,
    pages: Pages,
    out: Tensor,
    listed: int,
) -> None:
    """GPU: all rows at once."""
    from ..ops.triton_attention import Query, paged_attention, row_table

    queries = [Query(p.a, lane_plan.at(p), p.batch_index, p.watch.spans) for p in lane_plan.pieces]
    table = row_table(queries, listed, mass, out.device)
    paged_attention(
        ((rows[layer], own, pages.paged(layer)) for layer, own in heads.items()), table, mass, out
    )
