"""Rows of one observation of one request: what a step brings, and all of them, joined as they come.

A decode step brings one row, and joining hundreds of them behind the last token would hold up the
answer (16 MB, 64 steps of 32 layers: 8 ms). So each is put in its place while the engine computes
the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

#: Rows that are reserved at first, if a request can have that many. Memory is taken when it is written.
FIRST = 128


@dataclass(frozen=True)
class Record:
    """Rows of one observation (by index within its request) from one step. Host tensors.

    values: stream [layers, rows, d]; head [layers, rows, heads, d_head]; reduced [layers, rows], for an
    SAE [layers, rows, features];
    attention_mass [heads, rows, spans]; attention [heads, rows, keys].
    """

    index: int
    positions: np.ndarray
    values: Tensor
    alone: bool = False  # the memory of values is this observation's: rows that it has, or had room for

    def owned(self) -> Record:
        """The same in memory of its own, where it would keep much more than itself."""
        return self if self.alone else replace(self, values=_own(self.values), alone=True)


#: Rows of at most this many bytes stay together with those of other requests until a request ends.
SMALL_ROW = 512


@dataclass(frozen=True)
class Chunk:
    """Rows of many requests from one step, one for each of ``members`` (request, index of the observation),
    which leave the engine as one piece. positions: [members]; values: [members, layers or heads, ...] as in
    a record."""

    members: tuple[tuple[str, int], ...]
    positions: np.ndarray
    values: Tensor

    @property
    def small(self) -> bool:
        return self.values.nbytes <= len(self.members) * SMALL_ROW

    def records(self) -> Iterator[tuple[str, Record]]:
        """Each request and its row, in memory of its own."""
        for i, ((req_id, index), row) in enumerate(zip(self.members, self.values.unbind(), strict=True)):
            yield req_id, Record(index, self.positions[i : i + 1], row.unsqueeze(1).clone(), alone=True)


#: Steps that a block takes up. Its members keep few blocks, so none keeps the rows of others for long.
BLOCK_STEPS = 64
#: Members that leave a block one by one. If more do, most often all end together.
ONE_BY_ONE = 4


class Block:
    """Small chunks of successive steps with the same members: what a step costs does not grow with them.
    Closed once somebody took its rows: nothing is added then."""

    def __init__(self, members: tuple[tuple[str, int], ...]) -> None:
        self.members = members
        self.closed = False
        self._positions: list[np.ndarray] = []
        self._values: list[Tensor] = []
        self._whole: tuple[np.ndarray, Tensor] | None = None
        self._left = 0
        self._joined: tuple[list[Block], np.ndarray, list[Tensor | None]] | None = None

    def add(self, chunk: Chunk) -> None:
        self._positions.append(chunk.positions)
        self._values.append(chunk.values)
        self.closed = len(self._values) == BLOCK_STEPS

    def whole(self) -> tuple[np.ndarray, Tensor]:
        """Positions [members, steps] and rows [members, layers, steps, ...]."""
        self.closed = True
        if self._whole is None:
            rows = torch.stack(self._values).movedim(0, 2).contiguous()
            self._whole = np.stack(self._positions, axis=1), rows
            self._positions.clear()
            self._values.clear()
        return self._whole

    def record(self, i: int) -> Record:
        """The rows of the i-th member in memory of its own."""
        positions, rows = self.whole()
        return Record(self.members[i][1], positions[i], rows[i].clone(), alone=True)

    @staticmethod
    def last(parts: Sequence[tuple[Block, int]]) -> tuple[np.ndarray, Tensor]:
        """Positions and rows of a member that ends, in memory of its own, from all (block, place in it) that
        it is in."""
        *earlier, (block, i) = parts
        block._left += 1
        if block._left > ONE_BY_ONE and (found := block._of_all([b for b, _ in earlier])) is not None:
            positions, rows = found
            if (own := rows[i]) is not None:
                rows[i] = None
                return positions[i], own
        each = [(k, *b.whole()) for b, k in parts]
        positions = np.concatenate([p[k] for k, p, _ in each])
        return positions, torch.cat([rows[k] for k, _, rows in each], dim=1)

    def _of_all(self, earlier: list[Block]) -> tuple[np.ndarray, list[Tensor | None]] | None:
        """Positions [members, steps] and the rows of each member, those in ``earlier`` blocks first: made for
        all at once, if all are members there."""
        found = self._joined
        if found is None or found[0] != earlier:
            parts = []
            if any(len(block.members) < len(self.members) for block in earlier):
                return None
            for block in earlier:
                place = {member: k for k, member in enumerate(block.members)}
                if not all(member in place for member in self.members):
                    return None
                at = [place[member] for member in self.members]
                parts.append(tuple(of[at] for of in block.whole()))
            positions, rows = zip(*parts, self.whole(), strict=True)
            each: list[Tensor | None] = [own.clone() for own in torch.cat(rows, dim=2).unbind()]
            found = self._joined = earlier, np.concatenate(positions, axis=1), each
        return found[1:]


class Blocks:
    """The blocks that chunks are being added to."""

    def __init__(self) -> None:
        self._open: dict[tuple[tuple[str, int], ...], Block] = {}

    def add(self, chunks: Sequence[Chunk]) -> list[Block]:
        """Take the small chunks of a step. The blocks that are new."""
        before, self._open = self._open, {}
        new = []
        for chunk in chunks:
            # Several steps may come at once, where one had no output to travel with.
            block = self._open.pop(chunk.members, None) or before.pop(chunk.members, None)
            if block is None or block.closed:  # somebody took its rows
                block = Block(chunk.members)
                new.append(block)
            block.add(chunk)
            if not block.closed:
                self._open[chunk.members] = block
        for block in before.values():
            block.closed = True
        return new


def in_line(records: Sequence[Record | Chunk | str]) -> list[Record | Chunk | str]:
    """Records of one observation whose rows lie one behind the other in memory, as one."""
    found: list[Record | Chunk | str] = []
    for record in records:
        last = found[-1] if found else None
        if (
            isinstance(record, Record)
            and isinstance(last, Record)
            and last.index == record.index
            and _in_line(last.values, record.values)
        ):
            positions = np.concatenate([last.positions, record.positions])
            found[-1] = replace(last, positions=positions, values=_span([last.values, record.values]))
        else:
            found.append(record)
    return found


class Rows:
    """Parts [layers or heads, rows, ...] of one observation. ``most``: rows that it can come to, if none
    runs twice. Without ``same_width`` the last dimension differs from part to part (dense attention)."""

    def __init__(self, most: int, same_width: bool = True) -> None:
        self._most = most
        self._same_width = same_width
        self._positions: list[np.ndarray] = []
        self._parts: list[Tensor] = []
        self._whole: Tensor | None = None
        self._n = 0

    def add(self, record: Record) -> None:
        values = record.values
        self._positions.append(record.positions)
        if self._whole is None:
            if not self._parts or not self._same_width or _in_line(self._parts[-1], values):
                self._parts.append(record.owned().values)
                return
            for part in self._parts:
                self._put(part)
            self._parts.clear()
        self._put(values)

    def are_at(self, positions: np.ndarray) -> bool:
        """Whether all rows that came are those, in order."""
        return len(self._positions) == 1 and np.array_equal(self._positions[0], positions)

    def joined(self) -> tuple[np.ndarray, Tensor]:
        """Positions in the order in which they came, and their rows on dim 1."""
        positions = self._positions[0] if len(self._positions) == 1 else np.concatenate(self._positions)
        if self._whole is not None:
            return positions, self._whole[:, : self._n]
        parts = self._parts
        if not self._same_width:
            width = max(part.shape[-1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts]
            return positions, torch.cat(parts, dim=1)
        return positions, _own(_span(parts))

    def _put(self, part: Tensor) -> None:
        end = self._n + part.shape[1]
        if self._whole is None or end > self._whole.shape[1]:
            room = max(FIRST, 2 * end)
            room = min(room, self._most) if end <= self._most else room
            grown = _zeros((part.shape[0], room, *part.shape[2:]), part.dtype)
            if self._whole is not None:
                grown[:, : self._n] = self._whole[:, : self._n]
            self._whole = grown
        self._whole[:, self._n : end] = part
        self._n = end


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for rows that may never come. It is a part of what pickle writes, so it must not be what others
    left in memory. (NumPy's zeros, unlike torch's, cost nothing until they are written.)"""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def _own(values: Tensor) -> Tensor:
    """Rows of one request are a view of a step's rows of all requests: do not keep those alive, nor let them
    be written wherever the request's own are (``torch.save`` and pickle write all of the memory)."""
    return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values


def _in_line(first: Tensor, second: Tensor) -> bool:
    """Whether ``second`` lies in memory where ``first`` would go on along dim 1."""
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.stride() == second.stride()
        and first.storage_offset() + first.shape[1] * first.stride(1) == second.storage_offset()
    )


def _span(parts: Sequence[Tensor]) -> Tensor:
    """Parts that lie in line as one tensor."""
    first, rows = parts[0], sum(part.shape[1] for part in parts)
    if len(parts) == 1:
        return first
    return first.as_strided((first.shape[0], rows, *first.shape[2:]), first.stride(), first.storage_offset())
