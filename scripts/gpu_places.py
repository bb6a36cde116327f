"""How far graphs of one and the same step are apart by where their activations lie, and which kernels see it.

    python scripts/gpu_places.py OUT

A stand-in for decoding one row: the products of 32 layers of Llama-3.1-8B with random weights, its norms and
activations. The graph is captured several times: at the same addresses, displaced within its memory pool, in
pools of its own, and on streams of its own (which have a workspace for products each). Captures are replayed
in turn; the fastest and the slowest are profiled. Two engines, or two sets of graphs of one engine,
are apart by as much as this, whatever else they do. Then an engine with 32 armed sites, which looks for the
fastest of several pools for its own graphs of few rows.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from gpu_forms import measure, norm
from torch.profiler import ProfilerActivity, profile

from vllm_hook.bench import gpu
from vllm_hook.engine import graphs
from vllm_hook.engine.worker import WORKER_KEY

LAYERS, WIDTH = 32, 4096
SHAPES = ((WIDTH, 6144), (WIDTH, WIDTH), (WIDTH, 28672), (14336, WIDTH))
PADS = [512 << i for i in range(11)] + [12 << 10, 36 << 10, 100 << 10, 196 << 10, 396 << 10, 768 << 10]
POOLS, STREAMS, ROUNDS, REPLAYS = 8, 6, 7, 6


@torch.compile(dynamic=False)
def act(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Step:
    def __init__(self) -> None:
        torch.manual_seed(0)
        make = {"dtype": torch.bfloat16, "device": "cuda"}
        self.weights = [
            [torch.empty(b, a, **make).uniform_(-1, 1).mul_(a**-0.5).t() for a, b in SHAPES]
            for _ in range(LAYERS)
        ]
        self.g = torch.ones(WIDTH, **make)
        self.h, self.r = torch.randn(1, WIDTH, **make), torch.randn(1, WIDTH, **make)

    def run(self) -> list[int]:
        """Addresses of what the first layer makes."""
        h, r, at = self.h, self.r, []
        for qkv, o, gate_up, down in self.weights:
            q = h @ qkv
            y = q[:, :WIDTH] @ o
            h, r = norm(y, r, self.g)
            u = h @ gate_up
            z = act(u)
            m = z @ down
            h, r = norm(m, r, self.g)
            at = at or [t.data_ptr() for t in (q, y, u, z, m)]
        return at

    def capture(self, pool: Any, stream: torch.cuda.Stream, pad: int = 0) -> tuple[Any, list[int]]:
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                self.run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                before = torch.empty(pad, dtype=torch.uint8, device="cuda") if pad else None
                at = self.run()
                del before
        return graph, at


def captures(step: Step) -> dict[str, tuple[Any, list[int]]]:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    found = {f"same {i}": step.capture(pool, stream) for i in range(3)}
    found |= {f"{pad} bytes on": step.capture(pool, stream, pad) for pad in sorted(PADS)}
    found["same 3"] = step.capture(pool, stream)
    found |= {f"pool {i}": step.capture(torch.cuda.graph_pool_handle(), stream) for i in range(POOLS)}
    found |= {f"stream {i}": step.capture(pool, torch.cuda.Stream()) for i in range(STREAMS)}
    return found


def timed(captured: dict[str, Any]) -> dict[str, float]:
    """Median microseconds of a replay."""
    took = measure({name: (graph, lambda: None) for name, graph in captured.items()}, ROUNDS, REPLAYS)
    return {name: milliseconds * 1e3 for name, milliseconds in took.items()}


def by_kernel(graph: Any, times: int = 4) -> dict[str, tuple[float, float]]:
    """Kernel -> (how many, median microseconds)."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:70]].append(event.device_time)
    return {name: (len(own) / times, statistics.median(own)) for name, own in spent.items()}


def pairs(folder: Path) -> dict[int, list[float]]:
    """Microseconds of the pairs of a few rows of an armed engine, by rows: in the shared pool, in pools of
    their own."""
    settings, _ = gpu.shared_settings(None, folder, {})
    sources = gpu.programs(LAYERS, 32, gpu.write_vectors(folder / "v.safetensors", gpu.LLAMA_8B))
    used = [sources[name] for name in gpu.ENGINES["32 sites"]]
    with mock.patch.multiple(graphs, PLACES=POOLS + 1, FASTER=0.0):  # all of them
        llm = gpu.start_engine("armed", settings, used, folder)
    worker = llm.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    places = getattr(worker, WORKER_KEY).adapter.graphs.places
    return {desc.num_tokens: [round(ms * 1e3, 1) for ms in took] for desc, took in places.items()}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    made = captures(Step())
    took = timed({name: graph for name, (graph, _) in made.items()})
    for name, us in took.items():
        print(f"{name:16} {us:8.1f} us  " + " ".join(hex(at) for at in made[name][1]), flush=True)
    ends = {
        name: by_kernel(made[name][0])
        for name in (min(took, key=took.__getitem__), max(took, key=took.__getitem__))
    }
    fast, slow = ends.values()
    print("kernels of the fastest and the slowest:", *ends)
    for name, (n, us) in sorted(fast.items(), key=lambda item: -item[1][0] * item[1][1])[:9]:
        print(f"  {n:5.0f} {us:8.2f} {slow.get(name, (0, 0.0))[1]:8.2f}  {name}", flush=True)
    engine = pairs(out)
    for rows, us in engine.items():
        print(f"{rows} rows, with idle launches and without together: {us} us by pool", flush=True)
    at = {name: addresses for name, (_, addresses) in made.items()}
    told = {"us": took, "at": at, "kernels": ends, "engine": engine}
    (out / "places.json").write_text(json.dumps(told, indent=1))
    os._exit(0)


if __name__ == "__main__":
    main()
