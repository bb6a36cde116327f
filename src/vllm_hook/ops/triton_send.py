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
KINDS = {None: 0, "norm": 1, "projection": 2, "cosine": 3, "probe": 4}


@triton.jit
def _send_kernel(
    rows, layer_stride, row_stride, width, out, vector, mean, scale, bias,
    KIND: tl.constexpr, MEAN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < width
    at = layer.to(tl.int64) * layer_stride + row.to(tl.int64) * row_stride
    x = tl.load(rows + at + d, mask=mask, other=0.0)
    if KIND == 0:
        at = (row * tl.num_programs(1) + layer).to(tl.int64) * width
        tl.store(out + at + d, x.to(out.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if MEAN:
            x -= tl.load(mean + d, mask=mask, other=0.0)
        if SCALE:
            x /= tl.load(scale + d, mask=mask, other=1.0)
        if KIND == 1:
            value = tl.sqrt(tl.sum(x * x, 0))
        else:
            value = tl.sum(x * tl.load(vector + d, mask=mask, other=0.0), 0)
            if KIND == 3:
                value /= tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-30)
            if KIND == 4:
                value += tl.load(bias)
        tl.store(out + layer * tl.num_programs(0) + row, value)


def send(
    rows: Tensor, out: Tensor, kind: str | None = None, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write ``rows`` [L, n, D], any stride but neighbouring columns, to ``out``, which the device reaches:
    as they are (``kind`` None) to [n, L, D], of float32 or their own type; else one float32 number each to
    [L, n]. ``tensors``: what a projection, cosine or probe reads, float32 on the device."""
    layers, n, width = rows.shape
    t = tensors or {}
    vector = t.get("weight" if kind == "probe" else "unit", rows)
    block = triton.next_power_of_2(width)
    _send_kernel[(n, layers)](
        rows, rows.stride(0), rows.stride(1), width, out,
        vector, t.get("mean", vector), t.get("scale", vector), t.get("bias", vector),
        KIND=KINDS[kind], MEAN="mean" in t, SCALE="scale" in t, BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
