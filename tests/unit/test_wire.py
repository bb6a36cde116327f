"""Rows as plain data: every dtype and shape survives, bit for bit, and the serializer of vLLM takes it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook import wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_round_trip(dtype, shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    positions = np.arange(seed, seed + 5, dtype=np.int32)
    index, back_positions, back = wire.unpack(wire.pack(3, positions, values))
    assert index == 3
    assert np.array_equal(back_positions, positions)
    assert back.dtype == dtype
    assert back.shape == values.shape
    assert torch.equal(back, values)


def test_special_values_and_views():
    wide = torch.tensor([[0.0, float("nan"), float("inf")], [-0.0, 1e-45, -float("inf")]])
    view = wide.T[::2]  # not contiguous
    _, _, back = wire.unpack(wire.pack(0, np.array([1], dtype=np.int64), view))
    assert torch.equal(back.contiguous().view(torch.int32), view.contiguous().view(torch.int32))


def test_a_scalar_record():
    _, positions, back = wire.unpack(wire.pack(0, np.empty(0, dtype=np.int32), torch.zeros(2, 0)))
    assert positions.size == 0
    assert back.shape == (2, 0)


def test_plain_data_only():
    """msgpack carries it as it is: ints, strings, lists and bytes."""
    msgspec = pytest.importorskip("msgspec")
    values = torch.randn(2, 3, 4).bfloat16()
    record = wire.pack(1, np.array([4, 5, 9]), values)
    assert {type(part) for part in record} == {int, bytes, str, list}
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    index, positions, back = wire.unpack(again)
    assert (index, positions.tolist()) == (1, [4, 5, 9])
    assert torch.equal(back, values)


def test_the_result_is_not_the_senders_memory():
    values = torch.zeros(3)
    record = wire.pack(0, np.array([0, 1, 2]), values)
    values += 1
    assert torch.equal(wire.unpack(record)[2], torch.zeros(3))
