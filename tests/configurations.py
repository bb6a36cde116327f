"""The engine configurations that ``runner_case.py`` and ``edit_case.py`` are run in.

vLLM reads the choice of its model runner from the environment on import, so each is a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from child import told_by

#: (runner, mode): V1, V2 and V2 with the asynchronous scheduler; eager and compiled.
CONFIGURATIONS = [(runner, mode) for mode in ("eager", "compiled") for runner in ("v1", "v2", "v2-async")]


def figures(script: str, model: str, runner: str, mode: str, timeout: int) -> dict[str, Any]:
    return told_by(script, model, runner, mode, timeout=timeout)[0]


@contextmanager
def all_figures_of(
    script: str, model: str, request: Any, timeout: int
) -> Iterator[dict[tuple[str, str], Future]]:
    """Configuration -> its figures to come, two processes at a time; only those that selected tests ask
    for, by their parameter ``told``."""
    asked = {item.callspec.params.get("told") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        yield {c: pool.submit(figures, script, model, *c, timeout) for c in CONFIGURATIONS if c in asked}
