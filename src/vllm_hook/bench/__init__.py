"""``vllm-hook bench``: what observing and steering cost. ``cpu`` and ``gpu`` hold what is measured."""

from .measure import ratio_of

__all__ = ["ratio_of"]
