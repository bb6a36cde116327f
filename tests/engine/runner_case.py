"""One engine configuration, every scheduling case: ``runner_case.py MODEL v1|v2|v2-async eager|compiled``.

vLLM reads the choice of its model runner from the environment on import, so each runs in a process of
its own. V2 on CPU goes through Triton's interpreter. Prints one JSON object: case -> figures, which
``test_runners.py`` judges.
"""

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
model, runner, mode = sys.argv[1:4]
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",  # a tiny model; two configurations run side by side
)
if runner.startswith("v2"):
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")
    import triton.backends

    class _Driver:
        is_active = staticmethod(lambda: False)

    class _Cpu:
        driver, compiler = _Driver, None

    triton.backends.backends["cpu"] = _Cpu  # before vllm is imported, which looks for it

import torch  # noqa: E402

from oracle import Reference, fed, row_errors  # noqa: E402

BLOCK, BLOCKS, LAYERS = 32, 40, [0, 1, 2, 3]
PREEMPTED = [*range(50, 61), 180]  # lengths of prompts; the last come in last and are preempted first
SPANS = {"start": {"tokens": [0, 2]}, "rest": {"tokens": [2, None]}}


def program(name, sites, selector, attention=()):
    observe = {s: {"site": s, "layers": LAYERS, "positions": selector, "dtype": "float32"} for s in sites}
    observe |= {a: {"site": a, "layers": LAYERS, "rows": selector} for a in attention}
    if "attention_mass" in observe:
        observe["attention_mass"]["keys"] = ["start", "rest"]
    return {"schema": 1, "name": name, "spans": SPANS, "observe": observe}


PROGRAMS = [
    program(
        "everywhere",
        ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z"),
        "all",
        ("attention", "attention_mass"),
    ),
    program("last", ("resid_post",), "last_prompt", ("attention_mass",)),
    program("prompt", ("resid_post",), "prompt", ("attention_mass",)),
    program("tail", ("resid_post",), {"range": [-3, None]}),
    program("late", ("resid_post",), {"range": [100, 103]}, ("attention",)),
    program("new", ("resid_post",), "generated", ("attention",)),
    program("mixed", ("resid_post",), [{"range": [3, 5]}, "last_prompt", {"generated": [1, None]}]),
]


def tokens(lengths, seed):
    r = random.Random(seed)
    return [{"prompt_token_ids": [r.randrange(10, 500) for _ in range(n)]} for n in lengths]


def params(max_tokens, **more):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def make_engine(programs=PROGRAMS, **changes):
    if runner == "v2-async":
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config.__func__

        def patched(cls, vllm_config):
            check(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = True  # the CPU platform forces it off

        CpuPlatform.check_and_update_config = classmethod(patched)
    from vllm_hook.llm import HookLLM

    given = {
        "max_model_len": 512,
        "max_num_seqs": 40,
        "max_num_batched_tokens": 128,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "dtype": "float32",
        "enforce_eager": mode == "eager",
        "seed": 0,
    }
    return HookLLM(model, programs=programs, **{**given, **changes})


class Judge:
    """Compares a result with Hugging Face run on the same tokens."""

    def __init__(self):
        self.reference = Reference(model)

    def __call__(self, output, sample=0, hook=None):
        """Positions by observation, largest relative error, largest |dp|, errors."""
        result = hook or output.outputs[sample].hook
        want = self.reference.run(fed(output, sample))
        rel, dp, positions = 0.0, 0.0, {}
        for name in result.observed:
            got = result.observed[name]
            positions[name.rpartition("/")[2]] = got.positions
            if not got.positions:
                continue
            rows = got.positions
            if got.site == "attention_mass":
                probs = want["attention"].flatten(0, 1)[:, rows]
                n = len(output.prompt_token_ids)
                expected = torch.stack([probs[..., :2].sum(-1), probs[..., 2:n].sum(-1)], dim=-1)
                dp = max(dp, float((got.values - expected).abs().max()))
            elif got.site == "attention":
                expected = want["attention"].flatten(0, 1)[:, rows, : rows[-1] + 1]
                dp = max(dp, float((got.values - expected).abs().max()))
            else:
                rel = max(rel, float(row_errors(got.values, want[got.site][:, rows]).max()))
        return {
            "prompt": len(output.prompt_token_ids),
            "fed": len(fed(output, sample)),
            "positions": positions,
            "rel": rel,
            "dp": dp,
            "errors": result.errors,
            "cached": output.num_cached_tokens,
        }


def main():
    llm, judge = make_engine(), Judge()
    core = llm.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    told = {
        "runner": "v2" if worker.use_v2_model_runner else "v1",
        "async": bool(llm.llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "eager": bool(llm.llm.llm_engine.vllm_config.model_config.enforce_eager),
    }

    def run(prompts, sampling, hook):
        return llm.generate(prompts, sampling, hook=hook, use_tqdm=False)

    # A prompt of 300 in chunks of 128, beside others.
    told["chunked"] = [judge(o) for o in run(tokens((7, 50, 300, 3, 201, 17), 0), params(5), "everywhere")]
    told["chunked_last"] = [judge(o) for o in run(tokens((300, 4, 290), 1), params(3), "last")]

    # A warm prefix cache: the second prompt shares 320 tokens with the first.
    base = tokens((320,), 2)[0]["prompt_token_ids"]
    run([{"prompt_token_ids": base}], params(1), False)
    shared = [
        {"prompt_token_ids": base + extra["prompt_token_ids"]} for extra in tokens((9, 20, 33, 40, 12), 3)
    ]
    for key, prompt, hook in zip(
        ("plain", "last", "tail", "new", "prompt"),
        shared,
        (False, "last", "tail", "new", "prompt"),
        strict=True,
    ):
        out = run([prompt], params(4), hook)[0]
        told[f"warm_{key}"] = judge(out) if hook else {"cached": out.num_cached_tokens}
    told["warm_late"] = judge(run([{"prompt_token_ids": base}], params(4), "late")[0])
    told["warm_mixed"] = judge(run([{"prompt_token_ids": base}], params(4), "mixed")[0])

    # Forced preemption: twelve requests that outgrow the KV cache.
    preempted = []
    original = core.scheduler._preempt_request

    def recording(request, *args, **kwargs):
        preempted.append([request.num_prompt_tokens, request.num_computed_tokens])
        return original(request, *args, **kwargs)

    core.scheduler._preempt_request = recording
    outs = run(tokens(PREEMPTED, 4), params(70), ["last", "new", "mixed", "everywhere"] * 3)
    core.scheduler._preempt_request = original
    told["preemption"] = {"preempted": preempted, "requests": [judge(o) for o in outs]}

    # n = 3, each sample with its own tokens.
    out = run(tokens((45,), 5), params(6, n=3, temperature=1.5, seed=None), "everywhere")[0]
    told["n3"] = {
        "distinct": len({tuple(o.token_ids) for o in out.outputs}),
        "samples": [judge(out, i) for i in range(3)],
    }

    # A stop string that ends generation: rows beyond it are not returned.
    plain = run(tokens((20,), 6), params(12), False)[0].outputs[0]
    tokenizer = llm.get_tokenizer()
    pieces = [tokenizer.decode([t]) for t in plain.token_ids]
    at = next(
        i
        for i in range(3, 12)
        if pieces[i] and "\ufffd" not in pieces[i] and pieces[i] not in "".join(pieces[:i])
    )
    out = run(tokens((20,), 6), params(12, stop=[pieces[at]]), "everywhere")[0]
    told["stop"] = {"tokens": len(out.outputs[0].token_ids), "at": at, **judge(out)}

    # One of three is aborted mid-way; the others are not disturbed.
    told["abort"] = abort_case(llm, judge)

    # Forty at once, lengths all different, against each alone.
    prompts = tokens(range(3, 43), 8)
    names = ["everywhere", "last", "new", "prompt", "mixed"] * 8
    outs = run(prompts, params(4), names)
    told["forty"] = [{"hook": h, **judge(o)} for h, o in zip(names, outs, strict=True)]
    alone = 0.0
    for i in range(0, 40, 7):
        single = run([prompts[i]], params(4), names[i])[0]
        if single.outputs[0].token_ids != outs[i].outputs[0].token_ids:
            continue
        for name in single.hook.observed:
            a, b = single.hook.observed[name], outs[i].hook.observed[name]
            assert a.positions == b.positions
            alone = max(alone, float(row_errors(b.values, a.values).max()))
    told["forty_alone"] = alone
    run(tokens((5,), 9), params(2), False)  # the engine tells the worker who finished with its next step
    told["left"] = llm.llm.llm_engine.collective_rpc("vllm_hook_rpc", args=("status",))[0]["requests"]
    print("RESULT" + json.dumps(told))


def abort_case(llm, judge):
    engine = llm.llm.llm_engine
    prompts = tokens((30, 40, 25), 7)
    finished = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(f"abort-{i}", prompt, llm._with_hook(params(8), "everywhere"))
    steps, outs = 0, []
    while engine.has_unfinished_requests():
        outs += engine.step()
        steps += 1
        if steps == 4:
            engine.abort_request(["abort-1"])
    for out in outs:
        if out.finished:
            finished[out.request_id] = out
    return {name: judge(out) for name, out in sorted(finished.items()) if name != "abort-1"}


if __name__ == "__main__":
    main()
