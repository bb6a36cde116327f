"""Measuring on Hugging Face, for machines without vLLM; see :mod:`.backend`. One prompt at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import HookError
from ._torchvision import hide_broken_torchvision
from .backend import Edit, Rows
from .model import Model
from .prompts import Prompt
from .sweep import PENALTY, Answer


class HfBackend:
    """Eager attention, on a GPU if there is one. ``dtype`` auto: that of the weights."""

    def __init__(self, model: Model, dtype: str = "auto") -> None:
        hide_broken_torchvision()
        from transformers import AutoModelForCausalLM

        self.tokenizer = model.tokenizer
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.net = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, attn_implementation="eager"
        ).to(self.device)
        self.net.eval()
        layers = getattr(self.net.get_decoder(), "layers", None)
        if layers is None or len(layers) != model.facts.layers:
            raise HookError(
                f"model {model.path!r}: its decoder layers cannot be found in Hugging Face's model"
            )
        self.layers = list(layers)

    def states(self, prompts: Sequence[Prompt], rows: Rows) -> list[Tensor]:
        found = []
        for prompt in prompts:
            taken: list[Tensor] = []

            def take(state: Tensor, taken: list[Tensor] = taken) -> None:
                row = state[0, -1] if rows == "last" else state[0, 1:].float().mean(0)
                taken.append(row.float().cpu())

            with self._at_each_layer(take):
                self._forward(prompt.ids)
            found.append(torch.stack(taken))
        return found

    def masses(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        found = []
        for prompt in prompts:
            assert prompt.rows is not None
            out = self._forward(prompt.ids, output_attentions=True)
            start, end = prompt.rows
            rows = torch.stack([a[0, :, start:end].float().mean(1).cpu() for a in out.attentions])
            found.append(torch.stack([rows[..., a:b].sum(-1) for a, b in prompt.keys], -1))
        return found

    def answers(self, prompts: Sequence[Prompt], edit: Edit | None, tokens: int) -> list[Answer]:
        made = [self._generate(prompt, edit, tokens) for prompt in prompts]
        scores = self.likelihood(prompts, [ids for ids, _ in made], None)
        decode = self.tokenizer.decode
        return [
            Answer(decode(ids, skip_special_tokens=True), tuple(ids), ended, -score)
            for (ids, ended), score in zip(made, scores, strict=True)
        ]

    def likelihood(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], edit: Edit | None
    ) -> list[float]:
        values = []
        for prompt, answer in zip(prompts, answers, strict=True):
            with self._edited(edit, len(prompt)):
                logits = self._forward((*prompt.ids, *answer)).logits[0, len(prompt) - 1 : -1]
            wanted = torch.tensor(list(answer), device=logits.device)
            values.append(float(logits.float().log_softmax(-1).gather(1, wanted[:, None]).mean()))
        return values

    def close(self) -> None:
        """Nothing runs on."""

    def _forward(self, ids: Sequence[int], **more: Any) -> Any:
        with torch.inference_mode():
            return self.net(torch.tensor([list(ids)], device=self.device), use_cache=False, **more)

    def _generate(self, prompt: Prompt, edit: Edit | None, tokens: int) -> tuple[list[int], bool]:
        ids = torch.tensor([list(prompt.ids)], device=self.device)
        with torch.inference_mode(), self._edited(edit, len(prompt)):
            out = self.net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                repetition_penalty=PENALTY,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        made = out[0, len(prompt) :].tolist()
        ends = self.net.generation_config.eos_token_id
        return made, made[-1] in (ends if isinstance(ends, list) else [ends])

    @contextmanager
    def _at_each_layer(self, take: Callable[[Tensor], None]) -> Iterator[None]:
        # hidden_states[-1] of Hugging Face is after the final norm, so its list is not used.
        handles = [
            layer.register_forward_hook(lambda _m, _a, out: take(_stream(out))) for layer in self.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _edited(self, edit: Edit | None, prompt: int) -> Iterator[None]:
        """The edit from its first position on; a pass of one token is a generated one."""
        if edit is None:
            yield
            return
        vector = edit.vector.to(self.device)
        unit = vector / vector.norm()

        def change(_module: Any, _args: Any, out: Any) -> None:
            stream = _stream(out)
            rows = stream[:, edit.start(prompt) if stream.shape[1] >= prompt else 0 :]
            value = rows.float()
            if edit.method == "add":
                value = value + edit.value * vector
            else:
                value = value + (edit.value - value @ unit)[..., None] * unit
            rows.copy_(value.to(rows.dtype))

        handle = self.layers[edit.layer].register_forward_hook(change)
        try:
            yield
        finally:
            handle.remove()


def _stream(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first
