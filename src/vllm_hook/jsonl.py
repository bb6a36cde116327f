"""JSONL files: numbered lines, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import HookError


def decode(raw: bytes, path: Path) -> str:
    """HookError if it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HookError(f"{path}: cannot be read: not UTF-8 text (byte {error.start})") from None


def read(path: Path) -> bytes:
    """HookError with the reason if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise HookError(f"{path}: cannot be read: {error.strerror}") from None


def values(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of the lines that are not blank. A line ends with a line feed and nothing else:
    a JSON string may hold other characters that break lines. HookError names a line that is not JSON."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.args[0] if isinstance(error, ValueError) else "nested too deeply"
            raise HookError(f"{path}, line {number}: is not JSON: {reason}") from None
        if "\\ud" in line.lower() and not _is_text(value):
            raise HookError(f"{path}, line {number}: holds half a character (\\uD800 to \\uDFFF by itself)")
        yield number, value


def _is_text(value: Any) -> bool:
    """Whether every text in it can be written: JSON may escape one half of a pair of surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def records(path: Path) -> list[dict[str, Any]]:
    """All values of a file; HookError names a line that is not an object."""
    found = []
    for number, value in values(decode(read(path), path), path):
        if not isinstance(value, dict):
            raise HookError(f"{path}, line {number}: is not an object")
        found.append(value)
    return found
