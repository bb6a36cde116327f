"""Attention Tracker: prompt injection shows as attention moving away from the instruction.

Hung et al., arXiv 2411.00348. The query row is the last prompt token. Per head the focus is
``inst / (inst + data + 1e-8)``; the score is its mean over the important heads, in 0..1. Low means
injection: flagged if the score is at or below the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import ClassVar

import torch
from pydantic import Field

from ..errors import HookError, IncompleteCaptureError
from ..results import Observed, Score
from .base import AnalyzerOptions, SpanName, Spans

EPSILON = 1e-8


def focus(mass: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` attention on (instruction, data) -> ``[...]`` share on the instruction, float32."""
    inst, data = mass.float().unbind(-1)
    return inst / (inst + data + EPSILON)


def calibrate(normal_scores: Sequence[float], attacked_scores: Sequence[float] | None = None) -> float:
    """A threshold from labelled scores: the midpoint of the two means.

    With normal scores only: mean - 4 (population) standard deviations.
    """
    if not normal_scores:
        raise HookError("calibration needs at least one normal score")
    if attacked_scores is None:
        return fmean(normal_scores) - 4 * pstdev(normal_scores)
    if not attacked_scores:
        raise HookError("no attacked scores: pass None to calibrate on normal ones only")
    return (fmean(normal_scores) + fmean(attacked_scores)) / 2


class AttentionTracker:
    """Needs one ``attention_mass`` observation with one row and keys for both spans."""

    name: ClassVar[str] = "attention_tracker"
    sites: ClassVar[tuple[str, ...]] = ("attention_mass",)

    class Options(AnalyzerOptions):
        """``instruction`` and ``data`` are names of spans among the observation's keys."""

        instruction: SpanName = "instruction"
        data: SpanName = "data"
        threshold: float = Field(default=0.5, allow_inf_nan=False)

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: the focus score; ``details``: it per head, in the observation's order of heads."""
        if len(observations) != 1:
            named = ", ".join(observations) or "none"
            raise HookError(f"attention_tracker reads exactly one observation, got {named}")
        name, seen = next(iter(observations.items()))
        if seen.site != "attention_mass":
            raise HookError(f"attention_tracker: {name!r} observes {seen.site!r}, needs 'attention_mass'")
        columns = []
        for key in (options.instruction, options.data):
            if key not in (seen.keys or []):
                raise HookError(f"attention_tracker: {name!r} has no key {key!r}, only {seen.keys or []}")
            columns.append((seen.keys or []).index(key))
        if seen.values.dim() != 3 or not seen.values.shape[0]:
            shape = list(seen.values.shape)
            raise HookError(f"attention_tracker: {name!r} is {shape}, not [heads, rows, keys]")
        rows = seen.values.shape[1]
        if rows != 1:
            kind = IncompleteCaptureError if rows == 0 else HookError
            raise kind(
                f"attention_tracker: {name!r} holds {rows} rows, needs exactly one: use `rows: last_prompt`"
            )
        per_head = focus(seen.values[:, 0, columns])
        value = float(per_head.double().mean())
        return Score(
            value=value,
            flagged=value <= options.threshold,
            details={"per_head": per_head.tolist(), "threshold": options.threshold},
        )
