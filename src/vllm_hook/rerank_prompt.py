"""The prompt that ranks documents (CoRe, arXiv 2510.02219): its words, and where they stand among its tokens.

There is one definition of what is read. The *documents* are read each without its mark and the blank line
behind it; the *query's rows* run from "Please find" through the query, so they see no token of what a chat
template puts behind. :func:`make_prompt` lays a prompt out and counts its tokens; :data:`SPANS` and
:data:`ROWS` say the same to a program, which looks for the words in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import HookError, SpanError, UnsupportedError
from .program.spans import MessageText, TokenMap, locate_messages

Range = tuple[int, int]

OPENING = " Here are some paragraphs:\n\n"
ASKING = (
    "Please find information that are relevant to the following query in the paragraphs above.\n\nQuery: "
)
#: The query that asks for nothing.
NOTHING = "N/A"

#: Spans of a program that reads such a prompt. ``docs`` are found by their marks: a document must not hold a
#: blank line, and what the template or a system message says before (Mistral's is "[INST] ") may look like a
#: mark, so only those behind ``opening`` and before ``asking`` are documents.
SPANS: dict[str, Any] = {
    "opening": {"text": OPENING.strip()},
    "docs": {"between": ["] ", "\n\n"], "each": True},
    "asking": {"text": ASKING},
    "query": {"message": "user", "after": ASKING[ASKING.index("\n\n") :]},
}
#: The query's rows.
ROWS: list[Any] = [{"span": "asking"}, {"span": "query"}]
#: Options of the analyzer that ranks.
RANKING = {"documents": "docs", "after": "opening", "before": "asking"}


@dataclass(frozen=True)
class Prompt:
    """Token ids; half-open token ranges of the query's rows and of each document."""

    ids: list[int]
    query: Range
    documents: list[Range]

    def spans(self) -> dict[str, list[int]]:
        """What a request gives a program with :data:`SPANS` in place of looking for words: exact also where
        documents hold blank lines, or the prompt goes to the engine as token ids."""
        documents = {f"docs[{i}]": list(span) for i, span in enumerate(self.documents)}
        opening = {"opening": [0, self.documents[0][0]]} if self.documents else {}
        return {**opening, **documents, "asking": list(self.query), "query": list(self.query)}


def make_content(query: str, documents: Sequence[str]) -> tuple[str, int, list[Range]]:
    """The user's turn, the character at which the query's rows begin, and those of each document."""
    content = OPENING
    ranges: list[Range] = []
    for number, document in enumerate(documents, 1):
        content += f"[document {number}] "
        text = document.strip()
        ranges.append((len(content), len(content) + len(text)))
        content += f"{text}\n\n"
    return (content + ASKING + query.strip()).rstrip(), len(content), ranges


def make_prompt(tokenizer: Any, query: str, documents: Sequence[str]) -> Prompt:
    """The prompt in the user's turn of the model's chat template (as it is without one).

    Needs a fast tokenizer, which knows the characters of its tokens. SpanError: a document is empty, or the
    template rewrites the turn.
    """
    content, asked, ranges = make_content(query, documents)
    text, shift = content, 0
    if tokenizer.chat_template:
        text, (turn,) = render_chat(tokenizer, [("user", content)])
        if not turn.found:
            raise SpanError(
                "the chat template rewrites the user's message, so documents cannot be located in it"
            )
        shift = turn.start - (len(content) - len(content.lstrip()))
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError("rerank needs a fast tokenizer, to find the documents among the tokens")
    encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_offsets_mapping=True)
    places = TokenMap([(int(a), int(b)) for a, b in encoded["offset_mapping"]])
    found = [places.tokens(a + shift, b + shift) for a, b in ranges]
    if None in found:
        raise SpanError(f"document {found.index(None)} of this prompt is empty")
    rows = places.tokens(asked + shift, len(content) + shift)
    assert rows is not None
    return Prompt(list(encoded["input_ids"]), rows, [span for span in found if span is not None])


def render_chat(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> tuple[str, tuple[MessageText, ...]]:
    """A chat of (role, content) as :func:`chat_text` has it, and where the content of each message, without
    the white space around it, stands in the text."""

    def render(contents: list[str]) -> str:
        return chat_text(tokenizer, [(role, c) for (role, _), c in zip(messages, contents, strict=True)])

    return locate_messages(messages, render)


def chat_text(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """A chat as the model's template writes it, with the generation prompt. HookError if it refuses."""
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise what they like, jinja2's errors among it
        raise HookError(f"the chat template refuses the messages: {error}") from None
