"""What the analyzers share: the observation they read, rows to one number, and files that options name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, InstanceOf

from ..errors import HookError, IncompleteCaptureError, ProgramError
from ..results import Observed
from ..sites import SITES
from ..tensors import Probe, digest_tensors, read_probe, read_vector
from .base import Held, Names, holding

#: How the numbers of several positions become one.
Over = Literal["max", "min", "mean", "last"]
Bound = Annotated[float, Field(allow_inf_nan=False)]
ROW_SITES = tuple(name for name, site in SITES.items() if site.kind != "attention")
STREAM_SITES = tuple(name for name, site in SITES.items() if site.kind == "stream")
Content = TypeVar("Content")


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
    file: Held[Content] | None,
    said: str,
    option: str,
    reduction: str,
    apply: Callable[[torch.Tensor, Held[Content]], torch.Tensor],
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


def _vector(ref: str) -> tuple[torch.Tensor, str]:
    vector = read_vector(ref, Path.cwd(), None)
    return vector, digest_tensors({"": vector})


def _probe(ref: str) -> tuple[Probe, str]:
    probe = read_probe(ref, Path.cwd(), None)
    return probe, digest_tensors(probe.tensors())


#: Files that an option names: ``file`` or ``file#tensor``, absolute or relative to the working directory.
VectorFile = Annotated[InstanceOf[Held[torch.Tensor]], holding(_vector), Names("file")]
ProbeFile = Annotated[InstanceOf[Held[Probe]], holding(_probe), Names("file")]


def check_width(held: Held[Any], tensor: torch.Tensor, width: int) -> None:
    """ProgramError: the tensor of a file is not as wide as the rows."""
    if len(tensor) != width:
        raise ProgramError(held.ref, f"has shape [{len(tensor)}]; [{width}] is needed")
