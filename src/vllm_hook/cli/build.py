"""``vllm-hook build``: program files from examples. Parses and prints; the work is in ``build``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from . import _options as options
from ._console import DEMO_MODEL, friendly_errors, model_dtype, model_path, stderr, stdout

if TYPE_CHECKING:
    from ..build.job import Job

build_app = typer.Typer(
    name="build",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make a program from examples: heads, vectors, probes.

Reads JSON lines, measures the model on vLLM (or, with --backend hf, on Hugging Face), and writes a
program file with its provenance, tensors beside it. An interrupted build goes on where it was.
Formats of the examples: docs/data.md.

[bold]Examples[/bold]

  vllm-hook build heads smollm2 -o guard.yaml
  vllm-hook build vector smollm2 -b list -o list.yaml
""",
)

Data = Annotated[
    Path | None, typer.Argument(metavar="[DATA]", help="Examples, JSON lines; default: those that ship.")
]
Held = Annotated[
    Path | None, typer.Option("--held-out", help="Examples to measure on; default: a part of DATA.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Program file to write, .yaml.")]
Backend = Annotated[
    str,
    typer.Option(
        "--backend", callback=options.one_of("vllm", "hf"), help="vllm, or hf for a machine without vLLM."
    ),
]
Seed = Annotated[int, typer.Option(help="Decides how examples are split and shuffled.")]
Share = Annotated[float, typer.Option("--share", min=0.05, max=0.9, help="Part of DATA to measure on.")]


@build_app.command()
def heads(
    model: options.Model,
    data: Data = None,
    held_out: Held = None,
    out: Out = Path("out/guard.yaml"),
    k: Annotated[float, typer.Option(help="Standard deviations between normal and attacked.")] = 4,
    top: Annotated[int, typer.Option(min=1, help="Number of heads if none passes at k.")] = 8,
    share: Share = 0.3,
    seed: Seed = 0,
    backend: Backend = "vllm",
    dtype: options.Dtype = None,
    force: options.Force = False,
) -> None:
    """Heads that show prompt injection, and a threshold (Attention Tracker).

    [bold]Examples[/bold]

      vllm-hook build heads smollm2 -o guard.yaml
      vllm-hook build heads Qwen/Qwen3-8B mine.jsonl --held-out other.jsonl -o guard.yaml
    """
    with _building():
        job = _job(model, out, force, backend, dtype)
        from ..build.heads import build_heads, packaged

        if data is None:
            data, held_out = packaged("head_finding.jsonl"), held_out or packaged("held_out.jsonl")
        guard = build_heads(job, data, held_out, k, top, share, seed)
        console = stdout()
        colour = "yellow" if guard.choice.fell_back else "green"
        console.print(f"[{colour}]{escape(guard.choice.describe())}[/]", soft_wrap=True)
        console.print("heads: " + " ".join(f"{i}-{j}" for i, j in guard.choice.heads), soft_wrap=True)
        table = _table("Held-out prompts", "style", "AUROC", "flagged")
        for style, (hit, of) in guard.caught.items():
            table.add_row(style, f"{guard.auroc[style]:.3f}", f"{hit}/{of}")
        table.add_row("normal", "", "{}/{}".format(*guard.false_alarms))
        console.print(table)
        _written(job)


@build_app.command("rerank-heads")
def rerank_heads(
    model: options.Model,
    data: Data = None,
    held_out: Held = None,
    out: Out = Path("out/rerank.yaml"),
    method: Annotated[
        str,
        typer.Option(
            callback=options.one_of("core", "ndcg"), help="core: S(h); ndcg: each head's own nDCG@10."
        ),
    ] = "core",
    top: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    temperature: Annotated[
        float | None, typer.Option(help="Of S(h); default: by model family, .1 or .001.")
    ] = None,
    share: Share = 0.3,
    seed: Seed = 0,
    backend: Backend = "vllm",
    dtype: options.Dtype = None,
    force: options.Force = False,
) -> None:
    """Heads that tell relevant documents from others (CoRe, QRHead).

    [bold]Examples[/bold]

      vllm-hook build rerank-heads smollm2 -o rerank.yaml
      vllm-hook build rerank-heads Qwen/Qwen3-8B graded.jsonl --method ndcg -o rerank.yaml
    """
    with _building():
        job = _job(model, out, force, backend, dtype)
        from ..build.heads import packaged
        from ..build.rerank_heads import build_rerank_heads

        data = data or packaged("rerank.jsonl")
        result = build_rerank_heads(job, data, held_out, method, top, temperature, share, seed)
        table = _table("Chosen heads", "head", "S(h)", "nDCG@10")
        for i, j in result.heads:
            table.add_row(f"{i}-{j}", f"{result.core[i, j]:.4f}", f"{result.ndcg[i, j]:.4f}")
        console = stdout()
        console.print(table)
        figures = ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in result.measured.items())
        console.print(f"temperature of S(h): {result.temperature:g}")
        console.print(f"nDCG@10 of held-out queries: {figures}", soft_wrap=True)
        _written(job)


@build_app.command()
def vector(
    model: options.Model,
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="Contrast pairs; default: --behaviour's.")
    ] = None,
    held_out: Held = None,
    out: Out = Path("out/vector.yaml"),
    behaviour: Annotated[
        str,
        typer.Option(
            "--behaviour",
            "-b",
            callback=options.one_of("list", "capitals", "french"),
            help="Pairs that ship: list, capitals or french.",
        ),
    ] = "list",
    direction: Annotated[
        str,
        typer.Option(callback=options.one_of("mean", "pca", "mass-mean"), help="mean, pca or mass-mean."),
    ] = "mean",
    method: Annotated[
        str, typer.Option(callback=options.one_of("add", "clamp"), help="add or clamp.")
    ] = "add",
    rows: Annotated[
        str,
        typer.Option(
            callback=options.one_of("last", "mean"),
            help="last: states of the last token; mean: over the prompt.",
        ),
    ] = "last",
    layers: Annotated[str | None, typer.Option(help="Layers to try, as 10,12,14.")] = None,
    strengths: Annotated[str | None, typer.Option(help="Strengths to try, as 0.5,1.")] = None,
    shows: Annotated[
        str | None,
        typer.Option(
            help="Regular expression: score settings by the answers that match; default: for a --behaviour "
            "what its answers have, else how much of the effect of the prompts is recovered."
        ),
    ] = None,
    held: Annotated[int, typer.Option(min=1, help="Pairs to try settings on.")] = 10,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 40,
    seed: Seed = 0,
    backend: Backend = "vllm",
    dtype: options.Dtype = None,
    force: options.Force = False,
) -> None:
    """A steering vector from contrast pairs, its layer and strength by a sweep.

    [bold]Examples[/bold]

      vllm-hook build vector smollm2 -b list -o list.yaml
      vllm-hook build vector Qwen/Qwen3-8B pairs.jsonl --method clamp --layers 12,16,20 -o calm.yaml
    """
    with _building(), ExitStack() as stack:
        numbers = options.numbers("--strengths", strengths, float)
        wanted = options.numbers("--layers", layers, int)
        job = _job(model, out, force, backend, dtype)
        from ..build.vector import VectorOptions, build_vector

        if data is None:
            from ..demo.steer_data import default_files

            folder = stack.enter_context(TemporaryDirectory())
            data, chosen_by, pattern = default_files(behaviour, Path(folder))
            held_out, shows = held_out or chosen_by, shows or pattern
        given: Any = {"direction": direction, "method": method, "rows": rows}
        settings = VectorOptions(
            **given, layers=wanted, strengths=numbers, shows=shows, held=held, tokens=tokens, seed=seed
        )
        built = build_vector(job, data, settings, held_out)
        value = "strength" if method == "add" else "target"
        table = _table("Settings tried", "layer", value, "score", "perplexity / plain", "repetition")
        for t in built.tried:
            style = "bold" if t is built.chosen else None if t.fits else "dim"
            figures = (f"{t.outcome.strength:.4g}", f"{t.rate:.2f}", f"{t.growth:.2f}", f"{t.repetition:.2f}")
            table.add_row(str(t.layer), *figures, style=style)
        console = stdout()
        console.print(table)
        console.print(
            f"layer {built.layer}, {value} {built.value:.4g}: "
            f"score {built.chosen.rate:.2f}, without the edit {built.plain:.2f}"
        )
        _written(job)


@build_app.command()
def probe(
    model: options.Model,
    data: Data = None,
    held_out: Held = None,
    out: Out = Path("out/probe.yaml"),
    layers: Annotated[str | None, typer.Option(help="Layers to try, as 10,12,14; default: all.")] = None,
    share: Share = 0.3,
    seed: Seed = 0,
    backend: Backend = "vllm",
    dtype: options.Dtype = None,
    force: options.Force = False,
) -> None:
    """A linear probe: logistic regression, its layer by cross-validation.

    [bold]Examples[/bold]

      vllm-hook build probe smollm2 -o injection-probe.yaml
      vllm-hook build probe Qwen/Qwen3-8B labelled.jsonl --layers 12,16,20 -o truth.yaml
    """
    with _building():
        wanted = options.numbers("--layers", layers, int)
        job = _job(model, out, force, backend, dtype)
        from ..build.heads import packaged
        from ..build.probe import build_probe

        built = build_probe(job, data or packaged("injection.jsonl"), held_out, wanted, share, seed)
        console = stdout()
        low, high = built.interval
        console.print(f"layer {built.layer}, cross-validated AUROC {built.cv[built.layer]:.3f}")
        console.print(f"held out: AUROC {built.auroc:.3f} (95 % {low:.3f} to {high:.3f}), ", end="")
        console.print(f"accuracy {built.accuracy:.3f}")
        _written(job)


@contextmanager
def _building() -> Iterator[None]:
    """Errors as everywhere; Ctrl-C says that nothing is lost."""
    try:
        with friendly_errors():
            yield
    except KeyboardInterrupt:
        stderr().print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None


def _job(model: str, out: Path, force: bool, backend: str, dtype: str | None) -> Job:
    from ..build.artifact import Output
    from ..build.job import Job
    from ..build.model import open_model

    output = Output(out, force)
    path = model_path(model)
    opened = open_model(path, "SmolLM2-135M-Instruct" if model == DEMO_MODEL else None)
    return Job(opened, output, backend, model_dtype(model, dtype), stdout())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("style", "head") else "right")
    return table


def _written(job: Job) -> None:
    from ..build.artifact import of_one_build

    tensors, console = job.output.tensors, stdout()
    beside = f" and {escape(tensors.name)}" if of_one_build(job.output) else ""
    console.print(f"written: [bold]{escape(str(job.output.file))}[/bold]{beside}", soft_wrap=True)
    if tensors.exists() and not beside:
        text = f"{tensors}: was there before and is not of this build; left as it is"
        console.print(f"[yellow]{escape(text)}[/yellow]", soft_wrap=True)
