"""One edit kernel for every steering method, and the conditions that gate it.

An edit is rank one: ``s = act(<x, u> + c)``, ``x <- x + (a + b s) v``, optionally rescaled to the
norm that x had. Methods are choices of its parameters::

    add      a = strength, b = 0                          clamp   a = target, b = -1, u = v unit
    ablate   a = 0, b = -1, u = v unit                    affine  as given
    sae      act = (jump-)relu, u = encoder row, c = its bias, a = target, b = -1, v = decoder row

``rotate`` is two such edits that share a projection: with p = (<x, u>, <x, v>) for orthonormal u, v,
x <- x + (|p| a - p0) u + (|p| b - p1) v with a, b = cos, sin of the angle. A row may have a chain
of edits, applied in order, each on what the one before left. Vectors lie in a bank by slot.

Tables, all int32 or float32 and of fixed address::

    tables[t, 0] = [n, rows...]
    tables[t, 1] = [n, what...]            a chain for each row; for conditions, a condition
    chain_start[c]..chain_start[c+1] are the entries of chain c
    entry_int  [entries, 9]: KIND U V ACT KEEP_NORM HEAD GATE_KIND GATE ROW_GATE
    entry_float[entries, 4]: A B C THETA
    cond_int   [conditions, 6]: KIND U OVER ABOVE FLAG PER_ROW
    cond_float [conditions, 3]: C BOUND ROWS

Gates stay on the device: a condition writes ``flags[FLAG]`` (latched, one a request) or
``row_flags[FLAG, row]``; an entry reads either, and ``row_flags[ROW_GATE, row]`` besides (rows
chosen by token id, which the host need not know). ``acc`` holds the running sum for means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KIND, U, V, ACT, KEEP_NORM, HEAD, GATE_KIND, GATE, ROW_GATE = range(9)
A, B, C, THETA = range(4)
COND_KIND, COND_U, OVER, ABOVE, FLAG, PER_ROW = range(6)
COND_C, BOUND, COND_ROWS = range(3)

RANK_ONE, ROTATE = 0, 1
IDENTITY, RELU, JUMP_RELU = 0, 1, 2
NO_GATE, LATCHED, BY_ROW = 0, 1, 2
LINEAR, COSINE, NORM = 0, 1, 2
ANY, ALL, MEAN = 0, 1, 2


@dataclass(frozen=True)
class EditState:
    """The shared tables, in the order in which the op takes them."""

    edit_tables: Tensor
    chain_start: Tensor
    entry_int: Tensor
    entry_float: Tensor
    cond_tables: Tensor
    cond_int: Tensor
    cond_float: Tensor
    flags: Tensor
    acc: Tensor
    row_flags: Tensor
    bank: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


def run_conditions(h_TD: Tensor, residual_TD: Tensor | None, table: int, s: EditState) -> None:
    """Evaluate the conditions of a site on this step's rows, before its edits. Changes only the flags."""
    rows, which = _table(s.cond_tables, table)
    x = h_TD[rows].float()
    if residual_TD is not None:
        x = x + residual_TD[rows].float()
    ints, floats = s.cond_int[which].long(), s.cond_float[which]
    dots = (x * s.bank[ints[:, COND_U]]).sum(-1)
    norms = x.norm(dim=-1)
    kind = ints[:, COND_KIND]
    value = torch.where(kind == NORM, norms, torch.where(kind == COSINE, dots / norms.clamp_min(1e-30), dots))
    value = value + floats[:, COND_C]
    over, flag, above = ints[:, OVER], ints[:, FLAG], ints[:, ABOVE].bool()
    holds = _holds(value, floats[:, BOUND], above)
    by_row = ints[:, PER_ROW].bool()
    s.row_flags[flag[by_row], rows[by_row]] = holds[by_row].to(s.row_flags.dtype)
    for rule, reduce in ((ANY, "amax"), (ALL, "amin")):
        mine = ~by_row & (over == rule)
        s.flags.scatter_reduce_(0, flag[mine], holds[mine].to(s.flags.dtype), reduce, include_self=True)
    mean = ~by_row & (over == MEAN)
    if bool(mean.any()):
        slots = flag[mean]
        s.acc.index_add_(0, slots, value[mean])
        averages = s.acc[slots] / floats[mean, COND_ROWS]
        s.flags[slots] = _holds(averages, floats[mean, BOUND], above[mean]).to(s.flags.dtype)


def run_edits(h_TD: Tensor, residual_TD: Tensor | None, table: int, s: EditState) -> None:
    """Apply chains of edits to rows of ``h`` (the row is ``h + residual``); other rows keep every bit."""
    rows, chains = _table(s.edit_tables, table)
    if not len(rows):
        return
    start = s.chain_start[chains].long()
    count = s.chain_start[chains + 1].long() - start
    width = s.bank.shape[1]
    h_THD = h_TD.unflatten(1, (-1, width))
    own = h_THD[rows].float()
    x = own if residual_TD is None else own + residual_TD[rows].float().unflatten(1, (-1, width))
    delta = torch.zeros_like(x)
    for depth in range(int(count.max())):
        live = torch.nonzero(count > depth).flatten()
        entry = start[live] + depth
        ints, floats = s.entry_int[entry].long(), s.entry_float[entry]
        head = ints[:, HEAD]
        now = x[live, head] + delta[live, head]
        change = _change(now, ints, floats, s.bank)
        shut = ~_open(rows[live], ints, s)
        change[shut] = 0.0
        delta[live, head] += change
    h_THD[rows] = (own + delta).to(h_TD.dtype)


def _change(x_ND: Tensor, ints: Tensor, floats: Tensor, bank: Tensor) -> Tensor:
    """What one entry a row adds to it, float32 [N, D]."""
    u, v = _vectors(bank, ints[:, U]), _vectors(bank, ints[:, V])
    a, b, c, theta = floats.unbind(-1)
    score = (x_ND * u).sum(-1) + c
    act = ints[:, ACT]
    if bool((act != IDENTITY).any()):
        floor = torch.where(act == JUMP_RELU, theta, torch.zeros_like(theta))
        score = torch.where((act == IDENTITY) | (score > floor), score, torch.zeros_like(score))
    change = (a + b * score)[:, None] * v
    rotate = ints[:, KIND] == ROTATE
    if bool(rotate.any()):
        second = (x_ND * v).sum(-1)
        length = torch.hypot(score, second)
        turned = (length * a - score)[:, None] * u + (length * b - second)[:, None] * v
        change = torch.where(rotate[:, None], turned, change)
    keep = ints[:, KEEP_NORM].bool() & (change != 0).any(-1)
    if bool(keep.any()):
        moved = x_ND + change
        scale = x_ND.norm(dim=-1) / moved.norm(dim=-1).clamp_min(1e-30)
        change = torch.where(keep[:, None], moved * scale[:, None] - x_ND, change)
    return change


def _vectors(bank: Tensor, slots: Tensor) -> Tensor:
    """One vector a row; a single one to broadcast where all rows use the same."""
    if bool((slots == slots[0]).all()):
        return bank[slots[0]][None]
    return bank[slots]


def _open(rows: Tensor, ints: Tensor, s: EditState) -> Tensor:
    """Whether each row's gate is open."""
    kind, gate, row_gate = ints[:, GATE_KIND], ints[:, GATE].clamp_min(0), ints[:, ROW_GATE]
    if bool(((kind == NO_GATE) & (row_gate < 0)).all()):
        return torch.ones_like(kind, dtype=torch.bool)
    latched = s.flags[gate] > 0
    by_row = s.row_flags[gate.clamp_max(s.row_flags.shape[0] - 1), rows] > 0
    chosen = (row_gate < 0) | (s.row_flags[row_gate.clamp_min(0), rows] > 0)
    return chosen & ((kind == NO_GATE) | torch.where(kind == LATCHED, latched, by_row))


def _holds(value: Tensor, bound: Tensor, above: Tensor) -> Tensor:
    return torch.where(above, value > bound, value < bound)


def _table(tables: Tensor, table: int) -> tuple[Tensor, Tensor]:
    n = int(tables[table, 0, 0])
    return tables[table, 0, 1 : 1 + n].long(), tables[table, 1, 1 : 1 + n].long()
