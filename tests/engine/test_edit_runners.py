"""Every intervention on V1, V2 and V2 with the asynchronous scheduler, eager and compiled, against
Hugging Face edited by hooks.

Each configuration runs ``edit_case.py`` once, in a process of its own; the tests judge its figures.
Greedy tokens are compared up to the first near tie (two logits closer than 1e-3, ``editing.GAP``).
"""

import pytest

import edit_programs
from configurations import CONFIGURATIONS, all_figures_of

pytestmark = pytest.mark.engine

REL = 1e-4


@pytest.fixture(scope="module")
def all_figures(request, tiny_dir):
    with all_figures_of("edit_case.py", str(tiny_dir("llama")), request, timeout=900) as found:
        yield found


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda c: "-".join(c))
def told(request, all_figures):
    return all_figures[request.param].result(), request.param


def judge(figures):
    """No token differs, nothing failed; few sequences end in a near tie before they showed much."""
    assert {f["program"]: f["wrong"] for f in figures if f["wrong"] is not None} == {}
    assert {f["program"]: f["errors"] for f in figures if f["errors"]} == {}
    assert sum(f["tie"] is not None for f in figures) <= max(2, len(figures) // 8)
    for f in figures:
        assert f["equal"] == (len(f["tokens"]) if f["tie"] is None else f["tie"])


def test_it_is_the_configuration_asked_for(told):
    figure, (runner, mode) = told
    assert (figure["runner"], figure["async"], figure["eager"]) == (
        runner[:2],
        runner == "v2-async",
        mode == "eager",
    )


def test_every_method_site_and_selector(told):
    """32 greedy tokens and every row of every site, prefill (in chunks) and decode."""
    edits, (runner, _) = told[0]["edits"], told[1]
    judge(edits)
    assert all(len(f["tokens"]) == 32 for f in edits)
    worst = {f["program"]: max(f["rel"].values()) for f in edits}
    assert {name: rel for name, rel in worst.items() if not rel <= REL} == {}
    assert all(len(f["rel"]) == 11 for f in edits)
    names = {f["program"] for f in edits}
    assert {f"select-{name}" for name in edit_programs.SELECTORS} <= names
    for site in (*edit_programs.STREAM, *edit_programs.HEAD):
        assert any(name.startswith(f"{site}-") for name in names), site
    for method in edit_programs.methods(lambda *name: "", "resid_post"):
        assert any(name.endswith(f"-{method}") for name in names), method
    if runner == "v1":
        assert len(names) == 11 * edit_programs.METHODS + edit_programs.OTHERS


def test_edits_are_felt(told):
    if told[1][0] != "v1":
        pytest.skip("plain tokens are compared on V1")
    same = [f["program"] for f in told[0]["edits"] if f["tokens"] == f["plain"]]
    assert set(same) <= {"k-add", "select-last-prompt"}  # one vector on all keys of a head changes nothing


def test_warm_prefix_cache(told):
    """The second round reads the edited blocks of the first."""
    judge(told[0]["warm"])
    cached = {f["program"]: (f["prompt"], f["cached"]) for f in told[0]["warm"]}
    assert {name: c for name, c in cached.items() if c[1] != (c[0] - 1) // 32 * 32} == {}


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_gates(told, cache):
    """Four prompts with the same first two blocks; both outcomes in one batch."""
    judge(told[0]["gates"][cache])
    assert {name for name, open in told[0]["outcomes"].items() if len(set(open)) < 2} == set()
    if cache == "warm":
        cached = {f["cached"] for f in told[0]["gates"]["warm"] if f["program"].endswith("-last")}
        assert cached == {64}


def test_preemption(told):
    """Of edits and of latched gates, after some generated tokens."""
    figure = told[0]["preemption"]
    judge(figure["requests"])
    assert any(name.startswith("gate") and new > 0 for name, new in figure["preempted"]), figure["preempted"]


def test_abort_and_slots(told):
    assert sorted(told[0]["abort"]) == ["abort-0", "abort-2"]
    for figure in told[0]["abort"].values():
        assert figure["wrong"] is None
        assert figure["equal"] == 8
    assert told[0]["left"] == {"requests": 0, "vectors": 0, "gates": 0}
