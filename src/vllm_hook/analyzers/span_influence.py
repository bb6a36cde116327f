"""Span influence: which pieces of the prompt did the answer look at?

The attention of the observed rows (those of the answer, as a rule) summed over each span, averaged over
heads and rows, and divided by the total over the spans: a share per span. A picture of where heads looked,
not of cause: attention need not carry information (Jain and Wallace, arXiv 1902.10186).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..errors import HookError
from ..results import Observed, Score
from ._common import Bound, flag, single
from .base import AnalyzerOptions, SpanName, Spans


def shares(mass: torch.Tensor, tokens: Sequence[int] | None = None) -> torch.Tensor:
    """``[heads, rows, spans]`` attention -> ``[spans]`` float64 shares that sum to 1 (0 if there is none).

    ``tokens``: lengths of the spans, for shares of the attention per token.
    """
    each = mass.double().mean((0, 1))
    if tokens is not None:
        each = each / torch.tensor(tokens, dtype=torch.float64)
    total = each.sum()
    return each / total if total > 0 else torch.zeros_like(each)


class SpanInfluence:
    """Needs one ``attention_mass`` observation; its keys are the spans."""

    name: ClassVar[str] = "span_influence"
    sites: ClassVar[tuple[SpanName, ...]] = ("attention_mass",)

    class Options(AnalyzerOptions):
        """``spans``: those to compare (default: all keys). ``of``: the span whose share is the value
        (default: the largest). ``per_token`` divides by each span's length. Flagged by ``above`` and
        ``below`` on the value."""

        spans: Annotated[tuple[SpanName, ...], Field(min_length=2)] | None = None
        of: SpanName | None = None
        per_token: bool = False
        above: Bound | None = None
        below: Bound | None = None

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``details``: the share of each span, and the name of the one with the largest."""
        name, seen = single(observations, self.name, self.sites)
        keys = seen.keys or []
        chosen = list(options.spans or keys)
        if missing := [k for k in [*chosen, *([options.of] if options.of else [])] if k not in keys]:
            raise HookError(f"span_influence: {name!r} has no key {missing[0]!r}, only {keys}")
        if options.of is not None and options.of not in chosen:
            raise HookError(f"span_influence: `of` is {options.of!r}, which is not among `spans`")
        lengths = None
        if options.per_token:
            if unknown := [k for k in chosen if k not in spans]:
                raise HookError(f"span_influence: the length of span {unknown[0]!r} is not known")
            lengths = [sum(b - a for a, b in spans[k]) for k in chosen]
        found = shares(seen.values[..., [keys.index(k) for k in chosen]], lengths)
        by_span = dict(zip(chosen, found.tolist(), strict=True))
        largest = max(by_span, key=lambda k: by_span[k])
        value = by_span[options.of or largest]
        return Score(
            value, flag(value, options.above, options.below), {"shares": by_span, "largest": largest}
        )
