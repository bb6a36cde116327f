"""The steering demo: its rules on fixed strings, its questions, its shipped program, its figures."""

import io
import itertools
import json
import math
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from vllm_hook import show
from vllm_hook.build.records import read_pairs, refuse_overlap
from vllm_hook.build.sweep import Answer, repetition
from vllm_hook.demo import steer, steer_build, steer_data, steer_table
from vllm_hook.demo.behaviours import BEHAVIOURS, is_capitals, is_french, is_list, is_short
from vllm_hook.errors import HookError
from vllm_hook.runtime.loading import load_program
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts(id="smollm2", layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576)
SHIPPED = [name for name in BEHAVIOURS if steer.program_file(name).is_file()]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("THE SKY IS BLUE.", True),
        ("THE SKY, 3 TIMES: ÉTÉ!", True),
        ("THE SKY is", False),  # 6 of 8 letters
        ("ABCDEFGHij", True),  # 8 of 10
        ("The sky is blue.", False),
        ("123 !?", False),
        ("", False),
    ],
)
def test_capitals(text, holds):
    assert is_capitals(text) is holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Le ciel est bleu parce que la lumière du soleil est dispersée.", True),
        ("The sky is blue because the light of the sun is scattered.", False),
        ("Le ciel est bleu and the sun is in the sky.", False),
        ("Le ciel est la mer et le soleil, the sun.", True),  # 5 of 6
        ("le la", False),  # too few words to say
        ("Madrid. Paris. Tokyo.", False),
        ("", False),
    ],
)
def test_french(text, holds):
    assert is_french(text) is holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Some reasons:\n\n1. **Fear**: dogs bark", True),
        ("A hobby to consider: 1. Art: this is", True),
        ("* Painting", True),
        ("- Painting", True),
        ("1. 1.1.1.1.1.1", False),
        ("In 2021. The well-known - and old - town.", False),
        ("Plain words.", False),
        ("", False),
    ],
)
def test_list(text, holds):
    assert is_list(text) is holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [("Madrid.", True), ("a b c d e f g h i j", True), ("a b c d e f g h i j k", False), ("  ", False)],
)
def test_short(text, holds):
    assert is_short(text) is holds


def test_a_short_answer_must_have_ended():
    assert BEHAVIOURS["short"].shown("Madrid.", ended=True)
    assert not BEHAVIOURS["short"].shown("Madrid.", ended=False)
    assert BEHAVIOURS["capitals"].shown("MADRID", ended=False)


def test_repetition_is_one_minus_distinct_2():
    assert repetition([1, 2, 3, 4]) == 0
    assert repetition([1, 2, 1, 2, 1]) == 0.5
    assert repetition([7] * 5) == 0.75
    assert repetition([1]) == repetition([]) == 0


def test_questions_are_disjoint_and_ask_for_nothing():
    splits = {name: steer.read_questions(name) for name in ("pairs", "tune", "held_out")}
    questions = [r["question"] for records in splits.values() for r in records]
    assert len({q.lower() for q in questions}) == len(questions)
    assert len(splits["pairs"]) >= 30
    assert len(splits["held_out"]) >= 40
    for question in questions:
        assert not any(
            word in question.lower() for word in ("french", "capital letters", "words", "short", "list")
        )


def test_both_answers_of_a_pair_differ_in_the_behaviour():
    for record in steer.read_questions("pairs"):
        for name in ("capitals", "french"):
            with_, without = BEHAVIOURS[name].answers(record)
            assert BEHAVIOURS[name].shows(with_), with_
            assert not BEHAVIOURS[name].shows(without), without


def test_a_program_ships():
    assert SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_program_fits_the_model(name):
    loaded = load_program(steer.program_file(name), FACTS)
    assert loaded.name == f"smollm2-{name}"
    assert all(math.isfinite(float(t.norm())) and float(t.norm()) > 0 for t in loaded.tensors.values())
    assert steer.EDIT in loaded.checked.program.intervene
    assert (steer.program_file(name).with_suffix(".safetensors")).stat().st_size < 20_000


# -- figures of the demo ------------------------------------------------------------------------


def outcome(strength, texts, nll):
    return steer.Outcome(strength, [Answer(t, (1, 2), True, nll) for t in texts])


PLAIN = outcome(0.0, ["a b", "c d"], math.log(2))
LOUD = outcome(3.0, ["A B", "C d"], math.log(3))


def test_figures_by_hand():
    capitals = BEHAVIOURS["capitals"]
    assert (PLAIN.rate(capitals), LOUD.rate(capitals)) == (0.0, 0.5)
    assert LOUD.growth(PLAIN) == pytest.approx(1.5)
    assert LOUD.perplexity() == pytest.approx(3.0)


def test_perplexity_weighs_tokens():
    answers = [Answer("x", (1,), True, math.log(8)), Answer("y", (1, 2), True, 0.0)]
    assert steer.Outcome(1.0, answers).perplexity() == pytest.approx(2.0)


def test_the_demo_says_when_it_did_not_work():
    console = Console(file=io.StringIO(), width=200)
    half = steer.Outcome(3.0, [*LOUD.answers, Answer("c d", (1,), True, math.log(3))])
    plain = steer.Outcome(0.0, [*PLAIN.answers, PLAIN.answers[0]])
    assert not steer.verdict(BEHAVIOURS["capitals"], plain, half, console)  # a third is not enough
    assert "Outside its bounds" in console.file.getvalue()
    assert steer.verdict(BEHAVIOURS["capitals"], PLAIN, outcome(3.0, ["A", "B"], math.log(4)), console)
    assert not steer.verdict(BEHAVIOURS["capitals"], PLAIN, outcome(3.0, ["A", "B"], math.log(4.1)), console)


def test_pictures_and_tables(tmp_path):
    edit = {"method": "add", "site": "resid_post", "layers": [3], "positions": "generated"}
    paths = steer.draw(tmp_path, BEHAVIOURS["capitals"], edit, ["p?", "q?"], [PLAIN, LOUD], LOUD)
    assert [p.name for p in paths] == ["steer.png", "steer.html"]
    assert "C d" in paths[1].read_text("utf-8")
    assert steer.sweep_table(BEHAVIOURS["capitals"], edit, [PLAIN, LOUD], LOUD).row_count == 2
    assert steer.example_table(["p?", "q?"], PLAIN, LOUD).row_count == 2


def tried(rate, growth, repetition, layer=1):
    return steer_build.Tried(layer, PLAIN, rate, growth, repetition)


def test_the_best_setting_still_speaks():
    settings = [tried(0.9, 1.6, 0.1), tried(0.9, 1.5, 0.5), tried(0.7, 1.4, 0.2), tried(0.7, 1.3, 0.2)]
    assert steer_build.best(settings) is settings[3]
    assert steer_build.best(settings[:2]) is settings[0]  # none fits: least beyond the bounds
    assert not steer_build.best(settings[:2]).fits


def test_a_built_program_is_valid(tmp_path):
    chosen = steer_build.Tried(20, LOUD, 0.8, 1.4, 0.1)
    for behaviour in BEHAVIOURS.values():
        file = tmp_path / f"smollm2-{behaviour.name}.yaml"
        file.write_text(steer_build.program_text(behaviour, chosen, (36, 30, 576), 0.2, 9), "utf-8")
        save_file({"vector": torch.ones(576)}, file.with_suffix(".safetensors"))
        program = load_program(file, FACTS).checked.program.to_dict()
        assert program["intervene"][steer.EDIT]["positions"] == steer_build.POSITIONS
        assert program["intervene"][steer.EDIT]["strength"] == 3.0
        assert max(map(len, file.read_text("utf-8").splitlines())) <= 112


def test_a_sweep_needs_one_value_a_strength():
    with pytest.raises(HookError, match="one rate"):
        show.sweep_figure([1.0, 2.0], [0.1], [1.0, 1.0])


def test_an_unknown_behaviour_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(HookError, match="list, capitals, french, short"):
        steer.run_demo(tmp_path, "shouting")


# -- the table of behaviours and methods --------------------------------------------------------


@pytest.mark.parametrize("name", ["capitals", "french"])
def test_pairs_by_example_can_be_built_from_and_differ_in_the_behaviour(tmp_path, name):
    behaviour = BEHAVIOURS[name]
    pairs, _ = read_pairs(steer_data.example_file(behaviour, tmp_path))
    held, _ = read_pairs(steer_data.tune_file(behaviour, tmp_path))
    refuse_overlap(pairs, held, tmp_path)
    assert (len(pairs), len(held)) == (36, 10)
    for pair in pairs:
        for side, shows in ((pair.with_, True), (pair.without, False)):
            assert [role for role, _ in side][:5] == ["user", "assistant", "user", "assistant", "user"]
            assert all(behaviour.shows(text) is shows for role, text in side[:4] if role == "assistant")
        assert [t for r, t in pair.with_ if r == "user"] == [t for r, t in pair.without if r == "user"]
    assert all(
        with_.startswith(without) for with_, without in ((p.with_[0][1], p.without[0][1]) for p in held)
    )


def test_questions_that_choose_a_setting_are_in_no_pair(tmp_path):
    makers = (steer_data.instruction_file, steer_data.bare_file)
    for name, make in itertools.product(steer_data.SHOWS, makers):
        pairs, _ = read_pairs(make(BEHAVIOURS[name], tmp_path))
        held, _ = read_pairs(steer_data.tune_file(BEHAVIOURS[name], tmp_path))
        questions = {p.without[0][1] for p in held}
        assert questions == {r["question"] for r in steer.read_questions("tune")}
        assert len(pairs) == 36
        assert not [p for p in pairs if any(q in text for q in questions for _, text in p.with_)]


@pytest.mark.parametrize("name", steer_data.SHOWS)
def test_the_files_of_a_behaviour_are_apart_from_what_is_measured(tmp_path, name):
    pairs, chosen_by, shows = steer_data.default_files(name, tmp_path)
    made_from, held = read_pairs(pairs)[0], read_pairs(chosen_by)[0]
    assert (len(made_from), len(held), shows) == (36, 10, steer_data.SHOWS[name])
    questions = {r["question"] for r in steer.read_questions("held_out")}
    texts = [text for p in (*made_from, *held) for side in (p.with_, p.without) for _, text in side]
    assert not [t for t in texts if any(q in t for q in questions)]


@pytest.mark.parametrize("name", steer_data.SHOWS)
def test_what_a_sweep_looks_for_is_near_the_rule(name):
    """The regular expressions of the sweep against the rules that measure, on answers of all kinds."""
    pattern, behaviour = re.compile(steer_data.SHOWS[name], re.MULTILINE), BEHAVIOURS[name]
    records = steer.read_questions("pairs")
    texts = [t for r in records for t in (r["answer"], r["french"], r["answer"].upper())]
    texts += [f"Here you are:\n1. {r['answer']}" for r in records]
    same = [bool(pattern.search(t)) == behaviour.shows(t) for t in texts]
    assert sum(behaviour.shows(t) for t in texts) >= len(records)
    assert sum(same) >= 0.95 * len(same)


def test_the_table_counts_answers(tmp_path):
    file, clamp = steer.program_file("capitals"), tmp_path / "clamp.yaml"
    edit = {"site": "resid_post", "layers": [7], "method": "clamp", "vector": "v.safetensors", "target": 2.5}
    clamp.write_text(json.dumps({"schema": 1, "name": "c", "intervene": {"steer": edit}}))
    usual = tmp_path / "usual.yaml"  # a strength of 1 is the default, and not written out by all
    add = {**edit, "method": "add"}
    usual.write_text(
        json.dumps({"schema": 1, "name": "u", "intervene": {"steer": {k: add[k] for k in list(add)[:4]}}})
    )
    rows = [
        steer_table.Row("capitals", "examples", "clamp", clamp),
        steer_table.Row("capitals", "examples", "add", usual),
        steer_table.Row("capitals", "ships", "add", file),
        steer_table.Row("french", "examples", "clamp", None, "no setting"),
    ]
    text = steer_table.table(rows, PLAIN.answers, dict.fromkeys((file, clamp, usual), LOUD.answers))
    assert "| capitals | examples | clamp | 7 | 2.5 | 0 -> 1 |" in text
    assert "| capitals | examples | add | 7 | 1 | 0 -> 1 |" in text
    assert "| capitals | ships | add | 24 | 0.6 | 0 -> 1 | 1.50 | 0.00 |" in text
    assert "| french | examples | clamp | none |" in text
    assert text.endswith("french, examples, clamp: no setting")
