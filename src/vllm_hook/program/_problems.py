"""From the errors of pydantic to :class:`~vllm_hook.errors.Problem`, with the paths that users wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..errors import Problem
from ..suggest import did_you_mean, unknown
from ._types import METHODS, Word

Path = tuple["str | int", ...]


def format_path(path: Sequence[str | int]) -> str:
    """``("observe", "focus", "heads", 2)`` as ``observe.focus.heads[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def clean_path(loc: Sequence[str | int], data: Any) -> Path:
    """Drop from a pydantic location what is not in the data: union tags, and indexes of a lone item."""
    path: list[str | int] = []
    here = data
    for i, part in enumerate(loc):
        if isinstance(part, str) and part.startswith("<") and part.endswith(">"):
            continue
        if part == "[key]":
            break
        if isinstance(here, Mapping) and not isinstance(part, int):
            path.append(part)
            here = here.get(part)
        elif isinstance(here, (list, tuple)) and isinstance(part, int):
            path.append(part)
            here = here[part] if part < len(here) else None
        elif not isinstance(part, int) and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def known_keys(model: type[BaseModel]) -> set[str]:
    """All keys of a model and of the models in its fields, for suggestions."""
    keys: set[str] = set()
    seen: set[type] = set()

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation in seen:
                return
            seen.add(annotation)
            for name, field in annotation.model_fields.items():
                keys.add(field.alias or name)
                visit(field.annotation)
        for arg in getattr(annotation, "__args__", ()):
            visit(arg)

    visit(model)
    return keys


def _message(error: Mapping[str, Any], path: Path, keys: set[str]) -> str:
    kind, value = error["type"], error.get("input")
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "unknown key" + did_you_mean(str(path[-1]), keys)
    if kind == "method":
        return _method_message(value)
    message = str(error["msg"])
    if kind == "selector":
        return message + (did_you_mean(value, get_args(Word)) if isinstance(value, str) else "")
    if isinstance(value, bool) and kind in ("string_type", "literal_error"):
        message += f", got {str(value).lower()} (YAML reads a bare yes, no, on or off as a boolean: quote it)"
    elif value is not None and not isinstance(value, (dict, list, tuple)) and kind != "program":
        message += f", got {value!r:.80}"
        if kind == "literal_error":
            message += did_you_mean(str(value), re.findall("'([^']*)'", str(error["msg"])))
    elif value is None and kind != "program":
        message += ", got nothing"
    return message


def _method_message(edit: Any) -> str:
    if not isinstance(edit, Mapping):
        return f"not an edit; write {{site: .., method: .., ..}} with a method of {', '.join(METHODS)}"
    given = edit.get("method")
    return (
        f"is required: one of {', '.join(METHODS)}"
        if given is None
        else unknown("method", str(given), METHODS)
    )


def _below(loc: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(loc) > len(other) and tuple(loc[: len(other)]) == tuple(other)


def problems_of(
    error: ValidationError,
    data: Any,
    model: type[BaseModel] | None = None,
    line: Callable[[Path], int | None] = lambda path: None,
    prefix: Path = (),
) -> list[Problem]:
    """Every error of a validation, by the path (after ``prefix``) and line that the user wrote."""
    keys = known_keys(model) if model else set()
    found = []
    items = error.errors(include_url=False, include_context=False)
    for item in items:
        if item["type"] == "too_short" and any(_below(other["loc"], item["loc"]) for other in items):
            continue  # too short for the items that were refused already
        path = clean_path(item["loc"], data)
        if item["type"] == "method" and isinstance(item["input"], Mapping):
            path = (*path, "method")
        found.append(Problem(format_path((*prefix, *path)), _message(item, path, keys), line(path)))
    return found
