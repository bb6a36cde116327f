"""Programs against a model: layers, heads, names."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_hook.errors import ModelMismatchError, ProgramError
from vllm_hook.program.check import CheckedProgram, check, needs, split_span_ref, tensor_refs, tensor_uses
from vllm_hook.program.load import load
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("org/SmolLM2-135M-Instruct", layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576)
SPANS = {"instruction": {"message": "system"}, "docs": {"between": ["<d>", "</d>"], "each": True}}


def checked(**sections: Any) -> CheckedProgram:
    return check(load({"schema": 1, "name": "p", "spans": SPANS, **sections}), FACTS)


def observing(**fields: Any) -> Any:
    return checked(observe={"o": fields}).observation("o")


def test_layers_are_spelled_out() -> None:
    for given in ({}, {"layers": "all"}):
        assert observing(site="resid_post", positions="all", **given).layers == tuple(range(30))
    assert observing(site="resid_post", positions="all", layers=[-1, 3, 0]).layers == (29, 3, 0)
    assert observing(site="embed", positions="all").layers == (0,)
    assert observing(site="final_norm", positions="all").layers == (29,)


def test_heads_of_attention_are_pairs() -> None:
    listed = observing(
        site="attention_mass", heads=[[-1, 2], [3, -1]], rows="last_prompt", keys=["instruction"]
    )
    assert listed.heads == ((29, 2), (3, 8))
    assert (listed.layers, listed.keys, listed.keep_heads) == ((3, 29), ("instruction",), None)
    every = observing(site="attention", layers=[5, 2], rows="generated")
    assert every.heads == tuple((y, h) for y in (5, 2) for h in range(9))
    assert every.layers == (2, 5)
    assert len(observing(site="attention", rows="all").heads) == 270


def test_heads_of_head_sites_are_indexes() -> None:
    o = observing(site="k", layers=[1], heads=[0, -1], positions="prompt")
    assert (o.layers, o.heads, o.keep_heads) == ((1,), None, (0, 2))
    assert observing(site="z", positions="prompt").keep_heads is None


def test_the_rest_is_carried() -> None:
    p = checked(
        observe={
            "m": {"site": "attention_mass", "rows": ["all"], "keys": ["docs", "docs[3]"], "heads": [[1, 1]]},
            "d": {"site": "resid_post", "layers": [2], "positions": "generated", "reduce": {"probe": "d.st"}},
        },
        analyze={
            "a": {"analyzer": "x", "observe": ["m"], "options": {"to": "docs", "n": 3, "l": ["instruction"]}}
        },
        act=[{"if": "a.flagged", "do": "stop", "reason": "r"}, {"if": "d below 2", "do": "tag"}],
        apply="always",
    )
    assert (p.name, p.apply, p.has_interventions) == ("p", "always", False)
    assert p.analyses[0].spans == ("docs", "instruction")
    assert [(r.subject, r.test, r.bound, r.do) for r in p.rules] == [
        ("a", "flagged", None, "stop"),
        ("d", "below", 2.0, "tag"),
    ]
    assert p.observation("d").scalar
    assert not p.observation("d").prompt_only


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"site": "q", "layers": [30]},
            "observe.o.layers[0]: layer 30 does not exist: the model has 30 layers, 0 to 29",
        ),
        ({"site": "q", "layers": [-31]}, "observe.o.layers[0]: layer -31 does not exist"),
        ({"site": "q", "layers": [1, 2, -29]}, "observe.o.layers[2]: layer -29 is listed twice"),
        ({"site": "q", "layers": []}, "observe.o.layers: is empty; leave it out for all layers"),
        (
            {"site": "embed", "layers": [0]},
            "observe.o.layers: site 'embed' exists once in a model and takes no layers",
        ),
        ({"site": "final_norm", "layers": "all"}, "observe.o.layers: site 'final_norm' exists once"),
        ({"site": "resid_post", "heads": [1]}, "observe.o.heads: site 'resid_post' has no heads"),
        (
            {"site": "k", "heads": [3]},
            "observe.o.heads[0]: head 3 does not exist: the model has 3 KV heads, 0 to 2",
        ),
        (
            {"site": "q", "heads": [9]},
            "observe.o.heads[0]: head 9 does not exist: the model has 9 heads, 0 to 8",
        ),
        ({"site": "q", "heads": [1, 1]}, "observe.o.heads[1]: head 1 is listed twice"),
        ({"site": "q", "heads": []}, "observe.o.heads: is empty; leave it out for all heads"),
        ({"site": "q", "heads": [[1, 1]]}, "observe.o.heads: site 'q' takes head indexes such as [0, 2]"),
        (
            {"site": "q", "keys": ["docs"]},
            "observe.o.keys: site 'q' has no keys; keys belong to attention_mass",
        ),
        (
            {"site": "q", "reduce": {"norm": True}},
            "observe.o.reduce: site 'q' cannot be reduced; that needs one of embed",
        ),
        (
            {"site": "q", "positions": {"span": "x"}},
            "observe.o.positions[0].span: unknown span 'x'; known spans: instr",
        ),
        (
            {"site": "q", "positions": {"span": "instruction[0]"}},
            "span 'instruction' is not a list (each: true)",
        ),
        (
            {"site": "q", "rows": "all", "positions": None},
            "observe.o.rows: site 'q' takes positions, not rows",
        ),
        ({"site": "q", "positions": None}, "observe.o.positions: is required: which positions to observe"),
    ],
)
def test_a_wrong_observation_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        observing(**{"positions": "all", **fields})
    assert message in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": [[30, 0]]}, "observe.o.heads[0]: layer 30 does not exist"),
        ({"heads": [[1, 1], [0, 9]]}, "observe.o.heads[1]: head 9 does not exist"),
        ({"heads": [[1, 1], [1, -8]]}, "observe.o.heads[1]: head [1, -8] is listed twice"),
        ({"heads": []}, "observe.o.heads: is empty; give [layer, head] pairs"),
        ({"heads": [3, 4]}, "observe.o.heads[0]: attention takes [layer, head] pairs"),
        ({"heads": [[1, 1]], "layers": [1]}, "observe.o.layers: give heads or layers, not both"),
        ({"keys": None}, "observe.o.keys: is required: the spans whose attention is summed"),
        (
            {"keys": ["docs", "nope"]},
            "observe.o.keys[1]: unknown span 'nope'; known spans: instruction, docs",
        ),
        ({"keys": ["docs", "docs"]}, "observe.o.keys[1]: span 'docs' is listed twice"),
        ({"site": "attention"}, "observe.o.keys: site 'attention' covers all keys"),
        ({"reduce": {"norm": True}}, "observe.o.reduce: site 'attention_mass' cannot be reduced"),
        (
            {"rows": None, "positions": "all"},
            "observe.o.positions: site 'attention_mass' takes rows, not positions",
        ),
        ({"rows": None}, "observe.o.rows: is required: which rows to observe"),
    ],
)
def test_a_wrong_attention_observation_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        observing(**{"site": "attention_mass", "rows": "all", "keys": ["docs"], **fields})
    assert message in str(error.value)


GATES = {
    "late": {"site": "resid_post", "layers": [9], "positions": "generated", "reduce": {"norm": True}},
    "early": {"site": "resid_pre", "layers": [5], "positions": "generated", "reduce": {"norm": True}},
    "prompt": {"site": "resid_post", "layers": [9], "positions": "last_prompt", "reduce": {"norm": True}},
    "two": {"site": "resid_post", "layers": [1, 2], "positions": "all", "reduce": {"norm": True}},
    "raw": {"site": "resid_post", "layers": [1], "positions": "all"},
    "sae2": {
        "site": "resid_post", "layers": [1], "positions": "all", "reduce": {"sae": "f", "features": [1, 2]},
    },
    "att": {"site": "attention", "layers": [1], "rows": "all"},
}  # fmt: skip


@pytest.mark.parametrize("gate", ["early", "prompt"])
def test_gates_that_fit(gate: str) -> None:
    edit = {
        "site": "resid_post",
        "layers": [5],
        "method": "add",
        "vector": "v",
        "when": {"observe": gate, "above": 0},
    }
    assert checked(observe=GATES, intervene={"e": edit}).has_interventions


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("late", "observes resid_post of layer 9, after the edit at resid_post of layer 5"),
        ("two", "observes 2 layers; a gate takes one"),
        ("raw", "has no reduction to one number a row, so it cannot gate"),
        ("sae2", "has no reduction to one number a row"),
        ("att", "observes attention, which cannot gate"),
        ("none", "unknown observation 'none'; known observations: late, early"),
    ],
)
def test_gates_that_do_not_fit(gate: str, message: str) -> None:
    edit = {
        "site": "resid_post",
        "layers": [5],
        "method": "add",
        "vector": "v",
        "when": {"observe": gate, "above": 0},
    }
    with pytest.raises(ProgramError) as error:
        checked(observe=GATES, intervene={"e": edit})
    assert "intervene.e.when.observe: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"analyze": {"a": {"analyzer": "x", "observe": "nope"}}},
            "analyze.a.observe[0]: unknown observation 'nope'",
        ),
        (
            {"analyze": {"raw": {"analyzer": "x", "observe": "raw"}}},
            "analyze.raw: 'raw' is the id of an observation",
        ),
        (
            {"act": [{"if": "a.flagged", "do": "tag"}]},
            "act[0].if: unknown analyzer id 'a'; the program has no analyses",
        ),
        (
            {"act": [{"if": "a above 1", "do": "tag"}]},
            "act[0].if: unknown observation 'a'; known observations: late",
        ),
        ({"act": [{"if": "raw above 1", "do": "tag"}]}, "act[0].if: 'raw' has no reduction to one number"),
        (
            {"intervene": {"e": {"site": "attention", "method": "ablate", "vector": "v"}}},
            "intervene.e.site: method ablate does not apply at site 'attention'",
        ),
        (
            {"intervene": {"e": {"site": "q", "method": "attend", "keys": ["docs"], "weight": 2}}},
            "intervene.e.site: method attend does not apply at site 'q'",
        ),
        (
            {"intervene": {"e": {"site": "attention", "method": "attend", "keys": ["x"], "weight": 2}}},
            "intervene.e.keys[0]: unknown span 'x'",
        ),
    ],
)
def test_wrong_references_are_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        checked(observe=GATES, **sections)
    assert message in str(error.value)


def test_all_problems_at_once_with_lines() -> None:
    text = """schema: 1
name: p
observe:
  a:
    site: q
    positions: all
    layers: [1, 40]
  b: {site: attention_mass, rows: all, keys: [nope]}
act:
  - {if: c.flagged, do: tag}
"""
    with pytest.raises(ProgramError) as error:
        check(load(text), FACTS)
    assert [(p.line, p.field) for p in error.value.problems] == [
        (7, "observe.a.layers[1]"),
        (8, "observe.b.keys[0]"),
        (10, "act[0].if"),
    ]


def test_another_model_is_refused_with_every_difference() -> None:
    same = {"id": "elsewhere/smollm2-135m-instruct", "layers": 30, "kv_heads": 3, "head_dim": 64}
    assert checked(model=same, observe={"o": {"site": "q", "positions": "all"}}).name == "p"
    text = "schema: 1\nname: p\nmodel:\n  id: org/Other\n  layers: 32\n  heads: 9\n"
    text += "observe:\n  a: {site: q, positions: all}\n"
    with pytest.raises(ModelMismatchError) as error:
        check(load(text), FACTS)
    assert [str(p) for p in error.value.problems] == [
        "line 4, model.id: the program is for 'org/Other', this model has 'org/SmolLM2-135M-Instruct'",
        "line 5, model.layers: the program is for 32, this model has 30",
    ]


@pytest.mark.parametrize(
    ("selectors", "rows"),
    [
        ("last_prompt", "last"),
        ("generated", "last"),
        ({"generated": [0, 5]}, "last"),
        (["last_prompt", "generated"], "last"),
        ("all", "all"),
        ("prompt", "all"),
        (["last_prompt", {"range": [-1, None]}], "all"),
        ({"span": "docs"}, "all"),
        ({"token_ids": [1]}, "all"),
    ],
)
def test_needs(selectors: Any, rows: str) -> None:
    p = checked(observe={"o": {"site": "resid_mid", "layers": [4, 2], "positions": selectors}})
    assert needs(p).to_json() == [["resid_mid", 2, rows], ["resid_mid", 4, rows]]


def test_needs_join_attention_sites_and_edits() -> None:
    p = checked(
        observe={
            "m": {
                "site": "attention_mass",
                "heads": [[3, 1], [3, 2]],
                "rows": "last_prompt",
                "keys": ["docs"],
            },
            "a": {"site": "attention", "layers": [3, 4], "rows": "all"},
        },
        intervene={"e": {"site": "resid_post", "layers": [7], "method": "ablate", "vector": "v"}},
    )
    assert needs(p).to_json() == [["attention", 3, "all"], ["attention", 4, "all"], ["resid_post", 7, "edit"]]


def test_tensor_references() -> None:
    stream = {"site": "resid_post", "layers": [1], "positions": "all"}
    p = checked(
        observe={
            "a": {**stream, "reduce": {"probe": "p"}},
            "b": {**stream, "reduce": {"projection": "v#x"}},
            "c": {**stream, "reduce": {"sae": "s", "features": [4, 2]}},
            "d": {**stream, "reduce": {"norm": True}},
        },
        intervene={
            "e": {"site": "resid_post", "method": "clamp", "vector": "v#x", "target": "v#t"},
            "f": {"site": "resid_post", "method": "rotate", "vector": "r", "second": "r2", "angle": 90},
            "g": {"site": "resid_post", "method": "affine", "a": 0, "b": 1, "u": "u", "v": "w"},
            "h": {"site": "resid_post", "method": "sae", "sae": "s", "features": [1], "target": 0},
        },
    )
    assert tensor_refs(p) == ("p", "v#x", "s", "v#t", "r", "r2", "u", "w")
    uses = {".".join(map(str, u.path)): (u.role, u.key) for u in tensor_uses(p)}
    assert uses["observe.c.reduce.sae"] == ("sae", "s[4,2]")
    assert uses["intervene.e.target"] == ("scalar", "v#t")


def test_split_span_ref() -> None:
    assert split_span_ref("docs") == ("docs", None)
    assert split_span_ref("docs[12]") == ("docs", 12)
