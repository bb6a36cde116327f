"""Attention Tracker against arithmetic done by hand."""

import pytest
import torch
from pydantic import ValidationError

from vllm_hook import analyzers
from vllm_hook.analyzers.attention_tracker import AttentionTracker, calibrate, focus
from vllm_hook.errors import HookError, IncompleteCaptureError, ProgramError
from vllm_hook.results import Observed


def observed(values, keys=("instruction", "data"), site="attention_mass", positions=(11,)):
    heads = [(3, h) for h in range(len(values))]
    return Observed(site, torch.tensor(values), list(positions), [3], heads, list(keys))


def score(seen, **options):
    tracker = analyzers.get("attention_tracker")
    return tracker.score({"focus": seen}, {}, tracker.Options(**options))


def test_score_by_hand():
    # .3/(.3+.1) = .75, .05/(.05+.15) = .25, .2/(.2+.0) = 1: mean 2/3
    s = score(observed([[[0.3, 0.1]], [[0.05, 0.15]], [[0.2, 0.0]]]))
    assert s.value == pytest.approx(2 / 3, abs=1e-6)
    assert s.details["per_head"] == pytest.approx([0.75, 0.25, 1.0], abs=1e-6)
    assert s.flagged is False


def test_mean_of_shares_is_not_the_share_of_means():
    # (.9/1 + .0/.01)/2 = .45, while the pooled share is .9/1.01 = .89
    s = score(observed([[[0.9, 0.1]], [[0.0, 0.01]]]))
    assert s.value == pytest.approx(0.45, abs=1e-6)
    assert s.flagged is True


def test_epsilon_keeps_zero_attention_finite_and_counts():
    assert score(observed([[[0.0, 0.0]]])).value == 0.0
    assert float(focus(torch.tensor([1e-8, 0.0]))) == pytest.approx(0.5)


def test_keys_are_found_by_name_among_others():
    seen = observed([[[0.5, 0.1, 0.3]]], keys=("other", "data", "system"))
    assert score(seen, instruction="system", data="data").value == pytest.approx(0.75, abs=1e-6)
    with pytest.raises(HookError, match="no key 'instruction'"):
        score(seen)


def test_flagged_at_or_below_the_threshold():
    seen = observed([[[0.25, 0.25]]])
    value = score(seen).value
    assert score(seen, threshold=value).flagged is True
    assert score(seen, threshold=value - 1e-6).flagged is False


def test_bf16_is_computed_in_float32():
    seen = observed([[[0.3, 0.1]]])
    seen.values = seen.values.bfloat16()
    a, b = (float(v) for v in seen.values[0, 0])
    assert score(seen).value == pytest.approx(a / (a + b), abs=1e-6)


def test_wrong_input_says_what_is_wrong():
    with pytest.raises(HookError, match="2 rows, needs exactly one"):
        score(observed([[[0.1, 0.2], [0.3, 0.4]]], positions=(10, 11)))
    with pytest.raises(IncompleteCaptureError, match="0 rows"):
        score(Observed("attention_mass", torch.zeros(1, 0, 2), [], [3], [(3, 0)], ["instruction", "data"]))
    with pytest.raises(HookError, match="needs 'attention_mass'"):
        score(observed([[[0.1, 0.2]]], site="attention"))
    tracker = AttentionTracker()
    with pytest.raises(HookError, match="exactly one observation, got none"):
        tracker.score({}, {}, tracker.Options())


def test_options_are_strict_and_frozen():
    with pytest.raises(ValidationError):
        AttentionTracker.Options(treshold=0.3)
    with pytest.raises(ValidationError):
        AttentionTracker.Options(threshold=float("nan"))
    with pytest.raises(ValidationError):
        AttentionTracker.Options().threshold = 0.1


def test_calibrate():
    assert calibrate([0.8, 0.6], [0.2, 0.0]) == pytest.approx(0.4)
    # population std of (.8, .6) is .1
    assert calibrate([0.8, 0.6]) == pytest.approx(0.7 - 0.4)
    for bad in (([],), ([0.5], [])):
        with pytest.raises(HookError):
            calibrate(*bad)


def test_registry():
    assert "attention_tracker" in analyzers.names()
    assert isinstance(analyzers.get("attention_tracker"), AttentionTracker)
    assert isinstance(analyzers.get("attention_tracker"), analyzers.Analyzer)
    with pytest.raises(ProgramError, match=r"unknown analyzer 'nope'.*attention_tracker"):
        analyzers.get("nope")


class Entry:
    def __init__(self, value, load):
        self.value, self.load = value, load


def test_a_package_can_add_its_own(monkeypatch):
    class Mine:
        name = "mine"
        Options = AttentionTracker.Options

        def score(self, observations, spans, options):
            raise NotImplementedError

    def broken():
        raise ImportError("no such module")

    entries = {
        "mine": Entry("pkg:Mine", lambda: Mine),
        "broken": Entry("pkg:Broken", broken),
        "thing": Entry("pkg:thing", lambda: 3),
    }
    monkeypatch.setattr(analyzers, "_installed", lambda: entries)
    assert isinstance(analyzers.get("mine"), Mine)
    assert isinstance(analyzers.get("attention_tracker"), AttentionTracker)
    with pytest.raises(ProgramError, match="does not load: no such module"):
        analyzers.get("broken")
    with pytest.raises(ProgramError, match="no analyzer class"):
        analyzers.get("thing")
