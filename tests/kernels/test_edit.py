"""The edit op against the plain-torch definition: chains, heads, gates, conditions, untouched rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook.ops import edit as op
from vllm_hook.ops import library, reference
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.edit_plan import EditPlan
from vllm_hook.runtime.plan import StepPlan

ROWS, WIDTH, SLOTS = 12, 16, 6
PLACE = ("resid_post", 0)
ACTS = {"identity": op.IDENTITY, "relu": op.RELU, "jump": op.JUMP_RELU}


class Bench:
    """One site with its tables, built as the runtime builds them."""

    def __init__(self, width: int = WIDTH) -> None:
        g = torch.Generator().manual_seed(0)
        self.state = op.EditState(
            flags=torch.zeros(8),
            acc=torch.zeros(8),
            row_flags=torch.zeros(4, ROWS),
            bank=torch.randn(SLOTS, width, generator=g),
        )
        self.area = StepArea(AreaSize({PLACE: ROWS}, frozenset([PLACE]), 64, 16), torch.device("cpu"))
        self.chains: list[list[tuple[list[int], list[float]]]] = []
        self.rows: list[tuple[int, int]] = []
        self.conditions: list[tuple[list[int], list[float]]] = []
        self.watched: list[tuple[int, int]] = []
        self.taken: list[int] | None = None
        self.buf: torch.Tensor | None = None

    @property
    def bank(self) -> torch.Tensor:
        return self.state.bank

    def plan(self) -> EditPlan:
        def table(pairs: list[tuple[int, int]]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
            rows, which = np.asarray(pairs, dtype=np.int32).reshape(-1, 2).T
            return ((rows, which),) if pairs else ()

        entries = [e for chain in self.chains for e in chain]
        return EditPlan(
            tables=table(self.rows),
            table_of={PLACE: 0} if self.rows else {},
            chain_start=np.cumsum([0, *map(len, self.chains)]).astype(np.int32),
            entry_int=np.asarray([i for i, _ in entries], dtype=np.int32).reshape(-1, 9),
            entry_float=np.asarray([f for _, f in entries], dtype=np.float32).reshape(-1, 4),
            cond_tables=table(self.watched),
            cond_table_of={PLACE: 0} if self.watched else {},
            cond_int=np.asarray([i for i, _ in self.conditions], dtype=np.int32).reshape(-1, 6),
            cond_float=np.asarray([f for _, f in self.conditions], dtype=np.float32).reshape(-1, 3),
            token_rows=(),
            row_flags=(),
            attends={},
        )

    def run(self, h: torch.Tensor, residual: torch.Tensor | None, addend: torch.Tensor | None = None) -> int:
        taps = None
        if self.taken is not None:
            taps = StepPlan((np.asarray(self.taken, dtype=np.int32),), {PLACE: 0}, ())
        self.area.load(taps, self.plan())
        fired = torch.zeros(1, dtype=torch.int32)
        header = self.area.headers[PLACE]
        library.edit(
            h, residual, addend, fired, self.area.live, header, self.area.step, self.buf, self.state.tensors()
        )
        return int(fired)


def entry(u: int, v: int, *, kind=op.RANK_ONE, act="identity", keep=0, head=0, gate=(0, -1), row=-1, **f):
    floats = [f.get("a", 0.0), f.get("b", 0.0), f.get("c", 0.0), f.get("theta", 0.0)]
    return [kind, u, v, ACTS[act], keep, head, *gate, row], floats


def put(s: Bench, chains: list[list[tuple[list[int], list[float]]]], rows: list[tuple[int, int]]) -> None:
    s.chains, s.rows = chains, rows


def run(h: torch.Tensor, residual: torch.Tensor | None, s: Bench) -> int:
    return s.run(h, residual)


def as_reference(s: Bench, ints: list[int], floats: list[float]) -> reference.EditEntry:
    act = {v: k for k, v in ACTS.items()}[ints[op.ACT]]
    return reference.EditEntry(
        u=s.bank[ints[op.U]],
        v=s.bank[ints[op.V]],
        a=floats[0],
        b=floats[1],
        c=floats[2],
        theta=floats[3],
        act=act,
        rotate=ints[op.KIND] == op.ROTATE,
        keep_norm=bool(ints[op.KEEP_NORM]),
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_random_chains_equal_the_definition(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    s = Bench()
    q, _ = torch.linalg.qr(torch.randn(WIDTH, 2))
    s.bank[4], s.bank[5] = q[:, 0], q[:, 1]
    chains = []
    for _ in range(r.randint(1, 4)):
        chain = []
        for _ in range(r.randint(1, 3)):
            if r.random() < 0.25:
                chain.append(entry(4, 5, kind=op.ROTATE, a=0.6, b=0.8, keep=r.randint(0, 1)))
            else:
                chain.append(
                    entry(
                        r.randrange(4),
                        r.randrange(4),
                        act=r.choice(list(ACTS)),
                        keep=r.randint(0, 1),
                        a=r.uniform(-2, 2),
                        b=r.uniform(-1, 1),
                        c=r.uniform(-1, 1),
                        theta=r.uniform(0, 2),
                    )
                )
        chains.append(chain)
    rows = [(row, r.randrange(len(chains))) for row in r.sample(range(ROWS), r.randint(1, ROWS))]
    put(s, chains, rows)
    h, residual = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    before, stream = h.clone(), h + residual
    assert run(h, residual, s) == 1
    touched = dict(rows)
    for row in range(ROWS):
        if row not in touched:
            assert torch.equal(h[row], before[row])
            continue
        want = reference.edit(stream[row], [as_reference(s, *e) for e in chains[touched[row]]])
        torch.testing.assert_close(h[row] + residual[row], want, rtol=1e-4, atol=1e-4)


def test_clamp_sets_the_projection_of_the_whole_stream_not_of_one_half() -> None:
    s = Bench()
    s.bank[0] = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
    put(s, [[entry(0, 0, a=2.5, b=-1.0)]], [(3, 0)])
    h, residual = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    run(h, residual, s)
    assert float((h[3] + residual[3]) @ s.bank[0]) == pytest.approx(2.5, abs=1e-5)


def test_heads_are_changed_alone_also_in_a_strided_view() -> None:
    s = Bench(width=4)
    put(s, [[entry(0, 0, a=1.0, head=2)]], [(5, 0)])
    whole = torch.randn(ROWS, 40)
    h = whole[:, 8:24]  # 4 heads of 4, as q within qkv
    before = whole.clone()
    run(h, None, s)
    want = before.clone()
    want[5, 16:20] += s.bank[0]
    torch.testing.assert_close(whole, want)
    assert torch.equal(whole[:5], before[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_strength_and_a_shut_gate_leave_every_bit(dtype: torch.dtype) -> None:
    s = Bench()
    put(
        s,
        [[entry(0, 0, a=0.0)], [entry(0, 1, a=3.0, gate=(op.LATCHED, 1))], [entry(0, 1, a=3.0, row=2)]],
        [(1, 0), (2, 1), (3, 2)],
    )
    h, residual = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    before = h.clone()
    assert run(h, residual, s) == 1
    assert torch.equal(h, before)
    s.state.flags[1] = 1.0
    s.state.row_flags[2, 3] = 1.0
    run(h, residual, s)
    changed = (h != before).any(-1).nonzero().flatten().tolist()
    assert changed == [2, 3]


def test_idle_does_nothing() -> None:
    s = Bench()
    h = torch.randn(ROWS, WIDTH)
    before = h.clone()
    assert run(h, None, s) == 0
    assert torch.equal(h, before)


def test_a_negative_zero_that_is_not_changed_stays_one() -> None:
    s = Bench()
    put(s, [[entry(0, 0, a=0.0)]], [(1, 0)])
    h = torch.full((ROWS, WIDTH), -0.0)
    run(h, None, s)
    assert bool(torch.signbit(h).all())


@pytest.mark.parametrize("split", [False, True], ids=["residual", "split residual"])
@pytest.mark.parametrize("taken", [[2, 5], [0, 1, 2], [11, 4, 2]], ids=str)
def test_taps_take_what_edits_left_and_rows_that_are_not_edited(taken: list[int], split: bool) -> None:
    s = Bench()
    put(s, [[entry(0, 1, a=1.0, b=0.5)]], [(2, 0), (4, 0)])
    s.taken, s.buf = taken, torch.full((8, WIDTH), 7.25)
    h, residual, addend = torch.randn(3, ROWS, WIDTH).unbind()
    before, rest = h.clone(), residual + addend if split else residual
    s.run(h, residual, addend if split else None)
    for row in (2, 4):
        want = reference.edit((before + rest)[row], [as_reference(s, *s.chains[0][0])])
        torch.testing.assert_close((h + rest)[row], want)
    assert torch.equal(s.buf[: len(taken)], (h + rest)[taken])
    assert bool((s.buf[len(taken) :] == 7.25).all())


def condition(s: Bench, i: int, *, kind=op.LINEAR, u=0, over=op.ANY, above=1, flag=0, per_row=0, **f):
    assert i == len(s.conditions)
    floats = [f.get("c", 0.0), f.get("bound", 0.0), f.get("rows", 1.0)]
    s.conditions.append(([kind, u, over, above, flag, per_row], floats))


def watch(s: Bench, rows: list[tuple[int, int]]) -> None:
    s.watched = rows


@pytest.mark.parametrize("kind", [op.LINEAR, op.COSINE, op.NORM])
@pytest.mark.parametrize("above", [0, 1])
def test_conditions_latch_any_all_and_mean_over_two_chunks(kind: int, above: int) -> None:
    s = Bench()
    s.bank[0] = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
    h, residual = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    x = h + residual
    value = {op.LINEAR: x @ s.bank[0] + 0.1, op.COSINE: x @ s.bank[0] / x.norm(dim=-1) + 0.1}.get(
        kind, x.norm(dim=-1) + 0.1
    )
    bound = float(value[:6].median())
    for i, over in enumerate((op.ANY, op.ALL, op.MEAN)):
        condition(s, i, kind=kind, over=over, above=above, flag=i, c=0.1, bound=bound, rows=6.0)
    s.state.flags[1] = 1.0  # `all` starts true
    for chunk in (range(3), range(3, 6)):
        watch(s, [(row, i) for i in range(3) for row in chunk])
        before = h.clone()
        run(h, residual, s)
        assert torch.equal(h, before)
    holds = (value[:6] > bound) if above else (value[:6] < bound)
    mean = value[:6].mean()
    assert s.state.flags[:3].tolist() == [
        float(holds.any()),
        float(holds.all()),
        float(mean > bound if above else mean < bound),
    ]


def test_a_condition_by_row_reads_before_the_edits_of_its_own_site() -> None:
    s = Bench()
    s.bank[0] = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
    h = torch.randn(ROWS, WIDTH)
    scores = h @ s.bank[0]
    condition(s, 0, per_row=1, flag=3)
    watch(s, [(row, 0) for row in range(ROWS)])
    put(s, [[entry(0, 0, a=-100.0, gate=(op.BY_ROW, 3))]], [(row, 0) for row in range(ROWS)])
    before = h.clone()
    run(h, None, s)
    assert ((h != before).any(-1) == (scores > 0)).all()
    assert (s.state.row_flags[3] > 0).tolist() == (scores > 0).tolist()


def test_bf16_rounds_once_a_row() -> None:
    s = Bench()
    put(s, [[entry(0, 1, a=0.3, b=0.5), entry(1, 2, a=-0.2, b=0.1)]], [(row, 0) for row in range(ROWS)])
    h = torch.randn(ROWS, WIDTH).bfloat16()
    chain = [as_reference(s, *e) for e in s.chains[0]]
    want = torch.stack([reference.edit(row.float(), chain) for row in h]).bfloat16()
    run(h, None, s)
    torch.testing.assert_close(h, want, rtol=8e-3, atol=1e-3)


def test_opcheck_idle() -> None:
    s = Bench()
    args = (
        torch.randn(ROWS, WIDTH),
        None,
        None,
        torch.zeros(1, dtype=torch.int32),
        s.area.live,
        s.area.headers[PLACE],
        s.area.step,
        None,
        s.state.tensors(),
    )
    torch.library.opcheck(library.edit.default, args, test_utils=("test_schema", "test_faketensor"))


def test_the_tables_say_what_a_chain_needs_of_the_kernel():
    plain, clamp = entry(0, 1, a=1.0), entry(1, 1, a=1.0, b=-1.0)
    chains = {
        op.SUMS_ONLY: [[plain], [plain, plain]],
        op.PRODUCTS: [[clamp], [plain, clamp], [clamp, plain]],
        op.GENERAL: [
            [plain, plain, plain],
            [entry(0, 1, a=1.0, act="relu")],
            [plain, entry(0, 1, a=1.0, keep=1)],
            [entry(0, 1, kind=op.ROTATE, a=1.0)],
            [entry(0, 1, a=1.0, gate=(op.LATCHED, 0))],
            [entry(0, 1, a=1.0, gate=(op.BY_ROW, 0)), plain],
            [entry(0, 1, a=1.0, row=2)],
        ],
    }
    s = Bench()
    s.chains = [chain for some in chains.values() for chain in some]
    s.rows = [(row, row) for row in range(len(s.chains))]
    s.run(torch.zeros(ROWS, WIDTH), None)
    at = int(s.area.headers[PLACE][op.RECORDS])
    records = s.area.step[at : at + op.RECORD_SIZE * ROWS].view(ROWS, op.RECORD_SIZE)
    assert records[:, op.PATH].tolist() == [path for path, some in chains.items() for _ in some]
    condition(s, 0, flag=2, bound=1.0, per_row=1)
    watch(s, [(0, 0)])
    s.run(torch.zeros(ROWS, WIDTH), None)
    at = int(s.area.headers[PLACE][op.RECORDS])
    assert int(s.area.step[at + op.PATH]) == op.GENERAL
