"""Find the heads that rerank documents (CoRe, arXiv 2510.02219; QRHead, arXiv 2506.09944).

Shapes: L layers, H query heads, D documents of a query. ``s`` [L, H, D] is the attention of the query
rows on each document: summed over its tokens, mean over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import HookError
from ..rerank_prompt import RANKING, ROWS, SPANS
from .artifact import provenance, publish
from .backend import Needs
from .heads import Head, top_heads
from .job import Job
from .prompts import check_lengths, document_order, rerank_prompt
from .records import Query, read_queries, split, two_parts

#: Temperatures of the paper by model family; others take the first.
SOFT, SHARP = 0.1, 0.001
TEMPERATURES = {"llama": SOFT, "phi": SOFT, "phi3": SOFT, "mistral": SHARP, "granite": SHARP}
METHODS = ("core", "ndcg")
CUTOFF = 10


@dataclass(frozen=True)
class RerankHeads:
    """``core`` and ``ndcg`` [L, H] are S(h) and each head's nDCG@10 where the heads were chosen.

    ``measured``: mean nDCG@10 on held-out queries when documents are sorted by the attention of the
    chosen heads (the calibration by a query of N/A is left to the reranker), of all heads, and of a
    random order (exact, by expectation of a shuffle).
    """

    heads: list[Head]
    core: Tensor
    ndcg: Tensor
    temperature: float
    measured: dict[str, float]


def core_score(s: Tensor, grades: Sequence[int], temperature: float) -> Tensor:
    """S(h) of one query, f64[L, H]: e^{s+/t} / (e^{s+/t} + sum e^{s-/t}), mean over the relevant.

    Relevant (+) are the documents of the best grade, hard negatives (-) those of grade 0.
    """
    best = max(grades)
    positive = [i for i, g in enumerate(grades) if g == best]
    negative = [i for i, g in enumerate(grades) if g == 0]
    if best == 0 or not negative or s.shape[-1] != len(grades):
        raise HookError("S(h) needs a relevant document, one of grade 0, and a score for each")
    scaled = s.double() / temperature
    against = scaled[..., negative].logsumexp(-1)
    shares = [torch.sigmoid(scaled[..., i] - against) for i in positive]
    return torch.stack(shares).mean(0)


def ndcg(scores: Tensor, grades: Sequence[float], k: int = CUTOFF) -> Tensor:
    """nDCG@k of ``scores`` [..., D] sorted from the highest, f64[...]: gain 2^grade - 1, discount
    1/log2(rank + 1). Documents with equal scores share what they gain: the order of a file is worth
    nothing."""
    gains = torch.tensor([2.0**g - 1 for g in grades], dtype=torch.float64)
    discounts = 1 / torch.log2(torch.arange(2, len(grades) + 2, dtype=torch.float64))
    discounts[k:] = 0
    ideal = (gains.sort(descending=True).values * discounts).sum()
    equal = (scores[..., :, None] == scores[..., None, :]).double()
    shared = (equal * gains).sum(-1) / equal.sum(-1)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    return (shared.gather(-1, order) * discounts).sum(-1) / ideal


def random_ndcg(grades: Sequence[int], k: int = CUTOFF) -> float:
    """The expected nDCG@k of a random order: every place has the mean gain."""
    mean = sum(2.0**g - 1 for g in grades) / len(grades)
    gained = sum(mean / math.log2(i + 2) for i in range(min(k, len(grades))))
    ideal = sorted((2.0**g - 1 for g in grades), reverse=True)
    return gained / sum(g / math.log2(i + 2) for i, g in enumerate(ideal[:k]))


def choose(masses: Sequence[Tensor], queries: Sequence[Query], temperature: float) -> tuple[Tensor, Tensor]:
    """(S(h), nDCG@10), each f64[L, H], mean over queries."""
    both = list(zip(masses, queries, strict=True))
    core = torch.stack([core_score(s, q.grades, temperature) for s, q in both]).mean(0)
    return core, torch.stack([ndcg(s, q.grades) for s, q in both]).mean(0)


def sorted_by(masses: Sequence[Tensor], queries: Sequence[Query], heads: Sequence[Head]) -> float:
    """Mean nDCG@10 of documents sorted by the attention of ``heads``, summed."""
    layers, columns = [layer for layer, _ in heads], [head for _, head in heads]
    values = [
        ndcg(s[layers, columns].double().sum(0), q.grades) for s, q in zip(masses, queries, strict=True)
    ]
    return float(torch.stack(values).mean())


TITLE = """\
Attention of the query on the documents, in the heads that rerank (CoRe, arXiv 2510.02219).
Prompt: the user's turn is " Here are some paragraphs:", each as "[document i] text" between blank lines,
then "Please find information ..." and the query (`make_content` of vllm_hook.rerank_prompt). Documents must
not hold blank lines, unless the request gives their tokens. `ranking` is not calibrated by the query "N/A":
`vllm_hook.rerank` is. See docs/analyzers.md."""


def build_rerank_heads(
    job: Job,
    data: Path,
    held_out: Path | None = None,
    method: str = "core",
    top: int = 8,
    temperature: float | None = None,
    share: float = 0.3,
    seed: int = 0,
) -> RerankHeads:
    """Find the ``top`` heads by S(h) (``core``) or by their own nDCG@10 (``ndcg``), write the program.

    Documents are shuffled by ``seed`` in each prompt. ``temperature`` None: the paper's for the model's
    family, else .1. HookError: what is wrong with the data, a prompt or an option; nothing is written.
    """
    if method not in METHODS:
        raise HookError(f"no method {method!r}; there are {', '.join(METHODS)}")
    temperature = TEMPERATURES.get(job.model.kind, SOFT) if temperature is None else temperature
    if not 0 < temperature < math.inf:
        raise HookError(f"the temperature must be a number above 0, not {temperature}")
    finding, held, sources = two_parts(
        data, held_out, read_queries, lambda found: split(found, share, seed), ("found_on", "measured_on")
    )
    if not finding or not held:
        raise HookError(f"{data}: too few queries to find heads and to measure them")
    files = [data] * len(finding) + [held_out or data] * len(held)
    prompts = [
        rerank_prompt(job.model.tokenizer, q, document_order(q, seed), str(f))
        for q, f in zip([*finding, *held], files, strict=True)
    ]
    longest = check_lengths(prompts, job.model.length, room=1)
    work = job.work("rerank-heads", sources, split=share if held_out is None else None, seed=seed)
    title = f"attention of {len(prompts)} queries"
    with job.open(Needs(masses=True, longest=longest)) as backend:
        masses = work.tensors("attention", prompts, 4, lambda p: backend().masses(p), title)
    found, measured = masses[: len(finding)], masses[len(finding) :]
    core, own = choose(found, finding, temperature)
    heads = top_heads(core if method == "core" else own, top)
    every = [(i, j) for i in range(core.shape[0]) for j in range(core.shape[1])]
    figures = {
        "chosen_heads": sorted_by(measured, held, heads),
        "all_heads": sorted_by(measured, held, every),
        "random": sum(random_ndcg(q.grades) for q in held) / len(held),
    }
    result = RerankHeads(heads, core, own, temperature, figures)
    options = {"top": top, "temperature": temperature, "seed": seed, "queries": len(finding)}
    if held_out is None:
        options["share"] = share
    publish(job.output, TITLE, _provenance(job, sources, result, method, options), _program(job, heads))
    work.done()
    return result


def _provenance(
    job: Job, sources: Any, result: RerankHeads, method: str, options: dict[str, Any]
) -> dict[str, Any]:
    per_head = {
        f"{i}-{j}": {"S": round(float(result.core[i, j]), 4), "ndcg": round(float(result.ndcg[i, j]), 4)}
        for i, j in result.heads
    }
    what = {"core": "S(h), arXiv 2510.02219", "ndcg": "each head's own nDCG@10 (QRHead)"}[method]
    return provenance(
        "rerank-heads",
        job.model,
        sources,
        f"top {len(result.heads)} heads by {what}",
        options=options,
        measured_by=job.measured_by,
        scores=per_head,
        held_out_ndcg={name: round(value, 4) for name, value in result.measured.items()},
    )


def rerank_program_parts(heads: Sequence[Head]) -> dict[str, Any]:
    """Spans, the dense attention of the heads from the query's rows, and the ranking."""
    seen = {"site": "attention", "heads": [list(h) for h in heads], "rows": ROWS}
    ranking = {"analyzer": "core_reranker", "observe": "attention", "options": RANKING}
    return {"spans": SPANS, "observe": {"attention": seen}, "analyze": {"ranking": ranking}}


def _program(job: Job, heads: Sequence[Head]) -> dict[str, Any]:
    return {**job.program("layers", "heads", "hidden"), **rerank_program_parts(heads)}
