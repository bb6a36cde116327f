"""The exceptions of vLLM Hook.

Every error that a user can cause derives from :class:`HookError` and says which file, field or
request it is about. It is a ``ValueError`` as well, so that vLLM's servers answer it with a 400.
"""

from __future__ import annotations

from dataclasses import dataclass


class HookError(ValueError):
    """Base class of all errors raised by vLLM Hook."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a program.

    ``field`` is a dotted path such as ``observe.focus.heads[2]``; ``line`` is 1-based, or None
    when the program did not come from a file.
    """

    field: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}, " if self.line is not None else ""
        return f"{where}{self.field}: {self.message}" if self.field else f"{where}{self.message}"


class ProgramError(HookError):
    """A program, or a request that uses one, is not valid. ``problems`` lists every reason."""

    def __init__(self, source: str, problems: list[Problem] | str) -> None:
        self.source = source
        self.problems = [Problem("", problems)] if isinstance(problems, str) else list(problems)
        lines = "\n".join(f"  {p}" for p in self.problems)
        super().__init__(
            f"{source}: {self.problems[0]}"
            if len(self.problems) == 1
            else f"{source}: {len(self.problems)} problems\n{lines}"
        )


class SiteError(HookError):
    """A site does not exist, cannot be used in this way, or is not armed in this engine."""


class SpanError(HookError):
    """A span or a selector does not fit the prompt."""


class CapacityError(HookError):
    """A request asks for more than was reserved when the engine was armed."""


class ModelMismatchError(ProgramError):
    """A program was written for another model."""


class IncompleteCaptureError(HookError):
    """An observation lacks positions that were asked for."""


class UnsupportedError(HookError):
    """This engine, version or feature is not supported; the message names what is."""
