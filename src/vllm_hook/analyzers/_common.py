"""What the analyzers share: the observation they read, rows to one number, and files that options name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field

from ..errors import HookError, IncompleteCaptureError, ProgramError
from ..program._types import fail
from ..results import Observed
from ..sites import SITES
from ..tensors import read_tensors
from .base import Names

#: How the numbers of several positions become one.
Over = Literal["max", "min", "mean", "last"]
Bound = Annotated[float, Field(allow_inf_nan=False)]
ROW_SITES = tuple(name for name, site in SITES.items() if site.kind != "attention")
STREAM_SITES = tuple(name for name, site in SITES.items() if site.kind == "stream")


def single(observations: Mapping[str, Observed], analyzer: str, sites: Sequence[str]) -> tuple[str, Observed]:
    """The one observation that an analyzer reads, by its id. HookError: several, or another site."""
    if len(observations) != 1:
        raise HookError(f"{analyzer} reads exactly one observation, got {', '.join(observations) or 'none'}")
    name, seen = next(iter(observations.items()))
    if seen.site not in sites:
        needed = " or ".join(map(repr, sites)) if len(sites) < 3 else f"one of {', '.join(sites)}"
        raise HookError(f"{analyzer}: {name!r} observes {seen.site!r}, needs {needed}")
    if not seen.positions:
        raise IncompleteCaptureError(f"{analyzer}: {name!r} holds no rows")
    return name, seen


def read_rows(
    values: torch.Tensor,
    reduced: bool,
    file: str | None,
    said: str,
    option: str,
    reduction: str,
    apply: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """One number a row: the observation's own, if it is ``reduced``, else ``apply(rows, file)``. HookError,
    which begins with ``said``, if the file of ``option`` is missing or too much."""
    if reduced:
        if file is not None:
            raise HookError(f"{said} is reduced to one number a row; leave out `{option}`")
        return values.float()
    if file is None:
        raise HookError(
            f"{said} keeps whole rows; add `reduce: {{{reduction}: file}}` to it, or give the option "
            f"`{option}`"
        )
    return apply(values, file)


def aggregate(values: torch.Tensor, over: Over) -> torch.Tensor:
    """``[..., positions]`` -> ``[...]``."""
    if over == "last":
        return values[..., -1]
    if over == "mean":
        return values.mean(-1)
    return values.amax(-1) if over == "max" else values.amin(-1)


def flag(value: float, above: float | None, below: float | None) -> bool | None:
    """Whether a bound is passed; None without bounds."""
    if above is None and below is None:
        return None
    return (above is not None and value > above) or (below is not None and value < below)


# -- files ----------------------------------------------------------------------------------------


def tensors_of(ref: str) -> dict[str, torch.Tensor]:
    """Tensors of the file of ``file`` or ``file#tensor``; read again only when the file changes."""
    path = Path(ref.partition("#")[0]).absolute()
    if not path.is_file():
        raise ProgramError(str(path), "is a directory" if path.is_dir() else "no such file")
    stat = path.stat()
    return _read(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> dict[str, torch.Tensor]:
    return read_tensors(path, Path("/"))


def _readable(ref: str) -> str:
    try:
        tensors_of(ref)
    except ProgramError as error:
        raise fail(str(error)) from None
    return ref


#: A file that an option names: ``file`` or ``file#tensor``, absolute or relative to the working directory.
OptionFile = Annotated[str, AfterValidator(_readable), Names("file")]
