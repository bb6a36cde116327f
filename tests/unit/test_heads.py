"""Head finding against arithmetic done by hand."""

import sys

import pytest
import torch

from characters import CharTokenizer
from vllm_hook.analyzers.attention_tracker import focus
from vllm_hook.build import _torchvision, heads
from vllm_hook.build.heads import auroc, build_guard, candidate_scores, select_heads, top_heads
from vllm_hook.build.model import open_model
from vllm_hook.build.on_hf import HfBackend
from vllm_hook.build.prompts import tracker_prompt
from vllm_hook.build.records import Injection
from vllm_hook.errors import HookError

# One layer, three heads. Means .8 .6 .5 and population stds .1 .2 0 for normal prompts;
# .2 .5 .5 and .1 .1 0 for attacked ones.
NORMAL = torch.tensor([[[0.9, 0.8, 0.5]], [[0.7, 0.4, 0.5]]])
ATTACKED = torch.tensor([[[0.3, 0.6, 0.5]], [[0.1, 0.4, 0.5]]])


@pytest.mark.parametrize(
    ("k", "expected"),
    [(0, [0.6, 0.1, 0.0]), (1, [0.4, -0.2, 0.0]), (4, [-0.2, -1.1, 0.0])],
)
def test_candidate_scores_by_hand(k, expected):
    assert candidate_scores(NORMAL, ATTACKED, k)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_population_std_with_one_prompt_is_zero():
    assert candidate_scores(NORMAL[:1], ATTACKED[:1], 4)[0].tolist() == pytest.approx([0.6, 0.2, 0.0])


def test_positive_scores_are_kept():
    choice = select_heads(NORMAL[:, :, :2], ATTACKED[:, :, :2], k=1)
    assert choice.heads == [(0, 0)]
    assert (choice.k, choice.fell_back, choice.kept) == (1, False, 1)
    assert choice.scores.shape == (1, 2)


def test_empty_set_falls_back_to_the_best_by_k_1_and_says_so():
    choice = select_heads(NORMAL[:, :, :2], ATTACKED[:, :, :2], k=4, fallback_top=1)
    assert choice.heads == [(0, 0)]
    assert choice.fell_back
    assert (choice.k, choice.kept) == (4, 0)
    assert choice.scores[0].tolist() == pytest.approx([0.4, -0.2], abs=1e-6)
    assert "fell back to the top 1 by the k=1 score" in choice.describe()


def test_zero_is_not_positive():
    assert (0, 2) not in select_heads(NORMAL, ATTACKED, k=0).heads


def test_top_heads_are_in_layer_order_and_ties_are_stable():
    scores = torch.tensor([[0.1, 0.9], [0.9, 0.3], [0.9, 0.8]])
    assert top_heads(scores, 2) == [(0, 1), (1, 0)]
    assert top_heads(scores, 4) == [(0, 1), (1, 0), (2, 0), (2, 1)]


def test_shapes_are_checked():
    with pytest.raises(HookError, match="two \\[N, L, H\\]"):
        candidate_scores(NORMAL, ATTACKED[:, :, :2], 1)
    with pytest.raises(HookError, match="at least one"):
        candidate_scores(NORMAL[:0], ATTACKED, 1)


def test_auroc_counts_pairs_and_half_of_ties():
    assert auroc([0.1, 0.2], [0.3, 0.4]) == 1.0
    assert auroc([0.3, 0.4], [0.1, 0.2]) == 0.0
    # pairs: .1<.2, .1<.3, .2=.2 (half), .2<.3
    assert auroc([0.1, 0.2], [0.2, 0.3]) == pytest.approx(3.5 / 4)


def test_spans_hold_every_token_that_overlaps_them():
    # <system>abc<user>Data: xyz<a>: characters 8-11 and 23-26
    ids, spans = heads.render(CharTokenizer(width=2), {"instruction": "abc", "data": "xyz"})
    assert len(ids) == 15
    assert spans == {"instruction": (4, 6), "data": (11, 13)}


def test_span_of_an_instruction_that_the_data_repeat():
    _, spans = heads.render(CharTokenizer(width=2), {"instruction": "abc", "data": "say abc"})
    assert spans["instruction"] == (4, 6)


def make_guard(finding=("normal_short", "normal_long", "ignore", "ignore_long")):
    # One layer, two heads; head 0 tells the kinds apart.
    found = torch.tensor([[[0.9, 0.5]], [[0.7, 0.5]], [[0.2, 0.5]], [[0.1, 0.5]]])
    held = ["normal", "normal", "forget", "naive"]
    measured = torch.tensor([[[0.8, 0.5]], [[0.3, 0.5]], [[0.2, 0.5]], [[0.35, 0.5]]])
    return build_guard(finding, found, held, measured, k=1)


def test_guard_is_calibrated_on_the_finding_set_and_measured_on_the_other():
    guard = make_guard()
    assert guard.choice.heads == [(0, 0)]
    assert guard.threshold == pytest.approx(0.4)  # midpoint of .7 and .1
    assert guard.auroc == {"forget": 1.0, "naive": 0.5}
    assert guard.caught == {"forget": (1, 1), "naive": (1, 1)}
    assert guard.false_alarms == (1, 2)


def test_without_styles_of_matched_length_all_prompts_calibrate():
    guard = make_guard(("normal_a", "normal_b", "x", "y"))
    assert guard.threshold == pytest.approx((0.8 + 0.15) / 2)


def test_a_torchvision_that_fails_to_import_is_hidden(monkeypatch, tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Registers the key with monkeypatch, so that it is put back as it was.
    monkeypatch.setitem(sys.modules, "torchvision", None)
    del sys.modules["torchvision"]
    heads.hide_broken_torchvision()
    with pytest.raises(ImportError):
        import torchvision  # noqa: F401
    assert _torchvision.importlib.util.find_spec("torchvision") is None
    heads.hide_broken_torchvision()  # again: nothing to do


def test_hugging_face_backend_by_a_second_route(tmp_path):
    """The scores of a tiny model equal those from its attention, spans found by decoding tokens."""
    transformers = pytest.importorskip("transformers")
    tiny = load_tiny()
    path = tiny.make_tiny(tmp_path, "llama", num_hidden_layers=2)
    record = {"instruction": "Say apple", "data": "the fox jumps"}
    model = open_model(str(path))
    prompt = tracker_prompt(model.tokenizer, Injection(1, "i", "normal", **record))
    (mass,) = HfBackend(model).masses([prompt])
    assert mass.shape == (2, 4, 2)
    got = focus(mass)[None]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    pieces = ["system: ", "Say apple", "\nuser: Data: ", "the fox jumps", "\nassistant:"]
    ids = tokenizer("".join(pieces))["input_ids"]
    # characters before each token, by decoding prefixes
    ends = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
    starts = [0, *ends[:-1]]
    cut = [sum(map(len, pieces[:i])) for i in range(6)]

    def inside(a, b):
        return [i for i in range(len(ids)) if starts[i] < b and ends[i] > a]

    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True)
    for layer in range(2):
        for head in range(4):
            row = out.attentions[layer][0, head, -1]
            inst, data = float(row[inside(cut[1], cut[2])].sum()), float(row[inside(cut[3], cut[4])].sum())
            assert float(got[0, layer, head]) == pytest.approx(inst / (inst + data + 1e-8), abs=1e-5)


def load_tiny():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
