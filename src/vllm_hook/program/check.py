"""Program x model -> :class:`CheckedProgram`: does it fit, and which layers and heads does it mean?

Every problem is reported at once. Without a model, or for another one than the program was written for,
it is checked against itself and the sizes that its ``model:`` states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelMismatchError, Problem, ProgramError
from ..sites import SITES, ModelFacts
from ..suggest import unknown
from ._problems import Path
from ._sizes import Sizes
from ._types import KEY_PATTERN, Selector, SpanRows
from .checked import (
    Analysis,
    CheckedEdit,
    CheckedProgram,
    CheckedRule,
    Observation,
    TensorUse,
    needs,
    tensor_refs,
    tensor_uses,
)
from .load import Draft, SourcedProgram
from .schema import AttendEdit, BetweenSpan, Observe, Program, When, parse_condition

__all__ = [
    "Analysis",
    "CheckedEdit",
    "CheckedProgram",
    "CheckedRule",
    "Findings",
    "Observation",
    "TensorUse",
    "check",
    "examine",
    "needs",
    "split_span_ref",
    "tensor_refs",
    "tensor_uses",
]

# The order of the sites of one block in the forward pass.
_ORDER = {
    "embed": 0, "resid_pre": 1, "q": 2, "k": 2, "v": 2, "attention": 3, "attention_mass": 3, "z": 4,
    "attn_out": 5, "resid_mid": 6, "mlp_out": 7, "resid_post": 8, "final_norm": 9,
}  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """What :func:`examine` found. ``checked``: None without a model, or where nothing could be read;
    with ``problems`` it lacks what is wrong. ``mismatch``: the program is for another model."""

    source: str
    problems: tuple[Problem, ...]
    checked: CheckedProgram | None
    mismatch: bool = False


def check(sourced: SourcedProgram, facts: ModelFacts) -> CheckedProgram:
    """Check a program against a model; :class:`ProgramError` lists every problem."""
    found = examine(Draft(sourced.source, sourced), facts)
    if found.problems or found.checked is None:
        kind = ModelMismatchError if found.mismatch else ProgramError
        raise kind(found.source, list(found.problems))
    return found.checked


def examine(draft: Draft, facts: ModelFacts | None) -> Findings:
    """Check what can be read of a program against itself, and against a model where there is one."""
    sourced, problems = draft.sourced, list(draft.problems)
    if sourced is None:
        return Findings(draft.source, draft.problems, None)
    mismatch = _model_problems(sourced, facts) if facts is not None else []
    checker = _Checker(draft, sourced, None if mismatch else facts)
    checked = checker.run()
    problems = sorted([*problems, *mismatch, *checker.problems], key=lambda p: p.line or 0)
    return Findings(draft.source, tuple(problems), checked, bool(mismatch))


def split_span_ref(ref: str) -> tuple[str, int | None]:
    """``docs[1]`` as ("docs", 1); ``docs`` as ("docs", None)."""
    name, bracket, index = ref.partition("[")
    return name, int(index[:-1]) if bracket else None


def _model_problems(sourced: SourcedProgram, facts: ModelFacts) -> list[Problem]:
    wanted = sourced.program.model
    problems: list[Problem] = []
    if wanted is None:
        return problems
    for name in ("id", "layers", "heads", "kv_heads", "head_dim", "hidden"):
        want, have = getattr(wanted, name), getattr(facts, name)
        same = _last_component(want) == _last_component(have) if name == "id" and want else want == have
        if want is not None and not same:
            problems.append(
                sourced.problem(("model", name), f"the program is for {want!r}, this model has {have!r}")
            )
    return problems


def _last_component(model_id: str) -> str:
    return model_id.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


class _Checker:
    """One run over a program; problems are collected, and raised at the end."""

    def __init__(self, draft: Draft, sourced: SourcedProgram, facts: ModelFacts | None) -> None:
        self.draft = draft
        self.sourced = sourced
        self.program: Program = sourced.program
        self.facts = facts
        self.sizes = Sizes.of(facts, self.program.model)
        self.problems: list[Problem] = []

    def run(self) -> CheckedProgram | None:
        program = self.program
        if not (program.observe or program.intervene or program.analyze or program.act):
            self.check_empty()
        observations = tuple(self.observation(id, o) for id, o in program.observe.items())
        by_id = {o.id: o for o in observations}
        edits = tuple(self.edit(id, by_id) for id in program.intervene)
        analyses = tuple(self.analysis(id) for id in program.analyze)
        rules = tuple(self.rule(i, by_id) for i in range(len(program.act)))
        for id in program.analyze:
            if id in program.observe:
                self.wrong(("analyze", id), f"{id!r} is the id of an observation too; give it another")
        if self.facts is None:
            return None
        return CheckedProgram(
            program=program, name=program.name, source=self.sourced.source,
            base_dir=self.sourced.base_dir, lines=self.sourced.lines, apply=program.apply,
            spans=program.spans, observations=observations, edits=edits, analyses=analyses, rules=rules,
        )  # fmt: skip

    def check_empty(self) -> None:
        if not self.draft.problems:
            self.wrong((), "does nothing: give observe (what to read) or intervene (what to change)")

    def check_known(self, path: Path, section: str, id: str, what: str, none: str) -> bool:
        """Whether a reference leads somewhere; it is not wrong if what it names could not be read."""
        known = getattr(self.program, section)
        if id in known:
            return True
        if not self.draft.has_lost(section, id):
            self.wrong(
                path,
                unknown(what, id, known, none)
                if known
                else f"unknown {what} {id!r}; the program has no {none}",
            )
        return False

    def wrong(self, path: Path, message: str) -> None:
        self.problems.append(self.sourced.problem(path, message))

    # -- observations --

    def observation(self, id: str, o: Observe) -> Observation:
        path: Path = ("observe", id)
        kind = SITES[o.site].kind
        layers, heads, keep = self.place(path, o.site, o.layers, o.heads)
        selector_field: Literal["positions", "rows"] = "rows" if kind == "attention" else "positions"
        other = "positions" if kind == "attention" else "rows"
        if getattr(o, other) is not None:
            self.wrong((*path, other), f"site {o.site!r} takes {selector_field}, not {other}")
        selectors = o.rows if kind == "attention" else o.positions
        if selectors is None:
            selectors = ()
            if getattr(o, other) is None:
                self.wrong((*path, selector_field), f"is required: which {selector_field} to observe")
        self.check_selectors((*path, selector_field), selectors)
        self.check_keys(path, o)
        if o.reduce is not None and kind != "stream":
            streams = ", ".join(s.name for s in SITES.values() if s.kind == "stream")
            self.wrong((*path, "reduce"), f"site {o.site!r} cannot be reduced; that needs one of {streams}")
        return Observation(
            id=id, site=o.site, layers=layers, heads=heads, keep_heads=keep, selectors=selectors,
            selector_field=selector_field, keys=o.keys or (), reduce=o.reduce, dtype=o.dtype, before=o.before,
        )  # fmt: skip

    def check_keys(self, path: Path, o: Observe) -> None:
        if o.site == "attention_mass":
            if o.keys is None:
                self.wrong((*path, "keys"), "is required: the spans whose attention is summed")
            self.check_span_refs((*path, "keys"), o.keys or ())
        elif o.keys is not None:
            why = "covers all keys" if o.site == "attention" else "has no keys"
            self.wrong((*path, "keys"), f"site {o.site!r} {why}; keys belong to attention_mass")

    def check_span_refs(self, path: Path, refs: Sequence[str]) -> None:
        for i, ref in enumerate(refs):
            self.check_span((*path, i), ref)
            if ref in refs[:i]:
                self.wrong((*path, i), f"span {ref!r} is listed twice")

    def check_span(self, path: Path, ref: str) -> None:
        name, index = split_span_ref(ref)
        if not self.check_known(path, "spans", name, "span", "spans") or index is None:
            return
        span = self.program.spans[name]
        if not (isinstance(span, BetweenSpan) and span.each):
            self.wrong(path, f"span {name!r} is not a list (each: true), so {ref!r} does not exist")

    def check_selectors(self, path: Path, selectors: tuple[Selector, ...]) -> None:
        for i, selector in enumerate(selectors):
            if isinstance(selector, SpanRows):
                self.check_span((*path, i, "span"), selector.span)

    # -- layers and heads --

    def place(
        self, path: Path, site: str, layers: Any, heads: Any
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
        """(layers, (layer, head) pairs of an attention site, head indexes of a head site)."""
        kind = SITES[site].kind
        if kind == "attention" and heads is not None:
            if layers is not None:
                self.wrong((*path, "layers"), "give heads or layers, not both")
            pairs = self.pairs((*path, "heads"), heads)
            return tuple(sorted({layer for layer, _ in pairs})), pairs, None
        found = self.layers(path, site, layers)
        if kind == "attention":
            every = range(self.sizes.heads or 0)
            return tuple(sorted(found)), tuple((y, h) for y in found for h in every), None
        if heads is None:
            return found, None, None
        if kind == "stream":
            self.wrong((*path, "heads"), f"site {site!r} has no heads")
            return found, None, None
        return found, None, self.indexes((*path, "heads"), site, heads)

    def layers(self, path: Path, site: str, layers: Any) -> tuple[int, ...]:
        path = (*path, "layers")
        if layers is not None and not SITES[site].layered:
            self.wrong(path, f"site {site!r} exists once in a model and takes no layers")
        if layers is None or layers == "all" or not SITES[site].layered:
            return self.sizes.site_layers(site)
        if not layers:
            self.wrong(path, "is empty; leave it out for all layers")
        return tuple(self.in_range(path, layers, self.sizes.layers, "layer", "layers"))

    def in_range(
        self, path: Path, values: Sequence[int], size: int | None, what: str, of: str
    ) -> Iterator[int]:
        """Indexes, non-negative where the size is known; those out of range or given twice are reported
        and left out."""
        seen: set[int] = set()
        for i, value in enumerate(values):
            index = self.index((*path, i), value, size, what, of)
            if index in seen:
                self.wrong((*path, i), f"{what} {value} is listed twice")
            elif index is not None:
                seen.add(index)
                yield index

    def index(self, path: Path, value: int, size: int | None, what: str, of: str) -> int | None:
        if size is None:
            return value
        index = value + size if value < 0 else value
        if 0 <= index < size:
            return index
        whose = "the model has" if self.facts is not None else "the program is for a model with"
        self.wrong(path, f"{what} {value} does not exist: {whose} {size} {of}, 0 to {size - 1}")
        return None

    def indexes(self, path: Path, site: str, heads: Any) -> tuple[int, ...] | None:
        if any(isinstance(head, tuple) for head in heads):
            self.wrong(path, f"site {site!r} takes head indexes such as [0, 2], for all its layers")
            return None
        if not heads:
            self.wrong(path, "is empty; leave it out for all heads")
        few = site in ("k", "v")
        size = self.sizes.kv_heads if few else self.sizes.heads
        return tuple(self.in_range(path, heads, size, "head", "KV heads" if few else "heads"))

    def pairs(self, path: Path, heads: Any) -> tuple[tuple[int, int], ...]:
        if not heads:
            self.wrong(path, "is empty; give [layer, head] pairs, or layers for all heads of these")
        found: list[tuple[int, int]] = []
        for i, pair in enumerate(heads):
            if not isinstance(pair, tuple):
                self.wrong((*path, i), "attention takes [layer, head] pairs")
                continue
            layer = self.index((*path, i), pair[0], self.sizes.layers, "layer", "layers")
            head = self.index((*path, i), pair[1], self.sizes.heads, "head", "heads")
            if layer is not None and head is not None:
                if (layer, head) in found:
                    self.wrong((*path, i), f"head {list(pair)} is listed twice")
                found.append((layer, head))
        return tuple(found)

    # -- interventions --

    def edit(self, id: str, observations: Mapping[str, Observation]) -> CheckedEdit:
        path: Path = ("intervene", id)
        edit = self.program.intervene[id]
        attends = isinstance(edit, AttendEdit)
        if attends != (edit.site == "attention") or edit.site == "attention_mass":
            self.wrong((*path, "site"), f"method {edit.method} does not apply at site {edit.site!r}")
        layers, heads, keep = self.place(path, edit.site, edit.layers, edit.heads)
        selectors = edit.rows if isinstance(edit, AttendEdit) else edit.positions
        self.check_selectors((*path, "rows" if attends else "positions"), selectors)
        if isinstance(edit, AttendEdit):
            self.check_span_refs((*path, "keys"), edit.keys)
        if edit.when is not None:
            self.check_gate((*path, "when"), edit.when, edit.site, layers, observations)
        return CheckedEdit(id, edit.site, layers, heads, keep, selectors, edit)

    def check_gate(
        self,
        path: Path,
        when: When,
        site: str,
        layers: tuple[int, ...],
        observations: Mapping[str, Observation],
    ) -> None:
        path = (*path, "observe")
        if not self.check_known(path, "observe", when.observe, "observation", "observations"):
            return
        gate = observations[when.observe]
        if SITES[gate.site].kind == "attention":
            self.wrong(path, f"{gate.id!r} observes attention, which cannot gate")
        elif not gate.scalar:
            self.wrong(path, f"{gate.id!r} has no reduction to one number a row, so it cannot gate")
        elif len(gate.layers) != 1:
            self.wrong(path, f"{gate.id!r} observes {len(gate.layers) or 'all'} layers; a gate takes one")
        elif not gate.prompt_only and layers and min(*layers, *gate.layers) >= 0:
            first = (min(layers), _ORDER[site])
            if (gate.layers[0], _ORDER[gate.site]) > first:
                self.wrong(
                    path,
                    f"{gate.id!r} observes {gate.site} of layer {gate.layers[0]}, after the edit at {site} "
                    f"of layer {first[0]}; a gate decided per row must come first",
                )

    # -- analyses and rules --

    def analysis(self, id: str) -> Analysis:
        analyze = self.program.analyze[id]
        for i, name in enumerate(analyze.observe):
            self.check_known(("analyze", id, "observe", i), "observe", name, "observation", "observations")
        named = (s for value in analyze.options.values() for s in _strings(value))
        spans = tuple(dict.fromkeys(s for s in named if self.names_span(s)))
        return Analysis(id, analyze.analyzer, analyze.observe, analyze.options, spans)

    def names_span(self, text: str) -> bool:
        return re.fullmatch(KEY_PATTERN, text) is not None and split_span_ref(text)[0] in self.program.spans

    def rule(self, i: int, observations: Mapping[str, Observation]) -> CheckedRule:
        rule = self.program.act[i]
        subject, test, bound = parse_condition(rule.condition)
        path: Path = ("act", i, "if")
        if test == "flagged":
            self.check_known(path, "analyze", subject, "analyzer id", "analyses")
        elif (
            self.check_known(path, "observe", subject, "observation", "observations")
            and not observations[subject].scalar
        ):
            self.wrong(path, f"{subject!r} has no reduction to one number a row to compare")
        return CheckedRule(subject, test, bound, rule.do, rule.reason)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
