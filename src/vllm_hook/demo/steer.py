"""``vllm-hook demo steer``: one vector, added while the model answers, changes how SmolLM2 answers.

The vector was made from contrast pairs (``--rebuild`` makes it again). Here it is applied to held-out
questions, none of which asks for the behaviour, over a sweep of strengths in one engine: each
request sets its own. Two figures per strength say what it brings and what it costs: the rate of the
behaviour by a rule that anyone can check, and the perplexity of the answers under the unsteered model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import environment, jsonl, saved
from ..build import sweep
from ..build.heads import packaged
from ..build.sweep import Answer
from ..errors import HookError
from ..show import Table as PageTable
from ..show import sweep_figure
from .behaviours import BEHAVIOURS, Behaviour, Record
from .model import smollm2

EDIT = "style"
TOKENS = 40
#: Strengths of the sweep, as multiples of the one in the program.
FACTORS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
#: With these the demo worked: by how much the rate rises at least, and the perplexity grows at most.
LEAST_RISE, MOST_GROWTH = 0.5, 2.0
SHOWN = 6


@dataclass(frozen=True)
class Outcome(sweep.Outcome):
    """All answers at one strength, measured by a behaviour's rule."""

    def rate(self, behaviour: Behaviour) -> float:
        return self.share(behaviour.shown)


def program_file(behaviour: str) -> Path:
    """The program that ships for SmolLM2; its vector lies beside it."""
    return Path(str(resources.files("vllm_hook"))) / "programs" / f"smollm2-{behaviour}.yaml"


def read_questions(split: str) -> list[Record]:
    """``pairs`` (made the vector), ``tune`` (chose layer and strength) or ``held_out`` (measured)."""
    return list(jsonl.records(packaged(f"steer_{split}.jsonl")))


class Asker:
    """SmolLM2 on vLLM; asks questions with and without a program."""

    def __init__(self, programs: Sequence[Any], arm: Any = None, eager: bool = False) -> None:
        from ..llm import HookLLM

        self.llm = HookLLM(
            str(smollm2()),
            programs=list(programs),
            arm=arm,
            dtype="float32",
            max_model_len=384,
            max_num_seqs=128,
            max_num_batched_tokens=1024,
            enforce_eager=eager,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self.tokenizer = self.llm.get_tokenizer()

    def prompt(self, question: str, answer: str = "", examples: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Token ids of a question as the user's turn, after ``examples`` and with the answer begun."""
        turns = [
            {"role": role, "content": text}
            for example in examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        turns.append({"role": "user", "content": question})
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text + answer, add_special_tokens=False)["input_ids"]
        return ids

    def ask(self, questions: Sequence[str], hooks: Sequence[Any], tokens: int = TOKENS) -> list[Answer]:
        """Greedy answers, one hook a question, with their likelihood under the unsteered model."""
        from ..build.on_vllm import greedy_answers

        return greedy_answers(self.llm, [self.prompt(q) for q in questions], list(hooks), tokens)

    def last_token(self, prompts: Sequence[list[int]], program: str) -> list[Any]:
        """Outputs with what ``program`` observed of the prompts."""
        from ..llm import greedy

        return self._generate(prompts, greedy(1), program)

    def _generate(self, prompts: Sequence[list[int]], params: Any, hook: Any) -> list[Any]:
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        outputs: list[Any] = self.llm.generate(batch, params, hook=hook, use_tqdm=False)
        return outputs

    def sweep(
        self, questions: Sequence[str], program: str, strengths: Sequence[float], tokens: int = TOKENS
    ) -> list[Outcome]:
        """Every question at every strength, all requests at once; strength 0 runs without the program."""
        hooks = [{"use": [program], "set": {f"{EDIT}.strength": s}} if s else False for s in strengths]
        every = [hook for hook in hooks for _ in questions]
        answers = self.ask(list(questions) * len(strengths), every, tokens)
        n = len(questions)
        return [Outcome(s, answers[i * n : (i + 1) * n]) for i, s in enumerate(strengths)]


def run_demo(out: Path, behaviour: str, rebuild: bool = False, console: Console | None = None) -> bool:
    """Run the demo, print tables, write the picture to ``out``. Returns whether all bounds were met."""
    from ..program.load import load

    console = console or Console()
    if behaviour not in BEHAVIOURS:
        raise HookError(f"no behaviour {behaviour!r}; there are {', '.join(BEHAVIOURS)}")
    start = time.perf_counter()
    environment.for_engine()
    smollm2()
    wanted, file = BEHAVIOURS[behaviour], program_file(behaviour)
    if rebuild:
        from .steer_build import build

        file = build(wanted, out, console)
    if not file.is_file():
        raise HookError(f"no program ships for {behaviour!r}, it worked too badly; --rebuild makes one")
    program = load(file).program.to_dict()
    edit = program["intervene"][EDIT]
    with console.status("starting SmolLM2-135M on vLLM (the first start compiles it: about a minute)"):
        asker = Asker([str(file)])
    console.print(f"SmolLM2-135M runs on vLLM, compiled, float32 ({time.perf_counter() - start:.0f} s).")
    questions = [r["question"] for r in read_questions("held_out")]
    strengths = [round(edit["strength"] * factor, 3) for factor in FACTORS]
    text = f"{len(questions)} held-out questions at {len(strengths)} strengths, in one batch"
    with console.status(text):
        outcomes = asker.sweep(questions, program["name"], strengths)
    chosen = outcomes[FACTORS.index(1.0)]
    console.print(sweep_table(wanted, edit, outcomes, chosen))
    console.print(example_table(questions, outcomes[0], chosen))
    for path in draw(out, wanted, edit, questions, outcomes, chosen):
        console.print(f"written: [bold]{escape(str(path))}[/bold]", soft_wrap=True)
    console.print(f"The demo took {time.perf_counter() - start:.0f} s.")
    return verdict(wanted, outcomes[0], chosen, console)


def verdict(behaviour: Behaviour, plain: Outcome, chosen: Outcome, console: Console) -> bool:
    """Say in one line what happened, and whether that is a clear effect at a bearable price."""
    before, after, growth = plain.rate(behaviour), chosen.rate(behaviour), chosen.growth(plain)
    good = after - before >= LEAST_RISE and growth <= MOST_GROWTH
    count = len(chosen.answers)
    line = (
        f"{behaviour.title}: {before * count:.0f} of {count} before, {after * count:.0f} of {count} after; "
        f"perplexity x {growth:.2f} (median)"
    )
    console.print(f"[{'green' if good else 'red'}]{line}[/]", soft_wrap=True)
    if not good:
        console.print(
            f"[red]Outside its bounds: rate + {100 * LEAST_RISE:g} points, "
            f"perplexity <= x {MOST_GROWTH:g}.[/red]"
        )
    return good


# -- tables and picture ---------------------------------------------------------------------------


def _rows(behaviour: Behaviour, outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    plain = outcomes[0]
    return [
        (
            f"{o.strength:g}" if o.strength else "none",
            f"{o.rate(behaviour):.0%}",
            f"{o.growth(plain):.2f}",
            f"{o.perplexity():.2f}",
            f"{o.repetition():.2f}",
        )
        for o in outcomes
    ]


HEADER = (
    "strength",
    "rate",
    "perplexity / plain (median)",
    "perplexity (all tokens)",
    "repeated token pairs",
)


def sweep_table(
    behaviour: Behaviour, edit: dict[str, Any], outcomes: Sequence[Outcome], chosen: Outcome
) -> Table:
    """One row a strength; the program's own strength is bold."""
    table = Table(
        title=f"{behaviour.title}: {len(chosen.answers)} held-out questions, none of which asks for it",
        title_justify="left",
        caption=f"{behaviour.rule}; {_where(edit)}",
        caption_justify="left",
    )
    for name in HEADER:
        table.add_column(name, justify="right")
    for outcome, row in zip(outcomes, _rows(behaviour, outcomes), strict=True):
        table.add_row(*row, style="bold" if outcome is chosen else None)
    return table


def _where(edit: dict[str, Any]) -> str:
    positions = edit.get("positions", "all")
    where = positions if isinstance(positions, str) else ", ".join(map(str, positions))
    return f"{edit['method']} at {edit['site']} of layer {edit['layers'][0]}, positions: {where}"


def example_table(questions: Sequence[str], plain: Outcome, chosen: Outcome) -> Table:
    """The same questions before and after."""
    table = Table(title=f"Before, and at strength {chosen.strength:g}", title_justify="left")
    for name in ("question", "before", "after"):
        table.add_column(name, ratio=1 if name == "question" else 2)
    step = max(len(questions) // SHOWN, 1)
    for i in list(range(0, len(questions), step))[:SHOWN]:
        cells = (questions[i], _one_line(plain.answers[i].text), _one_line(chosen.answers[i].text))
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _one_line(text: str, width: int = 170) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def draw(
    out: Path,
    behaviour: Behaviour,
    edit: dict[str, Any],
    questions: Sequence[str],
    outcomes: Sequence[Outcome],
    chosen: Outcome,
) -> list[Path]:
    """``steer.png`` and ``steer.html``."""
    plain, title = outcomes[0], f"SmolLM2-135M, steered to {behaviour.title}"
    figure = sweep_figure(
        [o.strength for o in outcomes],
        [o.rate(behaviour) for o in outcomes],
        [o.growth(plain) for o in outcomes],
        chosen.strength,
        f"{title}: {len(questions)} held-out questions\n{_where(edit)}",
        behaviour.rule,
        MOST_GROWTH,
    )
    answers = [
        (question, before.text, after.text)
        for question, before, after in zip(questions, plain.answers, chosen.answers, strict=True)
    ]
    tables: list[PageTable] = [
        (f"{behaviour.rule}; {_where(edit)}", HEADER, _rows(behaviour, outcomes)),
        ("All held-out questions", ("question", "before", f"at strength {chosen.strength:g}"), answers),
    ]
    figures = {"Rate and price over strengths": figure}
    return [
        saved.write(out / "steer.png", figures),
        saved.write(out / "steer.html", figures, tables, title),
    ]
