"""The op that takes rows: against its reference, and nothing else is touched."""

import numpy as np
import pytest
import torch

from vllm_hook.ops import reference
from vllm_hook.ops.library import tap
from vllm_hook.ops.site import Site
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.plan import StepPlan


def step_of(*rows_of, header=0):
    """A step in which site i takes ``rows_of[i]``; the header of one of them is returned as well."""
    area = StepArea(
        AreaSize({("resid_post", i): 16 for i in range(len(rows_of))}, frozenset(), 0, 0), torch.device("cpu")
    )
    plan = StepPlan(
        tuple(np.asarray(rows, dtype=np.int32) for rows in rows_of),
        {("resid_post", i): i for i in range(len(rows_of))},
        (),
    )
    area.load(plan, None)
    return area, area.headers["resid_post", header]


def make(width, dtype=torch.float32, *, rows=((0, 3, 7),), table=0, capacity=10):
    area, header = step_of(*rows, header=table)
    return {
        "fired": torch.zeros(1, dtype=torch.int32),
        "live": area.live,
        "site": header,
        "step": area.step,
        "buf": torch.full((capacity, width), 7.25, dtype=dtype),
    }


def run(h, residual, s):
    tap(h, residual, None, *s.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width", [1, 3, 64, 257])
@pytest.mark.parametrize("rows", [(0,), (0, 3, 7), (7, 2, 5), tuple(range(8)), ()], ids=str)
def test_against_reference(dtype, residual, width, rows):
    h = torch.randn(8, width).to(dtype)
    r = torch.randn(8, width).to(dtype) if residual else None
    s = make(width, dtype, rows=(rows,))
    before = [t.clone() for t in (h, *([r] if residual else []), s["step"], s["live"])]
    run(h, r, s)
    want = reference.tap(h, r, torch.tensor(rows, dtype=torch.long))
    assert torch.equal(s["buf"][: len(rows)], want)
    assert bool((s["buf"][len(rows) :] == 7.25).all())  # rows that are not written keep their bits
    assert int(s["fired"]) == bool(rows)
    for now, then in zip((h, *([r] if residual else []), s["step"], s["live"]), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("layout", ["columns", "every-second-row", "expanded"])
def test_strides(layout):
    wide = torch.randn(16, 96)
    h = {
        "columns": wide[:8, 16:80],
        "every-second-row": wide[::2, :64],
        "expanded": wide[:1, :64].expand(8, 64),
    }[layout]
    assert not h.is_contiguous()
    r = torch.randn(64, 8).T
    s = make(64)
    run(h, r, s)
    assert torch.equal(s["buf"][:3], h[[0, 3, 7]] + r[[0, 3, 7]])


def test_the_table_that_the_site_follows():
    h = torch.randn(8, 4)
    s = make(4, rows=((0, 1), (6,), (5, 2)), table=2)
    run(h, None, s)
    assert torch.equal(s["buf"][:2], h[[5, 2]])


@pytest.mark.parametrize("idle", ["live", "header"])
def test_idle_does_nothing(idle):
    s = make(4)
    s["live" if idle == "live" else "site"].zero_()
    run(torch.randn(8, 4), torch.randn(8, 4), s)
    assert bool((s["buf"] == 7.25).all())
    assert int(s["fired"]) == 0


def test_sum_is_rounded_once_as_the_stream_is():
    h, r = torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    s = make(64, torch.bfloat16)
    run(h, r, s)
    assert torch.equal(s["buf"][:3], (h + r)[[0, 3, 7]])


@pytest.mark.parametrize("residual", [True, False])
def test_opcheck(residual):
    """Schema, fake and dispatch, with an idle site (an active one writes ``buf``, undeclared on purpose)."""
    s = make(4)
    s["live"].zero_()
    args = (torch.randn(8, 4), torch.randn(8, 4) if residual else None, None, *s.values())
    result = torch.library.opcheck(torch.ops.vllm_hook.tap.default, args, raise_exception=True)
    assert set(result.values()) == {"SUCCESS"}


def test_in_a_compiled_function_tables_are_read_anew_each_call():
    """The op survives compilation, sees the table of each call, and no buffer is copied away."""
    area = StepArea(AreaSize({("resid_post", 0): 16}, frozenset(), 0, 0), torch.device("cpu"))
    site = Site(area.live, area.headers["resid_post", 0], area.step, torch.zeros(10, 4), None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(h, residual):
        site(h, residual)
        return (h + residual) * 2

    h, r = torch.randn(8, 4), torch.randn(8, 4)
    f(h, r)
    assert int(site.fired) == 0
    for rows in ([0, 3, 7], [1]):
        area.load(StepPlan((np.asarray(rows, dtype=np.int32),), {("resid_post", 0): 0}, ()), None)
        assert torch.equal(f(h, r), (h + r) * 2)
        assert torch.equal(site.buf[: len(rows)], (h + r)[rows])
    assert int(site.fired) == 2
