"""Selectors and spans on prompts."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hook.errors import SpanError
from vllm_hook.program.check import check
from vllm_hook.program.load import load
from vllm_hook.program.resolve import (
    MessageText,
    Prompt,
    ResolvedProgram,
    locate_messages,
    resolve,
    token_offsets_by_decoding,
    union,
)
from vllm_hook.program.spans import TokenMap
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("m", layers=4, heads=2, kv_heads=1, head_dim=8, hidden=16)
END = 10_000  # stands for "as far as generation goes" in brute-force sets

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def members(ranges: Any) -> set[int]:
    return {i for start, end in ranges for i in range(start, END if end is None else end)}


def run(
    prompt: Prompt, selectors: Any = "all", overrides: Any = None, name: str = "p", **sections: Any
) -> ResolvedProgram:
    program = {"schema": 1, "name": name, "observe": {"o": {"site": "q", "positions": selectors}}, **sections}
    return resolve(check(load(program), FACTS), prompt, overrides)


def rows(selectors: Any, prompt: Prompt) -> Any:
    return run(prompt, selectors).observations[0].rows


def by_words(text: str, messages: tuple[MessageText, ...] | None = None) -> Prompt:
    """One token a word, with the space before it, and a special token of no characters first."""
    offsets = [(0, 0)] + [m.span() for m in re.finditer(r"\s*\S+", text)]
    return Prompt(list(range(len(offsets))), text, offsets, messages)


# -- selectors ----------------------------------------------------------------------------------

TEN = Prompt([7, 8, 9, 7, 8, 9, 7, 8, 9, 5])


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ("all", ((0, None),)),
        ("prompt", ((0, 10),)),
        ("generated", ((10, None),)),
        ("last_prompt", ((9, 10),)),
        ({"range": [2, 5]}, ((2, 5),)),
        ({"range": [-3, -1]}, ((7, 9),)),
        ({"range": [-3, None]}, ((7, 10),)),
        ({"range": [0, 10]}, ((0, 10),)),
        ({"range": [4, -4]}, ((4, 6),)),
        ({"generated": [0, 3]}, ((10, 13),)),
        ({"generated": [2, None]}, ((12, None),)),
        ({"token_ids": [9, 5]}, ((2, 3), (5, 6), (8, 10))),
        (["last_prompt", {"generated": [0, 3]}], ((9, 13),)),
        (["generated", "last_prompt", {"range": [0, 2]}], ((0, 2), (9, None))),
        (["prompt", "generated"], ((0, None),)),
    ],
)
def test_rows(selectors: Any, expected: Any) -> None:
    assert rows(selectors, TEN) == expected


def test_token_ids_also_watch_the_generation() -> None:
    observation = run(TEN, [{"token_ids": [7]}, {"token_ids": [6, 7]}]).observations[0]
    assert observation.token_ids == {6, 7}
    assert run(TEN, "all").observations[0].token_ids == frozenset()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ([5, 11], "program 'p', observe.o.positions: range [5, 11] reaches outside the prompt of 10 tokens"),
        ([-11, -1], "range [-11, -1] reaches outside the prompt of 10 tokens"),
        ([5, -5], "range [5, -5] is empty in the prompt of 10 tokens"),
        ([10, None], "range [10, null] is empty in the prompt of 10 tokens"),
    ],
)
def test_ranges_must_fit_the_prompt(pair: Any, message: str) -> None:
    with pytest.raises(SpanError) as error:
        rows({"range": pair}, TEN)
    assert message in str(error.value)
    with pytest.raises(SpanError, match=r"observe\.o\.positions\[1\]: range"):
        rows(["all", {"range": pair}], TEN)


def test_an_empty_prompt_has_no_last_position() -> None:
    with pytest.raises(SpanError, match=r"observe\.o\.positions: the prompt is empty"):
        rows("last_prompt", Prompt([]))
    assert rows("all", Prompt([])) == ((0, None),)


@given(st.lists(st.tuples(st.integers(0, 50), st.one_of(st.none(), st.integers(0, 50))), max_size=8))
def test_union_against_sets(ranges: list[tuple[int, int | None]]) -> None:
    merged = union(ranges)
    assert members(merged) == members(ranges)
    ends = [END if end is None else end for _, end in merged]
    assert all(start < end for (start, _), end in zip(merged, ends, strict=True))
    # disjoint and not even touching, in order
    assert all(end < start for end, (start, _) in zip(ends, merged[1:], strict=False))


SELECTORS = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "last_prompt"]),
    st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda p: p[0] < p[1]).map(
        lambda p: {"range": list(p)}
    ),
    st.tuples(st.integers(-10, -2), st.integers(-9, -1)).filter(lambda p: p[0] < p[1]).map(
        lambda p: {"range": list(p)}
    ),
    st.tuples(st.integers(0, 5), st.integers(1, 9)).filter(lambda p: p[0] < p[1]).map(
        lambda p: {"generated": list(p)}
    ),
    st.lists(st.sampled_from([5, 7, 8, 9, 1]), min_size=1).map(lambda ids: {"token_ids": ids}),
)  # fmt: skip


def selected(selector: Any, position: int) -> bool:
    """The definition of a selector, one position at a time (for the prompt of ten tokens)."""
    if isinstance(selector, str):
        return {
            "all": True,
            "prompt": position < 10,
            "generated": position >= 10,
            "last_prompt": position == 9,
        }[selector]
    if "range" in selector:
        start, end = (x + 10 if x < 0 else x for x in selector["range"])
        return start <= position < end
    if "generated" in selector:
        return selector["generated"][0] <= position - 10 < selector["generated"][1]
    return position < 10 and TEN.token_ids[position] in selector["token_ids"]


@settings(max_examples=60, deadline=None)
@given(st.lists(SELECTORS, min_size=1, max_size=4))
def test_selectors_against_their_definition(selectors: list[Any]) -> None:
    found = members(rows(selectors, TEN))
    assert found == {i for i in range(END) if any(selected(s, i) for s in selectors)}


# -- spans --------------------------------------------------------------------------------------

TEXT = "You are good . Data: <d> one two </d> and <d> three </d> end"
#       You=1 are=2 good=3 .=4 Data:=5 <d>=6 one=7 two=8 </d>=9 and=10 <d>=11 three=12 </d>=13 end=14
PROMPT = by_words(TEXT, (MessageText("system", 0, 14), MessageText("user", 15, len(TEXT))))


def spans(prompt: Prompt = PROMPT, overrides: Any = None, **named: Any) -> Any:
    """Resolve the spans by selecting each; the last one is asked for."""
    name = list(named)[-1]
    return run(prompt, {"span": name}, overrides, spans=named)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ({"message": "system"}, (1, 5)),
        ({"message": "user"}, (5, 15)),
        ({"message": "user", "index": 0}, (5, 15)),
        ({"message": "user", "index": -1}, (5, 15)),
        ({"message": "user", "after": "Data: "}, (6, 15)),
        ({"message": "user", "before": " and"}, (5, 10)),
        ({"message": "user", "after": "<d> ", "before": " </d>"}, (7, 9)),
        ({"between": ["<d> ", " </d>"]}, (7, 9)),
        ({"text": "one two"}, (7, 9)),
        ({"text": "ne"}, (7, 8)),
        ({"tokens": [3, 6]}, (3, 6)),
        ({"tokens": [-2, None]}, (13, 15)),
    ],
)
def test_spans(span: Any, expected: tuple[int, int]) -> None:
    resolved = spans(s=span)
    assert resolved.spans == {"s": (expected,)}
    assert resolved.observations[0].rows == (expected,)


def test_lists_of_spans() -> None:
    docs = {"docs": {"between": ["<d> ", " </d>"], "each": True}, "all": {"message": "user"}}
    mass = {"site": "attention_mass", "rows": "last_prompt", "keys": ["docs", "all", "docs[1]"]}
    resolved = run(PROMPT, {"span": "docs"}, spans=docs, observe={
        "m": mass,
        "r": {"site": "q", "positions": {"span": "docs"}},
        "one": {"site": "q", "positions": {"span": "docs[1]"}},
    })  # fmt: skip
    mass_keys, both, one = resolved.observations
    assert mass_keys.keys == (
        ("docs[0]", ((7, 9),)),
        ("docs[1]", ((12, 13),)),
        ("all", ((5, 15),)),
        ("docs[1]", ((12, 13),)),
    )
    assert both.rows == ((7, 9), (12, 13))
    assert one.rows == ((12, 13),)
    assert resolved.spans["docs"] == ((7, 9), (12, 13))
    assert resolved.spans["docs[1]"] == ((12, 13),)
    with pytest.raises(
        SpanError, match=r"observe\.o\.positions: docs\[2\] does not exist: the prompt has 2 of"
    ):
        run(PROMPT, {"span": "docs[2]"}, spans=docs)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"message": "tool"}, "spans.s: the chat has no 'tool' message (it has 0 of this role)"),
        (
            {"message": "user", "index": 1},
            "spans.s: the chat has no 'user' message number 1 (it has 1 of this role)",
        ),
        ({"message": "user", "after": "xyz"}, "spans.s: the 'user' message has no text 'xyz'"),
        (
            {"message": "user", "after": "end", "before": "one"},
            "the 'user' message has no text 'one' to end at",
        ),
        ({"message": "user", "after": " end"}, "spans.s: the span is empty: the 'user' message"),
        ({"message": "system", "after": "Data"}, "the 'system' message has no text 'Data'"),
        ({"between": ["<e>", "</e>"]}, "spans.s: the prompt has no text between '<e>' and '</e>'"),
        (
            {"between": ["<d>", "nope"], "each": True},
            "spans.s: the prompt has no text between '<d>' and 'nope'",
        ),
        ({"text": "four"}, "spans.s: the prompt has no text 'four'"),
        ({"tokens": [3, 16]}, "spans.s: range [3, 16] reaches outside the prompt of 15 tokens"),
    ],
)
def test_what_is_not_found_is_named(span: Any, message: str) -> None:
    with pytest.raises(SpanError) as error:
        spans(s=span)
    assert str(error.value).startswith("program 'p', ")
    assert message in str(error.value)


def test_an_empty_member_of_a_list_is_named() -> None:
    prompt = by_words("<d> a </d> <d></d>")
    with pytest.raises(SpanError, match="the span number 1 is empty"):
        spans(prompt, s={"between": ["<d>", "</d>"], "each": True})


def test_prompts_without_text_or_messages() -> None:
    plain = Prompt([1, 2, 3])
    with pytest.raises(SpanError, match=r"spans\.s: needs the text of the prompt, which came as token ids"):
        spans(plain, s={"text": "x"})
    with pytest.raises(SpanError, match=r"spans\.s: needs the text of the prompt"):
        spans(Prompt([1, 2], text="a b"), s={"text": "a"})
    with pytest.raises(SpanError, match=r"spans\.s: needs a chat request to find the 'user' message in"):
        spans(by_words("a b"), s={"message": "user"})
    with pytest.raises(SpanError, match="the chat template drops or rewrites the 'user' message"):
        spans(by_words("a b", (MessageText("user", -1, -1),)), s={"message": "user"})
    with pytest.raises(SpanError, match="1 token offsets for a prompt of 2 tokens"):
        spans(Prompt([1, 2], "a b", [(0, 1)]), s={"text": "a"})


def test_only_what_is_used_is_resolved() -> None:
    unused = {"bad": {"text": "not there"}, "good": {"text": "one"}}
    assert run(PROMPT, "all", spans=unused).spans == {}
    analyze = {"a": {"analyzer": "x", "observe": "o", "options": {"where": "good"}}}
    assert run(PROMPT, "all", spans=unused, analyze=analyze).spans == {"good": ((7, 8),)}
    analyze["a"]["options"] = {"where": "bad"}
    with pytest.raises(SpanError, match="no text 'not there'"):
        run(PROMPT, "all", spans=unused, analyze=analyze)


def test_overrides() -> None:
    text, docs = {"text": "x"}, {"between": ["<d>", "</d>"], "each": True}
    plain = Prompt(list(range(20)))
    assert spans(plain, {"s": (2, 5), "other": (90, 99)}, s=text).spans == {"s": ((2, 5),)}
    assert spans(plain, {"s[0]": (2, 5), "s[1]": (7, 9)}, s=docs).spans["s"] == ((2, 5), (7, 9))
    assert spans(plain, {"s": (2, 5)}, s=docs).spans["s[0]"] == ((2, 5),)
    with pytest.raises(
        SpanError, match=r"spans\.s: the request gives tokens \[2, 21\] of a prompt of 20 tokens"
    ):
        spans(plain, {"s": (2, 21)}, s=text)
    with pytest.raises(SpanError, match=r"the request gives s\[1\]; number them from 0"):
        spans(plain, {"s[1]": (2, 5)}, s=docs)


def test_edits_are_resolved() -> None:
    edits = {
        "e": {
            "site": "resid_post",
            "method": "ablate",
            "vector": "v",
            "positions": ["generated", {"token_ids": [3]}],
        },
        "l": {
            "site": "attention",
            "method": "attend",
            "heads": [[0, 1]],
            "rows": "prompt",
            "keys": ["s"],
            "weight": 2,
        },
    }
    resolved = run(PROMPT, "all", spans={"s": {"text": "one"}}, intervene=edits)
    assert [(e.id, e.rows, e.token_ids, e.keys) for e in resolved.edits] == [
        ("e", ((3, 4), (15, None)), frozenset({3}), ()),
        ("l", ((0, 15),), frozenset(), (("s", ((7, 8),)),)),
    ]


OFFSETS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12)


@given(OFFSETS, st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_token_map_against_definition(
    steps: list[tuple[int, int]], start: int, end: int, shuffle: bool
) -> None:
    offsets: list[tuple[int, int]] = []
    at = 0
    for gap, length in steps:
        offsets.append((at + gap, at + gap + length))
        at += gap + length
    if shuffle:
        offsets = offsets[::2] + offsets[1::2]
    hits = [i for i, (s, e) in enumerate(offsets) if e > s and any(start <= c < end for c in range(s, e))]
    assert TokenMap(offsets).tokens(start, end) == ((hits[0], hits[-1] + 1) if hits else None)


# -- chat templates -----------------------------------------------------------------------------


def renderer(template: str, roles: list[str]) -> Callable[[list[str]], str]:
    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)

    def render(contents: list[str]) -> str:
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        return compiled.render(messages=messages)

    return render


def located(template: str, *messages: tuple[str, str]) -> list[str | None]:
    text, found = locate_messages(messages, renderer(template, [role for role, _ in messages]))
    assert text == renderer(template, [r for r, _ in messages])([c for _, c in messages])
    assert [m.role for m in found] == [role for role, _ in messages]
    return [text[m.start : m.end] if m.found else None for m in found]


def test_messages_are_found_by_marks_not_by_words() -> None:
    text, found = locate_messages(
        [("system", "user"), ("user", " user\n")], renderer(CHATML, ["system", "user"])
    )
    assert text == (
        "<|im_start|>system\nuser<|im_end|>\n<|im_start|>user\n user\n<|im_end|>\n<|im_start|>assistant"
    )
    assert [(m.start, m.end) for m in found] == [(19, 23), (52, 56)]
    assert text[46:57] == "user\n user\n"  # the role is not taken for the content


def test_templates_that_trim() -> None:
    trimming = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    assert located(trimming, ("user", "  hello  "), ("user", "\n")) == ["hello", ""]


def test_templates_that_drop_a_message() -> None:
    no_system = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert located(no_system, ("system", "be good"), ("user", "be good")) == [None, "be good"]


def test_templates_that_cut_a_message() -> None:
    cutting = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert located(cutting, ("assistant", "<think>x</think>yes"), ("user", "go")) == [None, "go"]


def test_templates_that_look_at_the_content() -> None:
    # Marks change the branch taken for the first message, so it is searched for.
    peeking = (
        "{% for m in messages %}{% if m.content.startswith('/') %}CMD{% else %}MSG{% endif %} "
        "{{ m.content }};{% endfor %}"
    )
    assert located(peeking, ("user", "/go"), ("user", "MSG"), ("user", "/go")) == ["/go", "MSG", "/go"]
    text, found = locate_messages([("user", "/go"), ("user", "MSG")], renderer(peeking, ["user", "user"]))
    assert text == "CMD /go;MSG MSG;"
    assert [(m.start, m.end) for m in found] == [(4, 7), (12, 15)]


def test_templates_that_escape() -> None:
    escaping = "{% for m in messages %}{{ m.content | tojson }}\n{% endfor %}"
    assert located(escaping, ("user", "plain"), ("user", "it's")) == ["plain", None]


def test_contents_that_hold_the_marks() -> None:
    content = "a\U000f0000b\U000f0001"
    assert located(CHATML, ("system", content), ("user", "x")) == [content, "x"]


def test_repeated_messages_count_once() -> None:
    twice = "{% for m in messages %}{{ m.content }}|{{ m.content }};{% endfor %}"
    text, found = locate_messages([("user", "ab"), ("user", "ab")], renderer(twice, ["user", "user"]))
    assert text == "ab|ab;ab|ab;"
    assert [(m.start, m.end) for m in found] == [(0, 2), (6, 8)]


# -- offsets by decoding ------------------------------------------------------------------------


def byte_decoder(pieces: list[bytes]) -> Callable[[list[int]], str]:
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


def test_offsets_of_whole_words() -> None:
    decode = byte_decoder([b"", b"Hello", b" world"])
    assert token_offsets_by_decoding([0, 1, 2, 2], decode) == [(0, 0), (0, 5), (5, 11), (11, 17)]
    assert token_offsets_by_decoding([], decode) == []


def test_offsets_of_split_characters() -> None:
    smile = "\U0001f600".encode()
    decode = byte_decoder([b"a", smile[:1], smile[1:3], smile[3:] + b"b", b"c"])
    # a, then three tokens that share one character, the last of which goes on
    assert token_offsets_by_decoding([0, 1, 2, 3, 4], decode) == [(0, 1), (1, 2), (1, 2), (1, 3), (3, 4)]
    # a prompt that ends inside a character
    assert token_offsets_by_decoding([0, 1], decode) == [(0, 1), (1, 2)]


def test_offsets_with_a_decoder_that_trims_its_first_token() -> None:
    words = [" Hello", " world", "!"]
    decode = lambda ids: "".join(words[i] for i in ids).removeprefix(" ")  # noqa: E731
    assert token_offsets_by_decoding([0, 1, 1, 2], decode) == [(0, 5), (5, 11), (11, 17), (17, 18)]


def test_offsets_with_a_decoder_that_windows_do_not_explain() -> None:
    # Joins "a b" to "ab" only over the whole text, as clean-up rules of some tokenizers do.
    words = ["a", " b", " c"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("a b c", "abc")  # noqa: E731
    offsets = token_offsets_by_decoding([0, 1, 2, 1], decode)
    assert offsets[-1][1] == len("abc b")
    assert all(s <= e for s, e in offsets)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.data())
def test_offsets_cover_the_text(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", errors="replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    bounds = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(bounds)]
    decode = byte_decoder(pieces)
    offsets = token_offsets_by_decoding(list(range(len(pieces))), decode)
    whole = raw.decode()
    for (start, end), a, b in zip(offsets, bounds, bounds[1:], strict=False):
        # every character that has a byte in the token is covered
        char_of = [i for i, c in enumerate(whole) for _ in c.encode()]
        assert all(start <= c < end for c in char_of[a:b]) or "\ufffd" in whole
    assert all(e <= len(whole) for _, e in offsets)
