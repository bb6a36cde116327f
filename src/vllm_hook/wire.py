"""Rows between processes: plain lists and bytes, which every serializer of the engine carries.

A record is ``[index, positions int32 bytes, dtype name, shape, data bytes]``. numpy has no bf16,
so tensors travel as raw bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}


def pack(index: int, positions: np.ndarray, values: Tensor) -> list[Any]:
    """One record as plain data."""
    data = values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return [
        index,
        positions.astype(np.int32, copy=False).tobytes(),
        str(values.dtype).removeprefix("torch."),
        list(values.shape),
        data,
    ]


def unpack(record: list[Any]) -> tuple[int, np.ndarray, Tensor]:
    """Inverse of :func:`pack`: (index, positions, values)."""
    index, positions, dtype, shape, data = record
    flat = (
        torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype])
        if data
        else torch.empty(0, dtype=_DTYPES[dtype])
    )
    return index, np.frombuffer(positions, dtype=np.int32), flat.view(shape)
