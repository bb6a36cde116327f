"""A feature of a sparse autoencoder as a gate: its value before the activation, against a bound with which
the activation passes the bound that was asked for exactly then."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from editing import Tensors, reading
from vllm_hook.errors import ProgramError
from vllm_hook.ops import edit as op
from vllm_hook.runtime.edit_compile import feature_bound
from vllm_hook.runtime.loading import LoadedProgram, load_program
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("tiny", layers=4, heads=4, kv_heads=2, head_dim=8, hidden=16)


@pytest.fixture
def tensors(tmp_path) -> Tensors:
    return Tensors(tmp_path, FACTS.hidden, FACTS.head_dim)


ALL_ROWS = {"site": "resid_post", "layers": [1], "positions": "all"}


def feature_gate(t: Tensors, sae: str, feature: int, observe: Any = (), **when: Any) -> LoadedProgram:
    c = {**ALL_ROWS, "reduce": {"sae": t.ref("", sae), "features": [feature]}, **dict(observe)}
    e = {**ALL_ROWS, "layers": [2], "method": "add", "vector": t.ref("v"), "positions": "generated"}
    edits = {"e": {**e, "when": {"observe": "c", **when}}}
    return load_program({"schema": 1, "name": "p", "observe": {"c": c}, "intervene": edits}, FACTS)


@pytest.mark.parametrize("sae", ["sae", "sae-jump"])
def test_an_sae_feature_gates_by_its_activation(tensors: Tensors, sae: str) -> None:
    x = torch.randn(200, 16)
    for feature, side, bound in itertools.product((0, 3), ("above", "below"), (-0.5, 0.0, 0.05, 0.4)):
        loaded = feature_gate(tensors, sae, feature, **{side: bound})
        condition = loaded.edits.edits[0].condition
        assert condition is not None
        assert (condition.kind, condition.per_row) == (op.LINEAR, True)
        value = x @ loaded.edits.vectors[condition.u] + condition.c
        got = value > condition.bound if condition.above else value < condition.bound
        f = reading({"sae": tensors.ref("", sae), "features": [feature]}, tensors, x)
        assert 0 < int((f == 0).sum()) < len(f)
        want = f > bound if side == "above" else f < bound
        assert torch.equal(got, want), (feature, side, bound)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1e-6, 2.5, -0.4])
def test_the_bound_before_the_activation_is_exact(theta: float) -> None:
    """Against the activation itself, at every edge and one float beside it."""
    edges = np.float32([theta, 0.0, -0.0, 0.1, 0.3, 0.4, -0.4, -0.2, -7, 2.5, 7, 1e30, -1e30])
    near = [np.nextafter(edges, np.float32(s)) for s in (-np.inf, np.inf)]
    p = np.unique(np.concatenate([edges, *near]))
    f = np.where(p > np.float32(theta), p, np.float32(0))
    refused = []
    for x in [*p.tolist(), 0.1, 0.3000000001, -0.4, 1e300, -1e300]:
        x32 = np.float32(np.clip(x, -3.4e38, 3.4e38))
        for above in (True, False):
            bound = feature_bound(above, x, theta)
            if bound is None:
                refused.append((above, x))
                continue
            assert math.isfinite(bound)
            got = p > np.float32(bound) if above else p < np.float32(bound)
            assert (got == (f > x32 if above else f < x32)).all(), (above, x)
    assert all(np.float32(theta) < x <= 0 for _, x in refused)
    assert bool(refused) == (theta < 0)


def test_sae_gates_that_are_refused(tensors: Tensors) -> None:
    prompt = {"positions": "prompt"}
    with pytest.raises(ProgramError, match=r"e\.when\.over: the mean of SAE activations cannot gate"):
        feature_gate(tensors, "sae", 0, prompt, above=0.5, over="mean")
    for over, observe in (("any", prompt), ("all", prompt), ("mean", {"positions": "last_prompt"})):
        feature_gate(tensors, "sae", 0, observe, above=0.5, over=over)
    negative = {**tensors[tensors.ref("", "sae-jump")], "threshold": torch.full((6,), -1.0)}
    tensors.put("sae-negative", negative, whole=True)
    with pytest.raises(ProgramError, match=r"e\.when\.above: cannot gate between .* threshold, -1, and 0"):
        feature_gate(tensors, "sae-negative", 0, above=-0.5)
    feature_gate(tensors, "sae-negative", 0, above=0.0)
    two = {"reduce": {"sae": tensors.ref("", "sae"), "features": [0, 1]}}
    with pytest.raises(ProgramError, match="no reduction to one number a row"):
        feature_gate(tensors, "sae", 0, two, above=1.0)
