"""Rows leave the device: on a stream of their own, into pinned memory, while the engine goes on.

Rows of a step are gathered behind its forward pass and copied while the next one is prepared; few rows
are gathered and reduced on one more stream, beside the product that gives the logits. Large
captures, all prompt rows of many layers, are sent layer by layer as soon as each tap has run, straight
from its buffer, so that the bus works while later layers compute; such steps run without CUDA graphs
anyway (longer than any captured size).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.library import after_tap
from ..sites import ModelFacts, site
from .buffers import SiteBank
from .plan import LanePlan, Piece, StepPlan, positions_within

logger = logging.getLogger(__name__)

#: Captures of at least this many bytes a step are sent layer by layer, if that takes no copies smaller
#: than this on average: the host needs about 5 us for each, in which the bus moves as much.
EARLY_BYTES = 8 << 20
EARLY_COPY_BYTES = 256 << 10

#: Rows of at most so many bytes a step are gathered beside the engine's own work.
FEW_BYTES = 4 << 20


class Transfer:
    """Copies from one device. On a CPU everything is where it should be already."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._beside = torch.cuda.Stream(device) if on_gpu else None
        self._early: dict[int, tuple[list[Tensor], set[int]]] = {}
        self._keys: list[int] = []
        self._homes: dict[int, Tensor] = {}
        self._busy: torch.cuda.Event | None = None
        self._gathered: torch.cuda.Event | None = None

    def beside(self, plan: StepPlan, bank: SiteBank, sharded: bool) -> AbstractContextManager[Any]:
        """Right behind a forward pass: where its rows are gathered. Few rows of buffers of ours have a stream
        of their own, which never waits for large copies; more of them would need memory there that the
        engine has for itself, and attention reads what the next step changes. ``sharded``: ranks meet on the
        engine's stream."""
        if self._beside is None or not _few(plan, bank, sharded):
            return nullcontext()
        self._beside.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._beside)

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Host copies that hold the values once the event has come; what is on the host stays as it is."""
        if self._stream is None:
            return list(tensors), None
        current = torch.cuda.current_stream()
        few = current == self._beside
        stream = current if few else self._stream
        if not few:
            stream.wait_stream(current)
        with nullcontext() if few else torch.cuda.stream(stream):
            out = []
            for tensor in tensors:
                if tensor.is_cuda and not few:
                    tensor.record_stream(stream)
                out.append(tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor)
            event = torch.cuda.Event()
            event.record()
        if few:
            self._gathered = event
        return out, event

    def wait_for_few(self) -> None:
        """A step begins: behind what was gathered beside the last. It reads buffers that are written again,
        and tensors of programs that may be let go of."""
        if self._gathered is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
            self._gathered = None

    # -- large captures ---------------------------------------------------------------------

    def wait_for_buffers(self) -> None:
        """Buffers are written again: behind the copies that still read them, without holding the host."""
        if self._busy is not None:
            torch.cuda.current_stream().wait_event(self._busy)
            self._busy = None

    def expect(self, plan: StepPlan, bank: SiteBank, facts: ModelFacts, sharded: bool) -> None:
        """Before a forward pass without CUDA graphs: send the large captures of its taps early. If that
        fails, the rows take the common way. ``sharded``: head sites have to be joined over ranks first."""
        if self._stream is None:
            return
        try:
            self._expect(plan, bank, facts, sharded)
        except Exception:
            logger.exception("large captures of this step are sent after it")
            self.finish()

    def _expect(self, plan: StepPlan, bank: SiteBank, facts: ModelFacts, sharded: bool) -> None:
        for lane_plan in plan.lanes:
            lane = lane_plan.lane
            if sharded and site(lane.site).kind == "head":
                continue
            bufs = [bank.taken[lane.tap_site, layer] for layer in lane.layers]
            if not _as_taken(lane_plan) or any(buf.data_ptr() in after_tap for buf in bufs):
                continue
            rows = len(lane_plan.positions)
            size = rows * bufs[0].shape[1] * bufs[0].element_size()
            if len(bufs) * size < EARLY_BYTES or size < EARLY_COPY_BYTES * len(lane_plan.pieces):
                continue
            parts = [
                self._home(piece, lane_plan.at(piece), len(bufs), facts.row_shape(lane.site), bufs[0])
                for piece in lane_plan.pieces
            ]
            missing = set(range(len(bufs)))
            self._early[id(lane_plan)] = parts, missing
            spans = [(piece.a, piece.b) for piece in lane_plan.pieces]
            for i, buf in enumerate(bufs):
                targets = [(buf[a:b], part[i]) for (a, b), part in zip(spans, parts, strict=True)]
                self._keys.append(buf.data_ptr())
                after_tap[buf.data_ptr()] = partial(self._send, targets, missing, i)

    def _home(
        self, piece: Piece, positions: np.ndarray, layers: int, shape: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Where the rows of a piece belong on the host: [layers, rows, ...] of one tensor for all chunks of
        an observation whose number of rows is known, so that nobody has to join them."""
        watch, n = piece.watch, len(positions)
        ends = [b for _, b in watch.rows]
        if None in ends:
            return torch.empty(layers, n, *shape, dtype=like.dtype, pin_memory=True)
        key = id(watch)
        if key not in self._homes:
            total = len(positions_within(watch.rows, 0, max(b for b in ends if b is not None)))
            self._homes[key] = torch.empty(layers, total, *shape, dtype=like.dtype, pin_memory=True)
            weakref.finalize(watch, self._homes.pop, key, None)
        first = len(positions_within(watch.rows, 0, int(positions[0])))
        return self._homes[key][:, first : first + n]

    def _send(self, targets: list[tuple[Tensor, Tensor]], missing: set[int], i: int) -> None:
        assert self._stream is not None
        try:
            ready = torch.cuda.Event()
            ready.record()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                for rows, host in targets:
                    host.view(rows.shape).copy_(rows, non_blocking=True)
        except Exception:  # this is inside the model's forward pass, which is not ours to break
            logger.exception("a large capture is sent after the step")
            return
        missing.discard(i)

    def arrived(self, lane_plan: LanePlan) -> list[Tensor] | None:
        """The host tensors, one a piece, that a lane's rows were sent to, if all were."""
        parts, missing = self._early.get(id(lane_plan), ([], {0}))
        return None if missing else parts

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


def _few(plan: StepPlan, bank: SiteBank, sharded: bool) -> bool:
    """Whether a step takes little, and nothing that has to be gathered on the engine's stream."""
    size = 0
    for lane_plan in plan.lanes:
        kind, reduce = site(lane_plan.lane.site).kind, lane_plan.lane.reduce
        if kind == "attention" or (kind == "head" and sharded):
            return False
        if reduce is not None and reduce[0] == "sae":  # a product, whose library would take memory there
            return False
        taps = lane_plan.lane.taps
        buf = bank.taken[taps[0]]
        size += len(lane_plan.positions) * len(taps) * buf.shape[1] * buf.element_size()
    return size <= FEW_BYTES


def _as_taken(lane_plan: LanePlan) -> bool:
    """Whether the lane is nothing but the first rows of its buffers, as they are."""
    lane = lane_plan.lane
    if site(lane.site).kind == "attention" or lane.reduce is not None or lane.heads is not None:
        return False
    return lane.dtype != "float32" and all(isinstance(index, slice) for index in lane_plan.index.values())
