"""Prompts for building: token ids, the query rows to read, and the spans to read attention on.

Positions are found by character offsets on the rendered chat template, never by counts that assume a
template. Ranges are half-open.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import HookError, SpanError
from ..program.spans import TokenMap
from ..rerank_prompt import chat_text, make_prompt, render_chat
from .records import DATA_MARK, Injection, Labelled, Messages, Pair, Query

Range = tuple[int, int]


@dataclass(frozen=True)
class Prompt:
    """``where`` names the example in errors. ``rows`` and ``keys`` are token ranges: the query rows
    whose attention is read, and the spans that it is summed over."""

    ids: tuple[int, ...]
    where: str
    rows: Range | None = None
    keys: tuple[Range, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def check_lengths(prompts: Sequence[Prompt], most: int, room: int = 0) -> int:
    """The longest prompt's tokens. HookError if one, with ``room`` more tokens, is beyond ``most``, or
    is a single token (position 0 is left out of all statistics)."""
    for prompt in prompts:
        if len(prompt) + room > most:
            extra = f" and {room} to generate" if room else ""
            raise HookError(
                f"{prompt.where}: the prompt has {len(prompt)} tokens{extra}; the model's length is {most}"
            )
        if len(prompt) < 2:
            raise HookError(f"{prompt.where}: the prompt is a single token, which is not used (position 0)")
    return max(map(len, prompts))


def where(name: str, record: Injection | Pair | Labelled | Query) -> str:
    return f"{name}, line {record.line}"


def tracker_prompt(tokenizer: Any, record: Injection, name: str = "data") -> Prompt:
    """The last token looks at the instruction (first key) and at the data (second), arXiv 2411.00348."""
    try:
        ids, spans = render(tokenizer, {"instruction": record.instruction, "data": record.data})
    except HookError as error:
        raise type(error)(f"{where(name, record)}: {error}") from None
    keys = (spans["instruction"], spans["data"])
    return Prompt(tuple(ids), where(name, record), (len(ids) - 1, len(ids)), keys)


def chat_prompt(tokenizer: Any, messages: Messages, where: str) -> Prompt:
    """A conversation up to where the model goes on: after a last message of the assistant, which is
    taken as the beginning of its answer, or after the generation prompt."""
    begun = messages[-1][1] if messages[-1][0] == "assistant" else ""
    turns = messages[:-1] if begun or messages[-1][0] == "assistant" else messages
    if not turns:
        raise HookError(f"{where}: has no message but the beginning of an answer")
    try:
        text = chat_text(tokenizer, turns) + begun
    except HookError as error:
        raise type(error)(f"{where}: {error}") from None
    return Prompt(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), where)


def rerank_prompt(tokenizer: Any, record: Query, order: Sequence[int], name: str = "data") -> Prompt:
    """All documents, in ``order``, and the query, as :func:`vllm_hook.rerank.make_prompt` has them.

    Rows: the query with the sentence that asks for it. Keys: the documents in the record's own order,
    each without its marker.
    """
    at = where(name, record)
    try:
        made = make_prompt(tokenizer, record.query, [record.documents[i] for i in order])
    except HookError as error:
        raise type(error)(f"{at}: {error}") from None
    spans = dict(zip(order, made.documents, strict=True))
    return Prompt(tuple(made.ids), at, made.query, tuple(spans[i] for i in range(len(order))))


def document_order(record: Query, seed: int) -> list[int]:
    """A shuffle by seed and id: files often list relevant documents first."""
    order = list(range(len(record.documents)))
    random.Random(f"{seed}/{record.id}").shuffle(order)
    return order


def render(tokenizer: Any, record: Any) -> tuple[list[int], dict[str, Range]]:
    """Token ids of an injection record's prompt, and the tokens of its ``instruction`` and ``data``.

    A token belongs to a span if its characters overlap it, in the rendered chat template. White space around
    a message belongs to none, as in the spans of a program: many templates drop it.
    """
    messages = (("system", record["instruction"]), ("user", DATA_MARK + record["data"]))
    text, (system, user) = render_chat(tokenizer, messages)
    if not system.found or not user.found:
        lost = "user" if system.found else "system"
        raise SpanError(f"the chat template drops or rewrites the {lost} message")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = TokenMap([(int(a), int(b)) for a, b in encoded["offset_mapping"]])
    characters = {
        "instruction": (system.start, system.end),
        "data": (user.start + len(DATA_MARK), user.end),
    }
    spans = {name: places.tokens(*pair) for name, pair in characters.items()}
    if None in spans.values():
        raise SpanError("a span holds no token")
    return encoded["input_ids"], {name: span for name, span in spans.items() if span is not None}
