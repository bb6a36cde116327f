"""Names that do not exist: what may have been meant."""

import pytest

from vllm_hook import analyzers, sites
from vllm_hook.errors import ProgramError, SiteError
from vllm_hook.program.load import load
from vllm_hook.program.request import parse_request
from vllm_hook.results import ById
from vllm_hook.suggest import closest, did_you_mean, unknown


def test_the_closest_name():
    assert closest("Resid_Pots", ["resid_post", "resid_pre"]) == "resid_post"
    assert closest("zzz", ["resid_post"]) is None
    assert did_you_mean("dta", ["data"]) == "; did you mean 'data'?"
    assert did_you_mean("zzz", ["data"]) == ""


def test_a_message_lists_what_there_is():
    assert (
        unknown("span", "dta", ["data", "x"])
        == "unknown span 'dta'; did you mean 'data'? known spans: data, x"
    )
    assert unknown("analysis", "zzz", ["a"], "analyses") == "unknown analysis 'zzz'; known analyses: a"
    assert unknown("span", "a", []) == "unknown span 'a'; known spans: none"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda: sites.site("resid_pots"), "resid_post"),
        (lambda: analyzers.get("linear_prob"), "linear_probe"),
        (lambda: ById({"guard/injection": 1})["injektion"], "injection"),
        (lambda: load("smollm2-lst"), "smollm2-list"),
    ],
)
def test_every_look_up_suggests(wrong, right):
    with pytest.raises((SiteError, ProgramError, KeyError), match=rf"did you mean .*'{right}'\?"):
        wrong()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"observe": {"a": {"site": "q", "position": "all"}}},
            "observe.a.position: unknown key; did you mean 'positions'?",
        ),
        ({"obsrve": {}}, "obsrve: unknown key; did you mean 'observe'?"),
        ({"xyz": {}}, "xyz: unknown key; known keys: schema, name, model, spans"),
        (
            {"observe": {"a": {"site": "q", "positions": "last_promt"}}},
            "or a list of these; did you mean 'last_prompt'?",
        ),
        (
            {"act": [{"if": "a.flagged", "do": "tagg"}]},
            "act[0].do: Input should be 'stop' or 'tag', got 'tagg'; did you mean 'tag'?",
        ),
        (
            {"intervene": {"e": {"site": "q", "method": "ablate", "vector": "v", "strength": 1.0}}},
            "intervene.e.strength: is not a key of method ablate; its keys: site, layers, heads, positions,",
        ),
        (
            {"intervene": {"e": {"site": "attention", "method": "attend", "positions": "all"}}},
            "positions: is not a key of method attend; its keys: method, site, layers, heads, rows, keys,",
        ),
        (
            {"spans": {"s": {"token": [0, 5]}}},
            "spans.s: not a span; write {message: role}, {between: [a, b]}, {text: words} or "
            "{tokens: [a, b]}; 'token' is none of these keys, did you mean 'tokens'?",
        ),
        (
            {"spans": {"s": {"text": "a", "index": 1}}},
            "spans.s.index: unknown key here: it belongs to another",
        ),
        ({"intervene": {"e": {"site": "q"}}}, "intervene.e.method: is required: one of add, clamp"),
        ({"intervene": {"e": 3}}, "intervene.e: not an edit; write {site: .., method: ..,"),
        ({"observe": None}, "observe: Input should be a valid dictionary, got nothing"),
    ],
)
def test_fields_of_programs(sections, message):
    with pytest.raises(ProgramError) as error:
        load({"schema": 1, "name": "p", **sections})
    assert message in str(error.value)


def test_a_request_is_no_program():
    with pytest.raises(ProgramError, match="is a whole program; load it"):
        parse_request('{"schema": 1, "name": "p"}')
    with pytest.raises(ProgramError, match="unknown key; did you mean 'spans'"):
        parse_request({"span": {}})
