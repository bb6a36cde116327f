"""Rows between processes: messages of plain data that says what there is, and a tensor with all bytes.

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
#: Values of this many bytes and more have a message to themselves: copying them together with others
#: costs more than a message does.
LARGE = 64 << 10

#: What the rows are, as plain data, their positions and values.
Row = tuple[Any, np.ndarray, Tensor]
#: Plain data of some records in order, and the bytes of their values.
Message = tuple[list[Any], Tensor | None]


def pack(records: Sequence[Row | str]) -> list[Message]:
    """(key, positions, values) or texts -> messages in the same order: what is large alone, what is small
    together with its neighbours.

    The bytes of a record that is alone are those of ``values`` itself, not a copy, where they lie together.
    """
    messages: list[Message] = []
    small: list[Row | str] = []
    for record in records:
        if isinstance(record, str) or record[2].nbytes < LARGE:
            small.append(record)
            continue
        if small:
            messages.append(_message(small))
            small = []
        messages.append(_message([record]))
    if small:
        messages.append(_message(small))
    return messages


def _message(records: Sequence[Row | str]) -> Message:
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
    """The records of one message of :func:`pack`. Values are views of ``payload``, unless that came at an
    address where their type may not lie: sockets put messages of a few KB at any."""
    found: list[Row | str] = []
    for entry in meta:
        if isinstance(entry, str):
            found.append(entry)
            continue
        key, where, dtype, shape, start, stop = entry
        assert payload is not None
        flat, kind = payload[start:stop], _DTYPES[dtype]
        if flat.data_ptr() % kind.itemsize:
            flat = flat.clone()
        found.append((key, np.frombuffer(where, dtype=np.int32), flat.view(kind).view(shape)))
    return found
