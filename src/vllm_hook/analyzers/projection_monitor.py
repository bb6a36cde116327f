"""Projection monitor: how far the states reach along a direction, such as the refusal direction.

``h . r / |r|`` (Arditi et al., arXiv 2406.11717: the mean difference of harmful and harmless
instructions at the last prompt tokens). The projection is taken on the device (``reduce:
{projection: file}``), or here from whole rows and a ``direction``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..ops import reference
from ..results import Observed, Score
from ._common import (
    STREAM_SITES,
    Bound,
    Over,
    VectorFile,
    aggregate,
    check_width,
    flag,
    read_rows,
    single,
)
from .base import AnalyzerOptions, Held, Spans


class ProjectionMonitor:
    """Needs one observation at a stream site: projections, or whole rows with ``direction``."""

    name: ClassVar[str] = "projection_monitor"
    sites: ClassVar[tuple[str, ...]] = STREAM_SITES

    class Options(AnalyzerOptions):
        """``direction``: only for observations that keep whole rows. Flagged if ``value`` is over
        ``above`` or under ``below``; without either nothing is flagged."""

        direction: VectorFile | None = None
        above: Bound | None = None
        below: Bound | None = None
        over: Over = "mean"

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: over positions as ``over`` says, then the mean over layers, in units of the stream.
        ``details``: it per layer."""
        name, seen = single(observations, self.name, self.sites)
        lengths = read_rows(
            seen.values,
            seen.values.dim() == 2,
            options.direction,
            f"projection_monitor: {name!r}",
            "direction",
            "projection",
            project,
        )
        per_layer = aggregate(lengths.double(), options.over)
        value = float(per_layer.mean())
        return Score(
            value=value,
            flagged=flag(value, options.above, options.below),
            details={"per_layer": dict(zip(map(str, seen.layers), per_layer.tolist(), strict=True))},
        )


def project(rows: torch.Tensor, file: Held[torch.Tensor]) -> torch.Tensor:
    """``[..., d]`` -> ``[...]`` float32, along the unit vector of the vector of ``file``."""
    check_width(file, file.content, rows.shape[-1])
    return reference.projection(rows, file.content)
