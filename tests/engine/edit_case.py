"""One engine configuration, every intervention: ``edit_case.py MODEL v1|v2|v2-async eager|compiled``.

As ``runner_case.py``, whose environment and engine it uses: prints one JSON object of figures, which
``test_edit_runners.py`` judges. Every figure is a comparison with Hugging Face edited by hooks.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import runner_case as base  # reads the arguments and sets the environment, before vllm is imported
import torch

from edit_programs import HEAD, METHODS, OTHERS, STREAM, edit_programs, gate_programs
from editing import Tensors, compare, edited, reading
from oracle import Reference, positions_of

BLOCKS = 1000
ONCE = ("embed", "final_norm")
WATCH = {
    "schema": 1,
    "name": "watch",
    "observe": {
        site: {"site": site, "positions": "all", "dtype": "float32"}
        | ({} if site in ONCE else {"layers": "all"})
        for site in (*STREAM, *HEAD)
    },
}
PREEMPTED = (
    "attend-more",
    "select-generated",
    "stack-one-layer",
    "rows-cosine-0",
    "gate-norm-mean",
    "gate-probe-last",
)


def bounds_of(reference, tensors, programs, prompts):
    """For every gate a bound in the widest gap near the middle of what its prompts give."""
    bounds = {}
    for program in programs:
        found = []
        c, e = program["observe"]["c"], program["intervene"]["e"]
        latched = program["name"].startswith("gate")
        for prompt in prompts:
            states = reference.run(prompt)[c["site"]][c["layers"][0]]
            value = reading(c["reduce"], tensors, states)
            if not latched:
                found += value.tolist()
                continue
            rows = sorted(positions_of(c["positions"], prompt, [], {}))
            over, above = e["when"].get("over", "any"), "above" in e["when"]
            pick = {"mean": value[rows].mean(), "any": value[rows].max() if above else value[rows].min()}
            pick["all"] = value[rows].min() if above else value[rows].max()
            found.append(float(pick[over]))
        found.sort()
        middle = range(len(found) // 3, max(len(found) * 2 // 3, len(found) // 3 + 1))
        at = max(middle, key=lambda i: found[i + 1] - found[i])
        bounds[program["name"]] = (found[at] + found[at + 1]) / 2
    return bounds


def outcome(reference, tensors, program, prompt):
    """Whether the gate of a latched program is open, by Hugging Face."""
    ids, last = prompt["prompt_token_ids"], len(reference.layers) - 1
    plain = reference.run(ids)["resid_post"][last, -1]
    with edited(reference, [program], tensors, ids):
        return not torch.allclose(reference.run(ids)["resid_post"][last, -1], plain, rtol=1e-3)


def main():
    folder = tempfile.TemporaryDirectory()
    reference = Reference(base.model)
    config = reference.model.config
    tensors = Tensors(folder.name, config.hidden_size, config.head_dim)
    start = base.tokens((64,), 11)[0]["prompt_token_ids"]
    branches = [start + t["prompt_token_ids"] for t in base.tokens((9, 17, 5, 26), 12)]
    bounds = bounds_of(reference, tensors, gate_programs(tensors.ref, {}), branches)
    edits, gates = edit_programs(tensors.ref), gate_programs(tensors.ref, bounds)
    if base.runner != "v1":  # on CPU, Triton's interpreter: every method and site once, not their product
        edits = [p for i, p in enumerate(edits) if i >= len(edits) - OTHERS or (i // METHODS + i) % 4 == 0]
        gates = [p for i, p in enumerate(gates) if i % 3 == 0 or p["name"] in PREEMPTED]
    by_name = {p["name"]: p for p in (*edits, *gates)}
    began = time.time()
    llm = base.make_engine([*edits, *gates, WATCH], num_gpu_blocks_override=BLOCKS)
    core = llm.llm.llm_engine.engine_core.engine_core
    told = {"seconds": {"start": time.time() - began}}

    def run(prompts, max_tokens, hook):
        return llm.generate(prompts, base.params(max_tokens), hook=hook, use_tqdm=False)

    def timed(name, since):
        told["seconds"][name] = round(time.time() - since, 1)
        return time.time()

    def judged(outs, names):
        return [
            {"program": n, **compare(reference, o, [by_name[n]], tensors)}
            for n, o in zip(names, outs, strict=True)
        ]

    # Every method, site and selector; prompts in chunks of 128 shared tokens, one of them longer.
    at = time.time()
    names = [p["name"] for p in edits]
    prompts = base.tokens([40 + (i * 37) % 100 for i in range(len(names))], 10)
    prompts[names.index("select-union")] = base.tokens((210,), 13)[0]
    outs = run(prompts, 32, [{"use": [n, "watch"]} for n in names])
    at = timed("edits", at)
    told["edits"] = judged(outs, names)
    at = timed("judge", at)
    if base.runner == "v1":
        for figure, out in zip(told["edits"], run(prompts, 32, False), strict=True):
            figure["plain"] = list(out.outputs[0].token_ids)
    told["warm"] = judged(run(prompts, 4, names), names)
    at = timed("warm", at)

    # Gates: four prompts with the same first two blocks, both outcomes in one batch; cold and warm.
    names = [p["name"] for p in gates for _ in branches]
    prompts = [{"prompt_token_ids": b} for _ in gates for b in branches]
    told["gates"] = {key: judged(run(prompts, 8, names), names) for key in ("cold", "warm")}
    told["outcomes"] = {
        p["name"]: [outcome(reference, tensors, p, {"prompt_token_ids": b}) for b in branches]
        for p in gates
        if p["name"].startswith("gate")
    }
    at = timed("gates", at)

    # Preemption: all but a few blocks of the KV cache are taken away.
    llm.reset_prefix_cache()
    pool = core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(BLOCKS - 36)
    names = list(PREEMPTED) * 2
    prompts = [
        {"prompt_token_ids": (b + c)[: 60 + i]}
        for i, (b, c) in enumerate(zip(branches * 3, branches[::-1] * 3, strict=True))
    ]
    prompts[-1] = {"prompt_token_ids": branches[3] + branches[2]}
    lengths = [len(p["prompt_token_ids"]) for p in prompts]
    preempted, original = [], core.scheduler._preempt_request

    def recording(request, *args, **kwargs):
        preempted.append(
            [
                names[lengths.index(request.num_prompt_tokens)],
                request.num_computed_tokens - request.num_prompt_tokens,
            ]
        )
        return original(request, *args, **kwargs)

    core.scheduler._preempt_request = recording
    outs = run(prompts, 40, names)
    core.scheduler._preempt_request = original
    pool.free_blocks(held)
    told["preemption"] = {"preempted": preempted, "requests": judged(outs, names)}
    at = timed("preemption", at)

    # One of three is aborted; the slots of all come back.
    engine, done = llm.llm.llm_engine, {}
    abort_names = ("gate-norm-mean", "select-token-ids", "select-all")
    for i, (prompt, name) in enumerate(zip(prompts, abort_names, strict=False)):
        engine.add_request(f"abort-{i}", prompt, llm._with_hook(base.params(8), name))
    steps = 0
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        steps += 1
        if steps == 4:
            engine.abort_request(["abort-1"])
    told["abort"] = {
        r: compare(reference, done[r], [by_name[abort_names[int(r[-1])]]], tensors)
        for r in ("abort-0", "abort-2")
    }
    run(base.tokens((5,), 9), 2, False)  # the engine tells the worker who finished with its next step
    status = llm.llm.llm_engine.collective_rpc("vllm_hook_rpc", args=("status",))[0]
    told["left"] = {"requests": status["requests"], **status["slots"]}
    told["runner"] = "v2" if core.model_executor.driver_worker.worker.use_v2_model_runner else "v1"
    told["async"] = bool(llm.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    told["eager"] = bool(llm.llm.llm_engine.vllm_config.model_config.enforce_eager)
    print("RESULT" + json.dumps(told))


if __name__ == "__main__":
    main()
