"""``python -m vllm_hook.demo.steer_table``: what ``vllm-hook build vector`` makes does to held-out questions.

Every behaviour by every method: the vector, its layer and its strength come from ``build_vector`` and its
sweep, as the command line makes them; then 40 questions that none of this has seen are asked with and
without. The programs that ship are measured beside them. Prints a Markdown table, that of docs/steering.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import environment
from ..build.artifact import Output
from ..build.job import Job
from ..build.model import open_model
from ..build.sweep import Answer, Outcome
from ..build.vector import VectorOptions, build_vector
from ..errors import HookError
from ..program.load import load
from .behaviours import BEHAVIOURS, Behaviour
from .model import smollm2
from .steer import TOKENS, Asker, program_file, read_questions
from .steer_data import SHOWS, bare_file, example_file, instruction_file, tune_file

METHODS = ("add", "clamp")
INSTRUCTION, BARE, EXAMPLES, SHIPPED = "instruction", "bare", "examples", "ships"
HEADER = ("behaviour", "pairs", "method", "layer", "value", "shows, of 40", "perplexity", "repetition")


@dataclass(frozen=True)
class Row:
    """``file``: the program, None where no setting of the sweep was good enough; then ``why``."""

    behaviour: str
    pairs: str
    method: str
    file: Path | None
    why: str = ""


def build(behaviour: Behaviour, pairs: str, method: str, folder: Path, tokens: int) -> Row:
    """The program of one row, made unless it is there. ``tokens``: of the sweep's answers."""
    file = folder / f"{behaviour.name}-{pairs}-{method}.yaml"
    row = Row(behaviour.name, pairs, method, file)
    if file.is_file():
        return row
    data = {INSTRUCTION: instruction_file, BARE: bare_file, EXAMPLES: example_file}[pairs](behaviour, folder)
    held_out = tune_file(behaviour, folder)
    model = open_model(str(smollm2()), "SmolLM2-135M-Instruct")
    given: Any = {"method": method}
    options = VectorOptions(**given, shows=SHOWS[behaviour.name], tokens=tokens)
    try:
        build_vector(Job(model, Output(file), dtype="float32"), data, options, held_out)
    except HookError as error:
        return Row(behaviour.name, pairs, method, None, str(error))
    return row


def measure(rows: Sequence[Row]) -> tuple[list[Answer], dict[Path, list[Answer]]]:
    """Answers to the held-out questions without an edit, and with the program of each row."""
    files = [row.file for row in rows if row.file is not None]
    asker = Asker([str(file) for file in files])
    questions = [r["question"] for r in read_questions("held_out")]
    plain = asker.ask(questions, [False] * len(questions))
    answers = {}
    for file in files:
        name = load(file).program.name
        answers[file] = asker.ask(questions, [name] * len(questions), TOKENS)
    return plain, answers


def cells(row: Row, plain: Sequence[Answer], answers: Sequence[Answer]) -> tuple[str, ...]:
    """A row of the table."""
    assert row.file is not None
    behaviour = BEHAVIOURS[row.behaviour]
    edit: Any
    (edit,) = load(row.file).program.intervene.values()
    before, after = Outcome(0.0, list(plain)), Outcome(1.0, list(answers))
    value = edit.strength if row.method == "add" else edit.target
    return (
        row.behaviour,
        row.pairs,
        row.method,
        str(edit.layers[0]),
        f"{value:.4g}",
        f"{_count(before, behaviour)} -> {_count(after, behaviour)}",
        f"{after.growth(before):.2f}",
        f"{after.repetition():.2f}",
    )


def _count(outcome: Outcome, behaviour: Behaviour) -> int:
    return round(outcome.share(behaviour.shown) * len(outcome.answers))


def table(rows: Sequence[Row], plain: Sequence[Answer], answers: dict[Path, list[Answer]]) -> str:
    """Markdown; below it why a row has no figures."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    notes = []
    for row in rows:
        if row.file is None:
            missing = ("none", "", "", "", "")
            lines.append("| " + " | ".join((row.behaviour, row.pairs, row.method, *missing)) + " |")
            notes.append(f"{row.behaviour}, {row.pairs}, {row.method}: {row.why}")
        else:
            lines.append("| " + " | ".join(cells(row, plain, answers[row.file])) + " |")
    return "\n".join([*lines, "", *notes])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: build what is missing in ``--out``, measure all, print the table."""
    parser = argparse.ArgumentParser(prog="vllm_hook.demo.steer_table", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/steering"), help="folder for the programs")
    parser.add_argument("--behaviours", nargs="*", choices=list(SHOWS), default=list(SHOWS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the answers that choose a setting")
    args = parser.parse_args(argv)
    environment.for_engine()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    rows = []
    for name in args.behaviours:
        behaviour = BEHAVIOURS[name]
        # A model too small to follow an instruction follows examples.
        for pairs in (EXAMPLES,) if behaviour.answers else (INSTRUCTION, BARE):
            for method in METHODS:
                rows.append(build(behaviour, pairs, method, args.out, args.tokens))
                console.print(f"{name}, {pairs}, {method}: {rows[-1].why or 'built'}", markup=False)
        if program_file(name).is_file():
            rows.append(Row(name, SHIPPED, "add", program_file(name)))
    console.print(table(rows, *measure(rows)), markup=False)


if __name__ == "__main__":
    main()
