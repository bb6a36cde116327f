"""The files that a build leaves: a program with its provenance, and tensors beside it.

Provenance is a commented YAML mapping at the head of the program file and, without the date, the
metadata of the tensor file; :func:`read_provenance` reads both. All else of a build with the same
seed, data and model is the same byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import HookError
from ..program.load import load_text
from .model import Model
from .records import Source
from .work import write_atomic

MARK = "# provenance:"
WRITTEN_BY = "vllm-hook build"
WIDTH = 108


@dataclass(frozen=True)
class Output:
    """Where a build writes: ``file`` (the program) and, with tensors, the same name .safetensors."""

    file: Path
    force: bool = False

    def __post_init__(self) -> None:
        if self.file.suffix not in (".yaml", ".yml"):
            raise HookError(f"{self.file}: a program file ends in .yaml")
        folder = next(p for p in self.file.absolute().parents if p.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise HookError(f"{self.file}: cannot be written: {folder} is no folder that may be written to")
        for path in (self.file, self.tensors):
            if path.is_dir():
                raise HookError(f"{path}: is a folder")
            if path.exists() and not self.force:
                raise HookError(f"{path}: exists; give --force to overwrite it")

    @property
    def tensors(self) -> Path:
        return self.file.with_suffix(".safetensors")

    @property
    def name(self) -> str:
        """A program's name made from the file's."""
        kept = "".join(
            c if (c.isascii() and c.isalnum()) or c in "._-" else "-" for c in self.file.stem.lower()
        )
        return kept.strip("._-")[:64] or "program"


def provenance(
    command: str, model: Model, data: Mapping[str, Source], method: str, **more: Any
) -> dict[str, Any]:
    """What every program says of itself; ``data`` by what it was used for."""
    return {
        "written_by": f"{WRITTEN_BY} {command}",
        "model": {"id": model.name, "digest": model.digest},
        "data": {use: {"file": source.name, "sha256": source.digest} for use, source in data.items()},
        "method": method,
        **more,
    }


def publish(
    output: Output,
    title: str,
    provenance: Mapping[str, Any],
    program: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    today: date | None = None,
) -> Path:
    """Write the program (checked first), and before it its tensors; each appears whole or not at all.

    Without tensors, those of the program that is overwritten are removed; others of that name are left."""
    text = program_text(title, provenance, program, today or date.today())
    load_text(text, str(output.file), output.file.parent)
    stale = not tensors and of_one_build(output)
    if tensors:
        contiguous = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        # One key only: the order of several is not fixed.
        metadata = {"provenance": json.dumps(dict(provenance), sort_keys=True)}
        output.file.unlink(missing_ok=True)  # never an old program beside new tensors
        write_atomic(output.tensors, save(contiguous, metadata=metadata))
    try:
        write_atomic(output.file, text.encode("utf-8"))
    except BaseException:
        if tensors:
            output.tensors.unlink(missing_ok=True)  # nor tensors without their program
        raise
    if stale:
        output.tensors.unlink(missing_ok=True)
    return output.file


def of_one_build(output: Output) -> bool:
    """Whether the program and the tensors beside it were written by one build: both say the same of it."""
    try:
        program, tensors = read_provenance(output.file), read_provenance(output.tensors)
        program.pop("date", None)
        by_build = str(program.get("written_by")).startswith(WRITTEN_BY)
        return by_build and json.loads(json.dumps(program)) == tensors
    except (OSError, ValueError, TypeError, yaml.YAMLError, SafetensorError):
        return False  # one is missing, or not ours


def program_text(title: str, provenance: Mapping[str, Any], program: Mapping[str, Any], today: date) -> str:
    """The file: title and provenance as comments, then the program."""
    head = _yaml({**provenance, "date": today.isoformat()})
    lines = [*title.splitlines(), MARK.removeprefix("# "), *(f"  {line}" for line in head.splitlines())]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + _yaml(program)


def read_provenance(path: Path) -> dict[str, Any]:
    """The provenance of a program file, or of a tensor file. HookError if it has none."""
    if path.suffix == ".safetensors":
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("provenance")
        if text is None:
            raise HookError(f"{path}: has no provenance")
        return dict(json.loads(text))
    lines = path.read_text(encoding="utf-8").splitlines()
    if MARK not in lines:
        raise HookError(f"{path}: has no provenance")
    body = []
    for line in lines[lines.index(MARK) + 1 :]:
        if line != "#" and not line.startswith("#   "):
            break
        body.append(line[4:])  # a blank line is written "#"
    return dict(yaml.safe_load("\n".join(body)))


class _Dumper(yaml.SafeDumper):
    """Line breaks in texts, those of Unicode too, are written as escapes, not as blank lines."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    broken = value.splitlines() not in ([], [value])
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if broken else None)


_Dumper.add_representer(str, _text)


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.dump(
        dict(value),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=WIDTH,
        allow_unicode=True,
    )
