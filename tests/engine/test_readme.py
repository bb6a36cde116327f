"""The README's example runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.engine
@pytest.mark.model
def test_the_first_python_example_runs_and_prints_scores(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.S).group(1)
    assert len(code.splitlines()) <= 17
    script = tmp_path / "example.py"
    script.write_text(code)
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # as a user runs it: the engine in a process of its own
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scores = re.findall(r"Score\((\d\.\d+), (not flagged|flagged)\)", done.stdout)
    assert [verdict for _, verdict in scores] == ["not flagged", "flagged"], done.stdout[-2000:]
