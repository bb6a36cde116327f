"""EngineCore's side: which prefix-cache reads are cut back, and how rows reach the front end.

One instance wraps one scheduler; schedulers of engines that are not configured are not touched.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreOutput

from .. import wire
from ..runtime.requests import AHEAD_KEY, PAYLOAD_KEY, unpacked
from ..runtime.rows import Chunk, Record, in_line
from .runner import OUTPUT_KEY
from .settings import raw_config

#: How often edits of a digest failed to act: what was cached under it before is not found again.
_FAILURES: Counter[str] = Counter()
#: Attribute of a vLLM Request: prompt positions below it have been run before a preemption.
_SEEN = "_vllm_hook_seen"


class SchedulerHook:
    """Rows wait here between steps that return nothing (chunks of a prompt) and the next output."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        _key_blocks_by_edits()
        self._local = bool((raw_config(scheduler.vllm_config) or {}).get("local"))
        self._pending: dict[str, list[Any]] = {}
        self._chunks: list[Chunk] = []
        self._limit: int | None = None
        self._update = scheduler.update_from_output
        self._preempt = scheduler._preempt_request
        scheduler.update_from_output = self.update_from_output
        scheduler._preempt_request = self.preempt_request
        manager = scheduler.kv_cache_manager
        coordinator = manager.coordinator
        self._computed = manager.get_computed_blocks
        self._computed_for_connector = manager.get_computed_blocks_for_connector
        self._longest = coordinator.find_longest_cache_hit
        manager.get_computed_blocks = self._with_limit(self._computed)
        manager.get_computed_blocks_for_connector = self._with_limit(self._computed_for_connector)
        coordinator.find_longest_cache_hit = self._limited(self._longest)
        if hasattr(coordinator, "find_longest_cache_hit_per_group"):
            coordinator.find_longest_cache_hit_per_group = self._limited(
                coordinator.find_longest_cache_hit_per_group
            )

    # -- prefix cache -----------------------------------------------------------------------

    def _with_limit(self, lookup: Any) -> Any:
        def get_computed_blocks(request: Any) -> Any:
            self._limit = cache_limit(request)
            try:
                return lookup(request)
            finally:
                self._limit = None

        return get_computed_blocks

    def _limited(self, find: Any) -> Any:
        def find_longest_cache_hit(
            block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any
        ) -> Any:
            if self._limit is not None:
                max_cache_hit_length = min(max_cache_hit_length, self._limit)
            return find(block_hashes, max_cache_hit_length, *args, **kwargs)

        return find_longest_cache_hit

    def preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Rows run so far stay captured: after resumption they may come from the cache."""
        seen = max(getattr(request, _SEEN, 0), request.num_computed_tokens)
        setattr(request, _SEEN, seen)
        return self._preempt(request, *args, **kwargs)

    # -- results ----------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        records, chunks, errors = getattr(model_runner_output, OUTPUT_KEY, ({}, [], {}))
        self._chunks.extend(chunks)
        for req_id, rows in records.items():
            self._pending.setdefault(req_id, []).extend(rows)
        for req_id, message in errors.items():
            self._pending.setdefault(req_id, []).append(message)
            self._distrust(req_id, message)
        outputs = self._update(scheduler_output, model_runner_output)
        if self._pending or self._chunks:
            self._deliver(outputs)
        return outputs

    def _distrust(self, req_id: str, message: str) -> None:
        """An edit did not act, so blocks under its digest hold unedited keys: no later request may find
        them, and those that were keyed before this are told."""
        edit = _edit_of(self.scheduler.requests.get(req_id))
        if edit is None:
            return
        _FAILURES[edit["digest"]] += 1
        for other in self.scheduler.requests.values():
            if other.request_id != req_id and (_edit_of(other) or {}).get("digest") == edit["digest"]:
                self._pending.setdefault(other.request_id, []).append(
                    f"a request with the same edits failed: {message}"
                )

    def _deliver(self, outputs: dict[int, Any]) -> None:
        """Rows leave with the next output of their request, chunks with any, as there is one front end."""
        for per_client in outputs.values():
            ahead: list[EngineCoreOutput] = []
            for output in per_client.outputs:
                if not self._chunks and not self._pending:
                    break
                if output.pooling_output is not None:
                    continue
                rows = [*self._pending.pop(output.request_id, []), *self._chunks]
                self._chunks = []
                if rows:
                    ahead += self._put(output, rows)
            if ahead:
                per_client.outputs = [*ahead, *per_client.outputs]
        for req_id in [r for r in self._pending if r not in self.scheduler.requests]:
            del self._pending[req_id]
        for waiting in self._pending.values():  # may take long: do not keep what others had in the step
            waiting[:] = [r if isinstance(r, str) else r.owned() for r in waiting]

    def _put(self, output: Any, rows: list[Any]) -> list[EngineCoreOutput]:
        """Put rows on an output: what describes them among its transfer parameters, their bytes where a
        pooling model's result would be, which vLLM does not copy. An output holds one tensor, so all
        messages but the last go on outputs of ours, which are to be sent ahead of it."""
        messages: list[wire.Message] = [(rows, None)]
        if not self._local:
            messages = wire.pack([*map(_plain, in_line(rows))])
        *before, (meta, output.pooling_output) = messages
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), PAYLOAD_KEY: meta}
        return [
            EngineCoreOutput(
                output.request_id,
                [],
                pooling_output=payload,
                kv_transfer_params={PAYLOAD_KEY: described, AHEAD_KEY: True},
            )
            for described, payload in before
        ]


def _plain(rows: Record | Chunk | str) -> wire.Row | str:
    if isinstance(rows, str):
        return rows
    key = rows.index if isinstance(rows, Record) else rows.members
    return key, rows.positions, rows.values


def cache_limit(request: Any) -> int | None:
    """How many tokens may be read from the prefix cache: up to the first prompt position to be run."""
    params = request.sampling_params
    data = unpacked(params.extra_args) if params is not None else None
    if data is None or data["floor"] is None:
        return None
    seen: int = getattr(request, _SEEN, 0)
    if seen >= request.num_prompt_tokens:
        return None
    return max(int(data["floor"]), seen)


def edit_key(request: Any, end: int) -> tuple[str, str] | None:
    """What distinguishes a block that ends before position ``end``: the digest of the request's
    interventions, from the first position on whose keys and values they change."""
    edit = _edit_of(request)
    if edit is None or edit["first"] is None or end <= edit["first"]:
        return None
    failures = _FAILURES.get(edit["digest"], 0)
    return PAYLOAD_KEY, f"{edit['digest']}-{failures}" if failures else edit["digest"]


def _edit_of(request: Any) -> Any:
    """The interventions of a request as they travel, or None."""
    params = request.sampling_params if request is not None else None
    data = unpacked(params.extra_args) if params is not None else None
    return data["edit"] if data is not None else None


def _key_blocks_by_edits() -> None:
    """Put the digest into the hash of every affected block; hashes chain, so all later ones differ too.

    The function is module-level in vLLM, and imported by name in two places: all are replaced, once.
    Requests without interventions hash as before.
    """
    original = kv_cache_utils.generate_block_hash_extra_keys
    if getattr(original, "_vllm_hook", False):
        return

    def generate_block_hash_extra_keys(request: Any, start: int, end: int, mm_index: int) -> Any:
        keys, next_mm_index = original(request, start, end, mm_index)
        own = edit_key(request, end)
        return (keys if own is None else (*(keys or ()), own)), next_mm_index

    generate_block_hash_extra_keys._vllm_hook = True  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = generate_block_hash_extra_keys
    for name in ("vllm.v1.core.block_pool", "vllm.v1.simple_kv_offload.manager"):
        module = sys.modules.get(name)  # a module that is imported later finds the new one
        if module is not None:
            module.generate_block_hash_extra_keys = generate_block_hash_extra_keys  # type: ignore[attr-defined]


def hook_scheduler(scheduler: Any) -> None:
    """After ``Scheduler.__init__``; nothing happens on an engine that is not configured."""
    if raw_config(scheduler.vllm_config) is not None and not hasattr(scheduler, "_vllm_hook"):
        scheduler._vllm_hook = SchedulerHook(scheduler)
