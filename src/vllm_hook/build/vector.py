"""Build a steering vector from contrast pairs: one a layer, a sweep over layers, the best one written.

Sources: difference of means (CAA, arXiv 2312.06681; Stolfo et al., arXiv 2410.12877, also for clamp and
its target p = mean of h_with . u), PCA of centred pairs, mass mean (arXiv 2310.06824). States are
resid_post; position 0 is left out. Shapes: N pairs, L layers, d width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import HookError
from .artifact import provenance, publish
from .backend import Backend, Edit, Needs, Rows
from .heads import auroc
from .job import CHUNK, Job
from .prompts import Prompt, chat_prompt, check_lengths, where
from .records import Pair, read_pairs, split, two_parts
from .sweep import Answer, Outcome, Tried, best, recovered
from .vectors import centred_pca, clamp_target, mass_mean, mean_difference
from .work import Work, progress

Direction = Literal["mean", "pca", "mass-mean"]
Method = Literal["add", "clamp"]
DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean_difference,
    "pca": centred_pca,
    "mass-mean": mass_mean,
}
#: Tried at each layer: add, in lengths of the difference of means; clamp, shares of the way to p.
STRENGTHS: dict[str, tuple[float, ...]] = {"add": (0.5, 0.75, 1.0, 1.25), "clamp": (0.75, 1.0, 1.5)}
#: The part of the model where steering has been found to work, and at most so many layers of it, evenly
#: spaced, are tried at one strength; the other strengths at so many of the best of them.
PART, SWEPT, CLOSER = (0.35, 0.85), 18, 3


@dataclass(frozen=True)
class VectorOptions:
    """``layers``: each is tried at all strengths; None: those in the middle at one strength, the best of them
    at all. ``strengths`` None: :data:`STRENGTHS`. ``shows``: a regular
    expression; its share of answers is the score of a setting, else how much of the likelihood of the
    answers to the prompts *with* is recovered. ``held``: pairs kept for the sweep."""

    direction: Direction = "mean"
    method: Method = "add"
    rows: Rows = "last"
    layers: tuple[int, ...] | None = None
    strengths: tuple[float, ...] | None = None
    shows: str | None = None
    held: int = 10
    tokens: int = 40
    seed: int = 0


@dataclass(frozen=True)
class BuiltVector:
    """``tried``: every setting of the sweep. ``separation``: by layer, the AUROC of held-out states
    with against without, projected on the layer's vector."""

    layer: int
    vector: Tensor
    value: float
    tried: list[Tried]
    chosen: Tried
    plain: float
    separation: dict[int, float]


TITLE = """\
Steers the model towards what the prompts "with" of the pairs have and those "without" lack."""


def build_vector(
    job: Job, data: Path, options: VectorOptions | None = None, held_out: Path | None = None
) -> BuiltVector:
    """Make vectors from the pairs of ``data``, choose layer and strength on held-out pairs, write.

    HookError: bad data or options, or every setting of the sweep makes the model degenerate (name
    other layers, or lower strengths); nothing is written then.
    """
    options = options or VectorOptions()
    layers = _check(job, options)
    most, seed = options.held, options.seed
    pairs, held, sources = two_parts(
        data,
        held_out,
        read_pairs,
        lambda found: split(found, min(most / len(found), 0.5), seed),
        ("made_from", "chosen_on"),
    )
    held = held if held_out is None else held[:most]
    if len(pairs) < 2 or not held:
        raise HookError(f"{data}: too few pairs to make a vector of and to choose a layer by")
    prompts = _prompts(job, [*pairs, *held], [str(data)] * len(pairs) + [str(held_out or data)] * len(held))
    longest = check_lengths(prompts, job.model.length, room=options.tokens + 1) + options.tokens
    made_with = {**asdict(options), "layers": layers, "held_out": held_out is not None}
    work = job.work("vector", sources, **made_with)
    title = f"states of {len(prompts)} prompts"
    with job.open(Needs(states=options.rows, edits=True, longest=longest)) as backend:
        found = work.tensors("states", prompts, CHUNK, lambda p: backend().states(p, options.rows), title)
        with_, without = torch.stack(found[::2]), torch.stack(found[1::2])  # [N, L, d]
        n = len(pairs)
        with work.judged():
            vectors = {i: make_vector(options.direction, with_[:n, i], without[:n, i]) for i in layers}
            edits = {i: _edits(options, i, vectors[i], with_[:n, i], without[:n, i]) for i in layers}
        separation = {
            i: auroc(
                (without[n:, i].double() @ v.double()).tolist(), (with_[n:, i].double() @ v.double()).tolist()
            )
            for i, v in vectors.items()
        }
        plain, settings = _sweep(job, work, backend, options, edits, prompts[2 * n :])
    tried = [t for _, t in settings]
    chosen = best(tried)
    if not chosen.fits or chosen.rate <= 0:
        work.done()
        raise HookError(
            "no setting of the sweep both keeps the model speaking and shows the behaviour: "
            f"the best has score {chosen.rate:.2f}, perplexity x {chosen.growth:.2f}, repetition "
            f"{chosen.repetition:.2f} (layer {chosen.layer}); try other layers, strengths or pairs"
        )
    edit = next(e for e, t in settings if t is chosen)
    result = BuiltVector(edit.layer, edit.vector, edit.value, tried, chosen, plain, separation)
    shares = (without[:n, edit.layer].norm(dim=-1).mean(), edit.vector.norm())
    extra = {
        "pairs": n,
        "held_out_pairs": len(held),
        "length_of_mean_state": round(float(shares[1] / shares[0]), 4),
    }
    made = _provenance(job, sources, options, result, extra)
    publish(job.output, TITLE, made, _program(job, options, edit), {"vector": edit.vector})
    work.done()
    return result


def make_vector(direction: str, with_Nd: Tensor, without_Nd: Tensor) -> Tensor:
    """The direction of a layer's pairs, f32[d], as long as the difference of means."""
    vector = DIRECTIONS[direction](with_Nd, without_Nd)
    length = mean_difference(with_Nd, without_Nd).norm()
    return vector * (length / vector.norm().clamp_min(1e-30)) if direction == "pca" else vector


def _check(job: Job, options: VectorOptions) -> list[int]:
    count = job.model.facts.layers
    if options.direction not in DIRECTIONS:
        raise HookError(f"no direction {options.direction!r}; there are {', '.join(DIRECTIONS)}")
    if options.method not in STRENGTHS:
        raise HookError(f"no method {options.method!r}; there are {', '.join(STRENGTHS)}")
    if not all(math.isfinite(s) and s for s in options.strengths or ()):
        raise HookError(f"strengths must be numbers other than 0, not {list(options.strengths or ())}")
    if options.held < 1 or options.tokens < 2:
        raise HookError("a sweep needs at least one held-out pair and answers of two tokens")
    try:
        re.compile(options.shows or "")
    except re.error as error:
        raise HookError(f"{options.shows!r} is not a regular expression: {error}") from None
    if options.layers is None:
        first, last = (round(part * (count - 1)) for part in PART)
        steps = min(SWEPT, last - first + 1) - 1
        return sorted({first + round(i * (last - first) / max(steps, 1)) for i in range(steps + 1)})
    if bad := [i for i in options.layers if not 0 <= i < count]:
        raise HookError(f"layer {bad[0]} does not exist: the model has layers 0 to {count - 1}")
    return sorted(set(options.layers))


def _prompts(job: Job, pairs: Sequence[Pair], files: Sequence[str]) -> list[Prompt]:
    """With and without, in turn."""
    found: list[Prompt] = []
    for pair, file in zip(pairs, files, strict=True):
        at = where(file, pair)
        with_, without = (chat_prompt(job.model.tokenizer, m, at) for m in (pair.with_, pair.without))
        if with_.ids == without.ids:
            raise HookError(f"{at}, with: gives the same tokens as without")
        found += [with_, without]
    return found


def _edits(options: VectorOptions, layer: int, vector: Tensor, with_: Tensor, without: Tensor) -> list[Edit]:
    strengths = options.strengths or STRENGTHS[options.method]
    if not bool(vector.norm() > 0):
        raise HookError(f"layer {layer}: the states of the pairs do not differ, so there is no vector")
    if options.method == "add":
        return [Edit(layer, "add", vector, s) for s in strengths]
    base, target = clamp_target(without, vector), clamp_target(with_, vector)
    return [Edit(layer, "clamp", vector, base + s * (target - base)) for s in strengths]


def _sweep(
    job: Job,
    work: Work,
    backend: Callable[[], Backend],
    options: VectorOptions,
    edits: Mapping[int, Sequence[Edit]],
    held: Sequence[Prompt],
) -> tuple[float, list[tuple[Edit, Tried]]]:
    """The score without an edit, and settings on the held-out pairs (with and without in turn).

    ``edits``: by layer, one a strength.
    """
    with_, without = list(held[::2]), list(held[1::2])

    def plain() -> dict[str, Any]:
        own = backend().answers(without, None, options.tokens)
        wanted = [a.tokens for a in backend().answers(with_, None, options.tokens)]
        figures = {
            "base": backend().likelihood(without, wanted, None),
            "goal": backend().likelihood(with_, wanted, None),
        }
        return {"answers": [asdict(a) for a in own], "wanted": wanted, **figures}

    def steered(edit: Edit) -> dict[str, Any]:
        answers = backend().answers(without, edit, options.tokens)
        scores = backend().likelihood(without, known["wanted"], edit) if options.shows is None else []
        return {"answers": [asdict(a) for a in answers], "scores": scores}

    def rate(scores: Sequence[float], after: Outcome) -> float:
        if options.shows is None:
            return recovered(known["base"], known["goal"], scores)
        pattern = re.compile(options.shows, re.MULTILINE)
        return after.share(lambda text, _ended: pattern.search(text) is not None)

    def attempt(layer: int, strength: int) -> None:
        edit = edits[layer][strength]
        seen = work.value(f"setting-{layer:03d}-{strength}", partial(steered, edit))
        after = _outcome(edit.value, seen["answers"])
        figures = rate(seen["scores"], after), after.growth(before), after.repetition()
        found[layer, strength] = edit, Tried(layer, after, *figures)
        step(1)

    strengths = options.strengths or STRENGTHS[options.method]
    usual = min(range(len(strengths)), key=lambda i: abs(strengths[i] - 1))
    closer = len(edits) if options.layers is not None else min(CLOSER, len(edits))
    count = len(edits) + closer * (len(strengths) - 1)
    found: dict[tuple[int, int], tuple[Edit, Tried]] = {}
    with progress(f"{count} settings on {len(with_)} pairs", count, job.console) as step:
        known = work.value("plain", plain)
        before = _outcome(0.0, known["answers"])
        for layer in edits:
            attempt(layer, usual)
        # By what they show, however dear: the price falls with the strength.
        ranked = sorted(edits, key=lambda i: (-found[i, usual][1].rate, found[i, usual][1].growth))
        for layer in ranked[:closer]:
            for strength in set(range(len(strengths))) - {usual}:
                attempt(layer, strength)
    return rate(known["base"], before), [found[key] for key in sorted(found)]


def _outcome(strength: float, answers: Sequence[dict[str, Any]]) -> Outcome:
    return Outcome(strength, [Answer(**{**a, "tokens": tuple(a["tokens"])}) for a in answers])


def _provenance(
    job: Job, sources: Any, options: VectorOptions, result: BuiltVector, extra: dict[str, Any]
) -> dict[str, Any]:
    layers: dict[int, Any] = {}
    for t in result.tried:
        figures = {"score": t.rate, "perplexity": t.growth, "repetition": t.repetition}
        kept = {name: round(value, 3) for name, value in figures.items()}
        entry = layers.setdefault(t.layer, {"separation_auroc": round(result.separation[t.layer], 4)})
        entry[f"{options.method} {t.outcome.strength:.4g}"] = {
            **kept,
            **({} if t.fits else {"dropped": True}),
        }
    score = "share of answers that match" if options.shows else "share of the likelihood of answers recovered"
    used = {"rows": options.rows, "tokens": options.tokens, "seed": options.seed, "shows": options.shows}
    return provenance(
        "vector",
        job.model,
        sources,
        f"{options.direction} of pairs at layer {result.layer}, chosen among {len(result.tried)} settings",
        options={**used, **extra},
        measured_by=job.measured_by,
        score=score,
        score_without=round(result.plain, 3),
        layers=layers,
    )


def _program(job: Job, options: VectorOptions, edit: Edit) -> dict[str, Any]:
    first: Any = "last_prompt" if options.method == "add" else {"range": [1, None]}
    body = {
        "site": "resid_post",
        "layers": [edit.layer],
        "method": options.method,
        "vector": job.output.tensors.name,
        "strength" if options.method == "add" else "target": round(float(edit.value), 6),
        "positions": [first, "generated"],
    }
    return {**job.program("layers", "hidden"), "intervene": {"steer": body}}
