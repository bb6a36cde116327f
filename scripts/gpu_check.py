"""Everything that needs a GPU, in one run: kernels, the engine tests on the device, the bench, a profile.

    python scripts/gpu_check.py OUT [--only PART,PART] [--rounds 20]

Parts: kernels, device, engine, bench, prompt-rows, forms, bus, profile, idle, places, cache, and tp on two
GPUs. Needs vLLM for CUDA, this package importable with its entry points, and pytest. Every part is a
process of its own with a log in OUT; tests run side by side, what is timed runs alone. Prints a short table
last; exits non-zero if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TESTS = ROOT / "tests"
ENGINE = ("sites", "edit_cache", "edit_programs", "passive", "edit_slots", "edit_safety", "families")
PARTS = (
    "kernels",
    "device",
    "engine",
    "bench",
    "prompt-rows",
    "forms",
    "bus",
    "profile",
    "idle",
    "places",
    "cache",
    "tp",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS[:-1]), help="parts, comma-separated")
    parser.add_argument("--tests", default=",".join(ENGINE), help="engine tests to run")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engines", default="", help="engines of the bench, as in `vllm-hook bench --only`")
    parser.add_argument("--limit", type=int, default=480, help="seconds for each part")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = args.only.split(",")
    told: list[tuple[str, int, float, str]] = []
    side_by_side = {}
    if "kernels" in parts:
        side_by_side["kernels"] = pytest(TESTS / "kernels" / "triton_cases.py")
    if "device" in parts:
        side_by_side["device"] = pytest(TESTS / "gpu")
    if "engine" in parts:
        for name in args.tests.split(","):
            side_by_side[f"engine-{name}"] = pytest(TESTS / "engine" / f"test_{name}.py")
    told += run(side_by_side, args.out, args.limit)
    timed = {
        "bench": [
            *(sys.executable, "-m", "vllm_hook.cli", "bench", "--gpu", "--rounds", str(args.rounds)),
            *("--out", str(args.out / "bench.json"), "--only", args.engines),
        ],
        "prompt-rows": [
            *(sys.executable, "-m", "vllm_hook.cli", "bench", "--gpu", "--rounds", str(args.rounds)),
            *("--out", str(args.out / "prompt-rows.json"), "--only", "prompt rows"),
        ],
        "forms": [sys.executable, str(HERE / "gpu_forms.py"), str(args.out)],
        "bus": [sys.executable, str(HERE / "gpu_parts.py"), "bus", str(args.out)],
        "profile": [sys.executable, str(HERE / "gpu_parts.py"), "profile", str(args.out)],
        "idle": [sys.executable, str(HERE / "gpu_parts.py"), "idle", str(args.out)],
        "places": [sys.executable, str(HERE / "gpu_places.py"), str(args.out)],
        "cache": [sys.executable, str(HERE / "gpu_parts.py"), "cache", str(args.out)],
        "tp": [sys.executable, str(HERE / "gpu_parts.py"), "tp", str(args.out)],
    }
    for name, command in timed.items():
        if name in parts:
            told += run({name: command}, args.out, args.limit)
    for name, code, seconds, last in told:
        print(f"{name:24} {'ok' if code == 0 else f'FAILED ({code})':12} {seconds:6.0f} s  {last[:120]}")
    (args.out / "summary.json").write_text(json.dumps(told))
    return int(any(code for _, code, _, _ in told))


def pytest(what: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "400", str(what)]


def run(commands: dict[str, list[str]], out: Path, limit: int) -> list[tuple[str, int, float, str]]:
    """Run commands side by side, each with a log; (name, exit status, seconds, last line)."""
    begin = time.time()
    env = {**os.environ, "OMP_NUM_THREADS": "4", "COLUMNS": "150"}
    logs = {name: out / f"{name}.log" for name in commands}
    children = {}
    for name, command in commands.items():
        with logs[name].open("w") as log:
            children[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT
            )
    told = []
    for name, child in children.items():
        try:
            code = child.wait(max(1.0, limit - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # pytest tells what it has seen so far
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
            code = 124
        lines = [line for line in logs[name].read_text(errors="replace").splitlines() if line.strip()]
        told.append((name, code, time.time() - begin, lines[-1] if lines else ""))
    return told


if __name__ == "__main__":
    sys.exit(main())
