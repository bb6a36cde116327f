"""Building on vLLM: what it measures is what Hugging Face measures, and a served probe is the trained one."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from conftest import hook_llm, stop_engine
from prompts import greedy
from vllm_hook.build.artifact import Output
from vllm_hook.build.backend import Edit, Lazy, Needs
from vllm_hook.build.job import Job
from vllm_hook.build.model import open_model
from vllm_hook.build.on_hf import HfBackend
from vllm_hook.build.probe import build_probe
from vllm_hook.build.prompts import Prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tiny_dir):
    return open_model(str(tiny_dir("llama")))


@pytest.fixture(scope="module")
def both(model):
    from vllm_hook.build.on_vllm import VllmBackend

    needs = Needs(states="last", masses=True, edits=True, longest=60)
    vllm = VllmBackend(model, needs, "float32")
    yield vllm, HfBackend(model, "float32")
    stop_engine(vllm.llm)


@pytest.fixture(scope="module")
def prompts(model):
    texts = ["Paris is the capital", "one two three four five six", "the fox jumps over the lazy dog today"]
    made = []
    for i, text in enumerate(texts):
        ids = tuple(model.tokenizer(text)["input_ids"])
        n = len(ids)
        keys = ((1, 3), (0, 2), (2, n))[: i + 1]  # another number of spans each
        made.append(Prompt(ids, text, (n - 1 - i, n), keys))
    return made


def test_states_and_masses_agree(both, prompts):
    vllm, hf = both
    for mine, theirs in zip(vllm.states(prompts, "last"), hf.states(prompts, "last"), strict=True):
        assert mine.shape == (4, 64)
        assert ((mine - theirs).norm(dim=-1) <= 1e-4 * theirs.norm(dim=-1)).all()
    for prompt, mine, theirs in zip(prompts, vllm.masses(prompts), hf.masses(prompts), strict=True):
        assert mine.shape == (4, 4, len(prompt.keys))
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=0)


@pytest.mark.parametrize("method", ["add", "clamp"])
def test_edits_change_answers_and_likelihoods_alike(both, prompts, method):
    vllm, hf = both
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    edit = Edit(2, method, vector, 1.5)
    plain, steered = (vllm.answers(prompts, e, 6) for e in (None, edit))
    assert [a.tokens for a in plain] != [a.tokens for a in steered]
    for e, mine in ((None, plain), (edit, steered)):
        theirs = hf.answers(prompts, e, 6)
        assert [a.tokens for a in mine] == [a.tokens for a in theirs]
        assert [a.nll for a in mine] == pytest.approx([a.nll for a in theirs], abs=5e-4)
    wanted = [(7, 8, 9), (10,), (11, 12)]
    free, edited = (vllm.likelihood(prompts, wanted, e) for e in (None, edit))
    assert free == pytest.approx(hf.likelihood(prompts, wanted, None), abs=5e-4)
    assert edited == pytest.approx(hf.likelihood(prompts, wanted, edit), abs=5e-4)
    assert all(abs(a - b) > 1e-3 for a, b in zip(free, edited, strict=True))


def test_the_mean_over_positions_leaves_out_the_first(model, prompts):
    from vllm_hook.build.on_vllm import VllmBackend

    backend = VllmBackend(model, Needs(states="mean", longest=60), "float32")
    try:
        mine = backend.states(prompts, "mean")
    finally:
        stop_engine(backend.llm)
    for row, theirs in zip(mine, HfBackend(model, "float32").states(prompts, "mean"), strict=True):
        assert ((row - theirs).norm(dim=-1) <= 1e-4 * theirs.norm(dim=-1)).all()


def test_a_build_ends_its_engine_but_no_other(both, prompts, model):
    """Engines in one process share process groups; the notebooks start one after a build that was alone."""
    from vllm_hook.build.on_vllm import VllmBackend

    before = both[0].states(prompts, "last")
    with Lazy(lambda: VllmBackend(model, Needs(states="last", longest=60), "float32")) as backend:
        second = backend()
        second.states(prompts, "last")
    again = both[0].states(prompts, "last")
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    assert not second.alone
    ended = []
    core = SimpleNamespace(shutdown=lambda: ended.append("engine"))
    second.llm, second.alone = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)), True
    second.close()
    assert ended == ["engine"]


def test_a_served_probe_gives_the_values_of_its_training(tmp_path, tiny_dir, model):
    pytest.importorskip("sklearn")
    data = tmp_path / "data.jsonl"
    words = ["apple", "river", "stone", "cloud", "paper", "green", "tiger", "bridge", "lemon", "ocean"]
    rows = [
        {"label": i % 2, "prompt": f"{'Paris is in France' if i % 2 else 'one two three'} {w} {i}"}
        for i, w in enumerate(words * 2)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    job = Job(model, Output(tmp_path / "probe.yaml"), "vllm", "float32")
    built = build_probe(job, data, layers=[1, 2], share=0.3)
    assert min(built.logits) < 0 < max(built.logits)
    from vllm_hook.build.records import read_labelled, split

    records, _ = read_labelled(data)
    train, held = split(records, 0.3, 0, lambda r: r.label, lambda r: r.group)
    with hook_llm(tiny_dir("llama"), programs=[str(tmp_path / "probe.yaml")]) as llm:
        chats = [[{"role": "user", "content": r.messages[0][1]}] for r in (*train, *held)]
        outputs = llm.chat(chats, greedy(1), use_tqdm=False)
    served = [float(o.hook.observed["logit"].values) for o in outputs]
    assert len(served) == len(rows)
    assert served == pytest.approx(built.logits, abs=1e-4)
    scores = [o.hook.scores["label"] for o in outputs]
    trained = [1 / (1 + math.exp(-logit)) for logit in built.logits]
    assert [s.value for s in scores] == pytest.approx(trained, abs=1e-4)
    assert [s.flagged for s in scores] == [logit > 0 for logit in built.logits]
    assert len({s.flagged for s in scores}) == 2
