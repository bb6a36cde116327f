"""Where a program is: a file, the name of one that ships, or a name on the hub."""

import os

import pytest

from vllm_hook.errors import ProgramError
from vllm_hook.program import hub
from vllm_hook.program.load import load
from vllm_hook.program.locate import is_program_name, locate, shipped
from vllm_hook.rerank import read_heads

OWN = "schema: 1\nname: own\nobserve:\n  a: {site: q, positions: all}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_programs_that_ship_are_known_by_name():
    assert "smollm2-list" in shipped()
    for name, file in shipped().items():
        assert load(name).program.name == name
        assert load(name).source == str(file)
    assert read_heads("smollm2-rerank") == read_heads(shipped()["smollm2-rerank"])


def test_a_file_comes_before_a_name(here):
    (here / "smollm2-list").write_text(OWN)
    assert load("smollm2-list").program.name == "own"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gaurd.yaml", r"^gaurd\.yaml: no such file; did you mean 'guard\.yaml'\?$"),
        ("sub/gaurd.yaml", r"no such file; did you mean 'sub/guard\.yaml'\?$"),
        ("smollm2-lst", "no such file; did you mean the program that ships, 'smollm2-list'"),
        ("smollm2-list.yaml", "no such file; the program that ships is named 'smollm2-list'"),
        ("zzzzzz", "no program of this name ships; those that do: llama3"),
        ("nowhere/x.yaml", "no such file: there is no folder 'nowhere'"),
        ("sub", "is a directory, not a program file"),
        ("", "its name is empty"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_what_is_not_there(here, source, message):
    for folder in (here, here / "sub"):
        folder.mkdir(exist_ok=True)
        (folder / "guard.yaml").write_text(OWN)
    with pytest.raises(ProgramError, match=message):
        locate(source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(here):
    (here / "p.yaml").write_text(OWN)
    (here / "p.yaml").chmod(0)
    with pytest.raises(ProgramError, match="cannot be read: Permission denied"):
        load("p.yaml")


def test_what_names_a_program_and_what_does_not(here):
    (here / "file").write_text(OWN)
    for name in ("x.yaml", "x.json", "hf://a/b/c", "smollm2-list", "file"):
        assert is_program_name(name)
    for name in ("8-3,12-0", "all", "smollm2", "x" * 5000, "a\0b"):
        assert not is_program_name(name)


def test_a_hub_name_that_went_through_a_path_keeps_its_slashes():
    assert hub.full_name("hf:/org/repo/file.yaml") == "hf://org/repo/file.yaml"
    with pytest.raises(ProgramError, match=r"^hf://org: is not a program on the hub"):
        load("hf:/org")
