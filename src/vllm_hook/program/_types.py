"""Small field types that the sections of a program share: ids, ranges, selectors, tensor references.

Each union is told apart by its shape and carries a tag in angle brackets, which :mod:`.load` drops
from the paths of errors, so that a message names the key that the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from ..sites import SITES
from ..suggest import unknown

#: A span has one of these keys.
SPAN_KINDS = ("message", "between", "text", "tokens")
METHODS = ("add", "clamp", "ablate", "rotate", "sae", "affine", "attend")

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
ID_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"
KEY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}(\[[0-9]{1,6}\])?$"

_ID_HELP = "use letters, digits, '_' and '-', at most 64, not a digit or '-' first"


def fail(message: str) -> PydanticCustomError:
    """A validation error whose message reaches the user unchanged."""
    return PydanticCustomError("program", "{message}", {"message": message})


class Section(BaseModel):
    """Base of all parts of a program: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _matching(pattern: str, what: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise fail(f"{value!r} is not a valid {what}")
        return value

    return AfterValidator(check)


def _known_site(value: str) -> str:
    if value not in SITES:
        raise fail(unknown("site", value, SITES))
    return value


def _tensor_ref(value: str) -> str:
    file, _, tensor = value.partition("#")
    if not file or "\0" in value or (value.endswith("#") and not tensor):
        raise fail(f"{value!r} is not a tensor reference; write file, file#tensor or sha256:<hex>#tensor")
    if file.startswith("sha256:") and not re.fullmatch(r"sha256:[0-9a-f]{64}", file):
        raise fail(f"{file!r}: sha256: takes 64 lower-case hexadecimal digits")
    return value


StrictStr = Annotated[str, Field(strict=True)]
NonEmpty = Annotated[str, Field(strict=True, min_length=1)]
StrictInt = Annotated[int, Field(strict=True, gt=-(2**31), lt=2**31)]
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]

Name = Annotated[
    str,
    Field(strict=True),
    _matching(NAME_PATTERN, "program name: lower-case letters, digits, '.', '_', '-', at most 64"),
]
Id = Annotated[str, Field(strict=True), _matching(ID_PATTERN, f"id: {_ID_HELP}")]
SpanRef = Annotated[
    str, Field(strict=True), _matching(KEY_PATTERN, "span name: an id, or id[n] for one of a list")
]
SiteName = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_known_site),
    WithJsonSchema({"type": "string", "enum": list(SITES)}),
]
TensorRef = Annotated[str, Field(strict=True), AfterValidator(_tensor_ref)]


# -- ranges -------------------------------------------------------------------------------------


def _ordered(pair: tuple[int, int | None]) -> tuple[int, int | None]:
    start, end = pair
    same_sign = end is not None and (start < 0) == (end < 0)
    if end is not None and same_sign and start >= end:
        raise fail(f"[{start}, {end}] is empty: ranges are half-open, the first must be less than the second")
    return pair


def _a_pair(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise fail("write two numbers, [first, end); null as end means to the end")
    return value


PAIR_HELP = "half-open [first, end); negative numbers count from the prompt's end; null: to the end"
Pair = Annotated[
    tuple[StrictInt, StrictInt | None],
    BeforeValidator(_a_pair),
    AfterValidator(_ordered),
    Field(description=PAIR_HELP),
]
NaturalPair = Annotated[tuple[Natural, Natural | None], BeforeValidator(_a_pair), AfterValidator(_ordered)]


# -- selectors ----------------------------------------------------------------------------------

Word = Literal["all", "prompt", "generated", "last_prompt"]


class PromptRange(Section):
    """Positions of the prompt; negative numbers count from its end."""

    range: Pair


class GeneratedRange(Section):
    """Positions of the generation, counted from its first token."""

    generated: NaturalPair


class SpanRows(Section):
    """The positions of a named span."""

    span: SpanRef


class TokenIds(Section):
    """Positions, prompt or generated, whose token is one of these."""

    token_ids: Annotated[tuple[Natural, ...], Field(min_length=1)]


def key_tag(keys: tuple[str, ...], value: Any) -> str | None:
    """The union tag of a mapping or model: the first of ``keys`` that it has."""
    if isinstance(value, BaseModel):
        value = type(value).model_fields
    if isinstance(value, Mapping):
        return next((f"<{key}>" for key in keys if key in value), None)
    return None


def _selector_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>" if value in get_args(Word) else None
    return key_tag(("range", "generated", "span", "token_ids"), value)


Selector = Annotated[
    Annotated[Word, Tag("<word>")]
    | Annotated[PromptRange, Tag("<range>")]
    | Annotated[GeneratedRange, Tag("<generated>")]
    | Annotated[SpanRows, Tag("<span>")]
    | Annotated[TokenIds, Tag("<token_ids>")],
    Discriminator(
        _selector_tag,
        custom_error_type="selector",
        custom_error_message=(
            "not a selector; write all, prompt, generated, last_prompt, {range: [a, b]}, "
            "{generated: [a, b]}, {span: name}, {token_ids: [..]} or a list of these"
        ),
    ),
]


class OneOrMany:
    """JSON-schema side of :func:`_as_tuple`: an item, or a list of items."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        many = dict(handler(core_schema))
        return {"anyOf": [many["items"], many]}


def _as_tuple(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Selectors = Annotated[tuple[Selector, ...], Field(min_length=1), BeforeValidator(_as_tuple), OneOrMany()]
IdOrIds = Annotated[tuple[Id, ...], Field(min_length=1), BeforeValidator(_as_tuple), OneOrMany()]
NameOrNames = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple), OneOrMany()]


# -- layers and heads ---------------------------------------------------------------------------


def _layers_tag(value: Any) -> str | None:
    if value == "all":
        return "<word>"
    return "<list>" if isinstance(value, (list, tuple)) else None


Layers = Annotated[
    Annotated[Literal["all"], Tag("<word>")] | Annotated[tuple[StrictInt, ...], Tag("<list>")],
    Discriminator(
        _layers_tag,
        custom_error_type="program",
        custom_error_message="write all, or a list of layers such as [3, 5] (0-based; negative from the end)",
    ),
]


def _head_pair(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise fail("write [layer, head]")
    return value


HeadPair = Annotated[tuple[StrictInt, StrictInt], BeforeValidator(_head_pair)]


def _heads_tag(value: Any) -> str | None:
    if not isinstance(value, (list, tuple)):
        return None
    return "<pairs>" if any(isinstance(item, (list, tuple)) for item in value) else "<indexes>"


Heads = Annotated[
    Annotated[tuple[HeadPair, ...], Tag("<pairs>")] | Annotated[tuple[StrictInt, ...], Tag("<indexes>")],
    Discriminator(
        _heads_tag,
        custom_error_type="program",
        custom_error_message="write a list: [[layer, head], ..] for attention, [head, ..] for q, k, v and z",
    ),
]
