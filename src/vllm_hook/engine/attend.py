"""Attention steering on CPU: after a layer's attention kernel, inside vLLM's own opaque op.

That op is not traced, so compiled code stays as it is. In replayed CUDA graphs nothing of Python
runs there: on GPUs the same mathematics has to become a kernel behind the attention op that reads
its pieces from device tables, as edits do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.attention import attend

if TYPE_CHECKING:
    from .runner import RunnerHook


def steer_attention(hook: RunnerHook, layer: int) -> None:
    """Wrap the attention kernel of one layer of one engine."""
    impl: Any = hook.attention[layer].impl
    forward = impl.forward

    def steered(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(module, query, *args, **kwargs)
        pieces = hook.edits.attends.get(layer)
        if pieces:
            result = kwargs.get("output", out)
            hook.guard(lambda: _apply(hook, layer, pieces, query, result))
        return out

    impl.forward = steered


def _apply(hook: RunnerHook, layer: int, pieces: Any, query: torch.Tensor, out: torch.Tensor) -> None:
    """Change the output rows of each piece; they are read and written by row number."""
    reader = hook.reader(layer)
    for piece in pieces:
        keep = hook.edits.open_rows(piece)
        if not len(keep):
            continue
        rows = torch.from_numpy(piece.rows[keep]).long()
        positions = piece.positions[keep].tolist()
        changed = out[rows]
        attend(
            changed,
            query[rows],
            positions,
            piece.attend.heads[layer],
            piece.attend.span,
            piece.attend.weight,
            piece.attend.mass,
            hook.pages(layer, piece.batch_index, positions[-1] + 1),
            reader.page_keys,
            reader.page_values,
            reader.page_size,
            reader.group,
            reader.rule,
        )
        out[rows] = changed
