"""From batches to rows, with a fake engine: chunks, row moves, preemption, cache hits, shared sites.

The fake runs any schedule that an engine may run. A row's content names its request, position and
site, so whatever reaches the front end in the wrong place is seen.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook.engine.output import assemble
from vllm_hook.errors import CapacityError
from vllm_hook.ops.edit import HEADER_SIZE, RECORD_SIZE
from vllm_hook.program.resolve import ResolvedObservation, union
from vllm_hook.runtime import rows as rows_module
from vllm_hook.runtime.buffers import SiteBank, site_bytes, tap_sites
from vllm_hook.runtime.collect import Taken, collect, split
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.plan import BatchView, LanePlan, Piece, Planner, make_plan, positions_within
from vllm_hook.runtime.requests import (
    PAYLOAD_KEY,
    Lane,
    Tracker,
    Watch,
    packed,
    payload,
    read_payload,
    unpacked,
    worker_rows,
)
from vllm_hook.runtime.rows import BLOCK_STEPS, Blocks, Chunk, Record, Rows, in_line
from vllm_hook.sites import Armed, ModelFacts

FACTS = ModelFacts("fake", layers=3, heads=2, kv_heads=1, head_dim=2, hidden=4)
CAPACITY = 64
ARMED = (
    Armed.of("resid_post", range(3), "all")
    | Armed.of("resid_pre", range(3), "all")
    | Armed.of("z", [1], "all")
)
LANES = (
    Lane("resid_post", (0, 2)),
    Lane("resid_post", (2,)),  # meets the first at layer 2
    Lane("resid_post", (1, 2), dtype="float32"),
    Lane("resid_pre", (1,), reduce=("norm",)),
    Lane("z", (1,), heads=(1,)),
)


def content(site, layer, req, position):
    """A row of 4 numbers that nothing else has."""
    code = {"resid_post": 0.0, "resid_pre": 0.25, "z": 0.5}[site]
    return torch.tensor([req + 1.0, position, layer, code])


class FakeEngine:
    """Runs requests in any schedule through tracker, plan, bank and collect."""

    def __init__(self):
        self.bank = SiteBank(ARMED, FACTS, 8, CAPACITY, torch.float32, torch.device("cpu"))
        self.tracker = Tracker(None)
        self.plans = Planner()
        self.ids = []
        self.blocks = Blocks()
        self.joined = {}
        self.rows = {}
        self.moved = 0  # steps that were not planned anew

    def add(self, req, watches, prompt=4):
        observations = [
            ResolvedObservation(f"o{i}", rows, frozenset(), ()) for i, (_, rows) in enumerate(watches)
        ]
        sent = packed(payload(observations, [lane for lane, _ in watches], prompt))
        self.tracker.add(str(req), {PAYLOAD_KEY: sent}, 0)

    def resume(self, req, known):
        self.plans.sync(self.tracker.states)
        self.tracker.resume(str(req), known)

    def receive(self, records, chunks):
        """As the front end does."""
        for chunk in chunks:
            for req, record in () if chunk.small else chunk.records():
                self.flush(int(req))
                self.rows.setdefault(int(req), []).append(record)
        small = [chunk for chunk in chunks if chunk.small]
        for block in self.blocks.add(small) if small else ():
            for member, (req, _) in enumerate(block.members):
                self.joined.setdefault(int(req), []).append((block, member))
        for req, own in records.items():
            self.flush(int(req))
            self.rows.setdefault(int(req), []).extend(own)

    def flush(self, req):
        for block, member in self.joined.pop(req, []):
            self.rows.setdefault(req, []).append(block.record(member))

    def step(self, batch):
        """``batch``: (request, first position, number of rows)."""
        sizes = [n for _, _, n in batch]
        starts = [0, *np.cumsum(sizes).tolist()]
        self.ids[:] = [str(r) for r, _, _ in batch]  # one list for all steps, as an engine may have it
        view = BatchView(self.ids, starts, [a for _, a, _ in batch])
        plan = self.plans.plan(self.tracker.version, view, self.tracker.states)
        self.moved += self.plans._ran > 0
        if plan is None:
            return None
        self.bank.load(plan)
        at = [(r, a + i) for r, a, n in batch for i in range(n)]
        for (site, layer), tap in self.bank.sites.items():
            tap(torch.stack([content(site, layer, r, p) for r, p in at]))
        self.receive(*split(collect(plan, self.bank, FACTS, pages=None)))
        self.bank.clear()
        return plan


def expected(lane, req, positions):
    rows = torch.stack(
        [torch.stack([content(lane.site, layer, req, int(p)) for p in positions]) for layer in lane.layers]
    )
    if lane.reduce:
        return rows.norm(dim=-1)
    return rows.view(*rows.shape[:2], 2, 2)[:, :, list(lane.heads)] if lane.heads else rows


def gathered(records):
    if not records:
        return None
    rows = Rows(most=40)
    for r in records:
        rows.add(r)
    return rows.joined()


def check(engine, watches_of, lengths):
    """Every request has exactly its rows, each once, whatever the schedule was."""
    for req, watches in watches_of.items():
        engine.flush(req)
        for index, (lane, rows) in enumerate(watches):
            records = [r for r in engine.rows.get(req, []) if r.index == index]
            wanted = positions_within(rows, 0, lengths[req])
            seen = [int(p) for r in records for p in r.positions]
            assert len(seen) == len(set(seen)), "a row came twice"
            values, missing = assemble(gathered(records), wanted, lane)
            assert missing == []
            assert sorted(seen) == wanted.tolist()
            if wanted.size:
                assert torch.equal(values, expected(lane, req, wanted))


ranges = (
    st.one_of(
        st.lists(
            st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40))), min_size=1, max_size=3
        ),
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=2, max_size=6).map(
            lambda short: [(a, a + n) for a, n in short]
        ),
    )
    .map(union)
    .filter(bool)
)


@st.composite
def workloads(draw):
    watches_of = {
        r: draw(st.lists(st.tuples(st.sampled_from(LANES), ranges), min_size=0, max_size=4))
        for r in range(draw(st.integers(1, 5)))
    }
    return (
        watches_of,
        {r: draw(st.integers(1, 30)) for r in watches_of},
        draw(st.randoms(use_true_random=False)),
    )


@given(workloads(), st.sampled_from([0, 80, 512]))
@settings(max_examples=150, deadline=None)
def test_any_schedule_gives_exactly_the_rows(workload, small):
    """Random chunks, order of the batch, and preemption with resumption from a random cached prefix. Rows of
    all, some and no observations are too large to stay together."""
    watches_of, lengths, _ = workload
    with mock.patch.object(rows_module, "SMALL_ROW", small):
        engine = _run_any_schedule(*workload)
    check(engine, watches_of, lengths)
    wanted = [positions_within(rows, 0, lengths[r]) for r, own in watches_of.items() for _, rows in own]
    came = [record.positions for records in engine.rows.values() for record in records]
    assert sum(map(len, came)) == sum(map(len, wanted))


def _run_any_schedule(watches_of, lengths, random):
    engine = FakeEngine()
    done = dict.fromkeys(watches_of, 0)
    high = dict.fromkeys(watches_of, 0)
    for req, watches in watches_of.items():
        engine.add(req, watches)
    while any(done[r] < lengths[r] for r in done):
        running = [r for r in done if done[r] < lengths[r] and random.random() < 0.7]
        random.shuffle(running)
        batch = [(r, done[r], random.randint(1, min(lengths[r] - done[r], 12))) for r in running]
        for r, a, n in batch:
            done[r] = a + n
            high[r] = max(high[r], done[r])
        if batch:
            engine.step(batch)
        for _ in range(random.choice([0, 0, 3, 6])):  # steps that decode
            batch = [(r, done[r], 1) for r in running if done[r] < lengths[r]]
            for r, a, n in batch:
                done[r] = a + n
                high[r] = max(high[r], done[r])
            if batch:
                engine.step(batch)
        if random.random() < 0.2:
            victim = random.choice(list(done))
            if done[victim] < lengths[victim]:
                done[victim] = random.randint(0, high[victim])  # what the prefix cache still has
                engine.resume(victim, high[victim] + 1)  # and one sampled, not fed yet
    return engine


def decoding(requests, rows=((0, None),), lane=LANES[0]):
    """An engine in which requests with prompts of 3 tokens are about to decode."""
    engine = FakeEngine()
    for r in range(requests):
        engine.add(r, [(lane, rows)], prompt=3)
    engine.step([(r, 0, 3) for r in range(requests)])
    return engine, {r: [(lane, rows)] for r in range(requests)}


@pytest.mark.parametrize("lane", LANES[:4])
@pytest.mark.parametrize(("rows", "moved"), [(((0, None),), 5), (((0, 6),), 4), (((1, 5), (7, None)), 3)])
def test_decode_steps_are_not_planned_anew(lane, rows, moved):
    """Positions 3 to 8; a step is planned when what is watched begins or ends."""
    engine, watches = decoding(3, rows, lane)
    for at in range(3, 9):
        engine.step([(r, at, 1) for r in range(3)])
    assert engine.moved == moved
    check(engine, watches, dict.fromkeys(range(3), 9))


def test_rows_of_many_requests_travel_together():
    """A request that leaves closes the block; one whose rows come otherwise has them in order."""
    engine, watches = decoding(3, lane=Lane("resid_pre", (1,), reduce=("norm",)))
    blocks = set()
    for at in range(3, 6):
        engine.step([(r, at, 1) for r in range(3)])
        blocks |= {id(block) for joined in engine.joined.values() for block, _ in joined}
    assert len(blocks) == 1
    engine.step([(r, 6, 1) for r in (2, 0)])
    engine.flush(0)  # it ended
    engine.step([(r, 7, 1) for r in (2, 0)])
    engine.step([(2, 8, 1), (0, 8, 1), (1, 6, 1)])
    check(engine, watches, {0: 9, 1: 7, 2: 9})


def taken_of(values, shapes=(), lane=LANES[0], lent=False):
    """One row of each of two requests, as it came to the host."""
    watch = Watch(0, lane, ((0, None),))
    pieces = tuple(Piece(r, i, watch, i, i + 1) for i, r in enumerate("ab"))
    positions = np.asarray([4, 9], dtype=np.int32)
    plan = LanePlan(lane, pieces, {}, positions, members=(("a", 0), ("b", 0)))
    return Taken(plan, values, shapes, lent=lent)


@pytest.mark.parametrize("lent", [False, True])
def test_rows_of_many_requests_are_not_copied_unless_their_memory_is_used_again(lent):
    values = torch.arange(2.0 * 3 * 100)
    records, (chunk,) = split([taken_of(values, ((3, 1, 100),) * 2, lent=lent)])
    assert records == {}
    assert (chunk.values.data_ptr() == values.data_ptr()) != lent
    assert torch.equal(chunk.values, values.view(2, 3, 100))
    _, (chunk,) = split([taken_of(values[:6].view(3, 2))])
    assert chunk.values.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert chunk.values.untyped_storage().nbytes() == chunk.values.nbytes


def test_dense_attention_leaves_request_by_request():
    """It may have as many keys in two requests, but not in all of their steps."""
    lane = Lane("attention", (1,), ((1, 0),))
    records, chunks = split([taken_of(torch.arange(20.0), ((1, 1, 10),) * 2, lane)])
    assert chunks == []
    assert records["b"][0].values.tolist() == [[[*range(10, 20)]]]


def test_a_block_is_closed_when_it_is_full_or_its_members_change(monkeypatch):
    monkeypatch.setattr(rows_module, "BLOCK_STEPS", 4)
    engine, watches = decoding(3, lane=Lane("resid_pre", (1,), reduce=("norm",)))
    for at in range(3, 12):
        engine.step([(r, at, 1) for r in range(3)])
    blocks = [block for block, _ in engine.joined[0]]
    assert [len(block._values) for block in blocks] == [4, 4, 1]
    assert [block.closed for block in blocks] == [True, True, False]
    for at in range(12, 15):
        engine.step([(0, at, 1), (2, at, 1)])
    assert blocks[2].closed
    assert len(engine.joined[1]) == 3
    check(engine, watches, {0: 15, 1: 12, 2: 15})
    for records in engine.rows.values():
        for record in records[1:]:  # the first came in the prompt
            assert record.values.untyped_storage().nbytes() == record.values.numel() * 4


def test_what_was_run_in_moved_steps_is_known_after_a_preemption():
    engine, watches = decoding(2)
    for at in range(3, 8):
        engine.step([(r, at, 1) for r in range(2)])
    engine.resume(0, 9)
    engine.step([(0, 2, 6), (1, 8, 1)])
    assert engine.tracker.states["0"].skip_below == 8
    check(engine, watches, {0: 8, 1: 9})


def test_the_check_sees_a_row_in_the_wrong_place():
    engine = FakeEngine()
    watches = {0: [(LANES[0], ((0, None),))], 1: [(LANES[0], ((0, None),))]}
    for req in watches:
        engine.add(req, watches[req])
    engine.step([(0, 0, 3), (1, 0, 3)])
    check(engine, watches, {0: 3, 1: 3})
    engine.rows[0], engine.rows[1] = engine.rows[1], engine.rows[0]
    with pytest.raises(AssertionError):
        check(engine, watches, {0: 3, 1: 3})
    engine.rows[0] = engine.rows[0] * 2
    with pytest.raises(AssertionError, match="twice"):
        check(engine, watches, {0: 3, 1: 3})


def test_two_lanes_at_one_site_share_a_table_and_a_buffer():
    engine = FakeEngine()
    watches = {0: [(LANES[0], ((0, 4),)), (LANES[1], ((2, None),))], 1: [(LANES[1], ((1, 2),))]}
    for req in watches:
        engine.add(req, watches[req])
    plan = engine.step([(1, 0, 5), (0, 0, 6)])
    assert plan.tables[plan.table_of["resid_post", 2]].tolist() == [
        1,
        5,
        6,
        7,
        8,
        9,
        10,
    ]  # the union, no row twice
    assert plan.tables[plan.table_of["resid_post", 0]].tolist() == [5, 6, 7, 8]
    assert ("resid_post", 1) not in plan.table_of
    check(engine, watches, {0: 6, 1: 5})


def test_nothing_asked_for_is_no_plan():
    engine = FakeEngine()
    engine.add(0, [(LANES[0], ((50, 60),))])
    engine.add(1, [])
    assert "1" not in engine.tracker.states
    assert engine.step([(0, 0, 9), (1, 0, 4), (2, 0, 4)]) is None
    assert all(int(tap.fired) == 0 for tap in engine.bank.sites.values())


@pytest.mark.parametrize(("known", "again"), [(7, []), (6, [5]), (5, [4, 5])])
def test_a_token_sampled_anew_is_taken_anew(known, again):
    """After six rows and a preemption with ``known`` tokens: the row of the last of them was a draft that
    was rejected, and those beyond are unknown. They are run again and count."""
    engine = FakeEngine()
    engine.add(0, [(LANES[1], ((0, None),))])
    engine.step([(0, 0, 6)])
    engine.resume(0, known)
    engine.step([(0, 3, 5)])
    taken = [int(p) for r in engine.rows[0] for p in r.positions]
    assert taken == [0, 1, 2, 3, 4, 5, *again, 6, 7]


def test_more_rows_than_armed_is_a_capacity_error():
    bank = SiteBank(
        Armed.of("resid_post", [0], "last"), FACTS, 2, CAPACITY, torch.float32, torch.device("cpu")
    )
    tracker = Tracker(None)
    observation = ResolvedObservation("o", ((0, None),), frozenset(), ())
    tracker.add("0", {PAYLOAD_KEY: packed(payload([observation], [Lane("resid_post", (0,))], 5))}, 0)
    plan = make_plan(BatchView(["0"], [0, 3], [0]), tracker.states)
    with pytest.raises(CapacityError, match=r"3 rows at site resid_post of layer 0.*2 armed"):
        bank.load(plan)


@given(ranges, st.integers(0, 30), st.integers(0, 40))
def test_positions_within(rows, low, size):
    high = low + size
    want = [p for p in range(low, high) if any(a <= p and (b is None or p < b) for a, b in rows)]
    assert positions_within(rows, low, high).tolist() == want


@given(st.lists(ranges, min_size=1, max_size=3), st.integers(1, 40))
def test_floor_is_the_first_prompt_row(selected, prompt_len):
    observations = [ResolvedObservation(str(i), rows, frozenset(), ()) for i, rows in enumerate(selected)]
    floor = payload(observations, [LANES[0]] * len(selected), prompt_len)["floor"]
    wanted = [p for p in range(prompt_len) for rows in selected if positions_within(rows, p, p + 1).size]
    assert floor == (min(wanted) if wanted else None)


def test_payload_travels_as_bytes_and_reads_back():
    lanes = [
        Lane("attention_mass", (0, 1), ((0, 1), (1, 0))),
        Lane("z", (1,), (1,), ("norm",), "float32"),
        Lane("resid_post", (2,), None, ("probe", "d/p")),
    ]
    observations = [
        ResolvedObservation(
            "a", ((3, 4), (9, None)), frozenset(), (("s", ((0, 2), (5, 6))), ("t", ((1, 3),)))
        ),
        ResolvedObservation("b", ((0, 2),), frozenset(), ()),
        ResolvedObservation("c", ((0, None),), frozenset(), ()),
    ]
    probe = {"weight": torch.ones(4)}
    sent = packed(payload(observations, lanes, 8))
    assert [*map(type, sent.values())] == [bytes]
    assert unpacked({"other": 1}) is unpacked(None) is None
    data = unpacked({PAYLOAD_KEY: sent})
    assert (data["floor"], data["edit"], data["prompt"]) == (0, None, 8)
    watches = read_payload(data, {"d/p": probe})
    assert [w.lane for w in watches] == lanes
    assert [w.index for w in watches] == [0, 1, 2]
    assert watches[0].rows == ((3, 4), (9, None))
    assert watches[0].spans == (((0, 2), (5, 6)), ((1, 3),))
    assert watches[2].reducer is probe
    with pytest.raises(KeyError):
        read_payload(data, {})
    again = read_payload(unpacked({PAYLOAD_KEY: packed(payload(observations, lanes, 8))}), {"d/p": probe})
    assert [w.lane is v.lane for w, v in zip(watches, again, strict=True)] == [True] * 3
    assert watches[0] is not again[0]  # each request has watches of its own


def test_token_ids_take_all_generated_rows_on_the_device():
    observation = ResolvedObservation("o", ((1, 2), (3, 4)), frozenset({7}), ())
    assert worker_rows(observation, 5) == ((1, 2), (3, 4), (5, None))


def test_attention_needs_queries_and_memory_is_what_is_said():
    armed = Armed.of("attention", [0, 1], "last") | Armed.of("q", [1], "all") | Armed.of("k", [0], "last")
    assert tap_sites(armed) == {("q", 0): "last", ("q", 1): "all", ("k", 0): "last"}
    buffers = 256 + 2 * 64 * 4 + 256  # at multiples of 256 bytes
    tables = 4 * (3 * HEADER_SIZE + (8 + 64 + 8) * (RECORD_SIZE + 1))
    assert site_bytes(armed, FACTS, 8, 64, 4, 16, 2) == buffers + tables
    bank = SiteBank(armed, FACTS, 8, 64, torch.bfloat16, torch.device("cpu"))
    assert {key: tuple(t.shape) for key, t in bank.taken.items()} == {
        ("q", 0): (8, 4), ("q", 1): (64, 4), ("k", 0): (8, 2)
    }  # fmt: skip
    assert bank.bytes() == buffers + tables


def test_buffers_of_a_site_lie_in_one_piece_and_none_at_an_odd_address():
    armed = Armed.of("resid_post", [0, 1, 3, 5], "last") | Armed.of("resid_post", [4], "all")
    bank = SiteBank(armed, FACTS, 3, 64, torch.bfloat16, torch.device("cpu"))
    for i, (_, buf) in enumerate(sorted(bank.taken.items())):
        assert buf.is_contiguous()
        assert buf.data_ptr() % 16 == 0
        buf.copy_(torch.arange(buf.numel()).view_as(buf) + 100 * i)
    for layers, view in (([0, 1], True), ([1, 5], True), ([3], True), ([0, 1, 5], False), ([5, 1], False)):
        keys = Lane("resid_post", tuple(layers)).taps
        for index in (slice(0, 2), torch.tensor([2, 0])):
            for _ in range(2):  # the second time it is known where they lie
                rows, is_view = bank.rows_of(keys, [index])
                assert torch.equal(rows, torch.stack([bank.taken[key][index] for key in keys]))
                assert is_view == (view and isinstance(index, slice))
    two_pieces = Lane("resid_post", (3, 4)).taps
    for indices in ([slice(0, 2)], [slice(0, 2), slice(1, 3)]):
        rows, is_view = bank.rows_of(two_pieces, indices)
        assert not is_view
        assert torch.equal(rows[1], bank.taken["resid_post", 4][indices[-1]])


def test_steps_that_come_at_once_are_of_one_block():
    """Where a step had no output to travel with: no block is lost track of, so all are handed out."""
    blocks, members = Blocks(), (("a", 0), ("b", 0))

    def chunk(i):
        return Chunk(members, np.asarray([i, i], dtype=np.int32), torch.full((2, 1), float(i)))

    new = blocks.add([chunk(0), chunk(1)])
    for i in range(2, 3 * BLOCK_STEPS):
        new += blocks.add([chunk(i)])
    assert len(new) == 3
    assert all(block.closed for block in new)
    assert [x for block in new for x in block.record(1).positions.tolist()] == list(range(3 * BLOCK_STEPS))
    [taken] = blocks.add([chunk(500)])
    taken.record(0)  # a member left
    [other] = blocks.add([chunk(501)])
    assert other is not taken
    assert not other.closed
    blocks.add([Chunk(members[:1], np.asarray([502], dtype=np.int32), torch.zeros(1, 1))])
    assert other.closed  # nothing is added any more


def rows_of(chunks, most=6, alone=True):
    rows = Rows(most)
    for positions, values in chunks:
        rows.add(Record(0, positions, values, alone))
    return rows.joined()


def test_chunks_that_lie_behind_each_other_are_not_copied():
    whole = torch.arange(24.0).view(2, 6, 2)
    chunks = [(np.arange(a, b), whole[:, a:b]) for a, b in ((0, 1), (1, 4), (4, 6))]
    values, missing = assemble(rows_of(chunks), np.arange(6), Lane("resid_post", (0, 1)))
    assert not missing
    assert torch.equal(values, whole)
    assert values.data_ptr() == whole.data_ptr()
    apart = [(p, v.clone()) for p, v in chunks]
    values, _ = assemble(rows_of(apart), np.arange(6), Lane("resid_post", (0, 1)))
    assert torch.equal(values, whole)
    gap = [chunks[0], chunks[2]]
    values, missing = assemble(rows_of(gap), np.asarray([0, 4, 5]), Lane("resid_post", (0, 1)))
    assert torch.equal(values, whole[:, [0, 4, 5]])


def test_records_in_line_leave_as_one():
    whole = torch.arange(24.0).view(2, 6, 2)
    cut = [Record(0, np.arange(a, b), whole[:, a:b], True) for a, b in ((0, 1), (1, 4), (4, 6))]
    (one,) = in_line(cut)
    assert one.positions.tolist() == [*range(6)]
    assert torch.equal(one.values, whole)
    assert one.values.is_contiguous()
    other = Record(1, np.arange(2), whole[:, 4:6], True)
    mixed = in_line(["lost", cut[0], other, cut[1], cut[2], Record(0, np.arange(1), torch.zeros(2, 1, 2))])
    assert [r if isinstance(r, str) else (r.index, len(r.positions)) for r in mixed] == [
        "lost", (0, 1), (1, 2), (0, 5), (0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("most", [3, 300, 1000])
def test_rows_are_joined_as_they_come(most):
    """Steps of one row after a prompt; the tensor of a step holds those of other requests too."""
    whole = torch.randn(3, 300, 4)
    rows = Rows(most)
    rows.add(Record(0, np.arange(40), whole[:, :40]))
    for at in range(40, 300):
        step = torch.randn(7, 3, 1, 4)
        step[2, :, 0] = whole[:, at]
        rows.add(Record(0, np.asarray([at]), step[2]))
        step.zero_()  # that memory may be used again
    positions, values = rows.joined()
    assert positions.tolist() == [*range(300)]
    assert torch.equal(values, whole)
    assert values.is_contiguous() == (most == 300)


def test_dense_attention_grows_with_the_keys():
    rows = Rows(10, same_width=False)
    rows.add(Record(0, np.asarray([0, 1]), torch.ones(2, 2, 2), True))
    rows.add(Record(0, np.asarray([2]), torch.ones(2, 1, 3), True))
    _, values = rows.joined()
    assert values.shape == (2, 3, 3)
    assert values[0, :, 2].tolist() == [0, 0, 1]


def test_an_engine_with_nothing_armed_has_nothing_to_prove():
    bank = SiteBank(Armed(), FACTS, 8, 64, torch.float32, torch.device("cpu"))
    assert bank.prove(lambda: None) == []
    assert bank.bytes() == 0


def test_sites_that_never_fire_are_named():
    armed = Armed.of("resid_post", [0, 2], "last") | Armed.of_edits("k", [1])
    bank = SiteBank(
        armed,
        FACTS,
        8,
        64,
        torch.float32,
        torch.device("cpu"),
        EditBank(FACTS, 64, 4, 4, torch.device("cpu")),
    )

    def run():
        bank.sites["resid_post", 2](torch.zeros(3, 4))

    assert set(bank.prove(run)) == {("resid_post", 0), ("k", 1)}
    assert int(bank.area.live) == 0
