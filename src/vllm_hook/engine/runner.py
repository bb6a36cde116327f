"""The worker's side: arms the model, plans each step, collects its rows. One per model runner.

``runner_v1`` and ``runner_v2`` say how each of vLLM's two model runners describes a batch; all
else is here. A failure of ours never reaches the engine: the step's observed requests are told,
and the sites fall idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from safetensors.torch import load as load_safetensors
from torch import nn
from vllm.v1.outputs import AsyncModelRunnerOutput

from ..errors import UnsupportedError
from ..ops.attention import PagedKeys
from ..runtime.buffers import SiteBank
from ..runtime.collect import KeyReader, Taken, collect, split
from ..runtime.edit_bank import EditBank
from ..runtime.edit_plan import EditPlanner
from ..runtime.edits import ORDER
from ..runtime.plan import BatchView, Planner, StepPlan
from ..runtime.requests import Tracker
from ..runtime.rows import Chunk, Record
from ..runtime.shard import Shard
from ..runtime.transfer import Transfer
from . import graphs, kv_cache
from .attend import steer_attention
from .models import decoder
from .settings import Settings

logger = logging.getLogger(__name__)

#: Attribute of ModelRunnerOutput that carries a step's rows to the scheduler.
OUTPUT_KEY = "vllm_hook"

Blob = bytes
#: What a step yields: rows by request id, small rows of many requests together, and requests whose rows
#: were lost with the reason.
StepRows = tuple[dict[str, list[Record]], list[Chunk], dict[str, str]]


class Adapter(Protocol):
    """How one of vLLM's model runners describes its batch."""

    def block_table(self, group: int) -> torch.Tensor:
        """Block tables of the current step's requests on the device, in pages of the attention kernel."""
        ...

    def block_row(self, group: int, batch_index: int) -> Any:
        """Block table row of a request of the current step, in pages of the attention kernel."""
        ...

    def input_ids(self) -> torch.Tensor:
        """Tokens of the current step's rows, on the device."""
        ...

    def let_go(self) -> None:
        """Keep nothing on the device alive."""
        ...


class RunnerHook:
    """State of one model runner. ``adapter`` is set by the module that installs it."""

    adapter: Adapter

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.device = device
        self.shard = shard or Shard()
        self.attention = decoder.attention_layers(model)
        for name, layer, rows in settings.armed.to_json():
            if name == "attention":
                kv_cache.check_readable(self.attention[layer])
                if rows == "edit":
                    kv_cache.check_values_readable(dtype, on_cpu=device.type == "cpu")
                    steer_attention(self, layer)
        s = settings
        self.edits = EditBank(s.facts, s.all_rows, s.requests, s.slots, device, self.shard)
        self.bank = SiteBank(
            s.armed, self.shard.local(s.facts), s.last_rows, s.all_rows, dtype, device, self.edits, s.requests
        )
        parts = [(name, layer, part) for (name, layer), part in self.bank.sites.items()]
        decoder.attach(model, sorted(parts, key=lambda p: (p[1], ORDER[p[0]])))
        self.tracker = Tracker(self.edits)
        self.plans = Planner()
        self.edit_plans = EditPlanner()
        self.transfer = Transfer(device)
        self._readers: dict[int, KeyReader] = {}
        self._groups: dict[int, int] = {}
        self._plan: StepPlan | None = None
        self._taken: list[Taken] = []
        self._copied: torch.cuda.Event | None = None
        self._lost: dict[str, str] = {}
        self._view: BatchView | None = None
        self._over = -1  # version of the tracker's requests of which nothing will be asked any more
        self.proving = False
        logger.info("vLLM Hook armed %s: %.1f MB", settings.armed.describe(), self.bytes() / 1e6)

    def bytes(self) -> int:
        """Device memory of all armed sites."""
        return self.bank.bytes() + (self.edits.bytes() if self.settings.armed.edit_places() else 0)

    # -- one step ---------------------------------------------------------------------------

    def begin(self, scheduler_output: Any, known_tokens: Callable[[Any], int]) -> None:
        """Take note of who left and who came. ``known_tokens``: tokens of a request that enters again."""
        self.tracker.finish(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is None:
                continue
            if new.req_id in self.tracker.states:
                self.plans.sync(self.tracker.states)
            try:
                self.tracker.add(new.req_id, new.sampling_params.extra_args, known_tokens(new))
            except Exception as error:
                logger.exception("vLLM Hook cannot observe request %s", new.req_id)
                self._lost[new.req_id] = (
                    f"the worker could not take the request: {type(error).__name__}: {error}"
                )

    def resume(self, req_id: str, known_tokens: int) -> None:
        """A preempted request enters again, in a runner that kept it."""
        self.plans.sync(self.tracker.states)
        self.tracker.resume(req_id, known_tokens)

    def needs(self, scheduler_output: Any) -> int:
        """How the coming step may run."""
        asked = self.tracker.edits_that_may_need_python()
        if not asked:
            return graphs.ANY_GRAPH
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update({new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs})
        need = graphs.ANY_GRAPH
        for req_id, edits in asked.items():
            if req_id not in starts:
                continue
            if edits.decides_from(starts[req_id]):
                return graphs.NO_GRAPH
            if edits.attends:
                need = graphs.PYTHON_AT_ATTENTION
        return need

    def prepare(self, batch: Callable[[], BatchView], eager: bool = True) -> bool:
        """After the engine has laid out the batch, before the forward pass. ``eager``: it runs without
        CUDA graphs. Whether any row of it is ours."""
        self._taken, self._plan = [], None
        edit_plan = None
        if not self.tracker.states or self._over == self.tracker.version:
            self.bank.clear()
            return False
        self._view = view = batch()
        with self._shield(view):
            if edited := self.tracker.edits():
                edit_plan = self.edit_plans.plan(self.tracker.version, view, edited, self.tracker.decided)
                if edit_plan is not None:
                    self.edits.load(edit_plan, self.adapter.input_ids())
            plan = self.plans.plan(self.tracker.version, view, self.tracker.states)
            if plan is None and edit_plan is None:
                if self.tracker.is_over(view):
                    self._over = self.tracker.version
                self.bank.clear()
                return False
            self.transfer.wait_for_buffers()
            self.bank.load(plan, edit_plan)
            self._plan = plan
            if plan is not None and eager and self.shard.rank == 0:
                self.transfer.expect(plan, self.bank, self.settings.facts, self.shard.size > 1)
            return True
        return False

    def forward_done(self) -> None:
        """Right after the forward pass was queued, before anything that writes its pages and buffers is."""
        self.edits.clear()
        self.bank.area.rest()
        plan, self._plan = self._plan, None
        if plan is None:
            return
        assert self._view is not None
        with self._shield(self._view), torch.inference_mode():
            taken = collect(plan, self.bank, self.settings.facts, self, self.transfer, self.shard)
            if self.shard.rank == 0:  # all ranks take part, one reports
                moved = [t for t in taken if t.values is not None]
                early = len(moved) < len(taken)
                values, self._copied = self.transfer.start(
                    [t.values for t in moved if t.values is not None], early
                )
                self._taken = [t for t in taken if t.values is None]
                self._taken += [replace(t, values=v) for t, v in zip(moved, values, strict=True)]
        self.transfer.finish()

    def cancel(self) -> None:
        """The engine's own step failed: leave nothing active."""
        self._plan = None
        self._taken = []
        self.transfer.take_back(self.transfer.lent())
        self.transfer.finish()
        self.bank.clear()
        self.edits.clear()

    def attach(self, output: Any) -> Any:
        """Put the step's rows on the runner's output, now or when an asynchronous one materialises."""
        if output is None or not getattr(output, "req_ids", True):
            return output  # no step was run; vLLM shares one empty output, which must stay as it is
        taken, self._taken = self._taken, []
        copied, self._copied = self._copied, None
        lost, self._lost = self._lost, {}
        if not taken and not lost:
            return output
        transfer = self.transfer  # the output may be read when this is closed
        lent = transfer.lent()

        def rows() -> StepRows:
            try:
                if copied is not None:
                    copied.synchronize()
                return (*split(taken), lost)
            except Exception as error:
                logger.exception("vLLM Hook lost the rows of a step")
                message = f"failed in the worker: {type(error).__name__}: {error}"
                return {}, [], {**lost, **{p.req_id: message for t in taken for p in t.lane_plan.pieces}}
            finally:
                transfer.take_back(lent)

        if isinstance(output, AsyncModelRunnerOutput):
            return _LaterOutput(output, rows)
        setattr(output, OUTPUT_KEY, rows())
        return output

    def _shield(self, view: BatchView) -> _Shield:
        return _Shield(self, view)

    def guard(self, act: Callable[[], None]) -> None:
        """Run code of ours inside the forward pass: whatever it raises becomes an error of the requests."""
        assert self._view is not None
        with self._shield(self._view):
            act()

    def fail(self, view: BatchView, error: BaseException) -> None:
        """Our own code failed: say so to every observed request of this step."""
        self.cancel()
        message = f"failed in the worker: {type(error).__name__}: {error}"
        self._lost.update({r: message for r in view.req_ids if r in self.tracker.states})

    # -- KV cache (runtime.collect.Pages) ---------------------------------------------------

    def reader(self, layer: int) -> KeyReader:
        if layer not in self._readers:
            self._readers[layer] = kv_cache.key_reader(self.attention[layer])
        return self._readers[layer]

    def pages(self, layer: int, batch_index: int, keys: int) -> Sequence[int]:
        row = self.adapter.block_row(self._groups[layer], batch_index)
        return kv_cache.page_list(row, keys, self.reader(layer).page_size)

    def paged(self, layer: int) -> PagedKeys:
        return kv_cache.paged_keys(self.attention[layer], self.adapter.block_table(self._groups[layer]))

    def local_heads(self, heads: Sequence[int]) -> list[int]:
        """Query heads of this rank, as it numbers them."""
        own = self.shard.heads(self.settings.facts, kv=False)
        return [head - own.start for head in heads if head in own]

    def bind_kv_cache(self, kv_cache_config: Any) -> None:
        """Which KV-cache group each attention layer belongs to. A new cache makes new readers."""
        self._readers.clear()
        names = {attention.layer_name: layer for layer, attention in self.attention.items()}
        for group, spec in enumerate(kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                if name in names:
                    self._groups[names[name]] = group

    # -- start-up and control ---------------------------------------------------------------

    def close(self) -> None:
        """The engine is shut down. vLLM's worker and runner may live on, but the model and our buffers are
        not to live with them."""
        self.adapter.let_go()
        vars(self).clear()

    def prove(self, dummy_run: Callable[[], None]) -> None:
        """One dummy forward must fire every armed op; otherwise the engine would observe nothing."""
        self.proving = True
        try:
            silent = self.bank.prove(dummy_run)
        finally:
            self.proving = False
        if silent:
            names = ", ".join(f"{name}@{layer}" for name, layer in silent[:8])
            raise UnsupportedError(
                f"{len(silent)} of the armed sites did not fire in a test run "
                f"({names}, ...): the compiled model does not contain our ops. "
                "Remove vLLM's compile cache (VLLM_CACHE_ROOT) and start again"
            )
        self.transfer.warm_up(self.bank)

    def set_tensors(self, key: str, blob: Blob | None) -> None:
        """Take over, or drop, the tensors of a loaded program. Running requests keep what they have."""
        if blob is None:
            self.tracker.drop_tensors(key)
            return
        tensors = dict(_grouped(load_safetensors(blob)))
        self.tracker.set_tensors(
            key, {ref: {p: t.to(self.device) for p, t in parts.items()} for ref, parts in tensors.items()}
        )

    def status(self) -> dict[str, Any]:
        """Plain data for ``collective_rpc``: what is armed and what is held."""
        return {
            "armed": self.settings.armed.to_json(),
            "sites": list(decoder.supported_sites(self.model)),
            "bytes": self.bytes(),
            "slots": self.edits.used(),
            "requests": len(self.tracker.states),
            "tensors": sorted([*self.tracker.tensors, *self.tracker.vectors]),
            "fired": {f"{name}@{layer}": int(s.fired) for (name, layer), s in self.bank.sites.items()},
        }


class _LaterOutput(AsyncModelRunnerOutput):
    """The engine's own output and the rows of its step, once both have come to the host. It lets go of
    the rows then, which may be gigabytes of pinned memory that the next step could use."""

    def __init__(self, output: AsyncModelRunnerOutput, rows: Callable[[], StepRows]) -> None:
        self._output = output
        self._rows: Callable[[], StepRows] | None = rows

    def get_output(self) -> Any:
        result = self._output.get_output()
        rows, self._rows = self._rows, None
        if rows is not None:
            setattr(result, OUTPUT_KEY, rows())
        return result


class _Shield:
    """Context in which an exception of ours is logged and reported to requests, not raised."""

    def __init__(self, hook: RunnerHook, view: BatchView) -> None:
        self._hook, self._view = hook, view

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        logger.error("vLLM Hook failed in this step; generation goes on", exc_info=error)
        self._hook.fail(self._view, error)
        return True


def _grouped(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """``reference/part`` -> parts by reference."""
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        reference, _, part = name.rpartition("/")
        grouped.setdefault(reference, {})[part] = tensor
    yield from grouped.items()
