"""The module that carries one site's buffers into the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .library import edit, tap


class SiteTap(nn.Module):
    """One armed site of one layer. ``forward`` is traced; the buffers are graph inputs.

    Buffers, all of fixed address: ``tables`` int32 [tables, 1 + max rows], shared by all sites;
    ``table_id`` int32 [1], which table this site follows in this step (-1: none); ``buf``
    [capacity, width] in the model's dtype, the rows taken in this step; ``fired`` int32 [1], how
    often the site took rows since start-up.
    """

    tables: Tensor
    table_id: Tensor
    buf: Tensor
    fired: Tensor

    def __init__(
        self, tables: Tensor, table_id: Tensor, capacity: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        device = tables.device
        self.register_buffer("tables", tables, persistent=False)
        self.register_buffer("table_id", table_id, persistent=False)
        # A tensor of its own, never a view: see library.py.
        self.register_buffer(
            "buf", torch.zeros(capacity, width, dtype=dtype, device=device), persistent=False
        )
        self.register_buffer("fired", torch.zeros(1, dtype=torch.int32, device=device), persistent=False)

    def forward(self, h: Tensor, residual: Tensor | None = None) -> None:
        tap(h, residual, self.fired, self.tables, self.table_id, self.buf)


class SiteEdit(nn.Module):
    """One place where rows can be changed. ``forward`` edits ``h`` in place and is traced.

    Buffers: ``site`` int32 [2], the tables of edits and conditions that this place follows in this
    step (-1: none); ``shared``, the tables of all places (:class:`vllm_hook.ops.edit.EditState`);
    ``fired`` int32 [1], how often the place was active since start-up.
    """

    site: Tensor
    fired: Tensor

    def __init__(self, shared: list[Tensor], site: Tensor) -> None:
        super().__init__()
        self._names = [f"shared_{i}" for i in range(len(shared))]
        for name, tensor in zip(self._names, shared, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("site", site, persistent=False)
        self.register_buffer("fired", torch.zeros(1, dtype=torch.int32, device=site.device), persistent=False)

    def forward(self, h: Tensor, residual: Tensor | None = None) -> None:
        edit(h, residual, self.fired, self.site, [getattr(self, name) for name in self._names])
