"""Observation changes nothing: bit for bit, on the same engine and schedule.

Batches are compared within one process and with prefix caching off, so that both runs have the same
schedule. What is compared is every token and every logprob as it stands in the output.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from child import told_by
from conftest import ARM_ALL, hook_llm, stop_engine
from oracle import Reference, assert_rows_close, fed
from prompts import greedy, token_prompts
from vllm_hook.errors import ProgramError

pytestmark = pytest.mark.engine

LENGTHS = [2, 3, 4, 7, 9, 12, 15, 19, 24, 30, 37, 45, 54, 66, 81, 100]
EVERYWHERE = {
    "schema": 1,
    "name": "everywhere",
    "observe": {
        **{site: {"site": site, "positions": "all"} for site in ARM_ALL if site != "attention"},
        "attention": {"site": "attention", "layers": "all", "rows": "all"},
    },
}
STATE = {
    "schema": 1,
    "name": "state",
    "observe": {"state": {"site": "resid_post", "layers": [2], "positions": "all", "dtype": "float32"}},
}


def sampling(kind, i):
    if kind == "greedy":
        return SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    return SamplingParams(
        temperature=1.2, top_p=0.9, seed=1000 + i, max_tokens=10, ignore_eos=True, logprobs=3
    )


def bits(output):
    """Tokens and all logprobs of a request, exactly."""

    def table(steps):
        return [None if s is None else {t: (p.logprob, p.rank) for t, p in s.items()} for s in steps or []]

    return [
        (tuple(o.token_ids), o.finish_reason, table(o.logprobs), o.cumulative_logprob) for o in output.outputs
    ], table(output.prompt_logprobs)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def compiled(request, tiny_dir):
    with hook_llm(
        tiny_dir("llama"),
        programs=[EVERYWHERE, STATE],
        enforce_eager=False,
        dtype=request.param,
        enable_prefix_caching=False,
        max_num_batched_tokens=1024,
    ) as llm:
        yield llm


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_tokens_and_logprobs_are_identical(compiled, kind):
    prompts = token_prompts(LENGTHS)
    params = [sampling(kind, i) for i in range(16)]
    off = compiled.generate(prompts, params, hook=False, use_tqdm=False)
    on = compiled.generate(prompts, params, hook=["everywhere", "state"] * 8, use_tqdm=False)
    assert [bits(o) for o in on] == [bits(o) for o in off]
    assert all(o.hook is None for o in off)
    assert all(not o.hook.errors and len(o.hook.observed) > 0 for o in on)
    assert len(on[0].hook.observed["q"].positions) == len(fed(on[0]))


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_three_observed_of_sixteen_leave_the_others_identical(compiled, kind):
    prompts = token_prompts(LENGTHS, seed=1)
    params = [sampling(kind, i) for i in range(16)]
    hooks = ["everywhere" if i in (2, 7, 15) else False for i in range(16)]
    off = compiled.generate(prompts, params, hook=False, use_tqdm=False)
    on = compiled.generate(prompts, params, hook=hooks, use_tqdm=False)
    for i in range(16):
        assert (on[i].hook is not None) == (i in (2, 7, 15))
        assert bits(on[i]) == bits(off[i]), i


def test_the_comparison_of_bits_sees_one_bit(compiled):
    """The helper is not blind: the same request in another batch is another schedule or another seed."""
    params = [sampling("seeded", i) for i in range(2)]
    a, b = compiled.generate(token_prompts([9, 9]), params, hook=False, use_tqdm=False)
    assert bits(a) != bits(b)


def test_results_of_many_requests_belong_to_their_request(tiny_llama, tiny_reference, use):
    """More than ten requests: ids in lexical order are not in order."""
    name = use(STATE["observe"])
    outs = tiny_llama.generate(token_prompts(range(5, 29)), sampling("greedy", 0), hook=name, use_tqdm=False)
    for n, out in zip(range(5, 29), outs, strict=True):
        assert len(out.prompt_token_ids) == n
        assert_rows_close(out.hook.observed["state"].values, tiny_reference.run(fed(out))["resid_post"][[2]])


def test_small_rows_of_requests_that_come_and_go(tiny_llama, tiny_reference, use):
    """They travel together; requests end at different steps, sample three times, or see other things too."""
    look = {"site": "resid_post", "layers": [1, 3], "positions": "generated"}
    name = use({"n": {**look, "reduce": {"norm": True}}, "all": {**look, "positions": "all"}})
    few = use({"n": {**look, "positions": {"generated": [2, 4]}, "reduce": {"norm": True}}})
    params = [greedy(3 + i % 7) for i in range(20)]
    params[5] = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
    hooks = [few if i % 4 == 3 else False if i % 9 == 8 else name for i in range(20)]
    prompts = token_prompts([4 + i % 8 for i in range(20)], seed=3)
    outs = tiny_llama.generate(prompts, params, hook=hooks, use_tqdm=False)
    for out, hook in zip(outs, hooks, strict=True):
        for sample in out.outputs:
            if not hook:
                assert sample.hook is None
                continue
            ids = [*out.prompt_token_ids, *sample.token_ids][:-1]
            want = tiny_reference.run(ids)["resid_post"][[1, 3]]
            got = sample.hook.observed["n"]
            first = len(out.prompt_token_ids)
            positions = range(first + 2, first + 4) if hook == few else range(first, len(ids))
            positions = [p for p in positions if p < len(ids)]
            assert got.positions == positions
            torch.testing.assert_close(got.values, want[:, positions].norm(dim=-1), rtol=1e-4, atol=0)
            if hook == name:
                assert_rows_close(sample.hook.observed["all"].values, want)


def test_one_sampling_params_object_for_several_calls(tiny_llama, use):
    name = use(STATE["observe"])
    params = sampling("greedy", 0)
    for _ in range(2):
        for prompts in (token_prompts([6]), token_prompts([6, 11])):
            outs = tiny_llama.generate(prompts, params, hook=name, use_tqdm=False)
            assert all(len(o.hook.observed["state"].positions) == len(fed(o)) for o in outs)
    assert params.extra_args is None
    assert tiny_llama.generate(token_prompts([6]), params, hook=False, use_tqdm=False)[0].hook is None


def test_chat_has_what_generate_has(tiny_llama, use):
    name = use(STATE["observe"])
    out = tiny_llama.chat(
        [{"role": "user", "content": "Say apple."}], sampling("greedy", 0), hook=name, use_tqdm=False
    )[0]
    assert out.hook.observed["state"].positions == list(range(len(fed(out))))


def test_plain_vllm_llm(tiny_dir, tiny_reference):
    """``additional_config`` and ``extra_args`` on vLLM's own class; one SamplingParams object used again."""
    import vllm

    from conftest import TINY_ENGINE

    llm = vllm.LLM(
        str(tiny_dir("llama")), additional_config={"vllm_hook": {"programs": [STATE]}}, **TINY_ENGINE
    )
    try:
        for hook in ("state", ["state"], {"use": "state"}, '{"use": ["state"]}'):
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={"hook": hook})
            for _ in range(2):
                for out in llm.generate(token_prompts([5, 21]), params, use_tqdm=False):
                    assert out.hook is not None
                    want = tiny_reference.run(fed(out))["resid_post"][[2]]
                    assert_rows_close(out.hook.observed["state"].values, want)
            assert params.extra_args == {"hook": hook}
        for nothing in (None, {}, {"hook": 0}, {"hook": False}, {"other": 1}):
            params = SamplingParams(temperature=0, max_tokens=2, extra_args=nothing)
            assert llm.generate(token_prompts([5]), params, use_tqdm=False)[0].hook is None
        chat = llm.chat(
            [{"role": "user", "content": "Say apple."}],
            SamplingParams(temperature=0, max_tokens=2, extra_args={"hook": "state"}),
            use_tqdm=False,
        )[0]
        assert chat.hook.observed["state"].positions == list(range(len(fed(chat))))
    finally:
        stop_engine(llm)


# -- other processes --------------------------------------------------------------------------


def in_a_process(model, mode, config=None, dtype="float32", **env):
    return told_by("plain_case.py", str(model), mode, json.dumps(config), dtype, **env)[0]


@pytest.mark.parametrize(("mode", "dtype"), [("eager", "float32"), ("compiled", "bfloat16")])
def test_installed_but_not_configured_is_vllm_without_us(tiny_dir, mode, dtype):
    model = tiny_dir("llama")
    with_plugin = in_a_process(model, mode, dtype=dtype)
    without = in_a_process(model, mode, dtype=dtype, VLLM_PLUGINS="")
    assert "vllm_hook.engine.plugin" in with_plugin["modules"]
    assert without["modules"] == []
    assert with_plugin["ours"] == []
    if torch.cuda.is_available() and mode == "compiled":
        # Two processes without us are not alike there: of five starts two gave one set of bits and three
        # another, whether they had compiled or loaded what another had (one step of 40, by 2.5e-4).
        for mine, theirs in zip(with_plugin["outs"], without["outs"], strict=True):
            assert mine["tokens"] == theirs["tokens"]
            assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=2e-3)
        return
    assert with_plugin["outs"] == without["outs"]


def logprobs(out):
    return [float.fromhex(bits) for step in out["bits"] for _, bits in step]


def test_engine_core_in_a_process_of_its_own(tiny_dir):
    """VLLM_ENABLE_V1_MULTIPROCESSING=1: rows cross the process boundary unchanged, those of several
    observations in one output, those of a prompt in two chunks, and what is sent ahead as it is large."""
    norms = {"site": "resid_post", "layers": [1, 3], "positions": "all", "reduce": {"norm": True}}
    several = {
        **STATE,
        "observe": {
            "n": norms,
            "large": EVERYWHERE["observe"]["attention"],
            **STATE["observe"],
            "v": {"site": "v", "layers": [0], "positions": "prompt"},
        },
    }
    config = {"vllm_hook": {"programs": [several]}}
    apart = in_a_process(tiny_dir("llama"), "eager", config, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    reference = Reference(tiny_dir("llama"))

    for out, prompt in zip(apart["outs"], token_prompts((2, 3, 9, 40, 77)), strict=True):
        tokens = [*prompt["prompt_token_ids"], *out["tokens"]][:-1]
        assert out["hook"]["errors"] == {}
        assert out["hook"]["positions"] == list(range(len(tokens)))
        want = reference.run(tokens)["resid_post"]
        assert_rows_close(torch.tensor(out["hook"]["values"]), want[[2]])
        norms = torch.tensor(out["hook"]["norms"])
        torch.testing.assert_close(norms, want[[1, 3]].norm(dim=-1), rtol=1e-4, atol=0)


def test_the_attribute_search_finds_us_where_we_are(tiny_dir):
    """The check for "nothing of ours" above is able to fail."""
    told = in_a_process(tiny_dir("llama"), "eager", {"vllm_hook": {"programs": [STATE]}})
    assert any(name.startswith("LLMEngine.") for name in told["ours"])
    assert any("Scheduler." in name for name in told["ours"])
    assert any("Runner." in name for name in told["ours"])


# -- AsyncLLM ---------------------------------------------------------------------------------


def test_async_llm(tiny_dir, tiny_reference):
    """Streaming and final-only; an abort mid-way; a program loaded on the running engine."""
    told = asyncio.run(_async(tiny_dir("llama")))

    def judge(n, layer, chunks, name):
        """The last chunk has the result of all tokens of all chunks; the others have none."""
        tokens = [t for chunk in chunks for t in chunk.outputs[0].token_ids]
        ids = [*token_prompts([n])[0]["prompt_token_ids"], *tokens][:-1]
        got = chunks[-1].hook.observed[name]
        assert [chunk.hook is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].finished
        assert len(tokens) == 6
        assert got.positions == list(range(n + 5))
        assert_rows_close(got.values, tiny_reference.run(ids)["resid_post"][[layer]])

    assert len(told["delta"]) > 1
    judge(23, 2, told["delta"], "state")
    assert len(told["final"]) == 1
    judge(31, 2, told["final"], "state")
    assert [chunk.hook for chunk in told["plain"]] == [None]
    assert len(told["plain"][0].outputs[0].token_ids) == 6
    assert len(told["cut"]) == 2
    assert not told["cut"][-1].finished
    judge(9, 3, told["later"], "x")
    assert isinstance(told["bad"], ProgramError)
    assert "nonsense" in str(told["bad"])
    assert "loaded: later, state" in str(told["bad"])
    assert told["left"] == 0  # requests that the worker still knows


async def _async(model: Path):
    """What came back, by request; ``left``: requests in the worker once the aborted one is gone."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from conftest import GPU, GPU_ENGINE, TINY_ENGINE
    from vllm_hook.engine import control

    settings = {**TINY_ENGINE, **(GPU_ENGINE if GPU else {})}
    delta, final = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
    config = {"vllm_hook": {"programs": [STATE], "arm": {"resid_post": {"layers": [2, 3]}}}}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), additional_config=config, **settings))

    async def generate(id, n, kind, tokens=6, hook="state", stop_after=None):
        extra = {"hook": hook} if hook else None
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=kind, extra_args=extra
        )
        chunks = []
        async for chunk in engine.generate(token_prompts([n])[0], params, id):
            chunks.append(chunk)
            if len(chunks) == stop_after:
                break
        return chunks

    async def in_worker():
        return (await engine.collective_rpc("vllm_hook_rpc", args=("status",)))[0]["requests"]

    try:
        names = ("delta", "final", "plain", "cut")
        several = await asyncio.gather(
            generate("delta", 23, delta),
            generate("final", 31, final),
            generate("plain", 12, final, hook=None),
            generate("cut", 40, delta, tokens=200, stop_after=2),
        )
        told = dict(zip(names, several, strict=True))
        state = {"site": "resid_post", "layers": [3], "positions": "all", "dtype": "float32"}
        await control.load_async(engine, {"schema": 1, "name": "later", "observe": {"x": state}})
        told["later"] = await generate("later", 9, final, hook="later")
        told["bad"] = (
            await asyncio.gather(generate("bad", 9, final, hook="nonsense"), return_exceptions=True)
        )[0]
        for i in range(100):  # the aborted request leaves the worker with a later step
            if await in_worker() == 0:
                break
            await generate(f"tick-{i}", 3, final, tokens=2, hook=None)
        told["left"] = await in_worker()
        return told
    finally:
        engine.shutdown()
