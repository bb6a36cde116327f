"""Interventions that set one direction to different values: refused when loaded, or with the request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from editing import Tensors
from vllm_hook.errors import ProgramError
from vllm_hook.program.resolve import Prompt, resolve
from vllm_hook.runtime.edits import resolve_edits
from vllm_hook.runtime.loading import LoadedProgram, load_program
from vllm_hook.sites import ModelFacts

FACTS = ModelFacts("tiny", layers=4, heads=4, kv_heads=2, head_dim=8, hidden=16)
IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def t(tmp_path) -> Tensors:
    t = Tensors(tmp_path, FACTS.hidden, FACTS.head_dim)
    v = t[t.ref("v")]
    unit = v / v.norm()
    across = t[t.ref("w")] - (t[t.ref("w")] @ unit) * unit
    near = unit + 1e-2 * across / across.norm()
    more = {"back": -v, "longer": 3 * v, "back-longer": -0.7 * v, "near": near, "unit": unit}
    t.put("more", more)
    return t


def clamp(vector: str, target: float = 1.0, positions: Any = "all", **more: Any) -> dict[str, Any]:
    edit = {"site": "resid_post", "layers": [1], "method": "clamp", "vector": vector, "target": target}
    edit |= {"positions": positions, **more}
    return {key: value for key, value in edit.items() if value is not None}


def ablate(vector: str, **more: Any) -> dict[str, Any]:
    return clamp(vector, method="ablate", **{"target": None, **more})


def program(name: str = "p", **edits: Any) -> LoadedProgram:
    observe = {"site": "resid_post", "layers": [0], "positions": "last_prompt", "reduce": {"norm": True}}
    spans = {"s": {"tokens": [0, 2]}, "t": {"tokens": [1, 4]}}
    source = {"schema": 1, "name": name, "spans": spans, "observe": {"c": observe}, "intervene": edits}
    return load_program(source, FACTS)


def request(*programs: LoadedProgram, **scalars: float) -> list[dict[str, Any]]:
    prompt = Prompt(IDS)
    values = {key.replace("__", "."): value for key, value in scalars.items()}
    uses = [(p.checked, p.edits, resolve(p.checked, prompt)) for p in programs]
    return resolve_edits(uses, values, prompt, FACTS).data


# -- directions -----------------------------------------------------------------------------------


def test_one_direction_two_values(t: Tensors) -> None:
    v = t.ref("v")
    with pytest.raises(ProgramError) as caught:
        program(a=clamp(v), b=clamp(v, 2.5))
    assert str(caught.value) == (
        "program 'p': intervene.b: sets the direction that 'a' sets to 1 at resid_post of layer 1 to 2.5; "
        "they are in conflict"
    )


def test_the_opposite_direction_means_the_opposite_value(t: Tensors) -> None:
    v = t.ref("v")
    for back in ("back", "back-longer"):
        program(a=clamp(v), b=clamp(t.ref(back, "more"), -1.0))
        with pytest.raises(ProgramError) as caught:
            program(a=clamp(v), b=clamp(t.ref(back, "more"), 1.0))
        told = "sets to 1 at resid_post of layer 1 to -1 (its vector points the other way)"
        assert told in str(caught.value)
    program(a=ablate(v), b=ablate(t.ref("back", "more")))


def test_length_does_not_matter_and_an_angle_does(t: Tensors) -> None:
    v = t.ref("v")
    with pytest.raises(ProgramError, match=r"intervene\.b.*in conflict"):
        program(a=clamp(v), b=clamp(t.ref("longer", "more"), 2.0))
    program(a=clamp(v), b=clamp(t.ref("near", "more"), 2.0))  # half a degree
    program(a=clamp(v), b=clamp(t.ref("w"), 2.0))


def test_methods_that_set_and_methods_that_do_not(t: Tensors) -> None:
    v, unit = t.ref("v"), t.ref("unit", "more")
    affine = {"site": "resid_post", "layers": [1], "method": "affine", "a": 2.0, "b": -1.0}
    for second in (ablate(v), {**affine, "u": unit, "v": unit}):
        with pytest.raises(ProgramError, match=r"intervene\.b.*'a' sets to 1 .*in conflict"):
            program(a=clamp(v), b=second)
    for second in (
        clamp(v, method="add", target=None),
        {**affine, "u": v, "v": v},  # not a unit vector: nothing is set to a value
        {**affine, "b": -0.5, "u": unit, "v": unit},
        {**affine, "u": unit, "v": t.ref("w")},
        clamp(v, 2.0, when={"observe": "c", "above": 1.0}, positions="generated"),
    ):
        program(a=clamp(v), b=second)
        program(a=second, b=clamp(v))


def test_places(t: Tensors) -> None:
    v, h = t.ref("v"), t.ref("hv")
    with pytest.raises(ProgramError, match=r"of layer 2 to 2; they are in conflict"):
        program(a=clamp(v, layers=[0, 2]), b=clamp(v, 2.0, layers=[3, 2]))
    program(a=clamp(v, layers=[0, 2]), b=clamp(v, 2.0, layers=[1, 3]))
    program(a=clamp(v), b=clamp(v, 2.0, site="resid_mid"))
    with pytest.raises(ProgramError, match=r"at z of layer 1, head 3 to 2;"):
        program(a=clamp(h, site="z", heads=[0, 3]), b=clamp(h, 2.0, site="z", heads=[3, 2]))
    program(a=clamp(h, site="z", heads=[0, 3]), b=clamp(h, 2.0, site="z", heads=[1, 2]))


def test_every_later_one_is_told_once(t: Tensors) -> None:
    v = t.ref("v")
    with pytest.raises(ProgramError) as caught:
        program(a=clamp(v), b=clamp(v, 2.0), c=clamp(v, 3.0))
    assert [(p.field, p.message.split(" sets to")[0]) for p in caught.value.problems] == [
        ("intervene.b", "sets the direction that 'a'"),
        ("intervene.c", "sets the direction that 'a'"),
    ]


# -- rows -----------------------------------------------------------------------------------------

SELECTORS: list[Any] = [
    "all",
    "prompt",
    "generated",
    "last_prompt",
    {"range": [0, 2]},
    {"range": [1, 5]},
    {"range": [2, None]},
    {"range": [-3, None]},
    {"range": [-4, -2]},
    {"range": [-2, -1]},
    {"range": [1, -1]},
    {"generated": [0, 3]},
    {"generated": [2, None]},
    {"generated": [3, 5]},
    {"span": "s"},
    {"span": "t"},
    {"token_ids": [5, 9]},
    {"token_ids": [10, 400]},
    {"token_ids": [400]},
    {"range": [-5, 2]},
]
#: What is refused when the program is loaded, by index: all else depends on the prompt, or never meets.
ALWAYS = {
    *((0, i) for i in range(20)), *((i, i) for i in range(20)),
    *((1, i) for i in (3, 4, 5, 6, 7, 8, 9, 10, 14, 15, 19)), (2, 11), (2, 12), (2, 13),
    (3, 6), (3, 7), (4, 5), (5, 6), (6, 7), (7, 8), (7, 9), (11, 12), (12, 13),
}  # fmt: skip


def rows(selector: Any) -> set[int]:
    """Positions of the prompt and ten generated tokens, any of which may be a listed one."""
    n = len(IDS)
    if isinstance(selector, str):
        words = {"all": range(n + 10), "prompt": range(n), "generated": range(n, n + 10)}
        return set(words.get(selector, range(n - 1, n)))
    (kind, what), *_ = selector.items()
    if kind == "range":
        return set(range(n)[slice(*what)])
    if kind == "generated":
        return set(range(n + 10)[n:][slice(*what)])
    if kind == "span":
        return set(range(*{"s": (0, 2), "t": (1, 4)}[what]))
    return {i for i, token in enumerate(IDS) if token in what} | set(range(n, n + 10))


def both_may_act(a: Any, b: Any) -> bool:
    lists = [s["token_ids"] for s in (a, b) if isinstance(s, dict) and "token_ids" in s]
    common = rows(a) & rows(b)
    if len(lists) == 2 and not set(lists[0]) & set(lists[1]):
        common = {p for p in common if p < len(IDS)}
    return bool(common)


@pytest.mark.parametrize("i", range(len(SELECTORS)))
def test_selectors_that_meet(t: Tensors, i: int) -> None:
    """Against brute force: what meets for this prompt is refused, with the program or with the request."""
    for j in range(len(SELECTORS)):
        a, b = clamp(t.ref("v"), 1.0, SELECTORS[i]), clamp(t.ref("v"), 2.0, SELECTORS[j])
        always = (i, j) in ALWAYS or (j, i) in ALWAYS
        if always:
            assert both_may_act(SELECTORS[i], SELECTORS[j])
            with pytest.raises(ProgramError, match=r"intervene\.b: .*in conflict"):
                program(a=a, b=b)
            continue
        together = program(a=a, b=b)
        if both_may_act(SELECTORS[i], SELECTORS[j]):
            with pytest.raises(ProgramError, match=r"'p/b' .*'p/a' .*in conflict"):
                request(together)
        else:
            assert len(request(together)) == 2


def test_lists_of_selectors(t: Tensors) -> None:
    v, first = t.ref("v"), [{"range": [0, 1]}, "generated"]
    with pytest.raises(ProgramError, match="in conflict"):
        program(a=clamp(v, 1.0, first), b=clamp(v, 2.0, ["last_prompt", "generated"]))
    program(a=clamp(v, 1.0, first), b=clamp(v, 2.0, ["last_prompt", {"span": "t"}]))


def test_across_the_programs_of_a_request(t: Tensors) -> None:
    v, back = t.ref("v"), t.ref("back", "more")
    first = program("guard", e=clamp(v, 1.5, {"range": [1, 4]}))
    for other in (clamp(v, 2.0, {"range": [3, 6]}), clamp(back, 2.0, {"token_ids": [8]})):
        with pytest.raises(ProgramError) as caught:
            request(first, program("calm", f=other))
        told = str(caught.value)
        assert told.startswith("hook.use: 'calm/f' sets the direction that 'guard/e' sets to 1.5 at resid_")
        assert told.endswith("and both act from position 3 on; they are in conflict")
    with pytest.raises(ProgramError, match="and both act from position 6 on"):
        request(program("guard", e=clamp(v)), program("calm", f=clamp(v, 2.0, {"token_ids": [400]})))
    for other in (
        clamp(v, 2.0, {"range": [4, 6]}),
        clamp(v, 1.5),
        clamp(back, -1.5),
        clamp(v, 2.0, layers=[2]),
        clamp(t.ref("w"), 2.0),
        clamp(v, 2.0, {"range": [-1, None]}, when={"observe": "c", "above": 1.0}),
    ):
        assert len(request(first, program("calm", f=other))) == 2


def test_the_targets_of_the_request_count(t: Tensors) -> None:
    v = t.ref("v")
    one, two = program("one", e=clamp(v, 1.0)), program("two", f=clamp(v, 2.0))
    with pytest.raises(ProgramError, match=r"'two/f' .*'one/e' sets to 1 .* to 2, and both .* position 0"):
        request(one, two)
    assert len(request(one, two, f__target=1.0)) == 2
    same = program(a=clamp(v, 1.0), b=clamp(v, 1.0))
    assert len(request(same)) == 2
    with pytest.raises(ProgramError, match=r"'p/b' .*'p/a' sets to 1 .* to 7"):
        request(same, b__target=7.0)


def test_three_programs_name_the_two(t: Tensors) -> None:
    v, w = t.ref("v"), t.ref("w")
    parts = [program("x", e=clamp(w)), program("y", e=clamp(v)), program("z", e=clamp(v, 3.0))]
    for order in itertools.permutations(parts):
        with pytest.raises(ProgramError) as caught:
            request(*order)
        names = {name for name in ("'x/e'", "'y/e'", "'z/e'") if name in str(caught.value)}
        assert names == {"'y/e'", "'z/e'"}
