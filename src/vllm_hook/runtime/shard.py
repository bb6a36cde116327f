"""Tensor parallelism: which heads are here, and how to join what the ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..sites import ModelFacts


@dataclass(frozen=True)
class Shard:
    """This rank's share of the heads under tensor parallelism, and how to join what the ranks have.

    ``join``: [..., local heads, d] -> [..., heads, d]; it is told the number of KV heads, if they
    are that. ``total``: the sum over ranks. Stream sites
    are the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    join: Callable[[Tensor, int | None], Tensor] = lambda x, kv_heads: x
    total: Callable[[Tensor], Tensor] = lambda x: x

    def heads(self, facts: ModelFacts, kv: bool) -> range:
        """Heads (or KV heads, of which small models keep a copy on several ranks) of this rank."""
        count = facts.kv_heads if kv else facts.heads
        if count >= self.size:
            each = count // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def local(self, facts: ModelFacts) -> ModelFacts:
        """The sizes of what this rank holds."""
        q, kv = len(self.heads(facts, kv=False)), len(self.heads(facts, kv=True))
        return ModelFacts(facts.id, facts.layers, q, kv, facts.head_dim, facts.hidden)
