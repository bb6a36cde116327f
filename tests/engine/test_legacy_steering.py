"""Steering configurations of the earlier vLLM-Hook: imported by the command, run, and compared with
Hugging Face edited by hooks that are written here from what the configuration says."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from typer.testing import CliRunner

from conftest import hook_llm
from editing import GAP
from oracle import fed, row_errors
from prompts import greedy, token_prompts
from vllm_hook.cli import app

pytestmark = pytest.mark.engine

TOKENS = 32
WATCH = {
    "schema": 1,
    "name": "watch",
    "observe": {"h": {"site": "resid_post", "layers": "all", "positions": "all", "dtype": "float32"}},
}
#: Configuration -> the positions it steers, of n prompt tokens.
CONFIGS = {
    "clamp": (
        {"method": "adjust_rs", "coefficient": 1, "optimal_layer": 1, "apply_at_all_positions": True},
        lambda n: slice(0, None),
    ),
    "clamp-decode": (
        {"method": "adjust_rs", "optimal_layer": [0, 2], "phase": "decode"},
        lambda n: slice(n, None),
    ),
    "add": (
        {"method": "add_vector", "coefficient": 12.0, "optimal_layer": 2, "apply_at_all_positions": True},
        lambda n: slice(0, None),
    ),
    "add-last": (
        {"method": "add_vector", "coefficient": -9.0, "optimal_layer": "all", "positions": "last_token"},
        lambda n: slice(n - 1, None),
    ),
    "add-prefill": (
        {"method": "add_vector", "coefficient": 9.0, "optimal_layer": 1, "phase": "prefill"},
        lambda n: slice(0, n),
    ),
}


@pytest.fixture(scope="module")
def vector(tmp_path_factory):
    """A file as the earlier version wrote them: a unit direction, and the mean projection on it."""
    v = torch.randn(64, generator=torch.Generator().manual_seed(11))
    content = {"dir": v / v.norm(), "avg_proj": torch.tensor(9.0)}
    folder = tmp_path_factory.mktemp("steering")
    torch.save(content, folder / "v.pt")
    return folder, content


@pytest.fixture(scope="module")
def imported(vector):
    """Program files written by ``vllm-hook import``, in a folder of their own."""
    folder, _ = vector
    (folder / "programs").mkdir()
    files = {}
    for name, (steering, _) in CONFIGS.items():
        old = folder / f"{name}.json"
        old.write_text(
            json.dumps({"model_info": {"name": name}, "steering": {**steering, "vector_path": "v.pt"}})
        )
        files[name] = folder / "programs" / f"{name}.yaml"
        told = CliRunner().invoke(app, ["import", str(old), "-o", str(files[name])])
        assert told.exit_code == 0, told.output
        assert "there is no" not in told.output
    return files


@pytest.fixture(scope="module")
def llm(tiny_dir, imported):
    programs = [*map(str, imported.values()), WATCH]
    with hook_llm(tiny_dir("llama"), programs=programs) as llm:
        yield llm


@contextmanager
def steered(reference, steering, positions, content):
    """The whole output of the blocks, hidden + residual, which in Hugging Face is one tensor."""
    u, target = content["dir"], content["avg_proj"]

    def hook(module, args, out):
        h = (out[0] if isinstance(out, tuple) else out).clone()
        rows = h[0, positions]
        if steering["method"] == "adjust_rs":
            rows = rows + (target - rows @ u)[:, None] * u
        else:
            rows = rows + steering["coefficient"] * u
        h[0, positions] = rows
        return (h, *out[1:]) if isinstance(out, tuple) else h

    layers = steering["optimal_layer"]
    layers = (
        range(len(reference.layers)) if layers == "all" else layers if isinstance(layers, list) else [layers]
    )
    handles = [reference.layers[i].register_forward_hook(hook) for i in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_configuration_runs(llm, tiny_reference, vector, name):
    """32 greedy tokens, and every state of every layer."""
    steering, positions = CONFIGS[name]
    prompts = token_prompts([7, 40, 23], seed=4)
    outs = llm.generate(prompts, greedy(TOKENS), hook={"use": [name, "watch"]}, use_tqdm=False)
    plain = llm.generate(prompts, greedy(TOKENS), hook=False, use_tqdm=False)
    compared = 0
    for out in outs:
        assert out.hook.errors == {}
        n, tokens = len(out.prompt_token_ids), list(out.outputs[0].token_ids)
        with steered(tiny_reference, steering, positions(n), vector[1]):
            want = tiny_reference.run(fed(out))
        logits = want["logits"][0, n - 1 :]
        two = logits.topk(2, dim=-1).values
        ties = (two[:, 0] - two[:, 1] < GAP).nonzero().flatten().tolist()
        end = ties[0] if ties else TOKENS  # beyond a near tie the sequences may part
        assert tokens[:end] == logits.argmax(-1).tolist()[:end]
        compared += end
        assert float(row_errors(out.hook.observed["h"].values, want["resid_post"]).max()) <= 1e-4
    assert compared >= 2.5 * TOKENS
    assert [o.outputs[0].token_ids for o in outs] != [o.outputs[0].token_ids for o in plain]


def test_the_projection_of_the_whole_stream_is_set(llm, vector):
    """Not of one of the two halves that a block returns."""
    out = llm.generate(token_prompts([12]), greedy(4), hook={"use": ["clamp", "watch"]}, use_tqdm=False)[0]
    states = out.hook.observed["h"].values[1]
    assert len(states) == 15
    torch.testing.assert_close(states @ vector[1]["dir"], torch.full((15,), 9.0), atol=2e-4, rtol=0)
