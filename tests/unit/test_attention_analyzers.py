"""Lookback, span influence and the CoRe score against arithmetic done by hand."""

import pytest
import torch

from vllm_hook import analyzers
from vllm_hook.analyzers.core_reranker import document_scores, token_attention
from vllm_hook.errors import HookError
from vllm_hook.results import Observed

HEADS = [(1, 0), (2, 1)]


def seen(site, values, positions, keys=None, heads=HEADS):
    return Observed(site, torch.tensor(values), list(positions), [1, 2], heads, keys)


def score(name, observations, known, **options):
    analyzer = analyzers.get(name)
    found = observations if isinstance(observations, dict) else {"seen": observations}
    return analyzer.score(found, known, analyzer.Options(**options))


# -- lookback: prompt 0..4, context 1..3; rows 4 and 5 are the first two generated positions -----

DENSE = [
    [[0.1, 0.2, 0.2, 0.1, 0.4, 0.0], [0.1, 0.1, 0.1, 0.1, 0.3, 0.3]],
    [[0.0, 0.0, 0.0, 0.5, 0.5, 0.0], [0.6, 0.1, 0.1, 0.0, 0.1, 0.1]],
]
SPANS = {"context": [(1, 3)], "prompt": [(0, 4)]}


def test_lookback_by_hand_from_dense_attention():
    # head 0: row 4: A_c .4/2 = .2, A_n .4/1 = .4 -> 1/3; row 5: .2/2 = .1, .6/2 = .3 -> 1/4
    # head 1: row 4: 0; row 5: .2/2 = .1, .2/2 = .1 -> 1/2
    found = score(
        "lookback", seen("attention", DENSE, (4, 5)), SPANS, context="context", prompt="prompt", below=0.3
    )
    assert found.details["per_head"] == pytest.approx([(1 / 3 + 1 / 4) / 2, 0.25], abs=1e-6)
    assert found.details["per_row"] == pytest.approx([1 / 6, 3 / 8], abs=1e-6)
    assert found.value == pytest.approx(13 / 48, abs=1e-6)
    assert found.flagged is True


def test_lookback_from_sums_is_the_same():
    dense = torch.tensor(DENSE)
    sums = torch.stack([dense[..., 1:3].sum(-1), dense[..., :4].sum(-1)], -1)
    mass = seen("attention_mass", sums.tolist(), (4, 5), ["context", "prompt"])
    found = score("lookback", mass, SPANS, context="context", prompt="prompt")
    assert found.value == pytest.approx(13 / 48, abs=1e-6)


def test_lookback_refuses_rows_that_do_not_follow_the_prompt():
    rows = seen("attention", DENSE, (4, 5))
    with pytest.raises(HookError, match=r"'context' ends at 3, but the first row .* is at 4"):
        score("lookback", rows, SPANS, context="context")
    with pytest.raises(HookError, match="no span 'nope'"):
        score("lookback", rows, SPANS, context="nope")


# -- span influence -----------------------------------------------------------------------------

MASS = [[[0.1, 0.3, 0.2], [0.1, 0.1, 0.2]], [[0.2, 0.4, 0.0], [0.0, 0.0, 0.0]]]


def test_shares_by_hand():
    # sums over heads and rows: .4, .8, .4
    rows = seen("attention_mass", MASS, (9, 10), ["a", "b", "c"])
    found = score("span_influence", rows, {}, above=0.4)
    assert found.details["shares"] == pytest.approx({"a": 0.25, "b": 0.5, "c": 0.25}, abs=1e-6)
    assert found.details["largest"] == "b"
    assert found.value == pytest.approx(0.5, abs=1e-6)
    assert found.flagged is True
    two = score("span_influence", rows, {}, spans=("c", "b"), of="c")
    assert two.value == pytest.approx(1 / 3, abs=1e-6)
    assert two.flagged is None


def test_shares_per_token():
    rows = seen("attention_mass", MASS, (9, 10), ["a", "b", "c"])
    spans = {"a": [(0, 1)], "b": [(1, 3), (4, 10)], "c": [(3, 4)]}  # 1, 8 and 1 tokens: .4, .1, .4
    found = score("span_influence", rows, spans, per_token=True)
    assert found.details["shares"] == pytest.approx({"a": 4 / 9, "b": 1 / 9, "c": 4 / 9}, abs=1e-6)
    with pytest.raises(HookError, match="length of span 'a'"):
        score("span_influence", rows, {}, per_token=True)


def test_span_influence_names_a_missing_key():
    rows = seen("attention_mass", MASS, (9, 10), ["a", "b", "c"])
    with pytest.raises(HookError, match="no key 'd'"):
        score("span_influence", rows, {}, of="d")
    with pytest.raises(HookError, match="not among"):
        score("span_influence", rows, {}, spans=("a", "b"), of="c")


# -- CoRe ---------------------------------------------------------------------------------------


def test_token_attention_is_the_sum_over_heads_of_the_mean_over_rows():
    rows = torch.tensor([[[0.2, 0.4], [0.4, 0.0]], [[0.1, 0.1], [0.3, 0.5]]])
    assert token_attention(rows).tolist() == pytest.approx([0.3 + 0.2, 0.2 + 0.3])


def test_document_scores_by_hand():
    # c = 1, 2, 3, 4, 5, -21: mean -1; the outlier is 20 below it, two deviations are 19.7
    tokens = torch.tensor([0.0, 2.0, 3.0, 4.0, 5.0, 6.0, -20.0, 7.0])
    ones = torch.ones(8)
    std = (sum((x + 1) ** 2 for x in (1, 2, 3, 4, 5, -21)) / 5) ** 0.5
    assert -1 - 2 * std > -21  # dropped
    found = document_scores(tokens, ones, [(1, 7), (7, 8), (0, 1)])
    assert found.tolist() == pytest.approx([15.0, 6.0, -1.0])
    assert document_scores(tokens, None, [(7, 8)]).tolist() == [7.0]


def test_the_deviation_is_the_unbiased_one():
    # With n = 6 the outlier above lies 2.24 biased, 2.04 unbiased deviations below the mean; with n = 5 the
    # most that is possible is 2 biased and 1.79 unbiased: nothing is dropped.
    c = torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0])
    assert document_scores(c, None, [(0, 5)]).tolist() == [-1.0]


def test_a_document_of_equal_tokens_keeps_them():
    assert document_scores(torch.full((3,), 0.1), None, [(0, 3)]).tolist() == pytest.approx([0.3])


def test_core_ranks_and_calibrates():
    documents = {"docs": [(1, 3), (3, 5)]}
    query = seen("attention", [[[0.0, 0.3, 0.3, 0.2, 0.1, 0.1]]] * 2, (5,))
    nothing = seen("attention", [[[0.0, 0.3, 0.25, 0.0, 0.0, 0.4]]] * 2, (5,))
    alone = score("core_reranker", query, documents, documents="docs")
    assert alone.details["order"] == [0, 1]
    assert alone.details["calibrated"] is False
    both = score("core_reranker", {"query": query, "na": nothing}, documents, documents="docs")
    assert both.details["scores"] == pytest.approx([0.1, 0.6], abs=1e-6)
    assert both.details["order"] == [1, 0]
    assert both.value == pytest.approx(0.6, abs=1e-6)
    assert both.details["calibrated"] is True


def test_core_refuses_what_does_not_fit():
    documents = {"docs": [(1, 3), (3, 5)]}
    rows = seen("attention", [[[0.0, 0.3, 0.3, 0.2, 0.2]]] * 2, (4,))
    with pytest.raises(HookError, match="documents end at 5"):
        score("core_reranker", rows, documents, documents="docs")
    with pytest.raises(HookError, match="needs 'attention'"):
        score(
            "core_reranker",
            seen("attention_mass", MASS, (9, 10), ["a", "b", "c"]),
            documents,
            documents="docs",
        )
    with pytest.raises(HookError, match="no spans 'others', only docs"):
        score("core_reranker", rows, documents, documents="others")
    far = seen("attention", [[[0.1] * 6]] * 2, (5,))
    other = seen("attention", [[[0.1] * 6]] * 2, (5,), heads=[(1, 0), (3, 1)])
    with pytest.raises(HookError, match="different heads"):
        score("core_reranker", {"a": far, "b": other}, documents, documents="docs")
