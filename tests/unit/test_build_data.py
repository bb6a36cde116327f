"""Examples for building: what is wrong is named by line and field; splits; prompts and their spans."""

import json

import pytest

from characters import PLAIN, TRIMS, CharTokenizer
from vllm_hook.build import prompts, records
from vllm_hook.errors import HookError, SpanError
from vllm_hook.program.check import check
from vllm_hook.program.load import load
from vllm_hook.program.resolve import Prompt as View
from vllm_hook.program.resolve import resolve
from vllm_hook.rerank_prompt import render_chat
from vllm_hook.sites import ModelFacts

INJECTIONS = [
    {"id": f"i{n}", "style": style, "instruction": "Say apple", "data": f"text {n}", "group": f"g{n // 2}"}
    for n, style in enumerate(["normal", "ignore"] * 4)
]
PAIRS = [{"with": f"q{n} list", "without": f"q{n} plain"} for n in range(4)]
LABELLED = [{"label": n % 2, "prompt": f"prompt {n}"} for n in range(6)]
QUERIES = [
    {"query": f"q{n}", "documents": [{"text": "a", "grade": 2}, {"text": "b", "grade": 0}]} for n in range(3)
]
READERS = {
    "injection": (records.read_injections, INJECTIONS),
    "pair": (records.read_pairs, PAIRS),
    "labelled": (records.read_labelled, LABELLED),
    "query": (records.read_queries, QUERIES),
}


def write(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", READERS)
def test_good_data_of_every_kind(tmp_path, kind):
    read, rows = READERS[kind]
    found, source = read(write(tmp_path, rows))
    assert len(found) == len(rows)
    assert [r.line for r in found] == list(range(1, len(rows) + 1))
    assert source.name == "data.jsonl"
    assert len(source.digest) == 64


def test_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\ufeff\n" + "\n\n".join(map(json.dumps, PAIRS)) + "\n", encoding="utf-8")
    found, _ = records.read_pairs(path)
    assert [r.line for r in found] == [2, 4, 6, 8]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "holds no examples"),
        (["{"], "line 1: is not JSON"),
        (["[1]"], "line 1: is not an object"),
        ([{"a": 1}], "line 1, "),
    ],
)
def test_bad_files_of_every_kind(tmp_path, kind, rows, says):
    with pytest.raises(HookError, match=says):
        READERS[kind][0](write(tmp_path, rows))


@pytest.mark.parametrize("kind", READERS)
def test_duplicates_are_refused_by_content_and_by_id(tmp_path, kind):
    read, rows = READERS[kind]
    again = {k: v for k, v in rows[0].items() if k != "id"}
    with pytest.raises(HookError, match=rf"line {len(rows) + 1}: the same example as on line 1"):
        read(write(tmp_path, [*rows, again]))
    with pytest.raises(HookError, match=r"line 2, id: 'x' is that of line 1"):
        read(write(tmp_path, [{**rows[0], "id": "x"}, {**rows[1], "id": "x"}]))


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_cannot_be_read(tmp_path, kind):
    with pytest.raises(HookError, match="cannot be read"):
        READERS[kind][0](tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(HookError, match="not UTF-8 text"):
        READERS[kind][0](tmp_path / "latin.jsonl")


def test_one_class_is_not_enough(tmp_path):
    with pytest.raises(HookError, match="style: all 4 examples are normal"):
        records.read_injections(write(tmp_path, INJECTIONS[::2]))
    with pytest.raises(HookError, match="label: all 3 examples have label 1"):
        records.read_labelled(write(tmp_path, LABELLED[1::2]))
    with pytest.raises(HookError, match="holds 1 pairs"):
        records.read_pairs(write(tmp_path, PAIRS[:1]))


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("injection", {"style": "normal", "instruction": "x"}, "line 1, data: is missing"),
        (
            "injection",
            {"style": "normal", "instruction": " ", "data": "x"},
            "line 1, instruction: must be text",
        ),
        ("pair", {"with": "a", "without": "a"}, "line 1, with: is the same"),
        ("pair", {"with": [{"role": "user"}], "without": "a"}, r"line 1, with\[0\]: must be"),
        ("pair", {"with": [], "without": "a"}, "line 1, with: has no message"),
        ("labelled", {"label": 2, "prompt": "x"}, "line 1, label: must be 0 or 1, not 2"),
        ("labelled", {"prompt": "x"}, "line 1, label: must be 0 or 1, not None"),
        (
            "query",
            {"query": "q", "documents": [{"text": "a", "grade": 1}]},
            "line 1, documents: must be a list",
        ),
        (
            "query",
            {"query": "q", "documents": [{"text": "a", "grade": 1}, {"text": "a", "grade": 0}]},
            r"line 1, documents\[1\].text: is that of documents\[0\]",
        ),
        (
            "query",
            {"query": "q", "documents": [{"text": "a", "grade": 1}, {"text": "b", "grade": 0.5}]},
            r"documents\[1\].grade: must be",
        ),
        (
            "query",
            {"query": "q", "documents": [{"text": "a", "grade": 0}, {"text": "b", "grade": 0}]},
            "no document has a grade above 0",
        ),
        (
            "query",
            {"query": "q", "documents": [{"text": "a", "grade": 1}, {"text": "b", "grade": 2}]},
            "no document has grade 0",
        ),
    ],
)
def test_bad_fields_are_named(tmp_path, kind, row, says):
    with pytest.raises(HookError, match=says):
        READERS[kind][0](write(tmp_path, [row]))


def test_injections_serve_as_labelled_data(tmp_path):
    found, _ = records.read_labelled(write(tmp_path, INJECTIONS))
    assert [r.label for r in found] == [0, 1] * 4
    assert found[0].messages == (("system", "Say apple"), ("user", "Data: text 0"))
    assert found[3].group == "g1"


# -- splits -------------------------------------------------------------------------------------


def labelled(groups, labels):
    return [
        records.Labelled(i, f"id{i}", label, (("user", f"p{i}"),), group)
        for i, (group, label) in enumerate(zip(groups, labels, strict=True))
    ]


def test_a_split_keeps_strata_and_order_and_depends_on_the_seed_only():
    found = labelled([None] * 40, [0, 1] * 20)
    first, second = records.split(found, 0.25, 3, lambda r: r.label)
    assert (len(first), len(second)) == (30, 10)
    assert sum(r.label for r in second) == 5
    assert [r.line for r in first] == sorted(r.line for r in first)
    assert records.split(found, 0.25, 3, lambda r: r.label) == (first, second)
    assert records.split(found, 0.25, 4, lambda r: r.label)[1] != second


def test_a_split_does_not_part_groups():
    found = labelled([f"g{i // 4}" for i in range(40)], [0, 0, 1, 1] * 10)
    first, second = records.split(found, 0.3, 0, lambda r: r.label, lambda r: r.group)
    assert not {r.group for r in first} & {r.group for r in second}
    assert len(second) == 12


def test_a_split_of_few_leaves_something_on_both_sides():
    found = labelled([None] * 4, [0, 0, 1, 1])
    first, second = records.split(found, 0.01, 0, lambda r: r.label)
    assert sorted(r.label for r in first) == sorted(r.label for r in second) == [0, 1]


def test_held_out_data_must_be_other_data(tmp_path):
    found, _ = records.read_pairs(write(tmp_path, PAIRS))
    with pytest.raises(HookError, match=r"held.jsonl, line 1: the same example as on line 1"):
        records.refuse_overlap(found, found, tmp_path / "held.jsonl")


# -- prompts ------------------------------------------------------------------------------------


def cut(prompt, pair):
    return "".join(map(chr, prompt.ids[slice(*pair)]))


@pytest.mark.parametrize("template", [PLAIN, TRIMS])
def test_rerank_spans_are_the_documents_and_the_query(template):
    query = records.Query(7, "q", "Who?", ("first text", "second", "third"), (2, 0, 0))
    prompt = prompts.rerank_prompt(CharTokenizer(template), query, [2, 0, 1], "d.jsonl")
    assert [cut(prompt, key) for key in prompt.keys] == ["first text", "second", "third"]
    assert cut(prompt, prompt.rows).startswith("Please find information that are relevant")
    assert cut(prompt, prompt.rows).endswith("Query: Who?")
    text = "".join(map(chr, prompt.ids))
    assert text.index("[document 1] third\n\n[document 2] first text\n\n[document 3] second\n\nPlease") > 0
    assert prompt.where == "d.jsonl, line 7"


def test_a_rerank_prompt_that_a_template_rewrites_is_refused_with_the_line():
    class Shouting(CharTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            return super().apply_chat_template(messages, **kwargs).upper()

    class Refusing(CharTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            raise RuntimeError("no user turns")

    query = records.Query(7, "q", "Who?", ("first text", "second"), (2, 0))
    with pytest.raises(SpanError, match=r"d.jsonl, line 7: the chat template rewrites"):
        prompts.rerank_prompt(Shouting(), query, [0, 1], "d.jsonl")
    with pytest.raises(HookError, match=r"d.jsonl, line 7: the chat template refuses .* no user turns"):
        prompts.rerank_prompt(Refusing(), query, [0, 1], "d.jsonl")


def test_the_order_of_documents_depends_on_seed_and_query():
    one = records.Query(1, "a", "q", tuple("abcdefghij"), (1, *[0] * 9))
    two = records.Query(1, "b", "q", one.documents, one.grades)
    assert sorted(prompts.document_order(one, 0)) == list(range(10))
    assert prompts.document_order(one, 0) == prompts.document_order(one, 0)
    assert prompts.document_order(one, 0) != prompts.document_order(one, 1)
    assert prompts.document_order(one, 0) != prompts.document_order(two, 0)


def test_tracker_rows_and_keys():
    record = records.Injection(3, "i", "normal", "abc", "say abc")
    prompt = prompts.tracker_prompt(CharTokenizer(), record)
    assert [cut(prompt, key) for key in prompt.keys] == ["abc", "say abc"]
    assert prompt.rows == (len(prompt) - 1, len(prompt))


@pytest.mark.parametrize("template", [PLAIN, TRIMS])
def test_white_space_around_a_message_is_of_no_span_whatever_the_template_does(template):
    """Many templates trim: the same tokens are read, and they are those that the guard's program reads."""
    record = records.Injection(3, "i", "normal", "abc\n", "say abc \n\n")
    tokenizer = CharTokenizer(template)
    prompt = prompts.tracker_prompt(tokenizer, record)
    assert [cut(prompt, key) for key in prompt.keys] == ["abc", "say abc"]
    assert "abc\n" in cut(prompt, (0, len(prompt))) or template is TRIMS
    contents = [("system", record.instruction), ("user", "Data: " + record.data)]
    text, messages = render_chat(tokenizer, contents)
    guard = {
        "schema": 1,
        "name": "g",
        "spans": {"instruction": {"message": "system"}, "data": {"message": "user", "after": "Data: "}},
        "observe": {
            "m": {"site": "attention_mass", "layers": [0], "rows": "prompt", "keys": ["instruction", "data"]}
        },
    }
    facts = ModelFacts("m", layers=1, heads=1, kv_heads=1, head_dim=4, hidden=4)
    offsets = [(i, i + 1) for i in range(len(text))]
    found = resolve(check(load(guard), facts), View(prompt.ids, text, offsets, messages))
    assert (found.spans["instruction"], found.spans["data"]) == tuple((key,) for key in prompt.keys)


def test_a_template_that_drops_the_system_message_is_refused_with_the_line():
    class Dropping(CharTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            return super().apply_chat_template(messages[1:], **kwargs)

    record = records.Injection(3, "i", "normal", "abc", "text")
    with pytest.raises(SpanError, match="data, line 3"):
        prompts.tracker_prompt(Dropping(), record)


def test_an_answer_that_is_begun_is_continued():
    messages = (("user", "hi"), ("assistant", "Well"))
    prompt = prompts.chat_prompt(CharTokenizer(), messages, "w")
    assert cut(prompt, (0, len(prompt))) == "<user>hi<a>Well"
    with pytest.raises(HookError, match="no message but"):
        prompts.chat_prompt(CharTokenizer(), messages[1:], "w")


def test_prompts_beyond_the_models_length_are_named():
    short, long = (prompts.Prompt(tuple(range(n)), f"d, line {n}") for n in (5, 9))
    assert prompts.check_lengths([short, long], 10, room=1) == 9
    with pytest.raises(HookError, match=r"d, line 9: the prompt has 9 tokens and 2 to generate; .* is 10"):
        prompts.check_lengths([short, long], 10, room=2)
    with pytest.raises(HookError, match="single token"):
        prompts.check_lengths([prompts.Prompt((1,), "d")], 10)
