"""Plain-torch definitions. Every faster path is tested against these.

Shapes: T tokens of a step, D width of a row, R rows, H heads, K keys, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Index of the row count in a row table; the rows follow it.
COUNT = 0


def tap(h_TD: Tensor, residual_TD: Tensor | None, rows_R: Tensor) -> Tensor:
    """Rows of ``h + residual`` (of ``h`` alone without a residual), in the stream's own dtype."""
    picked = h_TD[rows_R]
    return picked if residual_TD is None else picked + residual_TD[rows_R]


def probe(
    h_RD: Tensor,
    weight_D: Tensor,
    bias: Tensor,
    mean_D: Tensor | None,
    scale_D: Tensor | None,
    dot: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """Raw logit of a linear probe, float32 [R]: ``w . ((h - mean) / scale) + b``."""
    x = h_RD.float()
    if mean_D is not None:
        x = x - mean_D
    if scale_D is not None:
        x = x / scale_D
    logits: Tensor = dot(x, weight_D) + bias
    return logits


def projection(h_RD: Tensor, vector_D: Tensor) -> Tensor:
    """Length along the unit vector, float32 [R]: ``h . v / |v|``."""
    lengths: Tensor = h_RD.float() @ (vector_D / vector_D.norm())
    return lengths


def cosine(h_RD: Tensor, vector_D: Tensor) -> Tensor:
    """Cosine to a vector, float32 [R]; 0 for a row of zeros."""
    h = h_RD.float()
    cosines: Tensor = (h @ (vector_D / vector_D.norm())) / h.norm(dim=-1).clamp_min(1e-30)
    return cosines


def sae(
    h_RD: Tensor, encoder_FD: Tensor, bias_F: Tensor, centre_D: Tensor | None, threshold_F: Tensor | None
) -> Tensor:
    """Feature activations of a sparse autoencoder, float32 [R, F]: relu, or jump-relu above a threshold."""
    x = h_RD.float() if centre_D is None else h_RD.float() - centre_D
    pre: Tensor = x @ encoder_FD.T + bias_F
    floor = torch.zeros_like(bias_F) if threshold_F is None else threshold_F
    return torch.where(pre > floor, pre, torch.zeros_like(pre))


@dataclass(frozen=True)
class AttentionRule:
    """How one layer turns q.k into probabilities.

    ``window``: a query at position i sees keys j with i - window < j <= i (None: all j <= i).
    ``soft_cap``: s -> cap * tanh(s / cap), applied after the scale (None: off).
    ``sinks``: a learned logit per head that joins the softmax and is dropped (GPT-OSS).
    ``alibi``: slope per head; adds slope * (j - i) to the logit (arXiv 2108.12409).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Scaled, causal softmax and nothing else."""
        return not self.soft_cap and self.window is None and self.sinks is None and self.alibi is None


def logits_to_probs(logits_HRK: Tensor, positions_R: Tensor, heads: Tensor, rule: AttentionRule) -> Tensor:
    """Softmax over keys of already scaled logits, causal, by the rule of the layer. float32."""
    logits = logits_HRK
    if rule.soft_cap:
        logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
    keys = torch.arange(logits.shape[-1], device=logits.device)
    if rule.alibi is not None:
        distance = (keys[None, :] - positions_R[:, None]).to(logits.dtype)
        logits = logits + rule.alibi[heads].to(logits.dtype)[:, None, None] * distance
    hidden = keys[None, :] > positions_R[:, None]
    if rule.window is not None:
        hidden |= keys[None, :] <= positions_R[:, None] - rule.window
    logits = logits.masked_fill(hidden, float("-inf"))
    if rule.sinks is None:
        return torch.softmax(logits, dim=-1)
    sink = rule.sinks[heads].to(logits.dtype)[:, None, None].expand(*logits.shape[:2], 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def attention(
    q_RHD: Tensor, k_KGD: Tensor, positions_R: Tensor, heads: Tensor, rule: AttentionRule
) -> Tensor:
    """Probabilities [len(heads), R, K] of query rows over contiguous keys.

    Query head h reads KV head h // (H / G).
    """
    group = q_RHD.shape[1] // k_KGD.shape[1]
    q = q_RHD.float()[:, heads].transpose(0, 1)
    k = k_KGD.float()[:, heads // group].transpose(0, 1)
    return logits_to_probs(q @ k.transpose(1, 2) * rule.scale, positions_R, heads, rule)


@dataclass(frozen=True)
class EditEntry:
    """One edit of a row: ``s = act(<x, u> + c)``, ``x <- x + (a + b s) v``, or a rotation in the plane
    of orthonormal u, v to the direction (a, b) = (cos, sin). ``act``: identity, relu or jump (relu above
    ``theta``, else 0). ``keep_norm`` rescales to the norm that x had."""

    u: Tensor
    v: Tensor
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    act: str = "identity"
    theta: float = 0.0
    rotate: bool = False
    keep_norm: bool = False


def edit(x_D: Tensor, chain: list[EditEntry]) -> Tensor:
    """A row after a chain of edits, each on what the one before left. float32 in, float32 out."""
    x = x_D
    for e in chain:
        p = torch.dot(x, e.u)
        if e.rotate:
            q = torch.dot(x, e.v)
            length = torch.sqrt(p * p + q * q)
            new = x + (length * e.a - p) * e.u + (length * e.b - q) * e.v
        else:
            s = p + e.c
            if e.act == "relu":
                s = torch.relu(s)
            elif e.act == "jump":
                s = s if s > e.theta else torch.zeros_like(s)
            new = x + (e.a + e.b * s) * e.v
        x = new * (x.norm() / new.norm()) if e.keep_norm else new
    return x
