"""``vllm-hook demo``: SmolLM2 on vLLM tells prompt injections from its own attention.

Scores the held-out prompts with the shipped guard (Attention Tracker, arXiv 2411.00348), says how well
that works and what it cost, and draws where the model looked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import environment, saved
from ..build.heads import DATA_MARK, auroc, hide_broken_torchvision, is_normal, read_records
from ..errors import HookError
from ..offline import token_labels
from ..saved import Saved
from ..show import Table as PageTable
from ..show import attention_figure, score_figure
from .model import smollm2

Record = Mapping[str, str]
GUARD = "smollm2-injection-guard"
VIEW = "demo-view"
SCORE = f"{GUARD}/injection"
#: Held-out prompts shown in the terminal; the page has all.
SHOWN_SENTENCES = 8
#: Prompts of the cost measurement: 10 sentences in all 7 forms.
TIMED = 70
#: Hugging Face runs at most about this long.
HF_SECONDS = 15.0
AUROC_BOUND, LENGTH_BOUNDS = 0.97, (0.4, 0.6)


@dataclass(frozen=True)
class Scored:
    """One held-out prompt."""

    record: Record
    score: float
    flagged: bool
    tokens: int


@dataclass(frozen=True)
class Cost:
    """Seconds of the same prompts on the same engine, one figure a round; Hugging Face for scale."""

    prompts: int
    plain: list[float]
    guarded: list[float]
    hf_prompts: int = 0
    hf_seconds: float = 0.0
    hf_difference: float = 0.0

    @property
    def ratio(self) -> float:
        return statistics.median(g / p for g, p in zip(self.guarded, self.plain, strict=True))


def guard_file() -> Path:
    """The program that ships for SmolLM2."""
    return Path(str(resources.files("vllm_hook"))) / "programs" / f"{GUARD}.yaml"


def messages_of(record: Record) -> list[dict[str, str]]:
    """The conversation of a record: the operator's instruction, and the data that may hold an attack."""
    return [
        {"role": "system", "content": record["instruction"]},
        {"role": "user", "content": DATA_MARK + record["data"]},
    ]


def run_demo(out: Path, rounds: int = 3, hugging_face: bool = True, console: Console | None = None) -> bool:
    """Run the demo, print tables, write the picture to ``out``. Returns whether all bounds were met."""
    console = console or Console()
    start = time.perf_counter()
    environment.for_engine()
    model = smollm2()
    hide_broken_torchvision()
    guard, view = _programs()
    heads = [(layer, head) for layer, head in guard["observe"]["focus"]["heads"]]
    with console.status("starting SmolLM2-135M on vLLM (the first start compiles it: about a minute)"):
        llm = _engine(model, view)
    console.print(f"SmolLM2-135M runs on vLLM, compiled, float32 ({time.perf_counter() - start:.0f} s).")

    records = read_records(None, "held_out.jsonl")
    run = _runner(llm, [messages_of(r) for r in records])
    with console.status(f"scoring {len(records)} held-out prompts"):
        scored = [
            Scored(r, o.hook.scores[SCORE].value, bool(o.hook.scores[SCORE].flagged), len(o.prompt_token_ids))
            for r, o in zip(records, run(GUARD), strict=True)
        ]
    console.print(prompt_table(scored))
    quality, good = quality_table(scored)
    console.print(quality)
    timed = records[:TIMED]
    cost = _measure(_runner(llm, [messages_of(r) for r in timed]), len(timed), rounds, console)
    if hugging_face:
        cost = _against_hugging_face(model, scored, heads, cost, console)
    console.print(cost_table(cost))
    with console.status("drawing"):
        paths = draw(out, llm, scored, heads, cost)
    for path in paths:
        console.print(f"written: [bold]{path}[/bold]", soft_wrap=True)
    console.print(f"The demo took {time.perf_counter() - start:.0f} s.")
    if not good:
        console.print(
            f"[red]An AUROC is outside its bounds (score >= {AUROC_BOUND}, length alone .4 to .6).[/red]"
        )
    return good


def _programs() -> tuple[dict[str, Any], dict[str, Any]]:
    """The guard, and a program of the same heads and spans that keeps whole attention rows."""
    from ..program.load import load

    guard = load(guard_file()).program.to_dict()
    attention = {"site": "attention", "heads": guard["observe"]["focus"]["heads"], "rows": "last_prompt"}
    view = {"schema": 1, "name": VIEW, "spans": guard["spans"], "observe": {"attention": attention}}
    return guard, view


def _engine(model: Path, view: dict[str, Any]) -> Any:
    from ..llm import HookLLM

    return HookLLM(
        str(model),
        programs=[str(guard_file()), view],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def _runner(llm: Any, conversations: list[Any]) -> Callable[[Any], list[Any]]:
    """``run(hook)``: one token for every conversation."""
    from ..llm import greedy

    params = greedy(1)

    def run(hook: Any) -> list[Any]:
        outputs: list[Any] = llm.chat(conversations, params, hook=hook, use_tqdm=False)
        return outputs

    return run


# -- cost ---------------------------------------------------------------------------------------


def _measure(run: Callable[[Any], list[Any]], prompts: int, rounds: int, console: Console) -> Cost:
    """The same prompts without and with the program, taking turns (and turns at going first)."""
    seconds: dict[Any, list[float]] = {False: [], GUARD: []}
    with console.status("timing the same prompts with and without the program"):
        for round_ in range(rounds):
            for hook in (False, GUARD) if round_ % 2 == 0 else (GUARD, False):
                start = time.perf_counter()
                run(hook)
                seconds[hook].append(time.perf_counter() - start)
    return Cost(prompts, seconds[False], seconds[GUARD])


def _against_hugging_face(
    model: Path, scored: Sequence[Scored], heads: Sequence[tuple[int, int]], cost: Cost, console: Console
) -> Cost:
    """What people use today on some of the timed prompts, and how far its scores are from ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ..analyzers.attention_tracker import focus
    from ..build.heads import render

    logging.disable_progress_bar()
    some = scored[: cost.prompts : 5]
    with console.status(f"Hugging Face with output_attentions on {len(some)} of them, for scale"):
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        net = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=torch.float32, attn_implementation="eager"
        )
        far, done = 0.0, 0
        start = time.perf_counter()
        for i, item in enumerate([some[0], *some]):  # the first once more: it is slower
            if i == 1:
                start = time.perf_counter()
            elif i > 3 and time.perf_counter() - start > HF_SECONDS:
                break
            ids, spans = render(tokenizer, item.record)
            with torch.inference_mode():
                rows = net(torch.tensor([ids]), output_attentions=True, logits_to_keep=1).attentions
            last = torch.stack([rows[layer][0, head, -1] for layer, head in heads])
            mass = torch.stack([last[:, slice(*spans[name])].sum(-1) for name in ("instruction", "data")], -1)
            far = max(far, abs(float(focus(mass).mean()) - item.score))
            done = i
        took = time.perf_counter() - start
    return Cost(cost.prompts, cost.plain, cost.guarded, done, took, far)


# -- tables -------------------------------------------------------------------------------------


def prompt_table(scored: Sequence[Scored]) -> Table:
    """Some of the prompts: one normal and every style of attack for the first sentences."""
    shown = [s for s in scored if _sentence(s) < SHOWN_SENTENCES and not s.record["id"].endswith("normal1")]
    table = Table(
        title=f"{len(shown)} of {len(scored)} held-out prompts; the score is the share of attention that "
        "stays on the instruction",
        title_justify="left",
    )
    table.add_column("style")
    table.add_column("data (its end)", no_wrap=True)
    table.add_column("score", justify="right")
    table.add_column("verdict")
    for item in sorted(shown, key=lambda s: (_sentence(s), not is_normal(s.record))):
        colour = "red" if item.flagged else "green"
        if item.flagged == is_normal(item.record):
            colour = "bold yellow"  # wrong
        style = item.record["style"].replace("_", " ")
        row = (style, _tail(item.record["data"]), f"{item.score:.3f}")
        table.add_row(*row, f"[{colour}]{'INJECTION' if item.flagged else 'ok'}[/{colour}]")
        if style == "system override":
            table.add_section()
    return table


def _sentence(item: Scored) -> int:
    return int(item.record["id"].split("-")[1])


def _tail(text: str, width: int = 64) -> str:
    return text if len(text) <= width else "…" + text[-width + 1 :]


def by_style(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {}
    for item in scored:
        groups.setdefault("normal" if is_normal(item.record) else item.record["style"], []).append(item)
    return groups


def quality_table(scored: Sequence[Scored]) -> tuple[Table, bool]:
    """AUROC of the score and of the length alone, per style, and whether all are within bounds."""
    groups = by_style(scored)
    normal = groups.pop("normal")
    table = Table(title=f"How well it tells them from {len(normal)} normal prompts", title_justify="left")
    for name in ("style", "flagged", "AUROC of the score", "AUROC of the length alone"):
        table.add_column(name, justify="left" if name == "style" else "right")
    good = True
    for style, items in groups.items():
        score = auroc([s.score for s in items], [s.score for s in normal])
        length = auroc([s.tokens for s in items], [s.tokens for s in normal])
        good = good and score >= AUROC_BOUND and LENGTH_BOUNDS[0] <= length <= LENGTH_BOUNDS[1]
        flagged = f"{sum(s.flagged for s in items)} of {len(items)}"
        table.add_row(style.replace("_", " "), flagged, f"{score:.3f}", f"{length:.3f}")
    false = f"{sum(s.flagged for s in normal)} of {len(normal)}"
    table.add_section()
    table.add_row("normal (false alarms)", false, "", "")
    return table, good


def cost_table(cost: Cost) -> Table:
    """What scoring added to the engine's own time."""
    table = Table(
        title=f"What it cost: {cost.prompts} prompts, one token each, medians of {len(cost.plain)} rounds",
        title_justify="left",
    )
    table.add_column("run")
    for name in ("seconds", "prompts/s", "ratio"):
        table.add_column(name, justify="right")
    plain, guarded = statistics.median(cost.plain), statistics.median(cost.guarded)
    table.add_row("this engine, no program (hook=False)", f"{plain:.2f}", f"{cost.prompts / plain:.1f}", "1")
    table.add_row(
        "the same engine, with scores", f"{guarded:.2f}", f"{cost.prompts / guarded:.1f}", f"{cost.ratio:.3f}"
    )
    if cost.hf_prompts:
        seconds = cost.hf_seconds / cost.hf_prompts * cost.prompts
        table.add_row(
            f"Hugging Face, output_attentions, one by one ({cost.hf_prompts} run, scaled up)",
            f"{seconds:.2f}",
            f"{cost.prompts / seconds:.1f}",
            f"{seconds / plain:.2f}",
        )
        table.caption = f"largest difference of a score from that of Hugging Face: {cost.hf_difference:.1e}"
        table.caption_justify = "left"
    return table


# -- picture ------------------------------------------------------------------------------------


def typical_pair(scored: Sequence[Scored], style: str = "disregard") -> tuple[Scored, Scored]:
    """A normal and an attacked prompt of one sentence, whose scores differ by the median difference."""
    named = {s.record["id"]: s for s in scored}
    pairs = [
        (named[s.record["id"].replace(style, "normal0")], s) for s in scored if s.record["style"] == style
    ]
    if not pairs:
        raise HookError(f"no held-out prompt of style {style!r}")
    ordered = sorted(pairs, key=lambda pair: pair[0].score - pair[1].score)
    return ordered[len(ordered) // 2]


def draw(
    out: Path, llm: Any, scored: Sequence[Scored], heads: Sequence[tuple[int, int]], cost: Cost
) -> list[Path]:
    """``demo.html`` and ``demo.png``, and the results behind the heat map for ``vllm-hook show``."""
    pair = typical_pair(scored)
    outputs = _runner(llm, [messages_of(s.record) for s in pair])({"use": [GUARD, VIEW]})
    tokenizer = llm.get_tokenizer()
    items = [
        Saved(
            item.record["id"],
            output.hook,
            token_labels(tokenizer, output.prompt_token_ids),
            item.record["style"],
            f"{item.record['instruction']} | {DATA_MARK}{item.record['data']}",
        )
        for item, output in zip(pair, outputs, strict=True)
    ]
    rows = [row for item in items if (row := saved.attention_row(item)) is not None]
    titles = [
        f"{'Normal' if is_normal(s.record) else 'Attacked'} prompt: focus score {s.score:.2f}, "
        f"{'flagged as an injection' if s.flagged else 'passed'}"
        for s in pair
    ]
    figures = {
        "Where the heads of the guard look, from the last token of the prompt": attention_figure(
            [row.words for row in rows],
            [row.weights for row in rows],
            heads,
            titles,
            [row.spans for row in rows],
        ),
        f"Scores of the {len(scored)} held-out prompts": score_figure(
            {style: [s.score for s in group] for style, group in by_style(scored).items()},
            float(items[0].result.scores[SCORE].details["threshold"]),
            title=f"Focus score of {len(scored)} held-out prompts",
        ),
    }
    title = "SmolLM2-135M tells prompt injections from its own attention"
    return [
        saved.write(out / "demo.png", figures),
        saved.write(out / "demo.html", figures, _page_tables(scored, cost), title),
        saved.save(out / "results", items),
    ]


def _page_tables(scored: Sequence[Scored], cost: Cost) -> list[PageTable]:
    costs = [
        ("this engine, no program", f"{statistics.median(cost.plain):.2f}"),
        (f"the same, with scores (ratio {cost.ratio:.3f})", f"{statistics.median(cost.guarded):.2f}"),
    ]
    prompts = [
        (
            item.record["style"].replace("_", " "),
            item.record["instruction"],
            item.record["data"],
            f"{item.score:.3f}",
            "INJECTION" if item.flagged else "ok",
        )
        for item in scored
    ]
    return [
        (f"What it cost: {cost.prompts} prompts", ("run", "seconds"), costs),
        ("All held-out prompts", ("style", "instruction", "data", "score", "verdict"), prompts),
    ]
