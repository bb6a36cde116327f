"""Two interventions that set one direction of one row to different values: the later would silently undo
the earlier, so they are refused.

Twice: when a program is loaded, where its selectors meet whatever the prompt is; and for a request,
over all its programs, with the rows and the targets that it has. Gated interventions are left alone:
gates are how a program sets one direction in two ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from ..errors import ProgramError
from ..ops import edit as op
from ..program.checked import is_prompt_only
from ..program.resolve import ResolvedEdit
from ..program.schema import GeneratedRange, PromptRange, Selector
from ..sites import site
from .compiled import Atom, CompiledEdit

#: Cosine from which two directions count as one: an angle of about a thousandth.
PARALLEL = 1 - 1e-6


@dataclass(frozen=True)
class Setter:
    """An intervention that sets directions of rows. ``targets``: (head, vector, value)."""

    name: str
    site: str
    layers: tuple[int, ...]
    targets: tuple[tuple[int, Tensor, float], ...]


def setter(name: str, edit: CompiledEdit, vectors: Mapping[str, Tensor]) -> Setter | None:
    """The directions that an intervention sets whenever it acts; None if it sets none, or has a gate."""
    targets = tuple((atom.head, vectors[atom.u], atom.a) for atom in edit.atoms if _sets(atom))
    return Setter(name, edit.site, edit.layers, targets) if targets and edit.condition is None else None


def _sets(atom: Atom) -> bool:
    """clamp and ablate, and what affine writes of the same form."""
    rank_one = atom.kind == op.RANK_ONE and atom.act == op.IDENTITY
    return rank_one and atom.u == atom.v and (atom.b, atom.c) == (-1.0, 0.0)


def clash(first: Setter, second: Setter) -> str | None:
    """What ``second`` does to a direction that ``first`` sets, in words; None if they agree."""
    layers = set(first.layers) & set(second.layers)
    if first.site != second.site or not layers:
        return None
    for head, u, value in first.targets:
        for other_head, v, other in second.targets:
            way = _same_direction(u, v) if head == other_head else 0
            if way and value != way * other:
                where = f"{first.site} of layer {min(layers)}"
                where += f", head {head}" if site(first.site).kind == "head" else ""
                turned = "" if way > 0 else " (its vector points the other way)"
                return (
                    f"sets the direction that {first.name!r} sets to {value:.9g} at {where} "
                    f"to {way * other:.9g}{turned}"
                )
    return None


def _same_direction(u: Tensor, v: Tensor) -> int:
    """1 or -1 for unit vectors along one line, else 0. (Of another length nothing is *set*.)"""
    if abs(float(u.norm()) - 1) > 1e-4 or abs(float(v.norm()) - 1) > 1e-4:
        return 0
    cosine = float(u.double() @ v.double()) / float(u.double().norm() * v.double().norm())
    return 0 if abs(cosine) < PARALLEL else 1 if cosine > 0 else -1


# -- when a program is loaded ---------------------------------------------------------------------


def program_conflicts(
    setters: Sequence[tuple[Setter | None, Sequence[Selector]]],
) -> Iterator[tuple[str, str]]:
    """(intervention, what is wrong with it) for interventions of one program whose selectors meet."""
    refused = set()
    for (first, chosen), (second, others) in combinations(setters, 2):
        if first is None or second is None or second.name in refused or not selectors_meet(chosen, others):
            continue
        if (problem := clash(first, second)) is not None:
            refused.add(second.name)
            yield second.name, f"{problem}; they are in conflict"


def selectors_meet(first: Sequence[Selector], second: Sequence[Selector]) -> bool:
    """Whether both choose some row, whatever the prompt is. Where that depends on the prompt: False."""
    return any(_meet(a, b) or _meet(b, a) for a in first for b in second)


def _meet(a: Selector, b: Selector) -> bool:
    if a in (b, "all"):
        return True
    if a == "prompt":
        return is_prompt_only(b)
    if a == "generated":
        return isinstance(b, GeneratedRange)
    if a == "last_prompt":
        return isinstance(b, PromptRange) and b.range[1] is None
    if isinstance(a, GeneratedRange) and isinstance(b, GeneratedRange):
        return _ranges_meet(a.generated, b.generated)
    return isinstance(a, PromptRange) and isinstance(b, PromptRange) and _ranges_meet(a.range, b.range)


def _ranges_meet(a: tuple[int, int | None], b: tuple[int, int | None]) -> bool:
    """Of ranges counted from one side only: how the two sides lie depends on the prompt's length."""
    if a[1] is None and b[1] is None:
        return True
    negative = {x < 0 for x in (*a, *b) if x is not None}
    if len(negative) > 1:
        return False
    end = 0 if True in negative else math.inf
    return max(a[0], b[0]) < min(end if x is None else x for x in (a[1], b[1]))


# -- when a request is made -----------------------------------------------------------------------


def refuse_request_conflicts(setters: Sequence[tuple[Setter | None, ResolvedEdit]], prompt: int) -> None:
    """Raises ProgramError for interventions, of any program of the request, that may act on one row.

    Names are qualified by program; ``prompt`` is its length.
    """
    for (first, chosen), (second, others) in combinations([s for s in setters if s[0] is not None], 2):
        assert first is not None
        assert second is not None
        problem = clash(first, second)
        if problem is not None and (row := common_row(chosen, others, prompt)) is not None:
            raise ProgramError(
                "hook.use",
                f"{second.name!r} {problem}, and both act from position {row} on; they are in conflict",
            )


def common_row(first: ResolvedEdit, second: ResolvedEdit, prompt: int) -> int | None:
    """The first position that both may change. Any generated token may be one that is listed."""
    found = []
    for a, b in first.rows:
        for c, d in second.rows:
            start, end = max(a, c), min(math.inf if x is None else x for x in (b, d))
            if start < end:
                found.append(start)
    if first.token_ids & second.token_ids:
        found.append(prompt)
    for one, other in ((first, second), (second, first)):
        if one.token_ids:
            found += [max(a, prompt) for a, b in other.rows if b is None or b > prompt]
    return min(found, default=None)
