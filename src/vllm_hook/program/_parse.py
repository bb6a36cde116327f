"""Text of a program -> plain data and the line of each field.

YAML is read with a loader that refuses anchors, aliases, merge keys and duplicate keys, and whose
nodes say on which line each field stands. Values are those of YAML 1.1 as PyYAML reads them, but
numbers such as ``1e-3`` are numbers. Text that is JSON is read as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from ..errors import Problem, ProgramError
from ._problems import Path as FieldPath
from ._problems import format_path


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


def parse(text: str, source: str) -> tuple[Any, dict[FieldPath, int], list[Problem]]:
    """The data of a text, the line of each field, and what is wrong with keys that leaves the rest readable.

    Of a key that is there twice the first counts. ProgramError: nothing can be read.
    """
    is_json, data = _parse_json(text)
    lines: dict[FieldPath, int] = {}
    problems: list[Problem] = []
    try:
        # JSON may be indented with tabs, which YAML refuses; valid JSON has no bare tab inside a string.
        loader = _Loader(text.replace("\t", " ") if is_json else text)
        node = loader.get_single_node()
        readable = _walk(node, (), lines, problems)
        if not is_json and readable and node is not None:
            data = loader.construct_document(node)
    except RecursionError:
        raise ProgramError(source, "is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # JSON is only composed for its line numbers: what YAML cannot read of it has no line.
        if not is_json:
            raise ProgramError(source, [_syntax_problem(error)]) from None
        readable = True
    if problems and (is_json or not readable):
        raise ProgramError(source, problems)
    return data, lines, problems


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
) -> bool:
    """Note the line of every field; find duplicate and merge keys, and take them out. False: some key is
    not text, so the data cannot be made."""
    readable = True
    if node is None:
        return readable
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            readable &= _walk(item, (*path, i), lines, problems)
    if not isinstance(node, yaml.MappingNode):
        return readable
    kept = []
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem(format_path(path), "a key must be text", line))
            readable = False
            continue
        here = (*path, key.value)
        if here in lines:
            problems.append(Problem(format_path(here), f"duplicate key, first on line {lines[here]}", line))
            continue
        lines[here] = line
        if key.tag == "tag:yaml.org,2002:merge":
            problems.append(Problem(format_path(here), "merge keys are not allowed", line))
            continue
        kept.append((key, value))
        readable &= _walk(value, here, lines, problems)
    node.value = kept
    return readable
