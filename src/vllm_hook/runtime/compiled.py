"""Interventions as the edit kernel takes them: frozen data, made once when a program is loaded.

Vectors are known by the digest of their content: programs that use the same vector share a slot,
and a name that is bound to new content never meets what was cached under the old one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..errors import ProgramError
from ..ops import edit as op

#: Largest change of a row that an edit may ask for: far beyond any use, far from float32 overflow.
LARGEST = 1e9


@dataclass(frozen=True)
class Atom:
    """One entry of the kernel: see :mod:`vllm_hook.ops.edit`. ``u`` and ``v`` are digests of vectors."""

    kind: int = op.RANK_ONE
    u: str = ""
    v: str = ""
    act: int = op.IDENTITY
    keep_norm: bool = False
    head: int = 0
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    theta: float = 0.0


@dataclass(frozen=True)
class Condition:
    """A scalar read at one site that decides whether edits act. ``rows`` are set at admission."""

    site: str
    layer: int
    kind: int
    u: str
    c: float
    bound: float
    above: bool
    over: int
    per_row: bool
    observe: str


@dataclass(frozen=True)
class CompiledEdit:
    """An intervention as the kernel takes it. ``scalars``: what a request may set, with the defaults."""

    id: str
    site: str
    layers: tuple[int, ...]
    atoms: tuple[Atom, ...]
    condition: Condition | None
    scalars: Mapping[str, float]
    heads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class CompiledEdits:
    """All interventions of a program, in file order, and the vectors that they use by digest."""

    edits: tuple[CompiledEdit, ...] = ()
    vectors: Mapping[str, Tensor] = field(default_factory=dict)


def turned(atom: Atom, degrees: float) -> Atom:
    """A rotation's entry for an angle."""
    angle = math.radians(degrees)
    return replace(atom, a=math.cos(angle), b=math.sin(angle))


def with_scalars(edit: CompiledEdit, values: Mapping[str, float]) -> CompiledEdit:
    """The edit with a request's own strength, target, angle, a or b."""
    if not values:
        return edit
    if edit.heads:
        name, value = next(iter(values.items()))
        if not 0 < value <= (1 if name == "mass" else LARGEST) or (name == "mass" and value == 1):
            raise ProgramError(
                "hook.set", f"{edit.id}.{name} is {value}; 0 < weight <= {LARGEST:g}, 0 < mass < 1 is needed"
            )
        return replace(edit, scalars=dict(values))
    atoms = []
    for atom in edit.atoms:
        if "angle" in values:
            atom = turned(atom, values["angle"])
        for name, part in (("strength", "a"), ("target", "a"), ("a", "a"), ("b", "b")):
            if name in values:
                atom = replace(atom, a=values[name]) if part == "a" else replace(atom, b=values[name])
        atoms.append(atom)
    return replace(edit, atoms=tuple(atoms))


def check_size(edit: CompiledEdit, vectors: Mapping[str, Tensor]) -> str | None:
    """Why an edit could overflow, if it could."""
    for atom in edit.atoms:
        length = float(vectors[atom.v].norm()) if atom.v else 0.0
        reach = max(abs(atom.a), abs(atom.b) * float(vectors[atom.u].norm()) if atom.u else 0.0)
        if not reach * max(length, 1e-30) <= LARGEST:
            return f"changes rows by up to {reach * length:g} times their size; the limit is {LARGEST:g}"
    weight = edit.scalars.get("weight")
    if edit.heads and weight is not None and weight > LARGEST:
        return f"weight is {weight:g}; the limit is {LARGEST:g}"
    return None
