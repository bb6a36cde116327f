"""From the errors of pydantic to :class:`~vllm_hook.errors.Problem`, with the paths that users wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..errors import Problem
from ..suggest import closest, did_you_mean, unknown
from ._types import METHODS, SPAN_KINDS, Word

Path = tuple["str | int", ...]

_REQUIRED = "is required"


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


def known_keys(model: type[BaseModel], path: Path, method: Any = None) -> list[str]:
    """The keys that may stand where ``path`` ends: those of every kind of section that fits there, of edits
    only those of ``method``, if it is given."""
    here = [model]
    for part in path[:-1]:
        fields = [f for m in here for name, f in m.model_fields.items() if part in (name, f.alias)]
        # An id or an index is no field: it stays with the sections of which there are several.
        here = [m for f in fields for m in _models(f.annotation)] or here
    if method is not None:
        own = [(m, m.model_fields.get("method")) for m in here]
        here = [m for m, field in own if field is not None and method in get_args(field.annotation)] or here
    return list(dict.fromkeys(f.alias or name for m in here for name, f in m.model_fields.items()))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, through unions, lists and dicts."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _key_message(name: str, keys: Sequence[str], method: Any, of_method: Sequence[str]) -> str:
    if name in keys and method is not None:
        return f"is not a key of method {method}; its keys: {', '.join(of_method)}"
    if name in keys:
        return "unknown key here: it belongs to another kind"
    meant = did_you_mean(name, keys)
    return f"unknown key{meant}" if meant or not keys else f"unknown key; known keys: {', '.join(keys)}"


def _message(error: Mapping[str, Any]) -> str:
    kind, value = error["type"], error.get("input")
    if kind == "missing":
        return _REQUIRED
    if kind == "method":
        return _method_message(value)
    message = str(error["msg"])
    if kind == "span" and isinstance(value, Mapping):
        return message + "".join(f"; {key!r} is none of these keys{_meant(key)}" for key in value)
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


def _meant(key: Any) -> str:
    return did_you_mean(str(key), SPAN_KINDS).replace(";", ",")


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
    found = []
    items = error.errors(include_url=False, include_context=False)
    for item in items:
        if item["type"] == "too_short" and any(_below(other["loc"], item["loc"]) for other in items):
            continue  # too short for the items that were refused already
        path = clean_path(item["loc"], data)
        if item["type"] == "method" and isinstance(item["input"], Mapping):
            path = (*path, "method")
        message = _message(item)
        if item["type"] == "extra_forbidden" and model is not None:
            method = _method_at(data, path[:-1])
            message = _key_message(
                str(path[-1]), known_keys(model, path), method, known_keys(model, path, method)
            )
        found.append(Problem(format_path((*prefix, *path)), message, line(path)))
    if model is not None and (meant := _with_methods_meant(items, data)) is not None:
        try:
            model.model_validate(meant)
        except ValidationError as more:
            told = problems_of(more, meant, model, line, prefix)
            found += [p for p in told if p not in found and p.message != _REQUIRED]
    return found


def _method_at(data: Any, path: Path) -> Any:
    """The method of the edit that stands there; None if there is no edit with a method."""
    for part in path:
        data = data[part]
    method = data.get("method") if isinstance(data, Mapping) else None
    return method if method in METHODS else None


def _with_methods_meant(items: Sequence[Any], data: Any) -> Any:
    """The data with the methods that look most like those that do not exist; None if none does. What else is
    wrong with an edit shows only when its method is known."""
    found = None
    for item in items:
        edit = item["input"] if item["type"] == "method" else None
        given = edit.get("method") if isinstance(edit, Mapping) else None
        meant = closest(given, METHODS) if isinstance(given, str) else None
        if meant is not None:
            found = deepcopy(data) if found is None else found
            here = found
            for part in clean_path(item["loc"], data):
                here = here[part]
            here["method"] = meant
    return found
