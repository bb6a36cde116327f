"""Measuring on vLLM: observation programs, edits, one engine; see :mod:`.backend`.

The engine runs eagerly (a build is over before a compilation would pay) and without a prefix cache,
so that what a chunk of prompts gives does not depend on what ran before.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..llm import HookLLM, greedy
from ._torchvision import hide_broken_torchvision
from .backend import Edit, Needs, Rows
from .model import Model
from .prompts import Prompt
from .sweep import PENALTY, Answer

STATES, MASSES, EDIT, SCORE = "build-states", "build-masses", "build-edit", "build-score"
FROM_ONE = {"range": [1, None]}
#: Rows that a step reserves at an armed site.
STEP_TOKENS = 2048


class VllmBackend:
    """HookLLM with what ``needs`` asks for."""

    def __init__(self, model: Model, needs: Needs, dtype: str = "auto") -> None:
        hide_broken_torchvision()
        layers = list(range(model.facts.layers))
        programs: list[dict[str, Any]] = []
        arm = {}
        if needs.states is not None:
            positions = "last_prompt" if needs.states == "last" else FROM_ONE
            seen = {"site": "resid_post", "layers": layers, "positions": positions, "dtype": "float32"}
            programs.append({"schema": 1, "name": STATES, "observe": {"h": seen}})
        if needs.masses:
            mass = {"site": "attention_mass", "layers": layers, "rows": {"span": "rows"}, "keys": ["keys"]}
            # Every request gives both spans itself.
            spans = {"rows": {"tokens": [0, 1]}, "keys": {"between": ["[", "]"], "each": True}}
            programs.append({"schema": 1, "name": MASSES, "spans": spans, "observe": {"m": mass}})
        if needs.edits:
            arm = {"resid_post": {"layers": "all", "rows": "last"}}
        self.facts = model.facts
        # An engine that runs in this process already shares its process groups with ours.
        self.alone = not torch.distributed.is_initialized()
        self.llm = HookLLM(
            model.path,
            programs=programs,
            arm=arm,
            dtype=dtype,
            max_model_len=min(needs.longest + 1, model.length),
            max_num_seqs=128,
            max_num_batched_tokens=STEP_TOKENS,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )

    def states(self, prompts: Sequence[Prompt], rows: Rows) -> list[Tensor]:
        outputs = _run(self.llm, prompts, greedy(1), STATES)
        return [o.hook.observed["h"].values.float().mean(1) for o in outputs]

    def masses(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        hooks = [{"use": [MASSES], "spans": _spans(prompt)} for prompt in prompts]
        outputs = _run(self.llm, prompts, greedy(1), hooks)
        shape = self.facts.layers, self.facts.heads, -1
        return [o.hook.observed["m"].values.float().mean(1).reshape(shape) for o in outputs]

    def answers(self, prompts: Sequence[Prompt], edit: Edit | None, tokens: int) -> list[Answer]:
        ids = [list(p.ids) for p in prompts]
        if edit is None:
            return greedy_answers(self.llm, ids, False, tokens)
        with tempfile.TemporaryDirectory() as folder:
            first: Any = "last_prompt" if edit.method == "add" else FROM_ONE
            self.llm.load_program(_edit_program(EDIT, edit, [first, "generated"], folder))
            try:
                return greedy_answers(self.llm, ids, EDIT, tokens)
            finally:
                self.llm.unload_program(EDIT)

    def likelihood(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], edit: Edit | None
    ) -> list[float]:
        ids = [list(p.ids) for p in prompts]
        if edit is None:
            return [-n for n in negative_log_likelihoods(self.llm, ids, answers)]
        hooks = [
            {"use": [SCORE], "spans": {"answer": [edit.start(len(p)), len(p) + len(answer)]}}
            for p, answer in zip(prompts, answers, strict=True)
        ]
        with tempfile.TemporaryDirectory() as folder:
            program = _edit_program(SCORE, edit, [{"span": "answer"}], folder)
            self.llm.load_program({**program, "spans": {"answer": {"tokens": [0, 1]}}})
            try:
                return [-n for n in negative_log_likelihoods(self.llm, ids, answers, hooks)]
            finally:
                self.llm.unload_program(SCORE)

    def close(self) -> None:
        """Shut the engine down, unless that would end the process groups of another engine."""
        if self.alone:
            self.llm.llm_engine.engine_core.shutdown()


def _edit_program(name: str, edit: Edit, positions: list[Any], folder: str) -> dict[str, Any]:
    file = Path(folder) / "edit.safetensors"
    save_file({"vector": edit.vector.contiguous()}, file)
    value = {"add": "strength", "clamp": "target"}[edit.method]
    body: dict[str, Any] = {
        "site": "resid_post",
        "layers": [edit.layer],
        "method": edit.method,
        "vector": str(file),
    }
    body |= {value: float(edit.value), "positions": positions}
    return {"schema": 1, "name": name, "intervene": {"edit": body}}


def _spans(prompt: Prompt) -> dict[str, list[int]]:
    assert prompt.rows is not None
    keys = {f"keys[{i}]": list(pair) for i, pair in enumerate(prompt.keys)}
    return {"rows": list(prompt.rows), **keys}


def _run(llm: Any, prompts: Sequence[Prompt], params: Any, hook: Any) -> list[Any]:
    batch = [{"prompt_token_ids": list(p.ids)} for p in prompts]
    outputs: list[Any] = llm.generate(batch, params, hook=hook, use_tqdm=False)
    return outputs


def greedy_answers(llm: Any, prompts: Sequence[list[int]], hook: Any, tokens: int) -> list[Answer]:
    """Greedy answers with ``hook`` as HookLLM takes it, and their likelihood under the plain model."""
    params = greedy(tokens, repetition_penalty=PENALTY)
    batch = [{"prompt_token_ids": ids} for ids in prompts]
    made = [o.outputs[0] for o in llm.generate(batch, params, hook=hook, use_tqdm=False)]
    nlls = negative_log_likelihoods(llm, prompts, [o.token_ids for o in made])
    return [
        Answer(o.text, tuple(o.token_ids), o.finish_reason == "stop", nll)
        for o, nll in zip(made, nlls, strict=True)
    ]


def negative_log_likelihoods(
    llm: Any,
    prompts: Sequence[list[int]],
    answers: Sequence[Sequence[int]],
    hooks: Sequence[Any] | None = None,
) -> list[float]:
    """Mean over the tokens of each answer, in nats. Without ``hooks`` each distinct prompt with answer
    runs once."""
    wholes = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
    distinct = list(dict.fromkeys(wholes)) if hooks is None else wholes
    params = greedy(1, prompt_logprobs=0)
    batch = [{"prompt_token_ids": list(ids)} for ids in distinct]
    hook: Any = False if hooks is None else list(hooks)
    outputs = llm.generate(batch, params, hook=hook, use_tqdm=False)
    rows_of = (
        [dict(zip(distinct, outputs, strict=True))[whole] for whole in wholes] if hooks is None else outputs
    )
    values = []
    for prompt, whole, output in zip(prompts, wholes, rows_of, strict=True):
        rows = output.prompt_logprobs
        logprobs = [rows[i][whole[i]].logprob for i in range(len(prompt), len(whole))]
        values.append(-statistics.fmean(logprobs))
    return values
