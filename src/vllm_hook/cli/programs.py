"""``check``, ``sites`` and ``import``: programs and models without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..errors import HookError
from . import _options as options
from ._console import friendly_errors, model_dtype, model_path, stderr, stdout


def check(
    program: options.MaybeProgram = None,
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
    max_num_seqs: Annotated[int, typer.Option(min=1, help="vLLM's setting, for the memory figure.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="The same.")] = 4096,
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=options.one_of(*options.DTYPES),
            help="The engine's dtype; default: 2 bytes a value, smollm2 float32.",
        ),
    ] = None,
) -> None:
    """Is a program valid, what does it arm, and what does that cost?

    All problems are listed at once, with line and field: form, names, spans,
    analyzers and their options, files. With --model also layers, heads and
    sizes are checked against the model, and the memory that the program needs
    is shown. No engine starts.

    [bold]Examples[/bold]

      vllm-hook check guard.yaml
      vllm-hook check smollm2-list --model smollm2
      vllm-hook check guard.yaml --model Qwen/Qwen3-8B --max-num-seqs 1024
      vllm-hook check --schema -o program.schema.json
      [dim]for editors; the first line of a program then is
      # yaml-language-server: $schema=program.schema.json[/dim]
    """
    with friendly_errors():
        if schema:
            _write_schema(out)
            return
        if program is None:
            raise typer.BadParameter("give a program, or --schema", param_hint="PROGRAM")
        from ..describe import (
            cost_hints,
            edit_table,
            memory_text,
            model_facts,
            observation_table,
            outline,
        )
        from ..runtime.inspection import inspect
        from ..runtime.loading import loaded_from

        console = stdout()
        facts = None if model is None else model_facts(model_path(model))
        found = inspect(program, facts)
        found.refuse()
        if facts is None or model is None:
            assert found.sourced is not None
            said = found.sourced.program
            console.print(f"[green]valid[/green]: {escape(found.source)}, program {said.name!r}")
            console.print(escape(outline(said)), soft_wrap=True)
            console.print("[dim]Add --model to check layers, heads and sizes against a model.[/dim]")
            return
        loaded = loaded_from(found)
        item = 4 if model_dtype(model, dtype) in ("float32", "float") else 2
        console.print(f"[green]valid[/green] for {escape(facts.id)}: {loaded.name} {loaded.digest[:12]}")
        if loaded.checked.observations:
            console.print(observation_table(loaded.checked, facts, item))
        if loaded.checked.edits:
            console.print(edit_table(loaded.checked))
        memory = memory_text(loaded.needs, facts, max_num_seqs, max_num_batched_tokens, item)
        console.print(escape(memory), soft_wrap=True)
        for hint in cost_hints(loaded.checked):
            console.print(f"- {escape(hint)}", soft_wrap=True)


def _write_schema(out: Path | None) -> None:
    from ..program.schema import program_json_schema

    text = json.dumps(program_json_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        options.write_text(out, text)
        stdout().print(f"written: {escape(str(out))}")


def sites(model: options.Model) -> None:
    """What can be observed in a model, and how large it is. Reads only the configuration.

    [bold]Examples[/bold]

      vllm-hook sites smollm2
      vllm-hook sites Qwen/Qwen3-8B
    """
    with friendly_errors():
        from ..describe import model_facts, model_line, site_table

        facts = model_facts(model_path(model))
        console = stdout()
        console.print(escape(model_line(facts)), soft_wrap=True)
        console.print(site_table(facts))


def import_(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="Configuration of the earlier vLLM-Hook.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Program file to write; default: print.")
    ] = None,
    force: options.Force = False,
) -> None:
    """Turn a configuration of the earlier vLLM-Hook into a program file.

    Reads important_heads, hookq, hidden_states and steering; what has no
    counterpart is noted.

    [bold]Examples[/bold]

      vllm-hook import attention_tracker.json
      vllm-hook import attention_tracker.json -o tracker.yaml
    """
    with friendly_errors():
        import yaml

        from ..program.legacy import import_legacy

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
            options.write_text(out, text)
            stdout().print(f"written: {escape(str(out))}", soft_wrap=True)
        for note in notes:
            stderr().print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
