"""Prompts through one engine with one program: what ``vllm-hook run`` and ``vllm-hook rerank`` do.

A prompt is ``{"prompt": text}`` or ``{"messages": [..]}``, with ``style`` where it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import environment, jsonl
from .describe import model_facts
from .errors import HookError, SiteError
from .program.load import load
from .program.schema import MessageSpan
from .rerank import Head, Ranked, check_heads, engine, read_heads, rerank
from .results import HookResult
from .saved import Saved

Prompt = dict[str, Any]


def gather(
    program: str | Path, texts: Sequence[str], system: str | None, chat: bool, records: Path | None
) -> list[Prompt]:
    """Prompts from the command line and from a JSONL file, in a form that the program's spans can use."""
    by_message = any(isinstance(span, MessageSpan) for span in load(program).program.spans.values())
    prompts = [_given(text, system, chat or system is not None or by_message) for text in texts]
    prompts += read_prompts(records) if records is not None else []
    if by_message and (bad := [i for i, prompt in enumerate(prompts, 1) if "prompt" in prompt]):
        raise HookError(
            f"{program}: has spans that name a message, but prompt {bad[0]} is not a conversation; "
            'write {"messages": [..]} or {"instruction", "data"}'
        )
    return prompts


def _given(text: str, system: str | None, chat: bool) -> Prompt:
    if not chat:
        return {"prompt": text}
    first = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*first, {"role": "user", "content": text}]}


def read_prompts(path: Path) -> list[Prompt]:
    """Records of a JSONL file. HookError names the line that is wrong."""
    found = jsonl.values(jsonl.decode(jsonl.read(path), path), path)
    prompts = [_read(value, f"{path}, line {number}") for number, value in found]
    if not prompts:
        raise HookError(f"{path}: holds no prompts")
    return prompts


def _read(record: Any, where: str) -> Prompt:
    if not isinstance(record, dict):
        raise HookError(f"{where}: is not an object")
    style = {"style": str(record["style"])} if "style" in record else {}
    if isinstance(record.get("messages"), list):
        return {"messages": record["messages"], **style}
    if isinstance(record.get("prompt"), str):
        return {"prompt": record["prompt"], **style}
    if isinstance(record.get("instruction"), str) and isinstance(record.get("data"), str):
        user = {"role": "user", "content": f"Data: {record['data']}"}
        return {"messages": [{"role": "system", "content": record["instruction"]}, user], **style}
    raise HookError(f"{where}: needs instruction and data, messages (a list), or prompt (text)")


def generate(
    model: str, program: str | Path, prompts: Sequence[Prompt], max_tokens: int, **engine: Any
) -> list[Saved]:
    """Greedy generation for every prompt with a program, by path or name; ``engine`` goes to ``vllm.LLM``."""
    environment.for_engine(model)
    console = Console(stderr=True)
    with _starting(model, console):
        from .llm import HookLLM, greedy

        llm = HookLLM(
            model, programs=[str(program)], disable_log_stats=True, use_tqdm_on_load=False, **engine
        )
    params = greedy(max_tokens)
    outputs: dict[int, Any] = {}
    with console.status(f"running {len(prompts)} prompts"):
        for kind, call in (("messages", llm.chat), ("prompt", llm.generate)):
            indexes = [i for i, prompt in enumerate(prompts) if kind in prompt]
            if indexes:
                made = call([prompts[i][kind] for i in indexes], params, use_tqdm=False)
                outputs.update(zip(indexes, made, strict=True))
    tokenizer = llm.get_tokenizer()
    return [_saved(i, prompt, outputs[i], tokenizer) for i, prompt in enumerate(prompts)]


@contextmanager
def _starting(model: str, console: Console) -> Iterator[None]:
    """Shows that vLLM starts. HookError: it refuses the model or a setting, and says why."""
    with console.status(f"starting vLLM with {escape(model)}"):
        try:
            yield
        except HookError:
            raise
        except ValidationError as error:
            reasons = "; ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in error.errors()))
            raise HookError(f"vLLM refuses {model}: {reasons}") from error
        except ValueError as error:
            raise HookError(f"vLLM refuses {model}: {error}") from error


def _saved(index: int, prompt: Prompt, output: Any, tokenizer: Any) -> Saved:
    text = (
        prompt["prompt"] if "prompt" in prompt else " | ".join(str(m["content"]) for m in prompt["messages"])
    )
    return Saved(
        name=f"{index:04d}",
        result=output.hook,
        tokens=token_labels(tokenizer, [*output.prompt_token_ids, *output.outputs[0].token_ids]),
        style=prompt.get("style", ""),
        prompt=text,
        text=output.outputs[0].text,
    )


def token_labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One readable label a token."""
    return [str(tokenizer.decode([i])) for i in ids]


def result_table(items: Sequence[Saved]) -> Table:
    """One row per prompt: its text, scores (or observations in short), and what was generated."""
    scores = list(dict.fromkeys(id for item in items for id in item.result.scores))
    styled = any(item.style for item in items)
    table = Table()
    for name in ["#", *(["style"] if styled else []), "prompt"]:
        table.add_column(name)
    for id in scores:
        table.add_column(escape(id.rpartition("/")[2]), justify="right")
    if not scores:
        table.add_column("observed")
    table.add_column("generated")
    for item in items:
        cells = [item.name, *([item.style] if styled else []), _shorten(item.prompt, 60)]
        found = [_score(item.result, id) for id in scores] or [escape(_observed(item.result))]
        table.add_row(*map(escape, cells), *found, escape(_shorten(item.text, 30)))
    return table


def _score(result: HookResult, id: str) -> str:
    if id not in result.scores:
        return "[red]error[/red]"
    score = result.scores[id]
    verdict = {None: "", True: " [red]FLAGGED[/red]", False: " [green]ok[/green]"}[score.flagged]
    return f"{score.value:.4g}{verdict}"


def _observed(result: HookResult) -> str:
    lines = []
    for id, seen in result.observed.items():
        values = seen.values
        numbers = ", ".join(f"{v:.3g}" for v in values.flatten().tolist()) if values.numel() <= 4 else ""
        shape = " x ".join(map(str, values.shape))
        lines.append(f"{id.rpartition('/')[2]} ({seen.site}): {numbers or shape}")
    return "\n".join(lines) or "nothing"


def _shorten(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


# -- rerank ---------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[str]:
    """Texts of a JSONL file whose lines are texts or objects with ``text``. HookError names the line."""
    texts = []
    for number, record in jsonl.values(jsonl.decode(jsonl.read(path), path), path):
        text = record.get("text") if isinstance(record, dict) else record
        if not isinstance(text, str) or not text.strip():
            raise HookError(f"{path}, line {number}: needs a text, or an object with a text")
        texts.append(text)
    if not texts:
        raise HookError(f"{path}: holds no documents")
    return texts


def rank(
    model: str,
    query: str,
    texts: Sequence[str],
    heads: str,
    top_k: int | None,
    whole: bool,
    **settings: Any,
) -> list[Ranked]:
    """Documents by falling score; ``settings`` go to ``vllm.LLM``."""
    pairs = heads_of(heads, model)  # says what is wrong before an engine starts
    environment.for_engine(model)
    console = Console(stderr=True)
    with _starting(model, console):
        llm = engine(model, pairs, whole=whole, disable_log_stats=True, use_tqdm_on_load=False, **settings)
    with console.status(f"ranking {len(texts)} documents"):
        return rerank(llm, query, texts, pairs, top_k)


def heads_of(source: str, model: str) -> list[Head] | None:
    """The heads that ``--heads`` names; SiteError if the model has no such head. None: all of them."""
    pairs = read_heads(source)
    facts = model_facts(model)
    try:
        check_heads(pairs, facts)
    except SiteError as error:
        raise SiteError(f"--{error}") from None
    return pairs


def ranking_table(query: str, hits: Sequence[Ranked]) -> Table:
    """Rank, number in the file (from 1), score and the beginning of each document."""
    windows = 1 + max((hit.window for hit in hits), default=0)
    table = Table(title=escape(query), title_justify="left")
    for name in ("rank", "line", "score"):
        table.add_column(name, justify="right")
    table.add_column("document")
    for place, hit in enumerate(hits, 1):
        table.add_row(str(place), str(hit.index + 1), f"{hit.score:.4f}", escape(_shorten(hit.text, 90)))
    if windows > 1:
        table.caption = f"in {windows} prompts, whose scores can be compared less well than those of one"
        table.caption_justify = "left"
    return table


def ranking_json(hits: Sequence[Ranked]) -> str:
    """A list of ``{"index", "score", "window", "text"}``, best first."""
    rows = [{"index": h.index, "score": h.score, "window": h.window, "text": h.text} for h in hits]
    return json.dumps(rows, indent=1, ensure_ascii=False)
