"""How commands talk: results on stdout, what went wrong on stderr, an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import HookError, ProgramError
from ..suggest import did_you_mean

DEMO_MODEL = "smollm2"


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Print what is wrong with what the user gave instead of a traceback, and exit with status 1."""
    try:
        yield
    except ProgramError as error:
        _print_problems(error)
        raise typer.Exit(1) from None
    except HookError as error:
        _print_error(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        if error.filename is None:
            raise
        _print_error(f"{error.filename}: {error.strerror}")
        raise typer.Exit(1) from None


def stdout() -> Console:
    """Wide enough for tables where the width is not known (pipes, logs)."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _print_error(message: str) -> None:
    stderr().print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)


def _print_problems(error: ProgramError) -> None:
    if len(error.problems) == 1 and not error.problems[0].field and error.problems[0].line is None:
        _print_error(str(error))
        return
    console = stderr()
    count = f"{len(error.problems)} problem{'s' * (len(error.problems) > 1)}"
    console.print(f"[bold red]invalid[/bold red]: {escape(error.source)}, {count}", soft_wrap=True)
    for problem in error.problems:
        console.print(f"  {escape(str(problem))}", soft_wrap=True)


def model_path(model: str) -> str:
    """``smollm2`` is the demo's model, made on first use; anything else is taken as it is."""
    if model != DEMO_MODEL:
        meant = "" if "/" in model or Path(model).exists() else did_you_mean(model, [DEMO_MODEL])
        if meant or not model.strip():
            raise HookError(f"model {model!r}: is neither a folder nor a Hugging Face id{meant}")
        return model
    from ..demo.model import smollm2

    return str(smollm2())


def model_dtype(model: str, dtype: str | None) -> str:
    """The demo's model is float32 on disk, and small; vLLM decides for others."""
    return dtype or ("float32" if model == DEMO_MODEL else "auto")
