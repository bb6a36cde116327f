"""Programs that are loaded, replaced and unloaded while requests run; parameters of a request."""

import random

import pytest
import torch

from conftest import hook_llm
from editing import Tensors, compare
from prompts import greedy, token_prompts
from vllm_hook.errors import ProgramError, SiteError

pytestmark = pytest.mark.engine

VERSIONS = 8
EDIT = {"site": "resid_post", "layers": [2], "method": "add", "strength": 1.0}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    tensors = Tensors(tmp_path_factory.mktemp("vectors"), 64, 32)
    g = torch.Generator().manual_seed(6)
    tensors.put("versions", {f"v{i}": torch.randn(64, generator=g) * 20 for i in range(VERSIONS)})
    return tensors


@pytest.fixture(scope="module")
def llm(tiny_dir, tensors):
    arm = {site: {} for site in ("resid_post", "mlp_out", "q")} | {"attention": {"rows": "last"}}
    with hook_llm(tiny_dir("llama"), programs=[ATTEND], arm=arm) as llm:
        yield llm


ATTEND = {
    "schema": 1,
    "name": "attend",
    "spans": {"s": {"tokens": [1, 4]}},
    "intervene": {
        "e": {
            "site": "attention",
            "method": "attend",
            "heads": [[1, 0], [2, 3]],
            "keys": ["s"],
            "weight": 2.0,
        }
    },
}


def version(tensors, i, name="live"):
    edit = {**EDIT, "vector": tensors.ref(f"v{i}", "versions")}
    return {"schema": 1, "name": name, "intervene": {"e": edit}}


def test_500_replacements_during_traffic(llm, tensors):
    """Every result carries the digest it was admitted with, and is what that program gives."""
    engine, r = llm.llm.llm_engine, random.Random(0)
    prompts = token_prompts(range(4, 10), seed=2)
    want = {}
    for i in range(VERSIONS):
        _, digest = llm.load_program(version(tensors, i))
        outs = llm.generate(prompts, greedy(5), hook="live", use_tqdm=False)
        want[digest] = [list(o.outputs[0].token_ids) for o in outs]
    assert len(want) == VERSIONS
    assert len({tuple(map(tuple, w)) for w in want.values()}) == VERSIONS
    llm.reset_prefix_cache()
    admitted, done, present, mixed = {}, {}, True, 0
    for change in range(500):
        if change % 10 == 9:
            llm.unload_program("live")
            present = False
        else:
            _, digest = llm.load_program(version(tensors, r.randrange(VERSIONS)))
            present = True
        if present:
            which = r.randrange(len(prompts))
            admitted[f"r-{change}"] = (digest, which)
            engine.add_request(f"r-{change}", prompts[which], llm._with_hook(greedy(5), "live"))
        else:
            with pytest.raises(ProgramError, match=r"live.*not loaded"):
                engine.add_request(f"r-{change}", prompts[0], llm._with_hook(greedy(5), "live"))
        mixed += len({admitted[name][0] for name in admitted.keys() - done.keys()}) > 1
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert mixed >= 400  # steps in which requests of several versions ran
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert set(done) == set(admitted)
    for name, out in done.items():
        digest, which = admitted[name]
        assert out.outputs[0].hook.programs == [("live", digest)]
        assert out.outputs[0].hook.errors == {}
        assert list(out.outputs[0].token_ids) == want[digest][which], name
    done.clear()
    del out
    if "live" in llm.frontend.programs:
        llm.unload_program("live")
    llm.generate(prompts[:1], greedy(1), hook=False, use_tqdm=False)
    status = engine.collective_rpc("vllm_hook_rpc", args=("status",))[0]
    assert status["tensors"] == []  # the worker has forgotten all versions
    assert status["slots"] == {"vectors": 0, "gates": 0}


@pytest.fixture
def judged(llm, tiny_reference, tensors):
    """``judged(program, set, like)``: the program with a request's ``set`` is ``like`` in Hugging Face."""

    def run(program, values, like):
        llm.load_program(program)
        hook = {"use": [program["name"]], "set": values}
        try:
            outs = llm.generate(token_prompts([9, 14], seed=7), greedy(8), hook=hook, use_tqdm=False)
            plain = llm.generate(token_prompts([9, 14], seed=7), greedy(8), hook=False, use_tqdm=False)
        finally:
            if program["name"] != "attend":
                llm.unload_program(program["name"])
        for out in outs:
            figure = compare(tiny_reference, out, [like], tensors)
            assert figure["wrong"] is None
            assert figure["equal"] == 8 or figure["tie"] is not None
        return [a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(outs, plain, strict=True)]

    return run


SETTINGS = {
    "strength": {"method": "add", "strength": 0.1},
    "target": {"method": "clamp", "target": 0.1},
    "angle": {"method": "rotate", "angle": 3.0},
    "a": {"method": "affine", "a": 0.1, "b": 0.0},
    "b": {"method": "affine", "a": 0.0, "b": 0.001},
    "sae": {"method": "sae", "features": [1], "target": 0.2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_parameters_of_a_request(judged, tensors, name):
    edit = {"site": "mlp_out", "layers": [1], **SETTINGS[name]}
    v, w = tensors.ref("v"), tensors.ref("w")
    edit |= {
        "rotate": {"vector": v, "second": w},
        "affine": {"u": w, "v": v},
        "sae": {"sae": tensors.ref("", "sae")},
    }.get(edit["method"], {"vector": v})
    what, value = {"sae": ("target", 6.0), "angle": ("angle", 150.0), "b": ("b", 0.4)}.get(name, (name, 6.0))
    program = {"schema": 1, "name": "p", "intervene": {"e": edit}}
    like = {**program, "intervene": {"e": {**edit, what: value}}}
    assert any(judged(program, {f"e.{what}": value}, like))
    assert any(judged(program, {f"p/e.{what}": value}, like))


def test_weight_of_attention(judged):
    like = {**ATTEND, "intervene": {"e": {**ATTEND["intervene"]["e"], "weight": 40.0}}}
    assert any(judged(ATTEND, {"e.weight": 40.0}, like))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"e.target": 1.0}, r"e\.target.*can set strength there"),
        ({"f.strength": 1.0}, r"f\.strength.*names no intervention.*one/e"),
        ({"other/e.strength": 1.0}, r"names no intervention"),
        ({"e.strength": float("nan")}, r"strength"),
        ({"e.strength": float("inf")}, r"strength"),
        ({"e.strength": "much"}, r"strength"),
        ({"strength": 1.0}, r"is not a parameter"),
        ({"off.x": 1.0}, r"off\.x.*can set nothing"),
    ],
)
def test_bad_set(llm, tensors, values, message):
    off = {"site": "resid_post", "layers": [1], "method": "ablate", "vector": tensors.ref("w")}
    program = version(tensors, 0, "one")
    program["intervene"]["off"] = off
    llm.load_program(program)
    with pytest.raises(ProgramError, match=message):
        llm.generate(token_prompts([4]), greedy(1), hook={"use": ["one"], "set": values}, use_tqdm=False)
    llm.unload_program("one")


def test_bad_weight_and_ambiguous_names(llm, tensors):
    for value in (0.0, -1.0):
        with pytest.raises(ProgramError, match=r"e\.weight is .*0 < weight"):
            llm.generate(
                token_prompts([6]),
                greedy(1),
                hook={"use": ["attend"], "set": {"e.weight": value}},
                use_tqdm=False,
            )
    llm.load_program(version(tensors, 0, "one"))
    llm.load_program(version(tensors, 1, "two"))
    hook = {"use": ["one", "two"], "set": {"e.strength": 1.0}}
    with pytest.raises(ProgramError, match=r"ambiguous; write 'one/e.strength' or 'two/e.strength'"):
        llm.generate(token_prompts([4]), greedy(1), hook=hook, use_tqdm=False)
    for name in ("one", "two"):
        llm.unload_program(name)


@pytest.mark.parametrize("sae", ["sae", "sae-jump"])
@pytest.mark.parametrize(
    ("rows", "positions", "when"),
    [
        ("generated", "generated", {"above": 0.0}),
        ("generated", "generated", {"below": 0.4}),
        ("last_prompt", ["last_prompt", "generated"], {"above": 0.0}),
    ],
)
def test_a_gate_on_an_sae_feature(llm, tiny_reference, tensors, sae, rows, positions, when):
    """Open and shut rows (or requests) in one batch; what it reads is the activation."""
    reduce = {"sae": tensors.ref("", sae), "features": [0]}
    c = {"site": "resid_post", "layers": [0], "positions": rows, "reduce": reduce}
    edit = {**EDIT, "vector": tensors.ref("v"), "strength": 6.0, "positions": positions}
    program = {"schema": 1, "name": "feature", "observe": {"c": c}}
    program["intervene"] = {"e": {**edit, "when": {"observe": "c", **when}}}
    llm.load_program(program)
    outs = llm.generate(token_prompts(range(6, 14), seed=9), greedy(16), hook="feature", use_tqdm=False)
    llm.unload_program("feature")
    figures = [compare(tiny_reference, out, [program], tensors) for out in outs]
    assert [(f["wrong"], f["errors"]) for f in figures] == [(None, {})] * 8
    assert sum(f["equal"] for f in figures) >= 7 * 16
    read = torch.cat([out.hook.observed["c"].values.flatten() for out in outs])
    assert len(read) == (8 if rows == "last_prompt" else 8 * 15)
    opened = read > when["above"] if "above" in when else read < when["below"]
    assert 0 < int(opened.sum()) < len(opened)


def test_programs_in_conflict_in_one_request(llm, tiny_reference, tensors):
    """Refused by name where they are used together; each alone, and a request that agrees, is served."""
    clamp = {"site": "resid_post", "layers": [1], "method": "clamp", "vector": tensors.ref("v")}
    one, two = (
        {"schema": 1, "name": name, "intervene": {id: {**clamp, "target": target, "positions": positions}}}
        for name, id, target, positions in (("one", "e", 5.0, "all"), ("two", "f", -5.0, {"range": [2, 4]}))
    )
    llm.load_program(one)
    llm.load_program(two)

    def run(hook):
        return llm.generate(token_prompts([9], seed=7), greedy(8), hook=hook, use_tqdm=False)[0]

    with pytest.raises(ProgramError, match=r"'two/f' sets .* 'one/e' sets to 5 .* to -5, .* position 2 on"):
        run({"use": ["one", "two"]})
    same = {**two, "intervene": {"f": {**two["intervene"]["f"], "target": 5.0}}}
    agreed = run({"use": ["one", "two"], "set": {"two/f.target": 5.0}})
    for out, programs in ((run("one"), [one]), (run("two"), [two]), (agreed, [one, same])):
        figure = compare(tiny_reference, out, programs, tensors)
        assert (figure["wrong"], figure["errors"]) == (None, {})
    for name in ("one", "two"):
        llm.unload_program(name)


def test_a_site_that_is_not_armed_for_edits(llm, tensors):
    before = llm.programs()
    edit = {"site": "attn_out", "layers": [1], "method": "add", "vector": tensors.ref("v")}
    with pytest.raises(SiteError, match=r"'far' needs attn_out layer 1 \(edit\), which is not armed"):
        llm.load_program({"schema": 1, "name": "far", "intervene": {"e": edit}})
    assert llm.programs() == before
