"""Configurations of the earlier vLLM-Hook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_hook.errors import ProgramError
from vllm_hook.program.check import check
from vllm_hook.program.legacy import import_legacy
from vllm_hook.program.load import load
from vllm_hook.sites import ModelFacts

INFO = {"provider": "attn-hf", "name": "Granite4 Micro/attn", "model_id": "ibm-granite/granite-4.0-micro"}
FACTS = ModelFacts("granite-4.0-micro", layers=40, heads=40, kv_heads=8, head_dim=64, hidden=2560)


@pytest.fixture
def convert(tmp_path: Path) -> Any:
    def run(config: Any, name: str = "old config.json") -> tuple[dict[str, Any], list[str]]:
        file = tmp_path / name
        file.write_text(config if isinstance(config, str) else json.dumps(config))
        program, notes = import_legacy(file)
        check(load(program), FACTS)  # what is written is a program
        return program, notes

    return run


def test_attention_tracker(convert: Any) -> None:
    program, notes = convert(
        {
            "model_info": INFO,
            "params": {"temperature": 0.1, "max_output_tokens": 32, "important_heads": [[6, 9], [7, 20]]},
            "hookq": {"hookq_mode": "last_token"},
        }
    )
    assert program == {
        "schema": 1,
        "name": "granite4-micro-attn",
        "model": {"id": "ibm-granite/granite-4.0-micro"},
        "spans": {"instruction": {"message": "system"}, "data": {"message": "user"}},
        "observe": {
            "focus": {
                "site": "attention_mass",
                "heads": [[6, 9], [7, 20]],
                "rows": "last_prompt",
                "keys": ["instruction", "data"],
            }
        },
        "analyze": {
            "injection": {
                "analyzer": "attention_tracker",
                "observe": "focus",
                "options": {"instruction": "instruction", "data": "data"},
            }
        },
    }
    assert [n.split(":")[0] for n in notes] == ["spans", "params.temperature", "params.max_output_tokens"]


def test_heads_at_the_top_and_no_mode(convert: Any) -> None:
    program, _ = convert({"important_heads": [[1, 2]]})
    assert program["name"] == "old-config"
    assert program["observe"]["focus"]["heads"] == [[1, 2]]
    assert "model" not in program


def test_reranker_heads_read_all_attention(convert: Any) -> None:
    program, notes = convert(
        {"params": {"important_heads": [[15, 21]]}, "hookq": {"hookq_mode": "all_tokens"}}
    )
    assert program["observe"]["focus"] == {"site": "attention", "heads": [[15, 21]], "rows": "prompt"}
    assert any("reranker" in note for note in notes)


def test_layers_without_heads(convert: Any) -> None:
    program, _ = convert({"hookq": {"hookq_mode": "all_tokens", "layers": [3, 4]}})
    assert program["observe"]["focus"] == {"site": "attention", "layers": [3, 4], "rows": "prompt"}
    program, notes = convert({"important_heads": [[1, 2]], "hookq": {"layers": [3]}})
    assert "layers" not in program["observe"]["focus"]
    assert any(n.startswith("hookq.layers: not carried") for n in notes)


@pytest.mark.parametrize(
    ("mode", "positions"),
    [
        ({"mode": "last_token"}, ["last_prompt", "generated"]),
        ({}, ["last_prompt", "generated"]),
        ({"mode": "last"}, ["last_prompt", "generated"]),
        ({"mode": "all_tokens"}, "all"),
        ({"mode": "all"}, "all"),
    ],
)
def test_hidden_states(convert: Any, mode: dict[str, str], positions: Any) -> None:
    program, notes = convert({"hidden_states": {"layers": [1, 2], **mode}})
    assert program["observe"] == {"states": {"site": "resid_post", "layers": [1, 2], "positions": positions}}
    assert notes == []
    assert convert({"hidden_states": {}})[0]["observe"]["states"]["layers"] == "all"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"method": "adjust_rs", "coefficient": 1, "optimal_layer": 15, "apply_at_all_positions": True},
            {
                "layers": [15], "method": "clamp", "vector": "v.pt#dir", "target": "v.pt#avg_proj",
                "positions": "all",
            },
        ),
        (
            {"method": "adjust_rs", "optimal_layer": [6, 10], "positions": "last_token", "phase": "both"},
            {
                "layers": [6, 10], "method": "clamp", "vector": "v.pt#dir", "target": "v.pt#avg_proj",
                "positions": ["last_prompt", "generated"],
            },
        ),
        (
            {"method": "add_vector", "coefficient": 4, "optimal_layer": 0, "apply_at_all_positions": False},
            {
                "layers": [0], "method": "add", "vector": "v.pt#dir", "strength": 4,
                "positions": ["last_prompt", "generated"],
            },
        ),
        (
            {"method": "add", "coefficient": 2.5, "layers": [3], "phase": "decode"},
            {"layers": [3], "method": "add", "vector": "v.pt#dir", "strength": 2.5, "positions": "generated"},
        ),
        (
            {"method": "add_vector", "phase": "prefill", "optimal_layer": 1},
            {"layers": [1], "method": "add", "vector": "v.pt#dir", "strength": 0, "positions": "prompt"},
        ),
    ],
)  # fmt: skip
def test_steering(convert: Any, config: dict[str, Any], expected: dict[str, Any]) -> None:
    program, notes = convert({"steering": {"vector_path": "v.pt", **config}})
    assert program["intervene"] == {"steering": {"site": "resid_post", **expected}}
    assert any("there is no v.pt here or beside old config.json" in note for note in notes)
    assert any("adjust_rs did not use it" in note for note in notes) == (
        config["method"] == "adjust_rs" and "coefficient" in config
    )
    nothing = config["method"] != "adjust_rs" and "coefficient" not in config
    assert any("nothing is added" in note for note in notes) == nothing


@pytest.mark.parametrize(("layer", "layers"), [("all", "all"), (3, [3]), ([3, -1], [3, -1]), ([0], [0])])
def test_layers_of_steering(convert: Any, layer: Any, layers: Any) -> None:
    program, _ = convert({"steering": {"vector_path": "v.pt", "optimal_layer": layer}})
    assert program["intervene"]["steering"]["layers"] == layers
    program, _ = convert({"steering": {"vector_path": "v.pt", "layers": layer, "optimal_layer": 7}})
    assert program["intervene"]["steering"]["layers"] == layers


def test_what_adjust_rs_ignored(convert: Any) -> None:
    steering = {"vector_path": "v.pt", "method": "adjust_rs", "apply_at_all_positions": False}
    program, notes = convert({"steering": steering})
    assert program["intervene"]["steering"]["positions"] == "all"
    assert any("adjust_rs acted on every position in spite of it" in note for note in notes)


def test_the_vector_is_found_from_where_the_program_will_lie(tmp_path: Path, monkeypatch: Any) -> None:
    """In the working directory, as it was; else beside the configuration."""
    here, config = tmp_path / "here", tmp_path / "configs" / "old.json"
    for folder in (here / "vectors", config.parent / "vectors", tmp_path / "programs"):
        folder.mkdir(parents=True)
    config.write_text(json.dumps({"steering": {"vector_path": "vectors/v.pt"}}))
    monkeypatch.chdir(here)

    def vector(folder: Path | None) -> str:
        program, notes = import_legacy(config, folder)
        assert not any("there is no" in note for note in notes)
        edit = program["intervene"]["steering"]
        assert edit["vector"].removesuffix("#dir") == edit["target"].removesuffix("#avg_proj")
        return edit["vector"].removesuffix("#dir")

    (config.parent / "vectors" / "v.pt").touch()
    assert vector(tmp_path / "programs") == "../configs/vectors/v.pt"
    assert vector(config.parent) == "vectors/v.pt"
    (here / "vectors" / "v.pt").touch()
    assert vector(tmp_path / "programs") == "../here/vectors/v.pt"
    assert vector(None) == "vectors/v.pt"
    absolute = str(here / "vectors" / "v.pt")
    config.write_text(json.dumps({"steering": {"vector_path": absolute}}))
    assert vector(tmp_path / "programs") == absolute


def test_what_is_unknown_is_noted(convert: Any) -> None:
    _, notes = convert({"hidden_states": {"layers": [1], "foo": 1}, "recurrent": {}})
    assert notes == ["hidden_states.foo: not carried", "recurrent: not carried"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a configuration of vLLM-Hook: a JSON object is needed"),
        ({"model_info": INFO}, "has none of important_heads, hookq, hidden_states and steering"),
        ({"hookq": []}, "hookq: an object is needed"),
        (
            {"hidden_states": {"mode": "some"}},
            "hidden_states.mode: 'some' is neither all_tokens nor last_token",
        ),
        ({"hookq": {"hookq_mode": [1]}}, "hookq.hookq_mode: [1] is neither"),
        ({"steering": {"method": "adjust_rs"}}, "steering.vector_path: the file of the vector is needed"),
        (
            {"steering": {"method": "x", "vector": "v"}},
            "steering.method: 'x' is neither adjust_rs nor add_vector",
        ),
        (
            {"steering": {"vector": "v", "phase": "later"}},
            "steering.phase: 'later' is none of both, prefill and decode",
        ),
        (
            {"steering": {"vector": "v", "positions": "some"}},
            "steering.positions: 'some' is neither all_tokens nor last_token",
        ),
        (
            {"steering": {"vector": "v", "optimal_layer": "x"}},
            "intervene.steering.layers: write all, or a list",
        ),
        ({"important_heads": [[1]]}, "observe.focus.heads[0]: write [layer, head]"),
    ],
)
def test_errors_name_the_file_and_field(convert: Any, config: Any, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        convert(config)
    assert "old config.json: " in str(error.value)
    assert message in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"none\.json: cannot be read: No such file"):
        import_legacy(tmp_path / "none.json")
