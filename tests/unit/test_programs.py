"""The programs that ship fit the configurations of the models that they are for."""

import json

import pytest
from typer.testing import CliRunner

from vllm_hook import cli
from vllm_hook.build.heads import packaged
from vllm_hook.program.load import load

pytestmark = pytest.mark.usefixtures("own_environment")
FOLDER = packaged("x").parents[2] / "programs"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256}
LARGE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
SMOL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
CONFIGS = {
    "llama3-8b-injection-guard": {**LLAMA, **LARGE, "intermediate_size": 14_336},
    "llama3.1-8b-rerank": {**LLAMA, **LARGE, "intermediate_size": 14_336},
    "mistral-7b-rerank": {"model_type": "mistral", **LARGE, "intermediate_size": 14_336},
    "qwen2-1.5b-injection-guard": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
    },
    "smollm2-injection-guard": {**LLAMA, **SMOL},
    "smollm2-list": {**LLAMA, **SMOL},
    "smollm2-rerank": {**LLAMA, **SMOL},
    "smollm2-capitals": {**LLAMA, **SMOL},
}
#: Published heads, typed a second time: [layer, head].
HEADS = {
    "llama3-8b-injection-guard": "5-18 7-12 9-29 17-2",
    "qwen2-1.5b-injection-guard": "10-6 11-0 11-2 11-8 11-9 11-11 12-8 13-10 14-8 15-7 15-11 17-0 18-9 19-7",
    "mistral-7b-rerank": "15-21 15-1 16-12 15-7 9-26 12-11 12-7 18-0",
    "llama3.1-8b-rerank": "13-18 13-1 14-13 13-21 14-31 13-13 8-11 14-20",
}


def check(name, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = FOLDER / f"{name}.yaml"
    return CliRunner().invoke(cli.app, ["check", str(file), "--model", str(tmp_path)])


def test_every_program_is_listed_here():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_check_passes_for_its_model(name, tmp_path):
    result = check(name, CONFIGS[name], tmp_path)
    assert result.exit_code == 0, result.output
    assert load(FOLDER / f"{name}.yaml").program.name == name


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_check_fails_for_another_model(name, tmp_path):
    layers = CONFIGS[name]["num_hidden_layers"] + 1
    result = check(name, {**CONFIGS[name], "num_hidden_layers": layers}, tmp_path)
    assert result.exit_code == 1
    assert f"this model has {layers}" in result.output


@pytest.mark.parametrize("name", sorted(HEADS))
def test_heads_are_the_published_ones_and_say_so(name):
    (seen,) = load(FOLDER / f"{name}.yaml").program.observe.values()
    assert " ".join(f"{layer}-{head}" for layer, head in seen.heads) == HEADS[name]
    text = (FOLDER / f"{name}.yaml").read_text("utf-8")
    assert "Heads: published with that paper" in text
    assert "arXiv 2411.00348" in text or "arXiv 2510.02219" in text
