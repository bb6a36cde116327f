"""Choosing a layer and a strength: answers under an edit, what they gain and what they cost.

A setting that makes the model ramble is dropped, however well it scores: perplexity of its answers
under the unedited model, and the share of repeated token pairs, have bounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: vLLM's repetition_penalty, for plain and steered answers alike: greedy answers of a small model go
#: round in circles without, and a circle has a low perplexity.
PENALTY = 1.15
#: Perplexity may double; the examples of a sweep are few, so there it may grow by less. (This margin was
#: set after a held-out set of the demo had shown x 2.09 at a setting with x 1.67; that set was replaced.)
MOST_GROWTH = 1.5
#: Beyond this mean share of repeated token pairs the answers go round in circles.
MOST_REPETITION = 0.25


@dataclass(frozen=True)
class Answer:
    """``nll``: mean negative log-likelihood of a token under the unsteered model, in nats."""

    text: str
    tokens: tuple[int, ...]
    ended: bool
    nll: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """All answers at one strength."""

    strength: float
    answers: list[Answer]

    def share(self, shown: Callable[[str, bool], bool]) -> float:
        """Of answers for which ``shown(text, ended)`` holds."""
        return statistics.fmean(shown(a.text, a.ended) for a in self.answers)

    def growth(self, plain: Outcome) -> float:
        """Median over questions of the perplexity of the answer over that of the plain answer."""
        both = zip(self.answers, plain.answers, strict=True)
        return statistics.median(math.exp(a.nll - b.nll) for a, b in both)

    def perplexity(self) -> float:
        """Of all tokens of all answers together."""
        total = sum(len(a.tokens) for a in self.answers)
        return math.exp(sum(a.nll * len(a.tokens) for a in self.answers) / total)

    def repetition(self) -> float:
        return statistics.fmean(repetition(a.tokens) for a in self.answers)


@dataclass(frozen=True)
class Tried:
    """One setting on held-out questions. ``outcome.strength`` is in lengths of the vector (add) or
    the target (clamp); ``rate``: how far the behaviour shows, in 0..1 where it is a share."""

    layer: int
    outcome: Outcome
    rate: float
    growth: float
    repetition: float

    @property
    def fits(self) -> bool:
        """Still speaks: perplexity within its bound, and does not go round in circles."""
        return self.growth <= MOST_GROWTH and self.repetition <= MOST_REPETITION


def best(tried: Sequence[Tried]) -> Tried:
    """The highest rate of those that still speak, and of equals the lowest perplexity.

    If none both speaks and shows the behaviour, the highest rate less what it is beyond the bounds.
    """
    good = [t for t in tried if t.fits and t.rate > 0]
    if good:
        return max(good, key=lambda t: (t.rate, -t.growth))
    return max(tried, key=lambda t: t.rate - max(t.growth / MOST_GROWTH - 1, 0) - t.repetition)


def repetition(tokens: Sequence[int]) -> float:
    """Share of pairs of neighbouring tokens that stood in the answer before: 1 - distinct-2.

    0 for a text without repeats, near 1 for one that goes round in circles.
    """
    pairs = list(itertools.pairwise(tokens))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


def recovered(plain: Sequence[float], with_: Sequence[float], edited: Sequence[float]) -> float:
    """How much of what an instruction does to the likelihood of its answers an edit does too.

    Log-likelihoods per example of the answer that follows the prompt *with*: given the prompt
    without, given the prompt with, and given the prompt without under the edit. 0: nothing, 1: all.
    """
    gap = math.fsum(with_) - math.fsum(plain)
    return (math.fsum(edited) - math.fsum(plain)) / gap if gap > 0 else 0.0
