"""What the interventions of one request may come to. Checked at admission, so that the tables of a step,
which have fixed sizes, cannot overflow and one request never harms another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CapacityError, ProgramError

#: What one request may need in a step: chains (sets of edits that rows get), their entries, conditions
#: decided once, conditions read at one place; and conditions by row of all running requests together.
CHAINS, ENTRIES, GATES, CONDITIONS_A_ROW, ROW_GATES = 64, 1024, 8, 4, 64


#: Up to so many entries a request always has its place in a step; those with more share ``HEAVY``.
LIGHT, HEAVY = 64, 16 * ENTRIES


def step_limits(requests: int) -> tuple[int, int]:
    """Most entries and conditions of one step. The front end counts what unfinished requests hold and
    frees it a moment before the worker does: hence twice."""
    return 2 * (LIGHT * requests + HEAVY), 2 * (GATES * requests + ROW_GATES)


def heavy_entries(data: Sequence[Mapping[str, Any]]) -> int:
    """What a request takes of ``HEAVY``: its entries in one step, if they are many."""
    entries = _chains_and_entries(data)[1]
    return entries if entries > LIGHT else 0


def check_limits(data: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a request that could overflow the tables of a step: one request never harms another."""
    heads: set[tuple[int, ...]] = set()
    read: dict[tuple[str, int], set[str]] = {}
    for e in data:
        for head in e["attend"]["heads"] if e["attend"] else ():
            if tuple(head) in heads:
                raise ProgramError(
                    "intervene", f"two attend edits of head {head} in one request; name all spans in one"
                )
            heads.add(tuple(head))
        if e["gate"] is not None:
            place = (e["gate"]["site"], e["gate"]["layer"])
            read.setdefault(place, set()).add(json.dumps(e["gate"], sort_keys=True))
    chains, entries = _chains_and_entries(data)
    latched = {json.dumps(e["gate"], sort_keys=True) for e in data if e["gate"] and not e["gate"]["per_row"]}
    most = max((len(conditions) for conditions in read.values()), default=0)
    for what, need, limit in (
        ("sets of edits", chains, CHAINS),
        ("edits over all of these sets", entries, ENTRIES),
        ("conditions on the prompt", len(latched), GATES),
        ("conditions at one place", most, CONDITIONS_A_ROW),
    ):
        if need > limit:
            raise CapacityError(
                f"the interventions of this request come to {need} {what}; the limit is {limit}"
            )


def row_gates(data: Sequence[Mapping[str, Any]]) -> int:
    """Gates by row that a request holds while it runs."""
    by_row = {json.dumps(e["gate"], sort_keys=True) for e in data if e["gate"] and e["gate"]["per_row"]}
    return len(by_row) + sum(1 for e in data if e["filters"])


def _chains_and_entries(data: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    at: dict[tuple[str, int], list[int]] = {}
    for i, e in enumerate(data):
        for layer in () if e["attend"] else e["layers"]:
            at.setdefault((e["site"], layer), []).append(i)
    chains = entries = 0
    for members in {tuple(m) for m in at.values()}:
        cuts = 1 + len({x for m in members for r in data[m]["rows"] for x in r})
        chains += cuts
        entries += cuts * sum(len(data[m]["atoms"]) for m in members)
    return chains, entries
