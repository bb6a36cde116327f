"""Rows between processes: a list of plain data that says what there is, and one tensor with all bytes.

Serializers of engines copy what stands among their plain data, and send tensors as they are. numpy
has no bf16, so rows travel as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}
#: Every record begins at a multiple of this, as views of wider types need.
_ALIGN = 16

#: What the rows are, as plain data, their positions and values.
Row = tuple[Any, np.ndarray, Tensor]


def pack(records: Sequence[Row | str]) -> tuple[list[Any], Tensor | None]:
    """(key, positions, values) or messages -> plain data in the same order, and the bytes of all values.

    The bytes of a single record are those of ``values`` itself, not a copy, where they lie together.
    """
    meta: list[Any] = []
    parts: list[Tensor] = []
    at = 0
    for record in records:
        if isinstance(record, str):
            meta.append(record)
            continue
        key, positions, values = record
        flat = values.contiguous().reshape(-1).view(torch.uint8)
        dtype = str(values.dtype).removeprefix("torch.")
        where = positions.astype(np.int32, copy=False).tobytes()
        meta.append([key, where, dtype, list(values.shape), at, at + flat.numel()])
        parts.append(flat)
        at = -(-(at + flat.numel()) // _ALIGN) * _ALIGN
    if len(parts) < 2:
        return meta, parts[0] if parts else None
    payload = torch.empty(at, dtype=torch.uint8)
    rows = [entry for entry in meta if not isinstance(entry, str)]
    for (*_, start, stop), flat in zip(rows, parts, strict=True):
        payload[start:stop] = flat
    return meta, payload


def unpack(meta: Sequence[Any], payload: Tensor | None) -> list[Row | str]:
    """Inverse of :func:`pack`. Values are views of ``payload``."""
    found: list[Row | str] = []
    for entry in meta:
        if isinstance(entry, str):
            found.append(entry)
            continue
        key, where, dtype, shape, start, stop = entry
        assert payload is not None
        values = payload[start:stop].view(_DTYPES[dtype]).view(shape)
        found.append((key, np.frombuffer(where, dtype=np.int32), values))
    return found
