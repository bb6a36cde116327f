"""Examples for building: JSON lines on disk -> checked, frozen records.

Four kinds, one object a line; ``id`` is optional everywhere:

- injection: ``{"style", "instruction", "data"}``; a style that starts with ``normal`` is harmless.
- pair: ``{"with": PROMPT, "without": PROMPT}``.
- labelled: ``{"label": 0 | 1, "prompt": PROMPT}``, or an injection record (attacks have label 1);
  records of one ``group`` are never split between training and test.
- query: ``{"query", "documents": [{"text", "grade"}, ..]}``, grades 0, 1, 2, ..; higher is better.

A PROMPT is the user's turn as text, or a list of chat messages; a last message of the assistant is
the beginning of its answer. Whatever is wrong raises HookError with file, line and field.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import jsonl
from ..errors import HookError

DATA_MARK = "Data: "
#: The gain of a grade is 2^grade - 1.
MOST_GRADE = 50
Message = tuple[str, str]
Messages = tuple[Message, ...]
"""``(role, content)`` of each message."""


@dataclass(frozen=True)
class Source:
    """A data file: what it is called and the sha256 of its bytes."""

    name: str
    digest: str


@dataclass(frozen=True)
class Injection:
    line: int
    id: str
    style: str
    instruction: str
    data: str
    group: str | None = None

    @property
    def normal(self) -> bool:
        return self.style.startswith("normal")

    @property
    def messages(self) -> Messages:
        """System = instruction, user = "Data: " + data."""
        return (("system", self.instruction), ("user", DATA_MARK + self.data))


@dataclass(frozen=True)
class Pair:
    line: int
    id: str
    with_: Messages
    without: Messages


@dataclass(frozen=True)
class Labelled:
    line: int
    id: str
    label: int
    messages: Messages
    group: str | None = None


@dataclass(frozen=True)
class Query:
    line: int
    id: str
    query: str
    documents: tuple[str, ...]
    grades: tuple[int, ...]


Record = TypeVar("Record", Injection, Pair, Labelled, Query)
Fields = dict[str, Any]


class _Line:
    """One object of a file, with errors that say where."""

    def __init__(self, path: Path, number: int, fields: Fields) -> None:
        self.path, self.number, self.fields = path, number, fields

    def error(self, field: str, message: str) -> HookError:
        return HookError(f"{self.path}, line {self.number}, {field}: {message}")

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(field, "is missing" if field not in self.fields else "must be text, not empty")
        return value

    def id(self) -> str:
        return self.text("id") if "id" in self.fields else f"line-{self.number}"

    def group(self) -> str | None:
        return self.text("group") if "group" in self.fields else None

    def messages(self, field: str) -> Messages:
        value = self.fields.get(field)
        if not isinstance(value, list):
            return (("user", self.text(field)),)
        if not value:
            raise self.error(field, "has no message")
        for i, message in enumerate(value):
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise self.error(f"{field}[{i}]", 'must be {"role": text, "content": text}')
        return tuple((m["role"], m["content"]) for m in value)


def read_injections(path: Path) -> tuple[list[Injection], Source]:
    """Injection records; needs normal and attacked ones."""
    records, source = _read(path, _injection)
    if len({r.normal for r in records}) < 2:
        only = "normal" if records[0].normal else "attacked"
        raise HookError(f'{path}, style: all {len(records)} examples are {only} ("normal.." is harmless)')
    return records, source


def read_pairs(path: Path, least: int = 2) -> tuple[list[Pair], Source]:
    """Contrast pairs, at least ``least``."""
    records, source = _read(path, _pair)
    if len(records) < least:
        raise HookError(f"{path}: holds {len(records)} pairs; at least {least} are needed")
    return records, source


def read_labelled(path: Path) -> tuple[list[Labelled], Source]:
    """Labelled prompts; needs both labels."""
    records, source = _read(path, _labelled)
    if len(labels := {r.label for r in records}) < 2:
        raise HookError(f"{path}, label: all {len(records)} examples have label {min(labels)}")
    return records, source


def read_queries(path: Path) -> tuple[list[Query], Source]:
    """Queries with graded documents."""
    return _read(path, _query)


def _injection(line: _Line) -> Injection:
    style, instruction, data = (line.text(f) for f in ("style", "instruction", "data"))
    return Injection(line.number, line.id(), style, instruction, data, line.group())


def _pair(line: _Line) -> Pair:
    with_, without = line.messages("with"), line.messages("without")
    if _bare(with_) == _bare(without):
        raise line.error("with", "is the same as without")
    return Pair(line.number, line.id(), with_, without)


def _labelled(line: _Line) -> Labelled:
    if "label" not in line.fields and "style" in line.fields:
        record = _injection(line)
        return Labelled(line.number, record.id, int(not record.normal), record.messages, record.group)
    label = line.fields.get("label")
    if label not in (0, 1):  # true and false are 1 and 0
        raise line.error("label", f"must be 0 or 1, not {label!r}")
    return Labelled(line.number, line.id(), int(label), line.messages("prompt"), line.group())


def _query(line: _Line) -> Query:
    query, documents = line.text("query"), line.fields.get("documents")
    if not isinstance(documents, list) or len(documents) < 2:
        raise line.error("documents", "must be a list of at least two documents")
    texts: list[str] = []
    grades: list[int] = []
    for i, document in enumerate(documents):
        field = f"documents[{i}]"
        if not isinstance(document, dict):
            raise line.error(field, 'must be {"text", "grade"}')
        text, grade = document.get("text"), document.get("grade")
        if not isinstance(text, str) or not text.strip():
            raise line.error(f"{field}.text", "must be text, not empty")
        if isinstance(grade, bool) or not isinstance(grade, int) or not 0 <= grade <= MOST_GRADE:
            raise line.error(f"{field}.grade", f"must be 0, 1, 2, .. (at most {MOST_GRADE}), not {grade!r}")
        if text.strip() in texts:
            raise line.error(f"{field}.text", f"is that of documents[{texts.index(text.strip())}]")
        texts.append(text.strip())
        grades.append(grade)
    if not any(grades):
        raise line.error("documents", "no document has a grade above 0")
    if all(grades):
        raise line.error("documents", "no document has grade 0")
    return Query(line.number, line.id(), query, tuple(texts), tuple(grades))


def _read(path: Path, parse: Callable[[_Line], Record]) -> tuple[list[Record], Source]:
    """Every record of a file; refuses empty files and duplicates (of ids, and of content)."""
    raw = jsonl.read(path)
    records: list[Record] = []
    ids: dict[str, int] = {}
    seen: dict[Hashable, int] = {}
    for number, value in jsonl.values(jsonl.decode(raw, path), path):
        if not isinstance(value, dict):
            raise HookError(f"{path}, line {number}: is not an object")
        record = parse(_Line(path, number, value))
        if record.id in ids:
            raise HookError(f"{path}, line {number}, id: {record.id!r} is that of line {ids[record.id]}")
        if (same := seen.get(_content(record))) is not None:
            raise HookError(f"{path}, line {number}: the same example as on line {same}")
        ids[record.id] = seen[_content(record)] = number
        records.append(record)
    if not records:
        raise HookError(f"{path}: holds no examples")
    return records, Source(path.name, hashlib.sha256(raw).hexdigest())


def split(
    records: Sequence[Record],
    share: float,
    seed: int,
    stratum: Callable[[Record], Hashable] = lambda r: None,
    group: Callable[[Record], Hashable | None] = lambda r: None,
) -> tuple[list[Record], list[Record]]:
    """(for building, held out): about ``share`` of each stratum, by ``seed``, each in file order.

    Records of one group stay together; a group counts for the stratum of its first record. Every
    stratum of two or more groups gives at least one to either side.
    """
    groups: dict[Hashable, list[Record]] = {}
    for i, record in enumerate(records):
        key = group(record)
        groups.setdefault(("alone", i) if key is None else ("group", key), []).append(record)
    strata: dict[Hashable, list[list[Record]]] = {}
    for members in groups.values():
        strata.setdefault(stratum(members[0]), []).append(members)
    rng = random.Random(seed)
    out: set[int] = set()
    for members_of in strata.values():
        count = min(max(round(share * len(members_of)), 1), len(members_of) - 1)
        chosen = rng.sample(range(len(members_of)), count) if count > 0 else []
        out.update(id(record) for i in chosen for record in members_of[i])
    return [r for r in records if id(r) not in out], [r for r in records if id(r) in out]


def two_parts(
    data: Path,
    held_out: Path | None,
    read: Callable[[Path], tuple[list[Record], Source]],
    part: Callable[[list[Record]], tuple[list[Record], list[Record]]],
    names: tuple[str, str],
) -> tuple[list[Record], list[Record], dict[str, Source]]:
    """(to build from, held out, sources by ``names``): two files, or one that ``part`` divides."""
    first, source = read(data)
    sources = {names[0]: source}
    if held_out is None:
        kept, second = part(first)
        return kept, second, sources
    second, sources[names[1]] = read(held_out)
    refuse_overlap(first, second, held_out)
    return first, second, sources


def refuse_overlap(first: Iterable[Any], second: Iterable[Any], path: Path) -> None:
    """The held-out set must not repeat an example that was built from."""
    known = {_content(r): r.line for r in first}
    for record in second:
        if (line := known.get(_content(record))) is not None:
            raise HookError(
                f"{path}, line {record.line}: the same example as on line {line} of the data to build from"
            )


def _content(record: Any) -> Hashable:
    """What makes two records the same example; white space around texts does not make them different."""
    if isinstance(record, Pair):
        return _bare(record.with_), _bare(record.without)
    if isinstance(record, Query):
        return record.query.strip()
    return _bare(record.messages)


def _bare(messages: Messages) -> Messages:
    return tuple((role, content.strip()) for role, content in messages)
