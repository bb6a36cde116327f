"""Steering vectors, by hand."""

import pytest
import torch

from vllm_hook.build.vectors import centred_pca, clamp_target, mean_difference, unit_vector
from vllm_hook.errors import HookError


def test_mean_difference_by_hand():
    with_, without = torch.tensor([[3.0, 1.0], [5.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 3.0]])
    assert mean_difference(with_, without).tolist() == [3.0, -1.0]  # mean of (2, 0) and (4, -2)
    assert mean_difference(with_, without).dtype == torch.float32


def test_means_of_large_numbers_do_not_lose_the_difference():
    without = torch.full((1000, 2), 22_600.0)
    assert mean_difference(without + 0.25, without).tolist() == [0.25, 0.25]


def test_pca_finds_the_axis_of_the_differences_and_its_sign():
    # Differences (2, 0), (4, 0) and (0, 1); questions differ by far more, along the second axis.
    questions = torch.tensor([[0.0, 100.0], [0.0, -300.0], [0.0, 7.0]])
    change = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    assert centred_pca(questions + change, questions).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert centred_pca(questions, questions + change).tolist() == pytest.approx([-1.0, 0.0], abs=1e-6)


def test_pca_weighs_pairs_by_their_size_and_the_mean_does_not_care():
    # Differences (3, 4) and (-3, -4)/5: one axis, the sign of the larger.
    change = torch.tensor([[3.0, 4.0], [-0.6, -0.8]])
    assert centred_pca(change, torch.zeros(2, 2)).tolist() == pytest.approx([0.6, 0.8])


def test_pca_does_not_see_how_a_pair_is_placed():
    torch.manual_seed(0)
    with_, without, moved = torch.randn(3, 20, 5)
    same = centred_pca(with_ + moved, without + moved)
    torch.testing.assert_close(same, centred_pca(with_, without), atol=1e-5, rtol=0)
    assert float(same.norm()) == pytest.approx(1.0)


def test_clamp_target_is_the_mean_projection_on_the_unit_vector():
    assert clamp_target(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.0, 5.0])) == 3.0
    assert clamp_target(torch.tensor([[5.0, 0.0]]), torch.tensor([3.0, 4.0])) == pytest.approx(3.0)


def test_unit_vector():
    assert unit_vector(torch.tensor([3.0, -4.0])).tolist() == pytest.approx([0.6, -0.8])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mean_difference(torch.ones(2, 3), torch.ones(2, 4)), "equal shapes"),
        (lambda: mean_difference(torch.ones(0, 3), torch.ones(0, 3)), "need rows"),
        (lambda: mean_difference(torch.ones(3), torch.ones(3)), "need rows"),
        (lambda: mean_difference(torch.full((1, 2), float("nan")), torch.ones(1, 2)), "not finite"),
        (lambda: centred_pca(torch.ones(2, 3), torch.ones(2, 3)), "no direction"),
        (lambda: clamp_target(torch.ones(2, 3), torch.ones(2)), "width 3"),
        (lambda: unit_vector(torch.zeros(3)), "not zero"),
    ],
)
def test_what_cannot_be(call, says):
    with pytest.raises(HookError, match=says):
        call()
