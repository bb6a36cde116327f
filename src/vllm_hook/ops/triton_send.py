"""Few rows of a step to the host in one launch: read, reduced and written to pinned memory.

Gathering, a product, a sum and a copy are four launches, and each costs the host about as much as
the device; with a probe on every token the engine's thread has to pay them in every step.
"""

# Kernels are no Python functions: their arguments have no types that a checker could know.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

#: How a row is reduced, as the kernel knows it; the definitions are in :mod:`.reference`.
KINDS = {"norm": 1, "projection": 2, "cosine": 3, "probe": 4}


#: Rows that one program reduces: their numbers fill a cache line of the host. 128 stores of one number each,
#: from as many programs, cost a step 45 us on an H200.
_ROWS = 16
#: Columns that are read at a time there.
_COLUMNS = 1024


@triton.jit
def _copy_kernel(rows, layer_stride, row_stride, width, out, BLOCK: tl.constexpr):
    row, layer = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < width
    at = layer.to(tl.int64) * layer_stride + row.to(tl.int64) * row_stride
    x = tl.load(rows + at + d, mask=mask, other=0.0)
    at = (row * tl.num_programs(1) + layer).to(tl.int64) * width
    tl.store(out + at + d, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_kernel(
    rows, layer_stride, row_stride, n, out, vector, mean, scale, bias,
    WIDTH: tl.constexpr, KIND: tl.constexpr, MEAN: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    here = rows + layer.to(tl.int64) * layer_stride + row.to(tl.int64)[:, None] * row_stride
    along = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = d < WIDTH
        x = tl.load(here + d[None, :], mask=(row < n)[:, None] & mask[None, :], other=0.0).to(tl.float32)
        if MEAN:
            x -= tl.load(mean + d, mask=mask, other=0.0)[None, :]
        if SCALE:
            x /= tl.load(scale + d, mask=mask, other=1.0)[None, :]
        if KIND != 1:
            along += tl.sum(x * tl.load(vector + d, mask=mask, other=0.0)[None, :], 1)
        if KIND == 1 or KIND == 3:
            squares += tl.sum(x * x, 1)
    if KIND == 1:
        along = tl.sqrt(squares)
    if KIND == 3:
        along /= tl.maximum(tl.sqrt(squares), 1e-30)
    if KIND == 4:
        along += tl.load(bias)
    tl.store(out + layer * n + row, along, mask=row < n)


def send(
    rows: Tensor, out: Tensor, kind: str | None = None, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write ``rows`` [L, n, D], any stride but neighbouring columns, to ``out``, which the device reaches:
    as they are (``kind`` None) to [n, L, D], of float32 or their own type; else one float32 number each to
    [L, n]. ``tensors``: what a projection, cosine or probe reads, float32 on the device. A row's number does
    not depend on which rows are beside it."""
    layers, n, width = rows.shape
    t = tensors or {}
    if kind is None:
        block = triton.next_power_of_2(width)
        _copy_kernel[(n, layers)](
            rows, rows.stride(0), rows.stride(1), width, out, BLOCK=block, num_warps=8 if block >= 2048 else 4
        )  # fmt: skip
        return
    vector = t.get("weight" if kind == "probe" else "unit", rows)
    _reduce_kernel[(triton.cdiv(n, _ROWS), layers)](
        rows, rows.stride(0), rows.stride(1), n, out,
        vector, t.get("mean", vector), t.get("scale", vector), t.get("bias", vector),
        WIDTH=width, KIND=KINDS[kind], MEAN="mean" in t, SCALE="scale" in t,
        ROWS=_ROWS, BLOCK=min(_COLUMNS, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
