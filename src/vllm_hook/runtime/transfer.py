"""Rows leave the device: on a stream of their own, into pinned memory, while the engine goes on.

Rows of a step are gathered behind its forward pass and copied while the next one is prepared; few rows
are written to pinned memory by the one kernel that gathers and reduces them. Large captures, all prompt
rows of many layers, are sent layer by layer as soon as each tap has run, straight from its buffer, so that
the bus works while later layers compute; such steps run without CUDA graphs anyway (longer than any
captured size).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial

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

#: Values of at most so many bytes are written to the host by a kernel, on the engine's stream. It takes as
#: long as a copy there (5 us for 256 KB), but is one launch.
FEW_BYTES = 512 << 10
#: Places for them from the start: the host may be so many steps ahead of what is read.
_PLACES = 3
#: Values of each lane begin at a multiple of so many bytes.
_ALIGN = 256


class Transfer:
    """Copies from one device. On a CPU everything is where it should be already."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._early: dict[int, tuple[list[Tensor], set[int]]] = {}
        self._keys: list[int] = []
        self._homes: dict[int, Tensor] = {}
        self._busy: torch.cuda.Event | None = None
        self._places: list[Tensor] = []
        self._free = [self._place() for _ in range(_PLACES)] if on_gpu else []
        self._lent: list[Tensor] = []  # of the step, and how much of it is in use
        self._used = 0

    def start(self, tensors: Sequence[Tensor], early: bool) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Host copies that hold the values once the event has come; what is on the host stays as it is.
        ``early``: other rows of the step were sent early."""
        if self._stream is None:
            return list(tensors), None
        current = torch.cuda.current_stream()
        event = torch.cuda.Event()
        if not early and not any(tensor.is_cuda for tensor in tensors):
            event.record(current)
            return list(tensors), event
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = []
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
                out.append(tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor)
            event.record()
        return out, event

    # -- few rows ---------------------------------------------------------------------------

    def sends_few(self, kind: str | None, size: int) -> bool:
        """Whether there is a kernel for rows that are reduced so, and room for so many bytes in this step."""
        return self._stream is not None and self._has_room(kind, size)

    def _has_room(self, kind: str | None, size: int) -> bool:
        return kind != "sae" and (self._used if self._lent else 0) + size <= FEW_BYTES

    def send_few(
        self,
        rows: Tensor,
        size: int,
        dtype: torch.dtype,
        kind: str | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Where the ``size`` values of ``rows`` (see :func:`vllm_hook.ops.triton_send.send`) will be, on the
        host: in memory that is lent until :meth:`take_back`, one place a step. One kernel after the other
        writes there, on the engine's stream, so what nobody reads any more may be written again at once."""
        from ..ops.triton_send import send

        if not self._lent:
            self._lent.append(self._free.pop() if self._free else self._place())
            self._used = 0
        start, stop = self._used, self._used + size * dtype.itemsize
        self._used = -(-stop // _ALIGN) * _ALIGN
        values = self._lent[0][start:stop].view(dtype)
        send(rows, values, kind, tensors)
        return values

    def lent(self) -> list[Tensor]:
        """The memory that this step was lent, which whoever reads it gives back."""
        lent, self._lent = self._lent, []
        return lent

    def take_back(self, lent: Sequence[Tensor]) -> None:
        self._free.extend(lent)

    def _place(self) -> Tensor:
        """Kept for good: PyTorch does not know of kernels that still write there, if nobody gives it back."""
        place = torch.empty(FEW_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._places.append(place)
        return place

    def warm_up(self, bank: SiteBank) -> None:
        """Have the kernels for few rows compiled before a request needs them."""
        for name, rows in bank.samples():
            vector = torch.zeros(rows.shape[2], device=rows.device)
            bias = vector[:1]
            for dtype in {rows.dtype, torch.float32}:
                self._warm(rows, dtype, None, {})
            if site(name).kind != "head":
                linear = {"weight": vector, "bias": bias}
                self._warm(rows, torch.float32, "norm", {})
                self._warm(rows, torch.float32, "projection", {"unit": vector})
                self._warm(rows, torch.float32, "cosine", {"unit": vector})
                self._warm(rows, torch.float32, "probe", linear)
                self._warm(rows, torch.float32, "probe", {**linear, "mean": vector, "scale": vector})

    def _warm(
        self, rows: Tensor, dtype: torch.dtype, kind: str | None, tensors: Mapping[str, Tensor]
    ) -> None:
        size = rows.shape[2] if kind is None else 1
        if self.sends_few(kind, size * dtype.itemsize):
            self.send_few(rows, size, dtype, kind, tensors)
            self.take_back(self.lent())

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


def _as_taken(lane_plan: LanePlan) -> bool:
    """Whether the lane is nothing but the first rows of its buffers, as they are."""
    lane = lane_plan.lane
    if site(lane.site).kind == "attention" or lane.reduce is not None or lane.heads is not None:
        return False
    return lane.dtype != "float32" and all(isinstance(index, slice) for index in lane_plan.index.values())
