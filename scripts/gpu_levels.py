"""How the graph of one and the same step varies from capture to capture, and the host's share of a step.

    python scripts/gpu_levels.py OUT

A plain engine and one with 32 armed sites, in this process. Full graphs of 1 and 128 tokens are captured
several times, each time in memory of its own (the last twice without early launch of sites), and replayed
back to back between two events: no profiler, no host in between. Captures of the same work may differ by
where their activations come to lie, so what a site costs shows between graphs of the same engine, and only
over several captures. Then whole runs, with the time that the engine's thread waits for the device taken
off: what is left is the host's share of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from gpu_forms import Forms, measure
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_hook.bench import gpu
from vllm_hook.bench.measure import Workload, runner
from vllm_hook.engine.worker import WORKER_KEY
from vllm_hook.ops import triton_site

SIZES, CAPTURES, REPLAYS, ROUNDS = (1, 128), 5, 20, 9
EARLY = triton_site.EARLY_LAUNCH_ROWS
capture = ModelCudaGraphManager.capture


def capture_again(self: Any, *args: Any, **kwargs: Any) -> None:
    """vLLM's own capture, and some more of the sizes in question, kept on the manager: a list for each
    time it was called, which is twice on an armed engine (with sites, without)."""
    capture(self, *args, **kwargs)
    if self._max_full_descs_to_capture is not None:  # a memory profile
        return
    kept, descs, pool = self.graphs, self._capture_descs, self.pool
    again = [{size: graph for d, graph in kept.items() if (size := d.num_tokens) in SIZES and full(d)}]
    self._capture_descs = {
        CUDAGraphMode.FULL: [d for d in descs[CUDAGraphMode.FULL] if d.num_tokens in SIZES]
    }
    for number in range(CAPTURES + 2):
        self.graphs, self.pool = {}, torch.cuda.graph_pool_handle()
        with mock.patch.object(triton_site, "EARLY_LAUNCH_ROWS", EARLY if number < CAPTURES else 0):
            capture(self, *args, **kwargs)
        again.append({d.num_tokens: graph for d, graph in self.graphs.items()})
    self.graphs, self._capture_descs, self.pool = kept, descs, pool
    self.captured_again = [*getattr(self, "captured_again", []), again]


def full(desc: Any) -> bool:
    return bool(desc.cg_mode == CUDAGraphMode.FULL)


def worker(llm: Any) -> Any:
    engine = getattr(llm, "llm", llm).llm_engine
    return engine.engine_core.engine_core.model_executor.driver_worker.worker


def replays(out: dict[str, Any], plain: Any, armed: Any) -> None:
    """Median microseconds of a replay: [kind][size] -> one for each capture, the engine's own first."""
    hook = getattr(worker(armed), WORKER_KEY)
    loads = {
        "idle": lambda size: hook.bank.clear(),
        "two edits": lambda size: hook.bank.load(None, Forms.plan(SimpleNamespace(tokens=size), 2)),
    }
    [plain_sets] = worker(plain).model_runner.cudagraph_manager.captured_again
    with_sites, without = worker(armed).model_runner.cudagraph_manager.captured_again
    kinds = [("plain", plain_sets, "idle"), ("armed, no launches", without, "idle")]
    kinds += [(f"armed, {name}", with_sites, name) for name in loads]
    graphs = {
        (kind, size, number): (graph, partial(loads[load], size))
        for kind, sets, load in kinds
        for number, captured in enumerate(sets)
        for size, graph in captured.items()
    }
    for (kind, size, _), milliseconds in measure(graphs, ROUNDS, REPLAYS).items():
        out.setdefault(kind, {}).setdefault(size, []).append(round(milliseconds * 1e3, 1))
    hook.bank.clear()


def host(out: dict[str, Any], plain: Any, armed: Any, late: Any, vocabulary: int) -> None:
    """Milliseconds of a run of 64 tokens (or what its name says), and what of them the host did not wait for
    the device. ``late``: an armed engine whose sites are not started early."""
    waited = 0.0
    synchronize = torch.cuda.Event.synchronize

    def timed(event: Any) -> None:
        nonlocal waited
        begin = time.perf_counter()
        synchronize(event)
        waited += time.perf_counter() - begin

    cases: list[tuple[str, Any, int, Any]] = []  # name, engine, batch, hook
    for batch, hooks in (
        (1, ("steer3", "stack", "every", "probe")),
        (128, ("steer3", "stack", "last", "probe")),
    ):
        cases += [(f"plain at {batch}", plain, batch, None), (f"idle at {batch}", armed, batch, False)]
        cases += [(f"{hook} at {batch}", armed, batch, hook) for hook in hooks]
    cases += [(f"{hook or 'idle'} at 1, not early", late, 1, hook) for hook in (False, "steer3", "stack")]
    runs = {
        name: runner(engine, Workload("", batch, 64, 64), vocabulary, hook)
        for name, engine, batch, hook in cases
    }
    for name, engine, hook in (("plain", plain, None), ("idle", armed, False), ("steer3", armed, "steer3")):
        runs[f"{name} at 1, 1 token"] = runner(engine, Workload("", 1, 64, 1), vocabulary, hook)
        runs[f"{name} at 1, 2 tokens"] = runner(engine, Workload("", 1, 64, 2), vocabulary, hook)
        runs[f"{name} at 1, 256 tokens"] = runner(engine, Workload("", 1, 64, 256), vocabulary, hook)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    torch.cuda.Event.synchronize = timed
    for number in range(ROUNDS):
        for name, run in runs.items():
            waited, begin = 0.0, time.perf_counter()
            run()
            whole = time.perf_counter() - begin
            if number:
                found[name].append((whole * 1e3, (whole - waited) * 1e3))
    torch.cuda.Event.synchronize = synchronize
    for name, own in found.items():
        whole, busy = (round(statistics.median(x), 1) for x in zip(*own, strict=True))
        out[name] = {"run_ms": whole, "host_ms": busy}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    ModelCudaGraphManager.capture = capture_again
    settings, config = gpu.shared_settings(None, folder, {})
    sources = gpu.programs(32, 32, gpu.write_vectors(folder / "v.safetensors", gpu.LLAMA_8B))
    plain = gpu.start_engine(gpu.PLAIN, settings, [], folder)
    names = [*gpu.ENGINES["32 sites"], "probe"]
    armed = gpu.start_engine("armed", settings, [sources[name] for name in names], folder)
    with mock.patch.object(triton_site, "EARLY_LAUNCH_ROWS", 0):
        late = gpu.start_engine("armed", settings, [sources[name] for name in names], folder)
    found: dict[str, Any] = {"replay_us": {}, "host": {}}
    replays(found["replay_us"], plain, armed)
    for kind, sizes in found["replay_us"].items():
        for size, own in sizes.items():
            print(f"{kind:20} {size:4} rows: {own} median {statistics.median(own):.1f}", flush=True)
    host(found["host"], plain, armed, late, config["vocab_size"])
    for case, own in found["host"].items():
        print(f"{case:16} {own}", flush=True)
    (folder / "levels.json").write_text(json.dumps(found, indent=1))
    os._exit(0)


if __name__ == "__main__":
    main()
