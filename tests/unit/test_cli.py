"""The command line without an engine: messages, exit status, files."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_hook import cli, describe, environment, offline, saved
from vllm_hook.errors import HookError
from vllm_hook.program.load import load
from vllm_hook.results import ById, HookResult, Observed, Score

pytestmark = pytest.mark.usefixtures("own_environment")

GOOD = """\
schema: 1
name: guard
spans:
  instruction: {message: system}
  data: {message: user}
observe:
  focus: {site: attention_mass, heads: [[1, 2]], rows: last_prompt, keys: [instruction, data]}
  state: {site: resid_post, layers: [3], positions: prompt}
analyze:
  injection: {analyzer: attention_tracker, observe: focus}
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def invoke(*args):
        return runner.invoke(cli.app, [str(a) for a in args])

    return invoke


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A folder with nothing but the configuration of a small Llama."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    }
    (folder / "config.json").write_text(json.dumps(text))
    return folder


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "guard.yaml"
    path.write_text(GOOD)
    return path


COMMANDS = {"check", "run", "rerank", "sites", "import", "show", "bench", "demo"}
BUILD = {"heads", "rerank-heads", "vector", "probe"}


def test_commands_are_those_of_the_contract(run):
    names = {c.name or c.callback.__name__ for c in cli.app.registered_commands}
    assert names == COMMANDS
    out = run("--help").output
    assert all(name in out for name in COMMANDS)
    assert "vllm-hook demo" in out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches_by_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"vllm-hook {command}" in result.output


@pytest.mark.parametrize("command", sorted(BUILD))
def test_every_build_command_teaches_by_example(run, command):
    result = run("build", command, "--help")
    assert result.exit_code == 0
    assert f"vllm-hook build {command}" in result.output


def test_the_group_of_builds_teaches_by_example(run):
    assert "vllm-hook build heads smollm2" in run("build", "--help").output


def test_build_commands_are_those_of_the_contract():
    (group,) = (g for g in cli.app.registered_groups if g.name == "build")
    assert {c.name or c.callback.__name__ for c in group.typer_instance.registered_commands} == BUILD


def test_help_is_quick_and_light():
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_hook.cli import app; "
        "r = CliRunner().invoke(app, ['--help']); "
        "print(r.exit_code, [m for m in ('torch', 'vllm', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"
    assert time.perf_counter() - start < 10  # well under 1 s on an idle machine


# -- check --------------------------------------------------------------------------------------


def test_check_without_a_model(run, good):
    result = run("check", good)
    assert result.exit_code == 0
    assert "valid" in result.output
    assert "observe: focus, state" in result.output


def test_check_without_a_model_finds_names_and_options(run, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        GOOD.replace("keys: [instruction, data]", "keys: [instruction, dta]").replace("_tracker", "_traker")
    )
    result = run("check", bad)
    assert result.exit_code == 1
    assert "2 problems" in result.output
    assert "observe.focus.keys[1]: unknown span 'dta'; did you mean 'data'?" in result.output
    assert "analyze.injection.analyzer: unknown analyzer 'attention_traker'; did you mean" in result.output


def test_a_program_that_does_nothing(run, tmp_path, config):
    (tmp_path / "nothing.yaml").write_text("schema: 1\nname: nothing\n")
    for more in ((), ("--model", config)):
        result = run("check", "nothing.yaml", *more)
        assert result.exit_code == 1
        assert "does nothing: give observe" in result.output


def test_commands_take_the_names_of_programs_that_ship(run, config, tmp_path):
    result = run("check", "smollm2-list")
    assert result.exit_code == 0
    assert "program 'smollm2-list'" in result.output
    result = run("run", config, "smollm2-list", "-p", "x")
    assert "the program is for 30, this model has 4" in result.output
    (tmp_path / "d.jsonl").write_text('"text"')
    result = run("rerank", config, "-q", "x", "-d", "d.jsonl", "--heads", "smollm2-rerank")
    assert result.exit_code == 1
    assert "--heads: the model has no head 18-6" in result.output
    result = run("check", "smollm2-lst")
    assert result.exit_code == 1
    assert "did you mean the program that ships, 'smollm2-list'?" in result.output


def test_a_name_on_the_hub_is_printed_as_it_was_given(run):
    assert "error: hf://org/file: is not a program on the hub" in run("check", "hf://org/file").output


@pytest.mark.parametrize("command", ["check", "run", "rerank"])
def test_help_says_what_a_program_may_be(run, command):
    text = " ".join(run(command, "--help").output.replace("│", " ").split())
    assert "hf://" in text
    assert "ships" in text


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nofolder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("guard.yaml", "is a file; give the folder"),
        ("smolm2", "did you mean 'smollm2'?"),
        ("", "neither a folder nor a Hugging Face id"),
    ],
)
def test_a_model_that_is_none(run, good, model, message):
    for command in (("sites", model), ("check", good, "-m", model), ("run", model, good, "-p", "x")):
        result = run(*command)
        assert result.exit_code == 1
        assert message in result.output


def test_every_kind_of_wrong_file_has_a_message(run, tmp_path, config):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "folder").mkdir()
    for name in ("empty", "binary", "list.yaml", "folder", "missing"):
        for command in (
            ("check", name),
            ("run", config, name, "-p", "x"),
            ("run", config, "smollm2-list", "--prompts", name),
            ("rerank", config, "-q", "x", "-d", name),
            ("import", name),
            ("show", name),
            ("build", "heads", config, name),
        ):
            result = run(*command)
            assert result.exit_code == 1, command
            assert isinstance(result.exception, SystemExit), command
            assert "error:" in result.output or "invalid:" in result.output, command


def test_output_that_cannot_be_written_is_said_before_the_work(run, good, config, tmp_path):
    (tmp_path / "file").write_text("")
    good.write_text(GOOD.replace("spans:", "spans:  # plain"))
    for command in (
        ("run", config, good, "-p", "x", "--save", "file"),
        ("demo", "-o", "file"),
        ("bench", "-o", "file/bench.json"),
        ("check", "--schema", "-o", "file/schema.json"),
    ):
        result = run(*command)
        assert result.exit_code == 1
        assert "error: file: is a file; a folder is needed" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ("run", "x", "p.yaml", "--dtype", "float31"),
        ("bench", "--cpu", "--dtypes", "float31"),
        ("build", "vector", "x", "--dtype", "float31"),
    ],
)
def test_an_unknown_dtype(run, command):
    result = run(*command)
    assert result.exit_code == 2
    assert "unknown value 'float31'" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--gpu"], "there is no GPU here"), (["--only", "32 sites"], "engines of the bench on a GPU")],
)
def test_options_of_the_bench_that_need_a_gpu(run, options, message):
    result = run("bench", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_check_with_a_model_says_what_it_arms(run, good, config):
    result = run("check", good, "--model", config, "--max-num-seqs", 8, "--max-num-batched-tokens", 100)
    assert result.exit_code == 0, result.output
    assert "attention layer 1 (last), resid_post layer 3 (all)" in result.output
    # queries of one layer for 8 rows, a stream of width 64 for 100, 2 bytes a value, and two row tables
    tables = 4 * (2 * 48 + (8 + 100) * 9)  # a header a site; a record and a line of a list a row
    assert f"{((4 * 32 * 8 + 64 * 100) * 2 + tables) / 1024:.1f} KiB" in result.output
    assert "prefix cache" in result.output


def test_check_says_which_heads_are_kept(run, tmp_path, config):
    program = tmp_path / "p.yaml"
    program.write_text(
        "schema: 1\nname: p\nobserve:\n  some: {site: z, layers: [1], heads: [0, 1], positions: prompt}\n"
        "  all: {site: z, layers: [1], positions: prompt}\n"
    )
    lines = [line.split("│") for line in run("check", program, "--model", config).output.splitlines()]
    where = {cells[1].strip(): cells[3].strip() for cells in lines if len(cells) > 4}
    assert where == {"some": "layers 1, heads 0 1", "all": "layers 1"}


def test_check_says_what_an_intervention_changes(run, tmp_path, config):
    save_file({"v": torch.ones(64)}, tmp_path / "v.safetensors")
    edit = "{site: resid_post, layers: [1, 3], method: add, vector: v.safetensors, strength: 2}"
    attend = "{site: attention, heads: [[1, 0]], method: attend, keys: [s], rows: generated, mass: 0.5}"
    program = tmp_path / "p.yaml"
    program.write_text(
        f"schema: 1\nname: p\nspans: {{s: {{tokens: [0, 4]}}}}\nintervene: {{e: {edit}, a: {attend}}}\n"
    )
    lines = run("check", program, "--model", config).output.splitlines()
    [e] = [line.split("│") for line in lines if "│ e " in line]
    assert [cell.strip() for cell in e[1:5]] == ["e", "resid_post", "layers 1 3", "all"]
    assert "method: add, vector: v.safetensors, strength: 2.0" in " ".join(e)
    [a] = [line.split("│") for line in lines if "│ a " in line]
    assert [cell.strip() for cell in a[1:5]] == ["a", "attention", "heads 1-0", "generated"]
    assert "method: attend, keys: [s], mass: 0.5" in " ".join(a)


def test_check_reports_all_problems_with_lines(run, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("rows: last_prompt", "row: last_prompt").replace("resid_post", "resid_pots"))
    result = run("check", bad)
    assert result.exit_code == 1
    assert "2 problems" in result.output
    assert "line 7, observe.focus.row: unknown key; did you mean 'rows'?" in result.output
    assert "line 8, observe.state.site" in result.output
    assert "Traceback" not in result.output


def test_check_against_a_model_that_it_does_not_fit(run, tmp_path, config):
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("layers: [3]", "layers: [4]").replace("[[1, 2]]", "[[1, 9]]"))
    result = run("check", bad, "--model", config)
    assert result.exit_code == 1
    assert "layer 4 does not exist" in result.output
    assert "head 9 does not exist" in result.output


def test_check_of_no_file_no_model_no_argument(run, good, tmp_path):
    assert run("check", tmp_path / "nothing.yaml").exit_code == 1
    (tmp_path / "empty").mkdir()
    result = run("check", good, "--model", tmp_path / "empty")
    assert result.exit_code == 1
    assert "no configuration" in result.output
    assert run("check").exit_code == 2
    result = run("chekc", good)
    assert result.exit_code == 2
    assert "Did you mean 'check'?" in result.output


def test_markup_in_a_message_is_printed_as_it_is(run, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("[[1, 2]]", "[[red], [1, 2]]"))
    result = run("check", bad)
    assert result.exit_code == 1
    assert "heads[0]" in result.output


def test_schema_to_stdout_and_to_a_file(run, tmp_path):
    shown = run("check", "--schema")
    assert json.loads(shown.output)["title"] == "vLLM Hook program"
    assert run("check", "--schema", "-o", "s.json").exit_code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(shown.output)


def test_the_environment_of_the_user_wins(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    environment.for_engine("org/model")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "HF_HUB_OFFLINE" not in os.environ
    environment.for_engine(tmp_path)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


# -- sites --------------------------------------------------------------------------------------


def test_sites_lists_every_site_with_its_row(run, config):
    from vllm_hook.sites import SITES

    result = run("sites", config)
    assert result.exit_code == 0
    assert all(name in result.output for name in SITES)
    assert "4 layers, 4 heads of 32, 2 KV heads, width 64" in result.output
    assert "2 x 32" in result.output


def test_model_facts_of_what_is_no_decoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(HookError, match="not a decoder"):
        describe.model_facts(str(tmp_path))


# -- run (what happens before an engine starts) -------------------------------------------------


def test_prompts_of_every_form(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"instruction": "Say x", "data": "text", "style": "normal"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "plain"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second, third = offline.read_prompts(path)
    assert [m["content"] for m in first["messages"]] == ["Say x", "Data: text"]
    assert first["style"] == "normal"
    assert second == rows[1]
    assert third == rows[2]


@pytest.mark.parametrize(("line", "message"), [("{", "line 2: is not JSON"), ('{"a": 1}', "line 2: needs")])
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(HookError, match=message):
        offline.read_prompts(path)


def test_run_refuses_before_it_starts_anything(run, good, config, tmp_path):
    assert run("run", config, good).exit_code == 2
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    result = run("run", config, good, "--prompts", "p.jsonl")
    assert result.exit_code == 1
    assert "is not a conversation" in result.output
    good.write_text(GOOD.replace("layers: [3]", "layers: [7]"))
    result = run("run", config, good, "-p", "hello")
    assert result.exit_code == 1
    assert "layer 7 does not exist" in result.output


# -- import -------------------------------------------------------------------------------------

OLD = {
    "model_info": {"name": "Tracker", "model_id": "org/model"},
    "params": {"important_heads": [[1, 2]], "temperature": 0.5},
    "hookq": {"hookq_mode": "last_token"},
}


def test_import_writes_a_program(run, tmp_path):
    (tmp_path / "old.json").write_text(json.dumps(OLD))
    result = run("import", "old.json", "-o", "new.yaml")
    assert result.exit_code == 0, result.output
    assert "note:" in result.output
    program = load(tmp_path / "new.yaml").program
    assert program.name == "tracker"
    assert program.observe["focus"].heads == ((1, 2),)
    again = run("import", "old.json", "-o", "new.yaml")
    assert again.exit_code == 1
    assert "--force" in again.output
    assert run("import", "old.json", "-o", "new.yaml", "--force").exit_code == 0


def test_import_prints_by_default(tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    with pytest.raises(SystemExit) as stop:
        cli.app(["import", str(path)])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "tracker"


def test_import_of_something_else(run, tmp_path):
    (tmp_path / "old.json").write_text("[]")
    result = run("import", "old.json")
    assert result.exit_code == 1
    assert "error:" in result.output


# -- show ---------------------------------------------------------------------------------------


def result_of(score, tokens=6):
    weights = torch.softmax(torch.arange(2 * tokens, dtype=torch.float32).reshape(2, 1, tokens), -1)
    attention = Observed("attention", weights, [tokens - 1], [1, 3], [(1, 2), (3, 0)])
    return HookResult(
        {"guard/attention": attention},
        {"guard/injection": Score(score, score <= 0.5, {"threshold": 0.5})},
        programs=[("guard", "0" * 64)],
        spans={"guard/instruction": [(0, 2)], "guard/data": [(3, 5)]},
    )


@pytest.fixture
def results(tmp_path):
    items = [
        saved.Saved(f"{i:04d}", result_of(score), list("abcdef"), style, f"prompt {i} <b>", "out")
        for i, (score, style) in enumerate(
            [(0.9, "normal"), (0.2, "ignore"), (0.8, "normal"), (0.1, "ignore")]
        )
    ]
    return saved.save(tmp_path / "results", items)


def test_saved_results_come_back(results):
    items = saved.load([results])
    assert [i.name for i in items] == ["0000", "0001", "0002", "0003"]
    assert items[1].style == "ignore"
    assert items[1].tokens == list("abcdef")
    row = saved.attention_row(items[0])
    assert row is not None
    assert row.heads == [(1, 2), (3, 0)]
    assert row.spans == {"instruction": (0, 2), "data": (3, 5)}
    assert torch.equal(row.weights, items[0].result.observed["attention"].values[:, 0])


def test_spans_of_another_program_serve_where_the_own_has_none():
    result = result_of(0.9)
    result.spans = ById({"other/data": [(3, 5)], "other/docs": [(0, 1), (1, 2)]})
    assert saved.attention_row(saved.Saved("x", result, list("abcdef"))).spans == {"data": (3, 5)}


def test_scores_are_grouped_by_style(results):
    groups = saved.scores_by_style(saved.load([results]))
    by_style, threshold = groups["guard/injection"]
    assert by_style == {"normal": [0.9, 0.8], "ignore": [0.2, 0.1]}
    assert threshold == 0.5


@pytest.mark.parametrize("name", ["page.html", "deep/image.png"])
def test_show_writes_a_page_or_an_image(run, results, tmp_path, name):
    result = run("show", results, "-o", name)
    assert result.exit_code == 0, result.output
    content = (tmp_path / name).read_bytes()
    if name.endswith(".png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert content.count(b"data:image/png;base64,") == 2
        assert b"prompt 0 &lt;b&gt;" in content


def test_show_without_the_words_still_draws_scores(run, results, tmp_path):
    for path in results.glob("*.json"):
        path.unlink()
    assert run("show", results, "-o", "page.html").exit_code == 0
    assert (tmp_path / "page.html").read_bytes().count(b"data:image/png;base64,") == 1


def test_show_refuses_what_it_cannot_read(run, results, tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"no")
    (tmp_path / "empty").mkdir()
    (tmp_path / "guard.yaml").write_text(GOOD)
    assert "is no saved result" in run("show", "guard.yaml").output
    for what in ("junk.safetensors", "empty", "missing.safetensors"):
        result = run("show", what)
        assert result.exit_code == 1
        assert what in result.output.replace("\n", "")
    assert run("show", results, "-o", "page.pdf").exit_code == 1


def test_table_of_results(results):
    from rich.console import Console

    console = Console(width=140)
    with console.capture() as capture:
        console.print(offline.result_table(saved.load([results])))
    text = capture.get()
    assert "FLAGGED" in text
    assert "injection" in text
