"""The bench on CPU: observing and steering against plain vLLM and against Hugging Face.

Two engines with the same settings stand side by side in one process, one plain and one armed.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from .measure import Case, Row, Workload, interleaved, prompts, runner, table, to_rows, write

PLAIN = "plain vLLM"
HEADS_OBSERVED = 8


DECODE = Workload("decode: 16 requests, 32 new tokens", 16, 16, 32)
PREFILL = Workload("prefill: 2 prompts of 512 tokens", 2, 512, 1)
SHORT = Workload("short: 64 prompts of 32 tokens", 64, 32, 1)


def programs(layers: int, heads: int, vector: Path) -> list[dict[str, Any]]:
    """What the bench observes (last token and all prompt tokens of all layers, attention mass of 8
    heads) and changes (a vector added at three layers, at every position)."""
    spans = {"instruction": {"tokens": [0, 20]}, "data": {"tokens": [20, 31]}}
    picked = [[layers * (2 * i + 1) // (2 * HEADS_OBSERVED), i % heads] for i in range(HEADS_OBSERVED)]
    mass = {"site": "attention_mass", "heads": picked, "rows": "last_prompt", "keys": ["instruction", "data"]}
    tracker = {
        "analyzer": "attention_tracker",
        "observe": "mass",
        "options": {"instruction": "instruction", "data": "data"},
    }
    stream = {"site": "resid_post", "layers": "all"}
    steer = {
        "site": "resid_post",
        "layers": [layers // 4, layers // 2, 3 * layers // 4],
        "method": "add",
        "vector": str(vector),
        "strength": 0.1,
    }
    return [
        {
            "schema": 1,
            "name": "last",
            "observe": {"h": {**stream, "positions": ["last_prompt", "generated"]}},
        },
        {"schema": 1, "name": "prompt", "observe": {"h": {**stream, "positions": "prompt"}}},
        {"schema": 1, "name": "mass", "spans": spans, "observe": {"mass": mass}},
        {
            "schema": 1,
            "name": "tracker",
            "spans": spans,
            "observe": {"mass": mass},
            "analyze": {"t": tracker},
        },
        {"schema": 1, "name": "steer", "intervene": {"e": steer}},
    ]


CASES = (
    Case("armed, idle", DECODE, False, 1.03),
    Case("armed, idle", PREFILL, False, 1.03),
    Case("armed, idle", SHORT, False, 1.03),
    Case("last token of all layers, every step", DECODE, "last", 1.05),
    Case("all 16 requests steered at 3 layers", DECODE, "steer", 1.05),
    Case("3 of 16 requests observed (last token, all layers)", DECODE, ["last"] * 3 + [False] * 13, 1.05),
    Case("all prompt tokens of all layers", PREFILL, "prompt"),
    Case("attention mass of 8 heads, last prompt token", PREFILL, "mass", 1.05),
    Case("Attention Tracker scores", SHORT, "tracker", 1 / 0.95),
)


def run_cpu(
    model: str,
    dtypes: list[str],
    rounds: int,
    out: Path,
    hugging_face: bool = True,
    console: Console | None = None,
) -> list[Row]:
    """Measure every case in every dtype; print a table and write JSON to ``out``."""
    console = console or Console()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows: list[Row] = []
    for dtype in dtypes:
        rows += _bench_dtype(model, dtype, rounds, hugging_face, console)
    console.print(table(rows))
    write(out, rows, model=model, rounds=rounds)
    console.print(f"written to [bold]{out}[/bold]")
    return rows


def _bench_dtype(model: str, dtype: str, rounds: int, hugging_face: bool, console: Console) -> list[Row]:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    started = console.status(f"{dtype}: starting a plain and an armed engine")
    with started, tempfile.TemporaryDirectory() as folder:
        vector = Path(folder) / "vector.safetensors"
        save_file({"v": torch.randn(config.hidden_size)}, vector)
        sources = programs(config.num_hidden_layers, config.num_attention_heads, vector)
        plain, hooked = _engines(model, dtype, sources)
    runs: dict[tuple[str, Workload], Callable[[], None]] = {}
    for workload in (DECODE, PREFILL, SHORT):
        runs[PLAIN, workload] = runner(plain, workload, config.vocab_size, None)
    for case in CASES:
        runs[case.name, case.workload] = runner(hooked, case.workload, config.vocab_size, case.hook)
    if hugging_face:
        for workload in (PREFILL, SHORT):
            runs["Hugging Face, output_attentions", workload] = _hugging_face(
                model, dtype, workload, config.vocab_size
            )
    seconds = interleaved(runs, rounds, dtype, console)
    rows = to_rows(seconds, PLAIN, {(c.name, c.workload): c.bound for c in CASES}, dtype)
    del plain, hooked, runs
    gc.collect()
    return rows


def _engines(model: str, dtype: str, sources: list[dict[str, Any]]) -> tuple[Any, Any]:
    from ..llm import HookLLM, plain_llm

    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    return plain_llm(model=model, **settings), HookLLM(model, programs=sources, **settings)


def _hugging_face(model: str, dtype: str, workload: Workload, vocabulary: int) -> Callable[[], None]:
    """What people use today: eager attention with ``output_attentions``, one batch of equal lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    ids = torch.tensor([p["prompt_token_ids"] for p in prompts(workload, vocabulary)])

    def run() -> None:
        with torch.inference_mode():
            for start in range(0, len(ids), 8):
                out = net(ids[start : start + 8], output_attentions=True, logits_to_keep=1)
                torch.stack([a[:, :, -1] for a in out.attentions]).sum()

    return run
