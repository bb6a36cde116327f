"""``layers_up_to=n``: an engine that holds and runs only the first n layers of a model.

For scores that need no more, such as a reranker's: attention of layer i does not depend on the layers after
it. What such an engine generates means nothing, so it takes only requests with ``max_tokens=1`` and without
logprobs; its one token is to be ignored, and ``final_norm`` is that of layer n - 1.

``hf_overrides`` makes the model shorter; the weights of the other layers, which vLLM would not know what to
do with, are left out as the loader reads them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import ProgramError, UnsupportedError

FIELD = "layers_up_to"
#: Formats that vLLM's default loader reads.
FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "dummy")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def install(after: Callable[[type, str, Callable[[Any, Any], None]], None]) -> None:
    """Called once by the plug-in. ``after(class, method, then)`` runs ``then(self, result)`` behind it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerBase

    _shorten(EngineArgs)
    after(WorkerBase, "__init__", _worker)
    after(InputProcessor, "__init__", _guard)


def kept_layers(config: Any) -> int | None:
    """n of a ``VllmConfig``, or None for a whole model and for engines that are not ours."""
    from .settings import raw_config

    value = (raw_config(config) or {}).get(FIELD)
    return None if value is None else int(value)


def _shorten(engine_args: type) -> None:
    """Before a configuration is made, ask for fewer layers."""
    original = engine_args.create_engine_config  # type: ignore[attr-defined]

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .settings import CONFIG_KEY, parse_config

        extra = self.additional_config
        section = extra.get(CONFIG_KEY) if isinstance(extra, dict) else None
        n = parse_config(section).layers_up_to if section is not None else None
        if n is None:
            return original(self, *args, **kwargs)
        if callable(self.hf_overrides):
            raise ProgramError("hf_overrides", f"give a dict, not a function, together with {FIELD}")
        self.hf_overrides = {**(self.hf_overrides or {}), "num_hidden_layers": n}
        config = original(self, *args, **kwargs)
        _check(config, n)
        return config

    engine_args.create_engine_config = create_engine_config  # type: ignore[attr-defined]


def _check(config: Any, n: int) -> None:
    model, load_format = config.model_config, config.load_config.load_format
    reasons = [
        (model.is_multimodal_model, "a multimodal model"),
        (model.get_total_num_hidden_layers() != n, f"{model.model}, whose configuration nests its layers"),
        (config.speculative_config is not None, "speculative_config"),
        (load_format not in FORMATS, f"load_format={load_format!r}"),
    ]
    if bad := [what for wrong, what in reasons if wrong]:
        raise UnsupportedError(f"{FIELD} does not work with {', '.join(bad)}")


# -- weights --------------------------------------------------------------------------------------


def _worker(worker: Any, _: Any) -> None:
    if kept_layers(worker.vllm_config) is not None:
        _filter_weights()


@functools.cache
def _filter_weights() -> None:
    """Once in a process with a shortened model. Other engines in it get all weights, as before."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights

    @functools.wraps(original)
    def get_all_weights(self: Any, model_config: Any, model: Any) -> Any:
        weights = original(self, model_config, model)
        config = get_current_vllm_config_or_none()
        n = kept_layers(config) if config is not None else None
        return weights if n is None else first_layers(weights, n)

    DefaultModelLoader.get_all_weights = get_all_weights


def first_layers(weights: Iterable[tuple[str, Any]], n: int) -> Iterator[tuple[str, Any]]:
    """Weights by name, without those of layers from n on. UnsupportedError: there are fewer than n."""
    highest = -1
    for name, tensor in weights:
        found = _LAYER.search(name)
        layer = int(found[1]) if found else -1
        highest = max(highest, layer)
        if layer < n:
            yield name, tensor
    if highest + 1 < n:
        raise UnsupportedError(f"{FIELD}={n}, but the model has {highest + 1} layers")


# -- requests -------------------------------------------------------------------------------------


def _guard(inputs: Any, _: Any) -> None:
    """Refuse requests to whose answer the missing layers would matter."""
    n = kept_layers(inputs.vllm_config)
    if n is None:
        return
    process_inputs = inputs.process_inputs

    def process(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_params(params, n)
        return process_inputs(request_id, prompt, params, *args, **kwargs)

    inputs.process_inputs = process


def check_params(params: Any, n: int) -> None:
    """UnsupportedError for anything but one token without logprobs."""
    if params.max_tokens == 1 and params.logprobs is None and params.prompt_logprobs is None:
        return
    raise UnsupportedError(
        f"this engine holds only the first {n} layers ({FIELD}={n}), so what it generates means nothing: it "
        "takes requests with max_tokens=1 and without logprobs, for what they observe"
    )
