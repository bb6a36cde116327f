"""Every site against Hugging Face in fp32, and every selector against brute force."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vllm_hook
from conftest import ARM_ALL, hook_llm
from oracle import Reference, assert_probs_close, assert_rows_close, fed, positions_of
from prompts import greedy, text_prompts, token_prompts

pytestmark = pytest.mark.engine

LAYERS = [0, 1, 14, 29]
PACKAGE = Path(vllm_hook.__file__).parent
PROGRAMS, DATA = PACKAGE / "programs", PACKAGE / "demo" / "data"
LAYERED = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z")
ONCE = ("embed", "final_norm")
PROBED = [[0, 0], [0, 8], [1, 3], [14, 4], [29, 7]]  # [layer, head] of SmolLM2


def everything(layers):
    """Observes all sites of ``layers`` at every position."""
    observe = {
        site: {"site": site, "layers": layers, "positions": "all", "dtype": "float32"} for site in LAYERED
    }
    observe |= {site: {"site": site, "positions": "all", "dtype": "float32"} for site in ONCE}
    observe["attention"] = {"site": "attention", "layers": layers, "rows": "all"}
    observe["mass"] = {"site": "attention_mass", "layers": layers, "rows": "all", "keys": ["head", "tail"]}
    spans = {"head": {"tokens": [0, 1]}, "tail": {"tokens": [-1, None]}}
    return {"schema": 1, "name": "everything", "spans": spans, "observe": observe}


def compare(output, reference, layers):
    """All sites of one output with the reference; the largest relative and probability errors."""
    want = reference.run(fed(output))
    n = len(fed(output))
    rel = {}
    for site in (*LAYERED, *ONCE):
        got = output.hook.observed[site]
        assert got.positions == list(range(n))
        expected = want[site] if site in ONCE else want[site][layers]
        rel[site] = assert_rows_close(got.values, expected, what=site)
    probs = want["attention"][layers].flatten(0, 1)
    assert output.hook.observed["attention"].positions == list(range(n))
    dp = assert_probs_close(output.hook.observed["attention"].values, probs, what="attention")
    p = len(output.prompt_token_ids)
    mass = torch.stack([probs[..., 0], probs[..., p - 1]], dim=-1)
    dp_mass = assert_probs_close(output.hook.observed["mass"].values, mass, sums=None, what="mass")
    return rel, max(dp, dp_mass)


# -- the real model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol(smollm2_path):
    """SmolLM2, compiled, fp32. Small batches: the mixed batch below is prefilled in several chunks."""
    with hook_llm(
        smollm2_path,
        programs=[everything(LAYERS), str(PROGRAMS / "smollm2-injection-guard.yaml")],
        enforce_eager=False,
        max_num_batched_tokens=384,
        block_size=128,
        enable_prefix_caching=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def smol_reference(smollm2_path):
    return Reference(smollm2_path)


@pytest.mark.model
@pytest.mark.parametrize(
    "lengths", [[61], [1, 2, 5, 9, 17, 23, 31, 40, 47, 64, 75, 90, 110, 129, 150, 201]], ids=["1", "16"]
)
def test_every_site_of_smollm2(smol, smol_reference, lengths, record_property):
    """Compiled, fp32, a batch of one and of sixteen."""
    prompts = text_prompts(lengths, smol.get_tokenizer())
    outs = smol.generate(prompts, greedy(6), hook="everything", use_tqdm=False)
    assert len(outs) == len(lengths)
    worst_rel, worst_dp = 0.0, 0.0
    for out, n in zip(outs, lengths, strict=True):
        assert not out.hook.errors
        assert len(out.prompt_token_ids) == n
        rel, dp = compare(out, smol_reference, LAYERS)
        worst_rel, worst_dp = max(worst_rel, *rel.values()), max(worst_dp, dp)
    record_property("max_rel", worst_rel)
    record_property("max_dp", worst_dp)
    print(f"SmolLM2 x{len(lengths)}: max rel {worst_rel:.2g}, max |dp| {worst_dp:.2g}")


@pytest.mark.model
def test_chosen_heads_keep_their_order(smol, smol_reference):
    """``heads: [[layer, head], ...]`` across layers; chat spans by message."""
    listed = [PROBED[i] for i in (3, 0, 4, 1, 2)]
    smol.load_program(
        {
            "schema": 1,
            "name": "focus",
            "spans": {"instruction": {"message": "system"}, "data": {"message": "user", "after": "Data: "}},
            "observe": {
                "focus": {
                    "site": "attention_mass",
                    "heads": listed,
                    "rows": "last_prompt",
                    "keys": ["instruction", "data"],
                }
            },
        }
    )
    messages = [
        {"role": "system", "content": "Say apple."},
        {"role": "user", "content": "Data: We planted tomatoes behind the garage."},
    ]
    out = smol.chat(messages, greedy(2), hook="focus", use_tqdm=False)[0]
    smol.unload_program("focus")
    got = out.hook.observed["focus"]
    ids = out.prompt_token_ids
    tokenizer = smol.get_tokenizer()
    text = tokenizer.decode(ids)
    assert got.positions == [len(ids) - 1]
    assert got.heads == [tuple(h) for h in listed]
    weights = smol_reference.run(ids)["attention"]
    spans = [
        span_of(tokenizer, ids, text, part)
        for part in ("Say apple.", "We planted tomatoes behind the garage.")
    ]
    for i, (layer, head) in enumerate(listed):
        want = torch.stack([weights[layer, head, -1, s].sum() for s in spans])
        assert_probs_close(got.values[i, 0], want, sums=None)


@pytest.mark.model
def test_tracker_scores_of_forty_prompts(smol, smol_reference):
    """Per head: attention to the instruction as a share of that to instruction and data; their mean."""
    lines = (DATA / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines[::3]][:40]
    messages = [
        [{"role": "system", "content": e["instruction"]}, {"role": "user", "content": f"Data: {e['data']}"}]
        for e in examples
    ]
    outs = smol.chat(messages, greedy(1), hook="smollm2-injection-guard", use_tqdm=False)
    assert len(outs) == 40
    assert len({e["style"] for e in examples}) >= 5
    tokenizer = smol.get_tokenizer()
    for out, example in zip(outs, examples, strict=True):
        got, ids = out.hook.observed["focus"], out.prompt_token_ids
        text = tokenizer.decode(ids)
        weights = smol_reference.run(ids)["attention"]
        inst = span_of(tokenizer, ids, text, example["instruction"])
        data = span_of(tokenizer, ids, text, example["data"])
        shares = []
        for (layer, head), mass in zip(got.heads, got.values[:, 0], strict=True):
            to_inst, to_data = (float(weights[layer, head, -1, span].sum()) for span in (inst, data))
            shares.append(to_inst / (to_inst + to_data + 1e-8))
            mine = float(mass[0] / (mass.sum() + 1e-8))
            assert mine == pytest.approx(shares[-1], abs=1e-4)
        assert out.hook.scores["injection"].value == pytest.approx(sum(shares) / len(shares), abs=3e-5)


def span_of(tokenizer, ids, text, part):
    """Token positions whose text overlaps ``part``, by cumulative decoding."""
    start = text.index(part)
    end = start + len(part)
    edges = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    return [i for i in range(len(ids)) if edges[i] < end and edges[i + 1] > start]


# -- the tiny model, eager ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[37], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 7, 11, 300, 63]], ids=["1", "16"]
)
def test_every_site_eager(tiny_llama, tiny_reference, lengths, use):
    program = everything([0, 1, 2, 3])
    name = use(program["observe"], spans=program["spans"])
    outs = tiny_llama.generate(
        token_prompts(lengths, 500, seed=len(lengths)), greedy(5), hook=name, use_tqdm=False
    )
    for out in outs:
        assert not out.hook.errors
        compare(out, tiny_reference, [0, 1, 2, 3])


SELECTORS = {
    "all": "all",
    "prompt": "prompt",
    "generated": "generated",
    "last_prompt": "last_prompt",
    "range": {"range": [2, 9]},
    "negative-range": {"range": [-7, -2]},
    "mixed-range": {"range": [1, -3]},
    "generated-range": {"generated": [1, 4]},
    "generated-open": {"generated": [2, None]},
    "span": {"span": "words"},
    "token_ids": {"token_ids": "FILL"},
    "union": [{"span": "words"}, "last_prompt", {"generated": [0, 2]}, {"range": [0, 1]}],
    "union-with-ids": [{"token_ids": "FILL"}, {"range": [3, 5]}],
}


@pytest.mark.parametrize("kind", SELECTORS)
def test_selector_gives_exactly_its_positions(tiny_llama, tiny_reference, use, kind):
    """The right positions, and at each the row of that position."""
    text = "Please answer: the quick brown fox jumps over the lazy dog. Paris is far."
    plain = tiny_llama.generate(text, greedy(7), hook=False, use_tqdm=False)[0]
    prompt, generated = plain.prompt_token_ids, list(plain.outputs[0].token_ids)
    ids = [prompt[4], generated[1], generated[3]]
    selector = fill(SELECTORS[kind], ids)
    tokenizer = tiny_llama.get_tokenizer()
    spans = {"words": [range(0)]}
    where = span_of(tokenizer, prompt, text, "brown fox")
    spans["words"] = [range(where[0], where[-1] + 1)]
    name = use(
        {"rows": {"site": "resid_post", "layers": [3, 1], "positions": selector, "dtype": "float32"}},
        spans={"words": {"text": "brown fox"}},
    )
    out = tiny_llama.generate(text, greedy(7), hook=name, use_tqdm=False)[0]
    want = sorted(positions_of(selector, prompt, generated, spans))
    assert want
    got = out.hook.observed["rows"]
    assert got.positions == want
    assert got.layers == [3, 1]
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    assert_rows_close(got.values, tiny_reference.run(fed(out))["resid_post"][[3, 1]][:, want])


def fill(selector, ids):
    if isinstance(selector, list):
        return [fill(s, ids) for s in selector]
    return {"token_ids": ids} if isinstance(selector, dict) and "token_ids" in selector else selector


def test_heads_layers_and_dtype(tiny_llama, tiny_reference, use):
    name = use(
        {
            "z": {"site": "z", "layers": [2, 0], "heads": [3, 1], "positions": {"range": [4, 8]}},
            "k": {"site": "k", "layers": [1], "heads": [1], "positions": "last_prompt", "dtype": "float32"},
        }
    )
    out = tiny_llama.generate(token_prompts([12], 500), greedy(1), hook=name, use_tqdm=False)[0]
    want = tiny_reference.run(fed(out))
    z, k = out.hook.observed["z"], out.hook.observed["k"]
    assert z.values.shape == (2, 4, 2, 32)
    assert_rows_close(z.values, want["z"][[2, 0]][:, 4:8][:, :, [3, 1]])
    assert k.values.dtype == torch.float32
    assert_rows_close(k.values, want["k"][[1]][:, 11:12][:, :, [1]])


def test_reductions(tiny_llama, tiny_reference, use, tmp_path):
    g = torch.Generator().manual_seed(3)
    probe = {
        "weight": torch.randn(64, generator=g),
        "bias": torch.tensor([0.7]),
        "mean": torch.randn(64, generator=g),
        "scale": torch.rand(64, generator=g) + 0.5,
    }
    vector = torch.randn(64, generator=g) * 3
    save_file(probe, tmp_path / "probe.safetensors")
    save_file({"v": vector}, tmp_path / "vector.safetensors")
    common = {"site": "resid_mid", "layers": [1, 2], "positions": "all"}
    name = use(
        {
            "probe": {**common, "reduce": {"probe": str(tmp_path / "probe.safetensors")}},
            "projection": {**common, "reduce": {"projection": str(tmp_path / "vector.safetensors")}},
            "cosine": {**common, "reduce": {"cosine": str(tmp_path / "vector.safetensors")}},
            "norm": {**common, "reduce": {"norm": True}},
        }
    )
    outs = tiny_llama.generate(token_prompts([9, 30, 4], 500), greedy(4), hook=name, use_tqdm=False)
    unit = (vector / vector.norm()).double()
    for out in outs:
        h = tiny_reference.run(fed(out))["resid_mid"][[1, 2]].double()
        logit = ((h - probe["mean"]) / probe["scale"]) @ probe["weight"].double() + 0.7
        size = h.norm(dim=-1)
        want = {"probe": logit, "projection": h @ unit, "cosine": h @ unit / size, "norm": size}
        scale = {"probe": logit.abs().mean(), "projection": size, "cosine": 1.0, "norm": size}
        for kind, expected in want.items():
            got = out.hook.observed[kind].values
            assert got.shape == expected.shape
            assert got.dtype == torch.float32
            assert float(((got - expected).abs() / scale[kind]).max()) <= 1e-4, kind


def test_bf16_rows_keep_the_models_dtype(tiny_dir, tiny_reference):
    """bf16 engine: rows arrive as they are; ``dtype: float32`` widens the same values."""
    observe = {
        "own": {"site": "resid_post", "layers": [2], "positions": "all"},
        "wide": {"site": "resid_post", "layers": [2], "positions": "all", "dtype": "float32"},
        "attention": {"site": "attention", "layers": [2], "rows": "all"},
    }
    program = {"schema": 1, "name": "b", "observe": observe}
    with hook_llm(tiny_dir("llama"), programs=[program], dtype="bfloat16") as llm:
        out = llm.generate(token_prompts([40], 500), greedy(3), use_tqdm=False)[0]
        result = out.hook
    own, wide = result.observed["own"].values, result.observed["wide"].values
    assert own.dtype == torch.bfloat16
    assert torch.equal(own.float(), wide)
    want = tiny_reference.run(fed(out))
    assert_rows_close(wide, want["resid_post"][[2]], rel=0.1)
    got = result.observed["attention"].values
    variation = (got - want["attention"][2]).abs().sum(-1) / 2
    assert float(variation.mean()) < 0.05


def test_sites_names_what_is_there(tiny_llama):
    told = tiny_llama.sites()
    assert set(told["sites"]) == {*ARM_ALL, "attention_mass"}
    assert ("resid_post", 3, "all") in told["armed"]
    assert told["model"].layers == 4
