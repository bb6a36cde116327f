"""Makes the vector and the program of a behaviour: contrast pairs, layers, strengths, provenance.

States come from our own capture on vLLM: ``resid_post`` of every layer at the last prompt token. A
pair is either a question with and without an instruction, or a question with its answer begun, after
two examples that show the behaviour and after the same two without (a model too small to follow an
instruction follows examples). Layer and strength are chosen on questions of their own, never on the
held-out ones: see :func:`vllm_hook.build.sweep.best`.

``python -m vllm_hook.demo.steer_build --out DIR`` writes a program for each behaviour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from .. import environment
from ..build.sweep import PENALTY, Tried, best
from ..build.vectors import mean_difference
from ..errors import HookError
from .behaviours import BEHAVIOURS, Behaviour, Record
from .steer import EDIT, TOKENS, Asker, read_questions

#: Tried at each layer, in lengths of the vector.
STRENGTHS = (0.6, 0.75, 0.9, 1.05, 1.2)
POSITIONS = ["last_prompt", "generated"]
#: The answers of pairs are begun up to these shares of their words, in turn.
CUTS = (0.0, 0.3, 0.6)
LOOK: dict[str, Any] = {
    "schema": 1,
    "name": "steer-look",
    "observe": {"h": {"site": "resid_post", "positions": "last_prompt", "dtype": "float32"}},
}
ARM = {"resid_post": {"layers": "all", "rows": "last"}}

TEMPLATE = """\
# Makes SmolLM2 {title}, by a vector added to the residual stream.
# Written by `python -m vllm_hook.demo.steer_build`; measured by `vllm-hook demo steer -b {behaviour}`.
#
# Model     SmolLM2-135M-Instruct, float32, on vLLM; the question is the user's turn
# Vector    mean over {pairs} pairs of resid_post of layer {layer} at the last token, with - without:
#           {contrast}
#           (steer_pairs.jsonl); its length is {size:.2f} of the mean norm of the states there
# Chosen    layer and strength by {tried} settings on {tuned} other questions
#           (steer_tune.jsonl): rate {rate:.0%}, perplexity x {growth:.2f}, repetition {repetition:.2f}
#           ({fits}); {tokens} tokens, greedy,
#           repetition_penalty {penalty} with and without the edit
# Rule      {rule}
{measured}\
schema: 1
name: smollm2-{behaviour}
model: {{layers: {layers}, hidden: {hidden}}}
intervene:
  {edit}:
    site: resid_post
    layers: [{layer}]
    method: add
    vector: smollm2-{behaviour}.safetensors
    strength: {strength}
    positions: {positions}
"""


def contrast(asker: Asker, behaviour: Behaviour) -> tuple[torch.Tensor, torch.Tensor]:
    """States with and without the behaviour, each f32[pairs, layers, d]."""
    records = read_questions("pairs")
    with_, without = [], []
    for i, record in enumerate(records):
        question = record["question"]
        if behaviour.answers is None:
            with_.append(asker.prompt(f"{question} {behaviour.instruction}"))
            without.append(asker.prompt(question))
            continue
        for side, prompts in enumerate((with_, without)):
            prompts.append(asker.prompt(question, *by_example(behaviour, records, i, side)))
    return _states(asker, with_), _states(asker, without)


def by_example(
    behaviour: Behaviour, records: Sequence[Record], i: int, side: int
) -> tuple[str, list[tuple[str, str]]]:
    """Of question ``i`` the answer as it was begun, and two (question, answer) that come before; with the
    behaviour (``side`` 0) or without."""
    assert behaviour.answers is not None
    shots = [records[(i + step) % len(records)] for step in (7, 13)]
    examples = [(shot["question"], behaviour.answers(shot)[side]) for shot in shots]
    return _cut(behaviour.answers(records[i])[side], CUTS[i % len(CUTS)]), examples


def _cut(text: str, share: float) -> str:
    words = text.split()
    return " ".join(words[: round(share * len(words))])


def _states(asker: Asker, prompts: Sequence[list[int]]) -> torch.Tensor:
    outputs = asker.last_token(prompts, LOOK["name"])
    return torch.stack([o.hook.observed["h"].values[:, 0].float() for o in outputs])


def program(behaviour: Behaviour, layer: int, vector: Path) -> dict[str, Any]:
    """The program as plain data, for trying a setting."""
    edit: dict[str, Any] = {
        "site": "resid_post",
        "layers": [layer],
        "method": "add",
        "vector": str(vector.resolve()),
    }
    edit |= {"positions": POSITIONS}
    return {"schema": 1, "name": f"try-{behaviour.name}", "intervene": {EDIT: edit}}


def search(
    asker: Asker, behaviour: Behaviour, with_: torch.Tensor, without: torch.Tensor, folder: Path
) -> list[Tried]:
    """Every layer and strength on the questions for tuning."""
    questions = [r["question"] for r in read_questions("tune")]
    plain = asker.sweep(questions, "", [0.0])[0]
    tried = []
    file = folder / "try.safetensors"
    for layer in behaviour.layers:
        vector = mean_difference(with_[:, layer], without[:, layer])
        save_file({"vector": vector}, file)
        asker.llm.load_program(program(behaviour, layer, file))
        for outcome in asker.sweep(questions, f"try-{behaviour.name}", STRENGTHS):
            figures = outcome.rate(behaviour), outcome.growth(plain), outcome.repetition()
            tried.append(Tried(layer, outcome, *figures))
        asker.llm.unload_program(f"try-{behaviour.name}")
    file.unlink()
    return tried


def build(behaviour: Behaviour, out: Path, console: Console, asker: Asker | None = None) -> Path:
    """Make vector and program in ``out``; returns the program's file."""
    out.mkdir(parents=True, exist_ok=True)
    with console.status("capturing the contrast pairs, all layers"):
        asker = asker or Asker([LOOK], ARM, eager=True)
        with_, without = contrast(asker, behaviour)
    with console.status("trying layers and strengths"):
        tried = search(asker, behaviour, with_, without, out)
    chosen = best(tried)
    console.print(tried_table(behaviour, tried, chosen))
    vector = mean_difference(with_[:, chosen.layer], without[:, chosen.layer])
    file = out / f"smollm2-{behaviour.name}.yaml"
    save_file({"vector": vector}, file.with_suffix(".safetensors"))
    size = float(vector.norm() / without[:, chosen.layer].norm(dim=-1).mean())
    file.write_text(program_text(behaviour, chosen, tuple(with_.shape), size, len(tried)), encoding="utf-8")
    console.print(f"written: {file}", soft_wrap=True)
    return file


def program_text(
    behaviour: Behaviour, chosen: Tried, shape: tuple[int, ...], size: float, tried: int, measured: str = ""
) -> str:
    """The file that ships. ``shape``: pairs, layers, width."""
    if len(shape) != 3:
        raise HookError(f"states are [pairs, layers, width], got {list(shape)}")
    if behaviour.answers is None:
        pairs = f'the question with and without "{behaviour.instruction}"'
    else:
        pairs = "an answer begun after two examples that show it, and after the same two without"
    return TEMPLATE.format(
        title=behaviour.title,
        behaviour=behaviour.name,
        pairs=shape[0],
        layers=shape[1],
        hidden=shape[2],
        contrast=pairs,
        layer=chosen.layer,
        size=size,
        tried=tried,
        tuned=len(chosen.outcome.answers),
        rate=chosen.rate,
        growth=chosen.growth,
        repetition=chosen.repetition,
        fits="within the bounds" if chosen.fits else "no setting stays within the bounds",
        rule=behaviour.rule,
        tokens=TOKENS,
        penalty=PENALTY,
        edit=EDIT,
        strength=chosen.outcome.strength,
        positions="[" + ", ".join(POSITIONS) + "]",
        measured=measured,
    )


def tried_table(behaviour: Behaviour, tried: Sequence[Tried], chosen: Tried) -> Table:
    """All settings; the chosen one is bold, those that no longer speak are dim."""
    table = Table(title=f"{behaviour.title}: settings tried, {TOKENS} tokens each", title_justify="left")
    for name in ("layer", "strength", "rate", "perplexity / plain", "repetition"):
        table.add_column(name, justify="right")
    for t in tried:
        row = (str(t.layer), f"{t.outcome.strength:g}", f"{t.rate:.0%}")
        style = "bold" if t is chosen else None if t.fits else "dim"
        table.add_row(*row, f"{t.growth:.2f}", f"{t.repetition:.2f}", style=style)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: build the programs of the behaviours into ``--out``."""
    parser = argparse.ArgumentParser(prog="vllm_hook.demo.steer_build", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the programs and vectors")
    parser.add_argument("--behaviours", nargs="*", choices=list(BEHAVIOURS), default=list(BEHAVIOURS))
    args = parser.parse_args(argv)
    environment.for_engine()
    console = Console(width=110)
    asker = Asker([LOOK], ARM, eager=True)
    for name in args.behaviours:
        build(BEHAVIOURS[name], args.out, console, asker)


if __name__ == "__main__":
    main()
