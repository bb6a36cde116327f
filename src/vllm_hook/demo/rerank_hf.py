"""The reranker's formula in Hugging Face, for scale: eager attention with ``output_attentions``.

Shares only the prompt with our own reranker. float32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..rerank import Head
from ..rerank_prompt import NOTHING, Prompt, make_prompt


class HuggingFace:
    """Scores documents as people do without a serving engine."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.net = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def two_passes(self, query: str, texts: Sequence[str], heads: Sequence[Head]) -> list[float]:
        """The whole prompt twice, with the query and with N/A."""
        prompts = [make_prompt(self.tokenizer, q, texts) for q in (query, NOTHING)]
        with torch.inference_mode():
            found = [self._tokens(p, self._run(p.ids), 0, heads) for p in prompts]
        return _scores(found, prompts[0])

    def shared_prefix(self, query: str, texts: Sequence[str], heads: Sequence[Head]) -> list[float]:
        """The documents once; from their KV cache the query and N/A."""
        prompts = [make_prompt(self.tokenizer, q, texts) for q in (query, NOTHING)]
        start = prompts[0].query[0]
        with torch.inference_mode():
            cache = self.net.model(torch.tensor([prompts[0].ids[:start]]), use_cache=True).past_key_values
            found = [
                self._tokens(p, self._run(p.ids[start:], copy.deepcopy(cache)), start, heads) for p in prompts
            ]
        return _scores(found, prompts[0])

    def _run(self, ids: Sequence[int], cache: Any = None) -> Any:
        out = self.net.model(
            torch.tensor([list(ids)]),
            output_attentions=True,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.attentions

    @staticmethod
    def _tokens(prompt: Prompt, layers: Any, start: int, heads: Sequence[Head]) -> torch.Tensor:
        """[K]: the query's mean row, summed over heads. Row 0 of ``layers`` is position ``start``."""
        a, b = (p - start for p in prompt.query)
        total: torch.Tensor = sum(layers[layer][0, head, a:b].mean(0) for layer, head in heads)
        return total


def _scores(tokens: Sequence[torch.Tensor], prompt: Prompt) -> list[float]:
    scores = []
    for start, end in prompt.documents:
        c = tokens[0][start:end] - tokens[1][start:end]
        scores.append(float(c[c > c.mean() - 2 * c.std()].sum()))
    return scores
