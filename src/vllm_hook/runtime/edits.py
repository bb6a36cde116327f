"""Interventions of one request: what a request sets and where its rows are -> plain data for workers.

What does not depend on the request was compiled when the program was loaded (:mod:`.edit_compile`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProgramError
from ..program.checked import CheckedProgram
from ..program.resolve import OpenRange, Prompt, ResolvedEdit, ResolvedObservation, ResolvedProgram, union
from ..sites import ModelFacts, site
from ..suggest import did_you_mean
from .compiled import CompiledEdit, CompiledEdits, check_size, with_scalars
from .edit_conflicts import Setter, refuse_request_conflicts, setter
from .edit_limits import check_limits, heavy_entries, row_gates

#: Order in which sites are run within a layer.
_IN_ORDER = "embed resid_pre q k v attention z attn_out resid_mid mlp_out resid_post final_norm"
ORDER = {name: i for i, name in enumerate(_IN_ORDER.split())}


@dataclass(frozen=True)
class EditRequest:
    """The interventions of one request, resolved: plain data for the workers and what the prefix
    cache needs.

    ``vectors`` are (kind of site, digest). ``first``: the first position whose keys and values differ
    from an unedited run, None if none do. ``floor``: the first position at which a condition is
    decided once, and so has to be run. ``gates`` and ``entries``: what it holds of the limits.
    """

    data: list[dict[str, Any]]
    digest: str
    first: int | None
    vectors: frozenset[tuple[str, str]]
    floor: int | None
    gates: int = 0
    entries: int = 0


def resolve_edits(
    uses: Sequence[tuple[CheckedProgram, CompiledEdits, ResolvedProgram]],
    scalars: Mapping[str, float],
    prompt: Prompt,
    facts: ModelFacts,
) -> EditRequest:
    """Interventions of all programs of a request, in order.

    ``scalars``: values by ``id.name`` or ``program/id.name``. Raises ProgramError for what cannot be
    set, and for interventions that set one direction of a row to different values.
    """
    data: list[dict[str, Any]] = []
    first: list[int] = []
    floor: list[int] = []
    vectors: set[tuple[str, str]] = set()
    setters: list[tuple[Setter | None, ResolvedEdit]] = []
    settings = _assign(uses, scalars)
    for checked, compiled, resolved in uses:
        for edit, rows in zip(compiled.edits, resolved.edits, strict=True):
            edit = with_scalars(edit, settings.get((checked.name, edit.id), {}))
            if (problem := check_size(edit, compiled.vectors)) is not None:
                raise ProgramError(f"program {checked.name!r}, intervene.{edit.id}", problem)
            setters.append((setter(f"{checked.name}/{edit.id}", edit, compiled.vectors), rows))
            gate = None
            if edit.condition is not None:
                gate = _gate(checked, edit, rows, resolved, len(prompt))
                vectors.add(("stream", edit.condition.u))
                if not edit.condition.per_row:
                    floor.append(gate["rows"][0][0])
            kind = site(edit.site).kind
            vectors.update((kind, v) for atom in edit.atoms for v in (atom.u, atom.v))
            data.append(_plain(edit, rows, gate, len(prompt)))
            if edit.heads:
                data[-1]["attend"] = _attend(edit, rows)
            starts = [a for a, _ in data[-1]["rows"]]
            if starts and any(_affects_kv(edit.site, layer, facts) for layer in edit.layers):
                first.append(min(starts))
    refuse_request_conflicts(setters, len(prompt))
    check_limits(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return EditRequest(
        data,
        digest,
        min(first) if first else None,
        frozenset(vectors),
        min(floor) if floor else None,
        row_gates(data),
        heavy_entries(data),
    )


def _assign(
    uses: Sequence[tuple[CheckedProgram, CompiledEdits, ResolvedProgram]], scalars: Mapping[str, float]
) -> dict[tuple[str, str], dict[str, float]]:
    """Which intervention each scalar of ``set`` belongs to."""
    owners = {(checked.name, e.id): e for checked, compiled, _ in uses for e in compiled.edits}
    assigned: dict[tuple[str, str], dict[str, float]] = {}
    for key, value in scalars.items():
        target, _, name = key.rpartition(".")
        program, _, id = target.rpartition("/")
        found = [k for k in owners if k[1] == id and program in ("", k[0])]
        if len(found) != 1:
            known = ", ".join(f"{p}/{e}" for p, e in owners) or "none"
            if found:
                wanted = " or ".join(repr(f"{p}/{e}.{name}") for p, e in found)
                raise ProgramError("hook.set", f"{key!r} is ambiguous; write {wanted}")
            raise ProgramError(
                "hook.set",
                f"{key!r} names no intervention in use; interventions: {known} (write id.parameter)",
            )
        allowed = owners[found[0]].scalars
        if name not in allowed:
            raise ProgramError(
                "hook.set",
                f"{key!r}: {target!r} has no parameter {name!r}; a request can set "
                f"{', '.join(allowed) or 'nothing'} there{did_you_mean(name, allowed)}",
            )
        if not math.isfinite(value):
            raise ProgramError("hook.set", f"{key!r} is {value}; a finite number is needed")
        assigned.setdefault(found[0], {})[name] = value
    return assigned


def _gate(
    checked: CheckedProgram, edit: CompiledEdit, rows: ResolvedEdit, resolved: ResolvedProgram, prompt: int
) -> dict[str, Any]:
    """A condition with its rows; a latched one must be complete before the first row that it opens."""
    condition = edit.condition
    assert condition is not None
    observation = next(o for o in resolved.observations if o.id == condition.observe)
    watched, wanted = observation.rows, _wanted(observation, prompt)
    where = f"program {checked.name!r}, intervene.{edit.id}"
    count = 0
    if not condition.per_row:
        last = max(b for _, b in watched if b is not None) - 1
        count = sum(b - a for a, b in watched if b is not None)
        here = min((layer, ORDER[edit.site]) for layer in edit.layers)
        before = (condition.layer, ORDER[condition.site]) <= here
        start = min((a for a, _ in rows.rows), default=prompt)
        earliest = last if before else last + 1
        if start < earliest:
            raise ProgramError(
                where,
                f"edits position {start}, but its condition is decided at position {last}"
                f"{'' if before else ' of a later site'}: it can act from position {earliest} on",
            )
    return {
        "site": condition.site, "layer": condition.layer, "kind": condition.kind, "u": condition.u,
        "c": condition.c, "bound": condition.bound, "above": condition.above, "over": condition.over,
        "per_row": condition.per_row, "count": count, "rows": _closed(wanted.rows), "filter": wanted.filter,
    }  # fmt: skip


@dataclass(frozen=True)
class _Wanted:
    """Rows to look at; ``filter``: of these only the ones in ``sure`` or whose token is listed."""

    rows: tuple[OpenRange, ...]
    filter: dict[str, Any] | None


def _wanted(resolved: ResolvedEdit | ResolvedObservation, prompt: int) -> _Wanted:
    """Which generated token stands where is known on the device only: it decides row by row."""
    if not resolved.token_ids:
        return _Wanted(resolved.rows, None)
    known = [(a, min(b or prompt, prompt)) for a, b in resolved.rows if a < prompt]
    only = {"token_ids": sorted(resolved.token_ids), "sure": _closed(resolved.rows)}
    return _Wanted((*known, (prompt, None)), only)


def _plain(
    edit: CompiledEdit, rows: ResolvedEdit, gate: dict[str, Any] | None, prompt: int
) -> dict[str, Any]:
    wanted = _wanted(rows, prompt)
    return {
        "site": edit.site,
        "layers": list(edit.layers),
        "rows": _closed(wanted.rows),
        "filters": [f for f in (wanted.filter, gate["filter"] if gate is not None else None) if f],
        "atoms": [[a.kind, a.u, a.v, a.act, a.keep_norm, a.head, a.a, a.b, a.c, a.theta] for a in edit.atoms],
        "gate": gate,
        "attend": None,
    }


def _attend(edit: CompiledEdit, rows: ResolvedEdit) -> dict[str, Any]:
    """What ``method: attend`` adds: heads, the span's ranges, and how much."""
    return {
        "heads": [list(head) for head in edit.heads],
        "span": [[a, b] for a, b in union(r for _, ranges in rows.keys for r in ranges)],
        "weight": edit.scalars.get("weight"),
        "mass": edit.scalars.get("mass"),
    }


def _closed(ranges: Sequence[OpenRange]) -> list[list[int]]:
    return [[a, -1 if b is None else b] for a, b in ranges]


def _affects_kv(name: str, layer: int, facts: ModelFacts) -> bool:
    """Whether an edit changes keys or values of its own position, in its layer or a later one."""
    return name in ("k", "v") or (
        name != "final_norm" and (layer < facts.layers - 1 or name in ("embed", "resid_pre"))
    )
