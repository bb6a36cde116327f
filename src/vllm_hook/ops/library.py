"""The ops that sit in the compiled graph at every armed site, their registration and their fakes.

``vllm_hook::tap(h, residual, addend, fired, live, site, step, buf)`` takes rows of the stream and
never changes it; ``vllm_hook::edit(h, residual, addend, fired, live, site, step, buf?, state)`` changes
rows of ``h`` in place, and taps what it left. What a site does in a step is written in ``step``, see
:mod:`vllm_hook.ops.edit`::

    for each record of the site:                     # every row at most once
        x = h[row] (+ residual[row] (+ addend[row]))
        evaluate the conditions of the row; apply its edits to h[row]
        if dst >= 0: buf[dst] = h[row] (+ residual[row] (+ addend[row]))
    fired[0] += 1, if there was any record (on a CPU also if there were conditions that are decided once)

h, residual, addend: [T, D] (any row stride); fired: int32 [1]; live: int32 [1] on the host; site: int32,
the site's header, a view of step: int32; buf: [capacity, D]. ``addend`` is None where sites are traced;
a graph pass splits a residual that is itself a sum (:mod:`vllm_hook.engine.graph_pass`).

``live`` is the host's word on whether any site acts in this step. Where Python runs, on CPU and in
steps without CUDA graphs, an idle step launches nothing at all. While a graph is captured it says
which of two graphs is being made: one without any launch of ours, or one with.

In ``tap``, only ``fired`` is declared as mutated: that keeps the op alive and in order, and one
element is all that functionalization could ever copy. ``buf`` is written behind the compiler's back
on purpose. Declared as mutated it may be cloned at every call (17 % of a decode step, measured when buffers
were views of one tensor), and nothing in the graph reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import Library

from .edit import HEADER_SIZE, EditState, run_cpu

#: Part of the compile-cache key. Raise it when the schema or the place of an op changes.
OPS_VERSION = 4

_TAP = (
    "tap(Tensor h, Tensor? residual, Tensor? addend, Tensor(a!) fired, Tensor live, Tensor site, "
    "Tensor step, Tensor buf) -> ()"
)
_EDIT = (
    "edit(Tensor(a!) h, Tensor? residual, Tensor? addend, Tensor(b!) fired, Tensor live, Tensor site, "
    "Tensor step, Tensor? buf, Tensor[] state) -> ()"
)

#: Called right after a tap was launched, by the address of its buffer: lets rows leave for the host
#: while later layers still compute. Only steps without CUDA graphs come by here.
after_tap: dict[int, Callable[[], None]] = {}

#: Called with the number of a site, that of its header, right after its launch, while graphs are captured.
launched: Callable[[int], None] | None = None


def _cpu(
    h: Tensor,
    residual: Tensor | None,
    addend: Tensor | None,
    fired: Tensor,
    live: Tensor,
    site: Tensor,
    step: Tensor,
    buf: Tensor | None,
    state: Sequence[Tensor] = (),
) -> None:
    """Both ops: ``tap`` has no ``state``."""
    if not live.item():
        return
    if residual is not None and addend is not None:
        residual = residual.float() + addend.float()
    if run_cpu(h, residual, site, step, buf, EditState(*state) if state else None):
        fired.add_(1)


def _cuda(
    h: Tensor,
    residual: Tensor | None,
    addend: Tensor | None,
    fired: Tensor,
    live: Tensor,
    site: Tensor,
    step: Tensor,
    buf: Tensor | None,
    state: Sequence[Tensor] = (),
) -> None:
    """Both ops: ``tap`` has no ``state``."""
    if mode := live.item():
        from .triton_site import launch_site

        own = EditState(*state) if state else None
        launch_site(h, residual, addend, fired, site, step, buf, own, latched=mode > 1)
        if launched is not None:
            launched((site.data_ptr() - step.data_ptr()) // (HEADER_SIZE * step.itemsize))
        if buf is not None:
            _sent(buf)


def _sent(buf: Tensor) -> None:
    if after_tap and (call := after_tap.get(buf.data_ptr())) is not None:
        call()


def _fake(*args: object) -> None:
    return None


def _register() -> Library:
    library = Library("vllm_hook", "FRAGMENT")
    for name, schema in (("tap", _TAP), ("edit", _EDIT)):
        # The compiler may hand over what it has in memory. Held to exact strides it copies a sum
        # that it would keep in registers, and then computes the sum a second time.
        library.define(schema, tags=(torch.Tag.flexible_layout,))
        library.impl(name, _cpu, "CPU")
        library.impl(name, _cuda, "CUDA")
        library._register_fake(name, _fake)
    return library


_LIBRARY = _register()

tap = torch.ops.vllm_hook.tap
edit = torch.ops.vllm_hook.edit
