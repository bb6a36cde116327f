"""From the scheduler to the front end through vLLM's serializer: what is large is sent as it lies, and vLLM
sees its own outputs only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_hook import wire
from vllm_hook.engine.receive import Receiver
from vllm_hook.engine.scheduler import SchedulerHook
from vllm_hook.runtime.requests import AHEAD_KEY, PAYLOAD_KEY
from vllm_hook.runtime.rows import Block, Chunk, Record


class Collected(list):
    """Takes the place of a request's collector."""

    add = list.extend

    def guard(self, act, *args):
        act(*args)

    def join(self, block: Block, member: int) -> None:
        self.append((block, member))

    laid_out = 0

    def lay_out(self) -> None:
        self.laid_out += 1


class Front:
    """An output processor that keeps what vLLM would see, and the requests that it knows."""

    def __init__(self, *req_ids):
        self.seen = []
        self.request_states = {r: SimpleNamespace(_vllm_hook=Collected()) for r in req_ids}
        self.add_request = self.abort_requests = None
        Receiver(self)

    def process_outputs(self, outputs):
        self.seen += outputs

    def collected(self, req_id):
        return self.request_states[req_id]._vllm_hook


def scheduler(pending, chunks=(), local=False):
    hook = object.__new__(SchedulerHook)
    hook._local, hook._pending, hook._chunks = local, dict(pending), [*chunks]
    hook.scheduler = SimpleNamespace(requests={})
    return hook


def large(index, seed):
    torch.manual_seed(seed)
    return Record(index, np.arange(4, dtype=np.int32), torch.randn(2, 4, wire.LARGE // 16), alone=True)


def chunk(*req_ids):
    rows = torch.arange(len(req_ids) * 2.0).view(-1, 2)
    return Chunk(tuple((r, 0) for r in req_ids), np.full(len(req_ids), 7, dtype=np.int32), rows)


def outputs(*req_ids):
    return {0: EngineCoreOutputs(outputs=[EngineCoreOutput(r, [1]) for r in req_ids])}


def transferred(per_client):
    frames = MsgpackEncoder().encode(per_client)
    return MsgpackDecoder(EngineCoreOutputs).decode([bytearray(f) for f in frames]).outputs


def sent_from(per_client):
    return [o.pooling_output.data_ptr() for o in per_client.outputs if o.pooling_output is not None]


def test_a_large_record_beside_a_chunk_is_not_copied():
    record = large(1, seed=0)
    step = outputs("a", "b")
    scheduler({"a": [record]}, [chunk("a", "b")])._deliver(step)
    assert record.values.data_ptr() in sent_from(step[0])

    front = Front("a", "b")
    front.process_outputs(transferred(step[0]))
    assert [(o.request_id, o.new_token_ids, o.kv_transfer_params, o.pooling_output) for o in front.seen] == [
        ("a", [1], None, None), ("b", [1], None, None)
    ]  # fmt: skip
    (got,) = [r for r in front.collected("a") if isinstance(r, Record)]
    assert got.index == 1
    assert torch.equal(got.values, record.values)
    ((block, member),) = front.collected("b")
    assert torch.equal(block.record(member).values, torch.tensor([[2.0], [3.0]]))


def test_large_rows_of_many_requests_are_one_message_and_belong_to_each():
    """The engine describes them once; the front end gives each request its own row in memory of its own."""
    rows = torch.randn(3, 2, wire.LARGE // 8)
    members = tuple((r, 0) for r in ("a", "gone", "b"))
    step = outputs("a", "b")
    scheduler({}, [Chunk(members, np.asarray([7, 8, 9], dtype=np.int32), rows)])._deliver(step)
    assert len(step[0].outputs) == 2
    assert sent_from(step[0]) == [rows.data_ptr()]
    front = Front("a", "b")
    front.process_outputs(transferred(step[0]))
    for req_id, i in (("a", 0), ("b", 2)):
        (got,) = front.collected(req_id)
        assert front.collected(req_id).laid_out == 1
        assert got.positions.tolist() == [7 + i]
        assert torch.equal(got.values, rows[i][:, None])
        assert got.values.untyped_storage().nbytes() == got.values.nbytes


def test_large_records_of_one_request_and_of_several_are_not_copied():
    records = [large(i, seed=i) for i in range(3)]
    step = outputs("a", "b")
    step[0].outputs[1].kv_transfer_params = {"of": "vLLM"}
    scheduler({"a": [records[0], "lost"], "b": records[1:]})._deliver(step)
    assert {r.values.data_ptr() for r in records} <= {*sent_from(step[0])}

    front = Front("a", "b")
    front.process_outputs(transferred(step[0]))
    assert [(o.request_id, o.kv_transfer_params) for o in front.seen] == [("a", None), ("b", {"of": "vLLM"})]
    first, lost = front.collected("a")
    assert lost == "lost"
    for got, want in zip([first, *front.collected("b")], records, strict=True):
        assert got.index == want.index
        assert torch.equal(got.values, want.values)


@pytest.mark.parametrize("known", [True, False])
def test_small_rows_need_no_output_of_their_own(known):
    """Nor do they reach a request that has ended."""
    small = Record(1, np.arange(1, dtype=np.int32), torch.randn(2, 1, 8))
    step = outputs("a", "b")
    scheduler({"a": [small, small]}, [chunk("a", "b")])._deliver(step)
    assert [o.kv_transfer_params is None for o in step[0].outputs] == [False, True]
    assert AHEAD_KEY not in step[0].outputs[0].kv_transfer_params
    front = Front(*("ab" if known else ""))
    front.process_outputs(transferred(step[0]))
    assert len(front.seen) == 2
    if known:
        assert [type(r) for r in front.collected("a")] == [tuple, Record, Record]
        kept = front.collected("b")[0][0]._values[0]  # without the rows of others that came with it
        assert kept.untyped_storage().nbytes() == kept.nbytes


def test_an_engine_in_this_process_hands_over_what_it_has():
    record, rows = large(1, seed=0), chunk("a", "b")
    step = outputs("a", "b")
    scheduler({"a": [record]}, [rows], local=True)._deliver(step)
    first, second = step[0].outputs
    assert first.kv_transfer_params == {PAYLOAD_KEY: [record, rows]}
    assert (first.pooling_output, second.kv_transfer_params) == (None, None)
