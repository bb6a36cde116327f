"""Analyzers in programs on a running engine: what they say fits what the model did."""

import pytest
import torch
from safetensors.torch import save_file

from prompts import greedy
from vllm_hook import unembedding

pytestmark = pytest.mark.engine

PROMPT = {"prompt_token_ids": list(range(20, 60))}
SPANS = {"prompt": {"tokens": [0, None]}, "context": {"tokens": [5, 25]}, "rest": {"tokens": [25, None]}}


def run(llm, name, tokens=5):
    out = llm.generate(PROMPT, greedy(tokens), hook=name, use_tqdm=False)[0]
    assert out.hook.errors == {}
    return out


def test_logit_lens_of_the_last_layer_says_what_was_sampled(tiny_llama, use, tiny_dir, tmp_path):
    file = unembedding.extract(tiny_dir("llama"), tmp_path / "u.safetensors")
    seen = {"site": "resid_post", "layers": "all", "positions": ["last_prompt", "generated"]}
    lens = {"analyzer": "logit_lens", "observe": "seen", "options": {"unembedding": str(file), "top": 2}}
    out = run(tiny_llama, use({"seen": seen}, analyze={"lens": lens}))
    top = out.hook.scores["lens"].details["top"]
    assert [position[0][2] for position in top["3"]] == list(out.outputs[0].token_ids)
    assert [position[0][2] for position in top["0"]] != list(out.outputs[0].token_ids)
    assert 0 <= out.hook.scores["lens"].value <= 3


def test_lookback_from_rows_and_from_sums(tiny_llama, use):
    dense = {"site": "attention", "layers": [0, 2], "rows": "generated"}
    sums = {"site": "attention_mass", "layers": [0, 2], "rows": "generated", "keys": ["context", "prompt"]}
    options = {"context": "context", "prompt": "prompt"}
    analyze = {
        f"by_{id}": {"analyzer": "lookback", "observe": id, "options": options} for id in ("dense", "sums")
    }
    out = run(tiny_llama, use({"dense": dense, "sums": sums}, spans=SPANS, analyze=analyze))
    rows = out.hook.observed["dense"].values.double()  # [8 heads, 4 rows, keys]
    assert rows.shape[:2] == (8, 4)
    ratios = []
    for head in rows:
        for t, row in enumerate(head):
            a_c = sum(row[5:25].tolist()) / 20
            a_n = sum(row[40 : 41 + t].tolist()) / (t + 1)
            ratios.append(a_c / (a_c + a_n))
    scores = out.hook.scores
    assert scores["by_dense"].value == pytest.approx(sum(ratios) / len(ratios), abs=1e-6)
    assert scores["by_sums"].value == pytest.approx(scores["by_dense"].value, abs=1e-4)
    assert len(scores["by_dense"].details["per_head"]) == 8


def test_influence_of_spans(tiny_llama, use):
    seen = {"site": "attention_mass", "layers": [1], "rows": "generated", "keys": ["context", "rest"]}
    options = {"of": "context", "spans": ["context", "rest"], "per_token": True, "above": 0.0}
    analyze = {"share": {"analyzer": "span_influence", "observe": "seen", "options": options}}
    out = run(tiny_llama, use({"seen": seen}, spans=SPANS, analyze=analyze))
    mean = out.hook.observed["seen"].values.double().mean((0, 1))
    a, b = float(mean[0]) / 20, float(mean[1]) / 15
    assert out.hook.scores["share"].value == pytest.approx(a / (a + b), abs=1e-6)
    assert out.hook.scores["share"].flagged is True


def test_probe_and_projection_on_the_device_and_from_rows(tiny_llama, use, tmp_path):
    draw = torch.Generator().manual_seed(3)
    vector, scale = torch.randn(64, generator=draw), torch.rand(64, generator=draw) + 0.5
    save_file(
        {"weight": vector / 30, "bias": torch.tensor([0.1]), "scale": scale}, tmp_path / "p.safetensors"
    )
    save_file({"v": vector}, tmp_path / "v.safetensors")
    at = {"site": "resid_post", "layers": [2], "positions": ["last_prompt", "generated"], "dtype": "float32"}
    probe, direction = str(tmp_path / "p.safetensors"), str(tmp_path / "v.safetensors")
    observe = {
        "rows": at,
        "logits": {**at, "reduce": {"probe": probe}},
        "lengths": {**at, "reduce": {"projection": direction}},
    }
    observe["logits"].pop("dtype")
    observe["lengths"].pop("dtype")
    analyze = {
        "p_device": {"analyzer": "linear_probe", "observe": "logits"},
        "p_rows": {"analyzer": "linear_probe", "observe": "rows", "options": {"probe": probe}},
        "r_device": {"analyzer": "projection_monitor", "observe": "lengths"},
        "r_rows": {"analyzer": "projection_monitor", "observe": "rows", "options": {"direction": direction}},
        "cosine": {
            "analyzer": "hidden_states",
            "observe": "rows",
            "options": {"measure": "cosine", "reference": direction},
        },
    }
    rule = {"if": "p_device.flagged", "do": "tag", "reason": "probe"}
    out = run(tiny_llama, use(observe, analyze=analyze, act=[rule]))
    scores, rows = out.hook.scores, out.hook.observed["rows"].values[0].double()
    unit = vector.double() / vector.double().norm()
    assert scores["r_rows"].value == pytest.approx(float((rows @ unit).mean()), rel=1e-4)
    assert scores["r_device"].value == pytest.approx(scores["r_rows"].value, rel=1e-4)
    logits = rows @ (vector / 30 / scale).double() + 0.1
    assert scores["p_rows"].value == pytest.approx(float(torch.sigmoid(logits).max()), abs=1e-5)
    assert scores["p_device"].value == pytest.approx(scores["p_rows"].value, abs=1e-5)
    assert scores["cosine"].value == pytest.approx(float((rows @ unit / rows.norm(dim=-1)).mean()), abs=1e-5)
    assert (out.hook.tags == ["probe"]) is scores["p_device"].flagged


def test_an_analyzer_that_cannot_read_its_observation_is_an_error_of_its_own(tiny_llama, use):
    seen = {"site": "mlp_out", "layers": [1, 2], "positions": "last_prompt"}
    analyze = {"p": {"analyzer": "linear_probe", "observe": "seen"}}
    name = use({"seen": seen}, analyze=analyze)
    out = tiny_llama.generate(PROMPT, greedy(2), hook=name, use_tqdm=False)[0]
    assert "2 layers, needs one" in out.hook.errors[f"{name}/p"]
    assert out.hook.observed["seen"].values.shape == (2, 1, 64)
