"""The logit lens by hand, and against Hugging Face's own last step."""

import os

import pytest
import torch
from safetensors.torch import save_file

import tiny
from vllm_hook import analyzers, unembedding
from vllm_hook.analyzers.logit_lens import settled
from vllm_hook.errors import HookError, ProgramError
from vllm_hook.results import Observed
from vllm_hook.unembedding import Unembedding


def test_logits_by_hand():
    # rms of (3, 4) is sqrt(12.5); the norm doubles the second entry
    lens = Unembedding(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), 0.0)
    got = lens.logits(torch.tensor([[3.0, 4.0]]))[0]
    r = 12.5**0.5
    assert got.tolist() == pytest.approx([3 / r, 8 / r, 11 / r])
    layer_norm = Unembedding(torch.ones(2), torch.eye(2), 0.0, norm_bias=torch.tensor([0.0, 1.0]), divide=2.0)
    assert layer_norm.logits(torch.tensor([[3.0, 5.0]]))[0].tolist() == pytest.approx([-0.5, 1.0])


def test_settled_counts_from_where_the_top_token_stays():
    best = torch.tensor([[1, 7], [5, 7], [1, 7], [1, 7]])
    assert settled(best, [0, 4, 8, 9]) == [8, 0]
    assert settled(torch.tensor([[1], [2]]), [3, 5]) == [5]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_extracted_weights_give_the_logits_of_hugging_face(tmp_path, tiny_dir, kind):
    """From the stream before the last norm to the model's own logits."""
    from transformers import AutoModelForCausalLM

    folder = tiny_dir(kind)
    file = unembedding.extract(folder, tmp_path / "u.safetensors")
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    seen = []
    model.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        want = model(torch.tensor([[5, 9, 200, 31]])).logits[0]
    lens = unembedding.read(file)
    torch.testing.assert_close(lens.logits(seen[0][0]), want, rtol=1e-4, atol=1e-4)
    assert len(lens.tokens) == tiny.config_of(folder)["vocab_size"] or len(lens.tokens) > 100


def test_analyzer(tmp_path, tiny_dir):
    file = str(unembedding.extract(tiny_dir("llama"), tmp_path / "u.safetensors"))
    lens = unembedding.read(file)
    rows = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    lines = analyzers.get("logit_lens")
    seen = Observed("resid_post", rows, [7, 8], [0, 1, 3])
    found = lines.score({"s": seen}, {}, lines.Options(unembedding=file, top=3))
    best = torch.stack([lens.logits(layer).argmax(-1) for layer in rows])
    assert [[p[0][2] for p in found.details["top"][str(y)]] for y in (0, 1, 3)] == best.tolist()
    first = found.details["top"]["0"][0]
    assert len(first) == 3
    assert first[0][1] >= first[1][1] >= first[2][1] > 0
    assert first[0][0] == lens.tokens[first[0][2]]
    assert found.value == sum(settled(best, [0, 1, 3])) / 2
    with pytest.raises(HookError, match=r"not \[layers, positions, 64\]"):
        lines.score(
            {"s": Observed("resid_post", rows[..., :5], [7, 8], [0, 1, 3])},
            {},
            lines.Options(unembedding=file),
        )
    with pytest.raises(HookError, match="needs 'resid_post'"):
        lines.score({"s": Observed("mlp_out", rows, [7, 8], [0, 1, 3])}, {}, lines.Options(unembedding=file))


def test_options_hold_the_file_as_it_was(tmp_path, tiny_dir):
    file = unembedding.extract(tiny_dir("llama"), tmp_path / "u.safetensors")
    lines = analyzers.get("logit_lens")
    options = lines.Options(unembedding=str(file))
    norm = options.unembedding.content.norm.clone()
    with file.open("r+b") as f:  # in place: what is mapped into memory changes with it
        f.seek(-4096, os.SEEK_END)
        f.write(bytes(4096))
    before = options.unembedding.content
    again = lines.Options.model_validate(dict(options)).unembedding
    assert again.content is before
    assert torch.equal(before.norm, norm)
    other = lines.Options(unembedding=str(file)).unembedding
    assert other.digest != again.digest
    assert not torch.equal(other.content.unembed, before.unembed)


def test_a_file_that_is_none_is_refused(tmp_path):
    other = tmp_path / "x.safetensors"
    save_file({"norm": torch.ones(2)}, other)
    with pytest.raises(ProgramError, match="not an unembedding"):
        unembedding.read(other)
    with pytest.raises(ProgramError, match=r"config\.json"):
        unembedding.extract(tmp_path, tmp_path / "y.safetensors")
