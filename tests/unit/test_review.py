"""Faults that a review found in building, reranking and scoring, each with the right value."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_hook.build.artifact import Output
from vllm_hook.build.heads import build_guard
from vllm_hook.build.rerank_heads import ndcg
from vllm_hook.build.work import Work
from vllm_hook.errors import HookError, ProgramError
from vllm_hook.rerank import read_heads
from vllm_hook.unembedding import extract


def test_equal_scores_gain_nothing_by_the_order_of_the_file():
    blind = torch.zeros(4)
    first, last = ndcg(blind, [2, 0, 0, 0]), ndcg(blind, [0, 0, 0, 2])
    assert float(first) == float(last)
    discounts = 1 / torch.log2(torch.arange(2.0, 6.0))
    assert float(first) == pytest.approx(float(discounts.mean()))
    assert float(ndcg(torch.tensor([0.4, 0.3, 0.2, 0.1]), [2, 1, 0, 0])) == pytest.approx(1.0)


def test_heads_of_long_lists_and_of_programs(tmp_path):
    pairs = [(layer, head) for layer in range(10, 14) for head in range(32)]
    assert read_heads(",".join(f"{layer}-{head}" for layer, head in pairs)) == pairs
    program = {
        "schema": 1, "name": "p",
        "observe": {"r": {"site": "attention", "layers": [8, 12], "heads": [0, 3], "rows": "last_prompt"}},
    }  # fmt: skip
    file = tmp_path / "p.json"
    file.write_text(json.dumps(program))
    with pytest.raises(HookError, match=r"\[layer, head\]"):
        read_heads(file)


def test_a_name_of_other_letters_is_a_valid_program_name():
    assert Output(Path("wächter.yaml"), force=False).name == "w-chter"


def test_a_folder_without_a_key_is_in_the_way_only_if_it_holds_something(tmp_path):
    (tmp_path / "w.yaml.work").mkdir()
    Work(tmp_path / "w.yaml", {"a": 1})
    (tmp_path / "v.yaml.work").mkdir()
    (tmp_path / "v.yaml.work" / "mine.txt").write_text("x")
    with pytest.raises(HookError, match="is in the way"):
        Work(tmp_path / "v.yaml", {"a": 1})


def test_attention_that_is_not_finite_builds_no_guard():
    shares = torch.rand(4, 2, 2)
    shares[1, 1, 1] = float("nan")
    styles = ["normal", "normal", "ignore", "ignore"]
    with pytest.raises(HookError, match="not finite"):
        build_guard(styles, shares, styles, torch.rand(4, 2, 2))


def test_a_model_that_ends_in_another_way_has_no_lens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere", "logit_scale": 0.06}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ProgramError, match="logit_scale"):
        extract(tmp_path, tmp_path / "out.safetensors")
