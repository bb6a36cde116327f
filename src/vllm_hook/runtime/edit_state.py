"""What the interventions of a request are to the worker: entries of the edit kernel with slots filled in,
where and in which rows they hold, conditions with their flags.

Vectors and gate flags live in slots; a slot of a vector is shared by content and counted, a flag
belongs to one condition of one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ..errors import CapacityError
from ..ops import edit as op
from .requests import Ranges

Place = tuple[str, int]


@dataclass(frozen=True)
class Gate:
    """A condition of one request: where it is read, at which rows, and the flag that it writes."""

    place: Place
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    rows: Ranges
    per_row: bool
    flag: int


@dataclass(frozen=True)
class Attend:
    """``method: attend`` of one request: heads by layer, key ranges, a weight or a mass."""

    heads: Mapping[int, tuple[int, ...]]
    span: tuple[tuple[int, int], ...]
    weight: float | None
    mass: float | None
    rows: Ranges
    gate: Gate | None
    token_flag: int


@dataclass(frozen=True)
class Filter:
    """Lets through the positions in ``sure`` and those whose token is listed."""

    token_ids: tuple[int, ...]
    sure: Ranges


@dataclass(frozen=True)
class RowEdit:
    """One intervention of one request. ``entries`` are (ints, floats) of the kernel with slots filled in;
    with ``filters``, ``token_flag`` says row by row which rows pass all of them."""

    places: tuple[Place, ...]
    rows: Ranges
    entries: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
    gate: Gate | None
    filters: tuple[Filter, ...]
    token_flag: int


class Slots:
    """``capacity`` numbered slots for keys, shared and counted. With ``keep``, a slot that nobody uses any
    more stays what it was until it is needed for another key: what it holds need not be filled in again."""

    def __init__(self, capacity: int, what: str, keep: bool = False) -> None:
        self.capacity, self.what, self._keep = capacity, what, keep
        self._free: dict[int, Any] = dict.fromkeys(range(capacity))  # with their former keys, oldest first
        self._slot: dict[Any, int] = {}
        self._uses: Counter[Any] = Counter()

    def take(self, key: Any) -> tuple[int, bool]:
        """The slot of a key, and whether it has to be filled."""
        new = key not in self._slot
        if new:
            if not self._free:
                raise CapacityError(f"all {self.capacity} slots for {self.what} are in use")
            slot = next(iter(self._free))
            self._slot.pop(self._free[slot], None)
            self._slot[key] = slot
        self._free.pop(self._slot[key], None)
        self._uses[key] += 1
        return self._slot[key], new

    def give_back(self, key: Any, keep: bool = True) -> None:
        """One use less. Not ``keep``: the slot may not hold what it should."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            keep = keep and self._keep
            slot = self._slot[key] if keep else self._slot.pop(key)
            self._free[slot] = key if keep else None

    def find(self, key: Any) -> int | None:
        """The slot that holds what belongs to a key, in use or not."""
        return self._slot.get(key)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)


@dataclass(eq=False)
class EditState:
    """The interventions of one request and the slots it holds (``taken``: whose, key, number); or of several
    that intervene alike (``digest``), if nothing of it is a request's own: ``users`` of them."""

    edits: tuple[RowEdit, ...]
    groups: tuple[tuple[tuple[Place, ...], tuple[int, ...]], ...]
    taken: tuple[tuple[Slots, Any, int], ...]
    attends: tuple[Attend, ...] = ()
    digest: str | None = None
    users: int = 1
    gates: tuple[Gate, ...] = field(init=False)
    filtered: tuple[RowEdit, ...] = field(init=False)
    steady_from: int = field(init=False)
    steady: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        """What every step asks, worked out once. From ``steady_from`` on no range begins or ends any more:
        ``steady`` are the edits that then hold, by group."""
        own = {(e.gate.per_row, e.gate.flag): e.gate for e in self.edits if e.gate is not None}
        self.gates = tuple(own.values())
        self.filtered = tuple(e for e in self.edits if e.filters)
        ranges = [r for e in self.edits for r in e.rows] + [r for gate in self.gates for r in gate.rows]
        ends = [x for r in ranges for x in r if x is not None]
        self.steady_from = max(ends, default=0)
        self.steady = tuple(
            tuple(k for k, m in enumerate(members) if any(b is None for _, b in self.edits[m].rows))
            for _, members in self.groups
        )

    @cached_property
    def may_need_python(self) -> bool:
        """Whether there are steps of it in which Python has to run while the model does: it steers attention,
        or has a condition that is decided once."""
        return bool(self.attends) or any(not gate.per_row for gate in self.gates)

    @property
    def has_own(self) -> bool:
        """Whether it has flags, which belong to one request."""
        return bool(self.gates or self.filtered or self.attends)

    def is_steady(self, position: int) -> bool:
        """Whether all rows from ``position`` on are treated alike, whatever their tokens."""
        return not self.filtered and not self.attends and position >= self.steady_from

    def decides_from(self, position: int) -> bool:
        """Whether a condition that is decided once may read rows from ``position`` on."""
        return any(b is None or b > position for gate in self.gates if not gate.per_row for _, b in gate.rows)


class Places(tuple[Place, ...]):
    """Places that edits have in common; hashed once, since each step sorts its rows by them."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


#: Requests that intervene at the same places have one tuple of them, which is then found by identity.
_places = lru_cache(maxsize=1024)(Places)


def group_places(edits: Sequence[RowEdit]) -> tuple[tuple[tuple[Place, ...], tuple[int, ...]], ...]:
    """(places, edits that meet there in order) for one request: places with the same edits together."""
    at: dict[Place, list[int]] = {}
    for i, edit in enumerate(edits):
        for place in edit.places:
            at.setdefault(place, []).append(i)
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place, members in at.items():
        groups.setdefault(tuple(members), []).append(place)
    return tuple((_places(tuple(places)), members) for members, places in groups.items())


def initial_flag(over: int) -> float:
    """A latched flag before its first row: ``all`` starts true, the others false."""
    return 1.0 if over == op.ALL else 0.0
