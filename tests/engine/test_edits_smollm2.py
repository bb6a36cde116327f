"""Interventions on SmolLM2-135M, compiled: Hugging Face's tokens, and not one bit of a batchmate."""

import pytest
import torch

from conftest import hook_llm
from editing import GAP, Tensors, compare
from oracle import Reference
from prompts import greedy, text_prompts, token_prompts

pytestmark = pytest.mark.engine

LENGTHS = (9, 14, 21, 33, 12, 40, 17, 26, 11, 30, 19, 24, 37, 15, 28, 22)
EDITED = (1, 4, 7, 10, 15)


def programs(tensors, layers, hidden_scale):
    """Five ways to edit at two layers, and two that must change nothing."""
    v, w = tensors.ref("v"), tensors.ref("w")
    post = {"site": "resid_post", "layers": list(layers)}
    edits = {
        "add": {"e": {**post, "method": "add", "vector": v, "strength": hidden_scale}},
        "clamp": {"e": {**post, "method": "clamp", "vector": v, "target": 20.0 * hidden_scale}},
        "ablate": {"e": {**post, "site": "resid_mid", "method": "ablate", "vector": w}},
        "mixed": {
            "a": {**post, "method": "add", "vector": w, "strength": hidden_scale, "positions": "generated"},
            "b": {
                "site": "z",
                "layers": list(layers),
                "heads": [0, 2],
                "method": "clamp",
                "vector": tensors.ref("hv"),
                "target": 2.0,
            },
        },
        "gated": {
            "e": {
                **post,
                "method": "add",
                "vector": v,
                "strength": -hidden_scale,
                "positions": ["last_prompt", "generated"],
                "when": {"observe": "c", "above": 0.0},
            }
        },
        "zero": {"e": {**post, "method": "add", "vector": v, "strength": 0.0}},
        "never": {
            "e": {
                **post,
                "method": "add",
                "vector": v,
                "strength": 100.0,
                "positions": ["last_prompt", "generated"],
                "when": {"observe": "c", "below": 0.0},
            }
        },
        "never-row": {
            "e": {
                **post,
                "method": "add",
                "vector": v,
                "strength": 100.0,
                "when": {"observe": "r", "below": 0.0},
            }
        },
    }
    early = {"site": "resid_post", "layers": [layers[0] - 1], "reduce": {"norm": True}}
    observe = {"c": {**early, "positions": "last_prompt"}, "r": {**early, "positions": "all"}}
    return {
        name: {
            "schema": 1,
            "name": name,
            "observe": {
                k: o
                for k, o in observe.items()
                if any(e.get("when", {}).get("observe") == k for e in es.values())
            },
            "intervene": es,
        }
        for name, es in edits.items()
    }


def bits(output):
    """Tokens, and every log-probability that the engine reports, exactly."""
    completion = output.outputs[0]
    return list(completion.token_ids), [{t: p.logprob for t, p in at.items()} for at in completion.logprobs]


def check_batchmates(llm, names, prompts, tokens):
    plain = [bits(o) for o in llm.generate(prompts, greedy(tokens, logprobs=3), hook=False, use_tqdm=False)]
    hooks = [names[EDITED.index(i)] if i in EDITED else False for i in range(16)]
    mixed = [bits(o) for o in llm.generate(prompts, greedy(tokens, logprobs=3), hook=hooks, use_tqdm=False)]
    changed = {i for i in range(16) if mixed[i] != plain[i]}
    assert changed == set(EDITED)


def check_nothing(llm, prompts, tokens):
    plain = [bits(o) for o in llm.generate(prompts, greedy(tokens, logprobs=3), hook=False, use_tqdm=False)]
    for name in ("zero", "never", "never-row"):
        outs = llm.generate(prompts, greedy(tokens, logprobs=3), hook=name, use_tqdm=False)
        assert [bits(o) for o in outs] == plain, name
        assert not any(o.hook.errors for o in outs)


NAMES = ["add", "clamp", "ablate", "mixed", "gated"]


@pytest.fixture(scope="module")
def small(smollm2_path, tmp_path_factory):
    tensors = Tensors(tmp_path_factory.mktemp("vectors"), 576, 64)
    made = programs(tensors, (7, 15), 2.0)
    engine = {"enforce_eager": False, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with hook_llm(smollm2_path, programs=list(made.values()), **engine) as llm:
        yield llm, made, tensors


@pytest.mark.model
def test_32_tokens_equal_hugging_face(small, smollm2_path):
    """Prompts of ordinary text. GAP of the two best logits, below which a token is a near tie: 1e-3."""
    llm, made, tensors = small
    reference = Reference(smollm2_path)
    prompts = text_prompts((24, 37, 30), llm.get_tokenizer())
    names = [n for n in NAMES for _ in prompts]
    outs = llm.generate(prompts * len(NAMES), greedy(32), hook=names, use_tqdm=False)
    longest = dict.fromkeys(NAMES, 0)
    for name, out in zip(names, outs, strict=True):
        figure = compare(reference, out, [made[name]], tensors)
        assert figure["wrong"] is None, (name, figure["wrong"], GAP)
        assert figure["errors"] == {}
        longest[name] = max(longest[name], figure["equal"])
    assert longest == dict.fromkeys(NAMES, 32)


@pytest.mark.model
def test_eleven_of_sixteen_keep_every_bit(small):
    check_batchmates(small[0], NAMES, text_prompts(LENGTHS, small[0].get_tokenizer()), 16)


@pytest.mark.model
def test_strength_zero_and_a_shut_gate_change_no_bit(small):
    check_nothing(small[0], text_prompts(LENGTHS[:6], small[0].get_tokenizer()), 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_bit_of_a_batchmate_on_the_tiny_model(tiny_dir, tmp_path, dtype):
    tensors = Tensors(tmp_path, 64, 32)
    made = programs(tensors, (1, 2), 2.0)
    engine = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "dtype": dtype}
    with hook_llm(tiny_dir("llama"), programs=list(made.values()), **engine) as llm:
        check_batchmates(llm, NAMES, token_prompts(LENGTHS, seed=3), 12)
        check_nothing(llm, token_prompts(LENGTHS, seed=4), 8)


def test_the_comparison_is_not_blind(tiny_dir, tmp_path):
    """An edit of a thousandth is seen."""
    tensors = Tensors(tmp_path, 64, 32)
    made = programs(tensors, (1, 2), 2.0)
    with hook_llm(tiny_dir("llama"), programs=[made["zero"]], enable_prefix_caching=False) as llm:
        hook = {"use": ["zero"], "set": {"e.strength": 0.001}}
        a, b = (
            llm.generate(token_prompts([9]), greedy(4, logprobs=3), hook=h, use_tqdm=False)[0]
            for h in (False, hook)
        )
    assert bits(a) != bits(b)
    assert torch.isfinite(torch.tensor(b.outputs[0].cumulative_logprob))
