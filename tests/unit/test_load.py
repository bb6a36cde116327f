"""Reading files: every error at once, with field and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hook.errors import ProgramError
from vllm_hook.program.load import MAX_BYTES, load, load_text
from vllm_hook.program.schema import Program

MINIMAL = "schema: 1\nname: p\n"


def fails(text: str | bytes) -> ProgramError:
    with pytest.raises(ProgramError) as error:
        load_text(text, "p.yaml", Path("."))
    assert error.value.source == "p.yaml"
    return error.value


def problems(text: str | bytes) -> list[tuple[int | None, str, str]]:
    return [(p.line, p.field, p.message) for p in fails(text).problems]


def test_sources(tmp_path: Path) -> None:
    file = tmp_path / "guard.yaml"
    file.write_text(MINIMAL)
    from_path, from_str = load(file), load(str(file))
    assert from_path == from_str
    assert (from_path.source, from_path.base_dir) == (str(file), tmp_path)
    from_dict = load({"schema": 1, "name": "p"})
    assert (from_dict.source, from_dict.base_dir) == ("program 'p'", Path.cwd())
    program = Program.model_validate({"schema": 1, "name": "p"})
    assert load(program).program is program
    for other in (from_dict, load(MINIMAL), load('{"schema": 1, "name": "p"}'), load("{schema: 1, name: p}")):
        assert other.program == from_path.program
    with pytest.raises(ProgramError, match="give a path, a dict or a Program, not int"):
        load(3)  # type: ignore[arg-type]


def test_all_errors_at_once_with_lines() -> None:
    text = """schema: 1
name: Bad
spans:
  data:
    message: user
    afterr: "x"
observe:
  focus:
    site: attention_mass
    heads:
      - [1, 2]
      - [3]
  state: {layers: [1]}
"""
    assert problems(text) == [
        (
            2,
            "name",
            "'Bad' is not a valid program name: lower-case letters, digits, '.', '_', '-', at most 64",
        ),
        (6, "spans.data.afterr", "unknown key; did you mean 'after'?"),
        (12, "observe.focus.heads[1]", "write [layer, head]"),
        (13, "observe.state.site", "is required"),
    ]
    assert str(fails(text)).splitlines()[0] == "p.yaml: 4 problems"
    assert "  line 13, observe.state.site: is required" in str(fails(text))


def test_duplicate_keys() -> None:
    text = MINIMAL + "observe:\n  a: {site: q}\n  a: {site: k}\nname: r\n"
    assert problems(text) == [
        (5, "observe.a", "duplicate key, first on line 4"),
        (6, "name", "duplicate key, first on line 2"),
    ]
    assert problems('{"schema": 1,\n "name": "p",\n "name": "q"}') == [
        (3, "name", "duplicate key, first on line 2")
    ]


def test_aliases_and_merge_keys_are_refused() -> None:
    bomb = "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert problems(MINIMAL + bomb) == [(3, "", "anchors and aliases are not allowed")]
    assert problems(MINIMAL + "spans: *x\n") == [(3, "", "anchors and aliases are not allowed")]
    assert problems(MINIMAL + "model:\n  <<: {layers: 3}\n") == [
        (4, "model.<<", "merge keys are not allowed")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("- a\n", "a program is a mapping (schema: 1, name: ..), not a list"),
        ("just words\n", "not a text"),
        ("# only a comment\n", "not a null"),
        ("a: [1, 2\n", "is not valid YAML"),
        ("a: 1\n\tb: 2\n", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "is not valid YAML"),
        ("a: 2024-13-45\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: \x00\n", "is not valid YAML"),
        ("? [a, b]\n: 1\n", "a key must be text"),
        ("a: " + "[" * 5000, "is nested too deeply"),
        ("#" * (MAX_BYTES + 1), "is larger than 256 KiB"),
        (b"schema: 1\nname: \xff\n", "is not UTF-8 text (byte 16)"),
    ],
)
def test_what_is_not_a_program(text: str | bytes, message: str) -> None:
    assert message in str(fails(text))


def test_syntax_errors_have_a_line() -> None:
    assert fails("schema: 1\nname: [p\n").problems[0].line == 3
    assert fails(b"schema: 1\nname: \xff\n").problems[0].line == 2


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"none\.yaml: no such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ProgramError, match="is a directory, not a program file"):
        load(tmp_path)
    with pytest.raises(ProgramError, match="cannot be read"):
        load("a\0b")


def test_yaml_booleans_are_explained() -> None:
    [(line, field, message)] = problems("schema: 1\nname: no\n")
    assert (line, field) == (2, "name")
    assert "got false (YAML reads a bare yes, no, on or off as a boolean: quote it)" in message
    assert problems(MINIMAL + "observe:\n  on: {site: q}\n")[0][1] == "observe"


def test_numbers_in_exponent_form_are_numbers() -> None:
    edit = "{site: resid_post, method: add, vector: v, strength: %s}"
    for text, value in [("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+1", -25.0), ("4", 4.0)]:
        program = load(MINIMAL + "intervene:\n  e: " + edit % text).program
        assert program.intervene["e"].strength == value  # type: ignore[union-attr]


def test_json_with_tabs_surrogates_and_nan() -> None:
    text = '{\n\t"schema": 1,\n\t"name": "p",\n\t"spans": {"s": {"text": "\\ud83d\\ude00"}},\n\t"nam": 1\n}'
    assert problems(text) == [(5, "nam", "unknown key; did you mean 'name'?")]
    good = text.replace(',\n\t"nam": 1', "")
    assert load(good).program.spans["s"].text == "\U0001f600"  # type: ignore[union-attr]


def test_byte_order_mark() -> None:
    assert load_text(b"\xef\xbb\xbf" + MINIMAL.encode(), "p.yaml", Path(".")).program.name == "p"
