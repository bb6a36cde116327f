"""The front end's side of results: rows that come with the engine's outputs, and where they end up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from .. import wire
from ..runtime.requests import AHEAD_KEY, PAYLOAD_KEY
from ..runtime.rows import Blocks, Chunk, Record
from .output import Collector, Context


class Payload(dict):
    """The resolved form of a request as plain data. Within the front end it also carries its context, below
    which position its rows lie (``end``), and what to call when all of its samples have ended, or when
    nobody is left who could: what is held for it is given back once."""

    context: Context
    end: int
    samples: int
    give_back: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers in other processes are sent what serializers see."""
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Payload:
        """Nobody changes it, and what is held is held once."""
        return self

    def ended(self) -> None:
        """One sample has ended. (Garbage collection would release as well, but late.)"""
        self.samples -= 1
        if self.samples == 0:
            self.release()

    def release(self) -> None:
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()

    __del__ = release


class Receiver:
    """Wraps one engine's output processor."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs
        self._blocks = Blocks()
        self._running: dict[str, Payload] = {}
        self._new: list[Collector] = []  # requests, or rows of them, that came since the last step
        self._add_request = outputs.add_request
        self._process_outputs = outputs.process_outputs
        self._abort_requests = outputs.abort_requests
        outputs.add_request = self.add_request
        outputs.process_outputs = self.process_outputs
        outputs.abort_requests = self.abort_requests
        _extend_outputs()

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.sampling_params
        data = (params.extra_args or {}).get(PAYLOAD_KEY) if params is not None else None
        if data is None:
            return self._add_request(request, *args, **kwargs)
        collector = Collector(data.context, data.end)  # if it fails, nobody waits
        out = self._add_request(request, *args, **kwargs)
        state = self._outputs.request_states[request.request_id]
        state._vllm_hook = collector
        self._new.append(collector)
        self._running[request.request_id] = data
        if params.stop or params.output_kind == RequestOutputKind.FINAL_ONLY:
            _give_result(state)  # the front end may end it at any token, or makes no output before
        return out

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> Any:
        request_ids = list(request_ids)
        for name in request_ids:  # of a sample of an engine, or one that a user gave to several
            for request_id in [name] if internal else self._outputs.external_req_ids.get(name, ()):
                state = self._outputs.request_states.get(request_id)
                if state is not None and state.queue is not None:  # else vLLM makes no output
                    _give_result(state)
        aborted = self._abort_requests(request_ids, internal)
        self._ended(aborted)
        return aborted

    def _ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running and request_id not in self._outputs.request_states:
                self._running.pop(request_id).ended()

    def _share(self, chunks: Sequence[Chunk]) -> None:
        """Rows of many requests. Small ones: each is told once in which block its own will be. Others: each
        is given its own at once. What ended is passed over."""
        for chunk in chunks:
            for req_id, record in () if chunk.small else chunk.records():
                self._give(req_id, [record])
        small = [chunk for chunk in chunks if chunk.small]
        for block in self._blocks.add(small) if small else ():
            for member, (req_id, _) in enumerate(block.members):
                if (own := self._collector(req_id)) is not None:
                    own.guard(own.join, block, member)

    def _give(self, request_id: str, records: Sequence[Record | str]) -> None:
        if (own := self._collector(request_id)) is not None:
            own.guard(own.add, records)
            self._new.append(own)

    def _collector(self, request_id: str) -> Collector | None:
        """None if it has ended, even if a request without programs has its id now."""
        return getattr(self._outputs.request_states.get(request_id), "_vllm_hook", None)

    def process_outputs(self, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = [output for output in engine_core_outputs if self._take(output)]
        states = self._outputs.request_states
        for output in outputs:
            if output.finish_reason is not None and (state := states.get(output.request_id)) is not None:
                _give_result(state)
        out = self._process_outputs(outputs, *args, **kwargs)
        self._ended([output.request_id for output in outputs])
        new, self._new = self._new, []
        for collector in new:
            collector.lay_out()
        return out

    def _take(self, output: Any) -> bool:
        """Take out the rows that came with an output. Whether vLLM's own is left."""
        extra = output.kv_transfer_params
        if extra is None or PAYLOAD_KEY not in extra:
            return True
        rows = _received(extra[PAYLOAD_KEY], output.pooling_output)
        output.pooling_output = None
        rest = {key: value for key, value in extra.items() if key != PAYLOAD_KEY}
        output.kv_transfer_params = rest or None
        self._share([r for r in rows if isinstance(r, Chunk)])
        if own := [r for r in rows if not isinstance(r, Chunk)]:
            self._give(output.request_id, own)
        return AHEAD_KEY not in extra


def _received(rows: list[Any], payload: Tensor | None) -> list[Record | Chunk | str]:
    """Rows of an output, from an engine in this process (no payload) or in another."""
    if payload is None:
        return rows
    return [r if isinstance(r, str) else _rows(*r) for r in wire.unpack(rows, payload)]


def _rows(key: Any, positions: np.ndarray, values: Tensor) -> Record | Chunk:
    if isinstance(key, int):
        return Record(key, positions, values)
    chunk = Chunk(tuple((req_id, index) for req_id, index in key), positions, values)
    # The payload may hold rows of one request besides, which the others need not keep.
    return replace(chunk, values=values.clone()) if chunk.small else chunk


class _Giving(RequestState):
    """State of a sample whose result goes on its last output."""

    _vllm_hook: Collector

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        output = super()._new_completion_output(token_ids, finish_reason, *args, **kwargs)
        if finish_reason is not None:
            assert self.detokenizer is not None
            kept = self.detokenizer.output_token_ids
            output.hook = self._vllm_hook.finish(kept, aborted=finish_reason == FinishReason.ABORT)
        return output

    def _new_request_output(self, external_req_id: str, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        output = super()._new_request_output(external_req_id, outputs, *args, **kwargs)
        for o in outputs:
            if o.hook is not None:  # else the class says None
                output.hook = o.hook
                break
        return output


def _give_result(state: Any) -> None:
    """Make the state of one sample put the result on its last output, if it is of a request with programs.
    Not before that output is near, since it runs for every token that is streamed. (A class, as one request
    in a batch of many that end together has microseconds for this.)"""
    if hasattr(state, "_vllm_hook"):
        state.__class__ = _Giving


def _extend_outputs() -> None:
    """Give vLLM's output classes a ``hook`` (None by default) that survives the merging of stream chunks."""
    if hasattr(RequestOutput, "hook"):
        return
    RequestOutput.hook = None
    CompletionOutput.hook = None
    add = RequestOutput.add

    def add_with_hook(self: Any, next_output: Any, aggregate: bool) -> None:
        add(self, next_output, aggregate)
        if next_output.hook is None:
            return
        self.hook = next_output.hook
        for later in next_output.outputs:
            for mine in self.outputs:
                if mine.index == later.index and later.hook is not None:
                    mine.hook = later.hook

    RequestOutput.add = add_with_hook
