"""``vllm-hook demo rerank``: SmolLM2 on vLLM ranks documents by where a query's attention goes.

Graded queries from a JSONL file, ``{"query", "documents": [{"text", "grade"}]}``: nDCG@10 of chosen heads
(CoRe, arXiv 2510.02219), of all heads (ICR, arXiv 2410.02642), of BM25 and of the number of words shared with
the query; and what a query costs with the whole model, with the layers up to the last chosen head only, and
in Hugging Face.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import environment, saved
from ..build.artifact import read_provenance
from ..build.heads import hide_broken_torchvision, packaged
from ..build.records import read_queries, split
from ..build.rerank_heads import ndcg as ndcg_of_scores
from ..errors import HookError
from ..rerank import Head, Ranked, engine, read_heads, rerank, rerank_many
from ..show import interval_figure
from .baselines import shared_words
from .model import smollm2
from .rerank_hf import HuggingFace

CUT = 10
#: Resamples of the queries for an interval.
RESAMPLES = 2000
#: Queries that Hugging Face runs, for scale.
HF_QUERIES = 5
#: Largest difference of a score, relative to a query's largest, that counts as the same.
SAME = 1e-3
CHOSEN, ALL, BM25, WORDS = "chosen heads", "all heads", "BM25", "words shared"
WHOLE, SHORT = "vLLM, all layers", "vLLM, layers_up_to"


@dataclass(frozen=True)
class Record:
    """A query and its documents with grades (0: not relevant)."""

    query: str
    texts: list[str]
    grades: list[float]


@dataclass
class Outcome:
    """Of each query: nDCG by method, seconds by way of running it, scores of the chosen heads in the order of
    its documents. ``unseen``: indexes of the queries that had no part in choosing the heads, where only some
    had. And how far scores of the other ways are from these."""

    ndcg: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    scores: list[list[float]] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    short_difference: float = 0.0
    hf_difference: float | None = None


def read_records(path: Path | None, seed: int = 0) -> list[Record]:
    """Records of a JSONL file, by default the demo's; documents shuffled, since files may list the good ones
    first. HookError names the line that is wrong."""
    records = []
    for query in read_queries(path or packaged("rerank.jsonl"))[0]:
        documents = list(zip(query.documents, map(float, query.grades), strict=True))
        random.Random(f"{seed}/{query.line}").shuffle(documents)
        records.append(Record(query.query, [text for text, _ in documents], [g for _, g in documents]))
    return records


def unseen(heads: Any, data: Path | None) -> list[int]:
    """Indexes of the queries of ``data`` that ``vllm-hook build rerank-heads`` held out when it found these
    heads in the same file; none if it did not, or if the program does not say."""
    file = data or packaged("rerank.jsonl")
    if not isinstance(heads, (str, Path)) or not Path(heads).is_file():
        return []
    try:
        made = read_provenance(Path(heads))
        queries, source = read_queries(file)
    except HookError:
        return []
    share = made.get("options", {}).get("share")
    if share is None or made["data"]["found_on"]["sha256"] != source.digest:
        return []
    _, held = split(queries, share, made["options"]["seed"])
    return [queries.index(query) for query in held]


# -- figures of merit -----------------------------------------------------------------------------


def ndcg(scores: Sequence[float], grades: Sequence[float], cut: int = CUT) -> float:
    """nDCG at ``cut`` of documents sorted by these scores; equal ones share their gain."""
    return float(ndcg_of_scores(torch.tensor(scores, dtype=torch.float64), grades, cut))


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % of the means of resampled queries (percentile bootstrap)."""
    chance = random.Random(seed)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def bm25_scores(query: str, texts: Sequence[str]) -> list[float]:
    """Okapi BM25 over words in lower case, the documents of the query being the collection."""
    try:
        from rank_bm25 import BM25Okapi
    except ImportError as error:
        raise HookError(f"the comparison needs `pip install vllm-hook[demo]`: {error}") from None
    words = [re.findall(r"\w+", text.lower()) for text in (query, *texts)]
    return [float(score) for score in BM25Okapi(words[1:]).get_scores(words[0])]


def word_scores(query: str, texts: Sequence[str]) -> list[float]:
    """The number of different words that a document shares with the query."""
    return [float(shared_words(query, text)) for text in texts]


# -- the demo -------------------------------------------------------------------------------------


def shipped_heads() -> Path:
    """The program with the heads of SmolLM2, where one ships."""
    return Path(str(resources.files("vllm_hook"))) / "programs" / "smollm2-rerank.yaml"


def run_demo(
    out: Path,
    data: Path | None = None,
    heads: Any = None,
    hugging_face: bool = True,
    console: Console | None = None,
) -> bool:
    """Run the demo, print tables, write picture and JSON to ``out``. ``heads``: a program file or pairs.

    Returns whether the shortened model and Hugging Face (where it ran) gave the same scores.
    """
    console = console or Console()
    start = time.perf_counter()
    records = read_records(data)
    chosen = _chosen(heads)
    environment.for_engine()
    model = smollm2()
    hide_broken_torchvision()
    outcome = measure(model, records, chosen, console)
    outcome.unseen = unseen(shipped_heads() if heads is None else heads, data)
    if hugging_face:
        with console.status(f"Hugging Face on {min(HF_QUERIES, len(records))} of the queries, for scale"):
            _against_hugging_face(model, records[:HF_QUERIES], chosen, outcome)
    console.print(quality_table(records, outcome, chosen))
    console.print(cost_table(outcome))
    for path in write(out, records, outcome, chosen):
        console.print(f"written: [bold]{escape(str(path))}[/bold]", soft_wrap=True)
    console.print(f"The demo took {time.perf_counter() - start:.0f} s.")
    good = max(outcome.short_difference, outcome.hf_difference or 0.0) <= SAME
    if not good:
        console.print(f"[red]Scores differ by more than {SAME:g} of a query's largest.[/red]")
    return good


def _chosen(heads: Any) -> list[Head]:
    if heads is None and not shipped_heads().is_file():
        raise HookError(
            "no heads ship for SmolLM2: make a program with `vllm-hook build rerank-heads smollm2`, and give "
            "it as --heads"
        )
    found = read_heads(shipped_heads() if heads is None else heads)
    if found is None:
        raise HookError("--heads: name some; all heads are measured beside them")
    return found


def measure(model: Path, records: Sequence[Record], heads: Sequence[Head], console: Console) -> Outcome:
    """Rank every query by every method, and time the chosen heads one query at a time."""
    outcome = Outcome()
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    everything = {"attention": {"layers": "all", "rows": "all"}}
    with console.status("starting SmolLM2-135M on vLLM (the first start compiles it: about a minute)"):
        llm = engine(str(model), heads, whole=True, arm=everything, **settings)
    with console.status(f"ranking the documents of {len(records)} queries"):
        full = _timed(llm, records, heads, outcome.seconds.setdefault(WHOLE, []))
        by_all = rerank_many(llm, [(r.query, r.texts) for r in records])
    with console.status("the same with a shortened model"):
        llm = engine(str(model), heads, **settings)
        short = _timed(llm, records, heads, outcome.seconds.setdefault(SHORT, []))
    outcome.scores = [scores_of(hits) for hits in full]
    outcome.short_difference = max(
        difference(scores_of(a), b) for a, b in zip(short, outcome.scores, strict=True)
    )
    scores = {
        CHOSEN: outcome.scores,
        ALL: [scores_of(hits) for hits in by_all],
        BM25: [bm25_scores(r.query, r.texts) for r in records],
        WORDS: [word_scores(r.query, r.texts) for r in records],
    }
    for name, each in scores.items():
        outcome.ndcg[name] = [ndcg(found, r.grades) for found, r in zip(each, records, strict=True)]
    return outcome


def _timed(
    llm: Any, records: Sequence[Record], heads: Sequence[Head], seconds: list[float]
) -> list[list[Ranked]]:
    """Every query by itself, nothing cached from the one before; the first once more, which warms up."""
    found = []
    for record in (records[0], *records):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        found.append(rerank(llm, record.query, record.texts, heads))
        seconds.append(time.perf_counter() - start)
    del seconds[0]
    return found[1:]


def scores_of(hits: Sequence[Ranked]) -> list[float]:
    """In the order in which the documents were given."""
    return [hit.score for hit in sorted(hits, key=lambda hit: hit.index)]


def difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference, relative to the largest score of ``b``."""
    size = max(abs(x) for x in b) or 1.0
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) / size


def _against_hugging_face(
    model: Path, records: Sequence[Record], heads: Sequence[Head], outcome: Outcome
) -> None:
    """The same formula on the same prompts, both ways that people run it."""
    reference = HuggingFace(model)
    for name, score in (
        ("Hugging Face, output_attentions, two passes", reference.two_passes),
        ("Hugging Face, documents' KV cache shared", reference.shared_prefix),
    ):
        seconds = outcome.seconds.setdefault(name, [])
        score(records[0].query, records[0].texts, heads)
        for record, ours in zip(records, outcome.scores, strict=False):
            start = time.perf_counter()
            theirs = score(record.query, record.texts, heads)
            seconds.append(time.perf_counter() - start)
            far = difference(ours, theirs)
            outcome.hf_difference = max(outcome.hf_difference or 0.0, far)


# -- tables and picture ---------------------------------------------------------------------------


def _quality(outcome: Outcome, only: Sequence[int] = ()) -> list[tuple[str, float, float, float]]:
    """(method, mean, interval), over all queries or ``only`` some."""
    kept = {name: [v[i] for i in only] or v for name, v in outcome.ndcg.items()}
    return [(name, statistics.fmean(v), *interval(v)) for name, v in kept.items()]


def quality_table(records: Sequence[Record], outcome: Outcome, heads: Sequence[Head]) -> Table:
    """nDCG@10 by method, best possible 1."""
    documents = sorted({len(r.texts) for r in records})
    table = Table(
        title=f"{len(records)} queries of {' or '.join(map(str, documents[:3]))} documents each",
        title_justify="left",
        caption=f"chosen heads: {' '.join(f'{layer}-{head}' for layer, head in heads)}",
        caption_justify="left",
    )
    table.add_column("method")
    table.add_column(f"nDCG@{CUT}", justify="right")
    table.add_column("95 % of resampled queries", justify="right")
    held = _quality(outcome, outcome.unseen) if outcome.unseen else []
    if held:
        table.add_column(f"the {len(outcome.unseen)} that chose no heads", justify="right")
        table.add_column("95 %", justify="right")
    for i, (name, *figures) in enumerate(_quality(outcome)):
        table.add_row(name, *_cells(figures), *(_cells(held[i][1:]) if held else ()))
    return table


def _cells(figures: Sequence[float]) -> tuple[str, str]:
    mean, low, high = figures
    return f"{mean:.3f}", f"{low:.3f} to {high:.3f}"


def cost_table(outcome: Outcome) -> Table:
    """Median seconds a query, one at a time, with nothing cached from other queries."""
    table = Table(title="What a query costs: chosen heads, calibrated by N/A", title_justify="left")
    table.add_column("run by")
    table.add_column("queries", justify="right")
    table.add_column("ms a query", justify="right")
    table.add_column("times vLLM", justify="right")
    base = statistics.median(outcome.seconds[WHOLE])
    for name, seconds in outcome.seconds.items():
        median = statistics.median(seconds)
        table.add_row(name, str(len(seconds)), f"{1000 * median:.0f}", f"{median / base:.2f}")
    notes = [f"scores with {SHORT.partition(', ')[2]}: largest difference {outcome.short_difference:.1e}"]
    if outcome.hf_difference is not None:
        notes.append(f"to Hugging Face {outcome.hf_difference:.1e} (relative to a query's largest)")
    table.caption, table.caption_justify = "; ".join(notes), "left"
    return table


def write(out: Path, records: Sequence[Record], outcome: Outcome, heads: Sequence[Head]) -> list[Path]:
    """``rerank.png``, and ``rerank.json`` with the figures of every query."""
    figure = interval_figure(
        {name: outcome.ndcg[name] for name in outcome.ndcg},
        {name: (low, high) for name, _, low, high in _quality(outcome)},
        f"SmolLM2-135M ranks documents by its own attention: {len(records)} queries",
        f"nDCG@{CUT} (a point is a query, the bar 95 % of resampled means)",
    )
    picture = saved.write(out / "rerank.png", {"nDCG by method": figure})
    report = {
        "heads": [list(h) for h in heads],
        "ndcg": {
            name: {"mean": mean, "interval": [low, high]} for name, mean, low, high in _quality(outcome)
        },
        "unseen": {
            "queries": outcome.unseen,
            "ndcg": {name: [mean, low, high] for name, mean, low, high in _quality(outcome, outcome.unseen)}
            if outcome.unseen
            else {},
        },
        "seconds": {name: statistics.median(v) for name, v in outcome.seconds.items()},
        "short_difference": outcome.short_difference,
        "hf_difference": outcome.hf_difference,
        "queries": [
            {
                "query": record.query,
                "grades": record.grades,
                "scores": outcome.scores[i],
                "ndcg": {name: values[i] for name, values in outcome.ndcg.items()},
            }
            for i, record in enumerate(records)
        ],
    }
    file = out / "rerank.json"
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [picture, file]
