"""Read a program file, dict or text. Reports every error of a file at once, with field and line.

YAML is read with a loader that refuses anchors, aliases, merge keys and duplicate keys, and whose
nodes say on which line each field stands. Values are those of YAML 1.1 as PyYAML reads them, but
numbers such as ``1e-3`` are numbers. Text that is JSON is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml
from pydantic import ValidationError

from ..errors import Problem, ProgramError
from . import hub
from ._problems import Path as FieldPath
from ._problems import format_path, problems_of
from .schema import Program

MAX_BYTES = 256 * 1024
"""Largest program file. Tensors live in files of their own."""

Source = Union[str, Path, Mapping[str, Any], Program, "SourcedProgram"]
"""A path, a name on the hub (``hf://org/repo/file``), a text of a program (it holds a newline or starts
with ``{``), a dict, or a Program."""


@dataclass(frozen=True)
class SourcedProgram:
    """A program and where it came from. ``lines`` maps the path of a field to its 1-based line."""

    program: Program
    source: str
    base_dir: Path
    lines: Mapping[FieldPath, int] = field(default_factory=dict)

    def line(self, path: FieldPath) -> int | None:
        """The line of a field, or of the closest parent that the file has."""
        return _closest_line(self.lines, path)

    def problem(self, path: FieldPath, message: str) -> Problem:
        return Problem(format_path(path), message, self.line(path))


def load(source: Source) -> SourcedProgram:
    """Read a program from anywhere. Tensor files are relative to the program file, else to the
    working directory. Raises :class:`ProgramError` with every problem found.
    """
    if isinstance(source, SourcedProgram):
        return source
    if isinstance(source, Program):
        return SourcedProgram(source, f"program {source.name!r}", Path.cwd())
    if isinstance(source, Mapping):
        name = source.get("name")
        label = f"program {name!r}" if isinstance(name, str) else "program"
        return _validated(dict(source), label, Path.cwd(), {})
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return load_text(source, "program text", Path.cwd())
    if isinstance(source, (str, Path)) and hub.is_hub_name(str(source)):
        return _load_from_hub(str(source))
    if isinstance(source, (str, Path)):
        return _load_file(Path(source))
    raise ProgramError("program", f"give a path, a dict or a Program, not {type(source).__name__}")


def load_text(text: str | bytes, source: str, base_dir: Path) -> SourcedProgram:
    """Read a program from YAML or JSON text; ``source`` names it in errors."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        raise ProgramError(source, f"is larger than {MAX_BYTES // 1024} KiB")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise ProgramError(source, [Problem("", f"is not UTF-8 text (byte {error.start})", line)]) from None
    if not decoded.strip():
        raise ProgramError(source, "is empty")
    data, lines = _parse(decoded, source)
    return _validated(data, source, base_dir, lines)


def _load_from_hub(source: str) -> SourcedProgram:
    path, revision = hub.fetch(source)
    loaded = _load_file(path)
    hub.fetch_tensors(source, revision, loaded.program.to_dict())
    return loaded


def _load_file(path: Path) -> SourcedProgram:
    source = str(path)
    try:
        if path.is_dir():
            raise ProgramError(source, "is a directory, not a program file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ProgramError(source, "no such file") from None
    except (OSError, ValueError) as error:
        raise ProgramError(source, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return load_text(content, source, path.absolute().parent)


def _validated(data: Any, source: str, base_dir: Path, lines: Mapping[FieldPath, int]) -> SourcedProgram:
    if not isinstance(data, dict):
        raise ProgramError(source, f"a program is a mapping (schema: 1, name: ..), not a {_kind(data)}")
    try:
        program = Program.model_validate(data)
    except ValidationError as error:
        problems = problems_of(error, data, Program, lambda path: _closest_line(lines, path))
        raise ProgramError(source, sorted(problems, key=lambda p: p.line or 0)) from None
    except RecursionError:
        raise ProgramError(source, "is nested too deeply") from None
    return SourcedProgram(program, source, base_dir, lines)


def _kind(data: Any) -> str:
    return {list: "list", str: "text", type(None): "null"}.get(type(data), type(data).__name__)


def _closest_line(lines: Mapping[FieldPath, int], path: FieldPath) -> int | None:
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


# -- parsing ------------------------------------------------------------------------------------


class _Refused(yaml.MarkedYAMLError):
    """Something that YAML allows and a program may not contain."""


class _Loader(yaml.SafeLoader):
    """SafeLoader without anchors and aliases, which can make a small file unfold to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise _Refused(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


# YAML 1.1 as PyYAML reads it takes 1e-3 and 1E5 for text; JSON and YAML 1.2 take them for numbers.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> tuple[Any, dict[FieldPath, int]]:
    """The data of a text and the line of each field."""
    is_json, data = _parse_json(text)
    lines: dict[FieldPath, int] = {}
    problems: list[Problem] = []
    try:
        # JSON may be indented with tabs, which YAML refuses; valid JSON has no bare tab inside a string.
        loader = _Loader(text.replace("\t", " ") if is_json else text)
        node = loader.get_single_node()
        _walk(node, (), lines, problems)
        if not is_json and not problems and node is not None:
            data = loader.construct_document(node)
    except RecursionError:
        raise ProgramError(source, "is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # JSON is only composed for its line numbers: what YAML cannot read of it has no line.
        if not is_json:
            raise ProgramError(source, [_syntax_problem(error)]) from None
    if problems:
        raise ProgramError(source, problems)
    return data, lines


def _parse_json(text: str) -> tuple[bool, Any]:
    if not text.lstrip().startswith("{"):
        return False, None
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def _syntax_problem(error: Exception) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem("", f"is not valid YAML: {error}")
    mark = error.problem_mark or error.context_mark
    what = ", ".join(str(part) for part in (error.context, error.problem) if part)
    prefix = "" if isinstance(error, _Refused) else "is not valid YAML: "
    return Problem("", prefix + what, mark.line + 1 if mark else None)


def _walk(
    node: yaml.Node | None, path: FieldPath, lines: dict[FieldPath, int], problems: list[Problem]
) -> None:
    """Note the line of every field; find duplicate and merge keys."""
    if node is None:
        return
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*path, i), lines, problems)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem(format_path(path), "a key must be text", line))
            continue
        here = (*path, key.value)
        if here in lines:
            problems.append(Problem(format_path(here), f"duplicate key, first on line {lines[here]}", line))
            continue
        if key.tag == "tag:yaml.org,2002:merge":
            problems.append(Problem(format_path(here), "merge keys are not allowed", line))
        lines[here] = line
        _walk(value, here, lines, problems)
