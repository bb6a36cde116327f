"""Read configurations of the earlier vLLM-Hook and write them as program dicts of schema 1.

Their layers are 0-based decoder blocks, as ours; hidden states were read after a block; steering
was added to the output of a block. What has no counterpart is returned as notes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ProgramError
from .load import MAX_BYTES, load

_IGNORED = ("temperature", "max_output_tokens", "max_tokens")


def import_legacy(path: str | Path, folder: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """(program dict that :func:`~vllm_hook.program.load.load` accepts, notes on what was not carried).

    ``folder``: where the program file will lie, since it names files relative to itself; None is the
    working directory. Raises :class:`ProgramError` if the file is not such a configuration.
    """
    path = Path(path)
    data = _read(path)
    notes: list[str] = []
    program: dict[str, Any] = {"schema": 1, "name": _name(data, path)}
    model_id = _section(data, "model_info", path).get("model_id")
    if isinstance(model_id, str) and model_id:
        program["model"] = {"id": model_id}
    _attention(data, program, notes, path)
    _hidden_states(data, program, notes, path)
    _steering(data, program, notes, path, folder or Path())
    if "observe" not in program and "intervene" not in program:
        if "schema" in data:
            raise ProgramError(str(path), "is a program already: there is nothing to import")
        raise ProgramError(
            str(path), "has none of important_heads, hookq, hidden_states and steering, so nothing to import"
        )
    known = {"model_info", "params", "important_heads", "hookq", "hidden_states", "steering"}
    notes += [f"{key}: not carried" for key in data if key not in known]
    params = _section(data, "params", path)
    notes += [f"params.{key}: not carried; set it in the request" for key in _IGNORED if key in params]
    try:
        load(program)
    except ProgramError as error:
        raise ProgramError(str(path), error.problems) from None
    return program, notes


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProgramError(str(path), f"cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ProgramError(str(path), f"is larger than {MAX_BYTES // 1024} KiB")
    if not content.strip():
        raise ProgramError(str(path), "is empty")
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ProgramError(str(path), f"is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        why = f"is not valid JSON, as configurations of the earlier vLLM-Hook are: {error}"
        raise ProgramError(str(path), why) from None
    if not isinstance(data, dict):
        raise ProgramError(str(path), "is not a configuration of vLLM-Hook: a JSON object is needed")
    return data


def _name(data: Mapping[str, Any], path: Path) -> str:
    """A valid program name from the configured name, else from the file name."""
    info = data.get("model_info")
    named = info.get("name") if isinstance(info, dict) else None
    slug = re.sub(r"[^a-z0-9._-]+", "-", str(named or path.stem).lower()).strip("-._")[:64]
    return slug or "imported"


def _section(data: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProgramError(str(path), f"{key}: an object is needed")
    return value


def _mode(section: Mapping[str, Any], key: str, field: str, path: Path) -> str:
    mode = section.get(key, "last_token")
    aliases = {
        "all": "all_tokens",
        "last": "last_token",
        "all_tokens": "all_tokens",
        "last_token": "last_token",
    }
    if not isinstance(mode, str) or mode not in aliases:
        raise ProgramError(str(path), f"{field}.{key}: {mode!r} is neither all_tokens nor last_token")
    return aliases[mode]


def _attention(data: Mapping[str, Any], program: dict[str, Any], notes: list[str], path: Path) -> None:
    """Heads whose attention was rebuilt from copies of queries and keys."""
    params, hookq = _section(data, "params", path), _section(data, "hookq", path)
    heads = params.get("important_heads", data.get("important_heads"))
    layers = hookq.get("layers")
    if heads is None and "hookq" not in data:
        return
    where = {"heads": heads} if heads is not None else {"layers": "all" if layers is None else layers}
    if heads is not None and layers is not None:
        notes.append("hookq.layers: not carried; the layers of important_heads are read")
    if _mode(hookq, "hookq_mode", "hookq", path) == "last_token":
        program["spans"] = {"instruction": {"message": "system"}, "data": {"message": "user"}}
        observe = {"site": "attention_mass", **where, "rows": "last_prompt", "keys": ["instruction", "data"]}
        notes.append(
            "spans: the earlier format had token ranges in each call; instruction is set to the system "
            "message and data to the user message here"
        )
        program["analyze"] = {
            "injection": {
                "analyzer": "attention_tracker",
                "observe": "focus",
                "options": {"instruction": "instruction", "data": "data"},
            }
        }
    else:
        observe = {"site": "attention", **where, "rows": "prompt"}
        notes.append(
            "hookq_mode all_tokens: all attention of the prompt is read, which is large; name the spans and "
            "use attention_mass, or use the reranker"
        )
    program.setdefault("observe", {})["focus"] = observe


def _hidden_states(data: Mapping[str, Any], program: dict[str, Any], notes: list[str], path: Path) -> None:
    section = data.get("hidden_states")
    if section is None:
        return
    section = _section(data, "hidden_states", path)
    everything = _mode(section, "mode", "hidden_states", path) == "all_tokens"
    program.setdefault("observe", {})["states"] = {
        "site": "resid_post",
        "layers": section.get("layers") or "all",
        "positions": "all" if everything else ["last_prompt", "generated"],
    }
    notes += [f"hidden_states.{key}: not carried" for key in section if key not in ("layers", "mode")]


_STEERING_KEYS = {
    "method", "coefficient", "optimal_layer", "layers", "vector_path", "vector", "path",
    "apply_at_all_positions", "phase", "positions",
}  # fmt: skip


def _steering(
    data: Mapping[str, Any], program: dict[str, Any], notes: list[str], path: Path, folder: Path
) -> None:
    """A vector file of two entries: ``dir``, and for adjust_rs ``avg_proj``, the projection it sets."""
    if data.get("steering") is None:
        return
    section = _section(data, "steering", path)
    written = next((section[k] for k in ("vector_path", "vector", "path") if section.get(k)), None)
    if not isinstance(written, str):
        raise ProgramError(str(path), "steering.vector_path: the file of the vector is needed")
    layers = section.get("layers", section.get("optimal_layer", 15))
    one = isinstance(layers, int) and not isinstance(layers, bool)
    edit: dict[str, Any] = {"site": "resid_post", "layers": [layers] if one else layers}
    vector = _vector_file(written, path, folder, notes)
    method = section.get("method", "adjust_rs")
    if method == "adjust_rs":
        edit |= {"method": "clamp", "vector": f"{vector}#dir", "target": f"{vector}#avg_proj"}
        if "coefficient" in section:
            notes.append("steering.coefficient: adjust_rs did not use it")
        notes.append(
            "steering: adjust_rs was applied to one of the two halves that a block returns; here it is "
            "applied to their sum, the residual stream, and the direction is normalised"
        )
    elif method in ("add_vector", "add"):
        edit |= {"method": "add", "vector": f"{vector}#dir", "strength": section.get("coefficient", 0)}
        if not section.get("coefficient"):
            notes.append("steering.coefficient: is 0 or missing, so nothing is added; set steering.strength")
    else:
        raise ProgramError(str(path), f"steering.method: {method!r} is neither adjust_rs nor add_vector")
    edit["positions"] = _steered(section, method, notes, path)
    notes += [f"steering.{key}: not carried" for key in section if key not in _STEERING_KEYS]
    program["intervene"] = {"steering": edit}


def _vector_file(written: str, path: Path, folder: Path, notes: list[str]) -> str:
    """The file relative to ``folder``. It was relative to the working directory; files that were moved
    together with their configuration lie beside it."""
    for place in (Path(), path.parent):
        if (place / written).is_file():
            if Path(written).is_absolute():
                return written
            return Path(os.path.relpath(place / written, folder)).as_posix()
    notes.append(
        f"steering: there is no {written} here or beside {path.name}; put it beside the program, or correct "
        "its path there"
    )
    return written


def _steered(section: Mapping[str, Any], method: str, notes: list[str], path: Path) -> Any:
    """Selectors for ``phase`` and ``positions``, or for the older ``apply_at_all_positions``."""
    if section.get("positions") is not None:
        last = _mode(section, "positions", "steering", path) == "last_token"
    else:
        last = section.get("apply_at_all_positions", True) is False
        if last and method == "adjust_rs":
            notes.append("steering.apply_at_all_positions: adjust_rs acted on every position in spite of it")
            last = False
    phase = section.get("phase", "both")
    if phase not in ("both", "prefill", "decode"):
        raise ProgramError(str(path), f"steering.phase: {phase!r} is none of both, prefill and decode")
    if phase == "decode":
        return "generated"
    if phase == "prefill":
        return "last_prompt" if last else "prompt"
    if last:
        notes.append("steering: last_token means the last prompt token and every generated one")
        return ["last_prompt", "generated"]
    return "all"
