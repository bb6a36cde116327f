"""Results on disk with the words that they belong to, and pictures of them.

A result file (``HookResult.save``) holds numbers only. :func:`save` writes beside each
``NAME.safetensors`` a ``NAME.json`` with the prompt's tokens, so that a picture needs no tokenizer.
Knows nothing of models or engines.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

from .errors import HookError
from .program.locate import is_program_name
from .results import HookResult
from .show import Table, attention_figure, png, save_html, score_figure

#: Heat maps of at most this many prompts; beyond it, those of the highest and the lowest score.
MOST_MAPS = 4


@dataclass(frozen=True)
class Saved:
    """One prompt with its result. ``style`` is the kind of prompt (``normal...`` is harmless); ``tokens``
    holds a label per token of prompt and generation, ``text`` what was generated."""

    name: str
    result: HookResult
    tokens: Sequence[str] = ()
    style: str = ""
    prompt: str = ""
    text: str = ""

    def words(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "style": self.style, "prompt": self.prompt, "text": self.text}


def save(folder: Path, items: Iterable[Saved]) -> Path:
    """Write every item into ``folder``, as ``NAME.safetensors`` and ``NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in items:
        item.result.save(folder / f"{item.name}.safetensors")
        text = json.dumps(item.words(), ensure_ascii=False)
        (folder / f"{item.name}.json").write_text(text, encoding="utf-8")
    return folder


def load(paths: Iterable[Path]) -> list[Saved]:
    """Read result files, and all those in folders (by name). HookError names what cannot be read."""
    items = []
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise HookError(f"{path}: no *.safetensors in this folder")
        items += [_load_one(file) for file in files]
    return items


def _load_one(path: Path) -> Saved:
    if not path.is_file() and not is_program_name(path):
        raise HookError(f"{path}: no such file or folder")
    if path.suffix != ".safetensors":
        raise HookError(
            f"{path}: is no saved result, which ends in .safetensors: write some with "
            "`vllm-hook run MODEL PROGRAM --prompts FILE --save DIR`, and give DIR"
        )
    try:
        result = HookResult.load(path)
    except HookError:
        raise
    except Exception as error:
        raise HookError(f"{path}: not a saved hook result: {error}") from None
    beside = path.with_suffix(".json")
    try:
        words = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        return Saved(
            path.stem, result, **{k: words[k] for k in ("tokens", "style", "prompt", "text") if k in words}
        )
    except (ValueError, TypeError, OSError) as error:
        raise HookError(f"{beside}: cannot be read: {error}") from None


# -- pictures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionRow:
    """The last row of an ``attention`` observation: ``weights`` [heads, tokens]."""

    words: list[str]
    weights: torch.Tensor
    heads: list[tuple[int, int]]
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)


def figures(items: Sequence[Saved], title: str = "Attention of the last prompt token") -> dict[str, Figure]:
    """By caption: attention of the observed heads over the words, and scores by kind of prompt."""
    found: dict[str, Figure] = {}
    mapped = [(item, row) for item in items if (row := attention_row(item)) is not None]
    if len(mapped) > MOST_MAPS:
        mapped = _extremes(mapped)
    mapped.sort(key=lambda pair: not pair[0].style.startswith("normal"))
    if mapped:
        heads = mapped[0][1].heads
        mapped = [(item, row) for item, row in mapped if row.heads == heads]
        found[title] = attention_figure(
            [row.words for _, row in mapped],
            [row.weights for _, row in mapped],
            heads,
            [_title(item) for item, _ in mapped],
            [row.spans for _, row in mapped],
        )
    for id, (by_style, threshold) in scores_by_style(items).items():
        found[f"Score {id} by kind of prompt"] = score_figure(by_style, threshold, title=id, label="score")
    return found


def scores_by_style(items: Sequence[Saved]) -> dict[str, tuple[dict[str, list[float]], float | None]]:
    """Per score id: values by style, and the threshold if all results agree on one."""
    values: dict[str, dict[str, list[float]]] = {}
    thresholds: dict[str, set[Any]] = {}
    for item in items:
        for id, score in item.result.scores.items():
            values.setdefault(id, {}).setdefault(item.style or "prompts", []).append(score.value)
            thresholds.setdefault(id, set()).add(score.details.get("threshold"))
    return {
        id: (by_style, next(iter(thresholds[id])) if len(thresholds[id]) == 1 else None)
        for id, by_style in values.items()
    }


def attention_row(item: Saved) -> AttentionRow | None:
    """What a heat map of this result needs; None without an ``attention`` observation or its words."""
    for id, seen in item.result.observed.items():
        if seen.site == "attention" and seen.positions and seen.heads:
            length = seen.positions[-1] + 1
            if length <= len(item.tokens):
                spans = _spans(item.result, id.rpartition("/")[0])
                words, weights = list(item.tokens[:length]), seen.values[:, -1, :length].float()
                return AttentionRow(words, weights, list(seen.heads), spans)
    return None


def _spans(result: HookResult, program: str) -> dict[str, tuple[int, int]]:
    """Spans of one range each by bare name: the program's own, else those of any program."""
    single = {id: ranges[0] for id, ranges in result.spans.items() if len(ranges) == 1}
    own = {id: span for id, span in single.items() if id.rpartition("/")[0] == program}
    return {id.rpartition("/")[2]: span for id, span in (own or single).items()}


def _extremes(mapped: list[tuple[Saved, AttentionRow]]) -> list[tuple[Saved, AttentionRow]]:
    ordered = sorted(mapped, key=lambda pair: -_first_score(pair[0]))
    return [ordered[0], ordered[-1]]


def _first_score(item: Saved) -> float:
    return next((score.value for score in item.result.scores.values()), 0.0)


def _title(item: Saved) -> str:
    scores = ", ".join(
        f"{id.rpartition('/')[2]} {score.value:.3f}" + (" flagged" if score.flagged else "")
        for id, score in item.result.scores.items()
    )
    kind = item.style.replace("_", " ") or item.name
    return f"{kind}: {scores}" if scores else kind


def table(items: Sequence[Saved]) -> Table:
    """Every score of every prompt, as a table for a page."""
    rows = [
        (item.style or "-", item.prompt or item.name, id, f"{score.value:.3f}", verdict(score.flagged))
        for item in items
        for id, score in item.result.scores.items()
    ]
    return "Scores", ("style", "prompt", "score", "value", "verdict"), rows


def verdict(flagged: bool | None) -> str:
    return {None: "", True: "FLAGGED", False: "ok"}[flagged]


def write(
    path: Path, figures: Mapping[str, Figure], tables: Sequence[Table] = (), title: str = "vLLM Hook"
) -> Path:
    """A page (``.html``) or one image of all figures (``.png``), by the name's ending."""
    if path.suffix not in (".html", ".png"):
        raise HookError(f"{path}: the name must end in .html or .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        return save_html(path, figures, tables, title)
    if not figures:
        raise HookError(
            "nothing to draw: no scores, and no `attention` observation with the words beside it, which "
            "`vllm-hook run --save` keeps"
        )
    images = [Image.open(io.BytesIO(png(figure))).convert("RGB") for figure in figures.values()]
    width, height = max(i.width for i in images), sum(i.height for i in images)
    page = Image.new("RGB", (width, height), "white")
    top = 0
    for image in images:
        page.paste(image, ((width - image.width) // 2, top))
        top += image.height
    page.save(path)
    return path
