"""Which sites a step uses (the launches of all others may be left out), against the tables themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from vllm_hook.errors import HookError
from vllm_hook.ops import edit as op
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.edit_plan import EditPlanner
from vllm_hook.runtime.plan import BatchView, Planner
from vllm_hook.runtime.requests import Lane, RequestState, Watch
from worlds import FACTS, LANES, PLACES, Vectors, edits, ranges

QUERIES = [("q", 0), ("q", 1)]
MASS = Lane("attention_mass", (1,), heads=((1, 0),))
ROWS = 48


def area(as_on_gpu: bool) -> StepArea:
    """``as_on_gpu``: tables stay on the device, and are not sent again where they are the same."""
    size = AreaSize(dict.fromkeys(PLACES + QUERIES, ROWS), frozenset(PLACES), 256, 256)
    made = StepArea(size, torch.device("cpu"))
    if as_on_gpu:
        made._on_device = True
        made._host = [torch.zeros_like(made.step) for _ in range(3)]
        made._sent = [None] * 3
    return made


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Traffic:
    """Requests that come, go, and decode on, with what each observes and changes."""

    def __init__(self, of: random.Random) -> None:
        self.of, self.bank = of, EditBank(FACTS, ROWS, 6, 16, torch.device("cpu"))
        self.taps, self.edits = Planner(), EditPlanner()
        self.states: dict[str, RequestState] = {}
        self.at: dict[str, int] = {}
        self.version = 0

    def _comes(self) -> None:
        of, own = self.of, None
        watches = [
            Watch(i, of.choice([*LANES, MASS]), tuple((a, None if b < 0 else b) for a, b in ranges(of)))
            for i in range(of.randint(0, 2))
        ]
        if of.random() < 0.7:
            data = edits(of)
            try:
                own = self.bank.admit(data, Vectors(), repr(data) if of.random() < 0.8 else None)
            except HookError:
                own = None
        self.version += 1
        name = f"r{self.version}"
        self.states[name] = RequestState(tuple(watches), own, prompt=of.randint(1, 6))
        self.at[name] = 0

    def _goes(self) -> None:
        self.version += 1
        name = self.of.choice([*self.states])
        del self.at[name]
        if (own := self.states.pop(name).edits) is not None:
            self.bank.release(own)

    def step(self) -> tuple[Any, Any]:
        of = self.of
        if not self.states or (len(self.states) < 4 and of.random() < 0.3):
            self._comes()
        elif of.random() < 0.08:
            self._goes()
        order = [name for name in self.states if of.random() < 0.95]
        starts = [0]
        for name in order:
            left = self.states[name].prompt - self.at[name]
            starts.append(starts[-1] + (min(left, of.randint(1, 4)) if left > 0 else 1))
        view = BatchView(order, starts, [self.at[name] for name in order])
        changed = {name: s.edits for name, s in self.states.items() if s.edits}
        decided = dict.fromkeys(self.states, 0)
        plan = self.edits.plan(self.version, view, changed, lambda: decided) if changed else None
        taps = self.taps.plan(self.version, view, self.states)
        for name, start, stop in zip(order, starts, starts[1:], strict=False):
            self.at[name] += stop - start
        return taps, plan


def busy(tables: StepArea) -> set[int]:
    """Sites whose headers have rows or conditions."""
    headers = tables.step[: op.HEADER_SIZE * len(tables.places)].view(-1, op.HEADER_SIZE)
    return {i for i, header in enumerate(headers.tolist()) if header[1] or header[3]}


@pytest.mark.parametrize("seed", range(20))
def test_all_that_have_something_to_do(seed: int) -> None:
    of = random.Random(seed)
    traffic, kept = Traffic(of), area(as_on_gpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        for _ in range(50):
            taps, plan = traffic.step()
            if taps is None and plan is None:
                kept.clear()
                assert kept.used() is None
                assert not busy(kept)
                continue
            kept.load(taps, plan)
            fresh = area(as_on_gpu=False)
            fresh.load(taps, plan)
            assert kept.used() == busy(kept) == busy(fresh)
            after = of.random()
            if after < 0.1:
                kept.clear()
                assert kept.used() is None
            elif after < 0.15:
                kept.probe()
                assert kept.used() is None, "all may act"
                kept.clear()
            elif after < 0.5:
                kept.rest()
