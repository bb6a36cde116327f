"""Two tensor-parallel ranks: head sites joined in order, edits the same on both, results once."""

import pytest
import torch

from conftest import GPU, hook_llm
from editing import Tensors, compare
from oracle import assert_probs_close, assert_rows_close, fed
from prompts import greedy, token_prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SITES = ("embed", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "final_norm")
HEADS = [[3, 3], [0, 1], [0, 2], [2, 0]]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    made = Tensors(tmp_path_factory.mktemp("vectors"), 64, 32)
    g = torch.Generator().manual_seed(3)
    made.put("v", {"stream": torch.randn(64, generator=g) * 3, "head": torch.randn(32, generator=g)})
    return made


@pytest.fixture(scope="module")
def llm(tiny_dir, tensors):
    arm = {site: {"rows": "all"} for site in (*SITES, "attention")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if not GPU:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            patch.setenv("OMP_NUM_THREADS", "1")
        two = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
        with hook_llm(tiny_dir("llama"), programs=[edits(tensors)], arm=arm, **two) as llm:
            yield llm


def edits(tensors):
    stream, head = tensors.ref("stream", "v"), tensors.ref("head", "v")
    intervene = {
        "add": {"site": "resid_post", "layers": [1], "method": "add", "vector": stream},
        "z": {"site": "z", "layers": [2], "heads": [0, 3], "method": "clamp", "vector": head, "target": 2.0},
        "k": {"site": "k", "layers": [1], "heads": [1], "method": "add", "vector": head},
        "look": {
            "site": "attention", "method": "attend", "heads": [[0, 0], [3, 3]], "keys": ["a"], "weight": 3.0
        },
    }  # fmt: skip
    return {"schema": 1, "name": "edit", "spans": {"a": {"tokens": [1, 4]}}, "intervene": intervene}


def test_every_site_and_attention(llm, tiny_reference):
    observe = {site: {"site": site, "layers": "all", "positions": "all"} for site in SITES}
    for site in ("embed", "final_norm"):
        del observe[site]["layers"]
    observe["mass"] = {"site": "attention_mass", "heads": HEADS, "rows": "all", "keys": ["a"]}
    observe["probs"] = {"site": "attention", "heads": HEADS, "rows": "all"}
    observe["one"] = {"site": "z", "layers": [1], "heads": [3, 0], "positions": "last_prompt"}
    program = {"schema": 1, "name": "all", "spans": {"a": {"tokens": [0, 3]}}, "observe": observe}
    llm.load_program(program)
    outs = llm.generate(token_prompts([9, 30, 17]), greedy(6), hook="all", use_tqdm=False)
    llm.unload_program("all")
    for out in outs:
        assert not out.hook.errors
        want = tiny_reference.run(fed(out))
        for site in SITES:
            assert_rows_close(out.hook.observed[site].values, want[site], what=site)
        probs = torch.stack([want["attention"][layer, head] for layer, head in HEADS])
        assert_probs_close(out.hook.observed["probs"].values, probs, what="attention")
        mass = probs[..., :3].sum(-1, keepdim=True)
        assert_probs_close(out.hook.observed["mass"].values, mass, sums=None, what="mass")
        last = len(out.prompt_token_ids) - 1
        assert_rows_close(out.hook.observed["one"].values, want["z"][[1]][:, [last]][:, :, [3, 0]], what="z")


def test_edits_of_stream_heads_and_attention(llm, tiny_reference, tensors):
    prompts = token_prompts([12, 25], seed=2)
    outs = llm.generate(prompts, greedy(16), hook="edit", use_tqdm=False)
    plain = llm.generate(prompts, greedy(16), hook=False, use_tqdm=False)
    for out, other in zip(outs, plain, strict=True):
        told = compare(tiny_reference, out, [edits(tensors)], tensors)
        assert told["wrong"] is None
        assert told["equal"] == 16 or told["tie"] is not None
        assert out.outputs[0].token_ids != other.outputs[0].token_ids
