"""Programs on the Hugging Face hub: ``hf://org/repo/file.yaml``, or ``hf://org/repo@revision/file.yaml``.

The hub's client downloads into its own cache and honours its settings: with ``HF_HUB_OFFLINE=1`` only
the cache is read. Tensor files that the program names are fetched from the same revision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ProgramError

_NAME = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?/(?P<file>[^@]+)")
_TENSOR_FILE = re.compile(r"[^#]+\.(safetensors|pt)(#.*)?")
_FILES = ("probe", "projection", "cosine", "sae", "vector", "second", "target", "u", "v")


def is_hub_name(source: str) -> bool:
    return source.startswith("hf:/")


def full_name(source: str) -> str:
    """The name as it was written: a path object has turned ``hf://`` into ``hf:/``."""
    return "hf://" + source.removeprefix("hf:").lstrip("/")


def fetch(source: str) -> tuple[Path, str]:
    """The local file of a hub name, and the revision that it is of. ProgramError: it cannot be had."""
    match = _NAME.fullmatch(source)
    if match is None or not _inside(match["file"]):
        raise ProgramError(source, "is not a program on the hub; write hf://org/repo/file.yaml")
    path = _download(source, match["repo"], match["file"], match["revision"])
    # .../snapshots/<commit>/<file>: tensors must come from the commit that the program came from.
    return path, path.parents[len(PurePosixPath(match["file"]).parts) - 1].name


def fetch_tensors(source: str, revision: str, program: dict[str, Any]) -> None:
    """Download the files that the program (as plain data) names, to lie where it looks for them."""
    match = _NAME.fullmatch(source)
    assert match is not None
    folder = PurePosixPath(match["file"]).parent
    for file in dict.fromkeys(_references(program)):
        if not _inside(file):
            raise ProgramError(source, f"{file!r}: a program on the hub names files of its own folder only")
        _download(source, match["repo"], str(folder / file), revision)


def _references(program: dict[str, Any]) -> Iterator[str]:
    holders = [o.get("reduce") or {} for o in program.get("observe", {}).values()]
    for holder in [*holders, *program.get("intervene", {}).values()]:
        for key in _FILES:
            value = holder.get(key)
            if isinstance(value, str) and not value.startswith("sha256:"):
                yield value.partition("#")[0]
    for analyze in program.get("analyze", {}).values():
        # Which options name files only the analyzers know, and this module does not know them.
        for value in analyze.get("options", {}).values():
            if isinstance(value, str) and _TENSOR_FILE.fullmatch(value):
                yield value.partition("#")[0]


def _inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _download(source: str, repo: str, file: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError:
        raise ProgramError(source, "needs huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the client raises errors of several libraries
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ProgramError(source, f"{file} cannot be fetched from {repo}: {reason}") from None
