"""HookLLM: vLLM's offline ``LLM`` with programs.

It adds a ``hook`` argument to ``generate`` and ``chat`` and fills in ``additional_config``; all else
is vLLM's own. Everything it does also works on a plain ``vllm.LLM`` through ``additional_config``
and ``SamplingParams.extra_args``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import vllm
from vllm import SamplingParams

from .analyzers import get as get_analyzer
from .analyzers import read_options
from .engine import control, plugin
from .engine.frontend import REQUEST_KEY
from .engine.settings import CONFIG_KEY
from .errors import HookError, ProgramError, UnsupportedError
from .program.schema import Program
from .results import HookResult, Score


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """Sampling parameters without chance, for callers that need not know vLLM."""
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


@contextmanager
def _naming_the_default(hook: Any, params: Any) -> Iterator[None]:
    """An error of a program that the caller did not name says why it was used (Python 3.11 and later)."""
    try:
        yield
    except HookError as error:
        each = params if isinstance(params, Sequence) else [params]
        named = any(REQUEST_KEY in (getattr(p, "extra_args", None) or {}) for p in each)
        if hook is True and not named and hasattr(error, "add_note"):
            error.add_note("No hook= was given, so every loaded program is used; hook=False uses none.")
        raise


def plain_llm(**settings: Any) -> vllm.LLM:
    """vLLM without programs, to compare with."""
    return vllm.LLM(**settings)


class HookLLM:
    """A vLLM engine whose internals programs can read.

    Args:
        model: what ``vllm.LLM`` takes: a Hugging Face id or a folder.
        programs: paths, dicts of the same schema, or ``Program`` objects. Their sites are armed.
        config_file: the same for a single program.
        arm: further sites to arm, ``{site: {"layers": "all" | [..], "rows": "last" | "all"}}``, for
            programs that are loaded later. ``last`` serves the selectors last_prompt and generated.
        slots: how many distinct vectors running requests may hold at a time.
        layers_up_to: hold and run only the first so many layers. Half the layers, half the time, for what
            needs no more (a reranker). Such an engine takes only requests with ``max_tokens=1``, for what
            they observe.
        **vllm_kwargs: the rest goes to ``vllm.LLM``.

    Raises:
        ProgramError, SiteError, ModelMismatchError: a program does not fit; nothing was started.
        UnsupportedError: this vLLM or this set-up is not supported.
    """

    def __init__(
        self,
        model: str,
        *,
        programs: Sequence[Any] = (),
        config_file: Any = None,
        arm: Mapping[str, Mapping[str, Any]] | None = None,
        slots: int = 64,
        layers_up_to: int | None = None,
        **vllm_kwargs: Any,
    ) -> None:
        plugin.register()
        if isinstance(programs, (str, Mapping, Program)):
            raise ProgramError("programs", "give a list of programs (or config_file=... for a single one)")
        sources = [*programs, *([config_file] if config_file is not None else [])]
        extra = dict(vllm_kwargs.pop("additional_config", None) or {})
        if CONFIG_KEY in extra:
            raise ProgramError(
                f"additional_config[{CONFIG_KEY!r}]", "give programs, arm, slots and layers_up_to to HookLLM"
            )
        extra[CONFIG_KEY] = {
            "slots": slots,
            "layers_up_to": layers_up_to,
            "programs": [_json_source(source) for source in sources],
            "arm": {name: dict(spec) for name, spec in (arm or {}).items()},
        }
        self.llm = vllm.LLM(model=str(model), additional_config=extra, **vllm_kwargs)

    # -- generating -------------------------------------------------------------------------

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, hook: Any = True, **kwargs: Any
    ) -> list[vllm.RequestOutput]:
        """``vllm.LLM.generate``; each output has ``.hook``, a :class:`HookResult` or None.

        ``hook``: True (default) uses every loaded program, False or None no program but the
        ``always`` ones, a name or a request dict holds for every prompt, and a list gives one of
        these for each prompt. Where it is not given, sampling parameters that name programs themselves, in
        ``extra_args["hook"]`` as on plain vLLM, are followed; where both do, that is an error.
        """
        count = len(prompts) if isinstance(prompts, (list, tuple)) and not _is_token_ids(prompts) else 1
        with _naming_the_default(hook, sampling_params):
            outputs: list[vllm.RequestOutput] = self.llm.generate(
                prompts, self._params(sampling_params, count, hook), **kwargs
            )
        return outputs

    def chat(
        self, messages: Any, sampling_params: Any = None, *, hook: Any = True, **kwargs: Any
    ) -> list[vllm.RequestOutput]:
        """``vllm.LLM.chat`` with ``hook`` as in :meth:`generate`; spans by message work here."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        count = len(messages) if several else 1
        with _naming_the_default(hook, sampling_params):
            outputs: list[vllm.RequestOutput] = self.llm.chat(
                messages, self._params(sampling_params, count, hook), **kwargs
            )
        return outputs

    def beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: vLLM's beam search builds its own parameters, so no program would reach it."""
        raise UnsupportedError("beam search cannot use programs; call .llm.beam_search for a plain one")

    def _params(self, params: Any, count: int, hook: Any) -> list[SamplingParams]:
        params = params if params is not None else self.llm.get_default_sampling_params()
        each = list(params) if isinstance(params, Sequence) else [params] * count
        if len(each) != count:
            raise ProgramError("sampling_params", f"{len(each)} given for {count} prompts")
        hooks = list(hook) if isinstance(hook, (list, tuple)) else [hook] * count
        if len(hooks) != count:
            raise ProgramError(
                "hook",
                f"a list gives one spec per prompt: {len(hooks)} given for {count} prompts; "
                'several programs for all prompts are {"use": [...]}',
            )
        made: dict[tuple[int, int], SamplingParams] = {}  # vLLM copies what each request is given
        for p, h in zip(each, hooks, strict=True):
            if (id(p), id(h)) not in made:
                made[id(p), id(h)] = self._with_hook(p, h)
        return [made[id(p), id(h)] for p, h in zip(each, hooks, strict=True)]

    def _with_hook(self, params: SamplingParams, hook: Any) -> SamplingParams:
        """A copy of ``params`` that names its programs; the caller's object is left as it is."""
        own = (params.extra_args or {}).get(REQUEST_KEY)
        if own is not None:
            if hook is not True:
                raise ProgramError(
                    "hook",
                    f"is given twice: {hook!r} here and {own!r} in extra_args['hook'] of the parameters",
                )
            hook = own
        elif hook is True:
            hook = {"use": list(self.frontend.programs)}
        elif isinstance(hook, Mapping) and "use" not in hook:
            hook = {"use": list(self.frontend.programs), **hook}
        params = params.clone()
        extra = dict(params.extra_args or {})
        extra.pop(REQUEST_KEY, None)
        if hook is not None and hook is not False:
            extra[REQUEST_KEY] = dict(hook) if isinstance(hook, Mapping) else hook
        params.extra_args = extra or None
        params.skip_clone = True  # nobody else has this object, and vLLM's deep copy costs 30 us a request
        return params

    # -- scoring ----------------------------------------------------------------------------

    def analyze(self, outputs: Any, analyzer: str | None = None, **options: Any) -> list[dict[str, Score]]:
        """Score finished outputs again, from what they observed.

        Without ``analyzer``, the scores that the programs gave. With one, that analyzer runs over
        each result's observations with ``options``; the score stands under the analyzer's name.
        Files that options name are read by each call. ProgramError: no such analyzer, or an option of it is
        wrong.
        """
        results = [o if isinstance(o, HookResult) else o.hook for o in _as_list(outputs)]
        if any(r is None for r in results):
            raise HookError("analyze: an output has no hook result (it was generated with hook=False)")
        return analyze(results, analyzer, **options)

    # -- programs ---------------------------------------------------------------------------

    @property
    def frontend(self) -> Any:
        return control.frontend_of(self.llm.llm_engine)

    def load_program(self, source: Any) -> tuple[str, str]:
        """Load or replace a program for requests from now on. Returns (name, digest)."""
        loaded = control.load(self.llm.llm_engine, source)
        return loaded.checked.name, loaded.digest

    def unload_program(self, name: str) -> None:
        """Requests from now on cannot use it; running ones keep it."""
        self.frontend.remove_program(name)
        control.flush(self.llm.llm_engine)

    def programs(self) -> list[tuple[str, str]]:
        """(name, digest) of the loaded programs."""
        return [(name, loaded.digest) for name, loaded in self.frontend.programs.items()]

    def sites(self) -> dict[str, Any]:
        """What this engine has: model facts, sites that could be armed, what is armed, bytes held."""
        status = control.status(self.llm.llm_engine)
        return {
            "model": self.frontend.settings.facts,
            "sites": status["sites"],
            "armed": [tuple(t) for t in status["armed"]],
            "bytes": status["bytes"],
        }

    # -- vLLM ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Everything else is vLLM's: ``get_tokenizer``, ``reset_prefix_cache``, ..."""
        if name == "llm":
            raise AttributeError(name)
        return getattr(self.llm, name)


def analyze(
    results: Sequence[HookResult], analyzer: str | None = None, **options: Any
) -> list[dict[str, Score]]:
    """See :meth:`HookLLM.analyze`; needs no engine."""
    if analyzer is None:
        if options:
            raise HookError(f"analyze: options ({', '.join(options)}) need analyzer=...")
        return [dict(r.scores.items()) for r in results]
    scorer = get_analyzer(analyzer)
    parsed = read_options(scorer, options)
    scored = []
    for result in results:
        observations = {_bare(name): value for name, value in result.observed.items()}
        spans = {_bare(name): ranges for name, ranges in result.spans.items()}
        scored.append({analyzer: scorer.score(observations, spans, parsed)})
    return scored


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


def _json_source(source: Any) -> Any:
    """The form in which a program travels in the configuration: a path, or plain data."""
    if isinstance(source, Program):
        return source.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return dict(source) if isinstance(source, Mapping) else str(source)


def _is_token_ids(prompts: Any) -> bool:
    return bool(prompts) and all(isinstance(t, int) for t in prompts)


def _as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
