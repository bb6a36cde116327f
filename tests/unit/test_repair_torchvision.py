"""scripts/repair_torchvision.py: what is broken is removed, a matching pair is left alone."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "repair_torchvision.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("repair_torchvision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []

    class Done:
        returncode = 0

    monkeypatch.setattr(module.subprocess, "run", lambda command, **_: module.calls.append(command) or Done)
    return module


@pytest.mark.parametrize(
    ("installed", "works", "removes"),
    [
        (True, {"torch"}, True),
        (True, {"torch", "torchvision"}, False),
        (True, set(), False),  # torch itself is missing: not ours to judge
        (False, {"torch"}, False),
    ],
)
def test_only_a_mismatch_is_removed(script, monkeypatch, installed, works, removes):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(script, "imports", lambda name: name in works)
    assert script.main() == 0
    assert bool(script.calls) == removes
    if removes:
        assert script.calls[0][-3:] == ["torchvision", "torchaudio", "torchcodec"]
        assert "uninstall" in script.calls[0]


def test_imports_asks_another_process():
    spec = importlib.util.spec_from_file_location("repair_torchvision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.imports("json")
    assert not module.imports("no_such_module_at_all")
