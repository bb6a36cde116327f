"""V1, V2 and V2 with the asynchronous scheduler, eager and compiled: the right rows in every schedule.

Each configuration runs ``runner_case.py`` once, in a process of its own; the tests judge its figures.
"""

import pytest

from configurations import CONFIGURATIONS, all_figures_of

pytestmark = pytest.mark.engine

REL, DP = 1e-4, 3e-5
SELECTED = {  # program of runner_case.py -> positions it asks for, of n prompt and m fed tokens
    "everywhere": lambda n, m: list(range(m)),
    "last": lambda n, m: [n - 1],
    "prompt": lambda n, m: list(range(n)),
    "tail": lambda n, m: list(range(n - 3, n)),
    "late": lambda n, m: list(range(100, 103)),
    "new": lambda n, m: list(range(n, m)),
    "mixed": lambda n, m: sorted({*range(3, 5), n - 1, *range(n + 1, m)} & set(range(m))),
}


@pytest.fixture(scope="module")
def all_figures(request, tiny_dir):
    with all_figures_of("runner_case.py", str(tiny_dir("llama")), request, timeout=600) as found:
        yield found


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda c: "-".join(c))
def told(request, all_figures):
    return all_figures[request.param].result(), request.param


def judge(figure, program):
    """Exactly the positions asked for, and the values of Hugging Face there."""
    assert figure["errors"] == {}
    want = SELECTED[program](figure["prompt"], figure["fed"])
    for name, positions in figure["positions"].items():
        assert positions == want, name
    assert figure["positions"]
    assert figure["rel"] <= REL
    assert figure["dp"] <= DP


def test_it_is_the_configuration_asked_for(told):
    figure, (runner, mode) = told
    assert figure["runner"] == runner[:2]
    assert figure["async"] == (runner == "v2-async")
    assert figure["eager"] == (mode == "eager")


def test_chunked_prompt(told):
    for figure in told[0]["chunked"]:
        judge(figure, "everywhere")
    assert [f["prompt"] for f in told[0]["chunked"]] == [7, 50, 300, 3, 201, 17]


def test_chunked_prompt_has_one_last_token(told):
    assert told[0]["chunked_last"]
    for figure in told[0]["chunked_last"]:
        judge(figure, "last")


def test_warm_prefix_cache_is_kept_where_no_cached_row_is_asked_for(told):
    assert told[0]["warm_plain"]["cached"] == 320
    for program in ("last", "tail", "new"):
        figure = told[0][f"warm_{program}"]
        assert figure["cached"] == 320
        judge(figure, program)


@pytest.mark.parametrize(("program", "cached"), [("prompt", 0), ("mixed", 0), ("late", 96)])
def test_warm_prefix_cache_is_cut_back_for_prompt_rows(told, program, cached):
    """To the last whole block of 32 before the first row asked for, no further."""
    assert told[0][f"warm_{program}"]["cached"] == cached
    judge(told[0][f"warm_{program}"], program)


def test_preemption(told):
    """Rows of a request that was preempted, and run again in part, are there once and are right."""
    figure = told[0]["preemption"]
    programs = ["last", "new", "mixed", "everywhere"] * 3
    lengths = [f["prompt"] for f in figure["requests"]]
    hit = {programs[lengths.index(prompt)] for prompt, computed in figure["preempted"] if computed > prompt}
    assert "everywhere" in hit, figure["preempted"]  # it had generated some tokens
    for one, program in zip(figure["requests"], programs, strict=True):
        judge(one, program)
        assert one["fed"] == one["prompt"] + 69


def test_three_samples(told):
    assert told[0]["n3"]["distinct"] == 3
    for figure in told[0]["n3"]["samples"]:
        judge(figure, "everywhere")


def test_stop_string(told):
    figure = told[0]["stop"]
    assert figure["tokens"] == figure["at"] + 1
    judge(figure, "everywhere")
    assert figure["fed"] == 20 + figure["at"]


def test_abort_leaves_the_others(told):
    assert sorted(told[0]["abort"]) == ["abort-0", "abort-2"]
    for figure in told[0]["abort"].values():
        judge(figure, "everywhere")
        assert figure["fed"] == figure["prompt"] + 7


def test_forty_concurrent_requests(told):
    assert [f["prompt"] for f in told[0]["forty"]] == list(range(3, 43))
    for figure in told[0]["forty"]:
        judge(figure, figure["hook"])
    assert told[0]["forty_alone"] <= REL


def test_nothing_is_left_in_the_worker(told):
    assert told[0]["left"] == 0
