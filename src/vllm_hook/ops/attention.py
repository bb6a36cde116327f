"""Attention of chosen query rows, read from the paged KV cache.

Keys are used where they lie: each page is multiplied by the query rows of the heads that read it,
and only the logits are kept. No copy of a request's keys is made, and no key or query of another
position is stored.

Shapes: N query rows, C chosen heads, D head width, P tokens a page, K keys, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import AttentionRule, attention, logits_to_probs

Range = tuple[int, int]
#: (page, KV head) -> that page's keys, [D, P]. A view where the cache layout allows it.
PageKeys = Callable[[int, int], Tensor]

#: Logits held at a time; more query rows are taken in blocks.
LOGIT_BYTES = 16 << 20


@dataclass(frozen=True)
class PagedKeys:
    """One layer's cache on a GPU. cache: [blocks, KV heads, page, 2D] by strides, keys before values;
    block_table: int32 [requests, blocks], page numbers of each request of the step; group: query
    heads to a KV head."""

    cache: Tensor
    block_table: Tensor
    group: int
    rule: AttentionRule

    def gather(self, batch_index: int, keys: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of a request, [keys, KV heads, D] each: copies."""
        pages = self.block_table[batch_index, : -(-keys // self.cache.shape[2])].long()
        rows = self.cache[pages].transpose(1, 2).flatten(0, 1)[:keys]
        k, v = rows.split(rows.shape[-1] // 2, -1)
        return k, v


def attention_rows(
    q_NHD: Tensor,
    positions: Sequence[int],
    heads: Sequence[int],
    pages: Sequence[int],
    page_keys: PageKeys,
    page_size: int,
    group: int,
    rule: AttentionRule,
) -> Tensor:
    """Probabilities [C, N, K] float32, K = last position + 1. ``pages``: the request's, in order."""
    keys = max(positions) + 1
    n, _, width = q_NHD.shape
    q = q_NHD.float()
    logits = torch.empty(len(heads), n, keys, dtype=torch.float32, device=q.device)
    start = _first_page(positions, page_size, rule)
    for kv_head, members in _by_kv_head(heads, group).items():
        q_kv = q[:, [heads[i] for i in members]].transpose(0, 1).reshape(-1, width) * rule.scale
        whole = len(members) == len(heads)
        index = slice(None) if whole else torch.tensor(members, device=q.device)
        for i in range(start, -(-keys // page_size)):
            stop = min((i + 1) * page_size, keys)
            k = page_keys(pages[i], kv_head)[:, : stop - i * page_size].float()
            logits[index, :, i * page_size : stop] = (q_kv @ k).view(len(members), n, -1)
        if start:
            logits[index, :, : start * page_size] = 0.0
    if n == 1 and rule.plain:  # the last row of a request, say: nothing to mask
        return torch.softmax(logits, dim=-1)
    where = torch.tensor(positions, device=q.device)
    return logits_to_probs(logits, where, torch.tensor(list(heads), device=q.device), rule)


def attention_mass(
    q_NHD: Tensor,
    positions: Sequence[int],
    heads: Sequence[int],
    spans: Sequence[Sequence[Range]],
    pages: Sequence[int],
    page_keys: PageKeys,
    page_size: int,
    group: int,
    rule: AttentionRule,
) -> Tensor:
    """Attention summed over key spans: [C, N, S] float32. A span is a list of half-open ranges."""
    out = torch.empty(len(heads), len(positions), len(spans), dtype=torch.float32, device=q_NHD.device)
    for a, b in row_blocks(positions, len(heads)):
        probs = attention_rows(q_NHD[a:b], positions[a:b], heads, pages, page_keys, page_size, group, rule)
        for s, ranges in enumerate(spans):
            torch.sum(probs[:, :, ranges[0][0] : ranges[0][1]], -1, out=out[:, a:b, s])
            for i, j in ranges[1:]:
                out[:, a:b, s] += probs[:, :, i:j].sum(-1)
    return out


def attend(
    out_NHD: Tensor,
    q_NHD: Tensor,
    positions: Sequence[int],
    heads: Sequence[int],
    span: Sequence[Range],
    weight: float | None,
    mass: float | None,
    pages: Sequence[int],
    page_keys: PageKeys,
    page_values: PageKeys,
    page_size: int,
    group: int,
    rule: AttentionRule,
) -> None:
    """Multiply the unnormalised attention of rows and heads to ``span`` by ``weight``, renormalise, and
    put the outputs that follow into ``out`` (post-hoc attention steering, arXiv 2311.02262).

    With S the share of the span and o_S its part of the output, the output becomes
    ``(out + (w - 1) o_S) / (1 + (w - 1) S)``: the rest of the row is not computed again. ``mass`` m
    instead of a weight takes the w that brings the share to m, where it is less.
    """
    for a, b in row_blocks(positions, len(heads)):
        probs = attention_rows(q_NHD[a:b], positions[a:b], heads, pages, page_keys, page_size, group, rule)
        share = torch.zeros(probs.shape[:2], dtype=torch.float32, device=probs.device)
        part = torch.zeros(*probs.shape[:2], out_NHD.shape[-1], dtype=torch.float32, device=probs.device)
        for page, low, high in _span_pages(span, probs.shape[-1], page_size):
            p = probs[:, :, low:high]
            share += p.sum(-1)
            for i, head in enumerate(heads):
                values = page_values(pages[page], head // group)
                part[i] += p[i] @ values[low - page * page_size : high - page * page_size].float()
        _merge(out_NHD[a:b], heads, share, part, _gain(share, weight, mass))


def attend_paged(
    out_NHD: Tensor,
    q_NHD: Tensor,
    positions: Sequence[int],
    keep: Tensor | None,
    heads: Sequence[int],
    span: Sequence[Range],
    weight: float | None,
    mass: float | None,
    batch_index: int,
    paged: PagedKeys,
) -> None:
    """:func:`attend` on a GPU: all heads at once on gathered keys. ``keep`` [N]: rows let through."""
    keys, values = paged.gather(batch_index, max(positions) + 1)
    listed = torch.tensor(list(heads), pin_memory=out_NHD.is_cuda).to(out_NHD.device, non_blocking=True)
    v = values.float()[:, listed // paged.group].transpose(0, 1)
    for a, b in row_blocks(positions, len(heads)):
        where = torch.tensor(positions[a:b], pin_memory=out_NHD.is_cuda).to(out_NHD.device, non_blocking=True)
        probs = attention(q_NHD[a:b], keys, where, listed, paged.rule)
        share = torch.zeros(probs.shape[:2], dtype=torch.float32, device=probs.device)
        part = torch.zeros(*probs.shape[:2], out_NHD.shape[-1], dtype=torch.float32, device=probs.device)
        for low, high in span:
            p = probs[:, :, low:high]
            share += p.sum(-1)
            part += p @ v[:, low:high]
        gain = _gain(share, weight, mass)
        if keep is not None:
            gain = gain * keep[a:b]
        _merge(out_NHD[a:b], heads, share, part, gain)


def _merge(out_NHD: Tensor, heads: Sequence[int], share: Tensor, part: Tensor, gain: Tensor) -> None:
    """Put the steered outputs of the listed heads in place; rows that do not change keep their bits."""
    for i, head in enumerate(heads):
        before = out_NHD[:, head].float()
        after = (before + gain[i, :, None] * part[i]) / (1 + gain[i] * share[i])[:, None]
        changed = (gain[i] != 0) & (share[i] > 0)
        out_NHD[:, head] = torch.where(changed[:, None], after, before).to(out_NHD.dtype)


def _gain(share: Tensor, weight: float | None, mass: float | None) -> Tensor:
    """w - 1 for every row and head."""
    if weight is not None:
        return torch.full_like(share, weight - 1)
    assert mass is not None
    needed = mass * (1 - share) / (share.clamp_min(1e-30) * (1 - mass))
    return torch.where((share > 0) & (share < mass), needed - 1, torch.zeros_like(share))


def _span_pages(span: Sequence[Range], keys: int, page_size: int) -> list[tuple[int, int, int]]:
    """(page, first key, end) for the parts of a span that lie in one page."""
    parts = []
    for start, end in span:
        low, stop = start, min(end, keys)
        while low < stop:
            page = low // page_size
            high = min(stop, (page + 1) * page_size)
            parts.append((page, low, high))
            low = high
    return parts


def row_blocks(positions: Sequence[int], heads: int) -> list[Range]:
    """Cut query rows into blocks whose logits fit :data:`LOGIT_BYTES`."""
    if not positions:
        return []
    step = max(1, LOGIT_BYTES // (4 * heads * (max(positions) + 1)))
    return [(a, min(a + step, len(positions))) for a in range(0, len(positions), step)]


def _by_kv_head(heads: Sequence[int], group: int) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for i, head in enumerate(heads):
        members.setdefault(head // group, []).append(i)
    return members


def _first_page(positions: Sequence[int], page_size: int, rule: AttentionRule) -> int:
    """Pages before every row's window may have been given back: they are never read."""
    if rule.window is None:
        return 0
    return max(0, min(positions) - rule.window + 1) // page_size
