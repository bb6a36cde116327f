"""Attention of chosen rows and heads over the paged KV cache, on GPUs: two launches for all layers alike.

The first puts scaled, masked logits of every (row, head) into a workspace, in tiles of keys; the
second takes the softmax of each and writes its sums over spans, or the whole row. Keys are read
where they lie, by the block table and the strides of the cache.

Rows are described by eight int32 each::

    Q_ROW POSITION BATCH RANGES N_RANGES OUT HEAD_STRIDE WIDTH

``RANGES``: where the row's (start, end, span) triples begin; ``OUT``: where its results begin, those
of the w-th head as listed ``w * HEAD_STRIDE`` further on; ``WIDTH``: spans, or keys for whole rows.

Heads by three: head of q, its place in the list, its layer among those of the launch. The queries and
caches of these lie ``shifts[layer]`` elements from those of the first, which keeps to the compiler what
it knows of their alignment.
"""

# Kernels are no Python functions: their arguments have no types that a checker could know.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import PagedKeys, Range

#: One layer: q [N, H, D], (head of q, place in the list of heads) of those chosen, and its cache.
Layer = tuple[Tensor, Sequence[tuple[int, int]], PagedKeys]

ROW_INTS = 8
#: Bytes of logits held at a time; more rows are taken in turns.
WORKSPACE_BYTES = 64 << 20
#: Tensors at other addresses are no distance apart of which the compiler may be told.
_ALIGNED = 32
_KEYS = 64
_REDUCE = 1024


@dataclass(frozen=True)
class Query:
    """Rows of one request: its lines in q from ``first`` on, their positions, its block-table row, and
    key spans (empty: whole rows are wanted)."""

    first: int
    positions: np.ndarray
    batch_index: int
    spans: Sequence[Sequence[Range]]


@dataclass(frozen=True)
class RowTable:
    """Device tables for all rows of a step, and the shapes of the results, one a query, in one flat piece."""

    rows: Tensor
    ranges: Tensor
    shapes: tuple[tuple[int, int, int], ...]
    longest: int


def row_table(queries: Sequence[Query], heads: int, mass: bool, device: torch.device) -> RowTable:
    """``heads``: number listed, over all layers."""
    rows, ranges, shapes = [], [], []
    out = at = 0
    for query in queries:
        n = len(query.positions)
        width = len(query.spans) if mass else int(query.positions[-1]) + 1
        triples = [(a, b, s) for s, span in enumerate(query.spans) for a, b in span] if mass else []
        block = np.zeros((n, ROW_INTS), dtype=np.int32)
        block[:, 0] = query.first + np.arange(n)
        block[:, 1] = query.positions
        block[:, 2] = query.batch_index
        block[:, 3], block[:, 4] = at, len(triples)
        block[:, 5] = out + np.arange(n) * width
        block[:, 6], block[:, 7] = n * width, width
        rows.append(block)
        ranges += triples
        at += len(triples)
        out += heads * n * width
        shapes.append((heads, n, width))
    packed = np.concatenate([np.concatenate(rows).reshape(-1), np.asarray(ranges, np.int32).reshape(-1)])
    host = torch.from_numpy(np.ascontiguousarray(packed, dtype=np.int32))
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    count = sum(len(block) for block in rows)
    return RowTable(
        sent[: count * ROW_INTS].view(count, ROW_INTS),
        sent[count * ROW_INTS :],
        tuple(shapes),
        max(int(q.positions[-1]) + 1 for q in queries),
    )


@triton.jit
def _logits_kernel(
    q,
    q_row_stride,
    kv,
    kv_block,
    kv_head_stride,
    kv_token,
    kv_width,
    blocks,
    blocks_row,
    rows,
    heads,
    shifts,
    logits,
    logits_row,
    slopes,
    n_heads,
    group,
    scale,
    soft_cap,
    window,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    item = tl.program_id(0)
    r, h = item // n_heads, item % n_heads
    position = tl.load(rows + r * 8 + 1)
    start = tl.program_id(1) * BLOCK_K
    if start <= position:
        head = tl.load(heads + 3 * h)
        layer = tl.load(heads + 3 * h + 2)
        q += tl.multiple_of(tl.load(shifts + 2 * layer), 8)
        kv += tl.multiple_of(tl.load(shifts + 2 * layer + 1), 8)
        keys = start + tl.arange(0, BLOCK_K)
        seen = (keys <= position) & (keys > position - window)
        page = tl.load(blocks + tl.load(rows + r * 8 + 2) * blocks_row + keys // PAGE, mask=seen, other=0)
        d = tl.arange(0, BLOCK_D)
        own = tl.load(
            q + tl.load(rows + r * 8).to(tl.int64) * q_row_stride + head * D + d, mask=d < D, other=0.0
        ).to(tl.float32)
        at = page.to(tl.int64) * kv_block + (head // group) * kv_head_stride + (keys % PAGE) * kv_token
        k = tl.load(
            kv + at[:, None] + d[None, :] * kv_width, mask=seen[:, None] & (d < D)[None, :], other=0.0
        ).to(tl.float32)
        x = tl.sum(k * own[None, :], 1) * scale
        if CAP:
            x = soft_cap * (2.0 * tl.sigmoid(2.0 * x / soft_cap) - 1.0)
        if ALIBI:
            x += tl.load(slopes + head) * (keys - position).to(tl.float32)
        x = tl.where(seen, x, float("-inf"))
        tl.store(logits + item.to(tl.int64) * logits_row + keys, x, mask=keys < logits_row)


@triton.jit
def _reduce_kernel(
    logits,
    logits_row,
    rows,
    heads,
    ranges,
    out,
    sinks,
    n_heads,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    MASS: tl.constexpr,
):
    item = tl.program_id(0)
    r, h = item // n_heads, item % n_heads
    keys = tl.load(rows + r * 8 + 1) + 1
    x_at = logits + item.to(tl.int64) * logits_row
    k = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, keys, BLOCK):
        x = tl.load(x_at + start + k, mask=start + k < keys, other=float("-inf"))
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + tl.load(heads + 3 * h)).to(tl.float32)
        highest = tl.maximum(highest, sink)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, keys, BLOCK):
        x = tl.load(x_at + start + k, mask=start + k < keys, other=float("-inf"))
        sums += tl.exp(x - highest)
    total = tl.sum(sums, 0)
    if SINKS:
        total += tl.exp(sink - highest)
    base = (
        out + tl.load(rows + r * 8 + 5) + tl.load(heads + 3 * h + 1).to(tl.int64) * tl.load(rows + r * 8 + 6)
    )
    if MASS:
        first, n = tl.load(rows + r * 8 + 3), tl.load(rows + r * 8 + 4)
        for i in range(n):
            a, b = tl.load(ranges + (first + i) * 3), tl.load(ranges + (first + i) * 3 + 1)
            span = tl.load(ranges + (first + i) * 3 + 2)
            stop = tl.minimum(b, keys)
            part = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(a, stop, BLOCK):
                x = tl.load(x_at + start + k, mask=start + k < stop, other=float("-inf"))
                part += tl.exp(x - highest)
            tl.store(base + span, tl.load(base + span) + tl.sum(part, 0) / total)
            tl.debug_barrier()
    else:
        for start in range(0, keys, BLOCK):
            x = tl.load(x_at + start + k, mask=start + k < keys, other=float("-inf"))
            tl.store(base + start + k, tl.exp(x - highest) / total, mask=start + k < keys)


def paged_attention(layers: Iterable[Layer], table: RowTable, mass: bool, out: Tensor) -> None:
    """Attention of all rows of ``table`` for the heads of each layer, into ``out`` (flat, zeros). Equals
    :func:`vllm_hook.ops.reference.attention`, summed over spans with ``mass``."""
    alike: dict[object, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(_kind(layer), []).append(layer)
    for group in alike.values():
        for run in _runs(group, WORKSPACE_BYTES // (4 * table.longest)):
            _together(run, table, mass, out)


def _kind(layer: Layer) -> object:
    """Layers of one kind can be read by one launch."""
    q, _, paged = layer
    cache, rule = paged.cache, paged.rule
    own = rule.sinks is not None or rule.alibi is not None or (q.data_ptr() | cache.data_ptr()) % _ALIGNED
    return (
        *(id(paged) if own else None, q.dtype, q.shape, q.stride(), cache.dtype, cache.shape, cache.stride()),
        *(paged.block_table.data_ptr(), paged.group, rule.scale, rule.soft_cap, rule.window),
    )


def _runs(layers: Sequence[Layer], most: int) -> list[list[Layer]]:
    """Layers in order, at most so many heads together, so that the logits of a row fit the workspace."""
    runs: list[list[Layer]] = []
    heads = 0
    for layer in layers:
        own = len(layer[1])
        if not runs or heads + own > most:
            runs.append([])
            heads = 0
        runs[-1].append(layer)
        heads += own
    return runs


def _together(layers: Sequence[Layer], table: RowTable, mass: bool, out: Tensor) -> None:
    q, _, paged = layers[0]
    kv, rule = paged.cache, paged.rule
    shifts = tuple(
        (
            (x.data_ptr() - q.data_ptr()) // q.element_size(),
            (p.cache.data_ptr() - kv.data_ptr()) // kv.element_size(),
        )
        for x, _, p in layers
    )
    heads, moved = _tables(tuple(tuple(chosen) for _, chosen, _ in layers), shifts, q.device)
    count, n_heads, width = table.rows.shape[0], heads.shape[0], q.shape[2]
    step = max(1, WORKSPACE_BYTES // (4 * n_heads * table.longest))
    workspace = torch.empty(min(step, count) * n_heads, table.longest, dtype=torch.float32, device=q.device)
    for a in range(0, count, step):
        rows = table.rows[a : a + step]
        items = rows.shape[0] * n_heads
        _logits_kernel[(items, triton.cdiv(table.longest, _KEYS))](
            q, q.stride(0), kv, kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
            paged.block_table, paged.block_table.stride(0), rows, heads, moved, workspace, table.longest,
            workspace if rule.alibi is None else rule.alibi, n_heads, paged.group, rule.scale,
            rule.soft_cap or 0.0, rule.window or 1 << 30,
            D=width, PAGE=kv.shape[2], BLOCK_D=triton.next_power_of_2(width), BLOCK_K=_KEYS,
            CAP=bool(rule.soft_cap), ALIBI=rule.alibi is not None,
        )  # fmt: skip
        _reduce_kernel[(items,)](
            workspace, table.longest, rows, heads, table.ranges, out,
            workspace if rule.sinks is None else rule.sinks, n_heads,
            BLOCK=_REDUCE, SINKS=rule.sinks is not None, MASS=mass,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _tables(
    chosen: tuple[tuple[tuple[int, int], ...], ...], shifts: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Heads and shifts on the device. An observation has the same in nearly every step."""
    heads = [(head, place, layer) for layer, own in enumerate(chosen) for head, place in own]
    found = torch.tensor(heads, dtype=torch.int32), torch.tensor(shifts, dtype=torch.int64)
    if device.type == "cuda":
        found = tuple(x.pin_memory().to(device, non_blocking=True) for x in found)  # type: ignore[assignment]
    return found
