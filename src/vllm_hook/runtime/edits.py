"""Interventions of a program -> parameters of the one edit kernel.

Compiled once when a program is loaded; a request only changes scalars and resolves positions.
Vectors are known by the digest of their content: programs that use the same vector share a slot,
and a name that is bound to new content can never meets what was cached under the old one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import Problem, ProgramError
from ..ops import edit as op
from ..program.checked import CheckedEdit, CheckedProgram, Observation
from ..program.resolve import OpenRange, Prompt, ResolvedEdit, ResolvedObservation, ResolvedProgram, union
from ..program.schema import (
    AddEdit,
    AffineEdit,
    AttendEdit,
    ClampEdit,
    CosineReduction,
    NormReduction,
    ProbeReduction,
    ProjectionReduction,
    RotateEdit,
    SaeEdit,
    SaeReduction,
    When,
)
from ..sites import ModelFacts, site
from ..tensors import Probe, SaeFeatures
from .edit_limits import check_limits

#: Order in which sites are run within a layer.
_IN_ORDER = "embed resid_pre q k v attention z attn_out resid_mid mlp_out resid_post final_norm"
ORDER = {name: i for i, name in enumerate(_IN_ORDER.split())}
#: Most edits that one row of one site may be given.
CHAIN_LIMIT = 64
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


def compile_edits(checked: CheckedProgram, tensors: Mapping[str, Any], facts: ModelFacts) -> CompiledEdits:
    """Raises ProgramError naming the field: a zero direction, two clamps of one direction in conflict."""
    compiler = _Compiler(checked, tensors, facts)
    edits = tuple(compiler.edit(edit) for edit in checked.edits)
    compiler.refuse_conflicts(edits)
    for edit in edits:
        if not compiler.problems and (problem := check_size(edit, compiler.vectors)) is not None:
            compiler.wrong(("intervene", edit.id), problem)
    if compiler.problems:
        raise ProgramError(checked.source, compiler.problems)
    return CompiledEdits(edits, compiler.vectors)


class _Compiler:
    def __init__(self, checked: CheckedProgram, tensors: Mapping[str, Any], facts: ModelFacts) -> None:
        self.checked = checked
        self.tensors = tensors
        self.facts = facts
        self.vectors: dict[str, Tensor] = {}
        self.problems: list[Problem] = []

    def wrong(self, path: tuple[str | int, ...], message: str) -> None:
        self.problems.append(Problem(".".join(map(str, path)), message, self.checked.lines.get(path[:2])))

    def keep(self, vector: Tensor) -> str:
        """Remember a vector; its digest."""
        data = vector.detach().float().contiguous()
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:32]
        self.vectors[digest] = data
        return digest

    def unit(self, path: tuple[str | int, ...], vector: Tensor) -> Tensor:
        length = vector.norm()
        if length == 0:
            self.wrong(path, "is a zero vector, where a direction is needed")
            return vector
        unit: Tensor = vector / length
        return unit

    def edit(self, checked: CheckedEdit) -> CompiledEdit:
        e = checked.edit
        path = ("intervene", checked.id)
        if isinstance(e, AttendEdit):
            condition = None if e.when is None else self.condition((*path, "when"), e.when)
            amount = {"weight": e.weight, "mass": e.mass}
            scalars = {name: value for name, value in amount.items() if value is not None}
            return CompiledEdit(
                checked.id, checked.site, checked.layers, (), condition, scalars, checked.heads or ()
            )
        atoms, scalars = self.atoms(path, e)
        if site(checked.site).kind == "head":
            heads = checked.keep_heads
            if heads is None:
                heads = tuple(range(self.facts.row_shape(checked.site)[0]))
            atoms = [replace(atom, head=head) for head in heads for atom in atoms]
        atoms = [replace(atom, keep_norm=e.keep_norm) for atom in atoms]
        if len(atoms) > CHAIN_LIMIT:
            self.wrong(path, f"comes to {len(atoms)} edits of one row; the limit is {CHAIN_LIMIT}")
        condition = None if e.when is None else self.condition((*path, "when"), e.when)
        return CompiledEdit(checked.id, checked.site, checked.layers, tuple(atoms), condition, scalars)

    def atoms(self, path: tuple[str, ...], e: Any) -> tuple[list[Atom], dict[str, float]]:
        """The entries of a method (for one head), and the scalars that a request may set."""
        if isinstance(e, AddEdit):
            v = self.keep(self.tensors[e.vector])
            return [Atom(u=v, v=v, a=e.strength)], {"strength": e.strength}
        if isinstance(e, AffineEdit):
            u, v = self.keep(self.tensors[e.u]), self.keep(self.tensors[e.v])
            return [Atom(u=u, v=v, a=e.a, b=e.b)], {"a": e.a, "b": e.b}
        if isinstance(e, SaeEdit):
            return self.sae((*path, "sae"), e), {"target": e.target}
        first = self.unit((*path, "vector"), self.tensors[e.vector])
        if isinstance(e, RotateEdit):
            rest = self.tensors[e.second] - (self.tensors[e.second] @ first) * first
            if rest.norm() < 1e-6 * self.tensors[e.second].norm():
                self.wrong((*path, "second"), "is parallel to vector, so they span no plane")
            second = self.unit((*path, "second"), rest)
            return [turned(Atom(op.ROTATE, self.keep(first), self.keep(second)), e.angle)], {"angle": e.angle}
        u = self.keep(first)
        if isinstance(e, ClampEdit):
            target = float(self.tensors[e.target]) if isinstance(e.target, str) else e.target
            return [Atom(u=u, v=u, a=target, b=-1.0)], {"target": target}
        return [Atom(u=u, v=u, a=0.0, b=-1.0)], {}

    def sae(self, path: tuple[str, ...], e: SaeEdit) -> list[Atom]:
        key = f"{e.sae}[{','.join(map(str, e.features))}]"
        features: SaeFeatures = self.tensors[key]
        if features.decoder is None:
            self.wrong(path, "has no W_dec, which an edit needs")
            return []
        atoms = []
        for i in range(len(e.features)):
            encoder = features.encoder[i]
            c = float(features.bias[i])
            if features.centre is not None:
                c -= float(encoder @ features.centre)
            theta = 0.0 if features.threshold is None else float(features.threshold[i])
            act = op.RELU if features.threshold is None else op.JUMP_RELU
            u, v = self.keep(encoder), self.keep(features.decoder[i])
            atoms.append(Atom(u=u, v=v, act=act, a=e.target, b=-1.0, c=c, theta=theta))
        return atoms

    def condition(self, path: tuple[str, ...], when: When) -> Condition:
        observation = self.checked.observation(when.observe)
        kind, u, c = self.reading(path, observation)
        bound = when.above if when.above is not None else when.below
        assert bound is not None
        return Condition(
            site=observation.site,
            layer=observation.layers[0],
            kind=kind,
            u=u,
            c=c,
            bound=bound,
            above=when.above is not None,
            over={"any": op.ANY, "all": op.ALL, "mean": op.MEAN}[when.over],
            per_row=not observation.prompt_only,
            observe=observation.id,
        )

    def reading(self, path: tuple[str, ...], observation: Observation) -> tuple[int, str, float]:
        """How a condition reads its row: kind, vector, constant."""
        reduce = observation.reduce
        if isinstance(reduce, NormReduction):
            return op.NORM, self.keep(torch.zeros(self.facts.hidden)), 0.0
        if isinstance(reduce, ProbeReduction):
            probe: Probe = self.tensors[reduce.probe]
            weight = probe.weight if probe.scale is None else probe.weight / probe.scale
            shift = 0.0 if probe.mean is None else float(weight @ probe.mean)
            return op.LINEAR, self.keep(weight), probe.bias - shift
        if isinstance(reduce, (ProjectionReduction, CosineReduction)):
            ref = reduce.projection if isinstance(reduce, ProjectionReduction) else reduce.cosine
            kind = op.LINEAR if isinstance(reduce, ProjectionReduction) else op.COSINE
            return kind, self.keep(self.unit(path, self.tensors[ref])), 0.0
        assert isinstance(reduce, SaeReduction)
        self.wrong(
            path, f"observation {observation.id!r} reads an SAE feature, which cannot gate yet; use a probe"
        )
        return op.LINEAR, "", 0.0

    def refuse_conflicts(self, edits: Sequence[CompiledEdit]) -> None:
        """Two clamps of one direction at one place: the second would silently undo the first."""
        seen: dict[tuple[Any, ...], tuple[str, float]] = {}
        for edit, checked in zip(edits, self.checked.edits, strict=True):
            for atom in edit.atoms:
                if (
                    atom.kind != op.RANK_ONE
                    or atom.b != -1.0
                    or atom.u != atom.v
                    or edit.condition is not None
                ):
                    continue
                for layer in edit.layers:
                    key = (edit.site, layer, atom.head, atom.u, checked.selectors)
                    before, target = seen.setdefault(key, (edit.id, atom.a))
                    if before != edit.id and target != atom.a:
                        self.wrong(
                            ("intervene", edit.id),
                            f"sets the same direction at {edit.site} of layer {layer} to {atom.a:g} that "
                            f"{before!r} sets to {target:g}; they are in conflict",
                        )
                        return


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


# -- one request --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EditRequest:
    """The interventions of one request, resolved: plain data for the workers and what the prefix
    cache needs.

    ``vectors`` are (kind of site, digest). ``first``: the first position whose keys and values differ
    from an unedited run, None if none do. ``floor``: the first position at which a condition is
    decided once, and so has to be run.
    """

    data: list[dict[str, Any]]
    digest: str
    first: int | None
    vectors: frozenset[tuple[str, str]]
    floor: int | None


def resolve_edits(
    uses: Sequence[tuple[CheckedProgram, CompiledEdits, ResolvedProgram]],
    scalars: Mapping[str, float],
    prompt: Prompt,
    facts: ModelFacts,
) -> EditRequest:
    """Interventions of all programs of a request, in order.

    ``scalars``: values by ``id.name`` or ``program/id.name``.
    """
    data: list[dict[str, Any]] = []
    first: list[int] = []
    floor: list[int] = []
    vectors: set[tuple[str, str]] = set()
    settings = _assign(uses, scalars)
    for checked, compiled, resolved in uses:
        for edit, rows in zip(compiled.edits, resolved.edits, strict=True):
            edit = with_scalars(edit, settings.get((checked.name, edit.id), {}))
            if (problem := check_size(edit, compiled.vectors)) is not None:
                raise ProgramError(f"program {checked.name!r}, intervene.{edit.id}", problem)
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
    check_limits(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return EditRequest(
        data, digest, min(first) if first else None, frozenset(vectors), min(floor) if floor else None
    )


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
            what = "is ambiguous" if found else "names no intervention in use"
            raise ProgramError("hook.set", f"{key!r} {what}; interventions: {known}")
        allowed = owners[found[0]].scalars
        if name not in allowed:
            raise ProgramError("hook.set", f"{key!r}: can set {', '.join(allowed) or 'nothing'} there")
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
