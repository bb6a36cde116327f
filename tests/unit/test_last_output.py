"""Which of vLLM's outputs carries the result: the last of each sample, once, however it ends."""

import weakref
from itertools import count

import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_hook.engine import receive
from vllm_hook.runtime.requests import PAYLOAD_KEY
from vllm_hook.runtime.rows import Chunk

DELTA, CUMULATIVE, FINAL = (
    RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY,
)  # fmt: skip


class Collector:
    """Counts how often a result is asked for."""

    def __init__(self, context, end):
        self.results, self.laid_out = count(), 0

    def lay_out(self):
        self.laid_out += 1

    def finish(self, token_ids, aborted):
        assert next(self.results) == 0, "finished twice"
        return "aborted" if aborted else f"{len(token_ids)} tokens"


class Engine:
    """vLLM's own output processor behind a receiver, and a hand that plays the engine."""

    def __init__(self):
        self.outputs = OutputProcessor(None, log_stats=False)
        receive.Receiver(self.outputs)
        self.released = []

    def add(self, name, kind, hooked=True, n=1, queue=None, **more):
        params = SamplingParams(max_tokens=4, output_kind=kind, n=n, **more)
        if hooked:
            data = receive.Payload()
            data.context, data.samples, data.end = None, n, 99
            data.give_back = lambda: self.released.append(name)
            params.extra_args = {PAYLOAD_KEY: data}
        request = EngineCoreRequest(
            name, [1, 2], None, params, None, 0.0, None, None, None, external_req_id=f"user's {name}"
        )
        if n == 1:
            self.outputs.add_request(request, None, None, 0, queue)
            return [name]
        parent = ParentRequest(request)
        names = []
        for i in range(n):
            own, own_params = parent.get_child_info(i)
            child = EngineCoreRequest(
                own, [1, 2], None, own_params, None, 0.0, None, None, None, external_req_id=f"user's {name}"
            )
            self.outputs.add_request(child, None, parent, i, queue)
            names.append(own)
        return names

    def step(self, *names, last=()):
        outs = [
            EngineCoreOutput(n, [7], finish_reason=FinishReason.LENGTH if n in last else None) for n in names
        ]
        return self.outputs.process_outputs(outs).request_outputs


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(receive, "Collector", Collector)
    return Engine()


def hooks(outs):
    return [(o.request_id.removeprefix("user's "), o.hook) for o in outs]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_a_stream_carries_it_at_its_end_and_others_never(engine, kind):
    engine.add("a", kind)
    engine.add("plain", kind, hooked=False)
    for _ in range(2):
        assert hooks(engine.step("a", "plain")) == [("a", None), ("plain", None)]
    assert hooks(engine.step("a", "plain", last=["a"])) == [("a", "3 tokens"), ("plain", None)]
    assert engine.released == ["a"]
    assert hooks(engine.step("plain", last=["plain"])) == [("plain", None)]


def test_nothing_of_ours_runs_while_tokens_are_streamed(engine):
    engine.add("a", DELTA)
    engine.step("a")
    assert type(engine.outputs.request_states["a"]) is RequestState


def test_results_are_laid_out_behind_the_first_step_and_once(engine, monkeypatch):
    made = []
    new = Collector.__init__
    monkeypatch.setattr(Collector, "__init__", lambda self, *args: made.append(self) or new(self, *args))
    engine.add("a", RequestOutputKind.FINAL_ONLY)
    assert [c.laid_out for c in made] == [0]
    for _ in range(2):
        engine.step("a")
    engine.add("b", RequestOutputKind.DELTA)
    engine.step("a", "b", last=("b",))
    assert [c.laid_out for c in made] == [1, 1]


def test_a_final_output_carries_it(engine):
    engine.add("a", FINAL)
    assert engine.step("a") == []
    assert hooks(engine.step("a", last=["a"])) == [("a", "2 tokens")]


@pytest.mark.parametrize("also_the_engine", [False, True])
def test_a_stop_string_that_the_front_end_finds(engine, also_the_engine):
    engine.add("a", DELTA, stop=["END"])
    state = engine.outputs.request_states["a"]
    assert hooks(engine.step("a")) == [("a", None)]
    state.detokenizer.update = lambda tokens, stopped: "END"
    assert hooks(engine.step("a", last=["a"] if also_the_engine else [])) == [("a", "1 tokens")]


@pytest.mark.parametrize("internal", [True, False])
def test_an_aborted_stream(engine, internal):
    queue = RequestOutputCollector(DELTA, "a")
    engine.add("a", DELTA, queue=queue)
    engine.add("b", DELTA)
    engine.step("a", "b")
    queue.get_nowait()
    engine.outputs.abort_requests(iter(["a" if internal else "user's a"]), internal=internal)
    assert queue.get_nowait().hook == "aborted"
    assert engine.released == ["a"]
    assert hooks(engine.step("b", last=["b"])) == [("b", "2 tokens")]


@pytest.mark.usefixtures("no_collection")
def test_rows_of_an_aborted_request_are_let_go_at_once(engine):
    """Also where nobody waits for its output; they may be gigabytes."""
    engine.add("a", FINAL)
    engine.step("a")
    collector = weakref.ref(engine.outputs.request_states["a"]._vllm_hook)
    engine.outputs.abort_requests(["a"], internal=True)
    assert collector() is None


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_samples_of_one_request(engine, kind):
    first, second = engine.add("a", kind, n=2)
    engine.step(first, second)
    early = engine.step(first, second, last=[second])
    assert not engine.released
    late = engine.step(first, last=[first])
    assert engine.released == ["a"]
    if kind == FINAL:
        assert early == []
        [whole] = late
        assert [o.hook for o in whole.outputs] == ["3 tokens", "2 tokens"]
    else:
        assert {o.outputs[0].index: o.outputs[0].hook for o in early} == {0: None, 1: "2 tokens"}
        assert [o.outputs[0].hook for o in late] == ["3 tokens"]


def test_an_aborted_request_of_several_samples(engine):
    queue = RequestOutputCollector(DELTA, "a")
    names = engine.add("a", DELTA, n=2, queue=queue)
    engine.step(*names)
    queue.get_nowait()
    engine.outputs.abort_requests(["a"], internal=True)  # the parent
    assert {o.index: o.hook for o in queue.get_nowait().outputs} == {0: "aborted", 1: "aborted"}
    assert engine.released == ["a"]


def test_late_rows_of_an_id_that_a_plain_request_uses_again(engine):
    """Only where vLLM's ids are not randomised. They belong to nobody."""
    for name in "ab":
        engine.add(name, DELTA)
    engine.step("a", "b", last=["a"])
    engine.add("a", DELTA, hooked=False)
    row = Chunk((("a", 0),), np.asarray([2], dtype=np.int32), torch.ones(1, 1))
    late = [
        EngineCoreOutput(name, [7], kv_transfer_params={PAYLOAD_KEY: [rows]})
        for name, rows in [("b", row), ("a", "failed")]
    ]
    assert hooks(engine.outputs.process_outputs(late).request_outputs) == [("b", None), ("a", None)]
