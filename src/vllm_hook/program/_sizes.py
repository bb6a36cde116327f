"""The sizes that a check can count on: a model's, or those that a program states of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import ModelFacts
from .schema import ModelSection

#: Stands for the last layer of a model of unknown depth.
_LAST_LAYER = 2**31


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, None where they are not known."""

    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    hidden: int | None

    @classmethod
    def of(cls, facts: ModelFacts | None, stated: ModelSection | None) -> Sizes:
        """Those of the model, or without one those that a program states."""
        source: Any = stated if facts is None else facts
        return cls(*(getattr(source, name, None) for name in cls.__annotations__))

    def site_layers(self, site: str) -> tuple[int, ...]:
        """All layers at which a site exists; none if that is not known."""
        if site == "embed":
            return (0,)
        if self.layers is None:
            return (_LAST_LAYER,) if site == "final_norm" else ()
        return (self.layers - 1,) if site == "final_norm" else tuple(range(self.layers))
