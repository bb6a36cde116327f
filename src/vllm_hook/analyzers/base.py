"""What an analyzer is: observations in, one :class:`~vllm_hook.results.Score` out.

Analyzers touch no device and read no file: they see host tensors only, and what the files that their
options name held when the options were read. A package adds its own through the entry-point group
``vllm_hook.analyzers``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ..errors import ProgramError
from ..program._types import fail
from ..results import Observed, Score

#: Half-open ranges of token positions; a span name may stand for several.
Spans = Mapping[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Names:
    """Marks an option that names something, ``Annotated[str, Names("file")]``: a file, which a program
    names relative to itself and whose content is part of its digest, or a span of the program."""

    what: Literal["file", "span"]


SpanName = Annotated[str, Names("span")]

Content = TypeVar("Content")


@dataclass(frozen=True)
class Held(Generic[Content]):
    """What the file of an option held when the option was read. A program keeps it while it is loaded, so
    that a file that changes afterwards changes no score.

    ``ref``: ``file`` or ``file#tensor``, absolute in a program; ``digest``: sha256 of the content.
    """

    ref: str
    digest: str
    content: Content = dataclasses.field(repr=False, compare=False)


def holding(read: Callable[[str], tuple[Content, str]]) -> BeforeValidator:
    """For an option ``Annotated[InstanceOf[Held[X]], holding(read), Names("file")]``: a file is read when the
    option is; what is held already is kept. ``read`` gives content and digest, or raises ProgramError."""

    def hold(value: Any) -> Any:
        if isinstance(value, Held):
            return value
        if not isinstance(value, str):
            raise fail(f"names no file: {value!r:.80}")
        try:
            content, digest = read(value)
        except ProgramError as error:
            raise fail(str(error)) from None
        return Held(value, digest, content)

    return BeforeValidator(hold)


def named_by(
    options: type[BaseModel], values: Mapping[str, Any], what: Literal["file", "span"]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What the values of options name: (place, name) of each option marked as :class:`Names`."""
    for name, field in options.model_fields.items():
        value = values.get(name)
        if Names(what) in field.metadata or _is_marked(field.annotation, Names(what)):
            several = isinstance(value, (list, tuple))
            for i, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(each, str):
                    yield ((name, i) if several else (name,)), each


def _is_marked(annotation: Any, mark: Names) -> bool:
    return any(part == mark or _is_marked(part, mark) for part in get_args(annotation))


class AnalyzerOptions(BaseModel):
    """Base of every analyzer's ``Options``: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@runtime_checkable
class Analyzer(Protocol):
    """``score`` gets the observations that the program names, by their bare id.

    It raises :class:`~vllm_hook.errors.HookError` when they do not fit. ``value`` has the analyzer's
    own unit and direction; ``flagged`` is None where there is no threshold. A class attribute ``sites``,
    where there is one, lists the sites that it can read: programs are checked against it.
    """

    name: ClassVar[str]

    @property
    def Options(self) -> type[BaseModel]: ...  # a nested class, in practice

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Any) -> Score: ...
