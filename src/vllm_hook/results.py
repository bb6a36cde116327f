"""Host-side results of one request: what was observed, the scores, and what was done.

Everything here is plain data with CPU tensors; nothing knows of the engine. Ids are qualified by
their program (``guard/focus``); the bare id works while it is unique.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .errors import HookError, IncompleteCaptureError
from .suggest import did_you_mean

V = TypeVar("V")
FORMAT = "vllm-hook-result/1"


@dataclass
class Score:
    """An analyzer's verdict. ``flagged`` is None where the analyzer has no threshold."""

    value: float
    flagged: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        verdict = {None: "", True: ", flagged", False: ", not flagged"}[self.flagged]
        return f"Score({self.value:.4g}{verdict})"

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "flagged": self.flagged, "details": self.details}


@dataclass(eq=False)
class Observed:
    """The rows of one observation.

    ``values``: stream sites [layers, positions, d]; head sites [layers, positions, heads, d_head];
    ``attention_mass`` [heads listed, rows, keys]; ``attention`` [heads listed, rows, longest row];
    scalar reductions [layers, positions]; an SAE's features [layers, positions, features], also for a list of
    one. ``positions`` are absolute and 0-based, one per row.
    ``heads`` are ``(layer, head)``; ``keys`` name the spans. Both are None where they do not apply.
    """

    site: str
    values: torch.Tensor
    positions: list[int]
    layers: list[int]
    heads: list[tuple[int, int]] | None = None
    keys: list[str] | None = None

    def __repr__(self) -> str:
        parts = [self.site, f"{list(self.values.shape)} {str(self.values.dtype).removeprefix('torch.')}"]
        parts.append(f"positions {_head(self.positions)}")
        parts.append(f"layers {_head(self.layers)}")
        if self.heads is not None:
            parts.append(f"heads {_head([f'{layer}-{head}' for layer, head in self.heads])}")
        if self.keys is not None:
            parts.append(f"keys {_head(self.keys)}")
        return f"Observed({', '.join(parts)})"

    def meta(self) -> dict[str, Any]:
        """Everything but the values, JSON-able; ``dtype`` and ``shape`` included."""
        return {
            "site": self.site,
            "shape": list(self.values.shape),
            "dtype": str(self.values.dtype).removeprefix("torch."),
            "positions": list(self.positions),
            "layers": list(self.layers),
            "heads": None if self.heads is None else [list(h) for h in self.heads],
            "keys": None if self.keys is None else list(self.keys),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with ``values`` as nested lists."""
        return {**self.meta(), "values": self.values.tolist()}

    @classmethod
    def of(cls, meta: Mapping[str, Any], values: torch.Tensor) -> Observed:
        """The inverse of :meth:`meta`; HookError if the values are not those that it describes."""
        dtype = str(values.dtype).removeprefix("torch.")
        if list(values.shape) != list(meta["shape"]) or dtype != meta["dtype"]:
            raise HookError(
                f"{meta['site']}: expected {meta['dtype']} {meta['shape']}, got {dtype} {list(values.shape)}"
            )
        heads = meta["heads"]
        return cls(
            site=meta["site"],
            values=values,
            positions=list(meta["positions"]),
            layers=list(meta["layers"]),
            heads=None if heads is None else [(int(layer), int(head)) for layer, head in heads],
            keys=None if meta["keys"] is None else list(meta["keys"]),
        )


class ById(Mapping[str, V]):
    """Values by qualified id ``program/id``; the bare id works while it is unique.

    Iteration and length are over qualified ids. ``errors`` maps qualified ids to a message: to access
    such an entry raises IncompleteCaptureError. An ambiguous bare id raises HookError, an unknown one
    KeyError; both name the candidates.
    """

    def __init__(
        self, items: Mapping[str, V] | None = None, errors: Mapping[str, str] | None = None, what: str = "id"
    ) -> None:
        self._items = dict(items or {})
        self._errors: Mapping[str, str] = {} if errors is None else errors
        self._what = what

    def resolve(self, id: str) -> str:
        """The qualified id that ``id`` stands for."""
        known = {**dict.fromkeys(self._items), **dict.fromkeys(self._errors)}
        if id in known:
            return id
        found = [k for k in known if k.rpartition("/")[2] == id]
        if len(found) > 1:
            raise HookError(f"{self._what} {id!r} is ambiguous: {', '.join(found)}")
        if not found:
            meant = did_you_mean(id, {part for k in known for part in (k, k.rpartition("/")[2])})
            raise KeyError(f"no {self._what} {id!r}; there are: {', '.join(known) or 'none'}{meant}")
        return found[0]

    def __getitem__(self, id: str) -> V:
        full = self.resolve(id)
        if full in self._errors:
            raise IncompleteCaptureError(f"{full}: {self._errors[full]}")
        return self._items[full]

    def __contains__(self, id: object) -> bool:
        """Whether :meth:`__getitem__` would return a value."""
        try:
            return isinstance(id, str) and self.resolve(id) not in self._errors
        except (KeyError, HookError):
            return False

    def __iter__(self) -> Iterator[str]:
        return (k for k in self._items if k not in self._errors)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class HookResult:
    """What the hook has to say about one request (or one of its ``n`` sequences).

    ``observed`` and ``scores`` are mappings by id; ``errors`` holds a message for every observation
    that could not be captured whole and every score that could not be computed; ``stopped_by`` is the
    reason of the rule that stopped the request, or None; ``tags`` are the reasons of rules that only
    tag; ``programs`` are ``(name, digest)`` of all programs that were applied, in order.
    """

    def __init__(
        self,
        observed: Mapping[str, Observed] | None = None,
        scores: Mapping[str, Score] | None = None,
        *,
        errors: Mapping[str, str] | None = None,
        stopped_by: str | None = None,
        tags: list[str] | None = None,
        programs: list[tuple[str, str]] | None = None,
        spans: Mapping[str, list[tuple[int, int]]] | None = None,
    ) -> None:
        self.errors: dict[str, str] = dict(errors or {})
        self.observed: ById[Observed] = ById(observed, self.errors, "observation")
        unscored = {k: message for k, message in self.errors.items() if k not in (observed or {})}
        self.scores: ById[Score] = ById(scores, unscored, "score")
        self.stopped_by = stopped_by
        self.tags: list[str] = list(tags or [])
        self.programs: list[tuple[str, str]] = [(name, digest) for name, digest in programs or []]
        self.spans: ById[list[tuple[int, int]]] = ById(spans, what="span")

    def _meta(self) -> dict[str, Any]:
        return {
            "scores": {k: s.to_dict() for k, s in self.scores.items()},
            "errors": self.errors,
            "stopped_by": self.stopped_by,
            "tags": self.tags,
            "programs": [list(p) for p in self.programs],
            "spans": {k: [list(r) for r in ranges] for k, ranges in self.spans.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; values as nested lists, so mind the size of large observations."""
        return {"observed": {k: o.to_dict() for k, o in self.observed.items()}, **self._meta()}

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: values in their own dtype, the rest as JSON metadata."""
        tensors = {k: o.values.detach().cpu().contiguous().clone() for k, o in self.observed.items()}
        meta = {"observed": {k: o.meta() for k, o in self.observed.items()}, **self._meta()}
        save_file(tensors, str(path), metadata={"format": FORMAT, "result": json.dumps(meta)})

    @classmethod
    def load(cls, path: str | Path) -> HookResult:
        """Read a file of :meth:`save`. No code from the file is run."""
        with safe_open(str(path), framework="pt") as f:
            head = f.metadata() or {}
            if head.get("format") != FORMAT:
                raise HookError(f"{path}: not a saved hook result (format {head.get('format')!r})")
            meta = json.loads(head["result"])
            observed = {k: Observed.of(m, f.get_tensor(k)) for k, m in meta["observed"].items()}
        return cls(
            observed,
            {k: Score(**s) for k, s in meta["scores"].items()},
            errors=meta["errors"],
            stopped_by=meta["stopped_by"],
            tags=meta["tags"],
            programs=[(name, digest) for name, digest in meta["programs"]],
            spans={k: [(a, b) for a, b in ranges] for k, ranges in meta.get("spans", {}).items()},
        )

    def __repr__(self) -> str:
        lines = [f"programs: {', '.join(name for name, _ in self.programs) or 'none'}"]
        if self.stopped_by is not None:
            lines.append(f"stopped by: {self.stopped_by}")
        if self.tags:
            lines.append(f"tags: {', '.join(self.tags)}")
        lines += _few("scores", [f"{k}: {s!r}" for k, s in self.scores.items()])
        lines += _few("observed", [f"{k}: {o!r}" for k, o in self.observed.items()])
        lines += _few("errors", [f"{k}: {message}" for k, message in self.errors.items()])
        return "HookResult(\n" + "\n".join(f"  {line}" for line in lines) + "\n)"


def _few(title: str, lines: list[str], most: int = 6) -> list[str]:
    if not lines:
        return []
    shown = [line if len(line) <= 160 else line[:157] + "..." for line in lines[:most]]
    more = [f"  ... {len(lines) - most} more"] if len(lines) > most else []
    return [f"{title}:", *(f"  {line}" for line in shown), *more]


def _head(values: list[Any], most: int = 4) -> str:
    if values and all(isinstance(v, int) for v in values) and len(values) > 1:
        first, last = values[0], values[-1]
        if values == list(range(first, last + 1)):
            return f"{first}-{last}"
    shown = ", ".join(str(v) for v in values[:most])
    return f"[{shown}, ... {len(values)} in all]" if len(values) > most else f"[{shown}]"
