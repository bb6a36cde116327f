"""The op that takes rows: against its reference, and nothing else is touched."""

import pytest
import torch

from vllm_hook.ops import reference
from vllm_hook.ops.library import tap
from vllm_hook.ops.site import SiteTap


def table_of(*rows_of, width=16):
    tables = torch.zeros(len(rows_of), 1 + width, dtype=torch.int32)
    for t, rows in enumerate(rows_of):
        tables[t, 0] = len(rows)
        tables[t, 1 : 1 + len(rows)] = torch.tensor(rows, dtype=torch.int32)
        tables[t, 1 + len(rows) :] = 99  # beyond the count: never read
    return tables


def make(width, dtype=torch.float32, *, rows=((0, 3, 7),), table=0, capacity=10):
    buf = torch.full((capacity, width), 7.25, dtype=dtype)
    return {
        "fired": torch.zeros(1, dtype=torch.int32),
        "tables": table_of(*rows),
        "table_id": torch.tensor([table], dtype=torch.int32),
        "buf": buf,
    }


def run(h, residual, s):
    tap(h, residual, s["fired"], s["tables"], s["table_id"], s["buf"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width", [1, 3, 64, 257])
@pytest.mark.parametrize("rows", [(0,), (0, 3, 7), (7, 2, 5), tuple(range(8)), ()], ids=str)
def test_against_reference(dtype, residual, width, rows):
    h = torch.randn(8, width).to(dtype)
    r = torch.randn(8, width).to(dtype) if residual else None
    s = make(width, dtype, rows=(rows,))
    before = [t.clone() for t in (h, *([r] if residual else []), s["tables"], s["table_id"])]
    run(h, r, s)
    want = reference.tap(h, r, torch.tensor(rows, dtype=torch.long))
    assert torch.equal(s["buf"][: len(rows)], want)
    assert bool((s["buf"][len(rows) :] == 7.25).all())  # rows that are not written keep their bits
    assert int(s["fired"]) == 1
    for now, then in zip((h, *([r] if residual else []), s["tables"], s["table_id"]), before, strict=True):
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


@pytest.mark.parametrize("table", [-1, -7])
def test_idle_does_nothing(table):
    s = make(4, table=table)
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
    """Schema, fake and dispatch, with an idle table (an active one writes ``buf``, undeclared on purpose)."""
    s = make(4, table=-1)
    args = (
        torch.randn(8, 4),
        torch.randn(8, 4) if residual else None,
        s["fired"],
        s["tables"],
        s["table_id"],
        s["buf"],
    )
    result = torch.library.opcheck(torch.ops.vllm_hook.tap.default, args, raise_exception=True)
    assert set(result.values()) == {"SUCCESS"}


def test_in_a_compiled_function_tables_are_read_anew_each_call():
    """The op survives compilation, sees the table of each call, and no buffer is copied away."""
    tables, table_id = table_of((0, 3, 7), (1,)), torch.tensor([-1], dtype=torch.int32)
    site = SiteTap(tables, table_id, 10, 4, torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(h, residual):
        site(h, residual)
        return (h + residual) * 2

    h, r = torch.randn(8, 4), torch.randn(8, 4)
    f(h, r)
    assert int(site.fired) == 0
    for table, rows in ((0, [0, 3, 7]), (1, [1])):
        table_id.fill_(table)
        assert torch.equal(f(h, r), (h + r) * 2)
        assert torch.equal(site.buf[: len(rows)], (h + r)[rows])
    assert int(site.fired) == 2
