"""Build a linear probe: logistic regression on resid_post, a layer chosen by cross-validation.

The probe file is that of the program format: ``weight`` f32[d], ``bias`` f32[1], ``mean`` and ``scale``
f32[d]; logit = weight . ((h - mean)/scale) + bias. Shapes: N prompts, L layers, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import HookError
from ..tensors import Probe
from .artifact import provenance, publish
from .backend import Needs, Rows
from .job import CHUNK, Job
from .prompts import chat_prompt, check_lengths, where
from .records import Labelled, read_labelled, split, two_parts
from .work import progress

#: Inverse strengths of the penalty, tried at each layer.
PENALTIES = (0.001, 0.01, 0.1, 1.0)
FOLDS = 5
RESAMPLES = 2000
#: Name of the program's score.
SCORE = "label"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class BuiltProbe:
    """``cv``: layer -> AUROC by cross-validation on the training part. ``interval``: of ``auroc`` on the
    held-out part, 95 % by bootstrap. ``logits``: of all prompts in file order of training, then held out."""

    layer: int
    penalty: float
    probe: Probe
    cv: dict[int, float]
    auroc: float
    interval: tuple[float, float]
    accuracy: float
    logits: list[float]


TITLE = """\
A linear probe on the residual stream at the last prompt token; the score is the probability of label 1."""


def build_probe(
    job: Job,
    data: Path,
    held_out: Path | None = None,
    layers: Sequence[int] | None = None,
    share: float = 0.3,
    seed: int = 0,
) -> BuiltProbe:
    """Train on ``data``, measure on ``held_out`` or a ``share`` of the data, write probe and program.

    ``layers`` None: all are tried. HookError: bad data or options, or scikit-learn is missing; nothing
    is written then.
    """
    _need_sklearn()
    count = job.model.facts.layers
    tried = sorted(set(range(count) if layers is None else layers))
    if not tried or tried[0] < 0 or tried[-1] >= count:
        raise HookError(f"layers {tried}: the model has layers 0 to {count - 1}")
    train, held, sources = two_parts(
        data,
        held_out,
        read_labelled,
        lambda found: split(found, share, seed, lambda r: r.label, lambda r: r.group),
        ("trained_on", "measured_on"),
    )
    _enough(train, held, data)
    files = [data] * len(train) + [held_out or data] * len(held)
    prompts = [
        chat_prompt(job.model.tokenizer, r.messages, where(str(f), r))
        for r, f in zip([*train, *held], files, strict=True)
    ]
    longest = check_lengths(prompts, job.model.length, room=1)
    work = job.work("probe", sources, split=[share, seed] if held_out is None else None)
    rows: Rows = "last"
    title = f"states of {len(prompts)} prompts"
    with job.open(Needs(states=rows, longest=longest)) as backend:
        found = work.tensors("states", prompts, CHUNK, lambda p: backend().states(p, rows), title)
    states = torch.stack(found)
    n = len(train)
    cv: dict[int, Validated] = {}
    with progress(f"cross-validation of {len(tried)} layers", len(tried), job.console) as step:
        for layer in tried:
            with work.judged():
                cv[layer] = cross_validate(states[:n, layer], train, seed)
            step(1)
    layer = max(tried, key=lambda i: cv[i].rank)  # the first of equals
    probe = fit(states[:n, layer], [r.label for r in train], cv[layer].penalty)
    logits = logits_of(probe, states[:, layer])
    labels = [r.label for r in held]
    measured, interval = auroc_interval(logits[n:], labels, seed)
    accuracy = float(np.mean([(x > 0) == bool(y) for x, y in zip(logits[n:], labels, strict=True)]))
    scores = {i: value.auroc for i, value in cv.items()}
    result = BuiltProbe(layer, cv[layer].penalty, probe, scores, measured, interval, accuracy, logits)
    made = _provenance(job, sources, result, {"seed": seed, "examples": n, "held_out": len(held)})
    publish(job.output, TITLE, made, _program(job, layer), probe.tensors())
    work.done()
    return result


@dataclass(frozen=True)
class Validated:
    """Means over folds of AUROC and log loss (nats), with the penalty that gave them."""

    auroc: float
    loss: float
    penalty: float

    @property
    def rank(self) -> tuple[float, float]:
        """By AUROC; easy data have many layers at 1, and of these the surest is taken."""
        return self.auroc, -self.loss


def cross_validate(states_Nd: Tensor, records: Sequence[Labelled], seed: int) -> Validated:
    """The best penalty on held-out folds.

    Folds keep groups together. Standardisation is fitted inside each fold.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedGroupKFold

    labels = np.array([r.label for r in records])
    groups = np.array([r.group or f"alone {i}" for i, r in enumerate(records)])
    least = min(len({g for g, y in zip(groups, labels, strict=True) if y == label}) for label in (0, 1))
    folds = StratifiedGroupKFold(min(FOLDS, least), shuffle=True, random_state=seed)
    parts = [
        (a, b)
        for a, b in folds.split(labels, labels, groups)
        if len(set(labels[a])) == len(set(labels[b])) == 2
    ]
    if not parts:
        raise HookError("no fold of the cross-validation has both labels on both sides: give more groups")
    found = []
    for penalty in PENALTIES:
        values, losses = [], []
        for train, test in parts:
            probe = fit(states_Nd[train], labels[train].tolist(), penalty)
            logits = np.array(logits_of(probe, states_Nd[test]))
            values.append(roc_auc_score(labels[test], logits))
            losses.append(np.logaddexp(0, np.where(labels[test] == 1, -logits, logits)).mean())
        found.append(Validated(float(np.mean(values)), float(np.mean(losses)), penalty))
    return max(found, key=lambda v: v.rank)


def fit(states_Nd: Tensor, labels: Sequence[int], penalty: float) -> Probe:
    """Logistic regression (L2, C = ``penalty``) on standardised states. Constant dimensions have scale 1."""
    from sklearn.linear_model import LogisticRegression

    x = states_Nd.double().numpy()
    mean, scale = x.mean(0), x.std(0)
    scale = np.where(scale > 1e-6 * np.maximum(np.abs(mean), 1e-6), scale, 1.0)
    model = LogisticRegression(C=penalty, max_iter=2000, tol=1e-6)
    model.fit((x - mean) / scale, np.array(labels))
    weight, bias = (torch.tensor(a.reshape(-1), dtype=torch.float32) for a in (model.coef_, model.intercept_))
    return Probe(weight, float(bias), torch.tensor(mean).float(), torch.tensor(scale).float())


def logits_of(probe: Probe, states_Nd: Tensor) -> list[float]:
    """The probe as served, in float64."""
    assert probe.mean is not None
    assert probe.scale is not None
    standard = (states_Nd.double() - probe.mean.double()) / probe.scale.double()
    values: list[float] = (standard @ probe.weight.double() + probe.bias).tolist()
    return values


def auroc_interval(
    logits: Sequence[float], labels: Sequence[int], seed: int, level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """AUROC with its bootstrap percentile interval; each class is resampled by itself."""
    from sklearn.metrics import roc_auc_score

    x, y = np.array(logits), np.array(labels)
    rng = np.random.default_rng(seed)
    sides = [np.flatnonzero(y == label) for label in (0, 1)]
    values = []
    for _ in range(RESAMPLES):
        picked = np.concatenate([rng.choice(side, len(side)) for side in sides])
        values.append(roc_auc_score(y[picked], x[picked]))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(roc_auc_score(y, x)), (float(low), float(high))


def _need_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        raise HookError("building probes needs scikit-learn: pip install 'vllm-hook[build]'") from None


def _enough(train: Sequence[Labelled], held: Sequence[Labelled], path: Path) -> None:
    for label in (0, 1):
        if len({r.group or f"alone {i}" for i, r in enumerate(train) if r.label == label}) < 2:
            raise HookError(
                f"{path}: the part to train on has label {label} in one group only; give it in more groups"
            )
    for what, part in (("train", train), ("measure", held)):
        for label in (0, 1):
            if sum(r.label == label for r in part) < 2:
                raise HookError(f"{path}: the part to {what} on has fewer than two examples of label {label}")


def _provenance(job: Job, sources: Any, result: BuiltProbe, options: dict[str, Any]) -> dict[str, Any]:
    held = {
        "auroc": round(result.auroc, 4),
        "interval_95": [round(v, 4) for v in result.interval],
        "accuracy": round(result.accuracy, 4),
    }
    return provenance(
        "probe",
        job.model,
        sources,
        f"logistic regression, L2 with C={result.penalty:g}, at layer {result.layer}; layer and C by "
        f"{FOLDS}-fold cross-validation",
        options=options,
        measured_by=job.measured_by,
        held_out=held,
        cv_auroc={layer: round(value, 4) for layer, value in result.cv.items()},
    )


def _program(job: Job, layer: int) -> dict[str, Any]:
    observed = {
        "site": "resid_post",
        "layers": [layer],
        "positions": "last_prompt",
        "reduce": {"probe": job.output.tensors.name},
    }
    return {
        **job.program("layers", "hidden"),
        "observe": {"logit": observed},
        "analyze": {SCORE: {"analyzer": "linear_probe", "observe": "logit", "options": {"threshold": 0.5}}},
    }
