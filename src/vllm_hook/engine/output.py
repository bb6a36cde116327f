"""The front end's side of one request: rows come in with outputs, a result leaves with the last."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..analyzers import get as get_analyzer
from ..errors import HookError
from ..program.checked import CheckedProgram, CheckedRule, Observation
from ..program.resolve import Range, ResolvedObservation, ResolvedProgram
from ..results import HookResult, Observed, Score
from ..runtime.edits import EditRequest
from ..runtime.plan import positions_within
from ..runtime.requests import Lane
from ..runtime.rows import Block, Record, Rows
from ..sites import site

logger = logging.getLogger(__name__)

#: Blocks that a request leaves its rows in, for each of its observations.
BLOCKS_KEPT = 4


@dataclass(frozen=True)
class Use:
    """One program as one request uses it."""

    program: CheckedProgram
    digest: str
    resolved: ResolvedProgram


@dataclass(frozen=True)
class Context:
    """What was fixed at admission, for ``prompt`` tokens; shared by requests that use the same programs in
    the same way. ``lanes`` run in the order of the observations of all ``uses``; ``data`` is the form in
    which all of it travels; ``fitting``: (end of positions, n) of those whose results were found not to be
    too large. Made from ``uses``: ``observations``, (qualified id, definition, resolved form) in the order of
    the payload, what results say of ``programs`` and ``spans``, whether anything is to be ``judged``: scored
    or tagged, and the positions of each observation where the tokens that are generated make no
    difference (``fixed``)."""

    uses: tuple[Use, ...]
    lanes: tuple[Lane, ...]
    prompt: int
    edits: EditRequest | None = None
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)
    fitting: set[tuple[int, int]] = field(default_factory=set, compare=False)
    observations: tuple[tuple[str, Observation, ResolvedObservation], ...] = field(init=False, compare=False)
    programs: list[tuple[str, str]] = field(init=False, compare=False)
    spans: tuple[tuple[str, tuple[Range, ...]], ...] = field(init=False, compare=False)
    judged: bool = field(init=False, compare=False)
    fixed: tuple[np.ndarray | None, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        named = tuple(
            (f"{use.program.name}/{definition.id}", definition, resolved)
            for use in self.uses
            for definition, resolved in zip(use.program.observations, use.resolved.observations, strict=True)
        )
        object.__setattr__(self, "observations", named)
        object.__setattr__(self, "programs", [(use.program.name, use.digest) for use in self.uses])
        spans = [(f"{u.program.name}/{name}", r) for u in self.uses for name, r in u.resolved.spans.items()]
        object.__setattr__(self, "spans", tuple(spans))
        judged = any(use.program.analyses or use.program.rules for use in self.uses)
        object.__setattr__(self, "judged", judged)
        object.__setattr__(self, "fixed", tuple(self._fixed(resolved) for _, _, resolved in named))

    def _fixed(self, resolved: ResolvedObservation) -> np.ndarray | None:
        ends = [self.prompt + 1 if b is None else b for _, b in resolved.rows]
        in_prompt = max(ends, default=0) <= self.prompt and not resolved.token_ids
        return wanted_positions(resolved, self.prompt, ()) if in_prompt else None


class Collector:
    """Accumulates the rows of one sample of a request, whose positions are below ``end``."""

    __slots__ = ("__weakref__", "blocks", "context", "end", "failures", "observed", "result", "rows", "unfit")

    def __init__(self, context: Context, end: int) -> None:
        self.context, self.end = context, end
        self.rows: dict[int, Rows] = {}
        self.blocks: list[tuple[Block, int]] = []
        self.failures: list[str] = []
        self.unfit: list[str] = []
        self.observed: dict[str, Observed] = {}  # once laid out
        self.result: HookResult | None = None

    def lay_out(self) -> None:
        """The result as far as it is known. Done while the engine computes, where there is time: what is left
        to the last token of a batch holds all of it up."""
        context = self.context
        if not self.observed:
            self.observed = {
                name: describe(definition, resolved, lane)
                for (name, definition, resolved), lane in zip(
                    context.observations, context.lanes, strict=True
                )
            }
        if self.result is None and not context.judged:
            self.result = self._result({}, {})
        for index in [*self.rows]:
            wanted = context.fixed[index]
            if wanted is None or not self.rows[index].are_at(wanted):
                continue
            if self._put_in(index, wanted):
                self.observed[context.observations[index][0]].values = _NOTHING

    def _result(self, scores: Mapping[str, Score], errors: Mapping[str, str]) -> HookResult:
        spans = {name: list(ranges) for name, ranges in self.context.spans}
        return HookResult(self.observed, scores, errors=errors, programs=self.context.programs, spans=spans)

    def guard(self, act: Callable[..., None], *args: Any) -> None:
        """Rows that do not fit are an error of their request; the front end serves others too."""
        try:
            act(*args)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        logger.error("rows of a request do not fit together", exc_info=error)
        self.unfit.append(f"failed in the front end: {type(error).__name__}: {error}")

    def add(self, records: Sequence[Record | str]) -> None:
        for record in records:
            if isinstance(record, str):
                self.failures.append(record)
                continue
            self._from_blocks(record.index)
            self._put(record)

    def join(self, block: Block, member: int) -> None:
        """Rows of this request will be in a block that it shares."""
        self.blocks.append((block, member))
        self._take_closed()

    def _take_closed(self) -> None:
        """Keep few blocks: they hold rows of others."""
        if len(self.blocks) > BLOCKS_KEPT * len(self.context.observations):
            for closed in {id(b): b for b, _ in self.blocks if b.closed}.values():
                self._take(closed)

    def _take(self, block: Block) -> None:
        """The rows of this request in a block become its own."""
        for entry in [e for e in self.blocks if e[0] is block]:
            self.blocks.remove(entry)
            self._put(block.record(entry[1]))

    def _from_blocks(self, index: int) -> None:
        """Take over what came of one observation so far, and what came before that of others that share its
        blocks: of a position that was run twice the last row counts."""
        if not self.blocks:
            return
        last = max((n for n, (b, i) in enumerate(self.blocks) if b.members[i][1] == index), default=-1)
        for block in {id(b): b for b, _ in self.blocks[: last + 1]}.values():
            self._take(block)

    def _put(self, record: Record) -> None:
        index = record.index
        if index not in self.rows:
            _, _, resolved = self.context.observations[index]
            most = most_rows(resolved, self.context.prompt, self.end)
            self.rows[index] = Rows(most, same_width=self.context.lanes[index].site != "attention")
        self.rows[index].add(record)

    def _all_rows(self, index: int) -> tuple[np.ndarray, Tensor] | None:
        """Positions and rows of one observation, in the order in which they came, in memory of their own."""
        if index not in self.rows:
            parts = [(block, i) for block, i in self.blocks if block.members[i][1] == index]
            return Block.last(parts) if parts else None
        self._from_blocks(index)
        return self.rows.pop(index).joined()

    def finish(self, token_ids: Sequence[int], aborted: bool) -> HookResult:
        """The result for the tokens that were kept. Never raises: what is wrong is in ``errors``."""
        self.lay_out()
        context, observed, result = self.context, self.observed, self.result
        errors: dict[str, str] = {}
        for index, (name, _, resolved) in enumerate(context.observations):
            if observed[name].values is not _NOTHING:
                continue
            if missing := self._put_in(index, wanted_positions(resolved, context.prompt, token_ids)):
                errors[name] = self._why(missing, aborted)
        self.blocks.clear()
        self.rows.clear()
        if self.failures and context.edits is not None:
            for use in context.uses:
                errors.setdefault(use.program.name, f"interventions may not have acted: {self.failures[0]}")
        if result is None or errors:
            scores, failed = score_all(context.uses, observed, errors)
            result = self._result(scores, errors | failed)
            apply_tags(context.uses, result)
        return result

    def _put_in(self, index: int, wanted: np.ndarray) -> list[int]:
        """The rows of an observation take their place in the result. Those of ``wanted`` that are missing."""
        found = self.observed[self.context.observations[index][0]]
        try:
            values, missing = assemble(self._all_rows(index), wanted, self.context.lanes[index])
        except Exception as error:
            self._failed(error)
            values, missing = None, wanted.tolist()
        found.positions = wanted.tolist()
        found.values = values if values is not None else _no_rows(found)
        return missing

    def _why(self, missing: list[int], aborted: bool) -> str:
        cause = "; ".join(dict.fromkeys([*self.failures, *self.unfit])) or (
            "the request was aborted" if aborted else "the engine did not deliver them"
        )
        shown = ", ".join(map(str, missing[:6])) + (", ..." if len(missing) > 6 else "")
        return f"{len(missing)} of the positions asked for are missing ({shown}): {cause}"


def most_rows(resolved: ResolvedObservation, prompt: int, end: int) -> int:
    """Rows that an observation can come to in a request whose positions are below ``end``."""
    rows = sum(max(0, min(b if b is not None else end, end) - a) for a, b in resolved.rows)
    # Which generated tokens are wanted is known only afterwards.
    return rows + (end - prompt if resolved.token_ids else 0)


#: Requests that end together often want the same.
_positions = lru_cache(maxsize=16)(positions_within)


def wanted_positions(resolved: ResolvedObservation, prompt: int, token_ids: Sequence[int]) -> np.ndarray:
    """Positions asked for, among those that were fed to the model: ``prompt`` tokens and those that were
    generated but for the last."""
    fed = max(prompt + len(token_ids) - 1, prompt)
    wanted = _positions(resolved.rows, 0, fed)
    if not resolved.token_ids:
        return wanted
    extra = [p for p in range(prompt, fed) if token_ids[p - prompt] in resolved.token_ids]
    return np.union1d(wanted, np.asarray(extra, dtype=wanted.dtype))


def assemble(
    rows: tuple[np.ndarray, Tensor] | None, wanted: np.ndarray, lane: Lane
) -> tuple[Tensor | None, list[int]]:
    """Rows at exactly ``wanted``, in order, from (positions, rows) in any order; of a position run twice the
    last counts.

    Returns the values (rows on dim 1) and the positions that are missing.
    """
    if rows is None:
        return None, wanted.tolist()
    positions, values = rows
    if positions.dtype == wanted.dtype and positions.tobytes() == wanted.tobytes():  # np.array_equal: 5 us
        return values, []
    at = {int(p): i for i, p in enumerate(positions)}
    missing = [int(p) for p in wanted if int(p) not in at]
    index = torch.tensor([at[int(p)] for p in wanted if int(p) in at], dtype=torch.long)
    values = values[:, index]
    if lane.site == "attention" and len(wanted):
        values = values[..., : int(wanted[-1]) + 1]
    return values, missing


#: Stands for the rows of an observation until they are complete.
_NOTHING = torch.empty(0)


def _no_rows(observed: Observed) -> Tensor:
    """Without any row the values are empty, with the other axes as they would be."""
    if observed.heads is not None:
        return torch.zeros(len(observed.heads), 0, len(observed.keys or ()))
    return torch.zeros(len(observed.layers), 0)


def describe(definition: Observation, resolved: ResolvedObservation, lane: Lane) -> Observed:
    """Name the axes."""
    attention = site(lane.site).kind == "attention"
    heads: Any = list(lane.heads or ()) if attention else None
    keys = [name for name, _ in resolved.keys] if lane.site == "attention_mass" else None
    return Observed(definition.site, _NOTHING, [], list(lane.layers), heads, keys)


def score_all(
    uses: Sequence[Use], observed: Mapping[str, Observed], errors: Mapping[str, str]
) -> tuple[dict[str, Score], dict[str, str]]:
    """Run every program's analyzers; an analyzer that fails is an error of its own, not of the request."""
    scores: dict[str, Score] = {}
    failed: dict[str, str] = {}
    for use in uses:
        program = use.program
        for analysis in program.analyses:
            name = f"{program.name}/{analysis.id}"
            inputs = {i: observed[f"{program.name}/{i}"] for i in analysis.observe}
            if bad := [i for i in inputs if f"{program.name}/{i}" in errors]:
                failed[name] = f"not scored: observation {bad[0]!r} is incomplete"
                continue
            try:
                analyzer = get_analyzer(analysis.analyzer)
                options = analyzer.Options.model_validate(dict(analysis.options))
                score = analyzer.score(inputs, {k: list(v) for k, v in use.resolved.spans.items()}, options)
                if not math.isfinite(score.value):  # compares as below and above nothing: it would pass
                    raise HookError(f"the score is {score.value}")
                scores[name] = score
            except Exception as error:
                logger.exception("analyzer %s failed", name)
                failed[name] = f"analyzer {analysis.analyzer!r} failed: {type(error).__name__}: {error}"
    return scores, failed


def apply_tags(uses: Sequence[Use], result: HookResult) -> None:
    """``do: tag`` rules: the reason (or the condition's subject) of each rule that holds."""
    for use in uses:
        for rule in use.program.rules:
            if rule.do == "tag" and _holds(rule, use.program.name, result):
                result.tags.append(rule.reason or rule.subject)


def _holds(rule: CheckedRule, program: str, result: HookResult) -> bool:
    name = f"{program}/{rule.subject}"
    if rule.test == "flagged":
        return name in result.scores and bool(result.scores[name].flagged)
    if name in result.errors or name not in result.observed:
        return False
    values = result.observed[name].values
    assert rule.bound is not None
    return bool((values > rule.bound).any() if rule.test == "above" else (values < rule.bound).any())
