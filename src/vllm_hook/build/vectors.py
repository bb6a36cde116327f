"""Steering vectors from contrast pairs. Pure mathematics on tensors; no model.

Shapes: N pairs, width d; row i of ``with_Nd`` and of ``without_Nd`` are the states of pair i with
and without what the vector is to bring about. Leave out rows of position 0: in many models its norm
is hundreds of times that of the others, and it says nothing about the text. Computed in float64,
returned in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import HookError


def mean_difference(with_Nd: Tensor, without_Nd: Tensor) -> Tensor:
    """Mean over pairs of with - without, f32[d] (CAA, arXiv 2312.06681; Stolfo et al., 2410.12877)."""
    with_, without = _pairs(with_Nd, without_Nd)
    difference: Tensor = (with_ - without).mean(0)
    return difference.float()


def centred_pca(with_Nd: Tensor, without_Nd: Tensor) -> Tensor:
    """Unit direction f32[d] of the largest variance of both states of all pairs, each pair centred.

    Centring each pair on its midpoint takes out what its two states share (the question). The sign
    is that of the mean difference.
    """
    with_, without = _pairs(with_Nd, without_Nd)
    half = (with_ - without) / 2  # the states of a centred pair are +half and -half
    _, sizes, directions = torch.linalg.svd(half, full_matrices=False)
    if not float(sizes[0]) > 0:
        raise HookError("the two states of every pair are equal: there is no direction")
    first: Tensor = directions[0]
    sign = -1.0 if float(half.mean(0) @ first) < 0 else 1.0
    direction: Tensor = sign * first
    return direction.float()


def mass_mean(with_Nd: Tensor, without_Nd: Tensor, shrink: float = 0.1) -> Tensor:
    """Difference of the class means, tilted by the inverse covariance within the classes, f32[d].

    The mass-mean direction of Marks and Tegmark, arXiv 2310.06824. Pairs are fewer than dimensions, so
    the covariance S is shrunk to (1 - shrink) S + shrink tr(S)/d I. As long as the difference of means.
    """
    with_, without = _pairs(with_Nd, without_Nd)
    difference = with_.mean(0) - without.mean(0)
    centred = torch.cat([with_ - with_.mean(0), without - without.mean(0)])
    count, width = centred.shape
    spread = float(centred.square().sum()) / (count * width)
    if not spread > 0:
        return difference.float()
    # Woodbury: with A = shrink * spread * I and U = sqrt((1 - shrink)/count) centred, (A + U'U) x = b.
    base = shrink * spread
    factor = centred * ((1 - shrink) / count) ** 0.5
    inner = torch.eye(count, dtype=factor.dtype) + factor @ factor.T / base
    tilted = (difference - factor.T @ torch.linalg.solve(inner, factor @ difference) / base) / base
    scaled: Tensor = tilted * (difference.norm() / tilted.norm().clamp_min(1e-300))
    return scaled.float()


def clamp_target(with_Nd: Tensor, vector_d: Tensor) -> float:
    """Mean of h_with . u with u = vector/|vector|: where ``clamp`` puts the projection."""
    with_, unit = _rows(with_Nd), unit_vector(vector_d).double()
    if with_.shape[1] != unit.shape[0]:
        raise HookError(f"rows have width {with_.shape[1]}, but the vector {unit.shape[0]}")
    return float((with_ @ unit).mean())


def unit_vector(vector_d: Tensor) -> Tensor:
    """vector/|vector|, f32[d]."""
    vector = vector_d.double()
    norm = float(vector.norm())
    if vector.dim() != 1 or not norm > 0 or norm == float("inf"):
        raise HookError(f"a direction is one finite vector that is not zero, got {list(vector.shape)}")
    return (vector / norm).float()


def _pairs(with_Nd: Tensor, without_Nd: Tensor) -> tuple[Tensor, Tensor]:
    if with_Nd.shape != without_Nd.shape:
        raise HookError(f"pairs need equal shapes: {list(with_Nd.shape)} and {list(without_Nd.shape)}")
    return _rows(with_Nd), _rows(without_Nd)


def _rows(rows_Nd: Tensor) -> Tensor:
    if rows_Nd.dim() != 2 or not rows_Nd.numel():
        raise HookError(f"need rows [pairs, width], got {list(rows_Nd.shape)}")
    rows = rows_Nd.double()
    if not bool(torch.isfinite(rows).all()):
        raise HookError("a state is not finite")
    return rows
