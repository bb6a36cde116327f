"""Rows leave the device: on a stream of their own, into pinned memory, while the engine goes on.

Rows of a step are gathered behind its forward pass and copied while the next one is prepared. Large
captures, all prompt rows of many layers, are sent layer by layer as soon as each tap has run, straight
from its buffer, so that the bus works while later layers compute; such steps run without CUDA graphs
anyway (longer than any captured size).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..ops.library import after_tap
from ..sites import ModelFacts, site
from .buffers import SiteBank
from .plan import LanePlan, StepPlan

#: Captures of at least this many bytes a step are sent layer by layer.
EARLY_BYTES = 8 << 20


class Transfer:
    """Copies from one device. On a CPU everything is where it should be already."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._early: dict[int, tuple[Tensor, set[int]]] = {}
        self._keys: list[int] = []
        self._busy: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Host copies that hold the values once the event has come; what is on the host stays as it is."""
        if self._stream is None:
            return list(tensors), None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out = []
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
                out.append(tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor)
            event = torch.cuda.Event()
            event.record()
        return out, event

    # -- large captures ---------------------------------------------------------------------

    def wait_for_buffers(self) -> None:
        """Buffers are written again: behind the copies that still read them, without holding the host."""
        if self._busy is not None:
            torch.cuda.current_stream().wait_event(self._busy)
            self._busy = None

    def expect(self, plan: StepPlan, bank: SiteBank, facts: ModelFacts) -> None:
        """Before a forward pass without CUDA graphs: send the large captures of its taps early."""
        if self._stream is None:
            return
        for lane_plan in plan.lanes:
            rows = _whole_rows(lane_plan)
            lane = lane_plan.lane
            keys = [(lane.tap_site, layer) for layer in lane.layers]
            if rows is None or any(bank.taken[key].data_ptr() in after_tap for key in keys):
                continue
            sample = bank.taken[keys[0]]
            if len(keys) * rows * sample.shape[1] * sample.element_size() < EARLY_BYTES:
                continue
            host = torch.empty(
                len(keys), rows, *facts.row_shape(lane.site), dtype=sample.dtype, pin_memory=True
            )
            missing = set(range(len(keys)))
            self._early[id(lane_plan)] = host, missing
            for i, key in enumerate(keys):
                buf = bank.taken[key]
                self._keys.append(buf.data_ptr())
                after_tap[buf.data_ptr()] = partial(self._send, buf[:rows], host[i], missing, i)

    def _send(self, rows: Tensor, host: Tensor, missing: set[int], i: int) -> None:
        assert self._stream is not None
        missing.discard(i)
        ready = torch.cuda.Event()
        ready.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.view(rows.shape).copy_(rows, non_blocking=True)

    def arrived(self, lane_plan: LanePlan) -> Tensor | None:
        """The host tensor that a lane's rows were sent to, if they were."""
        host, missing = self._early.get(id(lane_plan), (None, {0}))
        return None if missing else host

    def finish(self) -> None:
        """The forward pass is queued: nothing more is sent early, and the buffers are in use for a while."""
        if self._keys:
            for key in self._keys:
                after_tap.pop(key, None)
            self._keys.clear()
            self._early.clear()
            assert self._stream is not None
            self._busy = torch.cuda.Event()
            self._busy.record(self._stream)


def _whole_rows(lane_plan: LanePlan) -> int | None:
    """Number of rows, if the lane is nothing but the first rows of its buffers as they are."""
    lane = lane_plan.lane
    if site(lane.site).kind == "attention" or lane.reduce is not None or lane.heads is not None:
        return None
    if lane.dtype == "float32":
        return None
    ends = {index.stop if isinstance(index, slice) else None for index in lane_plan.index.values()}
    return ends.pop() if len(ends) == 1 else None
