"""The bench on a GPU: engines with CUDA graphs side by side on one device, against plain vLLM.

The default model has the shapes of Llama-3.1-8B and dummy weights: costs do not depend on values.
Every engine gets the same settings and the same KV cache; armed engines differ in what is armed, as
they would in use. Each runs in a process of its own, as vLLM does by default, except for the capture
of whole prompts: gigabytes that leave the device are for callers in the same process. A second plain
engine shows how far two engines that do the same are apart on the machine. If the package
hotwire-vllm is installed, it is measured too, for scale.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from .measure import Case, Row, Workload, interleaved, runner, table, to_rows, write

PLAIN = "plain vLLM"
TWIN = "plain vLLM, an engine started before"
EAGER = "plain vLLM, eager"
PEER = "hotwire-vllm"
IN_PROCESS = "prompt rows"
ONE = Workload("decode, batch 1", 1, 64, 64)
MANY = Workload("decode, batch 128", 128, 64, 64)
LONG = Workload("prefill, 8 prompts of 4,000 tokens", 8, 4000, 1)
FIRST = Workload("time to first token, 4,000 tokens, 5 in turn", 1, 4000, 1, times=5)
#: What a request costs once: the host launches short prompts piece by piece, and the device waits for it.
SHORT = Workload("time to first token, 64 tokens, 16 in turn", 1, 64, 1, times=16)

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def programs(layers: int, heads: int, vectors: Path) -> dict[str, dict[str, Any]]:
    """What the cases use, by name."""
    three = [layers // 4, layers // 2, 3 * layers // 4]
    spread = range(layers // 4, layers // 4 + max(1, min(20, layers // 2)))
    picked = [[layer, head] for head in range(0, heads, 7) for layer in spread][:41]
    stream = {"site": "resid_post", "layers": "all"}
    add = {"method": "add", "vector": f"{vectors}#a", "strength": 0.1}
    clamp = {"method": "clamp", "vector": f"{vectors}#b", "target": 0.2}
    mass = {"site": "attention_mass", "heads": picked, "rows": "last_prompt", "keys": ["head", "tail"]}
    probe = {"site": "resid_post", "layers": [layers // 2], "positions": "generated"}
    spans = {"head": {"tokens": [0, 2000]}, "tail": {"tokens": [2000, 3990]}}
    found: dict[str, dict[str, Any]] = {
        "steer3": {"intervene": {"e": {"site": "resid_post", "layers": three, **add}}},
        "stack": {"intervene": {"a": {**stream, **add}, "c": {**stream, **clamp}}},
        "last": {"observe": {"h": {**stream, "positions": "last_prompt"}}},
        "every": {"observe": {"h": {**stream, "positions": "generated"}}},
        "prompt": {"observe": {"h": {**stream, "positions": "prompt"}}},
        "mass": {"spans": spans, "observe": {"m": mass}},
        "probe": {"observe": {"p": {**probe, "reduce": {"projection": f"{vectors}#a"}}}},
    }
    return {name: {"schema": 1, "name": name, **parts} for name, parts in found.items()}


#: Engine -> programs that it starts with, which arm what they need.
ENGINES: dict[str, list[str]] = {
    "32 sites": ["last", "every", "stack", "steer3"],
    "32 taps": ["last", "every"],
    "few sites": ["steer3", "mass", "probe"],
    "prompt rows": ["prompt"],
}
#: (engine, case)
CASES = (
    ("32 taps", Case("32 taps armed, idle", ONE, False)),
    ("32 taps", Case("32 taps armed, idle", MANY, False)),
    ("32 taps", Case("32 taps armed, idle", LONG, False)),
    ("few sites", Case("few sites armed, idle", ONE, False)),
    ("few sites", Case("few sites armed, idle", MANY, False)),
    ("few sites", Case("few sites armed, idle", LONG, False)),
    ("few sites", Case("few sites armed, idle", FIRST, False)),
    ("few sites", Case("few sites armed, idle", SHORT, False)),
    ("prompt rows", Case("prompt rows armed, idle", LONG, False)),
    ("32 sites", Case("32 sites armed, idle", ONE, False, 1.005)),
    ("32 sites", Case("32 sites armed, idle", MANY, False, 1.005)),
    ("32 sites", Case("32 sites armed, idle", LONG, False, 1.005)),
    ("32 sites", Case("32 sites armed, idle", SHORT, False)),
    ("few sites", Case("all steered at 3 layers", SHORT, "steer3")),
    ("few sites", Case("all steered at 3 layers", ONE, "steer3", 1.01)),
    ("few sites", Case("all steered at 3 layers", MANY, "steer3", 1.01)),
    ("32 sites", Case("all steered at 3 layers, 32 armed", ONE, "steer3")),
    ("32 sites", Case("all steered at 3 layers, 32 armed", MANY, "steer3")),
    ("32 sites", Case("two stacked edits at 32 layers", ONE, "stack", 1.02)),
    ("32 sites", Case("two stacked edits at 32 layers", MANY, "stack", 1.02)),
    ("32 taps", Case("last prompt token of 32 layers", ONE, "last", 1.01)),
    ("32 taps", Case("last prompt token of 32 layers", MANY, "last", 1.01)),
    ("32 taps", Case("last prompt token of 32 layers", LONG, "last", 1.01)),
    ("32 taps", Case("every generated token of 32 layers", ONE, "every", 1.01)),
    ("32 sites", Case("two stacked edits at 32 layers", SHORT, "stack")),
    ("32 sites", Case("last prompt token of 32 layers, edits armed too", SHORT, "last")),
    ("32 sites", Case("last prompt token of 32 layers, edits armed too", ONE, "last")),
    ("32 sites", Case("last prompt token of 32 layers, edits armed too", MANY, "last")),
    ("32 sites", Case("last prompt token of 32 layers, edits armed too", LONG, "last")),
    ("32 sites", Case("every generated token of 32 layers, edits armed too", ONE, "every")),
    ("few sites", Case("attention mass of 41 heads", FIRST, "mass", 1.01)),
    ("few sites", Case("attention mass of 41 heads", LONG, "mass", 1.01)),
    ("few sites", Case("probe on every generated token", SHORT, "probe")),
    ("few sites", Case("probe on every generated token", ONE, "probe", 1.005)),
    ("few sites", Case("probe on every generated token", MANY, "probe", 1.005)),
    ("prompt rows", Case("all prompt tokens of 32 layers", LONG, "prompt", 1.10)),
)


def run_gpu(
    model: str | None,
    rounds: int,
    out: Path,
    console: Console | None = None,
    only: str = "",
    settings: dict[str, Any] | None = None,
) -> list[Row]:
    """Measure the cases of the engines named in ``only`` (default: all but "prompt rows", which needs a
    call of its own); print a table, write JSON to ``out``. ``model``: a folder or id (default:
    Llama-3.1-8B shapes with dummy weights). "eager" in ``only`` adds plain vLLM without graphs."""
    console = console or Console()
    names = [name.strip() for name in only.split(",") if name.strip()]
    engines = {n: own for n, own in ENGINES.items() if (n in names if names else n != IN_PROCESS)}
    if IN_PROCESS in engines:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process asks the device, too
    out.parent.mkdir(parents=True, exist_ok=True)
    base, config = shared_settings(model, out.parent, settings or {})
    vectors = write_vectors(out.parent / "bench-vectors.safetensors", config)
    sources = programs(int(config["num_hidden_layers"]), int(config["num_attention_heads"]), vectors)
    others = [EAGER] if "eager" in names else []
    if "few sites" in engines and find_spec("hotwire") is not None:
        others.append(PEER)
    started: dict[str, Any] = {}
    starts = {}
    # The first engine of a device may be faster than any that starts later, so it is not the base.
    for name in (TWIN, *list(engines)[:1], PLAIN, *list(engines)[1:], *others):
        begin = time.perf_counter()
        used = [sources[p] for p in engines.get(name, [])]
        try:
            started[name] = start_engine(name, base, used, vectors.parent)
        except Exception as error:
            if name != PEER:
                raise
            console.print(f"{PEER} does not start here: {str(error)[:300]}")
            continue
        starts[name] = round(time.perf_counter() - begin, 1)
        console.print(f"{name}: started in {starts[name]:.0f} s, {_used():.1f} GiB in use on the device")
    runs = _runs(started, [(e, c) for e, c in CASES if e in engines], config)
    seconds = interleaved(runs, rounds, "bfloat16", console)
    bounds = {(c.name, c.workload): c.bound for _, c in CASES}
    idle = {c.name: f"{engine} armed, idle" for engine, c in CASES if c.hook is not False}
    rows = to_rows(seconds, PLAIN, bounds, "bfloat16", idle)
    console.print(table(rows))
    copy = pinned_copy()
    console.print(f"pinned copy: {copy:.1f} GB/s")
    write(
        out, rows, model=model or "Llama-3.1-8B shapes, dummy weights", rounds=rounds, started=starts,
        pinned_copy_gb_s=copy, bytes_held={name: _held(started[name]) for name in engines},
        settings={k: str(v) for k, v in base.items()},
    )  # fmt: skip
    console.print(f"written to [bold]{out}[/bold]")
    return rows


def _runs(
    started: dict[str, Any], cases: list[tuple[str, Case]], config: dict[str, Any]
) -> dict[tuple[str, Workload], Callable[[], None]]:
    vocabulary, layers = int(config["vocab_size"]), int(config["num_hidden_layers"])
    runs: dict[tuple[str, Workload], Callable[[], None]] = {}
    for workload in dict.fromkeys(case.workload for _, case in cases):
        for name in (PLAIN, TWIN):
            runs[name, workload] = runner(started[name], workload, vocabulary, None)
    for engine, case in cases:
        runs[case.name, case.workload] = runner(started[engine], case.workload, vocabulary, case.hook)
    for workload in (ONE, MANY):
        if EAGER in started:
            runs[EAGER, workload] = runner(started[EAGER], workload, vocabulary, None)
        if PEER in started:
            peer, where = started[PEER], (layers // 4, layers // 2, 3 * layers // 4)
            spec = json.dumps([{"id": "a", "layer": layer, "scale": 0.1} for layer in where])
            runs[f"{PEER}, idle", workload] = runner(peer, workload, vocabulary, None)
            runs[f"{PEER}, all steered at 3 layers", workload] = runner(
                peer, workload, vocabulary, None, {"hotwire": spec}
            )
    return runs


def shared_settings(
    model: str | None, folder: Path, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine arguments that all engines share, and the model's configuration."""
    shared: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 6 << 30,
        "gpu_memory_utilization": 0.17,
    }
    if model is None:
        path = folder / "llama-8b-shapes"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(LLAMA_8B))
        dummy = {"model": str(path), "load_format": "dummy", "skip_tokenizer_init": True}
        return {**dummy, **shared, **settings}, LLAMA_8B
    from transformers import AutoConfig

    return {"model": model, **shared, **settings}, AutoConfig.from_pretrained(model).to_dict()


def write_vectors(path: Path, config: dict[str, Any]) -> Path:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    vectors = {name: torch.randn(int(config["hidden_size"])) for name in ("a", "b")}
    save_file(vectors, path)
    torch.save(vectors["a"], path.parent / "a.pt")  # for the peer
    return path


def start_engine(name: str, settings: dict[str, Any], sources: list[dict[str, Any]], vectors: Path) -> Any:
    from ..llm import HookLLM, plain_llm

    peer = {"HOTWIRE_VECTORS": str(vectors / "a.pt"), "VLLM_PLUGINS": "hotwire"} if name == PEER else {}
    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": "vllm_hook", **peer}):
        if name in (PLAIN, TWIN, EAGER, PEER):
            return plain_llm(**settings, enforce_eager=name == EAGER)
        return HookLLM(programs=sources, **settings)


def _held(llm: Any) -> int:
    """Bytes that arming took on the device."""
    return int(llm.sites()["bytes"])


def _used() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def pinned_copy(size: int = 1 << 30, times: int = 5) -> float:
    """GB/s of a plain copy from the device to pinned memory: what the bus gives."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return times * size / (time.perf_counter() - begin) / 1e9
