"""Builds that cannot be: one clear error that names file and line, before a model is loaded where it can be
known, and nothing half-written; builds that are interrupted go on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from builds import COMMANDS, INJECTIONS, LABELLED, PAIRS, write_rows

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: [], "holds no examples"),
        (lambda rows: [*rows, rows[0]], "the same example as on line 1"),
        (lambda rows: [*rows[:-1], _longer(rows[-1])], "model's length is 512"),
        (lambda rows: [rows[0], {**rows[1], **dict.fromkeys(list(rows[1])[:2], 7)}], "line 2"),
    ],
)
def test_bad_data_is_named_and_nothing_is_left(build, tmp_path, command, change, says):
    result = build(command, "made.yaml", rows=change(COMMANDS[command][0]))
    assert result.exit_code == 1, result.output
    assert says in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def _longer(row):
    key = next(k for k in ("data", "prompt", "with", "query") if k in row)
    return {**row, key: row[key] + " word" * 600}


@pytest.mark.parametrize(
    ("command", "rows"), [("heads", INJECTIONS[::2]), ("probe", LABELLED[::2]), ("vector", PAIRS[:1])]
)
def test_one_class_is_refused(build, tmp_path, command, rows):
    result = build(command, "made.yaml", rows=rows)
    assert result.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(
    ("command", "change", "says"),
    [
        ("vector", {"with": "Tell me of the river. "}, "line 2, with: is the same as without"),
        ("vector", {"with": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
                    "without": "x"}, "line 2, with: gives the same tokens"),
        ("rerank-heads", {"query": "Where is the apple? "}, "line 2: the same example as on line 1"),
        ("rerank-heads", {"documents": [{"text": "a", "grade": 1}, {"text": " a", "grade": 0}]},
         "line 2, documents[1].text: is that of documents[0]"),
        ("rerank-heads", {"documents": [{"text": "a", "grade": 5000}, {"text": "b", "grade": 0}]},
         "line 2, documents[0].grade: must be 0, 1, 2, .. (at most 50)"),
        ("heads", {"data": "half \ud800 a pair"}, "line 2: holds half a character"),
        ("probe", {"prompt": [["user", "x"]]}, "line 2, prompt[0]: must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_one_line_is_said_before_anything_runs(build, tmp_path, command, change, says):
    rows = COMMANDS[command][0]
    result = build(command, "made.yaml", rows=[rows[0], {**rows[1], **change}, *rows[2:]])
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Loading" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def _folder(path):
    path.mkdir()


def _damaged(path):
    path.mkdir()
    (path / "key.json").write_bytes(b"\xff")


@pytest.mark.parametrize("command", ["heads", "probe"])
@pytest.mark.parametrize(
    ("out", "prepare", "says"),
    [
        ("data.jsonl/made.yaml", None, "data.jsonl/made.yaml: cannot be written"),
        ("/proc/made.yaml", None, "cannot be written"),
        ("made.yaml", ("made.yaml", _folder), "made.yaml: is a folder"),
        ("made.yaml", ("made.safetensors", _folder), "made.safetensors: is a folder"),
        ("made.yaml", ("made.yaml.work", lambda p: p.write_text("x")), "made.yaml.work: is in the way"),
    ],
)
def test_an_output_that_cannot_be_written_is_said_before_anything_runs(
    build, tmp_path, command, out, prepare, says
):
    if prepare is not None:
        prepare[1](tmp_path / prepare[0])
    before = {"data.jsonl", *(p.name for p in tmp_path.iterdir())}
    result = build(command, out, "--force")
    assert result.exit_code == 1
    assert not isinstance(result.exception, OSError)
    assert says in " ".join(result.output.split())
    assert "Loading" not in result.output
    assert {p.name for p in tmp_path.iterdir()} == before


def test_damaged_work_is_done_anew(build, tmp_path):
    _damaged(tmp_path / "made.yaml.work")
    result = build("heads", "made.yaml")
    assert result.exit_code == 0, result.output
    assert "starting anew" in result.output


def test_a_full_disk_is_one_error_and_the_work_goes_on_later(build, tmp_path, monkeypatch):
    replace = os.replace
    names = []

    def full(source, target):
        names.append(str(target))
        if str(target).endswith("made.yaml"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = build("probe", "made.yaml")
    assert result.exit_code == 1
    assert "made.yaml: cannot be written: No space left on device" in result.output.replace("\n", " ")
    assert any(name.endswith("made.safetensors") for name in names)
    assert {p.name for p in tmp_path.iterdir()} == {"data.jsonl", "made.yaml.work"}  # no tensors alone
    assert build("probe", "made.yaml").exit_code == 0


#: Measures the first chunk at once, and the second too late. What a shell starts in the background ignores
#: Ctrl-C, and so does all that it starts: not this.
SLOWLY = """
import signal, sys, time
from vllm_hook import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
from vllm_hook.build.on_hf import HfBackend
masses, delays = HfBackend.masses, [0, 60]
def slow(*given):
    time.sleep(delays.pop(0))
    return masses(*given)
HfBackend.masses = slow
cli.app(sys.argv[1:])
"""


def test_ctrl_c_in_another_process_and_the_same_command_again(build, tmp_path, tiny_dir):
    write_rows(tmp_path / "data.jsonl", INJECTIONS)
    args = ["build", "heads", str(tiny_dir("llama")), "data.jsonl", "-o", "parts.yaml", "--backend", "hf"]
    command = [sys.executable, "-c", SLOWLY, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob("parts.yaml.work/attention-00000*")):
                assert running.poll() is None, running.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(0.5)
            running.send_signal(signal.SIGINT)
            said, _ = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 130, said
    assert "the same command goes on from here" in said
    assert "Traceback" not in said
    assert {p.name for p in tmp_path.iterdir()} == {"data.jsonl", "parts.yaml.work"}
    assert build("heads", "parts.yaml").exit_code == build("heads", "whole.yaml").exit_code == 0
    whole, parts = ((tmp_path / f"{n}.yaml").read_text().replace(n, "NAME") for n in ("whole", "parts"))
    assert whole == parts
    assert {p.name for p in tmp_path.iterdir()} == {"data.jsonl", "parts.yaml", "whole.yaml"}


def test_an_existing_output_is_kept(build, tmp_path):
    (tmp_path / "made.yaml").write_text("mine")
    result = build("heads", "made.yaml")
    assert result.exit_code == 1
    assert "--force" in result.output
    assert (tmp_path / "made.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--layers", "9"], "layers 0 to 3"),
        (["--layers", "a"], "numbers separated"),
        (["--backend", "x"], "known values: vllm, hf"),
        (["vector", "--strengths", "1,nan"], "strengths must be numbers other than 0"),
        (["vector", "--strengths", "0"], "strengths must be numbers other than 0"),
        (["heads", "--k", "nan"], "k must be a number"),
        (["rerank-heads", "--temperature", "nan"], "temperature must be a number above 0"),
    ],
)
def test_options_that_cannot_be(build, tmp_path, more, says):
    command, more = (more[0], more[1:]) if more[0] in COMMANDS else ("probe", more)
    result = build(command, "made.yaml", *more)
    assert result.exit_code != 0
    assert "Loading" not in result.output
    assert says in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]
