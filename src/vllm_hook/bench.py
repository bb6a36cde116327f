"""``vllm-hook bench``: what observing and steering cost, against plain vLLM and Hugging Face.

Two engines with the same settings stand side by side in one process, one plain and one armed, and
take turns within every round, so that a change of the machine's speed meets both. What is reported
is the median over rounds of the ratio within a round, with its 95 % bootstrap interval.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HEADS_OBSERVED = 8


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``prompt`` tokens each, ``new`` tokens generated for each."""

    name: str
    requests: int
    prompt: int
    new: int


DECODE = Workload("decode: 16 requests, 32 new tokens", 16, 16, 32)
PREFILL = Workload("prefill: 2 prompts of 512 tokens", 2, 512, 1)
SHORT = Workload("short: 64 prompts of 32 tokens", 64, 32, 1)


@dataclass(frozen=True)
class Case:
    """One thing to compare with plain vLLM on a workload. ``bound``: largest ratio we promise on CPU."""

    name: str
    workload: Workload
    hook: Any
    bound: float | None = None


@dataclass
class Row:
    """Times in seconds, one a round; ``ratio`` of medians of paired rounds with its 95 % interval."""

    name: str
    workload: str
    dtype: str
    seconds: list[float] = field(default_factory=list)
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    bound: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


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


def run_bench(
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
    console.print(table(rows, rounds))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"model": model, "rounds": rounds, "setup": setup(), "rows": list(map(asdict, rows))})
    )
    console.print(f"written to [bold]{out}[/bold]")
    return rows


def setup() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


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
        runs["plain vLLM", workload] = _runner(plain, workload, config.vocab_size, None)
    for case in CASES:
        runs[case.name, case.workload] = _runner(hooked, case.workload, config.vocab_size, case.hook)
    if hugging_face:
        for workload in (PREFILL, SHORT):
            runs["Hugging Face, output_attentions", workload] = _hugging_face(
                model, dtype, workload, config.vocab_size
            )
    seconds = _rounds(runs, rounds, dtype, console)
    bounds = {(c.name, c.workload): c.bound for c in CASES}
    rows = []
    for (name, workload), times in seconds.items():
        row = Row(name, workload.name, dtype, times, bound=bounds.get((name, workload)))
        if name != "plain vLLM":
            row.ratio, row.interval = ratio_of(times, seconds["plain vLLM", workload])
        rows.append(row)
    del plain, hooked, runs
    gc.collect()
    return rows


def _engines(model: str, dtype: str, sources: list[dict[str, Any]]) -> tuple[Any, Any]:
    from vllm import LLM

    from .llm import HookLLM

    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    return LLM(model=model, **settings), HookLLM(model, programs=sources, **settings)


def _prompts(workload: Workload, vocabulary: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    high = min(vocabulary, 20_000)
    tokens = random.integers(100 if high > 200 else 10, high, (workload.requests, workload.prompt))
    return [{"prompt_token_ids": row.tolist()} for row in tokens]


def _runner(llm: Any, workload: Workload, vocabulary: int, hook: Any) -> Callable[[], None]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=workload.new, ignore_eos=True, detokenize=False)
    prompts = _prompts(workload, vocabulary)
    extra = {} if hook is None else {"hook": hook}

    def run() -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False, **extra)
        if any(o.hook is not None and o.hook.errors for o in outputs if hook):
            raise RuntimeError("an observation was incomplete")

    return run


def _hugging_face(model: str, dtype: str, workload: Workload, vocabulary: int) -> Callable[[], None]:
    """What people use today: eager attention with ``output_attentions``, one batch of equal lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    ids = torch.tensor([p["prompt_token_ids"] for p in _prompts(workload, vocabulary)])

    def run() -> None:
        with torch.inference_mode():
            for start in range(0, len(ids), 8):
                out = net(ids[start : start + 8], output_attentions=True, logits_to_keep=1)
                torch.stack([a[:, :, -1] for a in out.attentions]).sum()

    return run


def _rounds(
    runs: dict[tuple[str, Workload], Callable[[], None]], rounds: int, dtype: str, console: Console
) -> dict[tuple[str, Workload], list[float]]:
    """Time every run once a round, in an order that turns, after one uncounted round."""
    seconds: dict[tuple[str, Workload], list[float]] = {key: [] for key in runs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{dtype}: rounds", total=(rounds + 1) * len(runs))
        for round_ in range(rounds + 1):
            keys = list(runs) if round_ % 2 == 0 else list(reversed(runs))
            for key in keys:
                start = time.perf_counter()
                runs[key]()
                if round_:
                    seconds[key].append(time.perf_counter() - start)
                progress.advance(task)
    return seconds


def ratio_of(times: list[float], base: list[float]) -> tuple[float, tuple[float, float]]:
    """Median of the ratios of paired rounds, and the 95 % bootstrap interval of that median."""
    ratios = np.asarray(times) / np.asarray(base)
    random = np.random.default_rng(0)
    medians = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))


def table(rows: list[Row], rounds: int) -> Table:
    """Medians and ratios; a ratio above its bound is marked."""
    out = Table(title=f"medians of {rounds} interleaved rounds; ratio to plain vLLM in the same round")
    for name, justify in (
        ("dtype", "left"),
        ("workload", "left"),
        ("case", "left"),
        ("ms", "right"),
        ("ratio", "right"),
        ("95 %", "right"),
        ("bound", "right"),
    ):
        out.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in sorted(rows, key=lambda r: (r.dtype, r.workload)):
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        if row.bound is not None and row.ratio is not None and row.ratio > row.bound:
            ratio = f"[red]{ratio}[/red]"
        interval = "" if row.interval is None else f"{row.interval[0]:.3f}-{row.interval[1]:.3f}"
        bound = "" if row.bound is None else f"{row.bound:.3f}"
        out.add_row(row.dtype, row.workload, row.name, f"{row.median * 1e3:.0f}", ratio, interval, bound)
    return out
