"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import HookError
from ..suggest import unknown

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, or smollm2.")]

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")

PROGRAM_HELP = "Program: a file (YAML or JSON), one that ships (smollm2-list), or hf://org/repo/file.yaml."
Program = Annotated[str, typer.Argument(metavar="PROGRAM", help=PROGRAM_HELP)]
MaybeProgram = Annotated[str | None, typer.Argument(metavar="PROGRAM", help=PROGRAM_HELP)]

HEADS_HELP = "Program that names them (a file, one that ships, or hf://..), layer-head pairs such as 8-3,12-0"

Eager = Annotated[bool, typer.Option("--eager", help="Do not compile: starts faster, runs slower.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output.")]


def one_of(*known: str) -> Callable[[str | None], str | None]:
    """The callback of an option that takes one of a few words."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise typer.BadParameter(unknown("value", value, known))
        return value

    return check


Dtype = Annotated[
    str | None, typer.Option(callback=one_of(*DTYPES), help="Default: auto; for smollm2 float32.")
]


def words(name: str, text: str, known: Sequence[str]) -> list[str]:
    """``a,b`` as words, all of them known; ``name`` is the option's."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in known:
            raise typer.BadParameter(unknown("value", word, known), param_hint=name)
    return found


def numbers(name: str, text: str | None, kind: Any) -> tuple[Any, ...] | None:
    """``0.5,1`` as numbers of a kind; ``name`` is the option's."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter("numbers separated by commas", param_hint=name) from None


def folder(path: Path) -> Path:
    """Make a folder for output before the work that fills it starts. HookError: it cannot be one."""
    if path.exists() and not path.is_dir():
        raise HookError(f"{path}: is a file; a folder is needed")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file, and the folders that it needs."""
    folder(path.parent)
    path.write_text(text, encoding="utf-8")
