"""What the worker knows of each observed request: which rows are asked for, and which it has.

The front end resolves a request's programs to plain data (:func:`payload`), which travels inside
the request as bytes (:func:`packed`); the worker reads it back (:func:`read_payload`) and keeps it until
the request ends.
Preemption does not end a request: rows that were taken stay taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from ..program.resolve import ResolvedObservation

if TYPE_CHECKING:
    from .edit_bank import EditBank
    from .edit_state import EditState
    from .edits import EditRequest
    from .plan import BatchView

Ranges = tuple[tuple[int, "int | None"], ...]

#: The key of ``SamplingParams.extra_args`` under which the resolved form travels.
PAYLOAD_KEY = "vllm_hook"
#: Marks an output of the engine that only carries rows: it is none of vLLM's own.
AHEAD_KEY = f"{PAYLOAD_KEY}_ahead"


@dataclass(frozen=True)
class Lane:
    """What is the same for all requests that use one observation: they are read in one go.

    ``reduce`` is None, ``("norm",)``, or one of probe, projection, cosine and sae with the key under
    which its tensors were distributed to the workers.
    """

    site: str
    layers: tuple[int, ...]
    heads: tuple[Any, ...] | None = None
    reduce: tuple[str, ...] | None = None
    dtype: str | None = None

    def __hash__(self) -> int:
        """Worked out once: each step looks lanes up, once for each of their layers."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.site, self.layers, self.heads, self.reduce, self.dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Without its hash, which is another in another process."""
        return Lane, (self.site, self.layers, self.heads, self.reduce, self.dtype)

    @cached_property
    def tap_site(self) -> str:
        """Where rows are taken: attention is computed from queries and the KV cache."""
        return "q" if self.site.startswith("attention") else self.site

    @cached_property
    def taps(self) -> tuple[tuple[str, int], ...]:
        """Its sites, layer by layer."""
        return tuple((self.tap_site, layer) for layer in self.layers)


@dataclass(frozen=True)
class Watch:
    """One observation of one request. ``rows`` are half-open ranges of absolute positions, None is open."""

    index: int
    lane: Lane
    rows: Ranges
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    reducer: Mapping[str, Tensor] | None = None


@dataclass
class RequestState:
    """``skip_below``: positions under it were taken before a preemption; ``decided_below``: conditions
    were read there, of the prompt's last row too, which no draft can have stood in for. ``high``: end
    of the rows run. ``prompt``: its length."""

    watches: tuple[Watch, ...]
    edits: EditState | None = None
    skip_below: int = 0
    decided_below: int = 0
    high: int = 0
    prompt: int = 0
    end: float = field(init=False)

    def __post_init__(self) -> None:
        """``end``: no row from there on is watched."""
        ends = [b for watch in self.watches for _, b in watch.rows]
        self.end = max((inf if b is None else b for b in ends), default=0)


@dataclass
class Tracker:
    """All observed requests of a worker by internal id. ``tensors`` by key, see :class:`Lane`."""

    bank: EditBank
    tensors: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[str, RequestState] = field(default_factory=dict)
    version: int = 0  # counts what came, went and came back
    _edits: tuple[int, dict[str, EditState], dict[str, EditState]] | None = None

    def add(self, req_id: str, extra_args: Mapping[str, Any] | None, known_tokens: int) -> None:
        """A request enters the batch, for the first time or again after preemption."""
        self.version += 1
        if req_id in self.states:
            self.resume(req_id, known_tokens)
            return
        data = unpacked(extra_args)
        if data is None or not (data["watch"] or data["edit"]):
            return
        watches = read_payload(data, self.tensors)  # before slots are taken: it can fail
        edit = data["edit"]
        edits = self.bank.admit(edit["edits"], self, edit["digest"]) if edit else None
        self.states[req_id] = RequestState(watches, edits, prompt=data["prompt"])

    def resume(self, req_id: str, known_tokens: int) -> None:
        """Rows taken before stay valid while their token is known. The last known token was sampled and
        not fed yet: a row taken there belongs to a rejected draft. Later ones may be sampled anew."""
        state = self.states.get(req_id)
        self.version += 1
        if state is not None:
            state.skip_below = min(state.high, max(known_tokens - 1, 0))
            state.decided_below = min(state.high, max(known_tokens - 1, state.prompt))

    def edits(self) -> dict[str, EditState]:
        """Requests that edit."""
        return self._edited()[1]

    def edits_that_may_need_python(self) -> dict[str, EditState]:
        """Those of them whose steps cannot all run as captured graphs."""
        return self._edited()[2]

    def _edited(self) -> tuple[int, dict[str, EditState], dict[str, EditState]]:
        if self._edits is None or self._edits[0] != self.version:
            found = {r: s.edits for r, s in self.states.items() if s.edits is not None}
            few = {r: edits for r, edits in found.items() if edits.may_need_python}
            self._edits = self.version, found, few
        return self._edits

    def decided(self) -> dict[str, int]:
        """Positions below which the conditions of each request were evaluated before a preemption."""
        return {r: s.decided_below for r, s in self.states.items()}

    def is_over(self, view: BatchView) -> bool:
        """Whether all requests run in a step, and it and later ones have nothing to take or change, unless a
        request comes, goes or comes back."""
        at = dict(zip(view.req_ids, view.first, strict=True))
        return all(s.edits is None and at.get(r, -1) >= s.end for r, s in self.states.items())

    def finish(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            state = self.states.pop(req_id, None)
            self.version += state is not None
            if state is not None and state.edits is not None:
                self.bank.release(state.edits)

    def vector(self, digest: str) -> Tensor:
        """A vector by the digest of its content, from any program that brought it."""
        return next(iter(self.vectors[digest].values()))

    def set_tensors(self, program: str, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the tensors of a program: ``read:<reference>`` for observations, ``edit:<digest>``
        the vectors of edits."""
        for reference, parts in tensors.items():
            kind, _, name = reference.partition(":")
            if kind == "edit":
                self.vectors.setdefault(name, {})[program] = parts["vector"]
            else:
                if (vector := parts.get("vector")) is not None:  # what projections and cosines read each step
                    parts = {**parts, "unit": vector / vector.norm()}
                self.tensors[f"{program}/{name}"] = parts

    def drop_tensors(self, program: str) -> None:
        """Forget a program's tensors. Running requests keep what they have."""
        for name in [name for name in self.tensors if name.startswith(f"{program}/")]:
            del self.tensors[name]
        for digest, owners in list(self.vectors.items()):
            owners.pop(program, None)
            if not owners:
                del self.vectors[digest]


def payload(
    observations: Sequence[ResolvedObservation],
    lanes: Sequence[Lane],
    prompt_len: int,
    edits: EditRequest | None = None,
) -> dict[str, Any]:
    """Plain data of one request: what the worker takes and changes, and the first prompt position it
    needs to run."""
    watch = []
    first = prompt_len
    for observation, lane in zip(observations, lanes, strict=True):
        rows = worker_rows(observation, prompt_len)
        first = min([first, *(a for a, _ in rows)])
        watch.append(
            {
                "site": lane.site,
                "layers": list(lane.layers),
                "heads": None
                if lane.heads is None
                else [list(h) if isinstance(h, tuple) else h for h in lane.heads],
                "reduce": None if lane.reduce is None else list(lane.reduce),
                "dtype": lane.dtype,
                "rows": [[a, -1 if b is None else b] for a, b in rows],
                "spans": [[list(r) for r in ranges] for _, ranges in observation.keys],
            }
        )
    edit = None
    if edits is not None:
        edit = {"edits": edits.data, "digest": edits.digest, "first": edits.first}
        first = min(first, prompt_len if edits.floor is None else edits.floor)
    floor = first if first < prompt_len else None
    return {"watch": watch, "floor": floor, "edit": edit, "prompt": prompt_len}


def packed(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The form in which :func:`payload` travels. The engine decodes requests in Python while it launches a
    step, and nested data takes it 11 us more than bytes."""
    return {"packed": msgspec.msgpack.encode(data)}


def unpacked(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What :func:`payload` made, from the sampling parameters of a request; None if it uses no program.
    Shared by requests that are alike: to be read only."""
    data = (extra_args or {}).get(PAYLOAD_KEY)
    return _unpack(data["packed"]) if data else None


@lru_cache(maxsize=1024)
def _unpack(data: bytes) -> Mapping[str, Any]:
    found = msgspec.msgpack.decode(data)
    return {**found, "watch": [_read_watch(index, w) for index, w in enumerate(found["watch"])]}


def worker_rows(observation: ResolvedObservation, prompt_len: int) -> Ranges:
    """Rows to take on the device. Which generated token stands where is known only afterwards, so
    a selector by token id takes all of them and the front end filters."""
    if not observation.token_ids:
        return observation.rows
    prompt = tuple((a, min(b or prompt_len, prompt_len)) for a, b in observation.rows if a < prompt_len)
    return (*prompt, (prompt_len, None))


#: Requests that use one observation have one lane, which is then found by identity.
_lane = lru_cache(maxsize=1024)(Lane)


def _read_watch(index: int, data: Mapping[str, Any]) -> Watch:
    heads = data["heads"]
    if heads is not None:
        heads = tuple(tuple(h) if isinstance(h, list) else h for h in heads)
    reduce = None if data["reduce"] is None else tuple(data["reduce"])
    return Watch(
        index,
        _lane(data["site"], tuple(data["layers"]), heads, reduce, data["dtype"]),
        rows=tuple((a, None if b < 0 else b) for a, b in data["rows"]),
        spans=tuple(tuple((a, b) for a, b in ranges) for ranges in data["spans"]),
    )


def read_payload(data: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> tuple[Watch, ...]:
    """The watches of one request, whose payload was :func:`unpacked`: objects of its own, with what they
    read. KeyError: the tensors of a reduction did not come."""
    return tuple([Watch(w.index, w.lane, w.rows, w.spans, _reducer(w.lane, tensors)) for w in data["watch"]])


def _reducer(lane: Lane, tensors: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor] | None:
    return tensors[lane.reduce[1]] if lane.reduce is not None and len(lane.reduce) > 1 else None
