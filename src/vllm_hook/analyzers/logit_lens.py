"""Logit lens: which tokens would each layer say, were it the last?

``W_U norm(h)`` for the residual stream after every observed layer (nostalgebraist 2020; used as in Geva
et al., arXiv 2203.14680). The last norm and the unembedding come from a file that
``python -m vllm_hook.unembedding`` takes out of a model folder.

Shapes: L layers, P positions, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field

from .. import unembedding
from ..errors import HookError, ProgramError
from ..program._types import fail
from ..results import Observed, Score
from ..unembedding import Unembedding
from ._common import single
from .base import AnalyzerOptions, Names, Spans

#: Rows whose logits are held at a time.
ROWS = 64


def read(path: str) -> Unembedding:
    """The file's content, kept while the file stays as it is: it is large, and every request needs it."""
    full = Path(path).absolute()
    if not full.is_file():
        raise ProgramError(str(full), "no such file")
    stat = full.stat()
    return _read(str(full), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _read(path: str, modified: int, size: int) -> Unembedding:
    return unembedding.read(path)


def _readable(path: str) -> str:
    try:
        read(path)
    except ProgramError as error:
        raise fail(str(error)) from None
    return path


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

        unembedding: Annotated[str, AfterValidator(_readable), Names("file")]
        top: Annotated[int, Field(ge=1, le=100)] = 5

    def score(self, observations: Mapping[str, Observed], spans: Spans, options: Options) -> Score:
        """``value``: the first layer from which on the top token is that of the last layer observed, mean
        over positions. ``details``: ``top``, by layer a list for each position of (text, probability,
        token id); ``settled``, that first layer by position."""
        name, seen = single(observations, self.name, self.sites)
        lens = read(options.unembedding)
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
