"""Prompts and sampling parameters that the engine tests share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import tiny


def token_prompts(lengths: Iterable[int], vocabulary: int = 500, seed: int = 0) -> list[dict[str, Any]]:
    """Random tokens, one prompt for each length."""
    r = random.Random(seed)
    return [{"prompt_token_ids": [r.randrange(10, vocabulary) for _ in range(n)]} for n in lengths]


def text_prompts(lengths: Iterable[int], tokenizer: Any) -> list[dict[str, Any]]:
    """Natural text of exactly so many tokens. (Random tokens drive SmolLM2 to the brink of its massive
    activations, where Hugging Face in fp32 is itself 5e-5 off float64.)"""
    ids = tokenizer.encode(" ".join(tiny.SENTENCES * 3))
    return [{"prompt_token_ids": ids[i : i + n]} for i, n in enumerate(lengths)]


def greedy(tokens: int = 4, **more: Any) -> Any:
    """SamplingParams without chance that end after exactly ``tokens``."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)
