"""Where a piece of text stands in a prompt: characters of messages, and from characters to tokens.

Text positions are character offsets into the rendered prompt, ranges are half-open.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_PRIVATE_USE = (0xF0000, 0x100000)  # two planes of 65,534 characters each that no tokenizer's text uses
_PLANE = 65_534
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class MessageText:
    """Characters [start, end) of a message's content; -1, -1 if the template dropped or rewrote it."""

    role: str
    start: int
    end: int

    @property
    def found(self) -> bool:
        return self.start >= 0


def locate_messages(
    contents: Sequence[tuple[str, str]], render: Callable[[list[str]], str]
) -> tuple[str, tuple[MessageText, ...]]:
    """Render a chat template and find the (stripped) content of each message in it.

    ``contents`` are (role, content); ``render`` renders the template with the given contents. It
    is called again with marks around each content: since the marks travel with the content, this
    finds a message even if its words also stand elsewhere. Where the template treats marked
    content differently, the content is searched for, in order.
    """
    texts = [content for _, content in contents]
    plain = render(list(texts))
    base = _free_base([plain, *texts], len(texts))
    found: list[tuple[int, int] | None] = [None] * len(texts)
    if base is not None:
        everything = _locate_marked(plain, texts, range(len(texts)), base, render)
        if everything is not None:
            return plain, _as_messages(contents, [everything[i] for i in range(len(texts))])
        for i in range(len(texts)):
            alone = _locate_marked(plain, texts, [i], base, render)
            found[i] = alone[i] if alone is not None else None
    return plain, _as_messages(contents, _search_missing(plain, texts, found))


def _as_messages(
    contents: Sequence[tuple[str, str]], ranges: Sequence[tuple[int, int]]
) -> tuple[MessageText, ...]:
    return tuple(
        MessageText(role, start, end) for (role, _), (start, end) in zip(contents, ranges, strict=True)
    )


def _free_base(texts: Iterable[str], count: int) -> int | None:
    """The first of 2 * count consecutive private-use characters that no text holds."""
    if 2 * count > _PLANE:
        return None
    used = {ord(c) for text in texts for c in set(text) if ord(c) >= _PRIVATE_USE[0]}
    return next((b for b in _PRIVATE_USE if not any(b <= c < b + 2 * count for c in used)), None)


def _locate_marked(
    plain: str, texts: list[str], which: Iterable[int], base: int, render: Callable[[list[str]], str]
) -> dict[int, tuple[int, int]] | None:
    """Ranges of the messages in ``which``; None if marks change the rest of the rendering."""
    which = list(which)
    marked_texts = list(texts)
    for i in which:
        core = texts[i].strip()
        lead = texts[i][: len(texts[i]) - len(texts[i].lstrip())]
        tail = texts[i][len(lead) + len(core) :]
        marked_texts[i] = f"{lead}{chr(base + 2 * i)}{core}{chr(base + 2 * i + 1)}{tail}"
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    marks = re.compile(f"[{chr(base)}-{chr(base + 2 * len(texts) - 1)}]")
    marked = render(marked_texts)
    for removed, mark in enumerate(marks.finditer(marked)):
        index = ord(mark[0]) - base
        # The first occurrence counts where a template repeats a message.
        (ends if index % 2 else starts).setdefault(index // 2, mark.start() - removed)
    if marks.sub("", marked) != plain:
        return None
    missing = (-1, -1)
    found = {i: (starts[i], ends[i]) if i in starts and i in ends else missing for i in which}
    # A template may cut a piece out of a message and leave both marks.
    return {
        i: (s, e) if s <= e and plain[s:e] == texts[i].strip() else missing for i, (s, e) in found.items()
    }


def _search_missing(
    plain: str, texts: list[str], found: list[tuple[int, int] | None]
) -> list[tuple[int, int]]:
    """Fill the gaps by searching between the neighbours that were found."""
    ranges: list[tuple[int, int]] = []
    cursor = 0
    for i, known in enumerate(found):
        if known is None:
            limit = next((f[0] for f in found[i + 1 :] if f is not None and f[0] >= cursor), len(plain))
            core = texts[i].strip()
            at = plain.find(core, cursor, limit) if core else -1
            known = (at, at + len(core)) if at >= 0 else (-1, -1)
        ranges.append(known)
        cursor = max(cursor, known[1])
    return ranges


class TokenMap:
    """From character ranges to token ranges, by the offsets of the tokenizer.

    Tokens without characters, such as special tokens at (0, 0), belong to no span.
    """

    def __init__(self, offsets: Sequence[tuple[int, int]]) -> None:
        real = [(start, end, i) for i, (start, end) in enumerate(offsets) if end > start]
        self._real = real
        self._starts = [r[0] for r in real]
        self._ends = [r[1] for r in real]
        self._sorted = all(a <= b for seq in (self._starts, self._ends) for a, b in pairwise(seq))

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The tokens [first, end) that overlap characters [start, end); None if there are none."""
        if end <= start:
            return None
        if self._sorted:
            hits = self._real[bisect_right(self._ends, start) : bisect_left(self._starts, end)]
        else:
            hits = [r for r in self._real if r[0] < end and r[1] > start]
        return (hits[0][2], hits[-1][2] + 1) if hits else None


def token_offsets_by_decoding(
    token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[int, int]]:
    """Character offsets of tokens in ``decode(token_ids)``, for prompts that came as token ids.

    Decodes in small windows, as detokenizers do, and over the whole prefix (quadratic) only if
    the windows do not add up to the text. Tokens that share a character all cover it.
    """
    ids = list(token_ids)
    text = decode(ids)
    offsets = _decode_windows(ids, decode, text)
    return offsets if offsets is not None else _decode_prefixes(ids, decode, len(text))


def _decode_windows(
    ids: list[int], decode: Callable[[list[int]], str], text: str
) -> list[tuple[int, int]] | None:
    offsets: list[tuple[int, int]] = []
    pieces: list[str] = []
    prefix = read = 0  # decode from prefix, so that a tokenizer which trims its first token trims old text
    base, done, start = 0, 0, 0  # characters of ids[prefix:read], of ids[:read], and stable before this token
    for i in range(len(ids)):
        window = decode(ids[prefix : i + 1])
        if len(window) < base:
            return None
        stable, end = _stable(window, done - base)
        offsets.append((start, max(start, end)))
        start = max(start, stable)
        if not window.endswith(_REPLACEMENT):
            pieces.append(window[base:])
            done += len(window) - base
            prefix, read = read, i + 1
            base = len(decode(ids[prefix:read]))
    if read < len(ids):
        pieces.append(decode(ids[prefix:])[base:])
    return _clamped(offsets, len(text)) if "".join(pieces) == text else None


def _decode_prefixes(ids: list[int], decode: Callable[[list[int]], str], total: int) -> list[tuple[int, int]]:
    offsets: list[tuple[int, int]] = []
    start = 0
    for i in range(len(ids)):
        stable, end = _stable(decode(ids[: i + 1]), 0)
        offsets.append((start, max(start, end)))
        start = max(start, stable)
    return _clamped(offsets, total)


def _stable(window: str, origin: int) -> tuple[int, int]:
    """(end of what later tokens cannot change, end of the last token), from ``origin`` on.

    A window that ends with the replacement character ends inside a character of several bytes.
    """
    if not window.endswith(_REPLACEMENT):
        return origin + len(window), origin + len(window)
    stable = origin + len(window.rstrip(_REPLACEMENT))
    return stable, stable + 1


def _clamped(offsets: list[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    clamped = [(min(start, total), min(end, total)) for start, end in offsets]
    if clamped:
        clamped[-1] = (clamped[-1][0], total)
    return clamped
