"""The form of programs and requests."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from vllm_hook.errors import ProgramError
from vllm_hook.program.load import load
from vllm_hook.program.request import _using
from vllm_hook.program.schema import Program, RequestSpec, parse_condition, parse_request, program_json_schema

CONTRACT = """
schema: 1
name: injection-guard
model: {layers: 30, heads: 9, hidden: 576}
spans:
  instruction: {message: system}
  data: {message: user, after: "Data: "}
  docs: {between: ["<doc>", "</doc>"], each: true}
  part: {text: "the exact words"}
  fixed: {tokens: [12, 40]}
observe:
  focus: {site: attention_mass, heads: [[3, 5], [10, 1]], rows: last_prompt, keys: [instruction, data]}
  state: {site: resid_post, layers: [15], positions: last_prompt}
  danger: {site: resid_post, layers: [12], positions: generated, reduce: {probe: danger.safetensors}}
  many: {site: z, heads: [0, 2], positions: [prompt, {range: [-4, -1]}, {generated: [0, 3]}, {span: docs}]}
  ids: {site: embed, positions: {token_ids: [5, 7]}, dtype: float32}
  sparse: {site: resid_pre, layers: all, positions: all, reduce: {sae: a.safetensors, features: [3]}}
intervene:
  format: {site: resid_post, layers: [12], method: clamp, vector: f.safetensors, target: 1.6, positions: all}
  calm: {site: resid_post, layers: [15], method: add, vector: calm.safetensors, strength: 4.0,
         positions: generated, keep_norm: true, when: {observe: danger, above: 0.0}}
  no_refusal: {site: resid_pre, method: ablate, vector: r.safetensors}
  turn: {site: resid_mid, method: rotate, vector: a.safetensors, second: b.safetensors, angle: 30}
  feature: {site: resid_post, layers: [1], method: sae, sae: s.safetensors, features: [1], target: 2}
  line: {site: mlp_out, layers: [1], method: affine, a: 1, b: -1, u: u.safetensors, v: v.safetensors#x}
  look: {site: attention, method: attend, heads: [[1, 1]], rows: last_prompt, keys: [data], weight: 2.0}
analyze:
  injection: {analyzer: attention_tracker, observe: focus, options: {data: data, threshold: 0.5}}
act:
  - {if: injection.flagged, do: stop, reason: prompt-injection}
  - {if: danger above 1e-1, do: tag}
apply: on_request
"""


def program(**sections: object) -> Program:
    return Program.model_validate({"schema": 1, "name": "p", **sections})


def test_everything_of_the_contract_parses() -> None:
    p = load(CONTRACT).program
    assert p.observe["focus"].heads == ((3, 5), (10, 1))
    assert p.observe["focus"].rows == ("last_prompt",)
    assert [type(s).__name__ for s in p.observe["many"].positions or ()] == [
        "str", "PromptRange", "GeneratedRange", "SpanRows",
    ]  # fmt: skip
    assert p.observe["many"].heads == (0, 2)
    assert [e.method for e in p.intervene.values()] == [
        "clamp", "add", "ablate", "rotate", "sae", "affine", "attend",
    ]  # fmt: skip
    assert p.intervene["no_refusal"].positions == ("all",)  # type: ignore[union-attr]
    assert p.analyze["injection"].observe == ("focus",)
    assert [r.condition for r in p.act] == ["injection.flagged", "danger above 1e-1"]


def test_to_dict_round_trips_through_json() -> None:
    p = load(CONTRACT).program
    assert load(json.loads(json.dumps(p.to_dict()))).program == p


def test_programs_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        program().name = "q"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"name": "Upper"}, "name: 'Upper' is not a valid program name"),
        ({"name": "x" * 65}, "is not a valid program name"),
        ({"observ": {}}, "observ: unknown key; did you mean 'observe'?"),
        ({"observe": {"a.b": {"site": "q"}}}, "'a.b' is not a valid id"),
        (
            {"observe": {"a": {"site": "resid"}}},
            "observe.a.site: unknown site 'resid'; did you mean 'resid_pre'? known sites: embed",
        ),
        ({"observe": {"a": {"site": "q", "layers": 5}}}, "observe.a.layers: write all, or a list"),
        (
            {"observe": {"a": {"site": "q", "layers": [True]}}},
            "observe.a.layers[0]: Input should be a valid integer",
        ),
        (
            {"observe": {"a": {"site": "q", "layers": ["1"]}}},
            "observe.a.layers[0]: Input should be a valid integer",
        ),
        (
            {"observe": {"a": {"site": "q", "positions": []}}},
            "observe.a.positions: Tuple should have at least 1",
        ),
        (
            {"observe": {"a": {"site": "q", "positions": "last"}}},
            "observe.a.positions: not a selector; write all",
        ),
        (
            {"observe": {"a": {"site": "q", "positions": {"range": [3, 3]}}}},
            "positions.range: [3, 3] is empty",
        ),
        (
            {"observe": {"a": {"site": "q", "positions": {"range": [-1, -3]}}}},
            "positions.range: [-1, -3] is empty",
        ),
        (
            {"observe": {"a": {"site": "q", "positions": {"range": [3]}}}},
            "positions.range: write two numbers",
        ),
        ({"observe": {"a": {"site": "q", "positions": {"generated": [-1, 2]}}}}, "positions.generated[0]: "),
        ({"observe": {"a": {"site": "q", "positions": {"token_ids": []}}}}, "positions.token_ids: "),
        (
            {"observe": {"a": {"site": "q", "reduce": {"mean": 1}}}},
            "observe.a.reduce: not a reduction; write {probe",
        ),
        ({"observe": {"a": {"site": "q", "reduce": {"norm": False}}}}, "observe.a.reduce.norm: "),
        (
            {"observe": {"a": {"site": "q", "reduce": {"probe": "#x"}}}},
            "observe.a.reduce.probe: '#x' is not a tensor",
        ),
        ({"observe": {"a": {"site": "q", "reduce": {"probe": "sha256:12#x"}}}}, "sha256: takes 64"),
        (
            {"observe": {"a": {"site": "attention", "heads": [[1]]}}},
            "observe.a.heads[0]: write [layer, head]",
        ),
        ({"observe": {"a": {"site": "attention", "heads": 3}}}, "observe.a.heads: write a list"),
        ({"spans": {"s": {"tokens": [5, 2]}}}, "spans.s.tokens: [5, 2] is empty"),
        ({"spans": {"s": {"message": "user", "text": "x"}}}, "spans.s.text: unknown key"),
        ({"spans": {"s": {"words": "x"}}}, "spans.s: not a span; write {message: role}"),
        ({"spans": {"s": {"between": ["a", ""]}}}, "spans.s.between[1]: "),
        (
            {"intervene": {"e": {"site": "q", "method": "ad"}}},
            "intervene.e.method: unknown method 'ad'; did you mean 'add'? known methods: add, clamp",
        ),
        ({"intervene": {"e": {"site": "q", "method": "add"}}}, "intervene.e.vector: is required"),
        (
            {"intervene": {"e": {"site": "q", "method": "add", "vector": "f", "strength": float("nan")}}},
            "intervene.e.strength: Input should be a finite number",
        ),
        (
            {"intervene": {"e": {"site": "q", "method": "add", "vector": "f", "when": {"observe": "x"}}}},
            "intervene.e.when: give exactly one of above and below",
        ),
        (
            {
                "intervene": {
                    "e": {"site": "attention", "method": "attend", "keys": ["a"], "weight": 1, "mass": 0.5}
                }
            },
            "intervene.e: give exactly one of weight and mass",
        ),
        (
            {
                "intervene": {
                    "e": {
                        "site": "mlp_out",
                        "method": "sae",
                        "sae": "f",
                        "features": [1, 2],
                        "target": 1.0,
                        "keep_norm": True,
                    }
                }
            },
            "intervene.e: keep_norm takes one feature: write an intervention for each",
        ),
        ({"act": [{"if": "x.flaged", "do": "tag"}]}, "act[0].if: 'x.flaged' is not a condition"),
        ({"act": [{"if": "x above 1.2.3", "do": "tag"}]}, "act[0].if: 'x above 1.2.3' is not a condition"),
        (
            {"act": [{"if": "x.flagged", "do": "halt"}]},
            "act[0].do: Input should be 'stop' or 'tag', got 'halt'",
        ),
        ({"apply": "never"}, "apply: Input should be 'on_request' or 'always'"),
        ({"schema": 2}, "schema: Input should be 1, got 2"),
    ],
)
def test_a_malformed_field_is_named(sections: dict, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        load({"schema": 1, "name": "p", **sections})
    assert message in str(error.value)
    assert "<" not in str(error.value).split(":")[1]  # no union tags in paths
    assert len(error.value.problems) == 1


def test_what_else_is_wrong_with_an_edit_whose_method_is_misspelt():
    """Two of three methods look like ones that exist; the third hides the rest of its edit."""
    edits = {
        "a": {"site": "q", "method": "ad", "strenght": 4, "vector": "f"},
        "b": {"site": "q", "method": "Clamp", "layers": [0]},
        "c": {"site": "q", "method": "wobble", "strenght": 4},
    }
    with pytest.raises(ProgramError) as error:
        load({"schema": 1, "name": "p", "intervene": edits})
    found = {p.field: p.message for p in error.value.problems}
    assert list(found) == [
        "intervene.a.method",
        "intervene.b.method",
        "intervene.c.method",
        "intervene.a.strenght",
    ]
    assert found["intervene.a.strenght"] == "unknown key; did you mean 'strength'?"


def test_conditions() -> None:
    assert parse_condition("a.flagged") == ("a", "flagged", None)
    assert parse_condition(" a  below -1.5e2 ") == ("a", "below", -150.0)


def test_json_schema_describes_files_as_people_write_them() -> None:
    schema = program_json_schema()
    assert set(schema["required"]) == {"schema", "name"}
    assert schema["additionalProperties"] is False
    positions = schema["$defs"]["Observe"]["properties"]["positions"]["anyOf"]
    # a lone selector, and a list of them
    assert any("oneOf" in form or "anyOf" in form for form in positions)
    assert '"array"' in json.dumps(positions)
    assert "if" in schema["$defs"]["Rule"]["properties"]


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (False, ()),
        (0, ()),
        (0.0, ()),
        ([], ()),
        ("guard", ("guard",)),
        ("0", ("0",)),
        (["guard", "calm"], ("guard", "calm")),
        (("guard",), ("guard",)),
        ('"guard"', ("guard",)),
        ('["guard", "calm"]', ("guard", "calm")),
        (' {"use": ["guard"]}', ("guard",)),
        ({"use": "guard"}, ("guard",)),
        ({"use": None}, None),
        ('{"use": null}', None),
        ({"spans": {"data": [1, 4]}}, None),
    ],
)
def test_requests(value: object, use: tuple[str, ...] | None) -> None:
    spec = parse_request(value)
    assert spec is not None
    assert spec.use == use


def test_what_is_kept_of_requests_is_small() -> None:
    """Anybody can send a list of names: long ones are read anew each time."""
    before = _using.cache_info().currsize
    for i in range(40):
        parse_request([f"invented-{i}-{k}" for k in range(17)])
        with pytest.raises(ProgramError):
            parse_request([f"invented-{i}-" + "x" * 200])
    assert _using.cache_info().currsize == before
    assert parse_request(["guard", "calm"]) is parse_request({"use": ["guard", "calm"]})


def test_an_absent_request_is_none() -> None:
    assert parse_request(None) is None


def test_a_full_request() -> None:
    value = {
        "use": ["guard"],
        "set": {"format.target": 2, "calm/x.strength": 0.5},
        "spans": {"docs[1]": [10, 42]},
    }
    spec = RequestSpec(
        use=("guard",), set={"format.target": 2.0, "calm/x.strength": 0.5}, spans={"docs[1]": (10, 42)}
    )
    assert parse_request(value) == parse_request(json.dumps(value)) == parse_request(spec) == spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "True: give the name of a program"),
        (3, "3: give the name"),
        (object(), "give the name of a program, a list of names, a request dict, or False"),
        ("No Such", "use: 'No Such' is not a valid program name"),
        ("{use: guard}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('"a" x', "not valid JSON"),
        ("", "is empty; give the name of a program, or False for none"),
        (["guard", 3], "use[1]: Input should be a valid string"),
        (["guard", "guard"], "use: a program is named twice"),
        ({"use": {"use": ["guard"]}}, "use"),
        ({"use": {"set": {"a.b": 1}}}, "use"),
        ({"use": {}}, "use"),
        ({"use": 0}, "use"),
        ({"use": {"schema": 1, "name": "p"}}, "use"),
        ({"uses": []}, "uses: unknown key; did you mean 'use'?"),
        ({"set": {"target": 1}}, "set.target: 'target' is not a parameter"),
        ({"set": {"a.b": "1"}}, "set.a.b: Input should be a valid number"),
        ({"set": {"a.b": float("inf")}}, "set.a.b: Input should be a finite number"),
        ({"spans": {"data": [4, 4]}}, "spans.data: [4, 4] is empty"),
        ({"spans": {"data": [-1, 4]}}, "spans.data[0]: "),
        ({"spans": {"data": [1]}}, "spans.data[1]: is required"),
    ],
)
def test_a_bad_request_names_the_argument_and_field(value: object, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        parse_request(value)
    assert str(error.value).startswith("hook: ")
    assert message in str(error.value)
