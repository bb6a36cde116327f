"""Every model family's own attention and residual stream against Hugging Face."""

import pytest
import torch

from conftest import hook_llm
from oracle import HEAD, STREAM, Reference, assert_probs_close, assert_rows_close, fed
from prompts import greedy, token_prompts
from tiny import KINDS
from vllm_hook.errors import UnsupportedError

pytestmark = pytest.mark.engine

HEADS_ONLY = {"granite"}  # families whose stream sites are not known
LENGTHS = [1, 5, 18, 40, 300]  # windows are 16 wide


def program(stream):
    sites = (*STREAM, *HEAD, "embed", "final_norm") if stream else HEAD
    observe = {s: {"site": s, "positions": "all", "dtype": "float32"} for s in sites}
    observe["attention"] = {"site": "attention", "layers": "all", "rows": "all"}
    observe["mass"] = {"site": "attention_mass", "layers": "all", "rows": "all", "keys": ["first"]}
    return {"schema": 1, "name": "all", "spans": {"first": {"tokens": [0, 1]}}, "observe": observe}


@pytest.mark.parametrize("kind", KINDS)
def test_family(tiny_dir, kind):
    stream = kind not in HEADS_ONLY
    with hook_llm(tiny_dir(kind), programs=[program(stream)], enable_prefix_caching=False) as llm:
        outs = llm.generate(token_prompts(LENGTHS, 500, seed=1), greedy(6), use_tqdm=False)
        known = set(llm.sites()["sites"])
    reference = Reference(tiny_dir(kind))
    assert ("resid_post" in known) == stream
    worst, worst_dp = 0.0, 0.0
    for out in outs:
        assert out.hook.errors == {}
        want = reference.run(fed(out))
        for site in (*STREAM, *HEAD, "embed", "final_norm") if stream else HEAD:
            worst = max(
                worst, assert_rows_close(out.hook.observed[site].values, want[site], what=f"{kind} {site}")
            )
        probs = want["attention"].flatten(0, 1)
        sums = None if kind == "gpt-oss" else 1e-5  # a sink takes its share
        worst_dp = max(
            worst_dp, assert_probs_close(out.hook.observed["attention"].values, probs, sums=sums, what=kind)
        )
        mass = out.hook.observed["mass"].values
        worst_dp = max(worst_dp, assert_probs_close(mass, probs[..., :1], sums=None, what=kind))
    print(f"{kind}: max rel {worst:.2g}, max |dp| {worst_dp:.2g}")
    if "window" in kind:
        assert bool((probs[:, 100, :84] == 0).all())  # the window is really there
        assert bool((probs[:, 100, 85:101] > 0).all())


def test_tiny_attention_is_not_uniform(tiny_dir):
    """Else a wrong scale, cap or window would go unseen."""
    for kind in KINDS:
        probs = Reference(tiny_dir(kind)).run(range(10, 74))["attention"][:, :, -1]
        assert float(probs.max()) > 3 * float(probs[probs > 0].mean()), kind


def test_stream_sites_of_an_unknown_family_are_refused(tiny_dir):
    with (
        pytest.raises(UnsupportedError, match=r"'resid_post'.*q, k, v, z and the attention sites"),
        hook_llm(tiny_dir("granite"), arm={"resid_post": {"layers": [1]}}),
    ):
        pass


def test_a_wrong_rule_would_be_seen(tiny_dir):
    """Gemma's soft-cap and scale matter at the tolerance used here."""
    reference = Reference(tiny_dir("gemma2"))
    seen = reference.run(range(10, 60))
    q, k = seen["q"][1], seen["k"][1].repeat_interleave(2, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * 32**-0.5
    hidden = torch.ones(50, 50).triu(1).bool()
    naive = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    with pytest.raises(AssertionError, match="differs"):
        assert_probs_close(naive, seen["attention"][1])
