"""The helpers that judge engines, each broken on purpose."""

import pytest
import torch

from oracle import Reference, assert_probs_close, assert_rows_close, positions_of, row_errors


def rows():
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 8, generator=g) * torch.logspace(-3, 4, 5)[:, None]


def test_rows_that_are_close_pass():
    want = rows()
    assert assert_rows_close(want * (1 + 1e-6), want) == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize("row", range(5))
def test_one_zeroed_row_is_seen_however_small(row):
    """A bound on the whole tensor would miss the smallest row."""
    got = rows()
    got[1, row] = 0
    with pytest.raises(AssertionError, match=rf"1 of 15 rows.*at \[1, {row}\]"):
        assert_rows_close(got, rows())


def test_swapped_rows_nan_shape_and_emptiness_are_seen():
    want = rows()
    for got in (
        want[:, [1, 0, 2, 3, 4]],
        want.clone().index_fill_(1, torch.tensor([2]), float("nan")),
        want[:, :4],
        want * 1.001,
    ):
        with pytest.raises(AssertionError):
            assert_rows_close(got, want)
    with pytest.raises(AssertionError, match="no rows"):
        assert_rows_close(want[:0], want[:0])


def test_a_row_of_zeros_is_compared_absolutely():
    want = torch.zeros(1, 4)
    assert float(row_errors(want + 0.5, want)) == pytest.approx(1.0)


def test_probabilities():
    want = torch.softmax(rows()[..., :4], -1)
    assert assert_probs_close(want, want) == 0
    moved = want.clone()
    moved[0, 2, 0] += 1e-4
    with pytest.raises(AssertionError, match="differs"):
        assert_probs_close(moved, want)
    with pytest.raises(AssertionError, match="sums"):
        assert_probs_close(want * 0.9999, want, dp=1e-3)
    with pytest.raises(AssertionError, match="differs"):
        assert_probs_close(want * float("nan"), want)


def test_reference_is_consistent_with_itself(tiny_dir):
    """The recorded sites add up: pre + attn = mid, mid + mlp = post, post = next pre, weights @ v = z."""
    seen = Reference(tiny_dir("llama")).run(range(10, 40))
    assert_rows_close(seen["resid_pre"] + seen["attn_out"], seen["resid_mid"], rel=1e-6)
    assert_rows_close(seen["resid_mid"] + seen["mlp_out"], seen["resid_post"], rel=1e-6)
    assert torch.equal(seen["resid_post"][:-1], seen["resid_pre"][1:])
    assert torch.equal(seen["embed"], seen["resid_pre"][:1])
    v = seen["v"].repeat_interleave(2, dim=2)
    assert_rows_close(torch.einsum("lhqk,lkhd->lqhd", seen["attention"], v), seen["z"], rel=1e-5)
    with pytest.raises(AssertionError):
        assert_rows_close(seen["resid_pre"] + seen["mlp_out"], seen["resid_mid"])


def test_brute_force_positions():
    prompt, generated = [5, 6, 7, 6], [8, 6, 9]
    spans = {"s": [range(1, 3)]}
    for selector, want in (
        ("all", {0, 1, 2, 3, 4, 5}),
        ("prompt", {0, 1, 2, 3}),
        ("generated", {4, 5}),
        ("last_prompt", {3}),
        ({"range": [-3, -1]}, {1, 2}),
        ({"generated": [1, None]}, {5}),
        ({"span": "s"}, {1, 2}),
        ({"token_ids": [6, 9]}, {1, 3, 5}),  # 9 is the last token: never fed
        ([{"span": "s"}, "generated"], {1, 2, 4, 5}),
    ):
        assert positions_of(selector, prompt, generated, spans) == want
