"""Programs named hf://..., from a cache folder as the hub's client lays it out. Nothing is downloaded."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from vllm_hook.errors import ProgramError
from vllm_hook.program import hub
from vllm_hook.program.load import load

PROGRAM = """\
schema: 1
name: calm
intervene:
  calm: {site: resid_post, layers: [1], method: add, vector: calm.safetensors, strength: 2.0}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with acme/programs: folder/calm.yaml and its vector at one commit, main."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repo = tmp_path / "models--acme--programs"
    folder = repo / "snapshots" / COMMIT / "folder"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (folder / "calm.yaml").write_text(PROGRAM)
    save_file({"vector": torch.ones(4)}, folder / "calm.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.mark.parametrize(
    "name", ["hf://acme/programs/folder/calm.yaml", f"hf://acme/programs@{COMMIT}/folder/calm.yaml"]
)
def test_a_cached_program_loads_with_its_tensors_beside_it(cache, name):
    loaded = load(name)
    assert loaded.program.name == "calm"
    assert loaded.base_dir == cache
    assert (loaded.base_dir / "calm.safetensors").is_file()


def test_a_tensor_file_that_cannot_be_had_is_named(cache):
    (cache / "calm.safetensors").unlink()
    with pytest.raises(ProgramError, match=r"folder/calm.safetensors cannot be fetched from acme/programs"):
        load("hf://acme/programs/folder/calm.yaml")


def test_a_program_that_is_not_cached(cache):
    with pytest.raises(ProgramError, match="cannot be fetched from acme/programs"):
        load("hf://acme/programs/folder/other.yaml")


@pytest.mark.parametrize("ref", ["../calm.safetensors", "/elsewhere/calm.safetensors"])
def test_a_program_of_the_hub_reads_no_file_elsewhere(cache, ref):
    (cache / "calm.yaml").write_text(PROGRAM.replace("calm.safetensors", ref))
    with pytest.raises(ProgramError, match="of its own folder only"):
        load("hf://acme/programs/folder/calm.yaml")


@pytest.mark.parametrize("name", ["hf://acme/calm.yaml", "hf://acme", "hf://acme/programs/../calm.yaml"])
def test_what_is_no_name(name):
    with pytest.raises(ProgramError, match=r"hf://org/repo/file\.yaml"):
        load(name)


def test_every_kind_of_reference_is_found():
    program = {
        "observe": {
            "a": {"reduce": {"probe": "p.safetensors#x"}},
            "b": {"reduce": {"sae": "s.pt", "features": [1]}},
            "c": {"reduce": {"norm": True}},
            "d": {},
        },
        "intervene": {
            "e": {"vector": "v.safetensors", "target": 1.5},
            "f": {"vector": "v.safetensors", "target": "t.safetensors"},
            "g": {"u": "u.safetensors", "v": "sha256:00#v"},
            "h": {"vector": "v.safetensors", "second": "w.safetensors"},
        },
        "analyze": {"i": {"options": {"probe": "o.safetensors#x", "data": "data", "above": 0.5}}},
    }
    names = {name.partition(".")[0] for name in hub._references(program)}
    assert names == {"p", "s", "v", "t", "u", "w", "o"}


def test_the_command_line_takes_such_a_name_and_the_users_cache(cache):
    env = {**os.environ, "HF_HUB_CACHE": str(cache.parents[3]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm_hook.cli", "check", "hf://acme/programs/folder/calm.yaml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "program 'calm'" in done.stdout
