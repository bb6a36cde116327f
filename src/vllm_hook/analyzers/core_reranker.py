"""CoRe reranker: documents of a prompt ranked by the attention that a query after them pays to them.

Contrastive heads, arXiv 2510.02219; with all heads it is in-context reranking (ICR, arXiv 2410.02642).
Per token: attention summed over the chosen heads, the mean over the query's rows. From it that of the same
prompt with the query "N/A" is taken, which removes what a document attracts whatever is asked. Of the
calibrated values c of a document those above ``mean - 2 std`` (unbiased) are kept; their sum is its score.

Shapes: C heads, R query rows, K keys, D documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ..errors import HookError, IncompleteCaptureError
from ..results import Observed, Score
from .base import AnalyzerOptions, SpanName, Spans

#: Tokens this many standard deviations below their document's mean are dropped.
STDS = 2.0


def token_attention(rows: torch.Tensor) -> torch.Tensor:
    """``[C, R, K]`` attention of query rows -> ``[K]``, float64: sum over heads, mean over rows."""
    return rows.double().sum(0).mean(0)


def document_scores(
    tokens: torch.Tensor, calibration: torch.Tensor | None, documents: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """``[D]`` float64 scores. ``tokens`` and ``calibration``: ``[>= K]`` of :func:`token_attention`;
    ``documents``: half-open token ranges. A document of one token has no deviation and keeps it."""
    scores = []
    for start, end in documents:
        c = tokens[start:end].double()
        if calibration is not None:
            c = c - calibration[start:end].double()
        if len(c) > 1:
            kept = c > c.mean() - STDS * c.std(unbiased=True)
            c = c[kept] if bool(kept.any()) else c  # none: all are equal
        scores.append(c.sum())
    return torch.stack(scores) if scores else torch.empty(0, dtype=torch.float64)


class CoreReranker:
    """Needs an ``attention`` observation of the chosen heads with the query's rows, and, to calibrate, a
    second one of the same prompt with the query "N/A", from a request of its own: see
    :func:`vllm_hook.rerank`, which runs both. With one observation the scores are not calibrated."""

    name: ClassVar[str] = "core_reranker"
    sites: ClassVar[tuple[str, ...]] = ("attention",)

    class Options(AnalyzerOptions):
        """``documents`` names a list of spans (``{between: [.., ..], each: true}``). Of these only those that
        begin behind the span ``after`` and before the span ``before`` are documents, where these are given:
        what is found by marks may be found elsewhere too."""

        documents: SpanName
        after: SpanName | None = None
        before: SpanName | None = None

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: the best score. ``details``: ``scores`` by document, ``order`` (best first) and
        whether they are ``calibrated``."""
        if not 1 <= len(observations) <= 2:
            named = ", ".join(observations) or "none"
            raise HookError(f"core_reranker reads one observation, or two (query, then N/A), got {named}")
        documents = _documents(spans, options)
        found = [_tokens(name, seen, documents) for name, seen in observations.items()]
        first, *second = observations.values()
        if second and second[0].heads != first.heads:
            raise HookError(f"core_reranker: {' and '.join(observations)} observe different heads")
        scores = document_scores(found[0], found[1] if second else None, documents)
        order = torch.argsort(scores, descending=True, stable=True).tolist()
        details = {"scores": scores.tolist(), "order": order, "calibrated": bool(second)}
        return Score(float(scores.max()), None, details)


def _documents(spans: Spans, options: CoreReranker.Options) -> list[tuple[int, int]]:
    def of(name: str) -> Sequence[tuple[int, int]]:
        if not (found := spans.get(name)):
            raise HookError(f"core_reranker: no spans {name!r}, only {', '.join(spans) or 'none'}")
        return found

    first = max(end for _, end in of(options.after)) if options.after else 0
    last = min(start for start, _ in of(options.before)) if options.before else None
    kept = [s for s in of(options.documents) if s[0] >= first and (last is None or s[0] < last)]
    if not kept:
        raise HookError(
            f"core_reranker: none of the spans {options.documents!r} lies behind {options.after!r} and "
            f"before {options.before!r}"
        )
    return kept


def _tokens(name: str, seen: Observed, documents: Sequence[tuple[int, int]]) -> torch.Tensor:
    if seen.site != "attention":
        raise HookError(f"core_reranker: {name!r} observes {seen.site!r}, needs 'attention'")
    if not seen.positions:
        raise IncompleteCaptureError(f"core_reranker: {name!r} holds no rows")
    last = max(end for _, end in documents)
    if seen.positions[0] < last:
        raise HookError(
            f"core_reranker: {name!r} has a row at {seen.positions[0]}, but the documents end at {last}; "
            "the query must come after them"
        )
    return token_attention(seen.values)
