"""What an analyzer is: observations in, one :class:`~vllm_hook.results.Score` out.

Analyzers touch no device; they see host tensors only, and read no file but those that their options
name. A package adds its own through the entry-point group ``vllm_hook.analyzers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from ..results import Observed, Score

#: Half-open ranges of token positions; a span name may stand for several.
Spans = Mapping[str, list[tuple[int, int]]]


class AnalyzerOptions(BaseModel):
    """Base of every analyzer's ``Options``: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@runtime_checkable
class Analyzer(Protocol):
    """``score`` gets the observations that the program names, by their bare id.

    It raises :class:`~vllm_hook.errors.HookError` when they do not fit. ``value`` has the analyzer's
    own unit and direction; ``flagged`` is None where there is no threshold. A class attribute ``sites``,
    where there is one, lists the sites that it can read: programs are checked against it.
    """

    name: ClassVar[str]

    @property
    def Options(self) -> type[BaseModel]: ...  # a nested class, in practice

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Any) -> Score: ...
