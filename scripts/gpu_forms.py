"""What one armed site costs in a CUDA graph, by form: figures for the choice of form in docs/performance.md.

    python scripts/gpu_forms.py OUT

A stand-in for decoding: 32 layers, each a 4096 x 4096 product and a fused add and norm, captured in one
graph, with nothing or with a site between the two. Reported: microseconds a site above the plain graph.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vllm_hook.ops import triton_site
from vllm_hook.runtime.buffers import SiteBank
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.edit_plan import EditPlan
from vllm_hook.runtime.plan import StepPlan
from vllm_hook.sites import Armed, ModelFacts

LAYERS, WIDTH, ROWS = 32, 4096, 128
FACTS = ModelFacts("forms", LAYERS, 32, 8, 128, WIDTH)
PLACES = [("resid_post", layer) for layer in range(LAYERS)]


@torch.compile(dynamic=False)
def norm(y: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r = y + r
    x = r.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).to(r.dtype) * g, r


@torch.compile(dynamic=False)
def norm_and_take(
    y: torch.Tensor, r: torch.Tensor, g: torch.Tensor, buf: torch.Tensor, dst: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tap as plain torch, for the compiler to fuse: rows that nobody wants go to a last, spare row."""
    r = y + r
    buf.index_put_((dst,), r)
    x = r.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).to(r.dtype) * g, r


class Forms:
    def __init__(self, tokens: int) -> None:
        make = {"dtype": torch.bfloat16, "device": "cuda"}
        torch.manual_seed(0)
        self.tokens = tokens
        self.w = [torch.randn(WIDTH, WIDTH, **make) / 64 for _ in range(LAYERS)]
        self.g = torch.ones(WIDTH, **make)
        self.h, self.r = torch.randn(tokens, WIDTH, **make), torch.randn(tokens, WIDTH, **make)
        self.bufs = [torch.zeros(ROWS + 1, WIDTH, **make) for _ in range(LAYERS)]
        self.dst = torch.arange(tokens, device="cuda")
        device = torch.device("cuda")
        self.edits = EditBank(FACTS, ROWS, ROWS, 16, device)
        self.edits.state["stream"].bank.normal_()
        taps, edits = (
            Armed.of("resid_post", range(LAYERS), "last"),
            Armed.of_edits("resid_post", range(LAYERS)),
        )
        made = {"taps": taps, "both": taps | edits}
        self.banks = {
            name: SiteBank(armed, FACTS, ROWS, ROWS, torch.bfloat16, device, self.edits, ROWS)
            for name, armed in made.items()
        }

    def plan(self, entries: int) -> EditPlan:
        rows = np.arange(self.tokens, dtype=np.int32)
        one = [0, 0, 1, 0, 0, 0, 0, -1, -1]
        return EditPlan(
            tables=((rows, np.zeros_like(rows)),),
            table_of=dict.fromkeys(PLACES, 0),
            chain_start=np.asarray([0, entries], dtype=np.int32),
            entry_int=np.asarray([one] * entries, dtype=np.int32),
            entry_float=np.asarray([[0.1, -0.1, 0.0, 0.0]] * entries, dtype=np.float32),
            cond_tables=(), cond_table_of={}, cond_int=np.empty((0, 6), np.int32),
            cond_float=np.empty((0, 3), np.float32), token_rows=(), row_flags=(), attends={},
        )  # fmt: skip

    def graph(self, site: Callable[[int, torch.Tensor, torch.Tensor], None] | None, fused: bool = False):
        def run() -> None:
            h, r = self.h, self.r
            for layer in range(LAYERS):
                y = h @ self.w[layer]
                if site is not None:
                    site(layer, y, r)
                if fused:
                    h, r = norm_and_take(y, r, self.g, self.bufs[layer], self.dst)
                else:
                    h, r = norm(y, r, self.g)

        with torch.inference_mode():
            run()
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        return graph

    def with_bank(self, name: str, taps: bool, entries: int, early: bool, warps: int = 8):
        """A captured graph, and what loads its tables before it is timed."""
        bank = self.banks[name]
        bank.area.set_live(True)
        triton_site._early_launch = lambda device: early
        triton_site.EARLY_LAUNCH_ROWS = ROWS
        triton_site._warps = lambda block, only_taps: warps
        graph = self.graph(lambda layer, y, r: bank.sites["resid_post", layer](y, r))
        rows = np.arange(self.tokens, dtype=np.int32)
        tap = StepPlan((rows,), dict.fromkeys(PLACES, 0), ()) if taps else None
        edit = self.plan(entries) if entries else None

        def load() -> None:
            if tap is None and edit is None:
                bank.clear()
            else:
                bank.load(tap, edit)

        return graph, load


def measure(graphs: dict, rounds: int = 15, replays: int = 20) -> dict[str, float]:
    """Median milliseconds a replay, rounds taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, load) in graphs.items():
            load()
            graph.replay()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) / replays)
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for tokens in (1, ROWS):
        forms = Forms(tokens)
        graphs = {
            "plain": (forms.graph(None), lambda: None),
            "tap fused by the compiler": (forms.graph(None, fused=True), lambda: None),
        }
        for early in (False, True):
            how = ", early launch" if early else ""
            graphs[f"tap op, idle{how}"] = forms.with_bank("taps", False, 0, early)
            graphs[f"tap op, every row{how}"] = forms.with_bank("taps", True, 0, early)
            graphs[f"edit op, idle{how}"] = forms.with_bank("both", False, 0, early)
            graphs[f"edit op, tap{how}"] = forms.with_bank("both", True, 0, early)
            graphs[f"edit op, 1 edit a row{how}"] = forms.with_bank("both", False, 1, early)
            graphs[f"edit op, 2 edits a row{how}"] = forms.with_bank("both", False, 2, early)
        for warps in (4, 16):
            early = tokens == 1
            graphs[f"tap op, every row, {warps} warps"] = forms.with_bank("taps", True, 0, early, warps)
            graphs[f"edit op, tap, {warps} warps"] = forms.with_bank("both", True, 0, early, warps)
            graphs[f"edit op, 2 edits a row, {warps} warps"] = forms.with_bank("both", False, 2, early, warps)
        times = measure(graphs)
        base = times["plain"]
        found[tokens] = {name: round((t - base) / LAYERS * 1e3, 2) for name, t in times.items()}
        print(f"{tokens} rows: plain {base:.3f} ms; us a site:", flush=True)
        for name, cost in found[tokens].items():
            print(f"   {name:40} {cost:6.2f}", flush=True)
    (out / "forms.json").write_text(json.dumps(found, indent=1))
    os._exit(0)


if __name__ == "__main__":
    main()
