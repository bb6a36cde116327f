"""Read a program: a file, a dict, a text, or a name. Every error is reported at once, with field and line.

:func:`load` gives a program or raises; :func:`read` also gives what is well formed of one that is not, so
that a check can go on where the form is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from pydantic import ValidationError

from ..errors import Problem, ProgramError
from . import hub
from ._parse import parse
from ._problems import Path as FieldPath
from ._problems import clean_path, format_path, problems_of
from .locate import locate
from .schema import Program

MAX_BYTES = 256 * 1024
"""Largest program file. Tensors live in files of their own."""

Source = Union[str, Path, Mapping[str, Any], Program, "SourcedProgram"]
"""A path, the name of a program that ships (``smollm2-list``), a name on the hub (``hf://org/repo/file``),
a text of a program (it holds a newline or starts with ``{``), a dict, or a Program."""

SECTIONS = ("spans", "observe", "intervene", "analyze")


@dataclass(frozen=True)
class SourcedProgram:
    """A program and where it came from. ``lines`` maps the path of a field to its 1-based line; ``rules``:
    where in the file each rule of ``act`` stands, if some were left out."""

    program: Program
    source: str
    base_dir: Path
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    rules: tuple[int, ...] | None = None

    def line(self, path: FieldPath) -> int | None:
        """The line of a field, or of the closest parent that the file has."""
        return _closest_line(self.lines, self._as_written(path))

    def problem(self, path: FieldPath, message: str) -> Problem:
        return Problem(format_path(self._as_written(path)), message, self.line(path))

    def _as_written(self, path: FieldPath) -> FieldPath:
        if self.rules is None or len(path) < 2 or path[0] != "act":
            return path
        return ("act", self.rules[int(path[1])], *path[2:])


@dataclass(frozen=True)
class Draft:
    """What can be read of a program. ``sourced``: its well-formed part, None if there is none.

    ``lost``: what was left out of each section, None for the section as a whole; a reference to it is
    not wrong for that.
    """

    source: str
    sourced: SourcedProgram | None
    problems: tuple[Problem, ...] = ()
    lost: Mapping[str, frozenset[str] | None] = field(default_factory=dict)

    def has_lost(self, section: str, id: str) -> bool:
        names = self.lost.get(section, frozenset())
        return names is None or id in names


def load(source: Source) -> SourcedProgram:
    """Read a program from anywhere. Tensor files are relative to the program file, else to the
    working directory. Raises :class:`ProgramError` with every problem found.
    """
    return _whole(read(source))


def load_text(text: str | bytes, source: str, base_dir: Path) -> SourcedProgram:
    """Read a program from YAML or JSON text; ``source`` names it in errors."""
    return _whole(_read_text(text, source, base_dir))


def read(source: Source) -> Draft:
    """What can be read of a program. ProgramError: nothing can, it is no mapping or is not there."""
    if isinstance(source, SourcedProgram):
        return Draft(source.source, source)
    if isinstance(source, Program):
        label = f"program {source.name!r}"
        return Draft(label, SourcedProgram(source, label, Path.cwd()))
    if isinstance(source, Mapping):
        name = source.get("name")
        label = f"program {name!r}" if isinstance(name, str) else "program"
        return _validated(dict(source), label, Path.cwd(), {})
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return _read_text(source, "program text", Path.cwd())
    if isinstance(source, (str, Path)) and hub.is_hub_name(str(source)):
        return _read_from_hub(hub.full_name(str(source)))
    if isinstance(source, (str, Path)):
        return _read_file(locate(source))
    raise ProgramError("program", f"give a path, a dict or a Program, not {type(source).__name__}")


def _whole(draft: Draft) -> SourcedProgram:
    if draft.problems or draft.sourced is None:
        raise ProgramError(draft.source, list(draft.problems))
    return draft.sourced


def _read_from_hub(source: str) -> Draft:
    path, revision = hub.fetch(source)
    draft = _read_file(path)
    if draft.sourced is not None:
        hub.fetch_tensors(source, revision, draft.sourced.program.to_dict())
    return draft


def _read_file(path: Path) -> Draft:
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ProgramError(source, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _read_text(content, source, path.absolute().parent)


def _read_text(text: str | bytes, source: str, base_dir: Path) -> Draft:
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        raise ProgramError(source, f"is larger than {MAX_BYTES // 1024} KiB, so it is no program file")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise ProgramError(source, [Problem("", f"is not UTF-8 text (byte {error.start})", line)]) from None
    if not decoded.strip():
        raise ProgramError(source, "is empty")
    data, lines, problems = parse(decoded, source)
    return _validated(data, source, base_dir, lines, problems)


def _validated(
    data: Any,
    source: str,
    base_dir: Path,
    lines: Mapping[FieldPath, int],
    problems: list[Problem] | None = None,
) -> Draft:
    """``problems``: what is wrong with the text already."""
    if not isinstance(data, dict):
        raise ProgramError(source, f"a program is a mapping (schema: 1, name: ..), not a {_kind(data)}")
    found = list(problems or ())
    lost: Mapping[str, frozenset[str] | None] = {}
    program: Program | None = None
    rules: tuple[int, ...] | None = None
    try:
        program = Program.model_validate(data)
    except ValidationError as error:
        found += problems_of(error, data, Program, lambda path: _closest_line(lines, path))
        kept, lost, rules = _well_formed(data, [clean_path(e["loc"], data) for e in error.errors()])
        try:
            program = Program.model_validate(kept)
        except ValidationError:
            program = None
    except RecursionError:
        raise ProgramError(source, "is nested too deeply") from None
    found.sort(key=lambda p: p.line or 0)
    sourced = None if program is None else SourcedProgram(program, source, base_dir, lines, rules)
    return Draft(source, sourced, tuple(found), lost)


def _well_formed(
    data: dict[str, Any], wrong: list[FieldPath]
) -> tuple[dict[str, Any], dict[str, frozenset[str] | None], tuple[int, ...] | None]:
    """The data without the entries that hold an error, what was left out by section, and the indexes of the
    rules that were kept."""
    kept = {key: dict(value) if key in SECTIONS and isinstance(value, dict) else value
            for key, value in data.items()}  # fmt: skip
    lost: dict[str, set[str] | None] = {}
    bad = {path[1] for path in wrong if len(path) > 1 and path[0] == "act"}
    rules = tuple(i for i in range(len(data["act"])) if i not in bad) if bad else None
    for path in wrong:
        if len(path) > 1 and isinstance(kept.get(str(path[0])), dict) and path[0] in SECTIONS:
            section = str(path[0])
            kept[section].pop(path[1], None)
            names = lost.setdefault(section, set())
            if names is not None:
                names.add(str(path[1]))
        elif path and not (len(path) > 1 and path[0] == "act"):
            kept.pop(str(path[0]), None)
            if path[0] in SECTIONS:
                lost[str(path[0])] = None
            elif path[0] not in Program.model_fields:
                # A section under a misspelt name: what is not there may be what was meant.
                lost.update({section: None for section in SECTIONS if section not in data})
    if rules is not None:
        kept["act"] = [data["act"][i] for i in rules]
    kept = {"schema": 1, "name": "unnamed", **kept}
    return kept, {section: None if ids is None else frozenset(ids) for section, ids in lost.items()}, rules


def _kind(data: Any) -> str:
    return {list: "list", str: "text", type(None): "null"}.get(type(data), type(data).__name__)


def _closest_line(lines: Mapping[FieldPath, int], path: FieldPath) -> int | None:
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
