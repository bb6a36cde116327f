"""Sites: the places in a decoder-only transformer that can be observed or changed.

A site is a name, a kind and the shape of one row (one token position). Layers are 0-based decoder
blocks. ``embed`` and ``final_norm`` exist once in a model; they count as layer 0 and as the last.
This module knows nothing of vLLM, tensors or programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import SiteError
from .suggest import unknown

Kind = Literal["stream", "head", "attention"]
Rows = Literal["last", "all"]


@dataclass(frozen=True)
class Site:
    """``layered`` is False for sites that exist once in a model; ``what`` is a line of help."""

    name: str
    kind: Kind
    what: str
    layered: bool = True


SITES: dict[str, Site] = {
    s.name: s
    for s in (
        Site("embed", "stream", "token embedding entering block 0", layered=False),
        Site("resid_pre", "stream", "residual stream before the block"),
        Site("resid_mid", "stream", "residual stream between attention and MLP"),
        Site("resid_post", "stream", "residual stream after the block (hidden + residual)"),
        Site("attn_out", "stream", "what attention adds to the stream"),
        Site("mlp_out", "stream", "what the MLP adds to the stream"),
        Site("q", "head", "queries after RoPE"),
        Site("k", "head", "keys after RoPE"),
        Site("v", "head", "values"),
        Site("z", "head", "attention output per head, before the output projection"),
        Site("final_norm", "stream", "after the last norm, before the unembedding", layered=False),
        Site("attention_mass", "attention", "attention of query rows summed over key spans"),
        Site("attention", "attention", "attention probabilities of query rows over all keys"),
    )
}


def site(name: str) -> Site:
    """Look a site up by name; :class:`SiteError` names the known ones."""
    try:
        return SITES[name]
    except KeyError:
        raise SiteError(unknown("site", name, SITES)) from None


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model that programs depend on."""

    id: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int

    def site_layers(self, name: str) -> tuple[int, ...]:
        """All layers at which a site exists."""
        if name == "embed":
            return (0,)
        if name == "final_norm":
            return (self.layers - 1,)
        return tuple(range(self.layers))

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of a stream or head site."""
        s = site(name)
        if s.kind == "stream":
            return (self.hidden,)
        if s.kind == "head":
            return (self.kv_heads if name in ("k", "v") else self.heads, self.head_dim)
        raise SiteError(f"site {name!r} has no fixed row shape")


@dataclass(frozen=True)
class Armed:
    """Which sites of which layers an engine can serve, and how many rows a step of each.

    ``last`` holds the rows that a sequence has in a decode step and so serves the selectors
    ``last_prompt`` and ``generated``; ``all`` holds every scheduled token. The two attention
    sites are armed together under ``attention``. ``edits``: where rows can be changed, and where
    conditions can be read.
    """

    rows: Mapping[tuple[str, int], Rows] = field(default_factory=dict)
    edits: frozenset[tuple[str, int]] = frozenset()

    @staticmethod
    def canonical(name: str) -> str:
        return "attention" if site(name).kind == "attention" else name

    @classmethod
    def of(cls, name: str, layers: Iterable[int], rows: Rows) -> Armed:
        return cls({(cls.canonical(name), layer): rows for layer in layers})

    @classmethod
    def of_edits(cls, name: str, layers: Iterable[int]) -> Armed:
        return cls(edits=frozenset((cls.canonical(name), layer) for layer in layers))

    def __or__(self, other: Armed) -> Armed:
        merged = dict(self.rows)
        for key, rows in other.rows.items():
            merged[key] = "all" if "all" in (rows, merged.get(key)) else rows
        return Armed(merged, self.edits | other.edits)

    def __bool__(self) -> bool:
        return bool(self.rows or self.edits)

    def __iter__(self) -> Iterator[tuple[str, int, Rows]]:
        for (name, layer), rows in sorted(self.rows.items()):
            yield name, layer, rows

    def edit_places(self) -> frozenset[tuple[str, int]]:
        """Where rows are changed: attention is steered behind its kernel, by other means."""
        return frozenset(place for place in self.edits if place[0] != "attention")

    def missing(self, need: Armed) -> Armed:
        """What ``need`` asks for and this does not hold."""
        return Armed(
            {
                key: rows
                for key, rows in need.rows.items()
                if key not in self.rows or (rows == "all" and self.rows[key] == "last")
            },
            need.edits - self.edits,
        )

    def to_json(self) -> list[list[Any]]:
        """Canonical JSON form: sorted ``[site, layer, rows]``; for ``edits``, rows is ``edit``."""
        return [list(t) for t in self] + [[name, layer, "edit"] for name, layer in sorted(self.edits)]

    @classmethod
    def from_json(cls, data: Iterable[Iterable[Any]]) -> Armed:
        triples = [(name, int(layer), rows) for name, layer, rows in data]
        return cls(
            {(name, layer): rows for name, layer, rows in triples if rows != "edit"},
            frozenset((name, layer) for name, layer, rows in triples if rows == "edit"),
        )

    def describe(self) -> str:
        """Human-readable, one site a clause: ``resid_post layers 0-29 (last), q layer 3 (all)``."""
        groups: dict[tuple[str, str], list[int]] = {}
        for name, layer, rows in self.to_json():
            groups.setdefault((name, rows), []).append(layer)
        return (
            ", ".join(f"{name} {_ranges(layers)} ({rows})" for (name, rows), layers in groups.items())
            or "nothing"
        )


def _ranges(layers: list[int]) -> str:
    parts: list[str] = []
    start = prev = layers[0]
    for layer in [*layers[1:], None]:
        if layer is not None and layer == prev + 1:
            prev = layer
            continue
        parts.append(str(start) if start == prev else f"{start}-{prev}")
        if layer is not None:
            start = prev = layer
    return f"{'layer' if len(layers) == 1 else 'layers'} {','.join(parts)}"
