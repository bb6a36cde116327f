"""Reranking without an engine: prompts, windows, heads, the command, and what a shortened engine takes."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tiny
import vllm_hook
from vllm_hook import cli, offline
from vllm_hook.engine import truncate
from vllm_hook.engine.settings import parse_config
from vllm_hook.errors import CapacityError, HookError, ProgramError, SiteError, SpanError, UnsupportedError
from vllm_hook.program.load import load
from vllm_hook.rerank import Ranked, engine, make_prompt, program, read_heads, rerank, spread


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def test_the_package_offers_function_and_module():
    """Importing the module puts it in the function's place; both have to work, in any order."""
    assert vllm_hook.rerank.rerank is rerank
    assert vllm_hook.rerank.engine is engine
    with pytest.raises(UnsupportedError, match="needs a HookLLM"):
        vllm_hook.rerank(None, "query", ["document"])
    assert vllm_hook.Ranked is Ranked


# -- prompt -------------------------------------------------------------------------------------

DOCUMENTS = ["The quick brown fox.", "  Paris is a capital.\n", "The quick brown fox."]


def words(tokenizer, prompt, span):
    return tokenizer.decode(prompt.ids[span[0] : span[1]])


def test_prompt_is_the_published_one_in_the_users_turn(tokenizer):
    prompt = make_prompt(tokenizer, " the train ", DOCUMENTS)
    assert tokenizer.decode(prompt.ids) == (
        "user:  Here are some paragraphs:\n\n[document 1] The quick brown fox.\n\n"
        "[document 2] Paris is a capital.\n\n[document 3] The quick brown fox.\n\n"
        "Please find information that are relevant to the following query in the paragraphs above.\n\n"
        "Query: the train\nassistant:"
    )


def test_spans_cover_documents_and_query_and_nothing_else(tokenizer):
    prompt = make_prompt(tokenizer, "the train", DOCUMENTS)
    texts = [words(tokenizer, prompt, span).strip() for span in prompt.documents]
    assert texts == [d.strip() for d in DOCUMENTS]
    assert prompt.documents[0][1] < prompt.documents[1][0] < prompt.documents[2][0]
    asked = words(tokenizer, prompt, prompt.query).strip()
    assert asked.startswith("Please find information")
    assert asked.endswith("Query: the train")
    assert prompt.query[1] < len(prompt.ids)  # the template's suffix follows, and has no row


def test_the_calibration_shares_all_tokens_before_the_query(tokenizer):
    query, nothing = (make_prompt(tokenizer, q, DOCUMENTS) for q in ("who painted it?", "N/A"))
    assert query.query[0] == nothing.query[0]
    assert query.ids[: query.query[0]] == nothing.ids[: query.query[0]]
    assert query.documents == nothing.documents


def test_a_template_that_strips_moves_the_spans(tokenizer):
    plain = make_prompt(tokenizer, "the train", DOCUMENTS)
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("m['content']", "m['content'] | trim")
    try:
        stripped = make_prompt(tokenizer, "the train", DOCUMENTS)
        texts = [words(tokenizer, stripped, span).strip() for span in stripped.documents]
        tokenizer.chat_template = None
        bare = make_prompt(tokenizer, "the train", DOCUMENTS)
        tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
        with pytest.raises(SpanError, match="rewrites"):
            make_prompt(tokenizer, "the train", DOCUMENTS)
    finally:
        tokenizer.chat_template = template
    assert len(stripped.ids) <= len(plain.ids)
    assert texts == [d.strip() for d in DOCUMENTS]
    assert words(tokenizer, bare, bare.documents[1]).strip() == "Paris is a capital."
    assert bare.query[1] == len(bare.ids)


def test_an_empty_document_is_named(tokenizer):
    with pytest.raises(SpanError, match="document 1 of this prompt is empty"):
        make_prompt(tokenizer, "q", ["one", " \n", "three"])


# -- windows ------------------------------------------------------------------------------------


def test_windows_are_as_few_and_as_even_as_can_be():
    assert spread([10] * 7, 50) == [[0, 1, 2, 3], [4, 5, 6]]  # not five and two
    assert spread([10] * 5, 50) == [[0, 1, 2, 3, 4]]
    assert spread([], 50) == []
    with pytest.raises(CapacityError, match="document 1 takes 51 tokens, and a prompt has room for 50"):
        spread([10, 51], 50)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(30, 60))
def test_windows_against_brute_force(lengths, most):
    windows = spread(lengths, most)
    assert [i for w in windows for i in w] == list(range(len(lengths)))
    assert all(w for w in windows)
    loads = [sum(lengths[i] for i in w) for w in windows]
    assert max(loads) <= most
    best = {0: (0, 0)}  # documents placed -> (windows, largest load): fewest windows, then the evenest
    for end in range(1, len(lengths) + 1):
        options = [
            (best[start][0] + 1, max(best[start][1], sum(lengths[start:end])))
            for start in range(end)
            if sum(lengths[start:end]) <= most
        ]
        best[end] = min(options)
    assert len(windows) == best[len(lengths)][0]


# -- heads --------------------------------------------------------------------------------------


def test_heads_from_text_list_and_program(tmp_path):
    assert read_heads("8-3,12-0") == [(8, 3), (12, 0)]
    assert read_heads([[8, 3]]) == [(8, 3)]
    assert read_heads("all") is read_heads(None) is None
    file = tmp_path / "r.json"
    file.write_text(json.dumps(program([(2, 1), (1, 3)])))
    assert read_heads(str(file)) == [(2, 1), (1, 3)]
    file.write_text(json.dumps(program(None)))
    with pytest.raises(HookError, match="no attention of chosen heads"):
        read_heads(file)
    for bad in ("8:3", [], [(1, 2, 3)], [(1, -2)], "8-3-1"):
        with pytest.raises(HookError, match="heads"):
            read_heads(bad)


def test_programs_of_other_heads_have_other_names():
    a, b = program([(1, 2)]), program([(1, 3)])
    assert a["name"] != b["name"]
    assert load(a).program.observe["rows"].site == "attention"
    assert load(program(None)).program.observe["rows"].layers == "all"


# -- command ------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """What would be given to an engine, instead of starting one."""
    calls = []
    monkeypatch.setattr("vllm_hook.llm.HookLLM", lambda model, **given: calls.append(given))
    return calls


@pytest.mark.parametrize("heads", [[(4, 0)], "3-3,2-4", [(1, 1), (9, 9)]])
def test_a_head_outside_the_model_starts_no_engine(tiny_dir, started, heads):
    environment = dict(os.environ)
    with pytest.raises(SiteError, match=r"heads: the model has no head .*layers are 0 to 3, .*heads 0 to 3"):
        engine(str(tiny_dir("llama")), heads)
    assert not started
    assert dict(os.environ) == environment


@pytest.mark.parametrize(("model", "more"), [("no/such", {}), (None, {"hf_overrides": {}})])
def test_heads_of_a_model_that_is_not_known_are_left_to_vllm(tiny_dir, started, model, more):
    engine(model or str(tiny_dir("llama")), [(40, 0)], **more)
    assert started[0]["layers_up_to"] == 41


@pytest.fixture
def ranked(monkeypatch, tmp_path):
    """The command with a stand-in for the engine: the longest document wins."""
    seen = {}

    def rank(model, query, texts, heads, top_k, whole, **settings):
        seen.update(model=model, query=query, heads=heads, whole=whole, **settings)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))[:top_k]
        return [Ranked(i, len(texts[i]) / 10, texts[i]) for i in order]

    monkeypatch.setattr(offline, "rank", rank)
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "short"}\n\n"a [bold] longer one"\n{"text": "middling", "id": 3}\n')

    def run(*args):
        return CliRunner().invoke(cli.app, ["rerank", "m", "-q", "which?", "-d", str(file), *args]), seen

    return run


def test_command_prints_a_table_or_json(ranked):
    result, seen = ranked("--top-k", "2")
    assert result.exit_code == 0, result.output
    assert "a [bold] longer one" in result.output
    assert "middling" in result.output
    assert "short" not in result.output
    assert (seen["heads"], seen["whole"], seen["dtype"]) == ("all", False, "auto")
    result, seen = ranked("--json", "--heads", "1-2", "--whole")
    rows = json.loads(result.output)
    assert [r["index"] for r in rows] == [1, 2, 0]
    assert rows[0] == {"index": 1, "score": 1.9, "window": 0, "text": "a [bold] longer one"}
    assert (seen["heads"], seen["whole"]) == ("1-2", True)


def test_table_says_when_there_were_several_prompts():
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(offline.ranking_table("q", [Ranked(0, 0.5, "a", 1), Ranked(1, 0.25, "b", 0)]))
    assert "in 2 prompts" in capture.get()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: is not JSON"),
        ('"a"\n{"txt": "b"}', "line 2: needs a text"),
        ('""', "line 1: needs"),
        ("\n", "no documents"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path, content, message):
    file = tmp_path / "d.jsonl"
    file.write_text(content)
    with pytest.raises(HookError, match=message):
        offline.read_documents(file)


def test_wrong_heads_are_said_before_an_engine_starts(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('"a"')
    result = CliRunner().invoke(cli.app, ["rerank", "nowhere", "-q", "q", "-d", str(file), "--heads", "x"])
    assert result.exit_code == 1
    assert "neither layer-head pairs" in " ".join(result.output.split())


# -- shortened engines --------------------------------------------------------------------------


def test_weights_of_later_layers_are_left_out():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up.weight",
        "model.layers.2.mlp.experts.7.up.weight",  # expert 7 of layer 2
        "model.layers.3.mlp.up.weight",
        "model.layers.12.mlp.up.weight",
        "transformer.h.11.attn.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    kept = [n for n, _ in truncate.first_layers([(n, None) for n in names], 3)]
    assert kept == [names[i] for i in (0, 1, 2, 6, 7)]
    with pytest.raises(UnsupportedError, match="layers_up_to=14, but the model has 13 layers"):
        list(truncate.first_layers([(n, None) for n in names], 14))


def test_only_one_token_without_logprobs_is_taken():
    def params(**changes):
        return SimpleNamespace(**{"max_tokens": 1, "logprobs": None, "prompt_logprobs": None, **changes})

    truncate.check_params(params(), 3)
    for bad in ({"max_tokens": 2}, {"max_tokens": None}, {"logprobs": 0}, {"prompt_logprobs": 1}):
        with pytest.raises(UnsupportedError, match="only the first 3 layers"):
            truncate.check_params(params(**bad), 3)


def test_the_setting_is_checked():
    assert parse_config({"layers_up_to": 3}).layers_up_to == 3
    for bad in (0, -1, "half"):
        with pytest.raises(ProgramError, match="layers_up_to"):
            parse_config({"layers_up_to": bad})
    config = SimpleNamespace(additional_config={"vllm_hook": {"layers_up_to": 3}})
    assert truncate.kept_layers(config) == 3
    for other in ({}, {"vllm_hook": {}}, None):
        assert truncate.kept_layers(SimpleNamespace(additional_config=other)) is None


def test_attention_needs_no_more_than_the_scores(tokenizer):
    """The sum over heads of the mean over rows, on the documents' tokens, is all that is read."""
    from vllm_hook.analyzers.core_reranker import document_scores, token_attention

    prompt = make_prompt(tokenizer, "the train", DOCUMENTS)
    rows = torch.rand(2, prompt.query[1] - prompt.query[0], len(prompt.ids))
    scores = document_scores(token_attention(rows), None, prompt.documents)
    rows[:, :, prompt.query[0] :] = 9.0
    rows[:, :, : prompt.documents[0][0]] = 9.0
    assert torch.equal(document_scores(token_attention(rows), None, prompt.documents), scores)
