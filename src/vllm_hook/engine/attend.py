"""Attention steering: after a layer's attention kernel, inside vLLM's own opaque op.

That op is not traced, so compiled code stays as it is. In a replayed full CUDA graph nothing of
Python runs there: on GPUs, steps with rows that are steered so run with piecewise graphs, which
leave attention out (see :mod:`.graphs`); all other steps keep their full graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.attention import attend, attend_paged
from ..runtime.edit_plan import AttendPiece

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
            act = _apply_paged if out.is_cuda else _apply

            def steer() -> None:
                for piece in pieces:
                    act(hook, layer, piece, query, result)

            hook.guard(steer)
        return out

    impl.forward = steered


def _apply(hook: RunnerHook, layer: int, piece: AttendPiece, query: torch.Tensor, out: torch.Tensor) -> None:
    """Change the output rows of a piece; they are read and written by row number."""
    reader = hook.reader(layer)
    gate = hook.edits.open_rows(piece)
    keep = slice(None) if gate is None else gate.numpy()
    rows = torch.from_numpy(piece.rows[keep]).long()
    heads = hook.local_heads(piece.attend.heads[layer])
    if not len(rows) or not heads:
        return
    positions = piece.positions[keep].tolist()
    changed = out[rows]
    attend(
        changed,
        query[rows],
        positions,
        heads,
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


def _apply_paged(
    hook: RunnerHook, layer: int, piece: AttendPiece, query: torch.Tensor, out: torch.Tensor
) -> None:
    """The same on a GPU, where the rows of a piece are neighbours more often than not."""
    heads = hook.local_heads(piece.attend.heads[layer])
    if not heads:
        return
    rows = hook.edits.send(piece.rows).long()
    changed = out[rows]
    attend_paged(
        changed,
        query[rows],
        piece.positions.tolist(),
        hook.edits.open_rows(piece),
        heads,
        piece.attend.span,
        piece.attend.weight,
        piece.attend.mass,
        piece.batch_index,
        hook.paged(layer),
    )
    out[rows] = changed
