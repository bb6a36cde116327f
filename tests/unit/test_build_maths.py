"""Scores by hand: S(h), nDCG, what an edit recovers, probes and their intervals, the mass mean."""

import math

import pytest
import torch

from vllm_hook.build import probe
from vllm_hook.build.records import Labelled, Query
from vllm_hook.build.rerank_heads import choose, core_score, ndcg, random_ndcg, sorted_by
from vllm_hook.build.sweep import recovered
from vllm_hook.build.vector import make_vector
from vllm_hook.build.vectors import mass_mean, mean_difference
from vllm_hook.errors import HookError

# One layer, two heads, three documents; the first is relevant.
S = torch.tensor([[[0.3, 0.1, 0.2], [0.1, 0.3, 0.2]]])
GRADES = (2, 0, 0)


@pytest.mark.parametrize("t", [0.1, 1.0])
def test_core_score_by_hand(t):
    good = math.exp(0.3 / t) / sum(math.exp(x / t) for x in (0.3, 0.1, 0.2))
    bad = math.exp(0.1 / t) / sum(math.exp(x / t) for x in (0.1, 0.3, 0.2))
    assert core_score(S, GRADES, t)[0].tolist() == pytest.approx([good, bad])


def test_core_score_does_not_overflow_when_it_is_sharp():
    assert core_score(S, GRADES, 0.001)[0].tolist() == pytest.approx([1.0, 0.0])


def test_core_score_takes_the_best_grade_against_grade_0_only():
    s = torch.tensor([[[0.3, 0.9, 0.2]]])
    assert float(core_score(s, (2, 1, 0), 1.0)) == pytest.approx(1 / (1 + math.exp(-0.1)))
    two = core_score(s, (2, 2, 0), 1.0)  # the mean of .3 against .2 and .9 against .2
    assert float(two) == pytest.approx((1 / (1 + math.exp(-0.1)) + 1 / (1 + math.exp(-0.7))) / 2)
    with pytest.raises(HookError, match="needs a relevant"):
        core_score(s, (0, 0, 0), 1.0)


def test_ndcg_by_hand():
    grades = (0, 2, 1)
    ideal = 3 + 1 / math.log2(3)
    assert float(ndcg(torch.tensor([0.1, 0.3, 0.2]), grades)) == pytest.approx(1.0)
    worst = 3 / math.log2(4) + 1 / math.log2(3)
    assert float(ndcg(torch.tensor([0.3, 0.1, 0.2]), grades)) == pytest.approx(worst / ideal)
    assert float(ndcg(torch.tensor([0.3, 0.1, 0.2]), grades, k=1)) == 0.0
    both = ndcg(torch.tensor([[0.1, 0.3, 0.2], [0.3, 0.1, 0.2]]), grades)
    assert both.tolist() == pytest.approx([1.0, worst / ideal])


def test_ties_share_what_they_gain():
    both = (1 + 1 / math.log2(3)) / 2
    assert float(ndcg(torch.zeros(2), (1, 0))) == pytest.approx(both)
    assert float(ndcg(torch.zeros(2), (0, 1))) == pytest.approx(both)


def test_random_ndcg_is_the_mean_over_all_orders():
    import itertools

    grades = (2, 1, 0, 0)
    values = [
        float(ndcg(torch.tensor(order, dtype=torch.float64), grades))
        for order in itertools.permutations(range(4))
    ]
    assert random_ndcg(grades) == pytest.approx(sum(values) / len(values))


def test_choosing_and_sorting():
    queries = [Query(1, "a", "q", ("x", "y", "z"), GRADES)] * 2
    core, own = choose([S, S], queries, 0.1)
    assert core.shape == own.shape == (1, 2)
    assert core[0, 0] > core[0, 1]
    assert own[0].tolist() == pytest.approx([1.0, 0.5])
    assert sorted_by([S, S], queries, [(0, 0)]) == pytest.approx(1.0)
    assert sorted_by([S, S], queries, [(0, 1)]) == pytest.approx(0.5)


def test_what_an_edit_recovers():
    assert recovered([-3, -3], [-1, -1], [-2, -2]) == pytest.approx(0.5)
    assert recovered([-3, -3], [-1, -1], [-3, -3]) == 0
    assert recovered([-3], [-1], [-4]) == pytest.approx(-0.5)
    assert recovered([-1], [-3], [-1]) == 0  # the instruction changed nothing for the better


# -- vectors ------------------------------------------------------------------------------------


def test_mass_mean_against_the_covariance_written_out():
    torch.manual_seed(0)
    with_, without = torch.randn(2, 7, 4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5, 3.0])
    centred = torch.cat([with_ - with_.mean(0), without - without.mean(0)])
    covariance = centred.T @ centred / 14
    shrunk = 0.9 * covariance + 0.1 * covariance.trace() / 4 * torch.eye(4)
    difference = with_.mean(0) - without.mean(0)
    wanted = torch.linalg.solve(shrunk, difference)
    wanted = wanted * difference.norm() / wanted.norm()
    torch.testing.assert_close(mass_mean(with_, without).double(), wanted, atol=1e-5, rtol=1e-5)


def test_mass_mean_turns_away_from_noise():
    # The classes differ equally along both axes, and the second is ten times as noisy.
    with_ = torch.tensor([[1.0, 11.0], [1.2, -9.0], [0.8, 1.0]])
    without = with_ - 1
    tilted = mass_mean(with_, without)
    assert abs(float(tilted[1])) < 0.2 * float(tilted[0])
    assert float(tilted.norm()) == pytest.approx(math.sqrt(2), rel=1e-5)


def test_directions_are_as_long_as_the_difference_of_means():
    torch.manual_seed(1)
    with_, without = torch.randn(2, 9, 6)
    for name in ("mean", "pca", "mass-mean"):
        vector = make_vector(name, with_, without)
        assert float(vector.norm()) == pytest.approx(float(mean_difference(with_, without).norm()), rel=1e-5)


# -- probes -------------------------------------------------------------------------------------


def examples(n, groups=None):
    return [Labelled(i, str(i), i % 2, (("user", str(i)),), groups and groups[i]) for i in range(n)]


def states(n, shift, seed=0):
    rows = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
    rows[:, 4] = 7.0  # constant
    rows[1::2, 2] += shift
    return rows


def test_a_probe_finds_the_direction_and_leaves_constants_alone():
    pytest.importorskip("sklearn")
    fitted = probe.fit(states(60, 6.0), [i % 2 for i in range(60)], 1.0)
    assert int(fitted.weight.abs().argmax()) == 2
    assert float(fitted.scale[4]) == 1.0
    assert float(fitted.weight[4]) == 0.0
    logits = probe.logits_of(fitted, states(60, 6.0))
    assert all((x > 0) == bool(i % 2) for i, x in enumerate(logits))
    row = states(60, 6.0)[3]
    by_hand = float(fitted.weight @ ((row - fitted.mean) / fitted.scale)) + fitted.bias
    assert logits[3] == pytest.approx(by_hand, abs=1e-5)


def test_cross_validation_tells_signal_from_none():
    pytest.importorskip("sklearn")
    assert probe.cross_validate(states(40, 6.0), examples(40), 0).auroc > 0.98
    assert 0.2 < probe.cross_validate(states(40, 0.0), examples(40), 0).auroc < 0.8
    assert probe.cross_validate(states(40, 1.0), examples(40), 3) == probe.cross_validate(
        states(40, 1.0), examples(40), 3
    )


def test_of_equal_layers_the_surer_one_ranks_higher():
    pytest.importorskip("sklearn")
    far, near = (probe.cross_validate(states(40, shift), examples(40), 0) for shift in (60.0, 9.0))
    assert far.auroc == near.auroc == 1.0
    assert far.rank > near.rank


def test_folds_do_not_part_groups():
    """States say which group a row is of and nothing else: parted groups would be told by heart."""
    pytest.importorskip("sklearn")
    codes = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    labels = [int(v) for v in torch.randperm(20, generator=torch.Generator().manual_seed(1)) % 2]
    rows = codes.repeat_interleave(4, 0)
    records = [Labelled(i, str(i), labels[i // 4], (), f"g{i // 4}") for i in range(80)]
    alone = [Labelled(i, str(i), labels[i // 4], ()) for i in range(80)]
    assert probe.cross_validate(rows, alone, 0).auroc > 0.95
    assert probe.cross_validate(rows, records, 0).auroc < 0.85


def test_the_interval_holds_the_auroc_and_narrows_with_more():
    pytest.importorskip("sklearn")
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    labels = [i % 2 for i in range(400)]
    logits = [n + y for n, y in zip(noise, labels, strict=True)]
    value, (low, high) = probe.auroc_interval(logits, labels, 0)
    few, (few_low, few_high) = probe.auroc_interval(logits[:40], labels[:40], 0)
    assert low < value < high
    assert few_low < few < few_high
    assert high - low < 0.5 * (few_high - few_low)
    assert pytest.approx(value, abs=0.06) == 0.76  # two normals one standard deviation apart: .760
    assert probe.auroc_interval(logits, labels, 0) == probe.auroc_interval(logits, labels, 0)
