"""The program file as immutable data: what may be written, not whether it fits a model.

:class:`Program` mirrors the file section by section. It checks form (types, ranges that are not
empty, exactly one of two keys); :mod:`.check` checks it against a model and itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from ._types import (
    METHODS,
    SPAN_KINDS,
    Flag,
    GeneratedRange,
    Heads,
    Id,
    IdOrIds,
    Layers,
    Name,
    Natural,
    NonEmpty,
    Number,
    Pair,
    PromptRange,
    Section,
    Selector,
    Selectors,
    SiteName,
    SpanRef,
    SpanRows,
    StrictInt,
    StrictStr,
    TensorRef,
    TokenIds,
    fail,
    key_tag,
)
from .request import RequestSpec, parse_request

__all__ = [
    "GeneratedRange",
    "Program",
    "PromptRange",
    "RequestSpec",
    "Selector",
    "SpanRows",
    "TokenIds",
    "parse_condition",
    "parse_request",
    "program_json_schema",
]


class ModelSection(Section):
    """The model that the program was made for; what is given must match."""

    id: NonEmpty | None = None
    layers: Natural | None = None
    heads: Natural | None = None
    kv_heads: Natural | None = None
    head_dim: Natural | None = None
    hidden: Natural | None = None


# -- spans --------------------------------------------------------------------------------------


class MessageSpan(Section):
    """Content of the last message of a role, or of its ``index``-th (0-based; negative from the end)."""

    message: NonEmpty
    index: StrictInt | None = None
    after: NonEmpty | None = None
    before: NonEmpty | None = None


class BetweenSpan(Section):
    """The text between two markers, without them; ``each``: every such text, as a list of spans."""

    between: tuple[NonEmpty, NonEmpty]
    each: Flag = False


class TextSpan(Section):
    """The first occurrence of these words in the rendered prompt."""

    text: NonEmpty


class TokensSpan(Section):
    """Token positions of the prompt."""

    tokens: Pair


def _span_tag(value: Any) -> str | None:
    return key_tag(SPAN_KINDS, value)


Span = Annotated[
    Annotated[MessageSpan, Tag("<message>")]
    | Annotated[BetweenSpan, Tag("<between>")]
    | Annotated[TextSpan, Tag("<text>")]
    | Annotated[TokensSpan, Tag("<tokens>")],
    Discriminator(
        _span_tag,
        custom_error_type="span",
        custom_error_message=(
            "not a span; write {message: role}, {between: [a, b]}, {text: words} or {tokens: [a, b]}"
        ),
    ),
]


# -- observations -------------------------------------------------------------------------------


class ProbeReduction(Section):
    """Raw logit of a linear probe, ``w.((h - mean)/scale) + b``."""

    probe: TensorRef


class ProjectionReduction(Section):
    """Dot product of the row with a vector."""

    projection: TensorRef


class CosineReduction(Section):
    """Cosine of the row with a vector."""

    cosine: TensorRef


class NormReduction(Section):
    """Euclidean norm of the row."""

    norm: Literal[True]


class SaeReduction(Section):
    """Activations of the listed features of a sparse autoencoder."""

    sae: TensorRef
    features: Annotated[tuple[Natural, ...], Field(min_length=1)]


def _reduction_tag(value: Any) -> str | None:
    return key_tag(("probe", "projection", "cosine", "norm", "sae"), value)


Reduction = Annotated[
    Annotated[ProbeReduction, Tag("<probe>")]
    | Annotated[ProjectionReduction, Tag("<projection>")]
    | Annotated[CosineReduction, Tag("<cosine>")]
    | Annotated[NormReduction, Tag("<norm>")]
    | Annotated[SaeReduction, Tag("<sae>")],
    Discriminator(
        _reduction_tag,
        custom_error_type="program",
        custom_error_message=(
            "not a reduction; write {probe: file}, {projection: file}, {cosine: file}, {norm: true} "
            "or {sae: file, features: [..]}"
        ),
    ),
]


class Observe(Section):
    """One thing to read. ``positions`` selects the rows of a site, ``rows`` the query rows of attention.

    ``before``: read before the edits made at the same site and layer instead of after them.
    """

    site: SiteName
    layers: Layers | None = None
    heads: Heads | None = None
    positions: Selectors | None = None
    rows: Selectors | None = None
    keys: Annotated[tuple[SpanRef, ...], Field(min_length=1)] | None = None
    reduce: Reduction | None = None
    dtype: Literal["float32", "model"] = "model"
    before: Flag = False


# -- interventions ------------------------------------------------------------------------------


class When(Section):
    """A gate: the observation must lie above (or below) a number; ``over`` combines several rows."""

    observe: Id
    above: Number | None = None
    below: Number | None = None
    over: Literal["any", "all", "mean"] = "any"

    @model_validator(mode="after")
    def _one_bound(self) -> When:
        if (self.above is None) == (self.below is None):
            raise fail("give exactly one of above and below")
        return self


class _Edit(Section):
    """``keep_norm``: rescale the row (of head sites each head's own) to the norm it had before the edit."""

    site: SiteName
    layers: Layers | None = None
    heads: Heads | None = None
    positions: Selectors = ("all",)
    keep_norm: Flag = False
    when: When | None = None


class AddEdit(_Edit):
    """h + strength * v."""

    method: Literal["add"]
    vector: TensorRef
    strength: Number = 1.0


class ClampEdit(_Edit):
    """h + (target - h.u) u, with u = v/|v|. ``target`` is a number or a tensor of one number."""

    method: Literal["clamp"]
    vector: TensorRef
    target: Annotated[
        Annotated[Number, Tag("<number>")] | Annotated[TensorRef, Tag("<file>")],
        Discriminator(lambda value: "<file>" if isinstance(value, str) else "<number>"),
    ]


class AblateEdit(_Edit):
    """h - (h.u) u, with u = v/|v|."""

    method: Literal["ablate"]
    vector: TensorRef


class RotateEdit(_Edit):
    """Turn the part of h in the plane of two vectors to ``angle`` degrees from the first."""

    method: Literal["rotate"]
    vector: TensorRef
    second: TensorRef
    angle: Number


class SaeEdit(_Edit):
    """h + (target - f(h)) d for each listed feature f with decoder row d, one after the other."""

    method: Literal["sae"]
    sae: TensorRef
    features: Annotated[tuple[Natural, ...], Field(min_length=1)]
    target: Number

    @model_validator(mode="after")
    def _one_rescaling(self) -> SaeEdit:
        if self.keep_norm and len(self.features) > 1:
            # Rescaling after each feature would change what the next one reads.
            raise fail(
                "keep_norm takes one feature: write an intervention for each, which rescales in between"
            )
        return self


class AffineEdit(_Edit):
    """h + (a + b <h, u>) v."""

    method: Literal["affine"]
    a: Number
    b: Number
    u: TensorRef
    v: TensorRef


class AttendEdit(Section):
    """Multiply the attention of heads and rows to spans by ``weight``, or raise its share to ``mass``."""

    method: Literal["attend"]
    site: SiteName
    layers: Layers | None = None
    heads: Heads | None = None
    rows: Selectors = ("all",)
    keys: Annotated[tuple[SpanRef, ...], Field(min_length=1)]
    weight: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    mass: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None
    when: When | None = None

    @model_validator(mode="after")
    def _one_strength(self) -> AttendEdit:
        if (self.weight is None) == (self.mass is None):
            raise fail("give exactly one of weight and mass")
        return self


def _method_tag(value: Any) -> str | None:
    method = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return f"<{method}>" if isinstance(method, str) and method in METHODS else None


Edit = Annotated[
    Annotated[AddEdit, Tag("<add>")]
    | Annotated[ClampEdit, Tag("<clamp>")]
    | Annotated[AblateEdit, Tag("<ablate>")]
    | Annotated[RotateEdit, Tag("<rotate>")]
    | Annotated[SaeEdit, Tag("<sae>")]
    | Annotated[AffineEdit, Tag("<affine>")]
    | Annotated[AttendEdit, Tag("<attend>")],
    Discriminator(
        _method_tag,
        custom_error_type="method",
        custom_error_message=f"method: needs one of {', '.join(METHODS)}",
    ),
]


# -- analyses and rules -------------------------------------------------------------------------


class Analyze(Section):
    """Turn observations into a score; the analyzer itself checks ``options``."""

    analyzer: NonEmpty
    observe: IdOrIds
    options: dict[StrictStr, Any] = Field(default_factory=dict)


_FLAGGED = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})\.flagged")
_BOUND = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})\s+(above|below)\s+([-+0-9.eE]+)")


def parse_condition(text: str) -> tuple[str, Literal["flagged", "above", "below"], float | None]:
    """``injection.flagged`` or ``danger above 0.5`` as (id, test, bound)."""
    if match := _FLAGGED.fullmatch(text.strip()):
        return match[1], "flagged", None
    if match := _BOUND.fullmatch(text.strip()):
        try:
            return match[1], "above" if match[2] == "above" else "below", float(match[3])
        except ValueError:
            pass
    raise fail(f"{text!r} is not a condition; write <analyzer id>.flagged, or <observation id> above|below x")


def _valid_condition(text: str) -> str:
    parse_condition(text)
    return text.strip()


class Rule(Section):
    """What to do on a score."""

    condition: Annotated[str, Field(alias="if", strict=True), AfterValidator(_valid_condition)]
    do: Literal["stop", "tag"]
    reason: NonEmpty | None = None


class Program(Section):
    """A validated program file. Build one with :func:`vllm_hook.program.load.load`."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="vLLM Hook program")

    schema_: Annotated[Literal[1], Field(alias="schema")]
    name: Name
    model: ModelSection | None = None
    spans: dict[Id, Span] = Field(default_factory=dict)
    observe: dict[Id, Observe] = Field(default_factory=dict)
    intervene: dict[Id, Edit] = Field(default_factory=dict)
    analyze: dict[Id, Analyze] = Field(default_factory=dict)
    act: tuple[Rule, ...] = ()
    apply: Literal["on_request", "always"] = "on_request"

    def to_dict(self) -> dict[str, Any]:
        """The program as a JSON-able dict of the same schema, without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def program_json_schema() -> dict[str, Any]:
    """JSON schema of the program file, for editors."""
    return Program.model_json_schema(by_alias=True, mode="validation")
