"""``contrast_*.jsonl``: pairs for three behaviours, from the questions of the steering demo.

A pair is a question with an instruction for the behaviour, and with one of nearly the same length that
asks for nothing. The questions are those of ``steer_pairs.jsonl`` and ``steer_tune.jsonl``; none of the
demo's held-out questions is used.
"""

from __future__ import annotations

from collections.abc import Sequence

Record = dict[str, str]
#: behaviour -> (with, without)
INSTRUCTIONS = {
    "list": ("Answer with a numbered list.", "Answer in the usual manner."),
    "capitals": ("Answer in capital letters only.", "Answer the way you always do it."),
    "french": ("Answer in French.", "Answer as usual."),
}


def contrasts(behaviour: str, questions: Sequence[str]) -> list[Record]:
    """One pair ``{"id", "with", "without"}`` a question."""
    asked, usual = INSTRUCTIONS[behaviour]
    return [
        {"id": f"{behaviour}-{i:02d}", "with": f"{question} {asked}", "without": f"{question} {usual}"}
        for i, question in enumerate(questions)
    ]
