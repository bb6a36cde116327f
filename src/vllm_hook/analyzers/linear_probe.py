"""Linear probe: a logistic regression on the states of one layer.

The probability of a position is ``sigmoid(w . ((h - mean) / scale) + b)``. The logit is taken on the
device (``reduce: {probe: file}``), or here from whole rows and a probe file. ``value`` is the largest,
the mean or the last probability over the observed positions.

Published probes of this form differ in layer, positions and training set only: hallucinated entities in
long answers, ``over: max`` over the answer (Obeso et al., arXiv 2509.03531); wrong tool calls, ``over:
last`` or ``mean`` over the tokens of the call (arXiv 2601.05214, whose own classifier has a second layer,
which a linear probe lacks); truth of a statement, at its last token (Marks and Tegmark, arXiv 2310.06824).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..errors import HookError
from ..ops import reference
from ..results import Observed, Score
from ..tensors import Probe
from ._common import STREAM_SITES, Over, ProbeFile, aggregate, check_width, read_rows, single
from .base import AnalyzerOptions, Held, Spans


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """``[positions]`` raw logits -> ``[positions]`` probabilities, float32."""
    return torch.sigmoid(logits.float())


class LinearProbe:
    """Needs one observation of one layer at a stream site: logits, or whole rows with ``probe``."""

    name: ClassVar[str] = "linear_probe"
    sites: ClassVar[tuple[str, ...]] = STREAM_SITES

    class Options(AnalyzerOptions):
        """``probe`` (``weight``, ``bias``, optionally ``mean``, ``scale``): only for observations that keep
        whole rows. Flagged if ``value`` is above ``threshold``."""

        probe: ProbeFile | None = None
        threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
        over: Over = "max"

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``details``: the probability of each position, and the position that holds the largest."""
        name, seen = single(observations, self.name, self.sites)
        if len(seen.layers) != 1:
            raise HookError(f"linear_probe: {name!r} observes {len(seen.layers)} layers, needs one")
        values = seen.values[0]
        logits = read_rows(
            values, values.dim() == 1, options.probe, f"linear_probe: {name!r}", "probe", "probe", apply_probe
        )
        each = probabilities(logits)
        value = float(aggregate(each.double(), options.over))
        return Score(
            value=value,
            flagged=value > options.threshold,
            details={
                "per_position": each.tolist(),
                "highest": seen.positions[int(each.argmax())],
                "threshold": options.threshold,
            },
        )


def apply_probe(rows: torch.Tensor, file: Held[Probe]) -> torch.Tensor:
    """Raw logits ``[positions]`` of ``rows`` [positions, d] by the probe of ``file``."""
    p = file.content
    check_width(file, p.weight, rows.shape[-1])
    return reference.probe(rows, p.weight, torch.tensor([p.bias]), p.mean, p.scale)
