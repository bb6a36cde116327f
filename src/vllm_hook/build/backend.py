"""How builds measure a model: one interface, on vLLM (our own capture) or on Hugging Face.

Shapes: L layers, H query heads, d width, K spans. Everything comes back in float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ..errors import HookError
from .model import Model
from .prompts import Prompt
from .sweep import Answer

Rows = Literal["last", "mean"]
BACKENDS = ("vllm", "hf")


@dataclass(frozen=True, eq=False)
class Edit:
    """``add`` value * vector, or ``clamp`` the projection on vector/|vector| to value, on resid_post
    of ``layer``: add from the last prompt token on, clamp from position 1 on."""

    layer: int
    method: Literal["add", "clamp"]
    vector: Tensor
    value: float

    def start(self, prompt: int) -> int:
        """The first position that is edited, for a prompt of so many tokens."""
        return prompt - 1 if self.method == "add" else 1


class Backend(Protocol):
    """An open model. All prompts were checked to fit."""

    def states(self, prompts: Sequence[Prompt], rows: Rows) -> list[Tensor]:
        """resid_post of all layers, f32[L, d] a prompt: at the last token, or the mean over the
        positions from 1 on."""
        ...

    def masses(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Attention on each key span, mean over the query rows: f32[L, H, K] a prompt."""
        ...

    def answers(self, prompts: Sequence[Prompt], edit: Edit | None, tokens: int) -> list[Answer]:
        """Greedy answers (with a repetition penalty), and their likelihood under the unedited model."""
        ...

    def likelihood(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], edit: Edit | None
    ) -> list[float]:
        """Mean log-probability of a token of each answer, in nats, with the edit."""
        ...

    def close(self) -> None:
        """Give back what it holds; it is not used again."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a build will ask for: what to arm, and how long prompts with answers are."""

    states: Rows | None = None
    masses: bool = False
    edits: bool = False
    longest: int = 0


class Lazy:
    """Opens the backend when something has to be measured: a finished capture needs no engine. At the end
    of a ``with`` what was opened is closed."""

    def __init__(self, opener: Callable[[], Backend]) -> None:
        self._opener = opener
        self._open: Backend | None = None

    def __call__(self) -> Backend:
        if self._open is None:
            self._open = self._opener()
        return self._open

    def __enter__(self) -> Lazy:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def opener(name: str, model: Model, needs: Needs, dtype: str = "auto") -> Callable[[], Backend]:
    """``open()`` for one of :data:`BACKENDS`; opening raises HookError if vLLM is not installed."""

    def vllm() -> Backend:
        try:
            from .on_vllm import VllmBackend
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "vllm":
                raise
            raise HookError("vLLM is not installed; --backend hf does without") from None
        return VllmBackend(model, needs, dtype)

    def hf() -> Backend:
        from .on_hf import HfBackend

        return HfBackend(model, dtype)

    return vllm if name == "vllm" else hf
