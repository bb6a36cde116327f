"""The op that sits in the compiled graph at every armed site, its registration and its fake.

``vllm_hook::tap(h, residual, fired, tables, table_id, buf)`` reads rows of the stream and never
changes it::

    t = table_id[0]
    if t < 0: return                         # not active in this step: nothing is launched or read
    n = tables[t, 0]
    for j in range(n):                       # n <= T: a row is taken once a site
        buf[j] = h[tables[t, 1 + j]] (+ residual[tables[t, 1 + j]])
    fired[0] += 1

h, residual: [T, D] (any row stride); fired: int32 [1]; tables: int32 [tables, 1 + max rows];
table_id: int32 [1]; buf: [capacity, D].

``vllm_hook::edit(h, residual, fired, site, shared)`` changes rows of ``h`` in place, see
:mod:`vllm_hook.ops.edit`::

    edits, conditions = site              # tables that this site follows in this step, -1: none
    if conditions >= 0: evaluate them on h (+ residual), write flags
    if edits >= 0: apply the chains to their rows

In ``tap``, only ``fired`` is declared as mutated: that keeps the op alive and in order, and one
element is all that functionalization could ever copy. ``buf`` is written behind the compiler's back
on purpose. Declared as mutated it may be cloned at every call (17 % of a decode step, measured when buffers
were views of one tensor), and nothing in the graph reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from .edit import EditState, run_conditions, run_edits

#: Part of the compile-cache key. Raise it when the schema or the place of an op changes.
OPS_VERSION = 2

_SCHEMA = (
    "tap(Tensor h, Tensor? residual, Tensor(a!) fired, Tensor tables, Tensor table_id, Tensor buf) -> ()"
)

_EDIT_SCHEMA = "edit(Tensor(a!) h, Tensor? residual, Tensor(b!) fired, Tensor site, Tensor[] shared) -> ()"


def tap_cpu(
    h: Tensor, residual: Tensor | None, fired: Tensor, tables: Tensor, table_id: Tensor, buf: Tensor
) -> None:
    """The CPU path: one gather (two with a residual), nothing at all when the site is idle."""
    table = int(table_id)
    if table < 0:
        return
    count = int(tables[table, 0])
    rows = tables[table, 1 : 1 + count]
    out = buf[:count]
    torch.index_select(h, 0, rows, out=out)
    if residual is not None:
        out.add_(torch.index_select(residual, 0, rows))
    fired.add_(1)


def _tap_fake(
    h: Tensor, residual: Tensor | None, fired: Tensor, tables: Tensor, table_id: Tensor, buf: Tensor
) -> None:
    return None


def edit_cpu(h: Tensor, residual: Tensor | None, fired: Tensor, site: Tensor, shared: list[Tensor]) -> None:
    """The CPU path: a few gathers for all rows at once; nothing at all when the site is idle."""
    edits, conditions = site.tolist()
    if edits < 0 and conditions < 0:
        return
    state = EditState(*shared)
    if conditions >= 0:
        run_conditions(h, residual, conditions, state)
    if edits >= 0:
        run_edits(h, residual, edits, state)
    fired.add_(1)


def _edit_fake(h: Tensor, residual: Tensor | None, fired: Tensor, site: Tensor, shared: list[Tensor]) -> None:
    return None


def _register() -> Library:
    library = Library("vllm_hook", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("tap", tap_cpu, "CPU")
    library._register_fake("tap", _tap_fake)
    library.define(_EDIT_SCHEMA)
    library.impl("edit", edit_cpu, "CPU")
    library._register_fake("edit", _edit_fake)
    return library


_LIBRARY = _register()
tap = torch.ops.vllm_hook.tap
edit = torch.ops.vllm_hook.edit
