"""Plain ``vllm.LLM`` in a process of its own: ``plain_case.py MODEL eager|compiled CONFIG DTYPE``.

Prints one JSON object: tokens and logprobs, results if any, and where in the engine something is ours.
"""

import json
import random
import sys

LENGTHS = (2, 3, 9, 40, 77)
#: Other tests may have engines on the same GPU.
BESIDE_OTHERS = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}


def main():
    import torch
    import vllm

    model, eager, extra, dtype = sys.argv[1], sys.argv[2] == "eager", json.loads(sys.argv[3]), sys.argv[4]
    llm = vllm.LLM(
        model,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,  # the longest prompt comes in two chunks
        block_size=32,
        dtype=dtype,
        enforce_eager=eager,
        **({"additional_config": extra} if extra else {}),
        **(BESIDE_OTHERS if torch.cuda.is_available() else {}),
    )
    r = random.Random(0)
    prompts = [{"prompt_token_ids": [r.randrange(10, 500) for _ in range(n)]} for n in LENGTHS]
    hook = {"extra_args": {"hook": "state"}} if extra else {}
    params = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, **hook)
    outs = llm.generate(prompts, params, use_tqdm=False)
    told = {"outs": [tell(o) for o in outs], "ours": ours(llm)}
    told["modules"] = sorted(m for m in sys.modules if m.startswith("vllm_hook"))
    print("RESULT" + json.dumps(told))


def tell(output):
    sample = output.outputs[0]
    told = {
        "tokens": list(sample.token_ids),
        "bits": [[(t, p.logprob.hex()) for t, p in step.items()] for step in sample.logprobs],
        "hook": None,
    }
    if getattr(output, "hook", None) is not None:
        state = output.hook.observed["state"]
        told["hook"] = {
            "positions": state.positions,
            "errors": output.hook.errors,
            "values": state.values.tolist(),
            "norms": output.hook.observed["n"].values.tolist() if "n" in output.hook.observed else None,
        }
    return told


def ours(llm):
    """Instance attributes of the engine's objects that are ours by name, class or defining module."""
    engine = llm.llm_engine
    objects = [llm, engine, engine.input_processor, engine.output_processor]
    core = getattr(engine.engine_core, "engine_core", None)
    if core is not None:
        wrapper = core.model_executor.driver_worker
        objects += [core, core.scheduler, core.scheduler.kv_cache_manager, core.model_executor, wrapper]
        objects += [core.scheduler.kv_cache_manager.coordinator, wrapper.worker, wrapper.worker.model_runner]
        objects += wrapper.worker.model_runner.get_model().modules()
    return sorted(
        {
            f"{type(o).__name__}.{name}"
            for o in objects
            for name, value in vars(o).items()
            if any(
                "vllm_hook" in str(x)
                for x in (name, type(value).__module__, getattr(value, "__module__", ""))
            )
        }
    )


if __name__ == "__main__":
    main()
