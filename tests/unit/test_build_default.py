"""``vllm-hook build vector`` without data: the pairs, the questions and the rule of the behaviour."""

import pytest
from typer.testing import CliRunner

from vllm_hook import cli
from vllm_hook.build import vector
from vllm_hook.build.records import read_pairs
from vllm_hook.demo.steer_data import SHOWS
from vllm_hook.errors import HookError

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.parametrize("more", [[], ["--shows", "x"]])
def test_a_behaviour_is_chosen_by_its_own_questions(tmp_path, tiny_dir, monkeypatch, name, more):
    seen = {}

    def build(job, data, options, held_out):
        seen.update(options=options, pairs=len(read_pairs(data)[0]), held=len(read_pairs(held_out)[0]))
        raise HookError("far enough")

    monkeypatch.setattr(vector, "build_vector", build)
    args = ["build", "vector", str(tiny_dir("llama")), "-b", name, "-o", str(tmp_path / "v.yaml"), *more]
    assert "far enough" in CliRunner().invoke(cli.app, args).output
    assert (seen["pairs"], seen["held"]) == (36, 10)
    assert seen["options"].shows == (more[1] if more else SHOWS[name])
    assert seen["options"].tokens == 40
