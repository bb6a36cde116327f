"""The reranking demo's figures by hand, its data, its tables and files."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from vllm_hook.demo import rerank as demo
from vllm_hook.errors import HookError

LINE = {"query": "q", "documents": [{"text": f"text {i}", "grade": g} for i, g in enumerate((2, 0, 1, 0))]}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_text("\n".join(json.dumps({**LINE, "query": f"q{i}"}) for i in range(3)) + "\n")
    return path


def test_ndcg_by_hand():
    grades = [2, 0, 1]
    best = 3 / 1 + 1 / math.log2(3)
    assert demo.ndcg([0.9, 0.1, 0.5], grades) == 1.0
    assert demo.ndcg([-3, -1, -2], grades) == pytest.approx((1 / math.log2(3) + 3 / 2) / best)
    assert demo.ndcg([0.9, 0.1, 0.5], grades, cut=1) == 1.0
    assert demo.ndcg([0, 1, -1], grades, cut=1) == 0.0


def test_equal_scores_share_their_gain_whatever_the_order():
    best = 3 + 1 / math.log2(3)
    mean = (4 / 3) * (1 + 1 / math.log2(3) + 1 / 2) / best
    assert demo.ndcg([1, 1, 1], [2, 0, 1]) == pytest.approx(mean)
    assert demo.ndcg([1, 1, 1], [0, 1, 2]) == pytest.approx(mean)


def test_interval_holds_the_mean_and_narrows():
    few, many = [0.0, 1.0] * 5, [0.0, 1.0] * 100
    for values in (few, many):
        low, high = demo.interval(values)
        assert low < 0.5 < high
    # the standard error of 200 halves is .035: +- 1.96 of it
    assert demo.interval(many)[1] - demo.interval(many)[0] == pytest.approx(0.139, abs=0.02)
    assert demo.interval([0.7, 0.7]) == pytest.approx((0.7, 0.7))


def test_bm25_finds_the_words():
    texts = ["A cat sleeps.", "The FERRY leaves on Sunday.", "A dog barks.", "Rain all day."]
    found = demo.bm25_scores("When does the ferry leave?", texts)
    assert max(found) == found[1] > 0
    assert demo.word_scores("When does the ferry leave?", texts) == [0, 2, 0, 0]  # the, ferry


def test_difference_is_relative_to_the_largest():
    assert demo.difference([1.0, 0.1], [2.0, 0.1]) == 0.5
    assert demo.difference([0.0], [0.0]) == 0.0


def test_records_are_shuffled_and_keep_their_grades(data):
    records = demo.read_records(data)
    assert [r.query for r in records] == ["q0", "q1", "q2"]
    for record in records:
        assert dict(zip(record.texts, record.grades, strict=True)) == {
            "text 0": 2, "text 1": 0, "text 2": 1, "text 3": 0,
        }  # fmt: skip
    assert len({tuple(r.texts) for r in records}) > 1
    assert demo.read_records(data) == records


def with_grades(*documents):
    return f'{{"query": "q", "documents": [{", ".join(documents)}]}}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is not JSON"),
        (with_grades('{"text": "a"}', '{"text": "b", "grade": 0}'), r"line 1, documents\[0\]\.grade"),
        (
            with_grades('{"text": "a", "grade": 0}', '{"text": "b", "grade": 0}'),
            "line 1, documents.* above 0",
        ),
        ("", "holds no examples"),
    ],
)
def test_data_that_is_wrong_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(HookError, match=message):
        demo.read_records(path)


def test_heads_have_to_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "shipped_heads", lambda: tmp_path / "none.yaml")
    with pytest.raises(HookError, match="build rerank-heads"):
        demo._chosen(None)
    with pytest.raises(HookError, match="name some"):
        demo._chosen("all")
    assert demo._chosen("1-2") == [(1, 2)]


def test_tables_and_files(data, tmp_path):
    records = demo.read_records(data)
    outcome = demo.Outcome(
        ndcg={demo.CHOSEN: [1.0, 0.9, 0.8], demo.ALL: [0.5, 0.6, 0.7], demo.BM25: [0.2, 0.2, 0.2]},
        seconds={demo.WHOLE: [0.2, 0.4, 0.3], demo.SHORT: [0.15, 0.15, 0.1]},
        scores=[[0.1, 0.2, 0.3, 0.4]] * 3,
        short_difference=1e-7,
    )
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(demo.quality_table(records, outcome, [(8, 3)]))
    console.print(demo.cost_table(outcome))
    text = out.getvalue()
    assert "0.900" in text
    assert "8-3" in text
    assert "300" in text  # ms, the median
    assert "0.50" in text
    assert "Hugging Face" not in text
    assert "chose no heads" not in text
    held = dataclasses.replace(outcome, unseen=[0, 2])
    console.print(demo.quality_table(records, held, [(8, 3)]))
    assert "the 2 that" in out.getvalue()
    assert "0.600" in out.getvalue()  # all heads on the two
    held_report = json.loads(demo.write(tmp_path / "held", records, held, [(8, 3)])[1].read_text())
    assert held_report["unseen"]["queries"] == [0, 2]
    assert held_report["unseen"]["ndcg"][demo.ALL][0] == pytest.approx(0.6)
    picture, report = demo.write(tmp_path / "out", records, outcome, [(8, 3)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    read = json.loads(report.read_text())
    assert read["ndcg"][demo.CHOSEN]["mean"] == pytest.approx(0.9)
    assert read["queries"][1]["ndcg"] == {demo.CHOSEN: 0.9, demo.ALL: 0.6, demo.BM25: 0.2}
    assert read["seconds"][demo.WHOLE] == 0.3


def test_heads_ship_with_the_queries_that_did_not_choose_them():
    assert demo._chosen(None) == [(18, 6)]
    held = demo.unseen(demo.shipped_heads(), None)
    assert len(held) == 18  # of 60; a changed data file would make it none
    assert demo.read_records(None)[held[0]].query
