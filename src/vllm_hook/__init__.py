"""vLLM Hook: read and change a served model's internals, per request, at the engine's speed.

Names are loaded when they are used: importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    CapacityError,
    HookError,
    IncompleteCaptureError,
    ModelMismatchError,
    ProgramError,
    SiteError,
    SpanError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .llm import HookLLM, analyze
    from .program.schema import Program
    from .rerank import Ranked, rerank
    from .results import HookResult, Observed, Score

__version__ = "0.1.0"

_LAZY = {
    "HookLLM": "llm",
    "HookResult": "results",
    "Observed": "results",
    "Program": "program.schema",
    "Ranked": "rerank",
    "Score": "results",
    "analyze": "llm",
    "rerank": "rerank",
}

__all__ = [
    "CapacityError",
    "HookError",
    "HookLLM",
    "HookResult",
    "IncompleteCaptureError",
    "ModelMismatchError",
    "Observed",
    "Program",
    "ProgramError",
    "Ranked",
    "Score",
    "SiteError",
    "SpanError",
    "UnsupportedError",
    "analyze",
    "rerank",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = import_module(f".{_LAZY[name]}", __name__)
        return module if name == _LAZY[name] else getattr(module, name)  # the module `rerank` can be called
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
