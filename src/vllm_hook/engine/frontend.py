"""The front end's side: programs by name and admission of requests. Results: :mod:`.receive`.

One instance wraps one engine (``LLMEngine`` or ``AsyncLLM``). Only requests that use a program are
touched; all others pass through unchanged.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from safetensors.torch import save as save_safetensors
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import make_async

from ..errors import CapacityError, ProgramError, SiteError, UnsupportedError
from ..program.check import split_span_ref
from ..program.checked import Observation, tensor_uses
from ..program.request import RequestSpec, parse_request
from ..program.resolve import ResolvedProgram, resolve
from ..program.schema import (
    CosineReduction,
    NormReduction,
    ProbeReduction,
    ProjectionReduction,
    Reduction,
    SaeReduction,
    TokensSpan,
)
from ..runtime.edit_limits import HEAVY, ROW_GATES
from ..runtime.edits import resolve_edits
from ..runtime.loading import LoadedProgram, load_program
from ..runtime.requests import PAYLOAD_KEY, Lane, packed, payload
from ..suggest import did_you_mean
from .chat import carry_chat, read_prompt
from .output import Context, Use, most_rows
from .receive import Payload, Receiver
from .settings import Settings

#: Key of ``SamplingParams.extra_args`` with which a request names its programs.
REQUEST_KEY = "hook"

#: Largest result of one request, and largest dense attention of one observation, in bytes.
RESULT_BYTES = 1 << 30
ATTENTION_BYTES = 256 << 20


#: Resolved forms kept for requests that use the same programs in the same way.
RESOLVED_KEPT = 512


def _by_token(resolved: ResolvedProgram) -> bool:
    """Whether rows were chosen by what the prompt's tokens are."""
    return any(o.token_ids for o in resolved.observations) or any(e.token_ids for e in resolved.edits)


class Frontend:
    """Programs, admission and results of one engine."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        self.settings = settings
        self.programs: dict[str, LoadedProgram] = {}
        self.outbox: list[tuple[Any, ...]] = []
        self._in_use: Counter[str] = Counter()
        self._vectors: Counter[tuple[str, str]] = Counter()
        self._row_gates = self._entries = 0
        self._resolved: dict[Any, Context] = {}
        # Requests are admitted on a thread pool, and released wherever their last reference goes.
        self._lock = threading.RLock()
        self._max_len = int(engine.vllm_config.model_config.max_model_len)
        self._item = engine.vllm_config.model_config.dtype.itemsize
        inputs = engine.input_processor
        self._process_inputs = inputs.process_inputs
        inputs.process_inputs = self.process_inputs
        inputs.process_inputs_async = make_async(self.process_inputs, executor=inputs.renderer._executor)
        self._inputs = inputs
        self._receiver = Receiver(engine.output_processor)
        carry_chat(inputs.renderer)

    # -- programs ---------------------------------------------------------------------------

    def add_program(self, loaded: LoadedProgram) -> LoadedProgram:
        """Register a program for new requests; its tensors wait in ``outbox`` for the workers."""
        missing = self.settings.armed.missing(loaded.needs)
        if missing:
            raise SiteError(
                f"program {loaded.name!r} needs {missing.describe()}, which is not armed; "
                f"armed: {self.settings.armed.describe()}. List it under `arm` when the engine starts"
            )
        with self._lock:
            replaced = self.programs.get(loaded.name)
            if loaded.tensors or loaded.edits.vectors:
                self.outbox.append(("set_tensors", loaded.digest, _tensor_blob(loaded)))
            self.programs[loaded.name] = loaded
            if replaced is not None:
                self._drop(replaced.digest)
        return loaded

    def load(self, source: Any) -> LoadedProgram:
        return self.add_program(load_program(source, self.settings.facts))

    def remove_program(self, name: str) -> None:
        """New requests cannot use it any more; running ones keep it."""
        with self._lock:
            digest = self.find(name).digest
            del self.programs[name]
            self._drop(digest)

    def find(self, name: str) -> LoadedProgram:
        try:
            return self.programs[name]
        except KeyError:
            known = ", ".join(sorted(self.programs)) or "none"
            raise ProgramError(
                f"program {name!r}", f"is not loaded; loaded: {known}{did_you_mean(name, self.programs)}"
            ) from None

    def _drop(self, digest: str) -> None:
        """Let the workers forget tensors that no program and no running request needs."""
        if not self._in_use[digest] and all(p.digest != digest for p in self.programs.values()):
            self.outbox.append(("set_tensors", digest, None))

    def _release(
        self, digests: Sequence[str], vectors: frozenset[tuple[str, str]], gates: int, entries: int
    ) -> None:
        with self._lock:
            self._row_gates -= gates
            self._entries -= entries
            for vector in vectors:
                self._vectors[vector] -= 1
                if not self._vectors[vector]:
                    del self._vectors[vector]
            for digest in digests:
                self._in_use[digest] -= 1
                if not self._in_use[digest]:
                    del self._in_use[digest]
                    self._drop(digest)

    # -- admission --------------------------------------------------------------------------

    def process_inputs(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Resolve a request's programs on its final tokens; what is wrong is refused here."""
        extra = getattr(params, "extra_args", None) or {}
        if PAYLOAD_KEY in extra:
            raise ProgramError(
                f"extra_args[{PAYLOAD_KEY!r}]", "is reserved; name programs in extra_args['hook']"
            )
        with self._lock:  # from here on the workers keep what these programs need
            programs, spec = self._select(extra)
            for program in programs:
                self._in_use[program.digest] += 1
        try:
            return self._admit(programs, spec, request_id, prompt, params, *args, **kwargs)
        except BaseException:
            self._release([p.digest for p in programs], frozenset(), 0, 0)
            raise

    def _admit(
        self,
        programs: Sequence[LoadedProgram],
        spec: RequestSpec | None,
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        request = self._process_inputs(request_id, prompt, params, *args, **kwargs)
        if not programs:
            if spec is not None and (spec.set or spec.spans):
                raise ProgramError("hook.use", "set and spans were given, but no program is in use; name one")
            return request
        if kwargs.get("resumable"):
            raise UnsupportedError("streaming-input sessions cannot use programs yet")
        if not isinstance(params, SamplingParams):
            raise UnsupportedError("pooling requests cannot use programs yet")
        if request.prompt_token_ids is None:
            raise UnsupportedError("prompts given as embeddings cannot use programs")
        context = self._context(programs, spec, prompt, request.prompt_token_ids)
        data = Payload(context.data)
        data.context, data.samples, data.end = context, params.n, self._end(context, request.sampling_params)
        self._check_size(context, params.n, data.end)
        data.give_back = self._hold(context, params.n)
        request.sampling_params.extra_args = {**(params.extra_args or {}), PAYLOAD_KEY: data}
        return request

    def _select(self, extra: Mapping[str, Any]) -> tuple[list[LoadedProgram], RequestSpec | None]:
        """Programs of a request: those it names in its order, then the ``always`` ones it did not name."""
        spec = parse_request(extra.get(REQUEST_KEY))
        named = [self.find(name) for name in (spec.use or () if spec is not None else ())]
        always = [p for p in self.programs.values() if p.checked.apply == "always" and p not in named]
        return [*named, *always], spec

    def _context(
        self,
        programs: Sequence[LoadedProgram],
        spec: RequestSpec | None,
        prompt: Any,
        token_ids: Sequence[int],
    ) -> Context:
        """Spans and rows of a request's programs on its final tokens."""
        overrides = dict(spec.spans) if spec is not None else {}
        scalars = tuple(sorted(spec.set.items())) if spec is not None and spec.set else ()
        key = (tuple([p.digest for p in programs]), len(token_ids), scalars)
        if not overrides and (found := self._resolved.get(key)) is not None:
            return found
        known = {name for p in programs for name in p.checked.spans}
        if unknown := sorted(key for key in overrides if split_span_ref(key)[0] not in known):
            raise ProgramError(
                "hook.spans", f"no program in use has a span named {unknown[0]!r}; spans: {sorted(known)}"
            )
        given = {split_span_ref(key)[0] for key in overrides}
        with_text = any(
            not isinstance(span, TokensSpan) and name not in given
            for p in programs
            for name, span in p.checked.spans.items()
        )
        view = read_prompt(prompt, token_ids, self._inputs.tokenizer, with_text)
        uses = []
        lanes: list[Lane] = []
        for loaded in programs:
            checked = loaded.checked
            own = {key: span for key, span in overrides.items() if split_span_ref(key)[0] in checked.spans}
            uses.append(Use(checked, loaded.digest, resolve(checked, view, own)))
            lanes += [lane_of(observation, loaded.digest) for observation in checked.observations]
        edits = None
        if any(loaded.edits.edits for loaded in programs):
            plans = [(u.program, p.edits, u.resolved) for u, p in zip(uses, programs, strict=True)]
            edits = resolve_edits(plans, spec.set if spec is not None else {}, view, self.settings.facts)
        elif spec is not None and spec.set:
            raise ProgramError("hook.set", f"{next(iter(spec.set))!r} names no intervention in use")
        observed = [o for use in uses for o in use.resolved.observations]
        data = packed(payload(observed, lanes, len(token_ids), edits))
        context = Context(tuple(uses), tuple(lanes), len(token_ids), edits, data)
        if not (with_text or overrides or any(_by_token(use.resolved) for use in uses)):
            # Only the length of the prompt matters.
            if len(self._resolved) >= RESOLVED_KEPT:
                self._resolved.clear()
            self._resolved[key] = context
        return context

    def _hold(self, context: Context, samples: int) -> Callable[[], None]:
        """Take the slots of a request; what is returned gives back all that is held for it."""
        edits = context.edits
        vectors = edits.vectors if edits is not None else frozenset()
        gates = samples * edits.gates if edits is not None else 0
        entries = samples * edits.entries if edits is not None else 0
        if edits is not None:
            with self._lock:
                self._check_slots(vectors, gates, entries)
                self._vectors.update(vectors)
                self._row_gates += gates
                self._entries += entries
        digests = [use.digest for use in context.uses]
        return partial(self._release, digests, vectors, gates, entries)

    def _check_slots(self, vectors: frozenset[tuple[str, str]], gates: int, entries: int) -> None:
        """Vectors and gates by row of running requests hold slots; scalars take none."""
        if self._row_gates + gates > ROW_GATES:
            raise CapacityError(
                f"the request needs {gates} conditions by row; {ROW_GATES - self._row_gates} of {ROW_GATES} "
                "are free. Wait for running requests"
            )
        if self._entries + entries > HEAVY:
            raise CapacityError(
                f"the interventions of the request come to {entries} edits of a row; of the {HEAVY} that "
                f"such requests may come to together {HEAVY - self._entries} are free. "
                "Wait for running requests"
            )
        for kind in ("stream", "head"):
            held = {v for v in self._vectors if v[0] == kind}
            new = {v for v in vectors if v[0] == kind} - held
            free = self.settings.slots - len(held)
            if len(new) > free:
                raise CapacityError(
                    f"the request needs {len(new)} more vector slots; {free} of "
                    f"{self.settings.slots} are free. "
                    "Wait for running requests, share vectors, or start with more `slots`"
                )

    def _end(self, context: Context, params: SamplingParams) -> int:
        """Positions of the request lie below."""
        return min(self._max_len, context.prompt + (params.max_tokens or self._max_len))

    def _check_size(self, context: Context, samples: int, end: int) -> None:
        key = end, samples
        if key in context.fitting:
            return
        total = 0
        for (name, _, resolved), lane in zip(context.observations, context.lanes, strict=True):
            rows = most_rows(resolved, context.prompt, end)
            spans = len(resolved.keys)
            size = samples * rows * row_bytes(lane, self.settings, self._item, keys=end, spans=spans)
            total += size
            if lane.site == "attention" and size > ATTENTION_BYTES:
                raise CapacityError(
                    f"{name}: dense attention of {rows} rows over up to {end} keys, "
                    f"{len(lane.heads or ())} heads, would be {size >> 20} MiB; the limit is "
                    f"{ATTENTION_BYTES >> 20} MiB. "
                    "Ask for fewer rows or heads, or for attention_mass over spans"
                )
        if total > RESULT_BYTES:
            raise CapacityError(
                f"the observations of this request could hold {total >> 20} MiB; "
                f"the limit is {RESULT_BYTES >> 20} MiB. "
                "Ask for fewer layers or positions, or for a reduction"
            )
        context.fitting.add(key)


def lane_of(observation: Observation, digest: str) -> Lane:
    """The device-side form of an observation."""
    heads = observation.keep_heads if observation.heads is None else observation.heads
    dtype = "float32" if observation.dtype == "float32" else None
    return Lane(observation.site, observation.layers, heads, _reduction(observation.reduce, digest), dtype)


def _reduction(reduce: Reduction | None, digest: str) -> tuple[str, ...] | None:
    if reduce is None:
        return None
    if isinstance(reduce, NormReduction):
        return ("norm",)
    if isinstance(reduce, ProbeReduction):
        return ("probe", f"{digest}/{reduce.probe}")
    if isinstance(reduce, ProjectionReduction):
        return ("projection", f"{digest}/{reduce.projection}")
    if isinstance(reduce, CosineReduction):
        return ("cosine", f"{digest}/{reduce.cosine}")
    assert isinstance(reduce, SaeReduction)
    return ("sae", f"{digest}/{reduce.sae}[{','.join(map(str, reduce.features))}]")


def row_bytes(lane: Lane, settings: Settings, item: int, keys: int, spans: int) -> int:
    """Bytes of one row of a lane's result."""
    if lane.site == "attention":
        return 4 * len(lane.heads or ()) * keys
    if lane.site == "attention_mass":
        return 4 * len(lane.heads or ()) * spans
    if lane.reduce is not None:
        return 4 * len(lane.layers) * (lane.reduce[1].count(",") + 1 if lane.reduce[0] == "sae" else 1)
    width = 1
    for size in settings.facts.row_shape(lane.site):
        width *= size
    return width * len(lane.layers) * (4 if lane.dtype == "float32" else item)


def _tensor_blob(loaded: LoadedProgram) -> bytes:
    """What the workers need of a program's tensors, as safetensors named ``reference/part``: what its
    observations read, and the vectors of its edits by digest."""
    flat: dict[str, Tensor] = {}
    for digest, vector in loaded.edits.vectors.items():
        flat[f"edit:{digest}/vector"] = vector
    read = {use.key for use in tensor_uses(loaded.checked) if use.path[0] == "observe"}
    for name in read:
        tensor = loaded.tensors[name]
        parts = {"vector": tensor} if isinstance(tensor, Tensor) else tensor.tensors()
        flat.update({f"read:{name}/{part}": t.clone() for part, t in parts.items()})
    return bytes(save_safetensors(flat))
