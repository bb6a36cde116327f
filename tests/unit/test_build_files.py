"""Interrupted work continues, outputs appear whole, provenance can be read back."""

import json
import os
from datetime import date
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file

from vllm_hook.build import artifact, work
from vllm_hook.build.artifact import Output, of_one_build, publish, read_provenance
from vllm_hook.build.model import digest_folder
from vllm_hook.build.work import Work
from vllm_hook.cli.build import _written
from vllm_hook.errors import HookError

KEY = {"data": "abc", "options": {"seed": 0}}
PROGRAM = {
    "schema": 1,
    "name": "x",
    "intervene": {"a": {"site": "resid_post", "layers": [1], "method": "add", "vector": "x.safetensors"}},
}


class Measure:
    """Doubles numbers; stops after some calls, as Ctrl-C does."""

    def __init__(self, stop_after=99):
        self.left, self.seen = stop_after, []

    def __call__(self, items):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.seen += items
        return [torch.tensor([2.0 * i]) for i in items]


def run(folder, measure, key=KEY, items=range(7)):
    return Work(folder / "out.yaml", key).tensors("states", list(items), 2, measure)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Measure(stop_after=2))
    again = Measure()
    assert [float(v) for v in run(tmp_path, again)] == [0, 2, 4, 6, 8, 10, 12]
    assert again.seen == [4, 5, 6]
    third = Measure()
    run(tmp_path, third)
    assert third.seen == []


def test_another_key_starts_anew(tmp_path):
    run(tmp_path, Measure())
    again = Measure()
    run(tmp_path, again, {**KEY, "options": {"seed": 1}})
    assert again.seen == list(range(7))


def test_a_damaged_chunk_is_measured_again(tmp_path):
    run(tmp_path, Measure())
    chunks = sorted((tmp_path / "out.yaml.work").glob("states-*"))
    chunks[1].write_bytes(chunks[1].read_bytes()[:-3])
    again = Measure()
    assert [float(v) for v in run(tmp_path, again)] == [0, 2, 4, 6, 8, 10, 12]
    assert again.seen == [2, 3]


def test_values_are_measured_once_and_done_removes_all(tmp_path):
    box = Work(tmp_path / "out.yaml", KEY)
    assert box.value("plain", lambda: {"a": 1.5}) == {"a": 1.5}
    assert box.value("plain", lambda: 1 / 0) == {"a": 1.5}
    box.done()
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_refused_are_of_no_more_use(tmp_path):
    box = Work(tmp_path / "out.yaml", KEY)
    box.value("plain", lambda: 1)
    with pytest.raises(KeyboardInterrupt), box.judged():
        raise KeyboardInterrupt
    assert box.folder.is_dir()
    with pytest.raises(HookError, match="no"), box.judged():
        raise HookError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "out.yaml.work").mkdir()
    (tmp_path / "out.yaml.work" / "mine").write_text("x")
    with pytest.raises(HookError, match="is in the way"):
        Work(tmp_path / "out.yaml", KEY)
    assert (tmp_path / "out.yaml.work" / "mine").is_file()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    work.write_atomic(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(HookError, match="cannot be written: full"):
        work.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# -- outputs ------------------------------------------------------------------------------------


def test_a_program_with_provenance_can_be_read_by_all(tmp_path):
    made = {"written_by": "test", "scores": {"1-2": 0.5}, "method": "long words " * 30}
    output = Output(tmp_path / "x.yaml")
    publish(output, "Two lines\nof title", made, PROGRAM, {"vector": torch.ones(3)}, date(2026, 1, 2))
    text = output.file.read_text("utf-8")
    assert text.startswith("# Two lines\n# of title\n# provenance:\n")
    assert yaml.safe_load(text) == PROGRAM
    assert read_provenance(output.file) == {**made, "date": "2026-01-02"}
    assert read_provenance(output.tensors) == made


@pytest.mark.parametrize("text", ["a\n\nb", "a\u2028\u2028b", "a\x85\x85b", "\n", " a\n\n  b \n" * 40])
def test_provenance_of_several_lines_can_be_read_back(tmp_path, text):
    output = Output(tmp_path / "x.yaml")
    publish(output, "t", {"said": text, "last": 1}, PROGRAM, today=date(2026, 1, 2))
    assert read_provenance(output.file) == {"said": text, "last": 1, "date": "2026-01-02"}


def test_a_blank_line_does_not_end_provenance(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# t\n# provenance:\n#   a: 'x\n#\n#     y'\n#   b: 1\n# said by hand\nschema: 1\n")
    assert read_provenance(file) == {"a": "x\ny", "b": 1}


def test_the_date_is_all_that_differs(tmp_path):
    made = {"written_by": "test", "a": 1, "b": {"c": 2}}
    texts, tensors = [], []
    for day in (1, 2):
        output = Output(tmp_path / "x.yaml", force=True)
        publish(
            output, "t", made, PROGRAM, {"vector": torch.ones(3), "b": torch.zeros(1)}, date(2026, 1, day)
        )
        texts.append(output.file.read_text("utf-8").splitlines())
        tensors.append(output.tensors.read_bytes())
    assert [i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b] == [
        i for i, line in enumerate(texts[0]) if "date:" in line
    ]
    assert tensors[0] == tensors[1]


def test_an_invalid_program_is_not_written(tmp_path):
    with pytest.raises(HookError, match="unknown key"):
        publish(Output(tmp_path / "x.yaml"), "t", {}, {**PROGRAM, "colour": 1}, {"vector": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten_unless_forced(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(HookError, match=r"x.safetensors: exists; give --force"):
        Output(tmp_path / "x.yaml")
    assert Output(tmp_path / "x.yaml", force=True).name == "x"
    assert Output(tmp_path / "My Guard (2).yaml").name == "my-guard--2"
    with pytest.raises(HookError, match=r"ends in .yaml"):
        Output(tmp_path / "x.json")


MADE = {"written_by": "vllm-hook build vector", "scores": {3: 0.1, 12: 1e-07}, "grid": (1, 2.5)}


def test_tensors_of_the_overwritten_program_go_with_it(tmp_path):
    output = Output(tmp_path / "x.yaml")
    publish(output, "t", MADE, PROGRAM, {"vector": torch.ones(3)})
    assert of_one_build(output)
    publish(Output(tmp_path / "x.yaml", force=True), "t", {**MADE, "written_by": "other"}, PROGRAM)
    assert list(tmp_path.iterdir()) == [output.file]


@pytest.mark.parametrize("kept", ["of another build", "by hand", "no program", "notes", "of no build"])
def test_tensors_that_are_not_of_the_overwritten_program_stay(tmp_path, kept):
    output = Output(tmp_path / "x.yaml")
    made = {**MADE, "written_by": "hand"} if kept == "of no build" else MADE
    publish(output, "t", made, PROGRAM, {"vector": torch.ones(3)})
    if kept == "of another build":
        publish(Output(tmp_path / "y.yaml"), "t", {**MADE, "seed": 1}, PROGRAM, {"vector": torch.zeros(3)})
        os.replace(tmp_path / "y.safetensors", output.tensors)
    elif kept == "by hand":
        save_file({"vector": torch.ones(3)}, output.tensors)
    elif kept == "no program":
        output.file.unlink()
    elif kept == "notes":
        output.tensors.write_bytes(b"notes")
    before = output.tensors.read_bytes()
    forced = Output(tmp_path / "x.yaml", force=True)
    publish(forced, "t", MADE, PROGRAM)
    assert output.tensors.read_bytes() == before


def test_tensors_that_stay_are_named(tmp_path, capsys):
    job = SimpleNamespace(output=Output(tmp_path / "x.yaml"))
    publish(job.output, "t", MADE, PROGRAM, {"vector": torch.ones(3)})
    _written(job)
    assert " ".join(capsys.readouterr().out.split()).endswith("x.yaml and x.safetensors")
    save_file({"vector": torch.ones(3)}, job.output.tensors)
    _written(job)
    said = " ".join(capsys.readouterr().out.split())
    assert "and x.safetensors" not in said
    assert said.endswith("x.safetensors: was there before and is not of this build; left as it is")


def test_a_file_without_provenance(tmp_path):
    (tmp_path / "x.yaml").write_text("schema: 1\n")
    with pytest.raises(HookError, match="has no provenance"):
        read_provenance(tmp_path / "x.yaml")


def test_the_models_digest_sees_weights_and_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(HookError, match="has no weights"):
        digest_folder(tmp_path)
    weights = bytearray(b"\x01" * 100_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = digest_folder(tmp_path)
    weights[-1] = 2
    (tmp_path / "model.safetensors").write_bytes(weights)
    second = digest_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"a": 2}))
    assert len({first, second, digest_folder(tmp_path)}) == 3
    (tmp_path / "notes.txt").write_text("not the model")
    assert digest_folder(tmp_path) == digest_folder(tmp_path)
    assert artifact.MARK.startswith("# ")
