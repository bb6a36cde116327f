"""From a program file to what an engine holds: checked program, its tensors, a content digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError

from ..analyzers import get as get_analyzer
from ..analyzers import misfit
from ..errors import Problem, ProgramError, UnsupportedError
from ..program.check import CheckedProgram, TensorUse, check, needs, tensor_uses
from ..program.load import Source, SourcedProgram, load
from ..sites import SITES, Armed, ModelFacts
from ..tensors import (
    Probe,
    SaeFeatures,
    Store,
    digest_tensors,
    read_probe,
    read_sae,
    read_scalar,
    read_vector,
)
from .compiled import CompiledEdits
from .edit_compile import compile_edits

Loaded = Probe | SaeFeatures | torch.Tensor
"""A probe, features of a sparse autoencoder, a vector f32[width], or a scalar f32[]."""


@dataclass(frozen=True)
class LoadedProgram:
    """An immutable program, known by name and digest.

    ``tensors`` are keyed by :attr:`TensorUse.key`: the reference as written (with the features
    appended for a sparse autoencoder). ``digest`` is the hexadecimal sha256 of program and tensor
    contents; it does not depend on where files lie.
    """

    checked: CheckedProgram
    tensors: Mapping[str, Loaded]
    digest: str
    needs: Armed
    edits: CompiledEdits = field(default_factory=CompiledEdits)

    @property
    def name(self) -> str:
        return self.checked.name


def load_program(
    source: Source, facts: ModelFacts, *, store: Store | None = None, allow_files: bool = True
) -> LoadedProgram:
    """Read and check a program and its tensors. Everything that is wrong is reported at once.

    ``allow_files=False``: tensors come from ``store`` only, for programs sent to a server.
    """
    sourced: SourcedProgram = load(source)
    checked = check(sourced, facts)
    _refuse_unavailable(checked)
    _check_analyzers(checked)
    tensors = _read_all(checked, facts, store, allow_files)
    edits = compile_edits(checked, tensors, facts)
    return LoadedProgram(checked, tensors, _digest(checked, tensors), needs(checked), edits)


def _refuse_unavailable(checked: CheckedProgram) -> None:
    """What the contract has and this version cannot do yet."""
    for observation in checked.observations:
        if observation.before:
            raise UnsupportedError(
                f"{checked.source}: observe.{observation.id}.before is not available in this version: rows "
                "are read after the edits at their site and layer"
            )
    for i, rule in enumerate(checked.rules):
        if rule.do == "stop":
            raise UnsupportedError(f"{checked.source}: act[{i}].do: stop is not available in this version")


def _check_analyzers(checked: CheckedProgram) -> None:
    """Every analyzer exists, takes the options that it is given, and can read what it is to read."""
    sourced = SourcedProgram(checked.program, checked.source, checked.base_dir, checked.lines)
    problems: list[Problem] = []
    for analysis in checked.analyses:
        try:
            analyzer = get_analyzer(analysis.analyzer)
            for i, id in enumerate(analysis.observe):
                if why := misfit(analyzer, checked.program.observe[id].site):
                    problems.append(sourced.problem(("analyze", analysis.id, "observe", i), why))
            analyzer.Options.model_validate(dict(analysis.options))
        except ProgramError as error:
            problems.append(sourced.problem(("analyze", analysis.id, "analyzer"), error.problems[0].message))
        except ValidationError as error:
            for e in error.errors():
                problems.append(sourced.problem(("analyze", analysis.id, "options", *e["loc"]), e["msg"]))
    if problems:
        raise ProgramError(checked.source, problems)


def _read_all(
    checked: CheckedProgram, facts: ModelFacts, store: Store | None, allow_files: bool
) -> dict[str, Loaded]:
    tensors: dict[str, Loaded] = {}
    problems: list[Problem] = []
    sourced = SourcedProgram(checked.program, checked.source, checked.base_dir, checked.lines)
    for use in tensor_uses(checked):
        try:
            tensors[use.key] = _read(use, checked, facts, store, allow_files)
        except ProgramError as error:
            problems.append(sourced.problem(use.path, str(error)))
    if problems:
        raise ProgramError(checked.source, problems)
    return tensors


def _read(
    use: TensorUse, checked: CheckedProgram, facts: ModelFacts, store: Store | None, allow_files: bool
) -> Loaded:
    base_dir = checked.base_dir if allow_files else None
    width = _width(use, checked, facts)
    if use.role == "probe":
        return read_probe(use.ref, base_dir, width, store)
    if use.role == "sae":
        return read_sae(use.ref, base_dir, width, use.features, store)
    if use.role == "scalar":
        return torch.tensor(read_scalar(use.ref, base_dir, store))
    return read_vector(use.ref, base_dir, width, store)


def _width(use: TensorUse, checked: CheckedProgram, facts: ModelFacts) -> int:
    """The width of one row, or of one head at a head site."""
    section, id = use.path[0], use.path[1]
    observed = checked.program.observe if section == "observe" else checked.program.intervene
    site = SITES[observed[str(id)].site]
    return facts.hidden if site.kind == "stream" else facts.head_dim


def _digest(checked: CheckedProgram, tensors: Mapping[str, Loaded]) -> str:
    """sha256 of the program as canonical JSON, each reference replaced by the digest of its content."""
    document = checked.program.to_dict()
    for use in tensor_uses(checked):
        holder: Any = document
        for part in use.path[:-1]:
            holder = holder[part]
        holder[use.path[-1]] = f"content:{_content_digest(tensors[use.key])}"
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _content_digest(loaded: Loaded) -> str:
    return digest_tensors({"": loaded} if isinstance(loaded, torch.Tensor) else loaded.tensors())
