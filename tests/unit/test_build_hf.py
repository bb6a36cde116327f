"""Whole builds of a tiny model on Hugging Face, through the command line: files, errors, interruptions."""

import json

import pytest
import torch
import yaml

from builds import COMMANDS, QUERIES
from vllm_hook.build import vector
from vllm_hook.build.artifact import read_provenance
from vllm_hook.build.on_hf import HfBackend
from vllm_hook.demo.rerank import unseen
from vllm_hook.errors import HookError
from vllm_hook.runtime.loading import load_program
from vllm_hook.sites import ModelFacts
from vllm_hook.tensors import read_tensors

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("own_environment")


def facts(folder):
    config = json.loads((folder / "config.json").read_text())
    return ModelFacts(
        id="tiny",
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden=config["hidden_size"],
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_build_writes_a_program_that_loads_and_says_where_it_is_from(build, tmp_path, tiny_dir, command):
    result = build(command, "made.yaml")
    assert result.exit_code == 0, result.output
    assert load_program(tmp_path / "made.yaml", facts(tiny_dir("llama"))).name == "made"
    made = read_provenance(tmp_path / "made.yaml")
    assert made["written_by"] == f"vllm-hook build {command}"
    assert len(made["model"]["digest"]) == 64
    assert {source["file"] for source in made["data"].values()} == {"data.jsonl"}
    assert made["method"]
    assert made["date"]
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {"data.jsonl", "made.yaml"} | (
        {"made.safetensors"} if command in ("probe", "vector") else set()
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_build_continues_and_gives_the_same_files(build, tmp_path, monkeypatch, command):
    assert build(command, "whole.yaml").exit_code == 0
    calls = []
    limit = 1 if command != "rerank-heads" else 2
    name = "masses" if "heads" in command else "states"
    measure = getattr(HfBackend, name)

    def interrupted(self, prompts, *more):
        if len(calls) == limit:
            raise KeyboardInterrupt
        calls.append(len(prompts))
        return measure(self, prompts, *more)

    with monkeypatch.context() as patch:
        patch.setattr(HfBackend, name, interrupted)
        stopped = build(command, "parts.yaml")
        assert stopped.exit_code == 130
        assert "the same command goes on from here" in stopped.output
    assert not (tmp_path / "parts.yaml").exists()
    assert not (tmp_path / "parts.safetensors").exists()
    assert (tmp_path / "parts.yaml.work").is_dir()
    before = sum(calls)
    with monkeypatch.context() as patch:
        patch.setattr(HfBackend, name, lambda self, p, *more: calls.append(len(p)) or measure(self, p, *more))
        assert build(command, "parts.yaml").exit_code == 0
    assert before > 0
    assert sum(calls) == sum(_prompts(command))
    for suffix in ("yaml", "safetensors"):
        if (tmp_path / f"whole.{suffix}").exists():
            whole, parts = (_lines(tmp_path / f"{n}.{suffix}", n) for n in ("whole", "parts"))
            assert whole == parts


def _prompts(command):
    return [len(COMMANDS[command][0]) * (2 if command == "vector" else 1)]


def _lines(path, name):
    return path.read_bytes().replace(name.encode(), b"NAME")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_seed_gives_the_same_file_and_another_seed_another(build, tmp_path, command):
    texts = []
    for seed in (0, 0, 1):
        assert build(command, "made.yaml", "--force", "--seed", seed).exit_code == 0
        texts.append((tmp_path / "made.yaml").read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_the_empty_set_at_k_4_falls_back_and_says_so(build, tmp_path):
    result = build("heads", "made.yaml", "--k", 50, "--top", 3)
    assert result.exit_code == 0, result.output
    assert "fell back to the top 3 by the k=1 score" in result.output
    assert "fell back to the top 3" in read_provenance(tmp_path / "made.yaml")["method"]
    assert len(yaml.safe_load((tmp_path / "made.yaml").read_text())["observe"]["focus"]["heads"]) == 3


def test_a_sweep_that_only_degenerates_writes_nothing(build, tmp_path):
    result = build("vector", "made.yaml", "--shows", "no such words", "--layers", "1")
    assert result.exit_code == 1
    assert "no setting of the sweep" in result.output.replace("\n", " ")
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]  # what was measured is of no more use


def test_clamp_writes_the_mean_projection_as_its_target(build, tmp_path):
    result = build("vector", "made.yaml", "--method", "clamp", "--strengths", "1", "--layers", "2")
    assert result.exit_code == 0, result.output
    edit = yaml.safe_load((tmp_path / "made.yaml").read_text())["intervene"]["steer"]
    assert edit["method"] == "clamp"
    assert edit["positions"] == [{"range": [1, None]}, "generated"]
    vector = read_tensors("made.safetensors", tmp_path)["vector"]
    assert torch.isfinite(vector).all()
    assert isinstance(edit["target"], float)


@pytest.mark.parametrize("direction", ["pca", "mass-mean"])
def test_other_directions_and_mean_rows(build, direction):
    result = build("vector", "made.yaml", "--direction", direction, "--rows", "mean")
    assert result.exit_code == 0, result.output


def test_rerank_heads_by_their_own_ndcg(build, tmp_path):
    assert build("rerank-heads", "made.yaml", "--method", "ndcg", "--top", 2).exit_code == 0
    made = read_provenance(tmp_path / "made.yaml")
    assert "own nDCG@10" in made["method"]
    assert len(made["scores"]) == 2


def test_the_demo_knows_which_queries_chose_no_heads(build, tmp_path):
    """And claims none for other data, for given heads, and for heads that were measured on other data."""
    assert build("rerank-heads", "made.yaml", "--share", 0.4).exit_code == 0
    data, made = tmp_path / "data.jsonl", tmp_path / "made.yaml"
    held = unseen(made, data)
    assert len(held) == len(QUERIES) - read_provenance(made)["options"]["queries"] > 1
    assert build("rerank-heads", "same.yaml", "--share", 0.4, "--seed", 1).exit_code == 0
    assert len(unseen(tmp_path / "same.yaml", data)) == len(held)
    assert unseen(tmp_path / "same.yaml", data) != held
    assert unseen("1-2", data) == unseen([(1, 2)], data) == unseen(made, None) == []
    (tmp_path / "other.jsonl").write_text(json.dumps({**QUERIES[0], "query": "Which one?"}))
    assert build("rerank-heads", "held.yaml", "--held-out", "other.jsonl").exit_code == 0
    assert unseen(tmp_path / "held.yaml", data) == []


def test_what_was_opened_is_closed_also_when_a_build_fails(build, monkeypatch):
    closed = []
    monkeypatch.setattr(HfBackend, "close", lambda self: closed.append(self))
    for command in COMMANDS:
        assert build(command, f"{command}.yaml").exit_code == 0
    assert len(closed) == len(COMMANDS)

    def broken(self, *rest):
        raise HookError("no memory")

    monkeypatch.setattr(HfBackend, "states", broken)
    assert build("probe", "broken.yaml").exit_code == 1
    assert len(closed) == len(COMMANDS) + 1


def test_a_sweep_tries_all_layers_once_and_the_best_at_all_strengths(build, tmp_path, monkeypatch):
    monkeypatch.setattr(vector, "CLOSER", 1)
    options = ["--tokens", "4", "--held", "3", "--shows", "."]
    rows = COMMANDS["vector"][0]
    monkeypatch.setitem(COMMANDS, "vector", (rows, options))
    result = build("vector", "made.yaml")
    assert result.exit_code == 0, result.output
    made = read_provenance(tmp_path / "made.yaml")
    tried = {
        layer: {k for k in figures if k != "separation_auroc"} for layer, figures in made["layers"].items()
    }
    assert sorted(tried) == [1, 2, 3]  # of four layers, those in the middle
    every = {f"add {s:g}" for s in vector.STRENGTHS["add"]}
    assert sorted(map(len, tried.values())) == [1, 1, len(every)]
    assert all("add 1" in seen for seen in tried.values())
    (closer,) = (layer for layer, seen in tried.items() if seen == every)
    usual = {layer: figures["add 1"] for layer, figures in made["layers"].items()}
    assert usual[closer]["score"] == max(figures["score"] for figures in usual.values())
    assert usual[closer]["perplexity"] == min(
        f["perplexity"] for f in usual.values() if f["score"] == usual[closer]["score"]
    )
