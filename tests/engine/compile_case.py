"""One engine in a process of its own, compiled as on a GPU: ``compile_case.py MODEL plain|hooked``.

vLLM compiles for a CPU in another way (one graph, no cache of its own). Here it is told to take its
piecewise backend, with its passes and its cache of compiled code; one pass that names kernels of GPUs
is left out. Prints one JSON object: tokens, bits of their log-probabilities, rows.
"""

import json
import random
import sys
from unittest import mock


def main():
    from vllm import LLM, SamplingParams
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    from vllm_hook import HookLLM

    configure = CpuPlatform.check_and_update_config

    def as_on_a_gpu(platform, config):
        configure(config)
        compilation = config.compilation_config
        compilation.mode, compilation.ir_enable_torch_wrap = CompilationMode.VLLM_COMPILE, True
        compilation.compile_sizes = []

    model, mode = sys.argv[1:]
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 32,
    }
    r = random.Random(0)
    prompts = [{"prompt_token_ids": [r.randrange(10, 500) for _ in range(n)]} for n in (3, 20, 70)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    rows = None
    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", as_on_a_gpu),
        mock.patch.object(FixFunctionalizationPass, "__call__", return_value=None),
    ):
        if mode == "plain":
            outs = LLM(model, **settings).generate(prompts, params, use_tqdm=False)
        else:
            llm = HookLLM(model, arm={"resid_post": {"rows": "last"}}, **settings)
            look = {"site": "resid_post", "layers": "all", "positions": "generated", "dtype": "float32"}
            llm.load_program({"schema": 1, "name": "look", "observe": {"h": look}})
            outs = llm.generate(prompts, params, use_tqdm=False)
            rows = [out.hook.observed["h"].values.tolist() for out in outs]
    told = {
        "tokens": [list(out.outputs[0].token_ids) for out in outs],
        "bits": [[p.logprob.hex() for x in out.outputs[0].logprobs for p in x.values()] for out in outs],
        "rows": rows,
    }
    print("RESULT" + json.dumps(told))


if __name__ == "__main__":
    main()
