"""Everything that is wrong with a program is said at once, with and without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from safetensors.torch import save, save_file

from vllm_hook import analyzers
from vllm_hook.errors import ModelMismatchError, ProgramError, UnsupportedError
from vllm_hook.results import Observed
from vllm_hook.runtime.inspection import inspect
from vllm_hook.runtime.loading import load_program
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("tiny", layers=4, heads=4, kv_heads=2, head_dim=8, hidden=32)
STATE = {"site": "resid_post", "layers": [1], "positions": "last_prompt"}
MASS = {"site": "attention_mass", "heads": [[1, 2]], "rows": "last_prompt", "keys": ["instruction", "data"]}
SPANS = {"instruction": {"message": "system"}, "data": {"message": "user"}}


def found(source: Any, facts: ModelFacts | None = None) -> dict[str, str]:
    return {p.field: p.message for p in inspect(source, facts).problems}


def program(**sections: Any) -> dict[str, Any]:
    return {"schema": 1, "name": "p", **sections}


WRONG = """schema: 1
name: Bad
spans:
  data: {message: user}
  instruction: {mesage: system}
observe:
  focus: {site: attention_mass, heads: [[1, 2]], rows: last_prompt, keys: [instruction, dta]}
  state: {site: resid_pots, layers: [1], positions: last_prompt}
  whole: {site: resid_post, layers: [1], positions: last_prompt}
intervene:
  calm: {site: resid_post, layers: [1], method: ad, vector: v.safetensors}
  push: {site: resid_post, layers: [1], method: add, vector: gone.safetensors}
analyze:
  injection: {analyzer: attention_traker, observe: focus}
  other: {analyzer: linear_probe, observe: state, options: {treshold: 0.5}}
  third: {analyzer: linear_probe, observe: focus}
  fourth: {analyzer: span_influence, observe: focus, options: {of: dta}}
act:
  - {if: injektion.flagged, do: tag}
"""


@pytest.mark.parametrize("facts", [None, FACTS])
def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, facts: ModelFacts | None) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(WRONG)
    seen = inspect(file, facts)
    messages = {p.field: (p.line, p.message) for p in seen.problems}
    expected = {
        "name": (2, "'Bad' is not a valid program name"),
        "spans.instruction": (5, "not a span"),
        "observe.focus.keys[1]": (7, "unknown span 'dta'; did you mean 'data'? known spans: data"),
        "observe.state.site": (8, "unknown site 'resid_pots'; did you mean 'resid_post'?"),
        "intervene.calm.method": (11, "unknown method 'ad'; did you mean 'add'?"),
        "intervene.push.vector": (12, "gone.safetensors: no such file"),
        "analyze.injection.analyzer": (14, "did you mean 'attention_tracker'?"),
        "analyze.other.options.treshold": (15, "unknown key; did you mean 'threshold'?"),
        "analyze.third.observe[0]": (16, "linear_probe reads embed"),
        "analyze.fourth.options.of": (17, "unknown span 'dta'; did you mean 'data'?"),
        "act[0].if": (19, "unknown analyzer id 'injektion'; did you mean 'injection'?"),
    }
    assert set(messages) == set(expected)
    for field, (line, part) in expected.items():
        assert messages[field][0] == line, field
        assert part in messages[field][1]
    with pytest.raises(ProgramError, match="11 problems"):
        seen.refuse()


RULES = """schema: 1
name: p
observe:
  seen: {site: resid_post, layers: [1], positions: last_prompt}
act:
  - {if: seen is large, do: tag}
  - {if: sen above 1, do: tag}
  - {if: seen above 1, do: tga}
  - {if: seen above 1, do: stop}
  - tag
"""


@pytest.mark.parametrize("facts", [None, FACTS])
def test_a_malformed_rule_hides_no_other(facts: ModelFacts | None) -> None:
    seen = inspect(RULES, facts)
    places = {p.field: p.line for p in [*seen.problems, *seen.unavailable]}
    assert places == {"act[0].if": 6, "act[1].if": 7, "act[2].do": 8, "act[3].do": 9, "act[3].if": 9,
                      "act[4]": 10}  # fmt: skip


@pytest.mark.parametrize("rule", ["seen is large", "sen above 1"])
def test_a_wrong_rule_hides_no_edit(rule: str, tmp_path: Path) -> None:
    save_file({"v": torch.zeros(32)}, tmp_path / "v.safetensors")
    edit = {
        "site": "resid_post", "layers": [1], "method": "ablate", "vector": str(tmp_path / "v.safetensors")
    }  # fmt: skip
    act = [{"if": rule, "do": "tag"}]
    assert set(found(program(intervene={"e": edit}, act=act), FACTS)) == {"act[0].if", "intervene.e.vector"}


def test_rules_that_are_no_list() -> None:
    assert set(found(program(observe={"seen": STATE}, act={"if": "seen above 1", "do": "tag"}))) == {"act"}


def test_what_refers_to_a_broken_part_is_not_wrong_for_that() -> None:
    observe = {"seen": {**STATE, "row": 1}, "good": STATE}
    analyze = {"a": {"analyzer": "linear_probe", "observe": "seen"}}
    act = [{"if": "a.flagged", "do": "tag"}]
    assert set(found(program(observe=observe, analyze=analyze, act=act))) == {"observe.seen.row"}
    # a section under a misspelt name is not there at all
    misspelt = {**program(analyze=analyze, act=act), "obsrve": {"seen": STATE}}
    assert found(misspelt) == {"obsrve": "unknown key; did you mean 'observe'?"}


def test_duplicate_keys_hide_nothing_else() -> None:
    text = "schema: 1\nname: p\nname: q\nobserve:\n  a: {site: resid_pots, positions: all}\n"
    assert set(found(text)) == {"name", "observe.a.site"}


@pytest.mark.parametrize("sections", [{}, {"spans": SPANS}, {"observe": {}, "intervene": {}}])
@pytest.mark.parametrize("facts", [None, FACTS])
def test_a_program_that_does_nothing_is_refused(sections: Any, facts: ModelFacts | None) -> None:
    assert "does nothing: give observe" in found(program(**sections), facts)[""]
    with pytest.raises(ProgramError, match="does nothing"):
        load_program(program(**sections), FACTS)


def test_a_program_that_only_analyzes_has_nothing_to_analyze() -> None:
    analyze = {"a": {"analyzer": "linear_probe", "observe": "seen"}}
    message = "unknown observation 'seen'; the program has no observations"
    assert found(program(analyze=analyze)) == {"analyze.a.observe[0]": message}


def test_stated_sizes_are_held_against_the_program_itself() -> None:
    sizes = {"layers": 4, "heads": 4, "hidden": 32}
    observe = {"seen": {**STATE, "layers": [4, -1]}, "focus": {**MASS, "heads": [[1, 4]]}}
    said = found(program(model=sizes, spans=SPANS, observe=observe))
    assert said["observe.seen.layers[0]"] == (
        "layer 4 does not exist: the program is for a model with 4 layers, 0 to 3"
    )
    assert set(said) == {"observe.seen.layers[0]", "observe.focus.heads[0]"}
    assert found(program(spans=SPANS, observe=observe)) == {}


def test_another_model_does_not_hide_other_faults() -> None:
    wrong = program(
        model={"layers": 30}, observe={"seen": {**STATE, "layers": [29], "positions": {"span": "x"}}}
    )
    seen = inspect(wrong, FACTS)
    assert [p.field for p in seen.problems] == ["model.layers", "observe.seen.positions[0].span"]
    with pytest.raises(ModelMismatchError):
        seen.refuse()


def test_what_this_version_cannot_do_is_said_together_with_the_rest() -> None:
    stop = program(observe={"seen": {**STATE, "reduce": {"norm": True}}})
    stop["act"] = [{"if": "seen above 1", "do": "stop"}]
    with pytest.raises(UnsupportedError, match=r"act\[0\]\.do: stop is not available"):
        inspect(stop).refuse()
    stop["act"].append({"if": "sen above 1", "do": "tag"})
    with pytest.raises(ProgramError, match="2 problems") as error:
        inspect(stop).refuse()
    assert {p.field for p in error.value.problems} == {"act[0].do", "act[1].if"}


def test_gates_without_a_model() -> None:
    gate = {"site": "resid_post", "positions": "generated", "reduce": {"norm": True}}
    edit = {"site": "resid_post", "layers": [2], "method": "attend", "when": {"observe": "g", "above": 0}}
    attend = {**edit, "site": "attention", "keys": ["data"], "weight": 2.0}

    def said(**fields: Any) -> dict[str, str]:
        return found(program(spans=SPANS, observe={"g": {**gate, **fields}}, intervene={"e": attend}))

    assert said(layers=[1]) == said(layers=[-1]) == said(site="embed") == {}
    assert "observes all layers; a gate takes one" in said()["intervene.e.when.observe"]
    assert "must come first" in said(layers=[3])["intervene.e.when.observe"]
    assert "must come first" in said(site="final_norm")["intervene.e.when.observe"]


# -- analyzers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("analyze", "field", "message"),
    [
        ({"analyzer": "attention_tracker", "options": {"data": "dta"}}, "data", "did you mean 'data'?"),
        (
            {"analyzer": "attention_tracker", "options": {"data": "extra"}},
            "data",
            "is not among the keys of 'focus'",
        ),
        (
            {"analyzer": "span_influence", "options": {"spans": ["data", "dat"]}},
            "spans[1]",
            "unknown span 'dat'",
        ),
        ({"analyzer": "span_influence", "options": {"spans": ["data"]}}, "spans", "at least 2 items"),
        (
            {"analyzer": "lookback", "options": {"context": "instruction", "prompt": "all"}},
            "prompt",
            "unknown span",
        ),
    ],
)
def test_spans_that_options_name(analyze: dict[str, Any], field: str, message: str) -> None:
    spans = {**SPANS, "extra": {"text": "x"}}
    said = found(
        program(spans=spans, observe={"focus": MASS}, analyze={"a": {"observe": "focus", **analyze}})
    )
    assert message in said[f"analyze.a.options.{field}"]
    assert len(said) == 1


def test_a_default_that_names_no_span_is_found_too() -> None:
    spans = {"question": {"message": "user"}, "answer": {"text": "x"}}
    mass = {**MASS, "keys": ["question", "answer"]}
    analyze = {"a": {"analyzer": "attention_tracker", "observe": "focus"}}
    said = found(program(spans=spans, observe={"focus": mass}, analyze=analyze))
    assert set(said) == {"analyze.a.options.instruction", "analyze.a.options.data"}


def probing(file: str) -> str:
    return f"""schema: 1
name: p
observe:
  seen: {{site: resid_post, layers: [1], positions: last_prompt}}
analyze:
  a: {{analyzer: linear_probe, observe: seen, options: {{probe: {file}}}}}
"""


def write_probe(folder: Path, bias: float, name: str = "probe.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"weight": torch.ones(32), "bias": torch.tensor([bias])}, folder / name)
    (folder / "p.yaml").write_text(probing(name))
    return folder / "p.yaml"


def test_files_of_options_lie_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_probe(tmp_path / "program", 0.5)
    monkeypatch.chdir(tmp_path)
    loaded = load_program(file, FACTS)
    held = loaded.checked.analyses[0].options["probe"]
    assert held.ref == str(tmp_path / "program" / "probe.safetensors")
    (tmp_path / "program" / "probe.safetensors").unlink()
    assert "no such file" in found(file)["analyze.a.options.probe"]


def test_the_digest_follows_the_files_of_options(tmp_path: Path) -> None:
    first = load_program(write_probe(tmp_path / "a", 0.5), FACTS).digest
    assert load_program(write_probe(tmp_path / "b", 0.5, "other.safetensors"), FACTS).digest == first
    assert load_program(write_probe(tmp_path / "a", 0.25), FACTS).digest != first
    both = probing("p.safetensors#x"), probing("p.safetensors#y")
    parts = {"x": torch.ones(32), "y": torch.zeros(32)}
    save_file(
        {f"{n}.weight": t for n, t in parts.items()} | {f"{n}.bias": torch.zeros(1) for n in parts},
        tmp_path / "p.safetensors",
    )
    digests = []
    for text in both:
        (tmp_path / "p.yaml").write_text(text)
        digests.append(load_program(tmp_path / "p.yaml", FACTS).digest)
    assert digests[0] != digests[1]


def overwrite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In place, as ``cp`` does: what is mapped into memory changes with it."""
    with file.open("r+b") as f:
        f.write(save(tensors))


def test_a_loaded_program_keeps_the_files_of_its_options_as_they_were(tmp_path: Path) -> None:
    file = write_probe(tmp_path, 0.5)
    loaded = load_program(file, FACTS)
    overwrite(tmp_path / "probe.safetensors", {"weight": torch.zeros(32), "bias": torch.tensor([9.0])})
    analysis = loaded.checked.analyses[0]
    analyzer = analyzers.get(analysis.analyzer)
    options = analyzer.Options.model_validate(dict(analysis.options))  # as is done for every request
    seen = Observed("resid_post", torch.full((1, 1, 32), 0.01), [0], [1])
    assert analyzer.score({"seen": seen}, {}, options).value == pytest.approx(
        float(torch.sigmoid(torch.tensor(0.82)))
    )
    assert load_program(file, FACTS).digest != loaded.digest


def test_a_loaded_program_keeps_its_tensors_as_they_were(tmp_path: Path) -> None:
    save_file({"v": torch.ones(32)}, tmp_path / "v.safetensors")
    edit = {"site": "resid_post", "layers": [1], "method": "add", "vector": str(tmp_path / "v.safetensors")}
    loaded = load_program(program(intervene={"push": edit}), FACTS)
    overwrite(tmp_path / "v.safetensors", {"v": torch.zeros(32)})
    (vector,) = loaded.tensors.values()
    assert torch.equal(vector, torch.ones(32))


def test_an_analyzer_that_reads_its_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(analyzers.LinearProbe):
        class Options(analyzers.AnalyzerOptions):
            probe: Annotated[str, analyzers.Names("file")]

    monkeypatch.setitem(analyzers.BUILT_IN, "linear_probe", Own)
    file = write_probe(tmp_path, 0.5)
    loaded = load_program(file, FACTS)
    assert loaded.checked.analyses[0].options == {"probe": str(tmp_path / "probe.safetensors")}
    write_probe(tmp_path, 0.25)
    assert load_program(file, FACTS).digest != loaded.digest
    (tmp_path / "probe.safetensors").unlink()
    assert "No such file" in found(file)["analyze.a.options.probe"]


def test_a_server_reads_no_files_for_options(tmp_path: Path) -> None:
    file = write_probe(tmp_path, 0.5)
    with pytest.raises(
        ProgramError, match=r"analyze\.a\.options\.probe: names a file, and files are not read"
    ):
        load_program(file, FACTS, allow_files=False)


# -- tensors without a model ----------------------------------------------------------------------


def test_tensor_files_are_read_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"v": torch.ones(32), "m": torch.ones(2, 32)}, "v.safetensors")
    save_file({"weight": torch.ones(32), "bias": torch.zeros(1), "scale": torch.ones(3)}, "bad.safetensors")
    edit = {"site": "resid_post", "method": "ablate"}
    intervene = {
        "good": {**edit, "vector": "v.safetensors#v"},
        "matrix": {**edit, "vector": "v.safetensors#m"},
        "missing": {**edit, "vector": "v.safetensors#w"},
    }
    observe = {"probed": {**STATE, "reduce": {"probe": "bad.safetensors"}}}
    said = found(program(observe=observe, intervene=intervene))
    assert set(said) == {
        "intervene.matrix.vector",
        "intervene.missing.vector",
        "observe.probed.reduce.probe",
    }
    assert "has shape [2, 32]; [width] is needed" in said["intervene.matrix.vector"]
    assert "tensor 'scale' has shape [3]; [32] is needed" in said["observe.probed.reduce.probe"]
    stated = found(program(model={"hidden": 16}, intervene={"good": intervene["good"]}))
    assert "has shape [32]; [16] is needed" in stated["intervene.good.vector"]


def test_edits_that_undo_each_other_are_said_beside_faults_of_analyzers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"v": torch.zeros(32)}, "v.safetensors")
    zero = {"site": "resid_post", "layers": [1], "method": "ablate", "vector": "v.safetensors"}
    analyze = {"a": {"analyzer": "nope", "observe": "seen"}}
    said = found(program(observe={"seen": STATE}, intervene={"e": zero}, analyze=analyze), FACTS)
    assert said["intervene.e.vector"] == "is a zero vector, where a direction is needed"
    assert set(said) == {"intervene.e.vector", "analyze.a.analyzer"}
