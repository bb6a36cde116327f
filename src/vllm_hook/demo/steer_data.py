"""The questions of the steering demo as files that ``vllm-hook build vector`` reads.

Pairs make a vector (``steer_pairs.jsonl``, 36 questions); ten other questions, bare as those that are steered
later, choose layer and strength (``steer_tune.jsonl``). What is measured in the end is asked of neither.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..build.heads import packaged
from .behaviours import BEHAVIOURS, ITEM, Behaviour
from .steer import read_questions
from .steer_build import by_example

#: What the sweep scores a setting by, on ten questions. The rules of ``behaviours`` measure afterwards.
SHOWS = {
    "list": ITEM.pattern,
    "capitals": r"\A[^a-z]*[A-Z][^a-z]*\Z",
    "french": r"(?is)(?:\b(?:le|la|les|des|une|est|et|dans|pour|que|qui|sont|du)\b.*?){3}",
}


def default_files(name: str, folder: Path) -> tuple[Path, Path, str]:
    """(pairs, questions to choose by, what an answer must match) of a behaviour, written to ``folder``: pairs
    by instruction, or by example where a model too small to follow an instruction follows these."""
    behaviour = BEHAVIOURS[name]
    pairs = example_file if behaviour.answers else bare_file
    return pairs(behaviour, folder), tune_file(behaviour, folder), SHOWS[name]


def instruction_file(behaviour: Behaviour, folder: Path) -> Path:
    """The pairs that ship, without those of the questions that choose a setting."""
    tune = [r["question"] for r in read_questions("tune")]
    lines = packaged(f"contrast_{behaviour.name}.jsonl").read_text("utf-8").splitlines()
    kept = [line for line in lines if not any(question in line for question in tune)]
    return _write(folder / f"{behaviour.name}-instruction.jsonl", kept)


def example_file(behaviour: Behaviour, folder: Path) -> Path:
    """Pairs by example as ``build vector`` reads them: two answered questions, then one with its answer
    begun, all with the behaviour or all without."""
    records = read_questions("pairs")
    lines = []
    for i, record in enumerate(records):
        sides = []
        for side in (0, 1):
            begun, examples = by_example(behaviour, records, i, side)
            turns = [
                {"role": role, "content": text}
                for example in examples
                for role, text in zip(("user", "assistant"), example, strict=True)
            ]
            turns.append({"role": "user", "content": record["question"]})
            sides.append([*turns, *([{"role": "assistant", "content": begun}] if begun else [])])
        lines.append(json.dumps({"with": sides[0], "without": sides[1]}, ensure_ascii=False))
    return _write(folder / f"{behaviour.name}-examples.jsonl", lines)


def bare_file(behaviour: Behaviour, folder: Path) -> Path:
    """The questions with the instruction and with nothing, as the vectors that ship were made."""
    return _bare(behaviour, "pairs", folder / f"{behaviour.name}-bare.jsonl")


def tune_file(behaviour: Behaviour, folder: Path) -> Path:
    """The ten questions that choose a setting: bare, as those that are steered later."""
    return _bare(behaviour, "tune", folder / f"{behaviour.name}-tune.jsonl")


def _bare(behaviour: Behaviour, part: str, path: Path) -> Path:
    lines = [
        json.dumps({"with": f"{r['question']} {behaviour.instruction}", "without": r["question"]})
        for r in read_questions(part)
    ]
    return _write(path, lines)


def _write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
