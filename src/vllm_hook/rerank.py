"""Documents ranked for a query by the attention that the query's tokens pay to them.

In-context reranking with chosen heads (CoRe, arXiv 2510.02219; all heads: ICR, arXiv 2410.02642). One
prompt holds the documents and then the query; a second one with the query "N/A" calibrates, and takes all
but its last tokens from the prefix cache. No token is generated for the score: the engine may hold only the
layers up to that of the last chosen head.

    from vllm_hook.rerank import engine, rerank

    llm = engine("model", heads=[(8, 3), (12, 0)])
    hits = rerank(llm, "who painted it?", documents, heads=[(8, 3), (12, 0)], top_k=3)
    best = [(hit.score, hit.text) for hit in hits]
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .analyzers.core_reranker import document_scores, token_attention
from .describe import config_facts
from .errors import CapacityError, HookError, SiteError, UnsupportedError
from .program.locate import is_program_name, shipped
from .rerank_prompt import NOTHING, Prompt, make_prompt
from .sites import ModelFacts
from .suggest import did_you_mean

if TYPE_CHECKING:
    from .llm import HookLLM

Head = tuple[int, int]
#: (layer, head) pairs, or None for all heads.
Heads = Sequence[Head] | None
#: Tokens kept free for what tokenizing in one piece adds to tokenizing piece by piece.
SLACK, SLACK_PER_DOCUMENT = 16, 2
#: Arguments of ``vllm.LLM`` with which a model may have other sizes than its configuration says.
OTHER_SIZES = {"hf_config_path", "hf_overrides", "revision"}


@dataclass(frozen=True)
class Ranked:
    """``index``: the document's place in the list that was given; ``window``: which prompt held it."""

    index: int
    score: float
    text: str
    window: int = 0


def rerank(
    llm: HookLLM,
    query: str,
    documents: Sequence[str],
    heads: Any = None,
    top_k: int | None = None,
    *,
    calibrate: bool = True,
) -> list[Ranked]:
    """Documents by falling score; the best ``top_k`` of them.

    ``heads``: (layer, head) pairs, a program file that observes the attention of some, or None (or "all")
    for all heads. The engine must have ``attention`` armed for their layers (:func:`engine` does).

    Documents that do not fit one prompt are spread evenly over several windows. Scores of windows can be
    compared, since calibration takes from each document what it attracts without a query, but not as well
    as those of one window: a document competes for attention with its window only.

    Raises CapacityError: a document is too long for a prompt of its own. SpanError: a document is empty,
    or the chat template rewrites the prompt. SiteError: the heads' layers are not armed.
    """
    return rerank_many(llm, [(query, documents)], heads, top_k, calibrate=calibrate)[0]


def rerank_many(
    llm: HookLLM,
    jobs: Sequence[tuple[str, Sequence[str]]],
    heads: Any = None,
    top_k: int | None = None,
    *,
    calibrate: bool = True,
) -> list[list[Ranked]]:
    """:func:`rerank` for several (query, documents) in one batch."""
    if not hasattr(llm, "frontend"):
        raise UnsupportedError("rerank needs a HookLLM")
    name = _loaded(llm, read_heads(heads))
    queries = [NOTHING] if calibrate else []
    plans: list[tuple[int, int, list[int]]] = []  # job, window, indexes of its documents
    prompts: list[Prompt] = []
    for job, (query, documents) in enumerate(jobs):
        if not query.strip():
            raise HookError("the query is empty")
        for window, indexes in enumerate(_windows(llm, name, query, documents)):
            plans.append((job, window, indexes))
            texts = [documents[i] for i in indexes]
            prompts += [make_prompt(llm.get_tokenizer(), q, texts) for q in (query, *queries)]
    attention = _run(llm, name, prompts)
    each = 1 + len(queries)
    ranked: list[list[Ranked]] = [[] for _ in jobs]
    for at, (job, window, indexes) in enumerate(plans):
        tokens, *nothing = attention[at * each : (at + 1) * each]
        scores = document_scores(tokens, nothing[0] if nothing else None, prompts[at * each].documents)
        given = jobs[job][1]
        ranked[job] += [Ranked(i, s, given[i], window) for i, s in zip(indexes, scores.tolist(), strict=True)]
    return [sorted(hits, key=lambda hit: (-hit.score, hit.index))[:top_k] for hits in ranked]


# -- engine ---------------------------------------------------------------------------------------


def engine(model: str, heads: Any = None, *, whole: bool = False, **vllm_kwargs: Any) -> HookLLM:
    """A ``HookLLM`` made for reranking with these heads.

    It holds only the layers up to that of the last head and cannot generate, unless ``whole``. Pages are
    small, so that the calibration takes as much as it can from the prefix cache. ``vllm_kwargs`` go to
    ``vllm.LLM``. SiteError: the model has no such head; nothing was started.
    """
    from .llm import HookLLM

    pairs = read_heads(heads)
    if pairs and not OTHER_SIZES & vllm_kwargs.keys():
        _check_heads_of(str(model), pairs)
    if pairs and not whole:
        vllm_kwargs.setdefault("layers_up_to", 1 + max(layer for layer, _ in pairs))
    vllm_kwargs.setdefault("block_size", 32)
    vllm_kwargs.setdefault("enable_prefix_caching", True)
    return HookLLM(model, programs=[program(pairs)], **vllm_kwargs)


def program(heads: Heads) -> dict[str, Any]:
    """The program that a reranking engine runs: the heads' attention from the query's rows. The span is
    given by each request."""
    where = {"layers": "all"} if heads is None else {"heads": [list(h) for h in heads]}
    digest = hashlib.sha256(json.dumps(where).encode()).hexdigest()[:12]
    return {
        "schema": 1,
        "name": f"rerank-{digest}",
        "spans": {"query": {"tokens": [0, 1]}},
        "observe": {"rows": {"site": "attention", "rows": {"span": "query"}, **where}},
    }


def read_heads(source: Any) -> list[Head] | None:
    """Heads of a list of pairs, ``"all"`` or None, text such as ``"8-3,12-0"``, or a program file that
    observes attention (the first such observation counts)."""
    if source is None or source == "all":
        return None
    if isinstance(source, (str, Path)):
        pairs_only = re.fullmatch(r"\s*\d+-\d+\s*(,\s*\d+-\d+\s*)*", str(source))
        if not pairs_only and is_program_name(source):
            return _heads_of_program(source)
        try:
            source = [tuple(map(int, pair.split("-"))) for pair in str(source).split(",")]
        except ValueError:
            raise HookError(
                f"heads: {str(source)!r} is neither layer-head pairs (8-3,12-0), a program nor 'all'"
                f"{did_you_mean(str(source), shipped())}"
            ) from None
    pairs = [tuple(pair) for pair in source]
    if not pairs or any(len(p) != 2 or not all(isinstance(n, int) and n >= 0 for n in p) for p in pairs):
        raise HookError(
            f"heads: {source!r} is not a list of (layer, head) pairs, on the command line 8-3,12-0"
        )
    return [(layer, head) for layer, head in pairs]


def check_heads(heads: Heads, facts: ModelFacts) -> None:
    """SiteError: the model has no such head."""
    missing = [f"{i}-{j}" for i, j in heads or () if i >= facts.layers or j >= facts.heads]
    if missing:
        raise SiteError(
            f"heads: the model has no head {', '.join(missing)}: its layers are 0 to {facts.layers - 1}, "
            f"each with heads 0 to {facts.heads - 1}"
        )


def _check_heads_of(model: str, heads: Heads) -> None:
    """Before an engine starts, if the model's configuration can be read without one."""
    try:
        facts = config_facts(model)
    except HookError:
        return  # vLLM may know more kinds of models, and says what is wrong with this one
    check_heads(heads, facts)


def _heads_of_program(source: str | Path) -> list[Head]:
    from .program.load import load

    for observe in load(source).program.observe.values():
        if observe.site in ("attention", "attention_mass") and observe.heads:
            pairs = [(int(p[0]), int(p[1])) for p in observe.heads if isinstance(p, tuple)]
            if not pairs or any(layer < 0 or head < 0 for layer, head in pairs):
                raise HookError(f"{source}: heads have to be listed as [layer, head], counted from 0")
            return pairs
    raise HookError(f"{source}: observes no attention of chosen heads")


def _loaded(llm: HookLLM, heads: Heads) -> str:
    """The name of the program, loaded into the engine if it is not yet."""
    wanted = program(heads)
    name = str(wanted["name"])
    if name not in llm.frontend.programs:
        try:
            llm.load_program(wanted)
        except SiteError as error:
            raise SiteError(f"{error}; vllm_hook.rerank.engine(...) starts an engine that fits") from None
    return name


# -- windows --------------------------------------------------------------------------------------


def spread(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indexes in order, in as few windows as hold at most ``most`` tokens each, as even as they can be.

    CapacityError names a document that is longer than ``most``.
    """
    for i, length in enumerate(lengths):
        if length > most:
            raise CapacityError(
                f"document {i} takes {length} tokens, and a prompt has room for {most}; shorten it, or start "
                "the engine with a larger max_model_len"
            )
    if not lengths:
        return []
    low, high = max(lengths), most
    count = len(_fill(lengths, most))
    while low < high:  # the smallest room that needs no more windows
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(lengths, middle)) == count else (middle + 1, high)
    return _fill(lengths, low)


def _fill(lengths: Sequence[int], most: int) -> list[list[int]]:
    windows: list[list[int]] = []
    used = most
    for i, length in enumerate(lengths):
        if used + length > most:
            windows.append([])
            used = 0
        windows[-1].append(i)
        used += length
    return windows


def _windows(llm: HookLLM, name: str, query: str, documents: Sequence[str]) -> list[list[int]]:
    """Indexes of the documents of each prompt: by what the model's context and a result can hold."""
    from .engine.frontend import ATTENTION_BYTES

    tokenizer = llm.get_tokenizer()
    room = int(llm.llm_engine.vllm_config.model_config.max_model_len) - 1
    heads = len(llm.frontend.programs[name].checked.observations[0].heads)
    bare = [make_prompt(tokenizer, q, []) for q in (query, NOTHING)]
    rows = max(p.query[1] - p.query[0] for p in bare)
    room = min(room, ATTENTION_BYTES // (4 * heads * rows))
    room -= max(len(p.ids) for p in bare) + SLACK
    pieces = [f"[document {i}] {text.strip()}\n\n" for i, text in enumerate(documents, 1)]
    counts = tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
    return spread([len(ids) + SLACK_PER_DOCUMENT for ids in counts], room)


# -- running --------------------------------------------------------------------------------------


def _run(llm: HookLLM, name: str, prompts: Iterable[Prompt]) -> list[torch.Tensor]:
    """Per prompt the attention of its query on every token, [K] float64 (see ``token_attention``).

    A query and its calibration are neighbours in the batch: the second finds the first one's pages even
    while both are being run.
    """
    from .llm import greedy

    prompts = list(prompts)
    if not prompts:
        return []
    outputs = llm.generate(
        [{"prompt_token_ids": p.ids} for p in prompts],
        greedy(1, detokenize=False),
        hook=[{"use": [name], "spans": {"query": list(p.query)}} for p in prompts],
        use_tqdm=False,
    )
    return [token_attention(output.hook.observed[f"{name}/rows"].values) for output in outputs]


class _Callable(ModuleType):
    """``vllm_hook.rerank`` is this module as soon as it is imported, and the function by contract."""

    __call__ = staticmethod(rerank)


sys.modules[__name__].__class__ = _Callable
