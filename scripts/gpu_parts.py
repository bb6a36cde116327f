"""Single measurements on a GPU for ``gpu_check.py``: bus, profile, idle, cache, tp. Results go to files.

python scripts/gpu_parts.py PART OUT
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm_hook.bench import gpu
from vllm_hook.bench.measure import Workload, prompts


def bus(out: Path) -> None:
    """All prompt rows of all layers where the bus is the limit: wide rows, next to no arithmetic."""
    from vllm import SamplingParams

    from vllm_hook import HookLLM

    thin = {**gpu.LLAMA_8B, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 1}
    thin["head_dim"] = 128
    settings, _ = gpu.shared_settings(None, out / "thin", {})
    Path(settings["model"], "config.json").write_text(json.dumps(thin))
    program = gpu.programs(32, 8, gpu.write_vectors(out / "v.safetensors", gpu.LLAMA_8B))["prompt"]
    llm = HookLLM(programs=[program], **settings)
    work = Workload("bus", 8, 4000, 1)
    tokens, params = prompts(work, 20_000), SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    size = 8 * 4000 * 32 * 4096 * 2
    seconds: dict[str, list[float]] = {"captured": [], "plain": []}
    for _ in range(10):  # pinned memory is new in the first
        for name, hook in (("captured", "prompt"), ("plain", False)):
            begin = time.perf_counter()
            outs = llm.generate(tokens, params, hook=hook, use_tqdm=False)
            seconds[name].append(time.perf_counter() - begin)
            if hook:
                assert not outs[0].hook.errors
                assert outs[0].hook.observed["h"].values.shape == (32, 4000, 4096)
            del outs
    copy = gpu.pinned_copy()
    captured, plain = (statistics.median(seconds[name][2:]) for name in ("captured", "plain"))
    rate = size / captured / 1e9
    found = {"seconds": seconds, "bytes": size, "gb_s": rate, "pinned_copy_gb_s": copy, "share": rate / copy}
    (out / "bus.json").write_text(json.dumps(found))
    print(f"{rate:.1f} GB/s of {copy:.1f}: {rate / copy:.2f}; {captured:.3f} s captured, {plain:.3f} s plain")


def profile(out: Path) -> None:
    """Where the time of decode steps goes, plain and with each program: a table of kernels a step, time in
    which the device had nothing to do, and traces for a closer look (chrome://tracing)."""
    settings, config = gpu.shared_settings(None, out / "profile", {})
    sources = gpu.programs(32, 32, gpu.write_vectors(out / "v.safetensors", gpu.LLAMA_8B))
    plain = gpu.start_engine(gpu.PLAIN, settings, [], out)
    used = [sources[name] for name in gpu.ENGINES["32 sites"]]
    hooked = gpu.start_engine("hooked", settings, used, out)
    cases = [(1, "plain"), *((1, hook) for hook in (False, "stack", "every", "steer3"))]
    cases += [(128, "plain"), *((128, hook) for hook in (False, "stack", "last"))]
    found: dict[str, Any] = {}
    for batch, hook in cases:
        name = f"{hook or 'idle'}-{batch}"
        engine, hook = (plain, None) if hook == "plain" else (hooked, hook)
        found[name] = traced(out / f"trace-{name}.json.gz", engine, batch, config["vocab_size"], hook)
        ours = {key: value for key, value in found[name]["kernels"].items() if "_site_kernel" in key}
        print(name, {key: round(value, 1) for key, value in found[name].items() if key != "kernels"}, ours)
    (out / "profile.json").write_text(json.dumps(found, indent=1))


def traced(trace: Path, engine: Any, batch: int, vocabulary: int, hook: Any) -> dict[str, Any]:
    """A prefill and 16 decode steps of an engine in this process: see :func:`kernels`."""
    import torch
    from torch.profiler import ProfilerActivity

    from vllm_hook.bench.measure import runner

    run = runner(engine, Workload("", batch, 64, 17), vocabulary, hook)
    run()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(trace))
    return kernels(trace, 17)


def kernels(trace: Path, steps: int) -> dict[str, Any]:
    """Microseconds a step: busy, idle between the first and the last kernel, and [count, time] by kernel;
    and medians of a decode step: of its graph, and from one to the next."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    device.sort(key=lambda e: e["ts"])
    spent: dict[str, list[float]] = {}
    idle, end = 0.0, device[0]["ts"]
    for event in device:
        own = spent.setdefault(event["name"][:90], [0.0, 0.0])
        own[0] += 1 / steps
        own[1] += event["dur"] / steps
        idle += max(0.0, event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    whole = end - device[0]["ts"]
    most = sorted(spent.items(), key=lambda item: -item[1][1])[:40]
    found = {"whole": whole / steps, "idle": idle / steps, "kernels": dict(most)}
    launches = {e["args"]["correlation"] for e in events if "GraphLaunch" in e.get("name", "")}
    graphs: dict[int, list[dict[str, Any]]] = {}
    for event in device:
        if (number := event["args"].get("correlation")) in launches:
            graphs.setdefault(number, []).append(event)
    spans = sorted((g[0]["ts"], max(e["ts"] + e["dur"] for e in g)) for g in graphs.values() if len(g) > 100)
    if len(spans) > 1:
        found["graph"] = statistics.median(b - a for a, b in spans)
        found["step"] = statistics.median(b[0] - a[0] for a, b in pairwise(spans))
    return found


def idle(out: Path, each: int = 3) -> None:
    """Armed and idle against plain, three engines of each: how far engines that do the same are apart,
    whether armed ones are apart from that, and what of it is the device's (the graph of a step)."""
    import numpy as np
    from rich.console import Console

    from vllm_hook.bench.measure import interleaved, runner

    settings, config = gpu.shared_settings(None, out / "idle", {"kv_cache_memory_bytes": 5 << 29})
    sources = gpu.programs(32, 32, gpu.write_vectors(out / "v.safetensors", gpu.LLAMA_8B))
    armed = [sources[name] for name in gpu.ENGINES["32 sites"]]
    engines = {}
    found: dict[str, Any] = {}
    for i in range(2 * each):
        kind, hook, used = (gpu.PLAIN, None, []) if i % 2 == 0 else ("armed", False, armed)
        name = f"{kind.split()[0]} {i // 2}"
        engine = engines[name] = gpu.start_engine(kind, settings, used, out)
        own = traced(out / f"trace-{name.replace(' ', '-')}.json.gz", engine, 1, config["vocab_size"], hook)
        found[name] = {key: own.get(key) for key in ("graph", "step", "idle")}
        print(name, found[name], flush=True)
    work = (
        *(gpu.ONE, gpu.MANY, Workload("first token of 64, 5 in turn", 1, 64, 1, times=5)),
        Workload("prefill, 2 prompts of 4,000 tokens", 2, 4000, 1),
    )
    runs = {
        (name, w): runner(engine, w, config["vocab_size"], False if "armed" in name else None)
        for w in work
        for name, engine in engines.items()
    }
    seconds = interleaved(runs, 20, "bfloat16", Console())
    random = np.random.default_rng(0)
    for w in work:
        plain = np.asarray([seconds[f"plain {i}", w] for i in range(each)])  # [engine, round]
        hooked = np.asarray([seconds[f"armed {i}", w] for i in range(each)])
        medians = [np.median(x, axis=1) / np.median(plain) for x in (plain, hooked)]
        ratios = hooked.mean(axis=0) / plain.mean(axis=0)
        low, high = np.percentile(np.median(random.choice(ratios, (2000, len(ratios))), axis=1), [2.5, 97.5])
        found[w.name] = {
            "ratio": float(np.median(ratios)), "interval": [low, high],
            "plain engines": medians[0].tolist(), "armed engines": medians[1].tolist(),
        }  # fmt: skip
        told = [[round(float(m), 4) for m in own] for own in medians]
        print(f"{w.name}: {np.median(ratios):.4f} ({low:.4f}-{high:.4f}); plain {told[0]}, armed {told[1]}")
    (out / "idle.json").write_text(json.dumps(found, indent=1))


def cache(out: Path) -> None:
    """A compile cache made without us is not used with us, and the reverse."""
    root = out / "compile-cache"
    code = """
import os, sys, json
from vllm import LLM, SamplingParams
from vllm_hook import HookLLM
from vllm_hook.engine import control
model, mode = sys.argv[1:]
shared = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8,
    gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, dtype="bfloat16",
    compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]})
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
prompt = [{"prompt_token_ids": [*range(10, 30)]}]
if mode == "plain":
    out = LLM(model, **shared).generate(prompt, params, use_tqdm=False)
    print("RESULT", list(out[0].outputs[0].token_ids))
else:
    llm = HookLLM(model, arm={"resid_post": {"rows": "last"}}, **shared)
    program = {"schema": 1, "name": "p", "observe": {"h": {"site": "resid_post", "layers": "all",
        "positions": "generated"}}}
    llm.load_program(program)
    out = llm.generate(prompt, params, hook="p", use_tqdm=False)
    print("RESULT", list(out[0].outputs[0].token_ids), list(out[0].hook.observed["h"].values.shape))
"""
    model = out / "cache-model"
    model.mkdir(parents=True, exist_ok=True)
    small = {**gpu.LLAMA_8B, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    small |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000}
    (model / "config.json").write_text(json.dumps(small))

    def chain(folder: str, modes: tuple[str, ...]) -> list[tuple[str, str, str]]:
        """Starts one after the other that share a cache."""
        told = []
        env = {**os.environ, "VLLM_CACHE_ROOT": str(root / folder)}
        for mode in modes:
            command = [sys.executable, "-c", code, str(model), mode]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            line = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
            told.append((folder, mode, line[0] if line else done.stderr[-500:]))
            print(*told[-1], flush=True)
        return told

    with ThreadPoolExecutor() as pool:
        chains = pool.map(chain, ("a", "b"), (("plain", "hooked", "plain"), ("hooked", "plain")))
    told = [entry for entries in chains for entry in entries]
    (out / "cache.json").write_text(json.dumps(told, indent=1))
    hooked = [line for _, mode, line in told if mode == "hooked"]
    assert all("[4, 4, 512]" in line for line in hooked), "a hooked engine observed nothing"
    assert all(line.startswith("RESULT") for _, _, line in told)


def tp(out: Path) -> None:
    """Two ranks: head sites joined, edits the same on both, attention summed, results once."""
    test = Path(__file__).parents[1] / "tests" / "engine" / "test_tensor_parallel.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    sys.exit(done.returncode)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"bus": bus, "profile": profile, "idle": idle, "cache": cache, "tp": tp}[sys.argv[1]](folder)
    os._exit(0)
