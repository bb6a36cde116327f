"""Analyzers turn observations into a score. ``get(name)`` finds one, built in or from a package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from ..errors import ProgramError
from ..program._problems import problems_of
from ..suggest import unknown
from .attention_tracker import AttentionTracker
from .base import Analyzer, AnalyzerOptions, Held, Names, SpanName, Spans, holding, named_by
from .core_reranker import CoreReranker
from .hidden_states import HiddenStates
from .linear_probe import LinearProbe
from .logit_lens import LogitLens
from .lookback import Lookback
from .projection_monitor import ProjectionMonitor
from .span_influence import SpanInfluence

GROUP = "vllm_hook.analyzers"
BUILT_IN: dict[str, type[Analyzer]] = {
    AttentionTracker.name: AttentionTracker,
    CoreReranker.name: CoreReranker,
    HiddenStates.name: HiddenStates,
    LinearProbe.name: LinearProbe,
    LogitLens.name: LogitLens,
    Lookback.name: Lookback,
    ProjectionMonitor.name: ProjectionMonitor,
    SpanInfluence.name: SpanInfluence,
}

__all__ = [
    "BUILT_IN",
    "GROUP",
    "Analyzer",
    "AnalyzerOptions",
    "AttentionTracker",
    "CoreReranker",
    "Held",
    "HiddenStates",
    "LinearProbe",
    "LogitLens",
    "Lookback",
    "Names",
    "ProjectionMonitor",
    "SpanInfluence",
    "SpanName",
    "Spans",
    "get",
    "holding",
    "misfit",
    "named_by",
    "names",
    "read_options",
]


def names() -> list[str]:
    """All known analyzers, sorted."""
    return sorted({*BUILT_IN, *_installed()})


def misfit(analyzer: Analyzer, site: str) -> str | None:
    """Why an analyzer cannot read observations of a site; None if it can, or does not say what it reads."""
    sites = getattr(analyzer, "sites", (site,))
    return None if site in sites else f"{analyzer.name} reads {', '.join(sites)}; this observes {site!r}"


def get(name: str) -> Analyzer:
    """The analyzer called ``name``, ready to use: from the entry-point group, else built in.

    ProgramError if there is none (it lists those known), or if a package's entry does not load.
    """
    entry = _installed().get(name)
    if name in BUILT_IN and (entry is None or entry.value.startswith(f"{__name__}.")):
        return BUILT_IN[name]()
    if entry is None:
        raise ProgramError("analyzers", unknown("analyzer", name, names()))
    try:
        found = entry.load()
    except Exception as e:
        raise ProgramError("analyzers", f"analyzer {name!r} ({entry.value}) does not load: {e}") from e
    if not isinstance(found, type) or not all(hasattr(found, part) for part in ("name", "Options", "score")):
        raise ProgramError("analyzers", f"{entry.value} is no analyzer class with name, Options and score")
    return cast(Analyzer, found())


def read_options(analyzer: Analyzer, options: Mapping[str, Any]) -> BaseModel:
    """Options given by hand. ProgramError names the analyzer and each option that is wrong."""
    try:
        return analyzer.Options.model_validate(dict(options))
    except ValidationError as error:
        found = problems_of(error, options, analyzer.Options)
        raise ProgramError(f"analyzer {analyzer.name!r}", found) from None


@cache  # a look-up reads the metadata of every installed package: 5 ms, and every request needs it
def _installed() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=GROUP)}
