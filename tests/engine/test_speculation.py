"""Speculative decoding: a request owns several rows a step, and rejected positions run again."""

import pytest

from conftest import ARM_ALL, hook_llm
from oracle import assert_probs_close, assert_rows_close, fed
from prompts import greedy

pytestmark = pytest.mark.engine

OBSERVE = {
    "all": {"site": "resid_post", "layers": [3], "positions": "all", "dtype": "float32"},
    "new": {"site": "resid_post", "layers": [1], "positions": "generated", "dtype": "float32"},
    "last": {"site": "resid_pre", "layers": [2], "positions": "last_prompt", "dtype": "float32"},
    "attention": {"site": "attention", "layers": [2], "rows": "all"},
}


def test_one_row_for_each_accepted_position(tiny_dir, tiny_reference):
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    program = {"schema": 1, "name": "p", "observe": OBSERVE}
    prompts = [{"prompt_token_ids": ids * 6} for ids in ([20, 31, 44], [50, 61], [70, 71, 72, 73, 74])]
    with hook_llm(tiny_dir("llama"), programs=[program], arm=ARM_ALL, speculative_config=draft) as llm:
        scheduler = llm.llm.llm_engine.engine_core.engine_core.scheduler
        drafted, rejected = count_drafts(scheduler)
        outs = llm.generate(prompts, greedy(40), use_tqdm=False)
    assert sum(drafted) > 0
    assert sum(rejected) > 0
    for out in outs:
        n, m = len(out.prompt_token_ids), len(fed(out))
        assert out.hook.errors == {}
        seen = out.hook.observed
        assert seen["all"].positions == seen["attention"].positions == list(range(m))
        assert seen["new"].positions == list(range(n, m))
        assert seen["last"].positions == [n - 1]
        want = tiny_reference.run(fed(out))
        assert_rows_close(seen["all"].values, want["resid_post"][[3]])
        assert_rows_close(seen["new"].values, want["resid_post"][[1], n:])
        assert_rows_close(seen["last"].values, want["resid_pre"][[2], n - 1 : n])
        assert_probs_close(seen["attention"].values, want["attention"][2])


def count_drafts(scheduler):
    """Drafted and rejected tokens of each step, as the scheduler sees them."""
    drafted, rejected = [], []
    update = scheduler.update_from_output

    def counting(scheduler_output, model_runner_output):
        for id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            kept = len(model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[id]])
            drafted.append(len(drafts))
            rejected.append(len(drafts) + 1 - kept)
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = counting
    return drafted, rejected
