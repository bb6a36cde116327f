"""A program that was checked against a model: frozen data with every layer, head and name spelled out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..sites import Armed
from ._types import Selector
from .schema import (
    AttendEdit,
    ClampEdit,
    CosineReduction,
    Edit,
    ProbeReduction,
    Program,
    ProjectionReduction,
    Reduction,
    RotateEdit,
    SaeEdit,
    SaeReduction,
    Span,
)

TensorRole = Literal["probe", "vector", "scalar", "sae"]


@dataclass(frozen=True)
class Observation:
    """One thing to read.

    ``layers`` is ascending for attention sites and as written for others. ``heads``: the (layer,
    head) pairs of an attention site, else None. ``keep_heads``: the head indexes that are kept of
    a head site, None for all. ``selectors`` are the rows, under whichever name they were written.
    """

    id: str
    site: str
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] | None
    keep_heads: tuple[int, ...] | None
    selectors: tuple[Selector, ...]
    selector_field: Literal["positions", "rows"]
    keys: tuple[str, ...]
    reduce: Reduction | None
    dtype: Literal["float32", "model"]
    before: bool = False

    @property
    def scalar(self) -> bool:
        """One number a row."""
        if isinstance(self.reduce, SaeReduction):
            return len(self.reduce.features) == 1
        return self.reduce is not None

    @property
    def prompt_only(self) -> bool:
        """True if no position of the generation can be selected."""
        return all(is_prompt_only(selector) for selector in self.selectors)


@dataclass(frozen=True)
class CheckedEdit:
    """An intervention with its layers (and, for attention, heads) spelled out."""

    id: str
    site: str
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] | None
    keep_heads: tuple[int, ...] | None
    selectors: tuple[Selector, ...]
    edit: Edit


@dataclass(frozen=True)
class Analysis:
    """``spans``: the spans of the program that the options name."""

    id: str
    analyzer: str
    observe: tuple[str, ...]
    options: Mapping[str, Any]
    spans: tuple[str, ...]


@dataclass(frozen=True)
class CheckedRule:
    """``subject`` is an analysis (test ``flagged``) or an observation (``above``, ``below`` a bound)."""

    subject: str
    test: Literal["flagged", "above", "below"]
    bound: float | None
    do: Literal["stop", "tag"]
    reason: str | None


@dataclass(frozen=True)
class TensorUse:
    """A tensor that a program names: in which field, and as what it is read."""

    path: tuple[str | int, ...]
    ref: str
    role: TensorRole
    features: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The name under which a loaded program holds it: the reference, with features for an SAE."""
        return f"{self.ref}[{','.join(map(str, self.features))}]" if self.features else self.ref


@dataclass(frozen=True)
class CheckedProgram:
    """A program that fits a model. ``program`` is what was written."""

    program: Program
    name: str
    source: str
    base_dir: Path
    lines: Mapping[tuple[str | int, ...], int]
    apply: Literal["on_request", "always"]
    spans: Mapping[str, Span]
    observations: tuple[Observation, ...]
    edits: tuple[CheckedEdit, ...]
    analyses: tuple[Analysis, ...]
    rules: tuple[CheckedRule, ...]

    @property
    def has_interventions(self) -> bool:
        return bool(self.edits)

    def observation(self, id: str) -> Observation:
        return next(o for o in self.observations if o.id == id)


def is_last(selector: Selector) -> bool:
    """True if the rows a sequence has in a decode step serve this selector."""
    return selector in ("last_prompt", "generated") or hasattr(selector, "generated")


def is_prompt_only(selector: Selector) -> bool:
    """True if the selector never selects a position of the generation."""
    return selector in ("prompt", "last_prompt") or hasattr(selector, "range") or hasattr(selector, "span")


def needs(checked: CheckedProgram) -> Armed:
    """What must be armed to serve a program."""
    armed = Armed()
    for observation in checked.observations:
        rows: Literal["last", "all"] = "last" if all(map(is_last, observation.selectors)) else "all"
        armed |= Armed.of(observation.site, observation.layers, rows)
    for edit in checked.edits:
        armed |= Armed.of_edits(edit.site, edit.layers)
        if edit.edit.when is not None:
            gate = checked.observation(edit.edit.when.observe)
            armed |= Armed.of_edits(gate.site, gate.layers)
    return armed


def tensor_uses(checked: CheckedProgram) -> tuple[TensorUse, ...]:
    """Every tensor that a program names, in file order."""
    return uses_of(checked.program)


def uses_of(program: Program) -> tuple[TensorUse, ...]:
    """The same of a program that was not checked."""
    uses: list[TensorUse] = []
    for id, observe in program.observe.items():
        uses += _reduction_uses(("observe", id, "reduce"), observe.reduce)
    for id, edit in program.intervene.items():
        uses += _edit_uses(("intervene", id), edit)
    return tuple(uses)


def tensor_refs(checked: CheckedProgram) -> tuple[str, ...]:
    """The distinct tensor references of a program, in file order."""
    return tuple(dict.fromkeys(use.ref for use in tensor_uses(checked)))


def _reduction_uses(path: tuple[str | int, ...], reduce: Reduction | None) -> Iterator[TensorUse]:
    if isinstance(reduce, ProbeReduction):
        yield TensorUse((*path, "probe"), reduce.probe, "probe")
    elif isinstance(reduce, ProjectionReduction):
        yield TensorUse((*path, "projection"), reduce.projection, "vector")
    elif isinstance(reduce, CosineReduction):
        yield TensorUse((*path, "cosine"), reduce.cosine, "vector")
    elif isinstance(reduce, SaeReduction):
        yield TensorUse((*path, "sae"), reduce.sae, "sae", reduce.features)


def _edit_uses(path: tuple[str | int, ...], edit: Edit) -> Iterator[TensorUse]:
    if isinstance(edit, AttendEdit):
        return
    if isinstance(edit, SaeEdit):
        yield TensorUse((*path, "sae"), edit.sae, "sae", edit.features)
        return
    for name in ("vector", "u", "v"):
        if ref := getattr(edit, name, None):
            yield TensorUse((*path, name), ref, "vector")
    if isinstance(edit, RotateEdit):
        yield TensorUse((*path, "second"), edit.second, "vector")
    if isinstance(edit, ClampEdit) and isinstance(edit.target, str):
        yield TensorUse((*path, "target"), edit.target, "scalar")
