"""The analyzers of rows (probe, projection, hidden states, logit lens) against arithmetic done by hand."""

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from vllm_hook import analyzers
from vllm_hook.errors import HookError, IncompleteCaptureError, ProgramError
from vllm_hook.results import HookResult, Observed
from vllm_hook.runtime.loading import load_program
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts(id="m", layers=4, heads=2, kv_heads=1, head_dim=2, hidden=4)


def rows(values, layers=(3,), positions=None, site="resid_post"):
    values = torch.tensor(values)
    return Observed(site, values, list(positions or range(5, 5 + values.shape[1])), list(layers))


def score(name, seen, spans=None, **options):
    analyzer = analyzers.get(name)
    seen = seen if isinstance(seen, dict) else {"seen": seen}
    return analyzer.score(seen, spans or {}, analyzer.Options(**options))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


ALL = (
    "attention_tracker",
    "core_reranker",
    "hidden_states",
    "linear_probe",
    "logit_lens",
    "lookback",
    "projection_monitor",
    "span_influence",
)


def test_all_are_registered_under_their_own_name():
    assert set(ALL) <= set(analyzers.names())
    for name in ALL:
        found = analyzers.get(name)
        assert isinstance(found, analyzers.Analyzer)
        assert found.name == name
        assert type(found).__doc__
        with pytest.raises(ValidationError, match="treshold"):
            found.Options(treshold=0.1)


# -- linear probe -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "value"), [("max", sigmoid(2)), ("min", sigmoid(-1)), ("last", 0.5), ("mean", None)]
)
def test_probe_by_hand(over, value):
    logits = [[-1.0, 2.0, 0.0]]
    expected = value or (sigmoid(-1) + sigmoid(2) + 0.5) / 3  # the mean of probabilities, not of logits
    found = score("linear_probe", rows(logits), over=over, threshold=0.6)
    assert found.value == pytest.approx(expected, abs=1e-6)
    assert found.flagged is (expected > 0.6)
    assert found.details["per_position"] == pytest.approx([sigmoid(-1), sigmoid(2), 0.5], abs=1e-6)
    assert found.details["highest"] == 6


def test_probe_of_whole_rows_from_a_file(tmp_path):
    file = tmp_path / "probe.safetensors"
    save_file(
        {
            "weight": torch.tensor([1.0, -2.0, 0.0, 0.5]),
            "bias": torch.tensor([0.25]),
            "mean": torch.tensor([1.0, 0.0, 0.0, 0.0]),
            "scale": torch.tensor([2.0, 1.0, 1.0, 1.0]),
        },
        file,
    )
    # (3-1)/2 * 1 - 2 * .5 + .5 * 2 + .25 = 1.25
    seen = rows([[[3.0, 0.5, 9.0, 2.0]]])
    assert score("linear_probe", seen, probe=str(file)).value == pytest.approx(sigmoid(1.25), abs=1e-6)
    with pytest.raises(HookError, match="add `reduce"):
        score("linear_probe", seen)
    with pytest.raises(HookError, match="leave out `probe`"):
        score("linear_probe", rows([[1.0]]), probe=str(file))
    with pytest.raises(ProgramError, match=r"\[2\] is needed"):
        score("linear_probe", rows([[[3.0, 0.5]]]), probe=str(file))


def test_probe_takes_one_layer_of_a_stream_site():
    with pytest.raises(HookError, match="2 layers, needs one"):
        score("linear_probe", rows([[0.0], [1.0]], layers=(1, 2)))
    with pytest.raises(HookError, match="observes 'attention_mass'"):
        score("linear_probe", rows([[0.0]], site="attention_mass"))
    with pytest.raises(IncompleteCaptureError, match="no rows"):
        score("linear_probe", Observed("resid_post", torch.zeros(1, 0), [], [3]))
    for bad in (0.0, 1.0):
        with pytest.raises(ValidationError, match="threshold"):
            analyzers.LinearProbe.Options(threshold=bad)


# -- projection ---------------------------------------------------------------------------------


def test_projection_by_hand(tmp_path):
    file = tmp_path / "r.safetensors"
    save_file({"r": torch.tensor([0.0, 3.0, 4.0, 0.0])}, file)  # length 5
    seen = rows([[[1.0, 5.0, 0.0, 7.0], [0.0, 0.0, 10.0, 0.0]], [[0.0, -5.0, 0.0, 0.0]] * 2], layers=(1, 2))
    # layer 1: 3 and 8; layer 2: -3 and -3
    found = score("projection_monitor", seen, direction=str(file), above=1.0)
    assert found.value == pytest.approx((5.5 - 3) / 2)
    assert found.details["per_layer"] == pytest.approx({"1": 5.5, "2": -3.0})
    assert found.flagged is True
    last = score("projection_monitor", seen, direction=str(file), over="last", above=2.6)
    assert last.value == pytest.approx(2.5)
    assert last.flagged is False


def test_projection_already_reduced_and_bounds():
    seen = rows([[1.0, -4.0]])
    assert score("projection_monitor", seen, over="min").value == -4.0
    assert score("projection_monitor", seen).flagged is None
    assert score("projection_monitor", seen, below=-1.0).flagged is True  # mean -1.5
    assert score("projection_monitor", seen, below=-2.0, above=0.0).flagged is False
    with pytest.raises(HookError, match="add `reduce"):
        score("projection_monitor", rows([[[1.0, 2.0]]]))


# -- hidden states ------------------------------------------------------------------------------


def test_hidden_states_by_hand(tmp_path):
    file = tmp_path / "v.safetensors"
    save_file({"v": torch.tensor([2.0, 0.0])}, file)
    seen = rows([[[300.0, 400.0], [3.0, 4.0], [0.0, 2.0]]], positions=(0, 1, 2))
    assert score("hidden_states", seen).value == 3
    assert score("hidden_states", seen).details["shape"] == [1, 3, 2]
    mean = score("hidden_states", seen, measure="mean", skip_first=True)
    assert mean.details["mean"] == {"3": [1.5, 3.0]}
    assert mean.value == pytest.approx(2.25)
    norm = score("hidden_states", seen, measure="norm", skip_first=True, above=3.0)
    assert norm.value == pytest.approx((5 + 2) / 2)
    assert norm.details["rows"] == {"3": pytest.approx([5.0, 2.0])}
    assert norm.details["positions"] == [1, 2]
    assert norm.flagged is True
    assert score("hidden_states", seen, measure="norm").value == pytest.approx((500 + 5 + 2) / 3)
    cosine = score("hidden_states", seen, measure="cosine", reference=str(file))
    assert cosine.value == pytest.approx((0.6 + 0.6 + 0.0) / 3, abs=1e-6)


def test_hidden_states_join_heads_and_refuse_reduced_rows():
    heads = Observed("z", torch.tensor([[[[3.0], [4.0]]]]), [7], [0])  # two heads of width 1
    assert score("hidden_states", heads, measure="norm").value == pytest.approx(5.0)
    with pytest.raises(HookError, match="whole rows"):
        score("hidden_states", rows([[1.0]]))
    with pytest.raises(HookError, match="position 0 only"):
        score("hidden_states", rows([[[1.0, 2.0]]], positions=(0,)), skip_first=True)


@pytest.mark.parametrize("options", [{"measure": "cosine"}, {"measure": "norm", "reference": __file__}])
def test_a_reference_goes_with_cosine(options):
    with pytest.raises(ValidationError, match="reference"):
        analyzers.HiddenStates.Options(**options)


# -- check --------------------------------------------------------------------------------------


def program(analyzer, options, observe=None):
    seen = observe or {"site": "resid_post", "layers": [1], "positions": "last_prompt"}
    analyze = {"a": {"analyzer": analyzer, "observe": "seen", "options": options}}
    return {"schema": 1, "name": "p", "observe": {"seen": seen}, "analyze": analyze}


@pytest.mark.parametrize(
    ("analyzer", "options", "field", "why"),
    [
        ("linear_probe", {"over": "sum"}, "analyze.a.options.over", "max"),
        ("linear_probe", {"probe": "missing.safetensors"}, "analyze.a.options.probe", "no such file"),
        ("projection_monitor", {"above": "high"}, "analyze.a.options.above", "number"),
        ("projection_monitor", {"direction": "gone"}, "analyze.a.options.direction", "no such file"),
        ("hidden_states", {"measure": "cosine"}, "analyze.a.options", "reference"),
        ("logit_lens", {"unembedding": "gone"}, "analyze.a.options.unembedding", "no such file"),
        ("logit_lens", {}, "analyze.a.options.unembedding", "required"),
        ("lookback", {}, "analyze.a.options.context", "required"),
        ("span_influence", {"spans": ["one"]}, "analyze.a.options.spans", "at least 2"),
        ("core_reranker", {}, "analyze.a.options.documents", "required"),
    ],
)
def test_check_names_the_option(analyzer, options, field, why):
    with pytest.raises(ProgramError) as caught:
        load_program(program(analyzer, options), FACTS)
    messages = {problem.field: problem.message for problem in caught.value.problems}
    assert why in messages[field]


@pytest.mark.parametrize(
    ("analyzer", "options", "reads"),
    [
        ("attention_tracker", {}, "attention_mass"),
        ("core_reranker", {"documents": "d"}, "attention"),
        ("lookback", {"context": "c"}, "attention, attention_mass"),
        ("span_influence", {}, "attention_mass"),
    ],
)
def test_check_names_a_site_that_does_not_fit(analyzer, options, reads):
    with pytest.raises(ProgramError) as caught:
        load_program(program(analyzer, options), FACTS)
    problem = caught.value.problems[0]
    assert problem.field == "analyze.a.observe[0]"
    assert problem.message == f"{analyzer} reads {reads}; this observes 'resid_post'"


def test_check_takes_what_is_right():
    assert load_program(program("hidden_states", {"measure": "norm"}), FACTS).name == "p"


@pytest.mark.parametrize(
    ("analyzer", "options", "message"),
    [
        ("linear_prob", {}, "unknown analyzer 'linear_prob'; did you mean 'linear_probe'"),
        (
            "linear_probe",
            {"treshold": 0.5},
            "analyzer 'linear_probe': treshold: unknown key; did you mean 'threshold'?",
        ),
        ("linear_probe", {"over": "maxx"}, "analyzer 'linear_probe': over: .*did you mean 'max'"),
        ("linear_probe", {"probe": "gone"}, "analyzer 'linear_probe': probe: .*gone: no such file"),
        ("linear_probe", {"probe": 5}, "analyzer 'linear_probe': probe: names no file: 5"),
        ("lookback", {}, "analyzer 'lookback': context: is required"),
        ("hidden_states", {"measure": "cosine"}, "analyzer 'hidden_states': reference: give it with"),
        ("projection_monitor", {"above": "x", "belw": 1}, "analyzer 'projection_monitor': 2 problems"),
        (None, {"threshold": 0.5}, r"options \(threshold\) need analyzer"),
    ],
)
def test_scoring_again_names_analyzer_and_option(analyzer, options, message):
    from vllm_hook.llm import analyze

    with pytest.raises(HookError, match=message):
        analyze([HookResult({"p/seen": rows([[0.0, 2.0]])})], analyzer, **options)


def test_scored_again_from_a_result():
    from vllm_hook.llm import analyze

    result = HookResult({"p/seen": rows([[0.0, 2.0]])})
    assert analyze([result], "linear_probe", over="max")[0]["linear_probe"].value == pytest.approx(sigmoid(2))
