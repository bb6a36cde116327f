"""The module that carries one armed site's buffers into the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .edit import EditState
from .library import edit, tap


class Site(nn.Module):
    """One armed site of one layer. ``forward`` is traced; the buffers are graph inputs.

    Buffers, all of fixed address: ``live``, ``site`` and ``step`` say what to do in this step and are
    shared by all sites (:class:`vllm_hook.runtime.area.StepArea`); ``buf`` [capacity, width] in the
    model's dtype takes rows, if rows are armed here; the tensors of ``state``, if edits are; ``fired``
    int32 [1], how often the site had anything to do since start-up.
    """

    live: Tensor
    site: Tensor
    step: Tensor
    fired: Tensor
    buf: Tensor | None

    def __init__(
        self, live: Tensor, site: Tensor, step: Tensor, buf: Tensor | None, state: EditState | None
    ) -> None:
        super().__init__()
        self.register_buffer("live", live, persistent=False)
        self.register_buffer("site", site, persistent=False)
        self.register_buffer("step", step, persistent=False)
        self.register_buffer("buf", buf, persistent=False)
        self.register_buffer("fired", torch.zeros(1, dtype=torch.int32, device=site.device), persistent=False)
        self._state = [f"state_{i}" for i in range(4)] if state is not None else []
        if state is not None:
            for name, tensor in zip(self._state, state.tensors(), strict=True):
                self.register_buffer(name, tensor, persistent=False)

    def forward(self, h: Tensor, residual: Tensor | None = None) -> None:
        if self._state:
            state = [getattr(self, name) for name in self._state]
            edit(h, residual, None, self.fired, self.live, self.site, self.step, self.buf, state)
        else:
            tap(h, residual, None, self.fired, self.live, self.site, self.step, self.buf)
