"""Carries a conversation from the renderer to admission, where spans are resolved.

By the time a request is admitted vLLM has rendered the messages to one text and dropped them. The
renderer of a configured engine attaches them to its output again; only when a span asks for a
message is the template rendered a second time, to find where each message lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpanError
from ..program.resolve import MessageText, Prompt, locate_messages, token_offsets_by_decoding

#: Key of an engine input under which the conversation travels within the front end.
CHAT_KEY = "vllm_hook_chat"


@dataclass(frozen=True)
class Chat:
    """A rendered conversation and what is needed to render it again."""

    renderer: Any
    messages: Sequence[dict[str, Any]]
    params: Any

    def locate(self) -> tuple[str, tuple[MessageText, ...]]:
        """The rendered text, and the character range of each message's content in it."""

        def render(contents: list[str]) -> str:
            messages = [{**m, "content": c} for m, c in zip(self.messages, contents, strict=True)]
            _, prompt = self.renderer.render_messages(messages, self.params)
            text = prompt.get("prompt")
            if not isinstance(text, str):
                raise SpanError("spans by message need a chat template that renders to text")
            return text

        return locate_messages([(str(m["role"]), _content(m)) for m in self.messages], render)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [p.get("text", "") for p in content or () if isinstance(p, dict) and p.get("type") == "text"]
    return parts[0] if len(parts) == 1 else ""


def carry_chat(renderer: Any) -> None:
    """Make this renderer attach conversations to the engine inputs it returns."""
    render_chat, render_chat_async = renderer.render_chat, renderer.render_chat_async

    def attach(params: Any, rendered: Any) -> Any:
        conversations, inputs = rendered
        for conversation, engine_input in zip(conversations, inputs, strict=True):
            engine_input[CHAT_KEY] = Chat(renderer, conversation, params)
        return conversations, inputs

    def wrapped(conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        return attach(chat_params, render_chat(conversations, chat_params, *args, **kwargs))

    async def wrapped_async(conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        return attach(chat_params, await render_chat_async(conversations, chat_params, *args, **kwargs))

    renderer.render_chat, renderer.render_chat_async = wrapped, wrapped_async


def read_prompt(prompt: Any, token_ids: Sequence[int], tokenizer: Any, with_text: bool) -> Prompt:
    """What spans are resolved on: the token ids that the engine runs. ``with_text``: a span needs text."""
    if not with_text:
        return Prompt(token_ids, None, None, None)
    if tokenizer is None:
        raise SpanError("spans by text or message need a tokenizer (skip_tokenizer_init is set)")
    chat = prompt.get(CHAT_KEY) if isinstance(prompt, dict) else None
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
    messages = None
    if chat is not None:
        text, messages = chat.locate()
    if text is not None:
        offsets = _offsets(text, token_ids, tokenizer)
        if offsets is not None:
            return Prompt(token_ids, text, offsets, messages)
    decoded = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    if messages is not None and decoded != text:
        raise SpanError("spans by message: the tokens of this prompt do not spell the rendered chat template")
    offsets = token_offsets_by_decoding(
        token_ids, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    )
    return Prompt(token_ids, decoded, offsets, messages)


def _offsets(text: str, token_ids: Sequence[int], tokenizer: Any) -> list[tuple[int, int]] | None:
    """Character offsets by tokenizing again, if that gives the very tokens that the engine runs."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    for special in (False, True):
        encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == list(token_ids):
            return [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
    return None
