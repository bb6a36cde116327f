"""Interventions of a program -> parameters of the one edit kernel, when the program is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Problem, ProgramError
from ..ops import edit as op
from ..program.checked import CheckedEdit, CheckedProgram, Observation
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
from .compiled import Atom, CompiledEdit, CompiledEdits, Condition, check_size, turned
from .edit_conflicts import program_conflicts, setter

#: Most edits that one row of one site may be given.
CHAIN_LIMIT = 64
_LARGEST32 = float(np.finfo(np.float32).max)


def compile_edits(checked: CheckedProgram, tensors: Mapping[str, Any], facts: ModelFacts) -> CompiledEdits:
    """Raises ProgramError naming the field: a zero direction, two clamps of one direction in conflict."""
    compiler = _Compiler(checked, tensors, facts)
    edits = tuple(compiler.edit(edit) for edit in checked.edits)
    selectors = [edit.selectors for edit in checked.edits]
    setters = [setter(edit.id, edit, compiler.vectors) for edit in edits]
    for id, conflict in program_conflicts(list(zip(setters, selectors, strict=True))):
        compiler.wrong(("intervene", id), conflict)
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
            theta = 0.0 if features.threshold is None else float(features.threshold[i])
            act = op.RELU if features.threshold is None else op.JUMP_RELU
            u, v = self.keep(encoder), self.keep(features.decoder[i])
            c = preactivation(features, i)
            atoms.append(Atom(u=u, v=v, act=act, a=e.target, b=-1.0, c=c, theta=theta))
        return atoms

    def condition(self, path: tuple[str, ...], when: When) -> Condition:
        observation = self.checked.observation(when.observe)
        bound = when.above if when.above is not None else when.below
        assert bound is not None
        if isinstance(observation.reduce, SaeReduction):
            kind, u, c, bound = self.feature(path, observation, observation.reduce, when, bound)
        else:
            kind, u, c = self.reading(path, observation)
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
        raise TypeError(reduce)

    def feature(
        self, path: tuple[str, ...], observation: Observation, reduce: SaeReduction, when: When, x: float
    ) -> tuple[int, str, float, float]:
        """How a condition on one SAE feature reads its row: by the value before the activation, against a
        bound with which the activation passes ``x`` exactly then."""
        features: SaeFeatures = self.tensors[f"{reduce.sae}[{reduce.features[0]}]"]
        theta = None if features.threshold is None else float(features.threshold[0])
        one_row = observation.selectors == ("last_prompt",)
        if when.over == "mean" and observation.prompt_only and not one_row:
            self.wrong((*path, "over"), "the mean of SAE activations cannot gate; take any, all or one row")
        bound = feature_bound(when.above is not None, x, 0.0 if theta is None else theta)
        if bound is None:
            name = "below" if when.above is None else "above"
            self.wrong((*path, name), f"cannot gate between the feature's threshold, {theta:g}, and 0")
            bound = 0.0
        return op.LINEAR, self.keep(features.encoder[0]), preactivation(features, 0), bound


def preactivation(features: SaeFeatures, i: int) -> float:
    """The constant of <encoder, h> + c, with what is subtracted from h first."""
    c = float(features.bias[i])
    return c if features.centre is None else c - float(features.encoder[i] @ features.centre)


def feature_bound(above: bool, x: float, theta: float) -> float | None:
    """The bound of a value p before the activation, that passes it exactly when the activation
    f = (p if p > theta else 0) passes ``x``, both strictly and in float32; None if there is no such bound
    (``x`` between a negative theta and 0).
    """
    x32, theta32 = np.float32(min(max(x, -_LARGEST32), _LARGEST32)), np.float32(theta)
    if above and x32 >= 0:
        return float(max(x32, theta32))
    if not above and x32 > 0:
        # All p <= theta have f = 0 < x, theta itself too.
        return float(x32 if x32 > theta32 else np.nextafter(theta32, np.float32(np.inf)))
    if theta32 < x32 and (above or x32 <= 0):
        return None
    return -_LARGEST32  # f >= x: always above, never below
