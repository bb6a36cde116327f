"""Figures, pages, and the tables of the demo; no model, no engine."""

import io

import matplotlib.image
import pytest
import torch

from vllm_hook import show
from vllm_hook.demo import make_data, tracker
from vllm_hook.errors import HookError

WEIGHTS = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.7, 0.1, 0.0, 0.2]])
HEADS = [(0, 1), (2, 3)]


def shown(figure, axes=0):
    return figure.axes[axes].images[0].get_array()


def test_attention_is_drawn_as_it_is_without_spans():
    figure = show.attention_figure(list("abcd"), WEIGHTS, HEADS, "title")
    assert torch.allclose(torch.tensor(shown(figure).data), WEIGHTS)
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["L0 H1", "L2 H3"]


def test_with_spans_rows_are_shares_of_the_spans():
    figure = show.attention_figure(list("abcd"), WEIGHTS, HEADS, spans={"inst": (1, 2), "data": (2, 4)})
    values = shown(figure)
    assert values.mask[:, 0].all()  # outside every span
    assert values[0, 1] == pytest.approx(0.1 / 0.5)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert "20%" in texts
    assert "33%" in texts


def test_panels_share_one_scale():
    figure = show.attention_figure([list("abcd"), list("ab")], [WEIGHTS, WEIGHTS[:, :2]], HEADS, ["x", "y"])
    first, second = (figure.axes[i].images[0].get_clim() for i in (0, 1))
    assert first == second


def test_weights_of_another_shape_are_refused():
    with pytest.raises(HookError, match="2 heads and 3 words"):
        show.attention_figure(list("abc"), WEIGHTS, HEADS)


def test_words_are_labels_not_markup():
    figure = show.attention_figure(["$x$", "\n", " ", "<b>" * 9], WEIGHTS, HEADS)
    labels = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert labels[0] == r"\$x\$"
    assert labels[1] == "\\n"
    assert len(labels[3]) == 14
    show.png(figure)  # would fail on mathtext


def test_scores_need_at_least_one_a_style():
    for empty in ({}, {"normal": []}):
        with pytest.raises(HookError):
            show.score_figure(empty)


def test_normal_styles_come_first_and_flags_are_counted():
    figure = show.score_figure({"ignore": [0.1, 0.6], "normal": [0.9]}, threshold=0.5)
    names = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert names == ["normal\n0 of 1 flagged", "ignore\n1 of 2 flagged"]


def test_a_page_needs_nothing_else_and_escapes(tmp_path):
    figure = show.score_figure({"normal": [0.9]})
    path = show.save_html(tmp_path / "p.html", {"<f>": figure}, [("<t>", ["a"], [["<script>"]])], "A & B")
    text = path.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "A &amp; B" in text
    assert "http" not in text.replace("http-equiv", "")
    assert matplotlib.image.imread(io.BytesIO(show.png(figure))).ndim == 3


# -- the demo -----------------------------------------------------------------------------------


def scored(gap=0.3):
    """The held-out prompts with made-up scores: attacks lower by ``gap``."""
    items = []
    for i, record in enumerate(make_data.held_out()):
        score = 0.5 + i / 2000 - (0 if record["style"] == "normal" else gap)
        items.append(tracker.Scored(record, score, score < 0.4, 20 + i % 5))
    return items


def test_the_demo_shows_forty_prompts_of_all_styles():
    table = tracker.prompt_table(scored())
    assert table.row_count >= 40
    assert set(table.columns[0].cells) >= {"normal", "disregard", "forget", "naive"}


def test_the_demo_says_when_it_did_not_work():
    assert tracker.quality_table(scored())[1]
    assert not tracker.quality_table(scored(gap=0.0))[1]
    longer = [tracker.Scored(s.record, s.score, s.flagged, 99 if s.flagged else 9) for s in scored()]
    assert not tracker.quality_table(longer)[1]


def test_the_pair_is_of_one_sentence_and_typical():
    items = scored()
    normal, attacked = tracker.typical_pair(items)
    assert normal.record["instruction"] == attacked.record["instruction"]
    assert (normal.record["style"], attacked.record["style"]) == ("normal", "disregard")


def test_the_cost_is_the_median_of_paired_rounds():
    cost = tracker.Cost(10, [1.0, 2.0, 4.0], [1.1, 2.0, 8.0])
    assert cost.ratio == pytest.approx(1.1)
    assert tracker.cost_table(cost).row_count == 2
    assert tracker.cost_table(tracker.Cost(10, [1.0], [1.0], 5, 2.0, 1e-6)).row_count == 3
