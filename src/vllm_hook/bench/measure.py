"""Timing of engines that take turns, and what is made of the times.

What is reported is the median over rounds of the ratio within a round, with its 95 % bootstrap
interval: a change of the machine's speed meets both sides of a round.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``prompt`` tokens each, ``new`` tokens generated for each; all of it ``times``
    times in a run, where once is too short to be told apart."""

    name: str
    requests: int
    prompt: int
    new: int
    times: int = 1


@dataclass(frozen=True)
class Case:
    """One thing to compare with plain vLLM on a workload, by name of engine and of what requests use.
    ``bound``: largest ratio we promise."""

    name: str
    workload: Workload
    hook: Any
    bound: float | None = None


@dataclass
class Row:
    """Times in seconds, one a round; ``ratio`` to plain vLLM, medians over paired rounds, with its 95 %
    interval; ``to_idle`` likewise to the same engine when no request uses a program, which leaves out how
    far two engines that do the same are apart."""

    name: str
    workload: str
    dtype: str
    seconds: list[float] = field(default_factory=list)
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    bound: float | None = None
    to_idle: float | None = None
    to_idle_interval: tuple[float, float] | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def setup() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    import torch

    from ..engine.compat import vllm_version

    return {
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def prompts(workload: Workload, vocabulary: int) -> list[dict[str, Any]]:
    """Random token ids, the same for every engine."""
    numbers = np.random.default_rng(0)
    high = min(vocabulary, 20_000)
    tokens = numbers.integers(100 if high > 200 else 10, high, (workload.requests, workload.prompt))
    return [{"prompt_token_ids": row.tolist()} for row in tokens]


def runner(
    llm: Any, workload: Workload, vocabulary: int, hook: Any, extra_args: dict[str, Any] | None = None
) -> Callable[[], None]:
    """One run of a workload on an engine; ``hook`` as ``generate`` takes it (None: plain vLLM)."""
    from ..llm import greedy

    params = greedy(workload.new, ignore_eos=True, detokenize=False, extra_args=extra_args)
    tokens = prompts(workload, vocabulary)
    extra = {} if hook is None else {"hook": hook}

    def run() -> None:
        for _ in range(workload.times):
            outputs = llm.generate(tokens, params, use_tqdm=False, **extra)
            if hook and any(o.hook is not None and o.hook.errors for o in outputs):
                raise RuntimeError("an observation was incomplete")

    return run


def interleaved(
    runs: Mapping[tuple[str, Workload], Callable[[], None]], rounds: int, what: str, console: Console
) -> dict[tuple[str, Workload], list[float]]:
    """Time every run once a round, in an order of its own (what ran before leaves a warmer or cooler
    device), after one uncounted round. When it is interrupted, what the full rounds so far gave is
    returned."""
    order = random.Random(0)
    seconds: dict[tuple[str, Workload], list[float]] = {key: [] for key in runs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{what}: rounds", total=(rounds + 1) * len(runs))
        try:
            for round_ in range(rounds + 1):
                keys = list(runs)
                order.shuffle(keys)
                for key in keys:
                    start = time.perf_counter()
                    runs[key]()
                    if round_:
                        seconds[key].append(time.perf_counter() - start)
                    progress.advance(task)
        except KeyboardInterrupt:
            full = min(map(len, seconds.values()))
            if full < 2:
                raise
            console.print(f"interrupted after {full} of {rounds} rounds")
            return {key: times[:full] for key, times in seconds.items()}
    return seconds


def to_rows(
    seconds: Mapping[tuple[str, Workload], list[float]],
    base: str,
    bounds: Mapping[tuple[str, Workload], float | None],
    dtype: str,
    idle: Mapping[str, str] | None = None,
) -> list[Row]:
    """Times to rows, with the ratio to the case ``base`` on the same workload, and to the case of the same
    engine in which it idles (``idle``: case -> that case)."""
    rows = []
    for (name, workload), times in seconds.items():
        row = Row(name, workload.name, dtype, times, bound=bounds.get((name, workload)))
        if name != base:
            row.ratio, row.interval = ratio_of(times, seconds[base, workload])
        own = (idle or {}).get(name), workload
        if own in seconds:
            row.to_idle, row.to_idle_interval = ratio_of(times, seconds[own])  # type: ignore[index]
        rows.append(row)
    return rows


def write(path: Path, rows: list[Row], **more: Any) -> None:
    """The figures as JSON, with the set-up that they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**more, "setup": setup(), "rows": list(map(asdict, rows))}, indent=1))


def ratio_of(times: list[float], base: list[float]) -> tuple[float, tuple[float, float]]:
    """Median of the ratios of paired rounds, and the 95 % bootstrap interval of that median."""
    ratios = np.asarray(times) / np.asarray(base)
    resample = np.random.default_rng(0)
    medians = np.median(resample.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))


def table(rows: list[Row]) -> Table:
    """Medians and ratios; a ratio above its bound is marked."""
    out = Table(
        title=f"medians of {len(rows[0].seconds)} interleaved rounds; ratio to plain vLLM in the same round"
    )
    for name, justify in (
        ("dtype", "left"),
        ("workload", "left"),
        ("case", "left"),
        ("ms", "right"),
        ("ratio", "right"),
        ("95 %", "right"),
        ("bound", "right"),
        *((("to idle", "right"), ("95 % ", "right")) if any(row.to_idle for row in rows) else ()),
    ):
        out.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in sorted(rows, key=lambda r: (r.dtype, r.workload)):
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        if row.bound is not None and row.ratio is not None and row.ratio > row.bound:
            ratio = f"[red]{ratio}[/red]"
        interval, of_idle = (
            "" if i is None else f"{i[0]:.3f}-{i[1]:.3f}" for i in (row.interval, row.to_idle_interval)
        )
        bound = "" if row.bound is None else f"{row.bound:.3f}"
        more = ["" if row.to_idle is None else f"{row.to_idle:.3f}", of_idle][: len(out.columns) - 7]
        out.add_row(
            row.dtype, row.workload, row.name, f"{row.median * 1e3:.1f}", ratio, interval, bound, *more
        )
    return out
