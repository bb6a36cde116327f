"""Find the attention heads that show prompt injection (Attention Tracker, arXiv 2411.00348).

:func:`build_heads` is what ``vllm-hook build heads`` does; the functions above it are pure arithmetic on
attention shares. Shapes: N prompts, L layers, H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from .. import jsonl
from ..analyzers.attention_tracker import calibrate, focus
from ..errors import HookError
from ._torchvision import hide_broken_torchvision
from .artifact import provenance, publish
from .backend import Needs
from .job import CHUNK, Job
from .prompts import check_lengths, render, tracker_prompt
from .records import DATA_MARK, Injection, read_injections, split, two_parts

__all__ = [
    "DATA_MARK",
    "Guard",
    "HeadChoice",
    "auroc",
    "build_guard",
    "build_heads",
    "candidate_scores",
    "head_mean",
    "hide_broken_torchvision",
    "is_normal",
    "packaged",
    "read_records",
    "render",
    "select_heads",
    "top_heads",
]

Head = tuple[int, int]
Record = Mapping[str, str]
#: Styles of the finding set whose means the threshold lies between.
LENGTH_MATCHED = ("normal_long", "ignore_long")


@dataclass(frozen=True)
class HeadChoice:
    """Chosen heads as ``(layer, head)`` in layer order.

    ``k`` is the one that was asked for. ``fell_back``: no head had a positive score at that ``k``, so
    these are the best by the k = 1 score. ``scores`` [L, H] are those that the choice was made by, and
    ``kept`` counts the heads with a positive score at ``k``.
    """

    heads: list[Head]
    k: float
    fell_back: bool
    kept: int
    scores: torch.Tensor

    def describe(self) -> str:
        if self.fell_back:
            return (
                f"no head has a positive candidate score at k={self.k:g}; "
                f"fell back to the top {len(self.heads)} by the k=1 score"
            )
        return f"the {self.kept} heads with a positive candidate score at k={self.k:g}"


def candidate_scores(normal: torch.Tensor, attacked: torch.Tensor, k: float) -> torch.Tensor:
    """``(mean_N - k std_N) - (mean_A + k std_A)`` per head, with the population std.

    ``normal`` [N, L, H] and ``attacked`` [M, L, H] are shares of attention on the instruction, in
    0..1; returns float64 [L, H]. Positive: the two sets stay apart by k standard deviations each.
    """
    if normal.dim() != 3 or attacked.dim() != 3 or normal.shape[1:] != attacked.shape[1:]:
        raise HookError(f"need two [N, L, H] tensors, got {list(normal.shape)} and {list(attacked.shape)}")
    if not len(normal) or not len(attacked):
        raise HookError("need at least one normal and one attacked prompt")
    n, a = normal.double(), attacked.double()
    low = n.mean(0) - k * n.std(0, correction=0)
    high = a.mean(0) + k * a.std(0, correction=0)
    return low - high


def select_heads(
    normal: torch.Tensor, attacked: torch.Tensor, k: float = 4, fallback_top: int = 8
) -> HeadChoice:
    """Keep the heads with a positive :func:`candidate_scores`; if none, the top n by the k = 1 score."""
    scores = candidate_scores(normal, attacked, k)
    heads: list[Head] = [(int(layer), int(head)) for layer, head in (scores > 0).nonzero().tolist()]
    if heads:
        return HeadChoice(heads, k, False, len(heads), scores)
    scores = candidate_scores(normal, attacked, 1)
    return HeadChoice(top_heads(scores, fallback_top), k, True, 0, scores)


def top_heads(scores: torch.Tensor, n: int) -> list[Head]:
    """The ``n`` best of ``scores`` [L, H]; ties go to the lower layer and head. In layer order."""
    width = scores.shape[1]
    order = torch.argsort(scores.flatten(), descending=True, stable=True)[:n].tolist()
    return sorted((i // width, i % width) for i in order)


def auroc(attacked: Sequence[float], normal: Sequence[float]) -> float:
    """The chance that an attacked prompt scores below a normal one; ties count half."""
    wins = sum((a < n) + 0.5 * (a == n) for a in attacked for n in normal)
    return wins / (len(attacked) * len(normal))


@dataclass(frozen=True)
class Guard:
    """Heads with a threshold and how well they do on held-out prompts.

    ``auroc`` is per attack style against the normal prompts, ``caught`` is (flagged, of), and
    ``false_alarms`` is (flagged, of) over the normal ones.
    """

    choice: HeadChoice
    threshold: float
    auroc: dict[str, float]
    caught: dict[str, tuple[int, int]]
    false_alarms: tuple[int, int]
    scores: dict[str, list[float]]


def is_normal(record: Record) -> bool:
    return record["style"].startswith("normal")


def head_mean(shares: torch.Tensor, heads: Sequence[Head]) -> list[float]:
    """Focus score of each prompt: the mean of ``shares`` [N, L, H] over ``heads``."""
    picked = shares[:, [layer for layer, _ in heads], [head for _, head in heads]]
    return [float(v) for v in picked.double().mean(-1)]


def build_guard(
    finding: Sequence[str],
    found: torch.Tensor,
    held_out: Sequence[str],
    held: torch.Tensor,
    k: float = 4,
    top: int = 8,
) -> Guard:
    """Choose heads and threshold on ``finding``, then measure on ``held_out``.

    ``finding`` and ``held_out`` are styles, ``found`` and ``held`` [N, L, H] the attention shares of the
    prompts. The threshold is the midpoint between the means of ``normal_long`` and ``ignore_long``, which
    have the lengths that text to be guarded has; without these styles, of all normal and all attacked.
    """

    def rows(keep: Sequence[bool]) -> torch.Tensor:
        return found[torch.tensor(keep)]

    if not bool(torch.isfinite(found).all() and torch.isfinite(held).all()):
        raise HookError("the attention of some prompts is not finite; build in float32")
    normal = [style.startswith("normal") for style in finding]
    attacked = [not n for n in normal]
    choice = select_heads(rows(normal), rows(attacked), k, top)
    matched = set(LENGTH_MATCHED) <= set(finding)
    sides = [[style == s for style in finding] for s in LENGTH_MATCHED] if matched else [normal, attacked]
    threshold = round(calibrate(*(head_mean(rows(side), choice.heads) for side in sides)), 3)
    scores: dict[str, list[float]] = {}
    for style, value in zip(held_out, head_mean(held, choice.heads), strict=True):
        scores.setdefault("normal" if style.startswith("normal") else style, []).append(value)
    plain = scores["normal"]

    def flagged(values: list[float]) -> tuple[int, int]:
        return sum(v <= threshold for v in values), len(values)

    attacks = {style: values for style, values in scores.items() if style != "normal"}
    return Guard(
        choice=choice,
        threshold=threshold,
        auroc={style: auroc(values, plain) for style, values in attacks.items()},
        caught={style: flagged(values) for style, values in attacks.items()},
        false_alarms=flagged(plain),
        scores=scores,
    )


TITLE = """\
Flags prompt injection in the user's data by where the model looks (Attention Tracker, arXiv 2411.00348).
Prompt: system = instruction, user = "Data: " + text. The score also moves with length: up with the
instruction's, down with that of harmless data. Calibrate the threshold on prompts like your own."""


def build_heads(
    job: Job,
    data: Path,
    held_out: Path | None = None,
    k: float = 4,
    top: int = 8,
    share: float = 0.3,
    seed: int = 0,
) -> Guard:
    """Find heads and a threshold in ``data``, measure them on ``held_out``, write the program.

    Without ``held_out`` a ``share`` of ``data`` (by style, whole groups, by ``seed``) is kept for that.
    HookError: what is wrong with the data, a prompt or the output; nothing is written then.
    """
    finding, held, sources = two_parts(
        data,
        held_out,
        read_injections,
        lambda found: split(found, share, seed, lambda r: r.style, lambda r: r.group),
        ("found_on", "measured_on"),
    )
    if not math.isfinite(k):
        raise HookError(f"k must be a number, not {k}")
    _both_kinds(finding, data)
    _both_kinds(held, held_out or data)
    records = [*finding, *held]
    files = [data] * len(finding) + [held_out or data] * len(held)
    tokenizer = job.model.tokenizer
    prompts = [tracker_prompt(tokenizer, r, str(f)) for r, f in zip(records, files, strict=True)]
    longest = check_lengths(prompts, job.model.length, room=1)
    work = job.work("heads", sources, split=[share, seed] if held_out is None else None)
    title = f"attention of {len(prompts)} prompts"
    with job.open(Needs(masses=True, longest=longest)) as backend:
        masses = work.tensors("attention", prompts, CHUNK, lambda p: backend().masses(p), title)
    shares = focus(torch.stack(masses))
    n = len(finding)
    styles = [r.style for r in records]
    with work.judged():
        guard = build_guard(styles[:n], shares[:n], styles[n:], shares[n:], k, top)
    publish(job.output, TITLE, _provenance(job, sources, guard, finding, k, top, seed), _program(job, guard))
    work.done()
    return guard


def _both_kinds(records: Sequence[Injection], path: Path) -> None:
    if len({r.normal for r in records}) < 2:
        raise HookError(
            f"{path}, style: the part to find on or to measure on lacks normal or attacked examples"
        )


def _provenance(
    job: Job, sources: Any, guard: Guard, finding: Sequence[Injection], k: float, top: int, seed: int
) -> dict[str, Any]:
    scores: dict[str, Any] = {
        style: {"auroc": round(guard.auroc[style], 4), "flagged": f"{hit}/{of}"}
        for style, (hit, of) in guard.caught.items()
    }
    scores["normal"] = {"flagged": "{}/{}".format(*guard.false_alarms)}
    candidates = {f"{i}-{j}": round(float(guard.choice.scores[i, j]), 4) for i, j in guard.choice.heads}
    return provenance(
        "heads",
        job.model,
        sources,
        f"{guard.choice.describe()}; threshold: midpoint of the means of normal and attacked",
        options={"k": k, "top": top, "seed": seed, "examples": len(finding)},
        measured_by=job.measured_by,
        candidate_scores=candidates,
        held_out=scores,
    )


def _program(job: Job, guard: Guard) -> dict[str, Any]:
    return {
        **job.program("layers", "heads", "hidden"),
        "spans": {"instruction": {"message": "system"}, "data": {"message": "user", "after": DATA_MARK}},
        "observe": {
            "focus": {
                "site": "attention_mass",
                "heads": [list(h) for h in guard.choice.heads],
                "rows": "last_prompt",
                "keys": ["instruction", "data"],
            }
        },
        "analyze": {
            "injection": {
                "analyzer": "attention_tracker",
                "observe": "focus",
                "options": {"instruction": "instruction", "data": "data", "threshold": guard.threshold},
            }
        },
    }


def packaged(name: str) -> Path:
    """A data file that ships with the package."""
    return Path(str(resources.files("vllm_hook"))) / "demo" / "data" / name


def read_records(path: Path | None, default: str) -> list[Record]:
    """Records of a JSONL file; without a path those of the demo's file ``default``."""
    return list(jsonl.records(path or packaged(default)))
