"""One edit kernel for every steering method, the conditions that gate it, and the taps behind it.

An edit is rank one: ``s = act(<x, u> + c)``, ``x <- x + (a + b s) v``, optionally rescaled to the
norm that x had. Methods are choices of its parameters::

    add      a = strength, b = 0                          clamp   a = target, b = -1, u = v unit
    ablate   a = 0, b = -1, u = v unit                    affine  as given
    sae      act = (jump-)relu, u = encoder row, c = its bias, a = target, b = -1, v = decoder row

``rotate`` is two such edits that share a projection: with p = (<x, u>, <x, v>) for orthonormal u, v,
x <- x + (|p| a - p0) u + (|p| b - p1) v with a, b = cos, sin of the angle. A row may have a chain
of edits, applied in order, each on what the one before left. Vectors lie in a bank by slot.

All that changes from step to step lies in ``step``, one int32 tensor of fixed address that is
packed anew for each step and sent in one copy (:mod:`vllm_hook.runtime.area`). Offsets count int32s
from its start; floats lie there as their bits::

    site header  [48]  RECORDS, N_RECORDS, LATCHED, N_LATCHED, the first record, its first two entries,
                       TAKEN, N_TAKEN
    record       [8]   ROW, DST, ENTRIES, N_ENTRIES, CONDS, N_CONDS, PATH   a row of this site, once
    entry        [16]  KIND U V ACT KEEP_NORM HEAD GATE_KIND GATE ROW_GATE  A B C THETA
    condition    [16]  COND_KIND COND_U OVER ABOVE FLAG PER_ROW ROWS N_ROWS  COND_C BOUND COUNT

``PATH`` says what the row needs: ``SUMS_ONLY`` is at most two ungated edits without product, activation
or kept norm; ``PRODUCTS`` the same with products; ``GENERAL`` anything.
The copies in the header save a GPU two look-ups, each a trip to memory, where a site has one row.
``TAKEN`` lists the rows that go to the buffer, in order: what the CPU path needs of them.
``DST``: where the row goes in the site's buffer, -1 nowhere. ``CONDS`` and ``LATCHED`` are lists of
offsets of conditions, ``ROWS`` a list of rows. For every record, in this order: the conditions read
the row as it came, the edits change it, the tap takes what they left.

Gates stay on the device: a condition writes ``flags[FLAG]`` (latched, one a request) or
``row_flags[FLAG, row]``; an entry reads either, and ``row_flags[ROW_GATE, row]`` besides (rows
chosen by token id, which the host need not know). ``acc`` holds the running sum for means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RECORDS, N_RECORDS, LATCHED_CONDS, N_LATCHED = range(4)
ROW, DST, ENTRIES, N_ENTRIES, CONDS, N_CONDS, PATH = range(7)
KIND, U, V, ACT, KEEP_NORM, HEAD, GATE_KIND, GATE, ROW_GATE, A, B, C, THETA = range(13)
COND_KIND, COND_U, OVER, ABOVE, FLAG, PER_ROW, ROWS, N_ROWS, COND_C, BOUND, COUNT = range(11)
#: int32s of a site header, a record, an entry and a condition.
HEADER_SIZE, RECORD_SIZE, ENTRY_SIZE, COND_SIZE = 48, 8, 16, 16
#: Where the copies of the first record and of its first entries stand in a header.
FIRST_RECORD, FIRST_ENTRIES, COPIED_ENTRIES = 4, 12, 2
TAKEN, N_TAKEN = 44, 45

SUMS_ONLY, PRODUCTS, GENERAL = 0, 1, 2
RANK_ONE, ROTATE = 0, 1
IDENTITY, RELU, JUMP_RELU = 0, 1, 2
NO_GATE, LATCHED, BY_ROW = 0, 1, 2
LINEAR, COSINE, NORM = 0, 1, 2
ANY, ALL, MEAN = 0, 1, 2


@dataclass(frozen=True)
class EditState:
    """What outlives a step, in the order in which the op takes it. All float32.

    flags [requests x gates]; acc likewise; row_flags [gates by row, rows of a step]; bank [slots, D].
    """

    flags: Tensor
    acc: Tensor
    row_flags: Tensor
    bank: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.flags, self.acc, self.row_flags, self.bank]


def run_cpu(
    h_TD: Tensor,
    residual_TD: Tensor | None,
    site: Tensor,
    step: Tensor,
    buf: Tensor | None,
    state: EditState | None,
) -> bool:
    """The CPU path of a site: whole-array work for all rows at once. False if the site is idle.

    The small integers of the step are handled in numpy, whose calls cost a fraction of torch's.
    """
    header = site.numpy()
    at, n, latched, n_latched = header[:FIRST_RECORD].tolist()
    if not n and not n_latched:
        return False
    area = step.numpy()
    if state is not None:
        records = area[at : at + n * RECORD_SIZE].reshape(n, RECORD_SIZE)
        if n_latched or records[:, N_CONDS].any():
            _run_conditions(h_TD, residual_TD, area, records, area[latched : latched + n_latched], state)
        edited = records if n and records[:, N_ENTRIES].all() else records[records[:, N_ENTRIES] > 0]
        if len(edited):
            _run_edits(h_TD, residual_TD, area, edited, state)
    if buf is not None:
        taken, n_taken = header[TAKEN : N_TAKEN + 1].tolist()
        if n_taken:
            _tap(h_TD, residual_TD, torch.from_numpy(area[taken : taken + n_taken]), buf)
    return True


def _tap(h_TD: Tensor, residual_TD: Tensor | None, rows: Tensor, buf: Tensor) -> None:
    out = buf[: len(rows)]
    torch.index_select(h_TD, 0, rows, out=out)
    if residual_TD is not None:
        out.add_(torch.index_select(residual_TD, 0, rows))


def _run_conditions(
    h_TD: Tensor,
    residual_TD: Tensor | None,
    area: np.ndarray,
    records: np.ndarray,
    latched: np.ndarray,
    s: EditState,
) -> None:
    """Evaluate the conditions of a site on this step's rows, before its edits. Changes only the flags."""
    rows, at = _condition_rows(area, records, latched)
    if not len(rows):
        return
    conditions = area[at[:, None] + np.arange(COND_SIZE)]
    ints = torch.from_numpy(conditions).long()
    floats = torch.from_numpy(conditions.view(np.float32))
    index = torch.from_numpy(rows).long()
    x = h_TD[index].float()
    if residual_TD is not None:
        x = x + residual_TD[index].float()
    dots = (x * s.bank[ints[:, COND_U]]).sum(-1)
    norms = x.norm(dim=-1)
    kind = ints[:, COND_KIND]
    value = torch.where(kind == NORM, norms, torch.where(kind == COSINE, dots / norms.clamp_min(1e-30), dots))
    value = value + floats[:, COND_C]
    over, flag, above = ints[:, OVER], ints[:, FLAG], ints[:, ABOVE].bool()
    holds = _holds(value, floats[:, BOUND], above)
    by_row = ints[:, PER_ROW].bool()
    s.row_flags[flag[by_row], index[by_row]] = holds[by_row].to(s.row_flags.dtype)
    for rule, reduce in ((ANY, "amax"), (ALL, "amin")):
        mine = ~by_row & (over == rule)
        s.flags.scatter_reduce_(0, flag[mine], holds[mine].to(s.flags.dtype), reduce, include_self=True)
    mean = ~by_row & (over == MEAN)
    if bool(mean.any()):
        slots = flag[mean]
        s.acc.index_add_(0, slots, value[mean])
        averages = s.acc[slots] / floats[mean, COUNT]
        s.flags[slots] = _holds(averages, floats[mean, BOUND], above[mean]).to(s.flags.dtype)


def _condition_rows(
    area: np.ndarray, records: np.ndarray, latched: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (row, offset of a condition), those by row first."""
    rows, at = [], []
    watched = records[records[:, N_CONDS] > 0] if len(records) else records
    for record in watched:
        a, n = record[CONDS], record[N_CONDS]
        at.append(area[a : a + n])
        rows.append(np.full(n, record[ROW], dtype=np.int32))
    for offset in latched:
        a, n = area[offset + ROWS], area[offset + N_ROWS]
        rows.append(area[a : a + n])
        at.append(np.full(n, offset, dtype=np.int32))
    if not rows:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    return np.concatenate(rows), np.concatenate(at)


def _run_edits(
    h_TD: Tensor, residual_TD: Tensor | None, area: np.ndarray, records: np.ndarray, s: EditState
) -> None:
    """Apply chains of edits to rows of ``h`` (the row is ``h + residual``); other rows keep every bit."""
    rows, count = np.ascontiguousarray(records[:, ROW]), records[:, N_ENTRIES]
    index = torch.from_numpy(rows)
    width = s.bank.shape[1]
    own = h_TD.index_select(0, index).float()
    x = own if residual_TD is None else own + residual_TD.index_select(0, index)
    own, x = own.view(len(rows), -1, width), x.view(len(rows), -1, width)
    delta: Tensor | None = None
    for depth in range(int(count.max())):
        live = np.flatnonzero(count > depth)
        at = records[live, ENTRIES] + depth * ENTRY_SIZE
        entries = area[at[:, None] + np.arange(ENTRY_SIZE)]
        head = entries[:, HEAD]
        if len(live) == len(rows) and _same(head):
            where: tuple[slice | int | Tensor, ...] = (slice(None), int(head[0]))
        else:
            where = (torch.from_numpy(live), torch.from_numpy(head).long())
        now = x[where] if delta is None else x[where] + delta[where]
        change = _change(now, entries, s.bank)
        shut = _shut(index, live, entries, s)
        if shut is not None:
            change = change.masked_fill(shut[:, None], 0.0)
        if delta is None and change.shape == x[:, 0].shape and x.shape[1] == 1:
            delta = change[:, None]
            continue
        if delta is None:
            delta = torch.zeros_like(x)
        delta[where] += change
    assert delta is not None
    # A row that did not change keeps its bits, also the sign of a zero.
    new = torch.where(delta == 0, own, own + delta).view(len(rows), -1)
    h_TD.index_copy_(0, index.long(), new.to(h_TD.dtype))


def _change(x_ND: Tensor, entries: np.ndarray, bank: Tensor) -> Tensor:
    """What one entry a row adds to it, float32 [N, D]."""
    u, v = _vectors(bank, entries[:, U]), _vectors(bank, entries[:, V])
    floats = torch.from_numpy(entries[:, A : THETA + 1].copy().view(np.float32))
    a, b, c, theta = floats.unbind(-1)
    act, rotate, keep = entries[:, ACT], entries[:, KIND] == ROTATE, entries[:, KEEP_NORM] != 0
    if not rotate.any() and not entries[:, B].any() and not act.any():
        change = a[:, None] * v  # plain addition: no score is needed
    else:
        score = (x_ND * u).sum(-1) if len(u) > 1 else x_ND @ u[0]
        score = score + c
        if act.any():
            kind = torch.from_numpy(act.copy())
            floor = torch.where(kind == JUMP_RELU, theta, torch.zeros_like(theta))
            score = torch.where((kind == IDENTITY) | (score > floor), score, torch.zeros_like(score))
        change = (a + b * score)[:, None] * v
        if rotate.any():
            second = (x_ND * v).sum(-1)
            length = torch.hypot(score, second)
            turned = (length * a - score)[:, None] * u + (length * b - second)[:, None] * v
            change = torch.where(torch.from_numpy(rotate)[:, None], turned, change)
    if keep.any():
        kept = torch.from_numpy(keep) & (change != 0).any(-1)
        moved = x_ND + change
        scale = x_ND.norm(dim=-1) / moved.norm(dim=-1).clamp_min(1e-30)
        change = torch.where(kept[:, None], moved * scale[:, None] - x_ND, change)
    return change


def _vectors(bank: Tensor, slots: np.ndarray) -> Tensor:
    """One vector a row; a single one to broadcast where all rows use the same."""
    if _same(slots):
        return bank[int(slots[0])][None]
    return bank[torch.from_numpy(slots).long()]


def _same(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _shut(index: Tensor, live: np.ndarray, entries: np.ndarray, s: EditState) -> Tensor | None:
    """Which rows' gates are shut; None where no row has one."""
    kind, row_gate = entries[:, GATE_KIND], entries[:, ROW_GATE]
    if not kind.any() and (row_gate < 0).all():
        return None
    rows = index[torch.from_numpy(live)].long()
    kinds, chosen_by = torch.from_numpy(kind.copy()), torch.from_numpy(row_gate.copy()).long()
    gate = torch.from_numpy(entries[:, GATE].copy()).long().clamp_min(0)
    # The two kinds of flags are numbered apart: a number of one may lie beyond the other.
    latched = s.flags[gate.clamp_max(s.flags.shape[0] - 1)] > 0
    by_row = s.row_flags[gate.clamp_max(s.row_flags.shape[0] - 1), rows] > 0
    chosen = (chosen_by < 0) | (s.row_flags[chosen_by.clamp_min(0), rows] > 0)
    return ~(chosen & ((kinds == NO_GATE) | torch.where(kinds == LATCHED, latched, by_row)))


def _holds(value: Tensor, bound: Tensor, above: Tensor) -> Tensor:
    return torch.where(above, value > bound, value < bound)
