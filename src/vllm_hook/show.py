"""Figures and a self-contained HTML page of results. Knows nothing of models or engines.

Figures are matplotlib ``Figure`` objects made without pyplot, so nothing is shown or kept open; write
one with ``figure.savefig("x.png")``.
"""

from __future__ import annotations

import base64
import html
import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .errors import HookError

Head = tuple[int, int]
#: (caption, header, rows); a cell is shown as ``str(cell)``.
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]

NORMAL, ATTACK, LINE = "#2f6fb0", "#c8502d", "#333333"
DPI = 130


Spans = Mapping[str, tuple[int, int]]


def attention_figure(
    words: Sequence[str] | Sequence[Sequence[str]],
    weights: torch.Tensor | Sequence[torch.Tensor],
    heads: Sequence[Head],
    title: str | Sequence[str] = "",
    spans: Spans | Sequence[Spans] | None = None,
) -> Figure:
    """Heat map of chosen heads over a prompt's words, one row a head, darker = more attention.

    ``words``: a label per token; ``weights`` [heads, tokens], the last row of attention; ``heads``:
    (layer, head) per row. To compare prompts, normal above attacked, give lists: ``words``,
    ``weights``, ``title`` and ``spans`` of each. All panels share one colour scale.

    ``spans`` are half-open token ranges by name. With them, each row is divided by its attention on all
    spans and tokens outside are left grey (the first token alone often holds most of the attention);
    the percentage at the right is the first span's share.
    """
    panels = _panels(words, weights, heads, title, spans)
    top = float(np.nanquantile(np.concatenate([values.ravel() for _, values, _, _ in panels]), 0.98)) or 1.0
    width = min(0.27 * max(len(labels) for labels, _, _, _ in panels) + 2.8, 20.0)
    figure = _figure(width, (0.24 * len(heads) + 1.9) * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    image: Any = None
    for axes, (labels, values, text, marks) in zip(grid, panels, strict=True):
        axes.set_facecolor("#ececec")
        image = axes.imshow(values, aspect="auto", cmap="Blues", vmin=0.0, vmax=top, interpolation="nearest")
        axes.set_xticks(range(len(labels)), [_label(w) for w in labels], rotation=90, fontsize=8)
        axes.set_yticks(range(len(heads)), [f"L{layer} H{head}" for layer, head in heads], fontsize=8)
        axes.tick_params(length=0)
        axes.set_title(text, fontsize=11, loc="left", pad=22 if marks else 8)
        for name, (start, stop) in marks.items():
            _bracket(axes, name, start, stop)
        if marks:
            _shares(axes, values, *next(iter(marks.items())))
    label = "share of attention on the spans" if panels[0][3] else "attention"
    figure.colorbar(image, ax=list(grid), label=label, fraction=0.025, pad=0.02, extend="max")
    return figure


def _panels(
    words: Any, weights: Any, heads: Sequence[Head], title: Any, spans: Any
) -> list[tuple[Sequence[str], np.ndarray, str, Spans]]:
    """(words, values [heads, tokens], title, spans) per prompt, checked and normalised."""
    if isinstance(weights, torch.Tensor):
        words, weights, title, spans = [words], [weights], [title], [spans]
    titles = [title] * len(weights) if isinstance(title, str) else title
    marks = [spans] * len(weights) if spans is None or isinstance(spans, Mapping) else spans
    panels = []
    for labels, tensor, text, mark in zip(words, weights, titles, marks, strict=True):
        if tuple(tensor.shape) != (len(heads), len(labels)):
            raise HookError(
                f"weights are {list(tensor.shape)}, but there are {len(heads)} heads and {len(labels)} words"
            )
        values = tensor.detach().float().cpu().numpy()
        if mark:
            inside = np.zeros(len(labels), dtype=bool)
            for start, stop in mark.values():
                inside[start:stop] = True
            values = np.where(inside, values, np.nan) / (values[:, inside].sum(1, keepdims=True) + 1e-8)
        panels.append((labels, values, text, mark or {}))
    return panels


def _shares(axes: Any, values: np.ndarray, name: str, span: tuple[int, int]) -> None:
    """At the right of each row the share of one span; ``values`` are normalised over the spans."""
    shares = np.nansum(values[:, span[0] : span[1]], axis=1)
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": LINE}
    style["annotation_clip"] = False
    across = axes.get_yaxis_transform()
    for row, share in enumerate(shares):
        axes.annotate(f"{share:.0%}", (1.0, row), xycoords=across, xytext=(5, 0), va="center", **style)
    text = f"{name}\nmean {shares.mean():.0%}"
    axes.annotate(text, (1.0, 1.0), xycoords="axes fraction", xytext=(5, 4), va="bottom", **style)


def score_figure(
    scores_by_style: Mapping[str, Sequence[float]],
    threshold: float | None = None,
    title: str = "Focus score by kind of prompt",
    label: str = "focus score (low = attention left the instruction)",
) -> Figure:
    """A strip of points and a box per style; ``normal`` styles come first and in another colour.

    The dashed line is the threshold: prompts at or left of it are flagged. Names carry the number
    flagged.
    """
    if not scores_by_style or not all(len(v) for v in scores_by_style.values()):
        raise HookError("need at least one score for every style")
    styles = sorted(scores_by_style, key=lambda s: not s.startswith("normal"))
    figure = _figure(8.0, 0.55 * len(styles) + 1.5)
    axes = figure.subplots()
    noise = random.Random(0)
    names = []
    for row, style in enumerate(styles):
        values = [float(v) for v in scores_by_style[style]]
        colour = NORMAL if style.startswith("normal") else ATTACK
        axes.boxplot(
            [values],
            positions=[row],
            orientation="horizontal",
            widths=0.55,
            showfliers=False,
            medianprops={"color": colour, "linewidth": 1.8},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        heights = [row + noise.uniform(-0.2, 0.2) for _ in values]
        axes.scatter(values, heights, s=15, color=colour, alpha=0.55, linewidths=0)
        name = style.replace("_", " ")
        if threshold is not None:
            name += f"\n{sum(v <= threshold for v in values)} of {len(values)} flagged"
        names.append(name)
    if threshold is not None:
        axes.axvline(threshold, color=LINE, linestyle="--", linewidth=1)
        axes.annotate(
            f"threshold {threshold:.3g}",
            (threshold, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=9,
            color=LINE,
        )
    axes.set_yticks(range(len(styles)), names, fontsize=9)
    axes.set_ylim(len(styles) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=12, loc="left", pad=18)
    axes.grid(axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def sweep_figure(
    strengths: Sequence[float],
    rates: Sequence[float],
    perplexities: Sequence[float],
    chosen: float | None = None,
    title: str = "",
    rate_label: str = "share of answers that show it",
    bound: float = 2.0,
) -> Figure:
    """What a stronger edit brings and costs: rate above, perplexity relative to plain below.

    One value a strength in each; ``rates`` in 0..1. ``bound`` is drawn as the most perplexity may grow;
    ``chosen`` marks one strength.
    """
    if not strengths or not len(strengths) == len(rates) == len(perplexities):
        raise HookError("need one rate and one perplexity for every strength, and at least one strength")
    figure = _figure(8.0, 6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(strengths, [100 * rate for rate in rates], "o-", color=NORMAL, lw=2)
    upper.set(ylim=(-4, 104), ylabel="%")
    upper.set_title(rate_label, fontsize=10, loc="left")
    lower.plot(strengths, perplexities, "o-", color=ATTACK, lw=2)
    lower.axhline(bound, color=LINE, linestyle="--", linewidth=1)
    lower.set(yscale="log", xlabel="strength", ylabel="times plain")
    ticks = [t for t in (0.5, 1, 2, 4, 8, 16, 32, 64) if t <= max(*perplexities, bound) * 1.5]
    lower.set_yticks(ticks, [f"{t:g}" for t in ticks])
    lower.minorticks_off()
    lower.set_ylim(0.8 * min(1.0, *perplexities), 1.25 * max(bound, *perplexities))
    lower.set_title(
        f"perplexity of the answers under the unsteered model (dashed: x{bound:g})", fontsize=10, loc="left"
    )
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        if chosen is not None:
            axes.axvline(chosen, color=LINE, linewidth=8, alpha=0.1)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def interval_figure(
    values: Mapping[str, Sequence[float]],
    intervals: Mapping[str, tuple[float, float]],
    title: str = "",
    label: str = "",
) -> Figure:
    """Methods compared on the same items: a point an item, a bar over the interval, a tick at the mean."""
    if not values or not all(len(v) for v in values.values()):
        raise HookError("need at least one value for every method")
    figure = _figure(8.0, 0.7 * len(values) + 1.3)
    axes = figure.subplots()
    noise = random.Random(0)
    for row, (name, each) in enumerate(values.items()):
        heights = [row + noise.uniform(-0.22, 0.22) for _ in each]
        axes.scatter(each, heights, s=12, color=NORMAL, alpha=0.4, linewidths=0)
        low, high = intervals[name]
        axes.plot([low, high], [row, row], color=ATTACK, lw=5, alpha=0.6, solid_capstyle="butt")
        axes.plot([sum(each) / len(each)] * 2, [row - 0.25, row + 0.25], color=ATTACK, lw=2)
    names = [f"{name}\n{sum(v) / len(v):.3f}" for name, v in values.items()]
    axes.set_yticks(range(len(values)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(-0.02, 1.02), xlabel=label)
    axes.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def save_html(
    path: str | Path,
    figures: Mapping[str, Figure],
    tables: Sequence[Table] = (),
    title: str = "vLLM Hook",
) -> Path:
    """Write one page that needs no other file: figures by caption (as PNG), then tables.

    Readable in light and dark: figures keep a white ground of their own.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for caption, figure in figures.items():
        text = html.escape(caption)
        data = base64.b64encode(png(figure)).decode("ascii")
        image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{text}</figcaption></figure>")
    for caption, header, rows in tables:
        cells = ["<tr>" + "".join(f"<th>{html.escape(str(c))}</th>" for c in header) + "</tr>"]
        cells += ["<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows]
        body = f"<caption>{html.escape(caption)}</caption>{''.join(cells)}"
        parts.append(f'<div class="wide"><table>{body}</table></div>')
    path = Path(path)
    page = PAGE.replace("@title", html.escape(title)).replace("@body", "\n".join(parts))
    path.write_text(page, encoding="utf-8")
    return path


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>@title</title>
<style>
:root { --text: #1c1c1e; --ground: #ffffff; --line: #d5d5da; --dim: #5c5c66; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8ea; --ground: #17181b; --line: #3a3b42; --dim: #a2a3ad; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground);
       max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
figcaption, caption { color: var(--dim); font-size: .9rem; text-align: left; padding: .4rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem; text-align: left;
         font-variant-numeric: tabular-nums; }
</style></head><body>
@body
</body></html>
"""


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _bracket(axes: Any, name: str, start: int, stop: int) -> None:
    """A line over the columns of a span, with its name above."""
    across = axes.get_xaxis_transform()
    axes.plot([start - 0.4, stop - 0.6], [1.03, 1.03], transform=across, color=LINE, lw=1.5, clip_on=False)
    axes.annotate(
        name,
        ((start + stop - 1) / 2, 1.03),
        xycoords=across,
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=LINE,
        annotation_clip=False,
    )


def _label(word: str) -> str:
    """A word as a tick label: visible line ends, no mathtext, not too long."""
    text = word.replace("\n", "\\n").strip(" ") or "␣"
    text = text if len(text) <= 14 else text[:13] + "…"
    return text.replace("$", r"\$")
