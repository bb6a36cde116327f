"""What a request may say: :class:`RequestSpec`, the value of ``extra_args["hook"]``."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from ..errors import ProgramError
from ._problems import problems_of
from ._types import NameOrNames, Natural, Number, Section, SpanRef, fail

#: What errors call it: ``hook=`` of HookLLM is a key of ``extra_args``, and one of ``vllm_xargs`` over HTTP.
HOOK_ARG = "hook"

_PARAMETER = re.compile(r"(?:[a-z0-9][a-z0-9._-]{0,63}/)?[A-Za-z_][A-Za-z0-9_-]{0,63}\.[a-z_]+")


def _parameter(key: str) -> str:
    if not _PARAMETER.fullmatch(key):
        raise fail(f"{key!r} is not a parameter; write id.parameter, such as format.target")
    return key


def _token_range(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] >= pair[1]:
        raise fail(f"[{pair[0]}, {pair[1]}] is empty: ranges are half-open [first, end)")
    return pair


def _distinct(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if names and len(set(names)) != len(names):
        raise fail("a program is named twice")
    return names


class RequestSpec(Section):
    """What one request asks for.

    ``use``: names of programs, in order of application; empty means none; None means that the
    request did not say, so the default of the caller holds. ``set``: parameters of interventions
    by ``id.parameter``. ``spans``: token ranges [first, end) of the prompt that replace those a
    program would find.
    """

    use: Annotated[NameOrNames | None, AfterValidator(_distinct)] = None
    set: dict[Annotated[str, AfterValidator(_parameter)], Number] = Field(default_factory=dict)
    spans: dict[SpanRef, Annotated[tuple[Natural, Natural], AfterValidator(_token_range)]] = Field(
        default_factory=dict
    )


#: Lists of at most so many names are kept: any client can send one.
FEW = 16


def parse_request(value: Any) -> RequestSpec | None:
    """Read the value of ``extra_args["hook"]``.

    None (absent) gives None: only ``apply: always`` programs. False or 0 gives an empty ``use``.
    A string is the name of a program, unless it starts like JSON (``{``, ``[`` or ``"``).
    """
    if value is None or isinstance(value, RequestSpec):
        return value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ProgramError(HOOK_ARG, f"not valid JSON: {error}") from None
    if isinstance(value, (bool, int, float)) and value == 0:
        return RequestSpec(use=())
    if value == "":
        raise ProgramError(HOOK_ARG, "is empty; give the name of a program, or False for none")
    names = value["use"] if isinstance(value, dict) and value.keys() == {"use"} else value
    if _short(names):
        return _using(names)
    if isinstance(names, list) and len(names) <= FEW and all(_short(name) for name in names):
        return _using(tuple(names))
    if isinstance(value, (str, list, tuple)):
        value = {"use": value}
    if not isinstance(value, dict):
        raise ProgramError(
            HOOK_ARG,
            f"{value!r}: give the name of a program, a list of names, a request dict, or False for none",
        )
    if "schema" in value:
        raise ProgramError(
            HOOK_ARG,
            "is a whole program; load it (HookLLM.load_program, or `programs` at start), and give its name",
        )
    return _validated(value)


def _short(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= 128


@lru_cache(maxsize=256)
def _using(names: str | tuple[str, ...]) -> RequestSpec:
    """Most requests only name programs, the same as the one before."""
    return _validated({"use": names})


def _validated(value: Any) -> RequestSpec:
    try:
        return RequestSpec.model_validate(value)
    except ValidationError as error:
        raise ProgramError(HOOK_ARG, problems_of(error, value, RequestSpec)) from None
