"""The command line. Thin: parses, calls, prints. Heavy imports happen inside the commands, so that
``vllm-hook --help`` is instant.

Exit status: 0 if all went well, 1 if something the user gave is wrong, 2 if the command line is.
"""

from __future__ import annotations

import typer

from . import measure, programs, running
from .build import build_app

app = typer.Typer(
    name="vllm-hook",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Read and change a served model's internals, per request, while vLLM runs at full speed.

A [bold]program[/bold] is a small YAML file. It says which states of which layers, heads and
positions to observe or to edit, and how to score what was observed.

[bold]Start here[/bold]

  vllm-hook demo
      [dim]a real model tells prompt injections from its own attention[/dim]
  vllm-hook demo steer
      [dim]a vector changes how it answers[/dim]
  vllm-hook sites smollm2
      [dim]what there is to observe in a model[/dim]
  vllm-hook check smollm2-list --model smollm2
      [dim]is my program right, and what will it arm?[/dim]
  vllm-hook run smollm2 smollm2-injection-guard -s "Say carpet" -p "Data: Hello."
      [dim]scores of some prompts[/dim]
  vllm-hook rerank smollm2 -q "Who painted it?" -d passages.jsonl
      [dim]documents by the attention that a query pays to them[/dim]

A model is a Hugging Face id, a folder, or [bold]smollm2[/bold]: 135M parameters, comes with the
extra "demo", needs no model hub. A program is a file, the name of one that ships
([bold]smollm2-injection-guard[/bold], smollm2-list, ..), or hf://org/repo/file.yaml.
""",
)


app.command()(programs.check)
app.command()(programs.sites)
app.command()(running.run)
app.command()(running.rerank)
app.command()(running.show)
app.command("import")(programs.import_)
app.command()(measure.bench)
app.command()(measure.demo)
app.add_typer(build_app, name="build")


def main() -> None:
    """Entry point of ``vllm-hook``."""
    app()
