"""The prefix cache with interventions, warm in every order: outputs of a cold engine, and blocks shared
exactly where nothing differs."""

import pytest
import torch

from conftest import hook_llm
from editing import Tensors, compare
from prompts import greedy, token_prompts

pytestmark = pytest.mark.engine

BLOCK, LENGTH = 32, 100
CACHED = (LENGTH - 1) // BLOCK * BLOCK


def adding(name, vector, **more):
    edit = {"site": "resid_post", "layers": [1], "method": "add", "vector": vector, "strength": 3.0}
    return {"schema": 1, "name": name, "intervene": {"e": {**edit, **more}}}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    return Tensors(tmp_path_factory.mktemp("vectors"), 64, 32)


@pytest.fixture(scope="module")
def programs(tensors):
    v, w = tensors.ref("v"), tensors.ref("w")
    return {
        "a": adding("a", v),
        "b": adding("b", w),
        "tail": adding("tail", v, positions={"range": [70, None]}),
        "new": adding("new", v, positions="generated"),
        "late": adding("late", v, layers=[3]),  # after the last keys and values
        "bound": adding("bound", v),
    }


@pytest.fixture(scope="module")
def llm(tiny_dir, programs):
    with hook_llm(tiny_dir("llama"), programs=list(programs.values()), arm={"resid_post": {}}) as llm:
        yield llm


@pytest.fixture
def ask(llm, tiny_reference, programs, tensors):
    """``ask(prompt, hook)``: one request; (tokens, cached), judged by Hugging Face."""

    def ask(prompt, hook, tokens=8):
        out = llm.generate([{"prompt_token_ids": prompt}], greedy(tokens), hook=hook, use_tqdm=False)[0]
        name = hook["use"][0] if isinstance(hook, dict) else hook
        figure = compare(tiny_reference, out, [programs[name]] if name and name in programs else [], tensors)
        if not isinstance(hook, dict):
            assert figure["wrong"] is None, (hook, figure)
        return list(out.outputs[0].token_ids), out.num_cached_tokens

    llm.reset_prefix_cache()
    return ask


@pytest.fixture(scope="module")
def prompt():
    return token_prompts([LENGTH], seed=21)[0]["prompt_token_ids"]


@pytest.fixture(scope="module")
def cold(llm, prompt, programs):
    """What a cold engine says."""
    told = {}
    for name in (False, *programs):
        llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": prompt}], greedy(8), hook=name, use_tqdm=False)[0]
        assert out.num_cached_tokens == 0
        told[name] = list(out.outputs[0].token_ids)
    assert len({tuple(t) for t in told.values()}) >= 4
    return told


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (False, False, CACHED),
        ("a", "a", CACHED),
        (False, "a", 0),
        ("a", False, 0),
        ("a", "b", 0),
        ("a", "bound", CACHED),  # the same edit under another name
        (False, "tail", 64),  # 70 positions are plain
        ("tail", False, 64),
        ("tail", "a", 0),
        (False, "new", CACHED),  # nothing of the prompt is edited
        ("new", False, CACHED),
        ("new", "tail", 64),
        (False, "late", CACHED),  # the last layer's output reaches no keys
        ("late", False, CACHED),
        ("late", "a", 0),
    ],
)
def test_two_requests(ask, cold, prompt, first, second, cached):
    assert ask(prompt, first) == (cold[first], 0)
    assert ask(prompt, second) == (cold[second], cached)
    assert ask(prompt, first) == (cold[first], CACHED)  # and the second did not poison the first


def test_every_order_at_once(ask, cold, prompt):
    for name in (False, "a", "b", "tail", "new", "late", "b", False, "a", "tail", "new"):
        assert ask(prompt, name)[0] == cold[name], name


def test_side_by_side(llm, cold, prompt):
    """All in one batch, twice: the second batch reads what the first wrote."""
    names = [False, "a", "b", "tail", "new", "late", "bound"]
    llm.reset_prefix_cache()
    for _ in range(2):
        outs = llm.generate(
            [{"prompt_token_ids": prompt}] * len(names), greedy(8), hook=names, use_tqdm=False
        )
        assert [list(o.outputs[0].token_ids) for o in outs] == [cold[n] for n in names]
    assert [o.num_cached_tokens for o in outs] == [CACHED] * len(names)


def test_strength_is_part_of_the_key(ask, prompt):
    half = {"use": ["a"], "set": {"e.strength": 1.5}}
    weak, _ = ask(prompt, half)
    assert ask(prompt, "a")[1] == 0
    assert ask(prompt, half) == (weak, CACHED)


def test_a_name_bound_to_another_vector(llm, ask, cold, prompt, tensors):
    assert ask(prompt, "bound") == (cold["bound"], 0)
    bound = tensors.ref("bound", "bound")
    try:
        for content, same in ((tensors[tensors.ref("w")], "b"), (tensors[tensors.ref("v")], "a")):
            tensors.put("bound", {"bound": content})
            llm.load_program(adding("bound", bound))
            out = llm.generate([{"prompt_token_ids": prompt}], greedy(8), hook="bound", use_tqdm=False)[0]
            assert list(out.outputs[0].token_ids) == cold[same]
            assert out.num_cached_tokens == (0 if same == "b" else CACHED)
        tensors.put("bound", {"bound": torch.full((64,), 0.5)})
        assert (
            llm.generate([{"prompt_token_ids": prompt}], greedy(8), hook="bound", use_tqdm=False)[0]
            .outputs[0]
            .token_ids
            == cold["a"]
        )  # a loaded program does not change with its file
    finally:
        llm.load_program(adding("bound", tensors.ref("v")))


def test_decode_only_edit_then_a_prompt_that_contains_the_text(llm, ask, prompt):
    """Generated blocks hold edited keys: they serve neither a plain prompt nor the same program, to
    which they are prompt now."""
    told, _ = ask(prompt, "new", tokens=64)
    longer = prompt + told[:60]
    plain = ask(longer, False)
    assert plain[1] == LENGTH // BLOCK * BLOCK  # the blocks that end before the first edited position
    again = ask(longer, "new")
    llm.reset_prefix_cache()
    assert (ask(longer, False)[0], 0) == (plain[0], 0)
    llm.reset_prefix_cache()
    assert ask(longer, "new") == (again[0], 0)


def test_an_edit_at_everything_then_a_prompt_that_contains_the_text(llm, ask, prompt):
    """Here the generated blocks are as if they had been prompt: they are shared."""
    told, _ = ask(prompt, "a", tokens=64)
    warm = ask(prompt + told[:60], "a")
    assert warm[1] == (LENGTH + 59) // BLOCK * BLOCK
    llm.reset_prefix_cache()
    assert ask(prompt + told[:60], "a") == (warm[0], 0)
