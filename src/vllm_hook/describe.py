"""A program and a model in words: what is armed, what it takes, what there is to observe.

Reads a model's configuration and nothing else; no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from . import environment
from .errors import HookError
from .program.checked import CheckedEdit, CheckedProgram, Observation
from .program.schema import GeneratedRange, Program
from .sites import SITES, Armed, ModelFacts

#: vLLM's defaults (max_num_seqs, max_num_batched_tokens) for offline use.
CPU_DEFAULTS, LARGE_GPU_DEFAULTS = (256, 4096), (1024, 16384)


def model_facts(model: str) -> ModelFacts:
    """Sizes of a Hugging Face id or folder, from its configuration alone, for a command: see
    :mod:`.environment`."""
    environment.for_engine(model)
    return config_facts(model)


def config_facts(model: str) -> ModelFacts:
    """:func:`model_facts`, with the environment as it is. HookError: there is no configuration, or only code
    of the model's own can read it."""
    _check_place(model)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return ModelFacts(
            id=model,
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            hidden=hidden,
        )
    except (OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HookError(f"model {model!r}: no configuration: {first}") from None
    except AttributeError as error:
        raise HookError(f"model {model!r}: not a decoder with attention: {error}") from None


def _check_place(model: str) -> None:
    """HookError for what can only be a folder and is none: a hub's client would call it no valid id."""
    path = Path(model).expanduser()
    if path.is_file():
        raise HookError(f"model {model!r}: is a file; give the folder that it lies in, or a Hugging Face id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise HookError(f"model {model!r}: no configuration: the folder holds no config.json")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise HookError(f"model {model!r}: no such folder")


# -- a model ------------------------------------------------------------------------------------


def model_line(facts: ModelFacts) -> str:
    return (
        f"{facts.id}: {facts.layers} layers, {facts.heads} heads of {facts.head_dim}, "
        f"{facts.kv_heads} KV heads, width {facts.hidden}"
    )


def site_table(facts: ModelFacts) -> Table:
    """Every site, where it exists and the shape of one row."""
    table = Table(caption_justify="left")
    for name in ("site", "layers", "one row", "what"):
        table.add_column(name)
    special = {
        "attention_mass": f"{facts.heads} x spans",
        "attention": f"{facts.heads} x (position + 1)",
    }
    for name, site in SITES.items():
        layers = f"0 to {facts.layers - 1}" if site.layered else "once"
        row = special.get(name) or " x ".join(map(str, facts.row_shape(name)))
        table.add_row(name, layers, row, site.what)
    table.caption = (
        "q, k, v, z and attention work in decoders with vLLM's standard attention; the stream sites in "
        "Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 and what shares their layers."
    )
    return table


# -- a program ----------------------------------------------------------------------------------


def outline(program: Program) -> str:
    """The ids of each section."""
    sections: dict[str, Iterable[str]] = {
        "spans": program.spans,
        "observe": program.observe,
        "intervene": program.intervene,
        "analyze": program.analyze,
    }
    return "; ".join(f"{what}: {', '.join(ids)}" for what, ids in sections.items() if ids)


def observation_table(checked: CheckedProgram, facts: ModelFacts, item: int) -> Table:
    """What each observation reads; ``item``: bytes of a value in the engine's dtype."""
    table = Table(title="What it observes", title_justify="left")
    for name in ("id", "site", "where", "rows", "bytes a row"):
        table.add_column(name, justify="right" if name == "bytes a row" else "left")
    for o in checked.observations:
        table.add_row(o.id, o.site, _where(o), _rows(o), _row_size(o, facts, item))
    return table


def edit_table(checked: CheckedProgram) -> Table:
    """What each intervention changes, where and how."""
    table = Table(title="What it changes", title_justify="left")
    for name in ("id", "site", "where", "rows", "how"):
        table.add_column(name)
    place = {"site", "layers", "heads", "positions", "rows"}
    for e in checked.edits:
        how = e.edit.model_dump(mode="json", exclude=place, exclude_none=True)
        told = ", ".join(f"{key}: {_plain(value)}" for key, value in how.items() if value is not False)
        table.add_row(e.id, e.site, _where(e), _rows(e), escape(told))
    return table


def _where(part: Observation | CheckedEdit) -> str:
    if part.heads:
        return f"heads {' '.join(f'{layer}-{head}' for layer, head in part.heads)}"
    kept = "" if part.keep_heads is None else f", heads {' '.join(map(str, part.keep_heads))}"
    return f"layers {' '.join(map(str, part.layers))}{kept}"


def _rows(part: Observation | CheckedEdit) -> str:
    return ", ".join(escape(_selector(s)) for s in part.selectors)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def _selector(selector: Any) -> str:
    return selector if isinstance(selector, str) else _plain(selector.model_dump(mode="json"))


def _row_size(o: Observation, facts: ModelFacts, item: int) -> str:
    """Bytes that one observed position adds to a request's result."""
    if o.site == "attention":
        return f"{4 * len(o.heads or ())} a key"
    if o.site == "attention_mass":
        return f"{4 * len(o.heads or ()) * len(o.keys):,}"
    if o.reduce is not None:
        return f"{4 * len(o.layers) * len(getattr(o.reduce, 'features', (0,))):,}"
    shape = facts.row_shape(o.site)
    if o.keep_heads is not None:
        shape = (len(o.keep_heads), *shape[1:])
    return f"{prod(shape) * len(o.layers) * (4 if o.dtype == 'float32' else item):,}"


def memory_text(needs: Armed, facts: ModelFacts, seqs: int, tokens: int, item: int) -> str:
    """What is armed and the device memory of its buffers, under these settings of vLLM."""
    from .runtime.buffers import site_bytes

    held = site_bytes(needs, facts, min(seqs, tokens), tokens, seqs, 64, item)
    text = (
        f"Arms: {needs.describe()}\n"
        f"Memory: {_size(held)} on the device for max_num_seqs={seqs}, max_num_batched_tokens={tokens}, "
        f"{item} bytes a value"
    )
    if (seqs, tokens) == CPU_DEFAULTS:
        many, wide = LARGE_GPU_DEFAULTS
        large = site_bytes(needs, facts, many, wide, many, 64, item)
        text += f" (vLLM's defaults on a CPU; {_size(large)} with those on a large GPU)"
    return text


def cost_hints(checked: CheckedProgram) -> list[str]:
    """What a program costs beyond memory, in words."""
    hints = []
    if any(not _decode_rows_only(o) for o in checked.observations):
        hints.append(
            "Prompt positions are read: a request that uses the program takes nothing from the prefix cache "
            "from the first such position on, and its result grows with the prompt."
        )
    if any(o.site == "attention" for o in checked.observations):
        hints.append("Whole attention rows are returned; attention_mass over spans is far smaller.")
    if any(not o.prompt_only for o in checked.observations):
        hints.append("Generated positions are read: every decode step copies rows to the host.")
    if checked.edits:
        edited = ", ".join(f"{e.id} ({e.site}, {len(e.layers)} layers)" for e in checked.edits)
        hints.append(f"Changes {edited}: some gathers a step and layer for the requests that use it.")
    if checked.observations and all(_decode_rows_only(o) and o.prompt_only for o in checked.observations):
        hints.append("Only the last prompt position is read: one row a request, nothing while decoding.")
    hints.append("Requests that do not name the program pay for nothing but idle sites.")
    return hints


def _decode_rows_only(o: Observation) -> bool:
    return all(s in ("last_prompt", "generated") or isinstance(s, GeneratedRange) for s in o.selectors)


def _size(n: float) -> str:
    if n < 1024:
        return f"{n:.0f} bytes"
    for unit in ("KiB", "MiB"):
        n /= 1024
        if n < 1024:
            return f"{n:.1f} {unit}"
    return f"{n / 1024:.1f} GiB"
