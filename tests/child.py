"""Scripts of ``tests/engine`` that run in a process of their own and print what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def told_by(script: str, *args: str, timeout: int = 300, **env: str) -> tuple[Any, str]:
    """What a script prints as ``RESULT{...}``, and all of its output; AssertionError with that else."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "engine" / script), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **env},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, f"{script} {args} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[-1].removeprefix("RESULT")), done.stdout + done.stderr
