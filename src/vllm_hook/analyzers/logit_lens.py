"""Logit lens: which tokens would each layer say, were it the last?

``W_U norm(h)`` for the residual stream after every observed layer (nostalgebraist 2020; used as in Geva
et al., arXiv 2203.14680). The last norm and the unembedding come from a file that
``python -m vllm_hook.unembedding`` takes out of a model folder.

Shapes: L layers, P positions, d width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, InstanceOf

from .. import unembedding
from ..errors import HookError, ProgramError
from ..results import Observed, Score
from ..tensors import digest_tensors
from ..unembedding import Unembedding
from ._common import single
from .base import AnalyzerOptions, Held, Names, Spans, holding

#: Rows whose logits are held at a time.
ROWS = 64


def _read(ref: str) -> tuple[Unembedding, str]:
    """A file's content and digest."""
    file = Path(ref).absolute()
    if not file.is_file():
        raise ProgramError(str(file), "no such file")
    lens = unembedding.read(file)
    numbers = torch.tensor([lens.eps, lens.divide, lens.soft_cap or 0.0], dtype=torch.float64)
    texts = torch.frombuffer(bytearray(json.dumps(list(lens.tokens)).encode()), dtype=torch.uint8)
    named = {"norm": lens.norm, "unembed": lens.unembed, "norm_bias": lens.norm_bias}
    tensors = {name: t for name, t in named.items() if t is not None}
    return lens, digest_tensors({**tensors, "numbers": numbers, "tokens": texts})


UnembeddingFile = Annotated[InstanceOf[Held[Unembedding]], holding(_read), Names("file")]


def top_tokens(states: torch.Tensor, lens: Unembedding, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[L, P, d]`` -> probabilities ``[L, P, k]`` float32 and token ids ``[L, P, k]``, best first."""
    rows = states.flatten(0, 1)
    found = [torch.softmax(lens.logits(some), -1).topk(k, -1) for some in rows.split(ROWS)]
    shape = (*states.shape[:2], k)
    return torch.cat([f.values for f in found]).view(shape), torch.cat([f.indices for f in found]).view(shape)


def settled(best: torch.Tensor, layers: Sequence[int]) -> list[int]:
    """``best`` [L, P], top token ids: per position the first layer from which on it is that of the last."""
    same = best == best[-1]
    stays = torch.flip(torch.cumprod(torch.flip(same.long(), (0,)), 0), (0,)).bool()
    return [layers[int(i)] for i in stays.long().argmax(0)]


class LogitLens:
    """Needs one ``resid_post`` observation of whole rows; layers in ascending order."""

    name: ClassVar[str] = "logit_lens"
    sites: ClassVar[tuple[str, ...]] = ("resid_post",)

    class Options(AnalyzerOptions):
        """``unembedding``: the file; ``top``: how many tokens a layer."""

        unembedding: UnembeddingFile
        top: Annotated[int, Field(ge=1, le=100)] = 5

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: the first layer from which on the top token is that of the last layer observed, mean
        over positions. ``details``: ``top``, by layer a list for each position of (text, probability,
        token id); ``settled``, that first layer by position."""
        name, seen = single(observations, self.name, self.sites)
        lens = options.unembedding.content
        if seen.values.dim() != 3 or seen.values.shape[-1] != lens.width:
            shape = list(seen.values.shape)
            raise HookError(f"logit_lens: {name!r} is {shape}, not [layers, positions, {lens.width}]")
        if list(seen.layers) != sorted(seen.layers):
            raise HookError(f"logit_lens: {name!r} lists its layers out of order: {seen.layers}")
        probs, ids = top_tokens(seen.values, lens, min(options.top, len(lens.unembed)))
        first = settled(ids[..., 0], seen.layers)
        top = {
            str(layer): [_named(p, i, lens.tokens) for p, i in zip(probs[at], ids[at], strict=True)]
            for at, layer in enumerate(seen.layers)
        }
        details: dict[str, Any] = {"top": top, "settled": first, "positions": list(seen.positions)}
        return Score(sum(first) / len(first), None, details)


def _named(probs: torch.Tensor, ids: torch.Tensor, tokens: Sequence[str]) -> list[list[Any]]:
    return [
        [tokens[i] if i < len(tokens) else str(i), p, i]
        for p, i in zip(probs.tolist(), ids.tolist(), strict=True)
    ]
