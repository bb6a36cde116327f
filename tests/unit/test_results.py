"""HookResult: lookup by id, errors, files, JSON, and a repr that fits a screen."""

import json

import pytest
import torch
from safetensors.torch import save_file

from vllm_hook.errors import HookError, IncompleteCaptureError
from vllm_hook.results import HookResult, Observed, Score


def stream(dtype=torch.float32, rows=2):
    values = torch.arange(1 * rows * 3, dtype=torch.float32).view(1, rows, 3).to(dtype) / 3
    return Observed("resid_post", values, list(range(5, 5 + rows)), [7])


def mass():
    values = torch.tensor([[[0.25, 0.5]], [[0.125, 0.0]]])
    return Observed("attention_mass", values, [9], [1, 2], [(1, 0), (2, 3)], ["instruction", "data"])


def full():
    return HookResult(
        {"guard/focus": mass(), "calm/state": stream(torch.bfloat16)},
        {"guard/injection": Score(0.25, True, {"per_head": [0.5, 0.0]})},
        errors={"calm/late": "positions 3, 4 are missing"},
        stopped_by="prompt-injection",
        tags=["seen"],
        programs=[("guard", "ab12"), ("calm", "cd34")],
    )


def test_bare_and_qualified_ids():
    r = full()
    assert r.observed["focus"] is r.observed["guard/focus"]
    assert r.scores["injection"].value == 0.25
    assert "focus" in r.observed
    assert "nothing" not in r.observed
    assert list(r.observed) == ["guard/focus", "calm/state"]
    assert len(r.observed) == 2
    with pytest.raises(KeyError, match="guard/focus"):
        r.observed["nothing"]


def test_ambiguous_id_names_both():
    r = HookResult({"a/x": stream(), "b/x": mass()}, {"a/s": Score(1.0), "b/s": Score(2.0)})
    with pytest.raises(HookError, match="a/x, b/x"):
        r.observed["x"]
    with pytest.raises(HookError, match="a/s, b/s"):
        r.scores["s"]
    assert r.observed["b/x"].site == "attention_mass"
    assert "x" not in r.observed


@pytest.mark.parametrize("partial", [True, False])
def test_incomplete_observation_raises_whether_or_not_some_rows_came(partial):
    observed = {"g/x": stream()} if partial else {}
    r = HookResult(observed, errors={"g/x": "position 3 is missing"})
    for id in ("x", "g/x"):
        with pytest.raises(IncompleteCaptureError, match="position 3 is missing"):
            r.observed[id]
    assert "x" not in r.observed
    assert list(r.observed) == []


def test_failed_score_raises():
    r = HookResult({"g/x": stream()}, errors={"g/s": "analyzer failed"})
    with pytest.raises(IncompleteCaptureError, match="analyzer failed"):
        r.scores["s"]
    assert r.observed["x"].site == "resid_post"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_file_round_trip_keeps_everything(tmp_path, dtype):
    r = full()
    r.observed["state"].values = stream(dtype).values
    r.save(tmp_path / "x.safetensors")
    back = HookResult.load(tmp_path / "x.safetensors")
    for id, one in r.observed.items():
        other = back.observed[id]
        assert other.values.dtype == one.values.dtype
        assert torch.equal(other.values, one.values)
        assert other.meta() == one.meta()
    assert back.observed["focus"].heads == [(1, 0), (2, 3)]
    assert back.scores["injection"] == r.scores["injection"]
    assert (back.errors, back.stopped_by, back.tags, back.programs) == (
        r.errors,
        r.stopped_by,
        r.tags,
        r.programs,
    )


def test_file_of_an_empty_result_and_of_empty_rows(tmp_path):
    HookResult().save(tmp_path / "a")
    assert len(HookResult.load(tmp_path / "a").observed) == 0
    HookResult({"g/x": stream(rows=0)}).save(tmp_path / "b")
    assert HookResult.load(tmp_path / "b").observed["x"].values.shape == (1, 0, 3)


def test_views_that_share_memory_can_be_saved(tmp_path):
    base = torch.arange(24.0).view(2, 4, 3)
    parts = {f"g/{i}": Observed("resid_post", base[:, i : i + 1], [i], [0, 1]) for i in range(4)}
    HookResult(parts).save(tmp_path / "x")
    back = HookResult.load(tmp_path / "x")
    assert all(torch.equal(back.observed[f"g/{i}"].values, base[:, i : i + 1]) for i in range(4))


def test_foreign_file_is_refused(tmp_path):
    save_file({"x": torch.zeros(1)}, str(tmp_path / "x"))
    with pytest.raises(HookError, match="not a saved hook result"):
        HookResult.load(tmp_path / "x")


def test_values_must_be_those_described():
    meta = stream().meta()
    assert Observed.of(meta, stream().values).meta() == meta
    with pytest.raises(HookError, match="expected float32"):
        Observed.of(meta, stream(torch.float16).values)
    with pytest.raises(HookError, match=r"got float32 \[1, 3, 3\]"):
        Observed.of(meta, stream(rows=3).values)


def test_to_dict_is_json():
    d = json.loads(json.dumps(full().to_dict()))
    assert d["observed"]["guard/focus"]["values"] == [[[0.25, 0.5]], [[0.125, 0.0]]]
    assert d["observed"]["guard/focus"]["heads"] == [[1, 0], [2, 3]]
    assert d["observed"]["calm/state"]["dtype"] == "bfloat16"
    assert d["scores"]["guard/injection"]["flagged"] is True
    assert d["programs"] == [["guard", "ab12"], ["calm", "cd34"]]
    assert d["errors"] == {"calm/late": "positions 3, 4 are missing"}


def test_repr_of_an_observation():
    assert repr(stream()) == "Observed(resid_post, [1, 2, 3] float32, positions 5-6, layers [7])"
    assert "heads [1-0, 2-3]" in repr(mass())
    assert "keys [instruction, data]" in repr(mass())


def test_repr_fits_a_screen():
    text = repr(full())
    for part in ("guard/focus", "resid_post", "prompt-injection", "positions 3, 4", "0.25, flagged"):
        assert part in text
    big = torch.zeros(1).expand(30, 400, 9, 64)
    many = HookResult(
        {f"p/{i}": Observed("z", big, list(range(0, 800, 2)), list(range(30))) for i in range(50)},
        {f"p/s{i}": Score(0.5) for i in range(50)},
        errors={f"p/e{i}": "x" * 1000 for i in range(50)},
    )
    lines = repr(many).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 180
