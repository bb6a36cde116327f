"""Random requests, edits, gates, observations and schedules for one small model without an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_hook.runtime.buffers import SiteBank
from vllm_hook.runtime.collect import Record, collect, split
from vllm_hook.runtime.edit_bank import EditBank
from vllm_hook.runtime.edit_plan import EditPlanner
from vllm_hook.runtime.plan import BatchView, make_plan
from vllm_hook.runtime.requests import Lane, RequestState, Watch
from vllm_hook.runtime.transfer import Transfer
from vllm_hook.sites import Armed, ModelFacts, site

FACTS = ModelFacts("world", layers=2, heads=3, kv_heads=1, head_dim=7, hidden=20)
PLACES = [("z", 0), ("resid_post", 0), ("z", 1), ("resid_post", 1)]
LANES = [
    Lane("resid_post", (0, 1)),
    Lane("resid_post", (0, 1)),  # the same again: another observation of the same rows
    Lane("resid_post", (1,), None, ("norm",)),
    Lane("z", (1,), (0, 2)),
    Lane("z", (1,)),
]
Run = Callable[[Any, torch.Tensor, "torch.Tensor | None", Any, bool], None]


class Vectors:
    def vector(self, digest: str) -> torch.Tensor:
        g = torch.Generator().manual_seed(ord(digest))
        return torch.randn(7 if digest in "xyz" else 20, generator=g)


def ranges(r: random.Random) -> list[list[int]]:
    cuts = sorted(r.sample(range(14), r.choice([1, 2, 3, 4])))
    return [[cuts[i], cuts[i + 1] if i + 1 < len(cuts) else -1] for i in range(0, len(cuts), 2)]


def edits(r: random.Random) -> list[dict[str, Any]]:
    found = []
    for _ in range(r.randint(1, 3)):
        name = r.choice(["resid_post", "z", "resid_post"])
        head = name == "z"
        vectors = "xyz" if head else "abcd"
        atoms = [
            [
                r.choice([0, 0, 1]), r.choice(vectors), r.choice(vectors), r.choice([0, 1, 2]),
                r.random() < 0.3, r.randrange(3) if head else 0, r.uniform(-1, 1),
                r.choice([0.0, -1.0, 0.5]), r.uniform(-1, 1), 0.1,
            ]
            for _ in range(r.randint(1, 4))
        ]  # fmt: skip
        gate = None
        if r.random() < 0.6:
            by_row = r.random() < 0.5
            gate = {
                "site": "resid_post", "layer": 0, "kind": r.choice([0, 1, 2]), "u": "u", "c": 0.1,
                "bound": r.choice([0.0, 0.3, 4.0]), "above": r.random() < 0.5, "over": r.choice([0, 1, 2]),
                "per_row": by_row, "count": 3, "rows": [[0, -1]] if by_row else [[0, 3]], "filter": None,
            }  # fmt: skip
        filters = [{"token_ids": [1, 2], "sure": [[0, 2]]}] if r.random() < 0.2 else []
        found.append(
            {
                "site": name, "layers": r.choice([[0], [1], [0, 1]]), "rows": ranges(r), "filters": filters,
                "atoms": atoms, "gate": gate, "attend": None,
            }
        )  # fmt: skip
    return found


class World:
    """Requests with their state and one set of sites; ``run`` executes a site, ``transfer`` sends rows."""

    def __init__(self, run: Run, transfer: Transfer | None = None) -> None:
        self.run, self.transfer = run, transfer
        self.edits = EditBank(FACTS, 32, 8, 16, torch.device("cpu"))
        armed = Armed.of("resid_post", [0, 1], "all") | Armed.of("z", [1], "all")
        armed = armed | Armed.of_edits("resid_post", [0, 1]) | Armed.of_edits("z", [0, 1])
        self.bank = SiteBank(armed, FACTS, 8, 32, torch.float32, torch.device("cpu"), self.edits, 8)
        self.states: dict[str, RequestState] = {}
        self.planner = EditPlanner()

    def add(self, req_id: str, data: list[dict[str, Any]], watches: list[Watch]) -> None:
        self.states[req_id] = RequestState(
            tuple(watches), self.edits.admit(data, Vectors(), json.dumps(data))
        )

    def step(
        self, view: BatchView, hidden: dict[Any, torch.Tensor], residual: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[dict[Any, torch.Tensor], dict[str, list[Record]]]:
        """Hidden states after all sites, and the rows taken."""
        taps = make_plan(view, self.states)
        states = {r: s.edits for r, s in self.states.items() if s.edits is not None}
        plan = self.planner.plan(len(self.states), view, states, dict)
        if plan is not None:
            self.edits.load(plan, tokens)
        hidden = {place: h.clone() for place, h in hidden.items()}
        if taps is None and plan is None:
            return hidden, {}
        self.bank.load(taps, plan)
        latched = int(self.bank.area.live) > 1
        for place in PLACES:
            state = self.edits.state[site(place[0]).kind]
            rest = residual if place[0] == "resid_post" else None
            self.run(self.bank.sites[place], hidden[place], rest, state, latched)
        rows = split(collect(taps, self.bank, FACTS, None, self.transfer))[0] if taps is not None else {}
        if self.transfer is not None:
            self.transfer.take_back(self.transfer.lent())
        self.bank.area.rest()
        return hidden, rows


def on_cpu(part: Any, h: torch.Tensor, residual: torch.Tensor | None, state: Any, latched: bool) -> None:
    part(h, residual)


def play(
    seed: int, runs: list[Run], steps: int = 5, transfers: Sequence[Transfer | None] | None = None
) -> list[list[Any]]:
    """The same random schedule on several worlds; what each gave, step by step."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    worlds = [World(*own) for own in zip(runs, transfers or [None] * len(runs), strict=True)]
    first: dict[str, int] = {}
    for req_id in "pqs"[: r.randint(1, 3)]:
        data, picked = edits(r), r.sample(range(len(LANES)), r.randint(0, len(LANES)))
        rows = [tuple((a, None if b < 0 else b) for a, b in ranges(r)) for _ in picked]
        for world in worlds:
            world.add(req_id, data, [Watch(i, LANES[i], own) for i, own in zip(picked, rows, strict=True)])
        first[req_id] = 0
    told: list[list[Any]] = []
    for _ in range(steps):
        ids = list(first)
        r.shuffle(ids)
        n = [r.choice([1, 1, 4]) if first[i] < 8 else 1 for i in ids]
        starts = [0, *np.cumsum(n).tolist()]
        total = starts[-1] + r.choice([0, 2])  # padded rows
        hidden = {place: torch.randn(total, 20 if place[0] == "resid_post" else 21) for place in PLACES}
        residual, tokens = torch.randn(total, 20), torch.randint(0, 4, (total,))
        view = BatchView(ids, starts, [first[i] for i in ids])
        told.append([(view, *world.step(view, hidden, residual, tokens)) for world in worlds])
        for i, count in zip(ids, n, strict=True):
            first[i] += count
    return told
