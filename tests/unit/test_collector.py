"""Rows of requests that share blocks and leave one after the other, against a plain table of them."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook.engine.output import BLOCKS_KEPT, Collector, Context, Use
from vllm_hook.program.resolve import ResolvedObservation
from vllm_hook.runtime import rows as rows_module
from vllm_hook.runtime.requests import Lane
from vllm_hook.runtime.rows import Blocks, Chunk, Record

LANES = (Lane("resid_post", (0, 1), reduce=("norm",)), Lane("resid_pre", (0, 1), reduce=("norm",)))
PROMPT = 3


def collector(prompt=PROMPT, fixed=(None, None)):
    observations = tuple(
        (
            f"p/o{i}",
            SimpleNamespace(site=lane.site),
            ResolvedObservation(f"o{i}", ((prompt, None),), frozenset(), ()),
        )
        for i, lane in enumerate(LANES)
    )
    context = SimpleNamespace(
        observations=observations, lanes=LANES, prompt=prompt, uses=(), edits=None,
        judged=False, fixed=fixed, programs=[("p", "digest")], spans=(("p/s", ((0, 2),)),),
    )  # fmt: skip
    return Collector(context, 99)


class Front:
    """Hands chunks to collectors as the receiver does, and keeps what each request should end with."""

    def __init__(self, requests):
        self.blocks, self.own = Blocks(), {r: collector() for r in requests}
        self.at = dict.fromkeys(requests, PROMPT)
        self.want = {r: [{} for _ in LANES] for r in requests}
        self.value = 0.0

    def rows(self, request, index):
        """[layers] of one row, noted."""
        self.value += 1
        values = torch.full((len(LANES[index].layers),), self.value)
        self.want[request][index][self.at[request]] = values
        return values

    def step(self, order, alone=(), together=False):
        """One token of each request in ``order``, rows of those in ``alone`` as records of their own;
        ``together``: all observations in one block."""
        shared = [r for r in order if r not in alone]
        members = [[(r, i) for r in shared] for i in range(len(LANES))]
        chunks = []
        for own in [members[0] + members[1]] if together else members:
            if own:
                values = torch.stack([self.rows(r, index) for r, index in own])
                at = np.asarray([self.at[r] for r, _ in own], dtype=np.int32)
                chunks.append(Chunk(tuple((str(r), index) for r, index in own), at, values))
        for r in order:
            if r in alone:
                at = np.asarray([self.at[r]], dtype=np.int32)
                for index in range(len(LANES)):
                    self.own[r].add([Record(index, at, self.rows(r, index)[:, None])])
        if chunks:
            for block in self.blocks.add(chunks):
                for i, (r, _) in enumerate(block.members):
                    if int(r) in self.own:
                        self.own[int(r)].join(block, i)
        for r in order:
            self.at[r] += 1

    def end(self, request):
        own = self.own.pop(request)
        fed = max(self.want[request][0], default=PROMPT - 1) + 1
        result = own.finish([7] * (fed - PROMPT + 1), aborted=False)
        assert not result.errors
        for (name, _, _), want in zip(own.context.observations, self.want[request], strict=True):
            got = result.observed[name]
            assert got.positions == sorted(want)
            stacked = [want[p] for p in got.positions]
            if stacked:
                assert torch.equal(got.values, torch.stack(stacked, dim=1))
                whole = torch.empty(0).set_(got.values.untyped_storage())
                assert whole.count_nonzero() == got.values.count_nonzero(), (
                    "what there is besides holds nothing"
                )
        return result


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(2, 40))
def test_each_has_its_rows_whoever_comes_goes_and_is_run_again(random, requests, steps):
    before = rows_module.BLOCK_STEPS, rows_module.ONE_BY_ONE
    rows_module.BLOCK_STEPS, rows_module.ONE_BY_ONE = random.choice([2, 5, 64]), random.choice([0, 1, 4])
    try:
        front = Front(range(requests))
        for _ in range(steps):
            order = [r for r in front.own if random.random() < 0.9]
            random.random() < 0.2 and random.shuffle(order)
            front.step(order, [r for r in order if random.random() < 0.1], random.random() < 0.2)
            if order and random.random() < 0.1:
                front.at[order[0]] = max(
                    PROMPT, front.at[order[0]] - 2
                )  # of what is run again the last counts
            if order and random.random() < 0.1:
                front.end(order[-1])
            for own in front.own.values():
                closed = [block for block, _ in own.blocks if block.closed]
                assert len(closed) <= BLOCKS_KEPT * len(LANES)
        for request in list(front.own):
            front.end(request)
    finally:
        rows_module.BLOCK_STEPS, rows_module.ONE_BY_ONE = before


@pytest.mark.parametrize("twice", [False, True])
def test_many_that_end_together_are_joined_at_once(monkeypatch, twice):
    """The first two come a step earlier, and end a step earlier: three blocks, of which the others share
    two."""
    front = Front(range(12))
    front.step([0, 1])
    for _ in range(5):
        front.step(range(12), together=twice)
    front.end(0)
    front.end(1)
    front.step(range(2, 12), together=twice)
    calls = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim: calls.append(len(parts)) or cat(parts, dim=dim))
    results = [front.end(r) for r in range(2, 12)]
    assert len(calls) == 2 * rows_module.ONE_BY_ONE // (1 + twice) + 2 // (1 + twice)
    for result in results:
        for found in result.observed.values():
            assert found.values.untyped_storage().nbytes() == found.values.nbytes


def test_members_that_end_together_and_came_one_after_the_other(monkeypatch):
    """Some are in blocks that others are not in, of as many members."""
    monkeypatch.setattr(rows_module, "ONE_BY_ONE", 0)
    front = Front(range(4))
    for order in ([0, 1], [2, 3], [1, 2, 3, 0], [0, 1, 2, 3]):
        front.step(order)
    ended = [front.end(r) for r in (3, 0, 2, 1)]
    assert [len(result.observed["o0"].positions) for result in ended] == [3, 3, 3, 3]
    front = Front(range(4))
    for order in ([0, 3], [0, 1, 2], [2, 1, 0]):
        front.step(order)
    ended = [front.end(r) for r in (1, 2, 0)]  # the last has a block more than the others
    assert [len(result.observed["o0"].positions) for result in ended] == [2, 2, 3]


def test_what_a_context_says_of_the_prompt_and_of_scores():
    def context(rows, token_ids=frozenset(), analyses=(), rules=()):
        resolved = ResolvedObservation("o", rows, token_ids, ())
        program = SimpleNamespace(
            name="p", observations=(SimpleNamespace(id="o", site="q"),), analyses=analyses, rules=rules
        )
        return Context((Use(program, "d", SimpleNamespace(observations=(resolved,), spans={})),), LANES, 6)

    (fixed,) = context(((2, 3), (5, 6))).fixed
    assert fixed.tolist() == [2, 5]
    for told in (context(((2, None),)), context(((2, 7),)), context(((2, 3),), frozenset({4}))):
        assert told.fixed == (None,)
        assert not told.judged
    assert context(((2, 3),), analyses=("a",)).judged
    assert context(((2, 3),), rules=("r",)).judged


def test_few_blocks_are_kept_whoever_closes_them():
    """A neighbour that ends closes the block that it shares, and nobody is told."""
    front = Front(range(3))
    for order in ([0, 1], [0, 2], [0, 1], [0, 2], [1, 2], [0, 1]):
        front.step(order)
    front.end(1)
    assert len(front.own[0].blocks) <= BLOCKS_KEPT * len(LANES)
    front.end(0)
    front.end(2)


def test_rows_of_two_observations_keep_their_order_when_one_is_taken_first():
    """A block of the second alone, one of both that runs its position again, then a record of the first."""
    blocks, own = Blocks(), collector()

    def chunk(value, *indices):
        at = np.full(len(indices), PROMPT, dtype=np.int32)
        return Chunk(tuple(("0", i) for i in indices), at, torch.full((len(indices), 2), value))

    for chunks in ([chunk(1.0, 1)], [chunk(2.0, 0, 1)]):
        for block in blocks.add(chunks):
            for i in range(len(block.members)):
                own.join(block, i)
    own.add([Record(0, np.asarray([PROMPT + 1], dtype=np.int32), torch.full((2, 1), 3.0))])
    result = own.finish([7, 7], aborted=False)
    assert result.observed["o0"].values.tolist() == [[2.0], [2.0]]
    assert result.observed["o1"].values.tolist() == [[2.0], [2.0]]


def test_results_of_neighbours_share_nothing():
    front = Front(range(3))
    for _ in range(5):
        front.step([0, 1, 2])
    first, second = front.end(0), front.end(1)
    size = len(pickle.dumps(first.observed["o1"].values))
    one = len(pickle.dumps(torch.zeros(1, 5)))
    assert size < one + 200
    first.observed["o0"].values.zero_()
    first.observed["o0"].positions.append(9)
    first.spans["s"].append((5, 6))
    first.programs.append(("x", "y"))
    front.step([2])
    third = front.end(2)
    assert (second.observed["o0"].values > 0).all()
    assert (third.observed["o0"].values > 0).all()
    assert (third.spans["s"], third.programs) == ([(0, 2)], [("p", "digest")])


def test_room_for_rows_that_never_came_holds_nothing(monkeypatch):
    """Pickle writes all of the memory of a tensor. What the allocator gives holds what others left."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kw: empty(*shape, **kw).fill_(777))
    own = collector()
    for p in (PROMPT, PROMPT + 1):
        own.add([Record(0, np.asarray([p], dtype=np.int32), torch.ones(2, 1))])
    home = torch.full((2, 50), 777.0)  # room for all of a range, as large captures have, of which two ran
    home[:, :2] = 1
    own.add([Record(1, np.arange(PROMPT, PROMPT + 2, dtype=np.int32), home[:, :2], alone=True)])
    result = own.finish([7] * 3, aborted=False)
    for found in result.observed.values():
        assert found.values.tolist() == [[1, 1], [1, 1]]
        assert 777 not in torch.tensor([], dtype=torch.float32).set_(found.values.untyped_storage())


def test_room_may_be_of_no_size():
    assert rows_module._zeros((2, 0, 3), torch.bfloat16).shape == (2, 0, 3)


@pytest.mark.parametrize(
    "act",
    [
        lambda own, at: own.add([Record(5, at, torch.ones(2, 1))]),
        lambda own, at: own.add([Record(0, at, torch.ones(2, 1)), Record(0, at + 1, torch.ones(2, 1, 8))]),
    ],
)
def test_rows_that_do_not_fit_are_an_error_of_their_request(act):
    """Late ones of another request that had the same id, if ids are not randomised."""
    own = collector()
    own.guard(act, own, np.asarray([PROMPT], dtype=np.int32))
    result = own.finish([7, 7], aborted=False)
    assert "failed in the front end" in result.errors["p/o1"]


def test_blocks_that_do_not_fit_are_an_error_of_their_request():
    blocks, own = Blocks(), collector()
    at = np.asarray([PROMPT], dtype=np.int32)
    for values in (torch.ones(1, 2), torch.ones(1, 3)):
        (block,) = blocks.add([Chunk((("0", 0),), at, values)])
        block.closed = True
        own.guard(own.join, block, 0)
    result = own.finish([7, 7], aborted=False)
    assert "failed in the front end" in result.errors["p/o0"]


def test_rows_of_the_prompt_take_their_place_before_the_end():
    wanted = np.asarray([PROMPT], dtype=np.int32)
    own = collector(fixed=(wanted, wanted))
    own.add([Record(0, wanted, torch.full((2, 1), 5.0)), Record(1, wanted + 1, torch.ones(2, 1))])
    own.lay_out()
    first = own.result
    own.lay_out()
    assert own.result is first is not None
    assert own.observed["p/o0"].values.tolist() == [[5], [5]]
    assert [*own.rows] == [1]  # not what was asked for
    own.add([Record(1, wanted, torch.full((2, 1), 6.0))])
    own.lay_out()
    result = own.finish([7, 7], aborted=False)
    assert not result.errors
    assert result.observed["o0"].positions == result.observed["o1"].positions == [PROMPT]
    assert [result.observed[f"o{i}"].values.tolist() for i in range(2)] == [[[5], [5]], [[6], [6]]]


def test_rows_of_the_prompt_that_do_not_fit_are_an_error_at_the_end():
    wanted = np.asarray([PROMPT], dtype=np.int32)
    own = collector(fixed=(wanted, None))
    own.add([Record(0, wanted, torch.ones(2, 1))])
    own.rows[0]._parts = [None]
    own.lay_out()
    assert "failed in the front end" in own.finish([7, 7], aborted=False).errors["p/o0"]


@pytest.mark.parametrize("aborted", [False, True])
def test_rows_that_never_came_are_told(aborted):
    result = collector().finish([7, 7], aborted=aborted)
    assert set(result.errors) == {"p/o0", "p/o1"}
    assert ("aborted" in result.errors["p/o0"]) == aborted


def test_no_rows_are_wanted():
    """A prompt whose first token was its last: nothing was generated that was fed again."""
    result = collector().finish([7], aborted=False)
    assert not result.errors
    assert tuple(result.observed["o0"].values.shape) == (2, 0)
    result.observed["o0"].values.resize_(2, 3)
    assert tuple(collector().finish([7], aborted=False).observed["o0"].values.shape) == (2, 0)
