"""Single measurements on a GPU for ``gpu_check.py``: bus, profile, cache, tp. Results go to files.

python scripts/gpu_parts.py PART OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
    for _ in range(7):
        for name, hook in (("captured", "prompt"), ("plain", False)):
            begin = time.perf_counter()
            outs = llm.generate(tokens, params, hook=hook, use_tqdm=False)
            seconds[name].append(time.perf_counter() - begin)
            if hook:
                assert not outs[0].hook.errors
                assert outs[0].hook.observed["h"].values.shape == (32, 4000, 4096)
            del outs
    copy = gpu.pinned_copy()
    captured, plain = sorted(seconds["captured"][2:])[2], sorted(seconds["plain"][2:])[2]
    rate = size / captured / 1e9
    found = {"seconds": seconds, "bytes": size, "gb_s": rate, "pinned_copy_gb_s": copy, "share": rate / copy}
    (out / "bus.json").write_text(json.dumps(found))
    print(f"{rate:.1f} GB/s of {copy:.1f}: {rate / copy:.2f}; {captured:.3f} s captured, {plain:.3f} s plain")


def profile(out: Path) -> None:
    """Kernels of a decode step, plain and steered, with what is ours; and that no buffer is cloned."""
    import torch
    from vllm import SamplingParams

    from vllm_hook import HookLLM

    settings, _ = gpu.shared_settings(None, out / "profile", {})
    sources = gpu.programs(32, 32, gpu.write_vectors(out / "v.safetensors", gpu.LLAMA_8B))
    llm = HookLLM(programs=[sources[n] for n in ("stack", "last", "every")], **settings)
    found: dict[str, Any] = {}
    for name, hook in (("idle", False), ("stack", "stack"), ("every", "every")):
        params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, detokenize=False)
        tokens = prompts(Workload("", 1, 64, 33), 20_000)
        llm.generate(tokens, params, hook=hook, use_tqdm=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            llm.generate(tokens, params, hook=hook, use_tqdm=False)
            torch.cuda.synchronize()
        spent = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        found[name] = [(e.key[:100], e.count, round(e.self_device_time_total, 1)) for e in spent[:40]]
        ours = [e for e in found[name] if any(part in e[0] for part in ("_site_kernel", "emcpy", "clone"))]
        print(name, "33 steps:", [(key[:40], count, f"{time_ / count:.1f} us") for key, count, time_ in ours])
    (out / "profile.json").write_text(json.dumps(found, indent=1))


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
    told = []
    for folder, mode in (("a", "plain"), ("a", "hooked"), ("a", "plain"), ("b", "hooked"), ("b", "plain")):
        env = {**os.environ, "VLLM_CACHE_ROOT": str(root / folder)}
        done = subprocess.run(
            [sys.executable, "-c", code, str(model), mode], env=env, capture_output=True, text=True
        )
        line = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
        told.append((folder, mode, line[0] if line else done.stderr[-500:]))
    (out / "cache.json").write_text(json.dumps(told, indent=1))
    for entry in told:
        print(*entry)
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
    {"bus": bus, "profile": profile, "cache": cache, "tp": tp}[sys.argv[1]](folder)
    os._exit(0)
