"""Interventions without an engine: what is refused, and the numbers that reach the kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from editing import Tensors, method, reading
from vllm_hook.errors import HookError, ProgramError
from vllm_hook.ops import edit as op
from vllm_hook.program.resolve import Prompt, resolve
from vllm_hook.runtime.edits import resolve_edits
from vllm_hook.runtime.loading import LoadedProgram, load_program
from vllm_hook.sites import Armed, ModelFacts

FACTS = ModelFacts("tiny", layers=4, heads=4, kv_heads=2, head_dim=8, hidden=16)
POST = {"site": "resid_post", "layers": [1]}


@pytest.fixture
def tensors(tmp_path) -> Tensors:
    t = Tensors(tmp_path, FACTS.hidden, FACTS.head_dim)
    t.put(
        "bad",
        {
            "zero": torch.zeros(16),
            "narrow": torch.ones(15),
            "nan": torch.full((16,), float("nan")),
            "inf": torch.full((16,), float("inf")),
            "parallel": -3 * t[t.ref("v")],
            "two": torch.tensor([2.0, 1.0]),
        },
    )
    sae = t[t.ref("", "sae")]
    t.put("no-decoder", {"W_enc": sae["W_enc"], "b_enc": sae["b_enc"]}, whole=True)
    return t


def program(observe: dict[str, Any] | None = None, **edits: Any) -> LoadedProgram:
    source = {"schema": 1, "name": "p", "spans": {"s": {"tokens": [0, 2]}}, "intervene": edits}
    return load_program({**source, "observe": observe} if observe else source, FACTS)


def bad(t: Tensors, name: str) -> str:
    return t.ref(name, "bad")


REFUSED: dict[str, tuple[Any, str]] = {
    "width": (
        lambda t: {**POST, "method": "add", "vector": bad(t, "narrow")},
        r"intervene\.e\.vector.*15.*16",
    ),
    "head-width": (
        lambda t: {"site": "q", "layers": [1], "method": "add", "vector": t.ref("v")},
        r"intervene\.e\.vector.*16.*8",
    ),
    "width-of-a-row-at-a-head-site": (
        lambda t: {
            "site": "resid_pre",
            "layers": [1],
            "method": "clamp",
            "vector": t.ref("hv"),
            "target": 1.0,
        },
        r"intervene\.e\.vector.*8.*16",
    ),
    "nan": (
        lambda t: {**POST, "method": "add", "vector": bad(t, "nan")},
        r"intervene\.e\.vector.*(?i:nan|finite)",
    ),
    "inf": (
        lambda t: {**POST, "method": "ablate", "vector": bad(t, "inf")},
        r"intervene\.e\.vector.*(?i:inf|finite)",
    ),
    "strength": (
        lambda t: {**POST, "method": "add", "vector": t.ref("v"), "strength": math.inf},
        r"e\.strength",
    ),
    "target": (lambda t: {**POST, "method": "clamp", "vector": t.ref("v"), "target": math.nan}, r"e\.target"),
    "target-of-two": (
        lambda t: {**POST, "method": "clamp", "vector": t.ref("v"), "target": bad(t, "two")},
        r"e\.target.*one number",
    ),
    "no-target": (lambda t: {**POST, "method": "clamp", "vector": t.ref("v")}, r"e\.target"),
    "zero-clamp": (
        lambda t: {**POST, "method": "clamp", "vector": bad(t, "zero"), "target": 1.0},
        r"e\.vector.*zero",
    ),
    "zero-ablate": (lambda t: {**POST, "method": "ablate", "vector": bad(t, "zero")}, r"e\.vector.*zero"),
    "zero-rotate": (
        lambda t: {**POST, "method": "rotate", "vector": t.ref("v"), "second": bad(t, "zero"), "angle": 3.0},
        r"e\.second.*zero",
    ),
    "parallel": (
        lambda t: {
            **POST,
            "method": "rotate",
            "vector": t.ref("v"),
            "second": bad(t, "parallel"),
            "angle": 3.0,
        },
        r"e\.second.*parallel",
    ),
    "sae-without-decoder": (
        lambda t: {**POST, "method": "sae", "sae": t.ref("", "no-decoder"), "features": [0], "target": 1.0},
        r"e\.sae.*W_dec",
    ),
    "sae-feature": (
        lambda t: {**POST, "method": "sae", "sae": t.ref("", "sae"), "features": [6], "target": 1.0},
        r"e\.sae.*6 feat",
    ),
    "attention-mass": (
        lambda t: {"site": "attention_mass", "layers": [1], "method": "add", "vector": t.ref("v")},
        r"e\.site.*attention_mass",
    ),
    "add-at-attention": (
        lambda t: {"site": "attention", "layers": [1], "method": "add", "vector": t.ref("v")},
        r"e\.site.*attention",
    ),
    "attend-elsewhere": (
        lambda t: {**POST, "method": "attend", "keys": ["s"], "weight": 2.0},
        r"e\.site.*resid_post",
    ),
    "attend-both": (
        lambda t: {"site": "attention", "method": "attend", "keys": ["s"], "weight": 2.0, "mass": 0.5},
        r"weight and mass",
    ),
    "attend-weight": (
        lambda t: {"site": "attention", "method": "attend", "keys": ["s"], "weight": -1.0},
        r"e\.weight",
    ),
    "attend-mass": (
        lambda t: {"site": "attention", "method": "attend", "keys": ["s"], "mass": 1.0},
        r"e\.mass",
    ),
    "attend-keys": (
        lambda t: {"site": "attention", "method": "attend", "keys": ["z"], "mass": 0.5},
        r"e\.keys.*'z'",
    ),
    "method": (lambda t: {**POST, "method": "shift", "vector": t.ref("v")}, r"e.*method.*add, clamp"),
    "layer": (lambda t: {**POST, "layers": [4], "method": "add", "vector": t.ref("v")}, r"e\.layers.*4"),
    "heads-of-a-stream": (
        lambda t: {**POST, "heads": [0], "method": "add", "vector": t.ref("v")},
        r"e\.heads.*no heads",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_when_loaded(tensors: Tensors, kind: str) -> None:
    edit, message = REFUSED[kind]
    with pytest.raises(ProgramError, match=f"(?s){message}"):
        program(e=edit(tensors))


def test_zero_is_a_fine_vector_to_add_and_all_problems_are_told_at_once(tensors: Tensors) -> None:
    program(e={**POST, "method": "add", "vector": bad(tensors, "zero")})
    with pytest.raises(ProgramError) as caught:
        program(
            a={**POST, "method": "ablate", "vector": bad(tensors, "zero")},
            b={**POST, "method": "clamp", "vector": bad(tensors, "zero"), "target": 1.0},
        )
    assert "intervene.a.vector" in str(caught.value)
    assert "intervene.b.vector" in str(caught.value)


# -- gates ------------------------------------------------------------------------------------


def gated(
    t: Tensors, observe: dict[str, Any], edit: dict[str, Any] | None = None, length: int = 5
) -> list[dict[str, Any]]:
    c = {"site": "resid_post", "layers": [1], "positions": "last_prompt", "reduce": {"norm": True}, **observe}
    e = {"site": "resid_post", "layers": [2], "method": "add", "vector": t.ref("v"), "positions": "generated"}
    p = program({"c": c}, e={**e, "when": {"observe": "c", "above": 1.0}, **(edit or {})})
    prompt = Prompt(list(range(length)))
    return resolve_edits([(p.checked, p.edits, resolve(p.checked, prompt))], {}, prompt, FACTS).data


@pytest.mark.parametrize(
    ("observe", "edit", "message"),
    [
        ({"positions": "all", "layers": [3]}, {}, r"when\.observe.*layer 3.*after the edit"),
        (
            {"positions": "generated", "site": "resid_post", "layers": [2]},
            {"site": "resid_mid"},
            r"after the edit",
        ),
        ({"reduce": None}, {}, r"no reduction"),
        ({"layers": [0, 1]}, {}, r"2 layers; a gate takes one"),
        (
            {"site": "attention", "positions": None, "rows": "all", "reduce": None},
            {},
            r"attention, which cannot gate",
        ),
        ({}, {"when": {"observe": "d", "above": 1.0}}, r"unknown observation 'd'"),
        ({}, {"when": {"observe": "c"}}, r"exactly one of above and below"),
        ({}, {"when": {"observe": "c", "above": 1.0, "below": 2.0}}, r"exactly one of above and below"),
        ({}, {"positions": "all"}, r"edits position 0, but its condition is decided at position 4"),
        (
            {"positions": "prompt"},
            {"positions": {"range": [-2, None]}},
            r"edits position 3.*decided at position 4",
        ),
        ({"layers": [3]}, {"positions": "last_prompt"}, r"of a later site: it can act from position 5 on"),
    ],
)
def test_refused_gates(tensors: Tensors, observe: Any, edit: Any, message: str) -> None:
    observe = {k: v for k, v in observe.items() if v is not None} if "site" in observe else observe
    if observe.get("site") == "attention":
        with pytest.raises(HookError, match=message):
            program(
                {"c": {"site": "attention", "layers": [1], "rows": "all"}},
                e={
                    **POST,
                    "method": "add",
                    "vector": tensors.ref("v"),
                    "when": {"observe": "c", "above": 1.0},
                },
            )
        return
    with pytest.raises(HookError, match=f"(?s){message}"):
        gated(tensors, observe, edit)


def test_gates_that_are_fine(tensors: Tensors) -> None:
    for observe, edit in (
        ({}, {"positions": ["last_prompt", "generated"]}),
        ({"layers": [2]}, {"positions": "last_prompt"}),  # the same site: read before it is edited
        ({"layers": [3]}, {}),  # a later site, for later positions
        ({"positions": {"range": [0, 2]}}, {"positions": {"range": [1, None]}}),
        ({"positions": "all"}, {"positions": "all"}),
    ):
        assert gated(tensors, observe, edit)[0]["gate"]["site"] == "resid_post"


@pytest.mark.parametrize("kind", ["probe", "projection", "cosine", "norm"])
def test_what_a_condition_reads(tensors: Tensors, kind: str) -> None:
    """In particular a probe with mean and scale becomes one vector and one constant."""
    ref = {"probe": tensors.ref("", "probe"), "norm": True}.get(kind, tensors.ref("w"))
    c = {**POST, "positions": "all", "reduce": {kind: ref}}
    e = {
        **POST,
        "layers": [2],
        "method": "add",
        "vector": tensors.ref("v"),
        "when": {"observe": "c", "below": 0.5},
    }
    compiled = program({"c": c}, e=e).edits
    condition = compiled.edits[0].condition
    assert condition is not None
    assert (condition.bound, condition.above, condition.per_row) == (0.5, False, True)
    x = torch.randn(6, 16)
    dot = x @ compiled.vectors[condition.u]
    got = {op.NORM: x.norm(dim=-1), op.COSINE: dot / x.norm(dim=-1), op.LINEAR: dot}[
        condition.kind
    ] + condition.c
    torch.testing.assert_close(got, reading(c["reduce"], tensors, x))


# -- numbers ----------------------------------------------------------------------------------


def run(p: LoadedProgram, x: torch.Tensor) -> torch.Tensor:
    """The entries of the first edit, from their definition."""
    for a in p.edits.edits[0].atoms:
        u, v = p.edits.vectors[a.u], p.edits.vectors[a.v]
        before = x
        if a.kind == op.ROTATE:
            first, second = x @ u, x @ v
            length = torch.hypot(first, second)
            x = x + (length * a.a - first)[:, None] * u + (length * a.b - second)[:, None] * v
        else:
            s = x @ u + a.c
            if a.act != op.IDENTITY:
                s = torch.where(s > (a.theta if a.act == op.JUMP_RELU else 0.0), s, 0.0)
            x = x + (a.a + a.b * s)[:, None] * v
        if a.keep_norm:
            x = x * (before.norm(dim=-1) / x.norm(dim=-1))[:, None]
    return x


@pytest.mark.parametrize("keep_norm", [False, True])
def test_every_method_is_its_definition(tensors: Tensors, keep_norm: bool) -> None:
    v, w = tensors.ref("v"), tensors.ref("w")
    x = torch.randn(9, 16)
    for edit in (
        {"method": "add", "vector": v, "strength": -1.5},
        {"method": "clamp", "vector": v, "target": 2.0},
        {"method": "ablate", "vector": w},
        {"method": "rotate", "vector": v, "second": w, "angle": 200.0},
        {"method": "affine", "u": w, "v": v, "a": 0.5, "b": -0.3},
        {"method": "sae", "sae": tensors.ref("", "sae"), "features": [5], "target": 1.0},
        {"method": "sae", "sae": tensors.ref("", "sae-jump"), "features": [2], "target": 1.0},
    ):
        got = run(program(e={**POST, **edit, "keep_norm": keep_norm}), x)
        torch.testing.assert_close(
            got, method({**edit, "keep_norm": keep_norm}, tensors, x), rtol=1e-4, atol=1e-5
        )


def test_rotation_plane_is_orthonormal(tensors: Tensors) -> None:
    p = program(
        e={**POST, "method": "rotate", "vector": tensors.ref("v"), "second": tensors.ref("w"), "angle": 30.0}
    )
    (atom,) = p.edits.edits[0].atoms
    u, v = p.edits.vectors[atom.u], p.edits.vectors[atom.v]
    torch.testing.assert_close(
        torch.stack([u @ u, v @ v, u @ v]), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6, rtol=0
    )
    assert (atom.a, atom.b) == pytest.approx((math.cos(math.pi / 6), 0.5))


def test_a_target_from_a_file(tensors: Tensors, tmp_path: Any) -> None:
    save_file({"target": torch.tensor([1.75])}, tmp_path / "target.safetensors")
    target = str(tmp_path / "target.safetensors")
    p = program(e={**POST, "method": "clamp", "vector": tensors.ref("v"), "target": target})
    assert p.edits.edits[0].scalars == {"target": 1.75}


def test_heads(tensors: Tensors) -> None:
    edit = {"layers": [1], "method": "add", "vector": tensors.ref("hv")}
    for site, heads, want in (
        ("q", None, [0, 1, 2, 3]),
        ("k", None, [0, 1]),
        ("z", [2, -1], [2, 3]),
        ("v", [1], [1]),
    ):
        chosen = {} if heads is None else {"heads": heads}
        assert [a.head for a in program(e={**edit, "site": site, **chosen}).edits.edits[0].atoms] == want


def test_what_must_be_armed(tensors: Tensors) -> None:
    e = {**POST, "method": "add", "vector": tensors.ref("v"), "when": {"observe": "c", "above": 0.0}}
    c = {"site": "resid_mid", "layers": [0], "positions": "all", "reduce": {"norm": True}}
    need = program({"c": c}, e=e).needs
    assert need.edits == {("resid_post", 1), ("resid_mid", 0)}
    assert need.rows == {("resid_mid", 0): "all"}
    assert Armed.of("resid_mid", [0], "all").missing(need).edits == need.edits
