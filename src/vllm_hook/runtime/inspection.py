"""Everything that can be known of a program before it runs: its form, names, analyzers, files and edits.

All of it is looked at and every problem is kept, whatever went wrong before. Without a model what depends
on its sizes is left out, except against those that the program states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from ..analyzers import Analyzer, Held, misfit, named_by
from ..analyzers import get as get_analyzer
from ..errors import ModelMismatchError, Problem, ProgramError, UnsupportedError
from ..program._problems import problems_of
from ..program._sizes import Sizes
from ..program.check import CheckedProgram, TensorUse, examine, split_span_ref
from ..program.checked import uses_of
from ..program.load import Draft, Source, SourcedProgram, read
from ..sites import SITES, ModelFacts
from ..suggest import unknown
from ..tensors import (
    Probe,
    SaeFeatures,
    Store,
    digest_file,
    file_of,
    read_probe,
    read_sae,
    read_scalar,
    read_vector,
)
from .compiled import CompiledEdits
from .edit_compile import compile_edits

Loaded = Probe | SaeFeatures | torch.Tensor
"""A probe, features of a sparse autoencoder, a vector f32[width], or a scalar f32[]."""
Path = tuple["str | int", ...]


@dataclass
class Inspection:
    """What was found. ``checked``: None without a model, or where the program could not be read at all.

    ``tensors`` are keyed by :attr:`TensorUse.key`; ``files``: by field, the digest of the
    content of each file that an option names.
    ``unavailable``: what the contract has and this version cannot do yet.
    """

    source: str
    sourced: SourcedProgram | None
    checked: CheckedProgram | None
    problems: list[Problem]
    mismatch: bool = False
    unavailable: list[Problem] = field(default_factory=list)
    tensors: dict[str, Loaded] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
    edits: CompiledEdits = field(default_factory=CompiledEdits)

    def refuse(self) -> None:
        """Raise what is wrong, all at once."""
        found = sorted([*self.problems, *self.unavailable], key=lambda p: p.line or 0)
        if self.problems:
            raise (ModelMismatchError if self.mismatch else ProgramError)(self.source, found)
        if found:
            raise UnsupportedError(str(ProgramError(self.source, found)))


def inspect(
    source: Source, facts: ModelFacts | None = None, *, store: Store | None = None, allow_files: bool = True
) -> Inspection:
    """Look at a program, and at whether it fits a model where there is one. ProgramError: it cannot be read.

    ``allow_files=False``: tensors come from ``store`` only, for programs sent to a server.
    """
    draft = read(source)
    found = examine(draft, facts)
    seen = Inspection(found.source, draft.sourced, found.checked, list(found.problems), found.mismatch)
    if draft.sourced is None:
        return seen
    sound = all(re.split(r"[.[]", p.field)[0] in ("analyze", "act") for p in seen.problems)
    seen.unavailable = _unavailable(draft.sourced)
    options = _check_analyzers(draft, seen, allow_files)
    if seen.checked is not None:
        analyses = (replace(a, options=options.get(a.id, a.options)) for a in seen.checked.analyses)
        seen.checked = replace(seen.checked, analyses=tuple(analyses))
    readable = _read_all(draft.sourced, seen, None if found.mismatch else facts, store, allow_files)
    if seen.checked is not None and facts is not None and sound and readable:
        try:
            seen.edits = compile_edits(seen.checked, seen.tensors, facts)
        except ProgramError as error:
            seen.problems += error.problems
    return seen


def _unavailable(sourced: SourcedProgram) -> list[Problem]:
    missing = "is not available in this version"
    found = [
        sourced.problem(
            ("observe", id, "before"), f"{missing}: rows are read after the edits at their site and layer"
        )
        for id, observe in sourced.program.observe.items()
        if observe.before
    ]
    stops = (i for i, rule in enumerate(sourced.program.act) if rule.do == "stop")
    return found + [sourced.problem(("act", i, "do"), f"stop {missing}") for i in stops]


# -- analyzers ----------------------------------------------------------------------------------


def _check_analyzers(draft: Draft, seen: Inspection, allow_files: bool) -> dict[str, dict[str, Any]]:
    """Whether every analyzer exists, takes its options, and can read what it is to read. The options of
    each, with files as their content where the analyzer takes it, else as absolute paths."""
    assert draft.sourced is not None
    program, found = draft.sourced.program, {}
    for id, analyze in program.analyze.items():
        path: Path = ("analyze", id)
        try:
            analyzer = get_analyzer(analyze.analyzer)
        except ProgramError as error:
            seen.problems.append(draft.sourced.problem((*path, "analyzer"), error.problems[0].message))
            continue
        for i, name in enumerate(analyze.observe):
            why = misfit(analyzer, program.observe[name].site) if name in program.observe else None
            if why is not None:
                seen.problems.append(draft.sourced.problem((*path, "observe", i), why))
        found[id] = _check_options((*path, "options"), analyzer, draft, seen, allow_files)
    return found


def _check_options(
    path: Path, analyzer: Analyzer, draft: Draft, seen: Inspection, allow_files: bool
) -> dict[str, Any]:
    sourced = draft.sourced
    assert sourced is not None
    analyze = sourced.program.analyze[str(path[1])]
    given = dict(analyze.options)
    files: dict[Path, str] = {}
    for where, ref in named_by(analyzer.Options, given, "file"):
        if not allow_files:
            why = "names a file, and files are not read here"
            seen.problems.append(sourced.problem((*path, *where), why))
            return given
        files[where] = str(file_of(ref, sourced.base_dir))
        _replace(given, where, files[where])
    try:
        options: BaseModel = analyzer.Options.model_validate(given)
    except ValidationError as error:
        seen.problems += problems_of(
            error, given, analyzer.Options, lambda at: sourced.line((*path, *at)), prefix=path
        )
        return given
    for where, ref in named_by(analyzer.Options, dict(options), "span"):
        if problem := _span_problem(draft, analyze.observe, ref):
            seen.problems.append(sourced.problem((*path, *where), problem))
    for at, file in files.items():
        try:
            seen.files[path + at] = _content_digest(options, at, file)
        except OSError as error:
            seen.problems.append(sourced.problem(path + at, f"{file}: {error.strerror}"))
    return given | {str(at[0]): getattr(options, str(at[0])) for at in files}


def _content_digest(options: BaseModel, where: Path, ref: str) -> str:
    """Of what the option holds; of the file itself where the analyzer reads it on its own."""
    value = getattr(options, str(where[0]))
    if len(where) > 1 and isinstance(value, (list, tuple)):
        value = value[int(where[1])]
    return value.digest if isinstance(value, Held) else digest_file(ref)


def _replace(options: dict[str, Any], where: Path, value: str) -> None:
    """Put a value in place of an option, or of one item of a list."""
    name = str(where[0])
    if len(where) == 1:
        options[name] = value
    else:
        options[name] = [value if i == where[1] else item for i, item in enumerate(options[name])]


def _span_problem(draft: Draft, observed: tuple[str, ...], ref: str) -> str | None:
    """Why an option cannot name this span; where only sums over spans are observed it must be one of them."""
    assert draft.sourced is not None
    program, name = draft.sourced.program, split_span_ref(ref)[0]
    if draft.has_lost("spans", name):
        return None
    if name not in program.spans:
        return unknown("span", name, program.spans)
    for id in observed:
        observe = program.observe.get(id)
        keys = [] if observe is None else list(observe.keys or ())
        if keys and ref not in keys and name not in keys:
            return f"span {ref!r} is not among the keys of {id!r}: {', '.join(keys)}"
    return None


# -- tensors ------------------------------------------------------------------------------------


def _read_all(
    sourced: SourcedProgram, seen: Inspection, facts: ModelFacts | None, store: Store | None, files: bool
) -> bool:
    """Whether all could be read."""
    sizes, good = Sizes.of(facts, sourced.program.model), True
    for use in uses_of(sourced.program):
        width = _width(use, sourced, sizes)
        try:
            seen.tensors[use.key] = _read(use, width, sourced, store, files)
        except ProgramError as error:
            seen.problems.append(sourced.problem(use.path, str(error)))
            good = False
    return good


def _read(
    use: TensorUse, width: int | None, sourced: SourcedProgram, store: Store | None, files: bool
) -> Loaded:
    base_dir = sourced.base_dir if files else None
    if use.role == "probe":
        return read_probe(use.ref, base_dir, width, store)
    if use.role == "sae":
        return read_sae(use.ref, base_dir, width, use.features, store)
    if use.role == "scalar":
        return torch.tensor(read_scalar(use.ref, base_dir, store))
    return read_vector(use.ref, base_dir, width, store)


def _width(use: TensorUse, sourced: SourcedProgram, sizes: Sizes) -> int | None:
    """The width of one row, or of one head at a head site; None if it is not known."""
    section, id = use.path[0], use.path[1]
    holders: Mapping[str, Any] = (
        sourced.program.observe if section == "observe" else sourced.program.intervene
    )
    site = SITES[holders[str(id)].site]
    return sizes.hidden if site.kind == "stream" else sizes.head_dim
