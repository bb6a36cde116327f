"""Checked program x prompt -> absolute token positions.

Everything here is plain integers: half-open ranges of positions in prompt + generated, where None
as an end means "as far as generation goes". Only what an observation, an intervention or an
analysis uses is looked for, so a program may name spans that a prompt lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import SpanError
from ._types import GeneratedRange, PromptRange, Selector, SpanRows, TokenIds
from .check import split_span_ref
from .checked import CheckedProgram, Observation
from .schema import AttendEdit, BetweenSpan, MessageSpan, Span, TextSpan, TokensSpan
from .spans import MessageText, TokenMap, locate_messages, token_offsets_by_decoding

__all__ = [
    "MessageText",
    "Prompt",
    "ResolvedEdit",
    "ResolvedObservation",
    "ResolvedProgram",
    "locate_messages",
    "resolve",
    "token_offsets_by_decoding",
    "union",
]

Range = tuple[int, int]
OpenRange = tuple[int, "int | None"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine will see it.

    ``offsets``: characters [start, end) of ``text`` for each token; ``messages``: the content of
    each chat message in ``text``. What is not known is None.
    """

    token_ids: Sequence[int]
    text: str | None = None
    offsets: Sequence[Range] | None = None
    messages: tuple[MessageText, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ResolvedObservation:
    """``rows``: sorted, disjoint, half-open. Generated positions whose token is in ``token_ids``
    are wanted too. ``keys``: a name and its ranges, one for each span of a list."""

    id: str
    rows: tuple[OpenRange, ...]
    token_ids: frozenset[int]
    keys: tuple[tuple[str, tuple[Range, ...]], ...]


@dataclass(frozen=True)
class ResolvedEdit:
    """The rows (and, for attention, the key spans) that an intervention changes."""

    id: str
    rows: tuple[OpenRange, ...]
    token_ids: frozenset[int]
    keys: tuple[tuple[str, tuple[Range, ...]], ...]


@dataclass(frozen=True)
class ResolvedProgram:
    """``spans`` has each span that was used; a list of spans also has its parts, as ``docs[0]``."""

    name: str
    prompt_length: int
    observations: tuple[ResolvedObservation, ...]
    edits: tuple[ResolvedEdit, ...]
    spans: Mapping[str, tuple[Range, ...]]


def resolve(
    program: CheckedProgram, prompt: Prompt, span_overrides: Mapping[str, Range] | None = None
) -> ResolvedProgram:
    """Resolve selectors and spans. ``span_overrides`` gives token ranges for spans of this program
    (names it does not have are ignored: they may belong to another program of the request).
    Raises :class:`SpanError`, which names program and field.
    """
    run = _Resolver(program, prompt, span_overrides or {})
    observations = tuple(run.observation(o) for o in program.observations)
    edits = []
    for edit in program.edits:
        attends = isinstance(edit.edit, AttendEdit)
        field = f"intervene.{edit.id}"
        rows, ids = run.rows(f"{field}.{'rows' if attends else 'positions'}", edit.selectors)
        keys = edit.edit.keys if isinstance(edit.edit, AttendEdit) else ()
        edits.append(ResolvedEdit(edit.id, rows, ids, run.keys(f"{field}.keys", keys)))
    for analysis in program.analyses:
        for name in analysis.spans:
            run.span(f"analyze.{analysis.id}.options", name)
    return ResolvedProgram(program.name, len(prompt), observations, tuple(edits), run.resolved)


def union(ranges: Iterable[OpenRange]) -> tuple[OpenRange, ...]:
    """Sorted disjoint ranges with the same members; ranges that touch become one."""
    merged: list[OpenRange] = []
    for start, end in sorted(ranges, key=lambda r: r[0]):
        if end is not None and end <= start:
            continue
        if merged:
            last_start, last_end = merged[-1]
            if last_end is None:
                break
            if start <= last_end:
                merged[-1] = (last_start, None if end is None else max(last_end, end))
                continue
        merged.append((start, end))
    return tuple(merged)


class _Resolver:
    def __init__(self, program: CheckedProgram, prompt: Prompt, overrides: Mapping[str, Range]) -> None:
        self.program = program
        self.prompt = prompt
        self.overrides = overrides
        self.resolved: dict[str, tuple[Range, ...]] = {}
        self._map: TokenMap | None = None

    def error(self, field: str, message: str) -> SpanError:
        return SpanError(f"program {self.program.name!r}, {field}: {message}")

    def observation(self, o: Observation) -> ResolvedObservation:
        rows, token_ids = self.rows(f"observe.{o.id}.{o.selector_field}", o.selectors)
        return ResolvedObservation(o.id, rows, token_ids, self.keys(f"observe.{o.id}.keys", o.keys))

    # -- rows --

    def rows(self, field: str, selectors: Sequence[Selector]) -> tuple[tuple[OpenRange, ...], frozenset[int]]:
        ranges: list[OpenRange] = []
        token_ids: set[int] = set()
        for i, selector in enumerate(selectors):
            here = f"{field}[{i}]" if len(selectors) > 1 else field
            ranges += self.select(here, selector)
            if isinstance(selector, TokenIds):
                token_ids.update(selector.token_ids)
        return union(ranges), frozenset(token_ids)

    def select(self, field: str, selector: Selector) -> list[OpenRange]:
        length = len(self.prompt)
        if isinstance(selector, PromptRange):
            return [self.inside(field, selector.range)]
        if isinstance(selector, GeneratedRange):
            start, end = selector.generated
            return [(length + start, None if end is None else length + end)]
        if isinstance(selector, SpanRows):
            return list(self.span(field, selector.span))
        if isinstance(selector, TokenIds):
            wanted = set(selector.token_ids)
            return [(i, i + 1) for i, token in enumerate(self.prompt.token_ids) if token in wanted]
        if selector == "last_prompt" and length == 0:
            raise self.error(field, "the prompt is empty, so it has no last position")
        words: dict[str, OpenRange] = {
            "all": (0, None),
            "prompt": (0, length),
            "generated": (length, None),
            "last_prompt": (length - 1, length),
        }
        return [words[selector]]

    def inside(self, field: str, pair: tuple[int, int | None]) -> Range:
        """A range of the prompt with negative numbers counted from its end."""
        length = len(self.prompt)
        start = pair[0] + length if pair[0] < 0 else pair[0]
        end = length if pair[1] is None else pair[1] + length if pair[1] < 0 else pair[1]
        if not 0 <= start < end <= length:
            written = f"[{pair[0]}, {'null' if pair[1] is None else pair[1]}]"
            what = "is empty in" if 0 <= start <= length and 0 <= end <= length else "reaches outside"
            raise self.error(field, f"range {written} {what} the prompt of {length} tokens")
        return start, end

    # -- spans --

    def keys(self, field: str, names: Sequence[str]) -> tuple[tuple[str, tuple[Range, ...]], ...]:
        found: list[tuple[str, tuple[Range, ...]]] = []
        for name in names:
            ranges = self.span(field, name)
            if self.is_list(name):
                found += [(f"{name}[{i}]", (r,)) for i, r in enumerate(ranges)]
            else:
                found.append((name, ranges))
        return tuple(found)

    def is_list(self, ref: str) -> bool:
        span = self.program.spans.get(ref)
        return isinstance(span, BetweenSpan) and span.each

    def span(self, field: str, ref: str) -> tuple[Range, ...]:
        """The token ranges of a span, of one part of a list, or of all its parts."""
        name, index = split_span_ref(ref)
        if name not in self.resolved:
            ranges = self.find(name)
            self.resolved[name] = ranges
            if self.is_list(name):
                self.resolved.update({f"{name}[{i}]": (r,) for i, r in enumerate(ranges)})
        ranges = self.resolved[name]
        if index is None:
            return ranges
        if index >= len(ranges):
            raise self.error(field, f"{ref} does not exist: the prompt has {len(ranges)} of {name!r}")
        return (ranges[index],)

    def find(self, name: str) -> tuple[Range, ...]:
        given = self.overridden(name)
        if given:
            return given
        span, field = self.program.spans[name], f"spans.{name}"
        if isinstance(span, TokensSpan):
            return (self.inside(field, span.tokens),)
        found: list[Range] = []
        for start, end in self.characters(field, span, self.text(field)):
            tokens = self.token_map(field).tokens(start, end)
            if tokens is None:
                nth = f" number {len(found)}" if self.is_list(name) else ""
                raise self.error(
                    field, f"the span{nth} is empty: no token lies in characters {start} to {end}"
                )
            found.append(tokens)
        return tuple(found)

    def overridden(self, name: str) -> tuple[Range, ...]:
        """The ranges that the request gives: under the name, or as name[0], name[1], ..."""
        names = [name] if name in self.overrides else []
        if not names and self.is_list(name):
            parts = [key for key in self.overrides if split_span_ref(key)[0] == name]
            names = [f"{name}[{i}]" for i in range(len(parts))]
            if set(names) != set(parts):
                raise self.error(
                    f"spans.{name}", f"the request gives {', '.join(sorted(parts))}; number them from 0"
                )
        length = len(self.prompt)
        for key in names:
            start, end = self.overrides[key]
            if not 0 <= start < end <= length:
                raise self.error(
                    f"spans.{key}",
                    f"the request gives tokens [{start}, {end}] of a prompt of {length} tokens",
                )
        return tuple((self.overrides[key][0], self.overrides[key][1]) for key in names)

    def text(self, field: str) -> str:
        if self.prompt.text is None or self.prompt.offsets is None:
            raise self.error(
                field,
                "needs the text of the prompt, which came as token ids; give the span in the request, "
                'such as "spans": {"name": [first, end]}',
            )
        return self.prompt.text

    def token_map(self, field: str) -> TokenMap:
        if self._map is None:
            assert self.prompt.offsets is not None
            if len(self.prompt.offsets) != len(self.prompt):
                raise self.error(
                    field,
                    f"{len(self.prompt.offsets)} token offsets for a prompt of {len(self.prompt)} tokens",
                )
            self._map = TokenMap(self.prompt.offsets)
        return self._map

    def characters(self, field: str, span: Span, text: str) -> list[Range]:
        """Character ranges of a span in the text of the prompt."""
        if isinstance(span, MessageSpan):
            return [self.message(field, span, text)]
        if isinstance(span, TextSpan):
            at = text.find(span.text)
            if at < 0:
                raise self.error(field, f"the prompt has no text {span.text!r}")
            return [(at, at + len(span.text))]
        assert isinstance(span, BetweenSpan)
        found = _between(text, *span.between, every=span.each)
        if not found:
            first, second = span.between
            raise self.error(field, f"the prompt has no text between {first!r} and {second!r}")
        return found

    def message(self, field: str, span: MessageSpan, text: str) -> Range:
        if self.prompt.messages is None:
            raise self.error(field, f"needs a chat request to find the {span.message!r} message in")
        of_role = [m for m in self.prompt.messages if m.role == span.message]
        index = -1 if span.index is None else span.index
        if not -len(of_role) <= index < len(of_role):
            which = f"{span.message!r} message" + ("" if span.index is None else f" number {span.index}")
            raise self.error(field, f"the chat has no {which} (it has {len(of_role)} of this role)")
        message = of_role[index]
        if not message.found:
            raise self.error(field, f"the chat template drops or rewrites the {span.message!r} message")
        start, end = message.start, message.end
        if span.after is not None:
            at = text.find(span.after, start, end)
            if at < 0:
                raise self.error(field, f"the {span.message!r} message has no text {span.after!r}")
            start = at + len(span.after)
        if span.before is not None:
            end = text.find(span.before, start, end)
            if end < 0:
                raise self.error(field, f"the {span.message!r} message has no text {span.before!r} to end at")
        if start >= end:
            raise self.error(field, f"the span is empty: the {span.message!r} message has no text there")
        return start, end


def _between(text: str, first: str, second: str, every: bool) -> list[Range]:
    found: list[Range] = []
    cursor = 0
    while (start := text.find(first, cursor)) >= 0:
        start += len(first)
        end = text.find(second, start)
        if end < 0:
            break
        found.append((start, end))
        if not every:
            break
        cursor = end + len(second)
    return found
