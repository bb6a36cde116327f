"""Bad input: a clear error that names file, field or request, and an engine that goes on."""

import json
import logging
import sys

import pytest
import torch
from safetensors.torch import save_file

from conftest import TINY_ENGINE, hook_llm
from oracle import assert_rows_close, fed
from prompts import greedy
from vllm_hook.errors import (
    CapacityError,
    HookError,
    IncompleteCaptureError,
    ModelMismatchError,
    ProgramError,
    SiteError,
    SpanError,
    UnsupportedError,
)

pytestmark = pytest.mark.engine

STATE = {"site": "resid_post", "layers": [2], "positions": "all", "dtype": "float32"}
PROMPT = {"prompt_token_ids": list(range(20, 32))}


def still_works(llm, reference, name):
    """A normal observed request and a plain one give what they should."""
    observed, plain = llm.generate([PROMPT, PROMPT], greedy(), hook=[name, False], use_tqdm=False)
    assert_rows_close(observed.hook.observed["state"].values, reference.run(fed(observed))["resid_post"][[2]])
    assert plain.hook is None
    assert plain.outputs[0].token_ids == observed.outputs[0].token_ids
    assert llm.sites()["bytes"] > 0


@pytest.fixture
def good(use):
    return use({"state": STATE}, name="good")


# -- programs ---------------------------------------------------------------------------------


def observing(**changes):
    return {"schema": 1, "name": "bad", "observe": {"state": {**STATE, **changes}}}


BAD_PROGRAMS = {
    "unknown-key": ({**observing(), "observes": {}}, ProgramError, r"observes"),
    "unknown-field": (observing(layer=[2]), ProgramError, r"observe\.state\.layer"),
    "wrong-type": (observing(layers="two"), ProgramError, r"observe\.state\.layers"),
    "layer-out-of-range": (observing(layers=[4]), ProgramError, r"observe\.state\.layers.*4"),
    "negative-layer-out-of-range": (observing(layers=[-5]), ProgramError, r"observe\.state\.layers.*-5"),
    "head-out-of-range": (observing(site="z", heads=[4]), ProgramError, r"observe\.state\.heads.*4"),
    "kv-head-out-of-range": (observing(site="k", heads=[2]), ProgramError, r"observe\.state\.heads.*2"),
    "unknown-site": (observing(site="residual"), ProgramError, r"observe\.state\.site.*residual"),
    "unknown-span": (
        observing(positions={"span": "nowhere"}),
        ProgramError,
        r"observe\.state\.positions.*nowhere",
    ),
    "model-mismatch": ({**observing(), "model": {"layers": 5}}, ModelMismatchError, r"model\.layers.*5"),
    "no-file": ("/nowhere/guard.yaml", ProgramError, r"/nowhere/guard\.yaml"),
    "no-tensor-file": (
        observing(reduce={"probe": "/nowhere/p.safetensors"}),
        ProgramError,
        r"reduce\.probe.*/nowhere/p\.safetensors",
    ),
}


@pytest.mark.parametrize("kind", BAD_PROGRAMS)
def test_bad_program(tiny_llama, tiny_reference, good, kind):
    source, error, message = BAD_PROGRAMS[kind]
    before = tiny_llama.programs()
    with pytest.raises(error, match=f"(?s){message}"):
        tiny_llama.load_program(source)
    assert tiny_llama.programs() == before
    still_works(tiny_llama, tiny_reference, good)


def tensors(width=64, **changes):
    return {"weight": torch.ones(width), "bias": torch.zeros(1), **changes}


BAD_TENSORS = {
    "unreadable": (b"these are not tensors", "safetensors|read"),
    "empty": (b"", "safetensors|read"),
    "wrong-width": (tensors(63), "63"),
    "nan": (tensors(weight=torch.full((64,), float("nan"))), "NaN|nan|finite"),
    "inf": (tensors(bias=torch.tensor([float("inf")])), "inf|Inf|finite"),
    "no-weight": ({"bias": torch.zeros(1), "other": torch.ones(64)}, "weight"),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensor_file(tiny_llama, tiny_reference, good, tmp_path, kind):
    """The message names the program file, the field, and what is wrong."""
    content, message = BAD_TENSORS[kind]
    path = tmp_path / "probe.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else save_file(content, path)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(observing(reduce={"probe": "probe.safetensors"})))
    with pytest.raises(ProgramError, match=f"(?s)bad.json.*observe.state.reduce.probe.*({message})"):
        tiny_llama.load_program(file)
    still_works(tiny_llama, tiny_reference, good)


def test_all_errors_of_a_file_at_once_with_lines(tiny_llama, tmp_path):
    """What the schema finds, and, of a file that fits it, what the model finds."""
    file = tmp_path / "two.yaml"
    for lines in (
        ("a: {site: nothing, positions: all}", "b: {site: z, layer: [0], positions: all}"),
        ("a: {site: resid_post, layers: [9], positions: all}", "b: {site: z, heads: [7], positions: all}"),
    ):
        file.write_text("schema: 1\nname: two\nobserve:\n  " + "\n  ".join(lines) + "\n")
        with pytest.raises(ProgramError, match=r"two\.yaml: 2 problems") as caught:
            tiny_llama.load_program(file)
        assert [p.line for p in caught.value.problems] == [4, 5]
        assert [p.field.split(".")[1] for p in caught.value.problems] == ["a", "b"]


def test_site_that_is_not_armed(tiny_dir, tiny_reference):
    program = {"schema": 1, "name": "good", "observe": {"state": STATE}}
    with hook_llm(tiny_dir("llama"), programs=[program], arm={"q": {"layers": [1], "rows": "last"}}) as llm:
        for observe, message in (
            ({"site": "resid_pre", "layers": [2], "positions": "all"}, "resid_pre layer 2"),
            ({"site": "resid_post", "layers": [1], "positions": "all"}, "resid_post layer 1"),
            ({"site": "q", "layers": [1], "positions": "prompt"}, "q layer 1"),  # armed for last rows only
            (
                {"site": "attention_mass", "layers": [1], "rows": "last_prompt", "keys": ["s"]},
                "attention layer 1",
            ),
        ):
            with pytest.raises(SiteError, match=f"'other' needs {message}.*armed"):
                llm.load_program(
                    {
                        "schema": 1,
                        "name": "other",
                        "spans": {"s": {"tokens": [0, 1]}},
                        "observe": {"x": observe},
                    }
                )
        llm.load_program(
            {
                "schema": 1,
                "name": "q",
                "observe": {"x": {"site": "q", "layers": [1], "positions": "last_prompt"}},
            }
        )
        still_works(llm, tiny_reference, "good")


# -- requests ---------------------------------------------------------------------------------

BAD_REQUESTS = {
    "unknown-program": ("nonsense", ProgramError, "'nonsense'.*loaded: .*good"),
    "not-json": ("{not json", ProgramError, r"^hook: .*JSON"),
    "wrong-type": (7, ProgramError, r"^hook: 7"),
    "unknown-key": ({"uses": ["good"]}, ProgramError, r"^hook: .*uses"),
    "named-twice": ({"use": ["good", "good"]}, ProgramError, "twice"),
    "unknown-span": ({"use": ["good"], "spans": {"data": [0, 3]}}, ProgramError, "data"),
    "span-outside": (
        {"use": ["spanned"], "spans": {"data": [5, 300]}},
        SpanError,
        r"spans\.data.*300.*12 tokens",
    ),
    "span-empty": ({"use": ["spanned"], "spans": {"data": [5, 5]}}, ProgramError, r"spans\.data.*empty"),
    "no-messages": (
        {"use": ["chatty"]},
        SpanError,
        r"'chatty'.*spans\.data.*chat|'chatty'.*spans\.data.*token ids",
    ),
    "selector-outside": (
        {"use": ["outside"]},
        SpanError,
        r"'outside'.*observe\.x\.positions.*\[0, 50\].*12 tokens",
    ),
    "set": ({"use": ["good"], "set": {"calm.strength": 2.0}}, ProgramError, "calm.strength"),
}


@pytest.fixture
def odd_programs(use, good):
    """Programs that some prompts do not fit."""
    use(
        {"x": {**STATE, "positions": {"span": "data"}}},
        name="spanned",
        spans={"data": {"text": "not in any prompt"}},
    )
    use({"x": {**STATE, "positions": {"span": "data"}}}, name="chatty", spans={"data": {"message": "user"}})
    use({"x": {**STATE, "positions": {"range": [0, 50]}}}, name="outside")
    return good


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_bad_request(tiny_llama, tiny_reference, odd_programs, kind):
    """Refused before it runs; its neighbours of the same call leave nothing behind."""
    hook, error, message = BAD_REQUESTS[kind]
    with pytest.raises(error, match=f"(?s){message}"):
        tiny_llama.generate([PROMPT, PROMPT], greedy(), hook=["good", hook], use_tqdm=False)
    assert not tiny_llama.llm.llm_engine.has_unfinished_requests()
    still_works(tiny_llama, tiny_reference, "good")


def test_span_not_found_in_text(tiny_llama, tiny_reference, odd_programs):
    with pytest.raises(SpanError, match=r"'spanned'.*spans\.data.*'not in any prompt'") as named:
        tiny_llama.generate("the quick brown fox", greedy(), hook="spanned", use_tqdm=False)
    assert not getattr(named.value, "__notes__", [])
    with pytest.raises(SpanError) as default:  # nobody named the program
        tiny_llama.generate("the quick brown fox", greedy(), use_tqdm=False)
    if sys.version_info >= (3, 11):
        assert default.value.__notes__ == [
            "No hook= was given, so every loaded program is used; hook=False uses none."
        ]
    still_works(tiny_llama, tiny_reference, "good")


def test_parameters_may_name_the_programs(tiny_llama, good, use):
    """As on plain vLLM; but not both they and ``hook=``."""
    use({"x": STATE}, name="other")

    def used(extra, **hook):
        params = greedy(extra_args=extra)
        (out,) = tiny_llama.generate(PROMPT, params, use_tqdm=False, **hook)
        assert params.extra_args == extra
        return {name for name, _ in out.hook.programs} if out.hook is not None else set()

    assert used(None) == {"good", "other"}
    assert used({"hook": "good"}) == {"good"}
    assert used({"hook": ["other", "good"]}) == {"good", "other"}
    assert used({"hook": False}) == used(None, hook=False) == used(None, hook=None) == set()
    for hook in ("good", False, None, {"use": ["other"]}):
        with pytest.raises(ProgramError, match=r"hook: is given twice.*'other'.*extra_args"):
            used({"hook": "other"}, hook=hook)
    with pytest.raises(ProgramError, match="nobody") as named:
        used({"hook": "nobody"})
    assert not getattr(named.value, "__notes__", [])


def test_number_of_specs(tiny_llama, good):
    with pytest.raises(ProgramError, match="3 given for 2 prompts"):
        tiny_llama.generate([PROMPT, PROMPT], greedy(), hook=["good"] * 3)


def test_programs_wants_a_list(tiny_dir):
    with pytest.raises(ProgramError, match="list"), hook_llm(tiny_dir("llama"), programs="guard.yaml"):
        pass


def test_forged_payload_is_refused(tiny_llama, tiny_reference, good):
    """The key of the resolved form is ours: a request cannot bring its own."""
    forged = greedy(extra_args={"vllm_hook": {"watch": [], "floor": None}})
    with pytest.raises(ProgramError, match="reserved"):
        tiny_llama.llm.generate(PROMPT, forged, use_tqdm=False)
    still_works(tiny_llama, tiny_reference, good)


def test_beam_search_is_refused(tiny_llama):
    with pytest.raises(UnsupportedError, match="beam search"):
        tiny_llama.beam_search([PROMPT], None)


def test_capacity(tiny_llama, tiny_reference, good, use, monkeypatch):
    """Dense attention beyond its byte budget, and a result beyond its own, are refused at admission."""
    from vllm_hook.engine import frontend

    use({"x": {"site": "attention", "layers": "all", "rows": "all"}}, name="dense")
    monkeypatch.setattr(frontend, "ATTENTION_BYTES", 1 << 14)
    with pytest.raises(CapacityError, match=r"dense/x.*limit"):
        tiny_llama.generate(PROMPT, greedy(40), hook="dense", use_tqdm=False)
    monkeypatch.setattr(frontend, "RESULT_BYTES", 1 << 10)
    with pytest.raises(CapacityError, match="limit"):
        tiny_llama.generate(PROMPT, greedy(40), hook="good", use_tqdm=False)
    monkeypatch.undo()
    still_works(tiny_llama, tiny_reference, good)


# -- faults of our own ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["vllm_hook.engine.runner.collect", "vllm_hook.runtime.plan.make_plan"])
def test_a_fault_in_the_worker_harms_nobody(tiny_llama, tiny_reference, good, monkeypatch, caplog, where):
    """The request is told; its neighbours and its own tokens are as always."""

    plain = tiny_llama.generate([PROMPT] * 3, greedy(), hook=False, use_tqdm=False)

    def broken(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(where, broken)
    with caplog.at_level(logging.CRITICAL):
        outs = tiny_llama.generate([PROMPT] * 3, greedy(), hook=[False, good, False], use_tqdm=False)
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in plain]
    assert outs[0].hook is None
    result = outs[1].hook
    assert "RuntimeError: broken on purpose" in result.errors["good/state"]
    with pytest.raises(IncompleteCaptureError, match="broken on purpose"):
        result.observed["state"]
    still_works(tiny_llama, tiny_reference, good)


def test_a_fault_of_one_step_is_not_hidden(tiny_llama, tiny_reference, good, monkeypatch):
    """Rows of one step lost, rows of the others there: the observation is incomplete, and says which."""
    from vllm_hook.engine import runner

    real, calls = runner.collect, []

    def broken_once(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken once")
        return real(*args)

    monkeypatch.setattr(runner, "collect", broken_once)
    out = tiny_llama.generate(PROMPT, greedy(), hook=good, use_tqdm=False)[0]
    monkeypatch.undo()
    assert len(calls) == 4
    assert "1 of the positions asked for are missing (12)" in out.hook.errors["good/state"]
    still_works(tiny_llama, tiny_reference, good)


def test_an_analyzer_that_fails(tiny_llama, use, monkeypatch):
    from vllm_hook.analyzers.attention_tracker import AttentionTracker

    name = use(
        {"focus": {"site": "attention_mass", "heads": [[1, 0]], "rows": "last_prompt", "keys": ["a", "b"]}},
        spans={"a": {"tokens": [0, 2]}, "b": {"tokens": [2, 5]}},
        analyze={
            "i": {
                "analyzer": "attention_tracker",
                "observe": "focus",
                "options": {"instruction": "a", "data": "b"},
            }
        },
    )
    good = tiny_llama.generate(PROMPT, greedy(), hook=name, use_tqdm=False)[0].hook
    assert 0 < good.scores["i"].value < 1
    monkeypatch.setattr(AttentionTracker, "score", lambda *args: 1 / 0)
    bad = tiny_llama.generate(PROMPT, greedy(), hook=name, use_tqdm=False)[0].hook
    assert "ZeroDivisionError" in bad.errors[f"{name}/i"]
    with pytest.raises(IncompleteCaptureError, match="ZeroDivisionError"):
        bad.scores["i"]
    assert torch.equal(bad.observed["focus"].values, good.observed["focus"].values)


# -- engines that cannot be observed ----------------------------------------------------------


def test_unknown_vllm_is_refused_by_name(tiny_dir, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(UnsupportedError, match=r"0\.99\.1.*supported: 0\.32\.0"), hook_llm(tiny_dir("llama")):
        pass


def test_a_moved_method_is_refused_by_name(tiny_dir, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_preempt_request")
    with pytest.raises(UnsupportedError, match=r"Scheduler\._preempt_request"), hook_llm(tiny_dir("llama")):
        pass


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"runner": "pooling"}, "runner"),
        ({"_api_process_count": 2}, "api_server_count=2"),
    ],
)
def test_unproven_set_ups_are_refused(tiny_dir, kwargs, name):
    with pytest.raises(UnsupportedError, match=name), hook_llm(tiny_dir("llama"), **kwargs):
        pass


def test_bad_program_at_start(tiny_dir):
    with (
        pytest.raises(ProgramError, match=r"observe\.state\.layers"),
        hook_llm(tiny_dir("llama"), programs=[observing(layers=[9])]),
    ):
        pass
    with pytest.raises(SiteError, match="residual"), hook_llm(tiny_dir("llama"), arm={"residual": {}}):
        pass
    with (
        pytest.raises(SiteError, match=r"arm\.resid_post\.layers.*\[4\]"),
        hook_llm(tiny_dir("llama"), arm={"resid_post": {"layers": [4]}}),
    ):
        pass


def test_plug_ins_without_us(tiny_dir, monkeypatch, tmp_path):
    """VLLM_PLUGINS keeps us out of the other processes: HookLLM must not pretend."""
    import os
    import subprocess
    import sys

    script = tmp_path / "start.py"
    script.write_text(
        "import sys\nfrom vllm_hook.llm import HookLLM\n"
        "if __name__ == '__main__':\n"
        f"    llm = HookLLM(sys.argv[1], programs=[{observing()!r}], **{TINY_ENGINE!r})\n"
        "    print('STARTED')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_dir("llama"))],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "VLLM_PLUGINS": "other", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert "STARTED" not in done.stdout
    assert done.returncode != 0
    assert "VLLM_PLUGINS" in done.stderr


# -- compile cache ----------------------------------------------------------------------------


def test_compile_cache_key(tiny_dir, tmp_path):
    """Plain, armed and otherwise armed differ; where a program file lies, and its name, do not matter."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_hook.engine import plugin

    plugin.register()

    def key(**section):
        extra = {"additional_config": {"vllm_hook": section}} if section else {}
        return (
            EngineArgs(str(tiny_dir("llama")), **TINY_ENGINE, **extra).create_engine_config().compute_hash()
        )

    paths = []
    for folder, name in (("a", "one"), ("b", "two")):
        path = tmp_path / folder / f"{name}.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**observing(), "name": name}))
        paths.append(str(path))
    plain, first, second = key(), key(programs=[paths[0]]), key(programs=[paths[1]])
    assert plain == key()
    assert first == second
    assert first != plain
    armed = key(arm={"resid_post": {"layers": [2]}})
    assert armed == key(arm={"resid_post": {"layers": [-2]}})  # the same layer
    assert len({plain, first, armed, key(arm={"resid_post": {"layers": [1]}})}) == 4


def test_every_error_is_a_hook_error():
    for error in (
        ProgramError,
        SiteError,
        SpanError,
        CapacityError,
        ModelMismatchError,
        IncompleteCaptureError,
        UnsupportedError,
    ):
        assert issubclass(error, HookError)
        assert issubclass(error, ValueError)  # vLLM's servers answer a ValueError with 400
