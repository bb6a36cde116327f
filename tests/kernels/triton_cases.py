"""The Triton kernels against their plain-torch definitions: on a GPU, or in Triton's interpreter.

Not collected by name: ``test_triton.py`` runs this file with the interpreter switched on, the GPU
suite runs it on the device.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.test_edit import PLACE, ROWS, Bench, as_reference, condition, entry, watch
from vllm_hook.ops import edit as op
from vllm_hook.ops import reference, triton_attention, triton_site
from vllm_hook.ops.attention import PagedKeys
from vllm_hook.ops.reference import AttentionRule
from vllm_hook.ops.triton_attention import Query, paged_attention, row_table
from vllm_hook.ops.triton_send import send
from vllm_hook.ops.triton_site import launch_site
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.transfer import Transfer
from worlds import on_cpu, play

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class DeviceBench(Bench):
    """The same site on the device, run by the Triton launch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.state = op.EditState(*[t.to(DEVICE) for t in self.state.tensors()])
        self.area = StepArea(AreaSize({PLACE: ROWS}, frozenset([PLACE]), 64, 16), DEVICE)

    def run(self, h, residual, addend=None):
        from vllm_hook.runtime.plan import StepPlan

        taps = None
        if self.taken is not None:
            taps = StepPlan((np.asarray(self.taken, dtype=np.int32),), {PLACE: 0}, ())
        self.area.load(taps, self.plan())
        fired = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        header, step = self.area.headers[PLACE], self.area.step
        latched = bool(self.area.live.item() > 1)
        launch_site(h, residual, addend, fired, header, step, self.buf, self.state, latched)
        return int(fired)


def both(h, residual):
    return h.to(DEVICE), None if residual is None else residual.to(DEVICE)


def any_chain(r):
    chain = []
    for _ in range(r.randint(1, 3)):
        if r.random() < 0.3:
            chain.append(entry(4, 5, kind=op.ROTATE, a=0.6, b=0.8, keep=r.randint(0, 1)))
        else:
            numbers = {"a": r.uniform(-2, 2), "b": r.uniform(-1, 1), "c": r.uniform(-1, 1)}
            act, keep, theta = r.choice(["identity", "relu", "jump"]), r.randint(0, 1), r.uniform(0, 2)
            chain.append(entry(r.randrange(4), r.randrange(4), act=act, keep=keep, theta=theta, **numbers))
    return chain


def short_chain(r):
    """What the kernel has a path of its own for: adds, clamps and affine edits, at most two."""
    chain = []
    for _ in range(r.randint(1, 2)):
        u = r.randrange(4)
        b = r.choice([0.0, -1.0, r.uniform(-1, 1)])
        chain.append(entry(u, r.choice([u, r.randrange(4)]), a=r.uniform(-2, 2), b=b, c=r.uniform(-1, 1)))
    return chain


@pytest.mark.parametrize("guess", [True, False], ids=["rows are guessed", "rows are looked up"])
@pytest.mark.parametrize("make", [any_chain, short_chain])
@pytest.mark.parametrize("seed", range(12))
def test_random_chains_equal_the_definition(seed, make, guess, monkeypatch):
    monkeypatch.setattr(triton_site, "EARLY_LAUNCH_ROWS", ROWS if guess else 0)
    r = random.Random(seed)
    torch.manual_seed(seed)
    width = r.choice([16, 24, 40])
    s = DeviceBench(width)
    q, _ = torch.linalg.qr(torch.randn(width, 2))
    s.bank[4], s.bank[5] = q[:, 0].to(DEVICE), q[:, 1].to(DEVICE)
    for _ in range(r.randint(1, 4)):
        s.chains.append(make(r))
    s.rows = [(row, r.randrange(len(s.chains))) for row in r.sample(range(ROWS), r.randint(1, ROWS))]
    s.taken = r.sample(range(ROWS), r.randint(1, ROWS))
    s.buf = torch.full((ROWS, width), 7.25, device=DEVICE)
    h, residual = both(torch.randn(ROWS, width), torch.randn(ROWS, width))
    addend = torch.randn(ROWS, width).to(DEVICE) if seed % 2 else None
    rest = residual if addend is None else residual + addend
    before, stream = h.clone(), (h + rest).cpu()
    assert s.run(h, residual, addend) == 1
    touched = dict(s.rows)
    bank = s.state.bank.cpu()
    for row in range(ROWS):
        if row not in touched:
            assert torch.equal(h[row], before[row])
            continue
        chain = [as_reference(s, *e) for e in s.chains[touched[row]]]
        chain = [type(e)(**{**vars(e), "u": e.u.cpu(), "v": e.v.cpu()}) for e in chain]
        torch.testing.assert_close((h + rest)[row].cpu(), reference.edit(stream[row], chain), **CLOSE)
    assert bank.shape == (6, width)
    assert torch.equal(s.buf[: len(s.taken)], (h + rest)[s.taken])
    assert bool((s.buf[len(s.taken) :] == 7.25).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identity_keeps_every_bit(dtype):
    s = DeviceBench()
    s.chains = [[entry(0, 0, a=0.0)], [entry(0, 1, a=3.0, gate=(op.LATCHED, 1))], [entry(0, 1, a=3.0, row=2)]]
    s.rows = [(1, 0), (2, 1), (3, 2)]
    h, residual = both(torch.randn(ROWS, 16).to(dtype), torch.randn(ROWS, 16).to(dtype))
    h[1] = -0.0
    before = h.clone()
    s.run(h, residual)
    assert torch.equal(h, before)
    assert bool(torch.signbit(h[1]).all())
    s.state.flags[1] = 1.0
    s.state.row_flags[2, 3] = 1.0
    s.run(h, residual)
    assert (h != before).any(-1).nonzero().flatten().tolist() == [2, 3]


def test_heads_in_a_strided_view():
    s = DeviceBench(4)
    s.chains, s.rows = [[entry(0, 0, a=1.0, head=2), entry(1, 2, a=0.5, b=0.3, head=0)]], [(5, 0)]
    whole = torch.randn(ROWS, 40, device=DEVICE)
    before, h = whole.clone(), whole[:, 8:24]
    s.run(h, None)
    want = before.clone()
    want[5, 16:20] += s.bank[0]
    want[5, 8:12] += (0.5 + 0.3 * (before[5, 8:12] @ s.bank[1])) * s.bank[2]
    torch.testing.assert_close(whole, want, **CLOSE)


@pytest.mark.parametrize(
    "chain",
    [
        [entry(0, 0, a=1.1, b=-1.0)],
        [entry(0, 0, a=1.1, b=-1.0, act="relu")],
        [entry(0, 1, a=1.0), entry(2, 2, a=0.3, b=-1.0, head=1)],
        [entry(2, 2, a=0.3, b=-1.0, head=2), entry(0, 1, a=1.0)],
        [entry(2, 2, a=0.3, b=0.5, head=2), entry(0, 0, a=0.3, b=-1.0), entry(1, 1, a=0.3, b=-1.0, keep=1)],
    ],
    ids=["clamp", "relu", "add, clamp", "clamp there, add", "clamp there, clamp, clamp"],
)
def test_what_is_infinite_in_one_head_stays_there(chain):
    s = DeviceBench(4)
    s.chains, s.rows = [chain], [(3, 0)]
    h = torch.randn(ROWS, 12)
    h[3, 9] = torch.inf
    cpu = Bench(4)
    cpu.chains, cpu.rows = s.chains, s.rows
    want, got = h.clone(), h.clone().to(DEVICE)
    cpu.run(want, None)
    s.run(got, None)
    assert bool(want[3, :8].isfinite().all())
    torch.testing.assert_close(got.cpu()[:, :8], want[:, :8], **CLOSE)
    assert not bool(got[3, 8:].isfinite().all())


def test_a_tap_keeps_the_sign_of_zero():
    s = DeviceBench()
    s.taken, s.buf = [2], torch.full((ROWS, 16), 7.0, device=DEVICE)
    s.run(torch.full((ROWS, 16), -0.0, device=DEVICE), None)
    assert bool(torch.signbit(s.buf[0]).all())


@pytest.mark.parametrize("kind", [op.LINEAR, op.COSINE, op.NORM])
@pytest.mark.parametrize("above", [0, 1])
def test_conditions_equal_the_cpu_path(kind, above):
    h, residual = torch.randn(ROWS, 16), torch.randn(ROWS, 16)
    results = []
    for make in (Bench, DeviceBench):
        s = make()
        value = (h + residual).norm(dim=-1) if kind == op.NORM else (h + residual) @ s.bank[0].cpu()
        bound = float(value[:6].median()) + 0.01 if kind != op.COSINE else 0.05  # no near ties
        for i, over in enumerate((op.ANY, op.ALL, op.MEAN)):
            condition(s, i, kind=kind, over=over, above=above, flag=i, c=0.1, bound=bound, rows=6.0)
        condition(s, 3, kind=kind, above=above, flag=2, bound=bound, per_row=1)
        s.state.flags[1] = 1.0
        s.chains = [[entry(0, 1, a=9.0, gate=(op.BY_ROW, 2)), entry(2, 2, a=3.0, gate=(op.LATCHED, 2))]]
        s.rows = [(row, 0) for row in range(4, ROWS)]
        own_h, own_residual = (h.clone(), residual.clone()) if make is Bench else both(h.clone(), residual)
        for chunk in (range(3), range(3, 6)):
            watch(s, [(row, i) for i in range(3) for row in chunk] + [(row, 3) for row in range(ROWS)])
            s.run(own_h, own_residual)
        results.append([t.cpu() for t in (own_h, s.state.flags, s.state.acc, s.state.row_flags)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "cap": AttentionRule(0.3, soft_cap=2.0),
    "sinks": AttentionRule(0.3, sinks=torch.randn(8)),
    "alibi": AttentionRule(0.3, alibi=torch.rand(8)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mass", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_definition(rule, mass, layout, dtype, monkeypatch):
    """Heads of four layers: two alike, one with another rule, one at an odd address."""
    torch.manual_seed(1)
    page, kv_heads, heads, width = 4, 2, 8, 24
    lengths = [150, 3]
    tables = torch.tensor([[*range(39, 1, -1)], [0, 1] + [0] * 36], dtype=torch.int32, device=DEVICE)
    shape = (40, page, kv_heads, 2 * width) if layout == "NHD" else (40, kv_heads, page, 2 * width)
    queries = [
        Query(0, np.asarray([20, 147, 149]), 0, [[(0, 4), (10, 130)], [(149, 150)], [(148, 200)]]),
        Query(3, np.asarray([1, 2]), 1, [[(0, 2)]]),
    ]
    chosen = [[(5, 1), (0, 0)], [(7, 2), (2, 5)], [(3, 3)], [(6, 4)]]  # (head, place), layer by layer
    layers = []
    for i, own in enumerate(chosen):
        cache = torch.randn(40 * page * kv_heads * 2 * width + 1, device=DEVICE).to(dtype)
        cache = cache[int(i == 3) :][: 40 * page * kv_heads * 2 * width].view(shape)
        logical = cache.transpose(1, 2) if layout == "NHD" else cache
        there = on_device(RULES[rule] if i != 2 else AttentionRule(0.3, window=7))
        q = torch.randn(5, heads, width, device=DEVICE).to(dtype)
        layers.append((q, own, PagedKeys(logical, tables, heads // kv_heads, there)))
    table = row_table(queries, 6, mass, DEVICE)
    out = torch.zeros(sum(a * b * c for a, b, c in table.shapes), device=DEVICE)
    for space in (1 << 20, 4 * 150 * 3, 1 << 20):  # tables of the last call are those of the first
        monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", space)
        out.zero_()
        paged_attention(layers, table, mass, out)
    at = 0
    for query, shape, keys in zip(queries, table.shapes, lengths, strict=True):
        mine = out[at : at + shape[0] * shape[1] * shape[2]].view(shape)
        at += mine.numel()
        for q, own, paged in layers:
            k, _ = paged.gather(query.batch_index, keys)
            rows = q[query.first : query.first + len(query.positions)]
            positions = torch.as_tensor(query.positions, device=DEVICE)
            heads_there = torch.tensor([head for head, _ in own], device=DEVICE)
            want = probs = reference.attention(rows, k, positions, heads_there, paged.rule)
            if mass:
                want = torch.stack(
                    [sum(probs[:, :, a:b].sum(-1) for a, b in span) for span in query.spans], dim=-1
                )
            places = [place for _, place in own]
            torch.testing.assert_close(mine[places], want[:, :, : shape[2]], rtol=2e-4, atol=2e-5)


def test_logits_of_many_layers_keep_to_the_workspace():
    layers = [(None, [(0, 0)] * n, None) for n in (2, 2, 1, 5, 1, 1)]
    runs = triton_attention._runs(layers, 4)
    assert [[len(own) for _, own, _ in run] for run in runs] == [[2, 2], [1], [5], [1, 1]]


def on_device(rule):
    sinks, alibi = (None if x is None else x.to(DEVICE) for x in (rule.sinks, rule.alibi))
    return AttentionRule(rule.scale, rule.window, rule.soft_cap, sinks, alibi)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width"), [(4, 20), (37, 1100)])
@pytest.mark.parametrize("kind", [None, "norm", "projection", "cosine", "probe", "probe of standard scores"])
def test_rows_sent_to_the_host_equal_the_definition(kind, n, width, dtype):
    """Rows of every other layer, in memory that the device reaches; nothing beside them is written, and it
    makes no difference to a row's number which are sent with it."""
    torch.manual_seed(1)
    stack = (2 * torch.randn(6, n + 5, width) + 1).to(dtype)
    vector, mean, scale = torch.randn(width), torch.randn(width), torch.rand(width) + 0.5
    bias = torch.tensor([0.3])
    stack[2, 1] = 0
    tensors = {"unit": vector / vector.norm()}
    if kind and kind.startswith("probe"):
        tensors = {"weight": vector, "bias": bias}
    if kind == "probe of standard scores":
        tensors |= {"mean": mean, "scale": scale}
    rows = stack[:5:2, :n]
    want = {
        None: lambda: rows.transpose(0, 1).float(),
        "norm": lambda: rows.float().norm(dim=-1),
        "projection": lambda: reference.projection(rows, vector),
        "cosine": lambda: reference.cosine(rows, vector),
    }.get(kind, lambda: reference.probe(rows, vector, bias, tensors.get("mean"), tensors.get("scale")))()
    on_device = {name: t.to(DEVICE) for name, t in tensors.items()}

    def sent(rows, size, out_dtype):
        out = torch.full((size + 3,), -7.0, dtype=out_dtype, pin_memory=DEVICE.type == "cuda")
        send(rows, out, kind and kind.split()[0], on_device)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert (out[-3:] == -7).all()
        return out[:-3]

    for out_dtype in {torch.float32, dtype} if kind is None else {torch.float32}:
        got = sent(stack.to(DEVICE)[:5:2, :n], want.numel(), out_dtype).view(want.shape)
        torch.testing.assert_close(got.float(), want, **({"rtol": 0, "atol": 0} if kind is None else CLOSE))
        if kind is not None:
            alone = sent(stack.to(DEVICE)[:5:2, n - 1 : n], 3, out_dtype)
            assert torch.equal(alone, got[:, -1])


class Sends(Transfer):
    """Few rows go through the kernel, here in the interpreter."""

    times = 0

    def sends_few(self, kind, size):
        return self._has_room(kind, size)

    def send_few(self, *args):
        self.times += 1
        return super().send_few(*args)


def by_kernel(part, h, residual, state, latched):
    launch_site(h, residual, None, part.fired, part.site, part.step, part.buf, state, latched)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="worlds live on the CPU")
@pytest.mark.parametrize("seed", range(8))
def test_random_worlds_equal_the_cpu_path(seed):
    """Requests, chains, gates, filters, chunks, shuffled and padded batches: hidden states and rows taken."""
    transfers = [None, Sends(DEVICE)]
    for (_, h_cpu, rows_cpu), (_, h_kernel, rows_kernel) in play(seed, [on_cpu, by_kernel], 5, transfers):
        for place in h_cpu:
            torch.testing.assert_close(h_kernel[place], h_cpu[place], rtol=1e-3, atol=1e-3)
        assert rows_cpu.keys() == rows_kernel.keys()
        for req_id, records in rows_cpu.items():
            for mine, theirs in zip(records, rows_kernel[req_id], strict=True):
                assert mine.positions.tolist() == theirs.positions.tolist()
                torch.testing.assert_close(theirs.values, mine.values, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="worlds live on the CPU")
def test_worlds_send_few_rows():
    """The comparison above is one with the kernel."""
    sends = Sends(DEVICE)
    for seed in range(4):
        play(seed, [by_kernel], transfers=[sends])
    assert sends.times > 4
    assert len(sends._places) == len(sends._free) == 1  # one a step, and what is read is lent again
