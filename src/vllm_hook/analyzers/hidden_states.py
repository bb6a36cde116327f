"""Hidden states in short: nothing, their mean, their norms, or their cosine to a reference vector.

What the ``hidden_states`` configurations of the earlier vLLM-Hook gave, for observations that keep whole
rows. The first position of many models is an outlier (in SmolLM2-135M its norm is near 22,600, a hundred
times that of others): ``skip_first`` leaves position 0 out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator

from ..errors import HookError
from ..ops import reference
from ..program._types import fail
from ..results import Observed, Score
from ._common import ROW_SITES, Bound, VectorFile, check_width, flag, single
from .base import AnalyzerOptions, Spans


class HiddenStates:
    """Needs one observation of whole rows, at a stream or a head site (heads are joined to one row)."""

    name: ClassVar[str] = "hidden_states"
    sites: ClassVar[tuple[str, ...]] = ROW_SITES

    class Options(AnalyzerOptions):
        """``reference``: the vector for ``cosine``. Flagged by ``above`` and ``below`` on ``value``."""

        measure: Literal["none", "mean", "norm", "cosine"] = "none"
        reference: VectorFile | None = None
        skip_first: bool = False
        above: Bound | None = None
        below: Bound | None = None

        @model_validator(mode="after")
        def _reference_for_cosine(self) -> HiddenStates.Options:
            if (self.measure == "cosine") != (self.reference is not None):
                raise fail("reference: give it with measure: cosine, and only then")
            return self

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """By measure: ``none`` the number of rows; ``mean`` the mean of all entries, with the mean row of
        each layer in ``details``; ``norm`` the mean L2 norm; ``cosine`` the mean cosine, both with the mean
        per layer and the figure of every row in ``details``."""
        name, seen = single(observations, self.name, self.sites)
        if seen.values.dim() < 3:
            raise HookError(f"hidden_states: {name!r} is reduced to one number a row; it needs whole rows")
        kept = [i for i, p in enumerate(seen.positions) if p or not options.skip_first]
        if not kept:
            raise HookError(f"hidden_states: {name!r} holds position 0 only, which skip_first leaves out")
        rows = seen.values[:, kept].flatten(2).float()
        value, details = measure(rows, options)
        for key in ("per_layer", "rows", "mean"):
            if key in details:
                details[key] = dict(zip(map(str, seen.layers), details[key], strict=True))
        details["positions"] = [seen.positions[i] for i in kept]
        return Score(value, flag(value, options.above, options.below), details)


def measure(rows: torch.Tensor, options: HiddenStates.Options) -> tuple[float, dict[str, Any]]:
    """``rows`` [layers, positions, d] float32 -> the value, and lists with one entry a layer."""
    if options.measure == "none":
        return float(rows.shape[0] * rows.shape[1]), {"shape": list(rows.shape)}
    if options.measure == "mean":
        means = rows.double().mean(1)
        return float(means.mean()), {"mean": means.tolist()}
    if options.measure == "norm":
        each = rows.norm(dim=-1)
    else:
        assert options.reference is not None
        check_width(options.reference, options.reference.content, rows.shape[-1])
        each = reference.cosine(rows, options.reference.content)
    per_layer = each.double().mean(1)
    return float(per_layer.mean()), {"per_layer": per_layer.tolist(), "rows": each.tolist()}
