"""Rows as plain data and one tensor: every dtype and shape survives, bit for bit, as vLLM sends it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook import wire


def there_and_back(*records):
    return [record for message in wire.pack(records) for record in wire.unpack(*message)]


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(kinds=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_round_trip(kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    sent = [
        (i, np.arange(seed, seed + i, dtype=np.int32), torch.randn(shape, generator=generator).to(dtype))
        for i, (shape, dtype) in enumerate(kinds)
    ]
    for (index, positions, values), want in zip(there_and_back(*sent), sent, strict=True):
        assert index == want[0]
        assert np.array_equal(positions, want[1])
        assert values.dtype == want[2].dtype
        assert values.shape == want[2].shape
        assert torch.equal(values, want[2])


def test_special_values_and_views():
    wide = torch.tensor([[0.0, float("nan"), float("inf")], [-0.0, 1e-45, -float("inf")]])
    view = wide.T[::2]  # not contiguous
    ((_, _, back),) = there_and_back((0, np.array([1], dtype=np.int64), view))
    assert torch.equal(back.contiguous().view(torch.int32), view.contiguous().view(torch.int32))


def test_no_rows_and_messages():
    row = (0, np.empty(0, dtype=np.int32), torch.zeros(2, 0))
    before, (_, positions, values), after = there_and_back("lost", row, "lost too")
    assert (before, after) == ("lost", "lost too")
    assert positions.size == 0
    assert values.shape == (2, 0)
    assert wire.pack(["lost"]) == [(["lost"], None)]
    assert wire.pack([]) == []


def test_one_record_is_not_copied():
    values = torch.randn(3, 4)
    ((_, payload),) = wire.pack([(0, np.arange(4), values)])
    assert payload.data_ptr() == values.data_ptr()


def test_what_is_large_is_not_copied_with_what_is_not():
    """In order, the small ones between two large ones together."""
    at = np.arange(4)
    first, second = torch.randn(2, wire.LARGE // 4)
    small = torch.randn(3)
    sent = [(0, at, first), (1, at, small), "lost", (2, at, small), (3, at, second), (4, at, small)]
    messages = wire.pack(sent)
    assert [[entry if entry == "lost" else entry[0] for entry in meta] for meta, _ in messages] == [
        [0], [1, "lost", 2], [3], [4]
    ]  # fmt: skip
    assert messages[0][1].data_ptr() == first.data_ptr()
    assert messages[2][1].data_ptr() == second.data_ptr()
    assert messages[3][1].data_ptr() == small.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_values_lie_where_their_type_may(dtype, shift):
    """A message that a socket put at any address; what lies right is not copied."""
    sent = [(i, np.arange(5), torch.randn(3, 5).to(dtype)) for i in range(2)]
    ((meta, payload),) = wire.pack(sent)
    memory = torch.empty(payload.numel() + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + shift
    came = memory[start : start + payload.numel()].copy_(payload)
    for (_, _, values), (_, _, want), entry in zip(wire.unpack(meta, came), sent, meta, strict=True):
        assert torch.equal(values, want)
        assert values.data_ptr() % dtype.itemsize == 0
        assert (values.data_ptr() == came.data_ptr() + entry[4]) == (shift % dtype.itemsize == 0)


@pytest.mark.parametrize("count", [1, 3])
def test_the_engines_serializer_takes_it(count):
    """Through vLLM's encoder, with the bytes in frames of their own where they are more than a few."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sent = [(i, np.arange(5), torch.randn(3, 5, 64).bfloat16()) for i in range(count)]
    ((meta, payload),) = wire.pack(sent)
    output = EngineCoreOutput("r", [1], pooling_output=payload, kv_transfer_params={"rows": meta})
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
    assert len(frames) == 2
    (back,) = MsgpackDecoder(EngineCoreOutputs).decode([bytearray(f) for f in frames]).outputs
    for (index, positions, values), want in zip(
        wire.unpack(back.kv_transfer_params["rows"], back.pooling_output), sent, strict=True
    ):
        assert (index, positions.tolist()) == (want[0], want[1].tolist())
        assert torch.equal(values, want[2])
