"""Lookback ratio: does the model read its context, or what it has just written itself?

Chuang et al., arXiv 2407.07071. For a head and a generated position, with N context tokens and t tokens
generated so far (the position's own included): ``A_c / (A_c + A_n)``, where A_c is the mean attention to
the N context tokens and A_n that to the t new ones. Low ratios go with answers that leave the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..errors import HookError
from ..results import Observed, Score
from ._common import Bound, flag, single
from .base import AnalyzerOptions, SpanName, Spans


def ratio(
    context: torch.Tensor, new: torch.Tensor, context_tokens: int, new_tokens: torch.Tensor
) -> torch.Tensor:
    """``[heads, rows]`` attention sums on the context and on new tokens -> ``[heads, rows]`` ratios.

    ``new_tokens`` [rows] counts the tokens generated up to each row. 0 where neither gets any attention.
    """
    a_c = context.double() / context_tokens
    a_n = new.double() / new_tokens.double()
    whole = a_c + a_n
    return torch.where(whole > 0, a_c / whole.clamp_min(1e-300), torch.zeros_like(whole))


class Lookback:
    """Needs one observation with ``rows: generated``: ``attention``, or ``attention_mass`` with the spans
    as keys (rows are then taken to sum to 1, which learned sinks break)."""

    name: ClassVar[str] = "lookback"
    sites: ClassVar[tuple[str, ...]] = ("attention", "attention_mass")

    class Options(AnalyzerOptions):
        """``context`` names the span to look back at. Where that is only a part of the prompt, ``prompt``
        names a span of all of it (``{tokens: [0, null]}``). Flagged if ``value`` is under ``below``."""

        context: SpanName
        prompt: SpanName | None = None
        below: Bound | None = None

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: the mean over heads and rows. ``details``: it per head, in the observation's order (the
        features of the paper's classifier), and per row."""
        name, seen = single(observations, self.name, self.sites)
        whole = options.prompt or options.context
        for span in (options.context, whole):
            if span not in spans:
                raise HookError(f"lookback: no span {span!r}, only {', '.join(spans) or 'none'}")
        first = max(end for _, end in spans[whole])
        if seen.positions[0] != first:
            raise HookError(
                f"lookback: span {whole!r} ends at {first}, but the first row of {name!r} is at "
                f"{seen.positions[0]}; observe `rows: generated`, and let `prompt` name the whole prompt"
            )
        if seen.site == "attention":
            context = torch.stack([seen.values[..., a:b].sum(-1) for a, b in spans[options.context]]).sum(0)
            new = seen.values[..., first:].sum(-1)
        else:
            context = _mass(seen, name, options.context)
            new = (1 - _mass(seen, name, whole)).clamp_min(0)
        written = torch.tensor(seen.positions) - first + 1
        each = ratio(context, new, sum(b - a for a, b in spans[options.context]), written)
        value = float(each.mean())
        return Score(
            value,
            flag(value, None, options.below),
            {"per_head": each.mean(1).tolist(), "per_row": each.mean(0).tolist()},
        )


def _mass(seen: Observed, name: str, key: str) -> torch.Tensor:
    if key not in (seen.keys or []):
        raise HookError(f"lookback: {name!r} has no key {key!r}, only {seen.keys or []}")
    return seen.values[..., (seen.keys or []).index(key)]
