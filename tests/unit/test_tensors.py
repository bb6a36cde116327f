"""Tensor files, and programs loaded with them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_hook.errors import ProgramError, UnsupportedError
from vllm_hook.runtime.loading import LoadedProgram, load_program
from vllm_hook.sites import ModelFacts
from vllm_hook.tensors import (
    Probe,
    digest_tensors,
    read_probe,
    read_sae,
    read_scalar,
    read_tensor,
    read_tensors,
    read_vector,
)

FACTS = ModelFacts("m", layers=4, heads=2, kv_heads=1, head_dim=2, hidden=4)
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def probe_file(path: Path, **changed: torch.Tensor | None) -> Path:
    tensors = {
        "weight": WEIGHT, "bias": torch.tensor([0.5]), "mean": torch.ones(4), "scale": torch.full((4,), 2.0),
        **changed,
    }  # fmt: skip
    return write(path, **{k: v for k, v in tensors.items() if v is not None})


def test_one_tensor_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path / "v.safetensors", only=WEIGHT.to(torch.bfloat16))
    for ref in ("v.safetensors", "v.safetensors#only", str(tmp_path / "v.safetensors")):
        tensor = read_tensor(ref, tmp_path)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, WEIGHT)
    assert list(read_tensors("v.safetensors", tmp_path)) == ["only"]


def test_pt_files(tmp_path: Path) -> None:
    torch.save({"dir": WEIGHT, "avg_proj": 1.5, "list": [1.0, 2.0], "note": "text"}, tmp_path / "v.pt")
    assert sorted(read_tensors("v.pt", tmp_path)) == ["avg_proj", "dir", "list"]
    assert torch.equal(read_tensor("v.pt#dir", tmp_path), WEIGHT)
    assert read_scalar("v.pt#avg_proj", tmp_path) == 1.5
    torch.save(WEIGHT, tmp_path / "bare.pt")
    assert torch.equal(read_tensor("bare.pt", tmp_path), WEIGHT)


def test_pt_files_of_numpy_arrays(tmp_path: Path) -> None:
    array = WEIGHT.numpy()
    content = {"dir": array, "half": array.astype("float16"), "avg_proj": np.float32(1.5)}
    torch.save(content, tmp_path / "n.pt")
    assert torch.equal(read_tensor("n.pt#dir", tmp_path), WEIGHT)
    assert torch.equal(read_tensor("n.pt#half", tmp_path), WEIGHT.half().float())
    assert read_scalar("n.pt#avg_proj", tmp_path) == 1.5


def test_pt_files_never_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"dir": Evil()}, protocol=2))
    torch.save({"dir": Evil()}, tmp_path / "zip.pt")
    torch.save({"dir": np.array([Evil()], dtype=object)}, tmp_path / "objects.pt")
    for ref in ("evil.pt", "zip.pt", "objects.pt"):
        with pytest.raises(ProgramError, match=r"\.pt: cannot be read as a weights-only \.pt file"):
            read_tensors(ref, tmp_path)
    assert not (tmp_path / "owned").exists()


def test_uploaded_tensors(tmp_path: Path) -> None:
    key = "a" * 64
    store = {key: {"x": WEIGHT}}
    assert torch.equal(read_tensor(f"sha256:{key}#x", None, store), WEIGHT)
    with pytest.raises(ProgramError, match="no tensors with this digest were uploaded"):
        read_tensor(f"sha256:{'b' * 64}#x", tmp_path, store)
    with pytest.raises(ProgramError, match="v: files are not read here; upload the tensors"):
        read_tensor("v", None, store)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("none.safetensors", "none.safetensors: no such file"),
        ("folder", "folder: is a directory"),
        ("junk.safetensors", "junk.safetensors: cannot be read as safetensors: "),
        ("junk.pt", "junk.pt: cannot be read as a weights-only .pt file"),
        ("two.safetensors", "two.safetensors: holds a, b; name one, as file#tensor"),
        ("two.safetensors#c", "two.safetensors: has no tensor 'c'; it holds a, b"),
        ("nan.safetensors", "nan.safetensors: tensor 'x' has 2 values that are not finite in float32"),
        ("list.pt", "list.pt: holds a list, not tensors by name"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, ref: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk.safetensors").write_bytes(b"not a tensor file at all")
    (tmp_path / "junk.pt").write_bytes(b"neither")
    write(tmp_path / "two.safetensors", a=WEIGHT, b=WEIGHT.clone())
    write(tmp_path / "nan.safetensors", x=torch.tensor([1.0, float("nan"), float("inf")]))
    torch.save([WEIGHT], tmp_path / "list.pt")
    with pytest.raises(ProgramError) as error:
        read_tensor(ref, tmp_path)
    assert message in str(error.value)


def test_vectors_and_scalars(tmp_path: Path) -> None:
    write(tmp_path / "v.safetensors", row=WEIGHT[None], square=torch.ones(2, 2), one=torch.ones(1, 1))
    assert torch.equal(read_vector("v.safetensors#row", tmp_path, 4), WEIGHT)
    for ref, shape in (("square", r"\[2, 2\]"), ("one", r"\[1, 1\]")):
        with pytest.raises(ProgramError, match=rf"tensor '{ref}' has shape {shape}; \[4\] is needed"):
            read_vector(f"v.safetensors#{ref}", tmp_path, 4)
    assert read_scalar("v.safetensors#one", tmp_path) == 1.0
    with pytest.raises(ProgramError, match=r"has shape \[1, 4\]; one number is needed"):
        read_scalar("v.safetensors#row", tmp_path)


def test_probes(tmp_path: Path) -> None:
    probe_file(tmp_path / "p.safetensors")
    probe = read_probe("p.safetensors", tmp_path, 4)
    assert torch.equal(probe.weight, WEIGHT)
    assert probe.bias == 0.5
    assert probe.mean is not None
    assert probe.scale is not None
    assert sorted(probe.tensors()) == ["bias", "mean", "scale", "weight"]
    probe_file(tmp_path / "q.safetensors", mean=None, scale=None)
    assert read_probe("q.safetensors", tmp_path, 4).mean is None
    write(
        tmp_path / "many.safetensors",
        **{"a.weight": WEIGHT, "a.bias": torch.ones(1), "b.weight": WEIGHT.clone()},
    )
    assert read_probe("many.safetensors#a", tmp_path, 4).bias == 1.0
    with pytest.raises(
        ProgramError, match=r"many\.safetensors: has no tensors c\.\*; it holds a\.bias, a\.weight"
    ):
        read_probe("many.safetensors#c", tmp_path, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": None}, "has no tensor 'weight'; it holds bias, mean, scale"),
        ({"bias": None}, "has no tensor 'bias'; it holds mean, scale, weight"),
        ({"weight": torch.ones(5)}, "tensor 'weight' has shape [5]; [4] is needed"),
        ({"mean": torch.ones(3)}, "tensor 'mean' has shape [3]; [4] is needed"),
        ({"bias": torch.ones(2)}, "tensor 'bias' has shape [2]; [1] is needed"),
        ({"bias": torch.tensor([float("nan")])}, "tensor 'bias' has 1 values that are not finite"),
        ({"scale": torch.tensor([1.0, 1.0, 0.0, 1.0])}, "tensor 'scale' is zero at index 2"),
    ],
)
def test_wrong_probes_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    probe_file(tmp_path / "p.safetensors", **changed)
    with pytest.raises(ProgramError) as error:
        read_probe("p.safetensors", tmp_path, 4)
    assert f"p.safetensors: {message}" in str(error.value)


def test_sae_features(tmp_path: Path) -> None:
    encoder = torch.arange(12.0).reshape(4, 3)
    write(
        tmp_path / "s.safetensors",
        W_enc=encoder, b_enc=torch.arange(3.0), W_dec=encoder.T.contiguous() * 2, b_dec=torch.ones(4),
        threshold=torch.tensor([1.0, 2.0, 3.0]),
    )  # fmt: skip
    sae = read_sae("s.safetensors", tmp_path, 4, (2, 0))
    assert torch.equal(sae.encoder, encoder[:, [2, 0]].T)
    assert sae.bias.tolist() == [2.0, 0.0]
    assert sae.decoder is not None
    assert torch.equal(sae.decoder, 2 * sae.encoder)
    assert sae.threshold is not None
    assert sae.threshold.tolist() == [3.0, 1.0]
    with pytest.raises(ProgramError, match=r"s\.safetensors: has 3 features, so no feature 3"):
        read_sae("s.safetensors", tmp_path, 4, (1, 3))
    with pytest.raises(ProgramError, match=r"tensor 'W_enc' has shape \[4, 3\]; \[8, features\] is needed"):
        read_sae("s.safetensors", tmp_path, 8, (1,))


def test_a_transposed_sae_is_told_which_axis_is_that_of_the_features(tmp_path: Path) -> None:
    encoder, bias = torch.arange(12.0).reshape(4, 3), torch.zeros(3)
    write(tmp_path / "enc.safetensors", W_enc=encoder.T.contiguous(), b_enc=bias)
    write(tmp_path / "dec.safetensors", W_enc=encoder, b_enc=bias, W_dec=encoder.clone())
    write(tmp_path / "linear.safetensors", **{"encoder.weight": encoder, "encoder.bias": bias})
    write(tmp_path / "other.safetensors", W_enc=torch.zeros(5, 3), b_enc=bias)
    columns = r"it is transposed: features are the columns of W_enc and the rows of W_dec"
    for file, shapes in (
        ("enc", r"'W_enc' has shape \[3, 4\]; \[4, features\]"),
        ("dec", r"'W_dec' has shape \[4, 3\]; \[3, 4\]"),
        ("linear", r"'W_enc' has shape \[3, 4\]; \[4, features\]"),
    ):
        with pytest.raises(ProgramError, match=f"{file}.safetensors: tensor {shapes} is needed; {columns}"):
            read_sae(f"{file}.safetensors", tmp_path, 4, (1,))
    with pytest.raises(ProgramError, match=r"\[4, features\] is needed$"):
        read_sae("other.safetensors", tmp_path, 4, (1,))


def test_digests_are_of_content() -> None:
    a, b = {"x": WEIGHT, "y": torch.ones(2)}, {"y": torch.ones(2), "x": WEIGHT.clone()}
    assert digest_tensors(a) == digest_tensors(b)
    for other in (
        {"x": WEIGHT, "z": torch.ones(2)},
        {"x": WEIGHT, "y": torch.ones(2, 1)},
        {"x": WEIGHT, "y": torch.ones(2, dtype=torch.bfloat16)},
        {"x": WEIGHT + 1, "y": torch.ones(2)},
    ):
        assert digest_tensors(other) != digest_tensors(a)
    assert len(digest_tensors({"s": torch.tensor(1.0)})) == 64


# -- programs with tensors ----------------------------------------------------------------------


PROGRAM = """schema: 1
name: p
observe:
  danger:
    site: resid_post
    layers: [1]
    positions: generated
    reduce: {probe: %s}
"""


def load_from(folder: Path, ref: str, extra: str = "") -> LoadedProgram:
    folder.mkdir(exist_ok=True)
    file = folder / "p.yaml"
    file.write_text(PROGRAM % ref + extra)
    return load_program(file, FACTS)


def test_a_loaded_program(tmp_path: Path) -> None:
    probe_file(tmp_path / "d.safetensors")
    loaded = load_from(tmp_path, "d.safetensors")
    assert (loaded.name, loaded.needs.to_json()) == ("p", [["resid_post", 1, "last"]])
    probe = loaded.tensors["d.safetensors"]
    assert isinstance(probe, Probe)
    assert probe.bias == 0.5


def test_the_digest_follows_content_not_place(tmp_path: Path) -> None:
    probe_file(tmp_path / "d.safetensors")
    first = load_from(tmp_path, "d.safetensors").digest
    assert len(first) == 64
    (tmp_path / "elsewhere").mkdir()
    probe_file(tmp_path / "elsewhere" / "moved.safetensors")
    assert load_from(tmp_path / "elsewhere", "moved.safetensors").digest == first
    # what is written out although it is the default changes nothing
    assert load_from(tmp_path, "d.safetensors", "apply: on_request\n").digest == first
    assert load_from(tmp_path, "d.safetensors", "apply: always\n").digest != first
    probe_file(tmp_path / "d.safetensors", bias=torch.tensor([0.25]))
    assert load_from(tmp_path, "d.safetensors").digest != first


def test_tensor_problems_have_field_line_and_file(tmp_path: Path) -> None:
    second = "  calm: {site: resid_pre, positions: all, reduce: {cosine: v.safetensors}}\n"
    write(tmp_path / "v.safetensors", v=torch.ones(3))
    with pytest.raises(ProgramError) as error:
        load_from(tmp_path, "none.safetensors", second)
    assert [(p.line, p.field) for p in error.value.problems] == [
        (8, "observe.danger.reduce.probe"),
        (9, "observe.calm.reduce.cosine"),
    ]
    assert "none.safetensors: no such file" in str(error.value)
    assert "v.safetensors: its tensor has shape [3]; [4] is needed" in str(error.value)


def test_a_server_reads_no_files(tmp_path: Path) -> None:
    file = probe_file(tmp_path / "d.safetensors")
    program = {
        "schema": 1, "name": "p",
        "observe": {"o": {"site": "embed", "positions": "all", "reduce": {"probe": str(file)}}},
    }  # fmt: skip
    assert load_program(program, FACTS).name == "p"
    with pytest.raises(ProgramError, match=r"observe\.o\.reduce\.probe: .*files are not read here"):
        load_program(program, FACTS, allow_files=False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("act: [{if: danger above 0, do: stop}]\n", "act[0].do: stop is not available in this version"),
    ],
)
def test_what_is_not_available_yet(tmp_path: Path, extra: str, message: str) -> None:
    probe_file(tmp_path / "d.safetensors")
    with pytest.raises(UnsupportedError) as error:
        load_from(tmp_path, "d.safetensors", extra)
    assert message in str(error.value)
    assert "p.yaml" in str(error.value)
