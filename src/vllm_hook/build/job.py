"""What every build shares: a model, an output, a backend, and a place for interrupted work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from .. import __version__
from ..errors import HookError
from .artifact import Output
from .backend import BACKENDS, Lazy, Needs, opener
from .model import Model
from .records import Source
from .work import Work

#: Prompts measured between two saves.
CHUNK = 16


@dataclass(frozen=True)
class Job:
    """``console``: where progress is shown, None for nowhere. ``dtype``: as vLLM names them, or auto."""

    model: Model
    output: Output
    backend: str = "vllm"
    dtype: str = "auto"
    console: Console | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise HookError(f"no backend {self.backend!r}; there are {', '.join(BACKENDS)}")

    def work(self, command: str, data: Mapping[str, Source], **options: Any) -> Work:
        """The work folder; another command, model, data file or option begins a new one."""
        key = {
            "command": command,
            "version": __version__,
            "model": self.model.digest,
            "data": {use: source.digest for use, source in data.items()},
            "backend": self.backend,
            "dtype": self.dtype,
            "options": options,
        }
        return Work(self.output.file, key, self.console)

    def open(self, needs: Needs) -> Lazy:
        """The backend, opened on first use."""
        open_ = opener(self.backend, self.model, needs, self.dtype)
        if self.console is None:
            return Lazy(open_)
        console = self.console

        def shown() -> Any:
            with console.status(f"starting {self.model.name} on {self.backend}"):
                return open_()

        return Lazy(shown)

    @property
    def measured_by(self) -> str:
        return f"{self.backend}, {self.dtype}"

    def program(self, *sizes: str) -> dict[str, Any]:
        """The head of the program: schema, name and the sizes that it depends on."""
        facts = self.model.facts
        return {
            "schema": 1,
            "name": self.output.name,
            "model": {size: getattr(facts, size) for size in sizes},
        }
