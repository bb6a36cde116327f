"""Where a program is: a file, a name on the hub, or the name of a program that ships.

A file comes first: ``smollm2-list`` is the program that ships only where no file has this name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path

from ..errors import ProgramError
from ..suggest import closest
from . import hub

SUFFIXES = (".yaml", ".yml", ".json")


@cache
def shipped() -> dict[str, Path]:
    """The programs that ship, by name."""
    folder = Path(str(resources.files("vllm_hook"))) / "programs"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def is_program_name(source: str | Path) -> bool:
    """Whether this names a program rather than something else: by its ending, or because there is one."""
    text = str(source)
    return Path(text).suffix in SUFFIXES or hub.is_hub_name(text) or text in shipped() or _is_file(text)


def locate(source: str | Path) -> Path:
    """The file of a path or of the name of a program that ships. ProgramError: there is none, with what
    may have been meant."""
    path = Path(source)
    if not str(source).strip():
        raise ProgramError("program", "its name is empty")
    if "\0" in str(source):
        raise ProgramError(repr(str(source)), "cannot be read: no file has a null byte in its name")
    try:
        if path.is_dir():
            raise ProgramError(str(source), "is a directory, not a program file")
        if path.is_file() or os.path.lexists(path):
            return path
    except OSError as error:
        raise ProgramError(str(source), f"cannot be read: {error.strerror or error}") from None
    if str(source) in shipped():
        return shipped()[str(source)]
    raise ProgramError(str(source), _missing(path))


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"no such file: there is no folder {str(path.parent)!r}"
    bare = path.parent == Path()
    if bare and path.stem in shipped():
        return f"no such file; the program that ships is named {path.stem!r}"
    here = closest(path.name, _programs_in(path.parent))
    if here is not None:
        return f"no such file; did you mean {str(path.parent / here)!r}?"
    if not bare:
        return "no such file"
    meant = closest(path.stem, shipped())
    if meant is not None:
        return f"no such file; did you mean the program that ships, {meant!r}?"
    if path.suffix in SUFFIXES:
        return "no such file"
    return f"no such file, and no program of this name ships; those that do: {', '.join(shipped())}"


def _programs_in(folder: Path) -> Iterator[str]:
    try:
        yield from (file.name for file in folder.iterdir() if file.suffix in SUFFIXES)
    except OSError:
        return


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False
