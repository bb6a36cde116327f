"""The site op on GPUs: edits and taps of all rows in one launch. Loops and tables: :mod:`.edit`.

One program a record, with the whole row in registers (up to 16,384 wide). In a captured graph the
number of programs is that of the padded batch; those beyond the records of the step write nothing
(with few rows each has read one by then). What most edits need, sums of at most two vectors, is a
short path of its own: the code of a kernel is cold again, too, when the next layer needs it.
Conditions by row are read by the program of their row; conditions that are decided once for a
request may stand in any number of rows, and edits of other rows at the same site may wait for them,
so they are a launch of their own (steps that have any run without CUDA graphs).
"""

# Kernels are no Python functions: their arguments have no types that a checker could know.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import UnsupportedError
from .edit import EditState

#: Widest row that the kernel holds.
WIDEST = 16_384
#: Up to this many rows a launch may start early: it saves half a microsecond a site at one row, and
#: costs as much at 128, where it takes room from the kernel that it waits for (measured on an H200).
#: Up to as many, rows are read before the tables say which they are.
EARLY_LAUNCH_ROWS = 16
#: Programs of the launch for latched conditions; each takes several if there are more.
_LATCHED_PROGRAMS = 64


@triton.jit
def _word(step, at):
    """Tables and vectors are to stay in the L2 cache while a layer's weights stream through it: a
    look-up costs a third of one in memory then, and look-ups that wait for each other are most of
    what a site takes."""
    return tl.load(step + at, eviction_policy="evict_last")


@triton.jit
def _float(step, at):
    return _word(step, at).to(tl.float32, bitcast=True)


@triton.jit
def _value(x, bank, step, cond, d, width):
    """What a condition compares with its bound: see run_conditions."""
    kind = _word(step, cond)
    u = tl.load(bank + _word(step, cond + 1).to(tl.int64) * width + d, mask=d < width, other=0.0)
    dot = tl.sum(x * u, 0)
    norm = tl.sqrt(tl.sum(x * x, 0))
    value = tl.where(kind == 2, norm, tl.where(kind == 1, dot / tl.maximum(norm, 1e-30), dot))
    return value + _float(step, cond + 8)


@triton.jit
def _entry(step, entry):
    """The fields of an entry but for its vectors."""
    return (
        _word(step, entry),  # kind
        _word(step, entry + 3),  # act
        _word(step, entry + 4),  # keep the norm
        _word(step, entry + 5),  # head
        _float(step, entry + 9),  # a
        _float(step, entry + 10),  # b
        _float(step, entry + 11),  # c
        _float(step, entry + 12),  # theta
        _word(step, entry + 6),  # gate kind
        _word(step, entry + 7),  # gate
        _word(step, entry + 8),  # row gate
    )


@triton.jit
def _short_entry(step, entry):
    """The fields of an entry that the short path needs."""
    return (
        _word(step, entry + 5),  # head
        _float(step, entry + 9),  # a
        _float(step, entry + 10),  # b
        _float(step, entry + 11),  # c
    )


@triton.jit
def _vectors(bank, step, entry, present, d, D: tl.constexpr, width: tl.constexpr):
    """u and v of an entry, spread over the row: zero outside its head. What is not needed (u of an entry
    that only adds) or is there already (u, where it is v) is not read: one row is the work of one
    multiprocessor, and 16 KB a vector are what it waits for."""
    at, inside = _within(_word(step, entry + 5), d, D, width)
    inside = inside & (d * 0 + present.to(tl.int32) > 0)
    read = (_word(step, entry) == 1) | (_float(step, entry + 10) != 0.0)
    u_slot, v_slot = _word(step, entry + 1).to(tl.int64), _word(step, entry + 2).to(tl.int64)
    v = tl.load(bank + v_slot * width + at, mask=inside, other=0.0, eviction_policy="evict_last")
    inside = inside & (d * 0 + (read & (u_slot != v_slot)).to(tl.int32) > 0)
    u = tl.load(bank + u_slot * width + at, mask=inside, other=0.0, eviction_policy="evict_last")
    return tl.where(u_slot == v_slot, v, u), v


@triton.jit
def _within(head, d, D: tl.constexpr, width: tl.constexpr):
    """Columns of a row counted from the start of a head, and which of them are the head's."""
    if width == D:
        at = d
        inside = d < D
    else:
        at = d - head * width
        inside = (d < D) & (at >= 0) & (at < width)
    return at, inside


@triton.jit
def _of_head(x, head, d, D: tl.constexpr, width: tl.constexpr):
    """Zero outside a head. The vectors are that already, but times an infinite value zero is not zero."""
    return x if width == D else tl.where(_within(head, d, D, width)[1], x, 0.0)


@triton.jit
def _change(row, u, v, fields, d, D: tl.constexpr, width: tl.constexpr):
    """What one entry adds to a row."""
    kind, act, keep, head, a, b, c, theta, _gate_kind, _gate, _row_gate = fields
    x = _of_head(row, head, d, D, width)
    change = a * v
    if (kind == 1) | (b != 0.0):
        score = tl.sum(x * u, 0) + c
        floor = tl.where(act == 2, theta, 0.0)
        score = tl.where((act == 0) | (score > floor), score, 0.0)
        if kind == 1:
            second = tl.sum(x * v, 0)
            length = tl.sqrt(score * score + second * second)
            change = (length * a - score) * u + (length * b - second) * v
        else:
            change = (a + b * score) * v
    if keep != 0:
        moved = x + change
        scale = tl.sqrt(tl.sum(x * x, 0)) / tl.maximum(tl.sqrt(tl.sum(moved * moved, 0)), 1e-30)
        change = tl.where(tl.max(tl.abs(change), 0) > 0, moved * scale - x, change)
    return _of_head(change, head, d, D, width)


@triton.jit
def _open(fields, row, flags, row_flags, flag_rows):
    _, _, _, _, _, _, _, _, kind, gate, row_gate = fields
    open = 1
    if kind == 1:
        open = (tl.load(flags + gate) > 0).to(tl.int32)
    if kind == 2:
        open = (tl.load(row_flags + gate.to(tl.int64) * flag_rows + row) > 0).to(tl.int32)
    if row_gate >= 0:
        chosen = tl.load(row_flags + row_gate.to(tl.int64) * flag_rows + row) > 0
        open = open * chosen.to(tl.int32)
    return open


@triton.jit
def _sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _up_to_two(
    x, u_0, v_0, u_1, v_1, first, second, n_entries, products, d, D: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """What at most two edits add to a row that are rank one, ungated, without activation and kept norm. The
    second works on what the first left, ``<x + s_0 v_0, u_1> = <x, u_1> + s_0 <v_0, u_1>``, so all sums are
    taken at once."""
    head_0, s_0, b_0, c_0 = first
    head_1, s_1, b_1, c_1 = second
    if products:
        along_0 = _of_head(x, head_0, d, D, width) * u_0
        along_1 = _of_head(x, head_1, d, D, width) * u_1
        dot_0, dot_1, cross = tl.reduce((along_0, along_1, v_0 * u_1), 0, _sums)
        s_0 += b_0 * (dot_0 + c_0)
        of_first = tl.where(cross == 0.0, 0.0, s_0 * cross)  # another head's, where that is infinite
        s_1 += b_1 * (dot_1 + of_first + c_1)
    # What stands in the place of an entry that is not there may be anything.
    delta = tl.where(n_entries > 0, _of_head(s_0 * v_0, head_0, d, D, width), 0.0)
    return delta + tl.where(n_entries > 1, _of_head(s_1 * v_1, head_1, d, D, width), 0.0)


@triton.jit
def _general(
    x, bank, step, record, n_entries, row, flags, row_flags, flag_rows, d,
    D: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The conditions by row, then what any chain of edits adds to a row."""
    conds, n_conds = _word(step, record + 4), _word(step, record + 5)
    if n_conds > 0:  # else the compiler works out before the loop what its rounds share
        for k in range(n_conds):
            cond = _word(step, conds + k)
            value = _value(x, bank, step, cond, d, width)
            bound = _float(step, cond + 9)
            holds = tl.where(_word(step, cond + 3) != 0, value > bound, value < bound)
            flag = _word(step, cond + 4).to(tl.int64)
            tl.store(row_flags + flag * flag_rows + row, holds.to(tl.float32))
        tl.debug_barrier()
    delta = tl.zeros([BLOCK], dtype=tl.float32)
    entries = _word(step, record + 2)
    for e in range(n_entries):
        entry = entries + e * 16
        fields = _entry(step, entry)
        u, v = _vectors(bank, step, entry, n_entries > e, d, D, width)
        change = _change(x + delta, u, v, fields, d, D, width)
        delta += tl.where(_open(fields, row, flags, row_flags, flag_rows) != 0, change, 0.0)
    return delta


@triton.jit
def _rest(
    residual, residual_row, addend, addend_row, row, d, mask, BLOCK: tl.constexpr, ADDENDS: tl.constexpr
):
    """What is to be added to a row of h: added up in the order of the compiled norm, so that a tap takes
    the bits that the norm computes."""
    rest = tl.zeros([BLOCK], dtype=tl.float32)
    if ADDENDS > 0:
        rest = tl.load(residual + row * residual_row + d, mask=mask, other=0.0).to(tl.float32)
    if ADDENDS > 1:
        rest += tl.load(addend + row * addend_row + d, mask=mask, other=0.0).to(tl.float32)
    return rest


@triton.jit
def _site_kernel(
    h,
    h_row,
    residual,
    residual_row,
    addend,
    addend_row,
    fired,
    site,
    step,
    buf,
    flags,
    row_flags,
    flag_rows,
    bank,
    D: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDENDS: tl.constexpr,
    HAS_BUF: tl.constexpr,
    HAS_STATE: tl.constexpr,
    GUESS: tl.constexpr,
    launch_pdl: tl.constexpr,
):
    j = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    mask = d < D
    # Tables, vectors and the counter do not depend on the kernel before this one: they are fetched
    # while it ends.
    n = _word(step, site + 1)
    times = _word(fired, 0)
    if j == 0:
        record = site + 4
        entries = site + 12
        n_entries = _word(step, record + 3)
    else:
        valid = (j < n).to(tl.int32)
        record = _word(step, site) + j * 8 * valid
        entries = _word(step, record + 2) * valid
        n_entries = _word(step, record + 3) * valid
    row = _word(step, record).to(tl.int64)
    dst = _word(step, record + 1).to(tl.int64)
    if HAS_STATE:
        path = _word(step, record + 6)
        first, second = _short_entry(step, entries), _short_entry(step, entries + 16)
        u_0, v_0 = _vectors(bank, step, entries, n_entries > 0, d, D, width)
    if launch_pdl:
        tl.extra.cuda.gdc_wait()
    own = tl.zeros([BLOCK], dtype=tl.float32)
    rest = tl.zeros([BLOCK], dtype=tl.float32)
    if GUESS:  # of few rows the j-th is most often that of record j: it need not wait for the tables
        own = tl.load(h + j * h_row + d, mask=mask, other=0.0).to(tl.float32)
        rest = _rest(residual, residual_row, addend, addend_row, j, d, mask, BLOCK, ADDENDS)
    if j < n:
        if (not GUESS) or (row != j):
            own = tl.load(h + row * h_row + d, mask=mask, other=0.0).to(tl.float32)
            rest = _rest(residual, residual_row, addend, addend_row, row, d, mask, BLOCK, ADDENDS)
        if HAS_STATE:
            x = own + rest
            u_1, v_1 = _vectors(bank, step, entries + 16, n_entries > 1, d, D, width)
            delta = tl.zeros([BLOCK], dtype=tl.float32)
            if path == 2:
                delta = _general(
                    x, bank, step, record, n_entries, row, flags, row_flags, flag_rows, d, D, width, BLOCK
                )
            else:
                delta = _up_to_two(x, u_0, v_0, u_1, v_1, first, second, n_entries, path == 1, d, D, width)
            if n_entries > 0:
                # A row that did not change keeps its bits, also the sign of a zero.
                new = tl.where(delta == 0.0, own, own + delta).to(h.dtype.element_ty)
                tl.store(h + row * h_row + d, new, mask=mask)
                own = new.to(tl.float32)
        if HAS_BUF:  # known when it is compiled  # noqa: SIM102
            if dst >= 0:
                if ADDENDS > 0:  # else a sum with nothing would take the sign of a zero
                    own += rest
                tl.store(buf + dst * D + d, own.to(buf.dtype.element_ty), mask=mask)
        if j == 0:
            tl.store(fired, times + 1)


@triton.jit
def _latched_kernel(
    h,
    h_row,
    residual,
    residual_row,
    addend,
    addend_row,
    site,
    step,
    flags,
    acc,
    bank,
    D,
    width,
    BLOCK: tl.constexpr,
    ADDENDS: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    mask = d < D
    for i in range(tl.program_id(0), tl.load(step + site + 3), tl.num_programs(0)):
        cond = tl.load(step + tl.load(step + site + 2) + i)
        over, above = tl.load(step + cond + 2), tl.load(step + cond + 3)
        flag = tl.load(step + cond + 4)
        rows, n_rows = tl.load(step + cond + 6), tl.load(step + cond + 7)
        bound = _float(step, cond + 9)
        total, latch = tl.load(acc + flag), tl.load(flags + flag)
        for k in range(n_rows):
            row = tl.load(step + rows + k).to(tl.int64)
            x = tl.load(h + row * h_row + d, mask=mask, other=0.0).to(tl.float32)
            x += _rest(residual, residual_row, addend, addend_row, row, d, mask, BLOCK, ADDENDS)
            value = _value(x, bank, step, cond, d, width)
            holds = tl.where(above != 0, value > bound, value < bound).to(tl.float32)
            latch = tl.where(over == 1, tl.minimum(latch, holds), tl.maximum(latch, holds))
            total += value
        mean = total / _float(step, cond + 10)
        of_mean = tl.where(above != 0, mean > bound, mean < bound).to(tl.float32)
        tl.store(acc + flag, tl.where(over == 2, total, tl.load(acc + flag)))
        tl.store(flags + flag, tl.where(over == 2, of_mean, latch))


def launch_site(
    h: Tensor,
    residual: Tensor | None,
    addend: Tensor | None,
    fired: Tensor,
    site: Tensor,
    step: Tensor,
    buf: Tensor | None,
    state: EditState | None,
    latched: bool = True,
) -> None:
    """Run one site on this step's rows. ``latched``: whether the step has conditions decided once.

    h, residual, addend: [T, D] with rows of any stride and neighbouring columns; else as in
    :mod:`.library`.
    """
    tokens, width = h.shape
    if width > WIDEST:
        raise UnsupportedError(f"rows of {width} values are wider than the {WIDEST} that a site can hold")
    addends = [x for x in (residual, addend) if x is not None]
    if any(x.stride(1) != 1 for x in (h, *addends)):
        raise UnsupportedError(
            "a site needs rows whose columns are neighbours; the compiler laid them out otherwise"
        )
    block = triton.next_power_of_2(width)
    warps = _warps(block, only_taps=state is None and tokens <= EARLY_LAUNCH_ROWS)
    first, second = (*addends, h, h)[:2]
    bank = fired if state is None else state.bank
    flags, row_flags = (fired, fired) if state is None else (state.flags, state.row_flags)
    inner = width if state is None else bank.shape[1]
    at = (site.data_ptr() - step.data_ptr()) // 4
    if not 0 <= at < step.numel():
        raise UnsupportedError("a site's header is not part of the step's tables: something copied it")
    if state is not None and latched:
        _latched_kernel[(_LATCHED_PROGRAMS,)](
            h, h.stride(0), first, first.stride(0), second, second.stride(0), at, step,
            flags, state.acc, bank, width, inner,
            BLOCK=block, ADDENDS=len(addends), num_warps=warps,
        )  # fmt: skip
    programs = tokens if state is not None or buf is None else min(tokens, buf.shape[0])
    _site_kernel[(programs,)](
        h, h.stride(0), first, first.stride(0), second, second.stride(0), fired, at, step,
        fired if buf is None else buf,
        flags, row_flags, row_flags.stride(0), bank, width, inner,
        BLOCK=block, ADDENDS=len(addends), HAS_BUF=buf is not None,
        HAS_STATE=state is not None, GUESS=tokens <= EARLY_LAUNCH_ROWS, num_warps=warps,
        launch_pdl=tokens <= EARLY_LAUNCH_ROWS and _early_launch(h.device),
    )  # fmt: skip


def _warps(block: int, only_taps: bool) -> int:
    """Measured on an H200: a copy of few rows gains from more threads, edits lose by sums over them."""
    warps = 16 if block >= 8192 else 8 if block >= 2048 else 4
    return 16 if only_taps and block >= 4096 else warps


@cache
def _early_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
