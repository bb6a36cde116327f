"""What reranking reads is defined once: head finding, the reranker and programs read the same tokens."""

import pytest
import torch

import tiny
from characters import PLAIN, TRIMS, CharTokenizer
from vllm_hook import analyzers
from vllm_hook.build import prompts, records
from vllm_hook.build.heads import packaged
from vllm_hook.build.rerank_heads import rerank_program_parts
from vllm_hook.errors import HookError, SpanError
from vllm_hook.program.check import check
from vllm_hook.program.load import load
from vllm_hook.program.resolve import Prompt, resolve
from vllm_hook.rerank_prompt import make_content, make_prompt, render_chat
from vllm_hook.results import Observed
from vllm_hook.sites import ModelFacts

SMALL = ModelFacts("m", layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576)
LARGE = ModelFacts("m", layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096)
FILES = {
    packaged("x").parents[2] / "programs" / f"{name}.yaml": facts
    for name, facts in (
        ("smollm2-rerank", SMALL),
        ("mistral-7b-rerank", LARGE),
        ("llama3.1-8b-rerank", LARGE),
    )
}
BUILT = {"schema": 1, "name": "built", **rerank_program_parts([(1, 2)])}
#: As models have them: plain; trimming; one whose mark of a turn looks like that of a document; one with a
#: blank line behind the query, and a system message that holds a mark and a blank line.
TEMPLATES = {
    "plain": PLAIN,
    "trims": TRIMS,
    "mistral": "<s>{% for m in messages %}[INST] {{ m.content }}[/INST]{% endfor %}",
    "llama": "<system>\n\nBe [a] friend.\n\n{% for m in messages %}<{{ m.role }}>\n\n{{ m.content | trim }}"
    "<eot><assistant>\n\n{% endfor %}",
}
QUERY = "what is a[i] in [old] programs?"
DOCUMENTS = ["The first [of three] texts.", "Another\none.", "Query: a third."]


def three_characters(template):
    """Tokens that reach over the borders of words."""
    return CharTokenizer(template, width=3)


def tokenizers(folder):
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(str(tiny.make_tokenizer(folder)))
    yield "tiny", real
    for name, template in TEMPLATES.items():
        yield name, three_characters(template)


def found_by_program(source, facts, tokenizer, query, documents, given=None):
    """(rows, documents) where a program that is given the chat reads."""
    content, _, _ = make_content(query, documents)
    text, messages = render_chat(tokenizer, [("user", content)])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    checked = check(load(source), facts)
    view = Prompt(encoded["input_ids"], text, [tuple(o) for o in encoded["offset_mapping"]], messages)
    found = resolve(checked, view, given)
    (observation,) = found.observations
    (analysis,) = checked.analyses
    return list(observation.rows), ranked(found.spans, dict(analysis.options), list(observation.rows), view)


def ranked(spans, options, rows, view):
    """The documents that the analyzer ranks, each told by attention of its own size."""
    analyzer = analyzers.get("core_reranker")
    width = len(view)
    positions = [p for a, b in rows for p in range(a, b)]
    kept = []
    for place in range(width):
        values = torch.zeros(1, len(positions), width)
        values[:, :, place] = 1
        scores = score(analyzer, values, positions, spans, options).details["scores"]
        kept.append([i for i, s in enumerate(scores) if s > 0.5])
    count = len(scores)
    return [
        (min(places), max(places) + 1)
        for places in ([p for p in range(width) if i in kept[p]] for i in range(count))
    ]


def score(analyzer, values, positions, spans, options):
    seen = {"a": Observed("attention", values, positions, [1], [(1, 0)], None)}
    plain = {name: list(ranges) for name, ranges in spans.items()}
    return analyzer.score(seen, plain, analyzer.Options(**options))


@pytest.mark.parametrize(
    "source", [BUILT, *FILES], ids=lambda s: s["name"] if isinstance(s, dict) else s.stem
)
def test_programs_builds_and_the_reranker_read_the_same_tokens(source, tmp_path):
    facts = FILES.get(source, SMALL) if not isinstance(source, dict) else SMALL
    for name, tokenizer in tokenizers(tmp_path):
        prompt = make_prompt(tokenizer, QUERY, DOCUMENTS)
        rows, documents = found_by_program(source, facts, tokenizer, QUERY, DOCUMENTS)
        assert rows == [prompt.query], name
        assert documents == prompt.documents, name
        query = records.Query(1, "q", QUERY, tuple(DOCUMENTS), (1, 0, 0))
        built = prompts.rerank_prompt(tokenizer, query, [0, 1, 2])
        assert (list(built.ids), built.rows, list(built.keys)) == (prompt.ids, prompt.query, prompt.documents)


def test_rows_begin_with_please_and_end_with_the_query():
    """By hand, in characters: the definition that all share is the published one."""
    tokenizer = three_characters(TEMPLATES["llama"])
    prompt = make_prompt(tokenizer, QUERY, DOCUMENTS)
    text, _ = render_chat(tokenizer, [("user", make_content(QUERY, DOCUMENTS)[0])])
    first, last = text.index("Please find"), text.index(QUERY) + len(QUERY) - 1
    assert prompt.query == (first // 3, last // 3 + 1)
    starts = [text.index(d) for d in DOCUMENTS]
    assert prompt.documents == [
        (s // 3, (s + len(d) - 1) // 3 + 1) for s, d in zip(starts, DOCUMENTS, strict=True)
    ]


def test_a_request_gives_exact_spans_where_documents_hold_blank_lines():
    tokenizer = three_characters(TEMPLATES["plain"])
    documents = ["one\n\ntwo [x] three", "four\n\nQuery: five"]
    prompt = make_prompt(tokenizer, QUERY, documents)
    given = {name: tuple(span) for name, span in prompt.spans().items()}
    rows, found = found_by_program(BUILT, SMALL, tokenizer, QUERY, documents, given)
    assert (rows, found) == ([prompt.query], prompt.documents)


def test_another_prompt_is_refused_by_what_it_lacks():
    tokenizer = three_characters(TEMPLATES["plain"])
    text, messages = render_chat(tokenizer, [("user", "Which of these is best? [1] a\n\n[2] b\n\n")])
    offsets = tokenizer(text, False)["offset_mapping"]
    view = Prompt(list(range(len(offsets))), text, offsets, messages)
    with pytest.raises(SpanError, match=r"program 'built', spans.*the prompt has no text"):
        resolve(check(load(BUILT), SMALL), view)


def test_documents_outside_their_bounds_are_none():
    analyzer = analyzers.get("core_reranker")
    spans = {"docs": [(0, 2), (4, 6), (8, 9)], "opening": [(0, 3)], "asking": [(7, 10)]}
    values = torch.zeros(1, 1, 11)
    values[..., 4:6] = 0.5
    options = {"documents": "docs", "after": "opening", "before": "asking"}
    assert score(analyzer, values, [10], spans, options).details["scores"] == [1.0]
    with pytest.raises(HookError, match=r"none of the spans 'docs' lies behind 'opening'"):
        score(analyzer, values, [10], {**spans, "docs": [(0, 2)]}, options)
    with pytest.raises(HookError, match=r"no spans 'asked', only docs"):
        score(analyzer, values, [10], spans, {**options, "before": "asked"})
