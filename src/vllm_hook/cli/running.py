"""``run``, ``rerank`` and ``show``: prompts through an engine, and what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from . import _options as options
from ._console import friendly_errors, model_dtype, model_path, stdout


def run(
    model: options.Model,
    program: options.Program,
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
    dtype: options.Dtype = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="vLLM's setting.")] = None,
    eager: options.Eager = False,
) -> None:
    """Run prompts with a program and print scores and observations.

    [bold]Examples[/bold]

      vllm-hook run smollm2 smollm2-injection-guard -s "Say carpet" -p "Data: Hello."
      vllm-hook run Qwen/Qwen3-8B probe.yaml --prompts mine.jsonl --save out/run
      vllm-hook show out/run
    """
    with friendly_errors():
        from ..describe import model_facts
        from ..offline import gather, generate, result_table
        from ..runtime.loading import load_program

        if not prompt and prompts is None:
            raise typer.BadParameter("give --prompt or --prompts", param_hint="--prompt")
        path = model_path(model)
        load_program(program, model_facts(path))  # says what is wrong before an engine starts
        if save is not None:
            options.folder(save)
        items = gather(program, prompt or (), system, chat, prompts)
        engine = {"dtype": model_dtype(model, dtype), "max_model_len": max_model_len, "enforce_eager": eager}
        results = generate(path, program, items, max_tokens, **engine)
        console = stdout()
        console.print(result_table(results))
        for item in results:
            for id, message in item.result.errors.items():
                console.print(f"[red]{item.name}: {escape(id)}: {escape(message)}[/red]", soft_wrap=True)
        if save is not None:
            from .. import saved

            saved.save(save, results)
            folder = escape(str(save))
            console.print(f"written: {folder} (draw it: vllm-hook show {folder})", soft_wrap=True)


def rerank(
    model: options.Model,
    query: Annotated[str, typer.Option("--query", "-q", help="What is looked for.")],
    documents: Annotated[
        Path, typer.Option("--documents", "-d", help='JSON lines: a text, or an object with "text".')
    ],
    heads: Annotated[
        str,
        typer.Option("--heads", help=f"{options.HEADS_HELP}, or all."),
    ] = "all",
    top_k: Annotated[int | None, typer.Option("--top-k", "-k", min=1, help="Only the best so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Keep the layers after the last head, which are not needed.")
    ] = False,
    dtype: options.Dtype = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="vLLM's setting. Documents beyond it go into further prompts.")
    ] = None,
    eager: options.Eager = False,
) -> None:
    """Rank documents for a query by the model's own attention. Nothing is trained or generated.

    The documents stand in one prompt, the query after them; a document's score
    is the attention that the query pays to it in the chosen heads, less what
    the query "N/A" pays. As a rule some heads do better than all together:
    `vllm-hook build rerank-heads` finds them. With chosen heads only the layers
    up to the last of them are loaded.

    [bold]Examples[/bold]

      vllm-hook rerank smollm2 -q "Who painted it?" -d passages.jsonl --heads smollm2-rerank
      vllm-hook rerank Qwen/Qwen3-8B -q "..." -d passages.jsonl --heads rerank.yaml -k 5
      vllm-hook rerank smollm2 -q "..." -d passages.jsonl --heads 8-3,12-0 --json
    """
    with friendly_errors():
        from ..offline import rank, ranking_json, ranking_table, read_documents

        texts = read_documents(documents)
        path = model_path(model)
        engine = {"dtype": model_dtype(model, dtype), "max_model_len": max_model_len, "enforce_eager": eager}
        hits = rank(path, query, texts, heads, top_k, whole, **engine)
        if as_json:
            typer.echo(ranking_json(hits))
        else:
            stdout().print(ranking_table(query, hits))


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
        from .. import saved

        items = saved.load(results)
        path = saved.write(out, saved.figures(items), [saved.table(items)], "vLLM Hook results")
        stdout().print(f"written: [bold]{escape(str(path))}[/bold]", soft_wrap=True)
