"""What trivial baselines make of the packaged data: ``python -m vllm_hook.demo.baselines``.

A baseline that does well on a set says that the set cannot show much. Prints the tables of
docs/data.md; a test compares them.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import jsonl
from ..build.heads import auroc, packaged
from ..build.rerank_heads import ndcg, random_ndcg
from .make_contrast import INSTRUCTIONS

#: Words of orders to a model; the count of them is the keyword baseline for injections.
KEYWORDS = re.compile(
    r"\b(ignore|disregard|forget|override|instead|only|task|instructions?|system|reply|answer|write|print|output)\b",
    re.IGNORECASE,
)
LENGTH = "length in characters"


def injection_table(name: str) -> list[list[str]]:
    """AUROC of each style against the normal records: by length, and by the count of keywords."""
    records = _read(name)
    normal = [r for r in records if r["style"].startswith("normal")]
    rows = []
    for style in dict.fromkeys(r["style"] for r in records if not r["style"].startswith("normal")):
        attacked = [r for r in records if r["style"] == style]
        measures: tuple[Callable[[Any], float], ...] = (
            lambda r: len(r["data"]),
            lambda r: len(KEYWORDS.findall(r["data"])),
        )
        figures = [above([m(r) for r in attacked], [m(r) for r in normal]) for m in measures]
        rows.append([style, str(len(attacked)), str(len(normal)), *(f"{f:.3f}" for f in figures)])
    return rows


def contrast_table() -> list[list[str]]:
    """AUROC of with against without: by length, and by words of the question that both sides share."""
    rows = []
    for behaviour, (asked, _) in INSTRUCTIONS.items():
        pairs = _read(f"contrast_{behaviour}")
        with_, without = [p["with"] for p in pairs], [p["without"] for p in pairs]
        key = asked.split()[-1].strip(".")
        figures = (
            above([len(t) for t in with_], [len(t) for t in without]),
            above([t.count(key) for t in with_], [t.count(key) for t in without]),
        )
        rows.append([behaviour, str(len(pairs)), *(f"{f:.3f}" for f in figures)])
    return rows


def rerank_table(seed: int = 0) -> list[list[str]]:
    """Mean nDCG@10 of a random order, of length, and of the words shared with the question."""
    records = _read("rerank")
    rng = random.Random(seed)
    scores: Mapping[str, Callable[[str, str], float]] = {
        "a random shuffle": lambda query, text: rng.random(),
        LENGTH: lambda query, text: len(text),
        "words shared with the question": shared_words,
    }
    grades = [[d["grade"] for d in r["documents"]] for r in records]
    rows = [["a random order (expected)", f"{_mean([random_ndcg(g) for g in grades]):.3f}"]]
    for name, score in scores.items():
        values = []
        for record, graded in zip(records, grades, strict=True):
            found = torch.tensor([float(score(record["query"], d["text"])) for d in record["documents"]])
            values.append(float(ndcg(found, graded)))
        rows.append([name, f"{_mean(values):.3f}"])
    return rows


def above(first: Sequence[float], second: Sequence[float]) -> float:
    """The chance that one of ``first`` exceeds one of ``second``; ties count half."""
    return auroc(second, first)


def markdown() -> str:
    """All tables, as they stand in docs/data.md."""
    head = ["style", "attacks", "normal", LENGTH, "keywords"]
    parts = [
        _table([f"`{name}.jsonl`: AUROC", *head[1:]], injection_table(name))
        for name in ("injection", "held_out", "head_finding")
    ]
    parts.append(_table(["pairs: AUROC", "pairs", LENGTH, "the behaviour's word"], contrast_table()))
    parts.append(_table(["`rerank.jsonl`, sorted by", "nDCG@10"], rerank_table()))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _read(name: str) -> list[dict[str, Any]]:
    return jsonl.records(packaged(f"{name}.jsonl"))


def shared_words(query: str, text: str) -> int:
    """The number of different words in both."""
    return len(_words(query) & _words(text))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.stdout.write(markdown())
