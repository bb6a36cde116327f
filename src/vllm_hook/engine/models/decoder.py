"""Site -> place in a vLLM decoder, one small table a family.

vLLM layers return ``(hidden, residual)`` not yet added; the residual stream is their sum. An edit
of the stream is therefore made on ``hidden``, before the next norm adds the two.

Module hooks are traced by torch.compile like any other code, so they must be in place after the
model is loaded and before its first forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from ...errors import UnsupportedError
from ...ops.site import Site
from ...sites import site

Picked = tuple[Tensor, Tensor | None]
PickIn = Callable[[tuple[Any, ...], dict[str, Any]], Picked]
PickOut = Callable[[Any], Picked]


@dataclass(frozen=True)
class Place:
    """A sub-module of a decoder layer ("" is the layer itself) and what to take there: from its
    inputs (``before``) or from its outputs (``after``)."""

    module: str
    before: PickIn | None = None
    after: PickOut | None = None


def _stream_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
    """Inputs of a layer called as (positions, hidden_states, residual)."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
    residual = kwargs["residual"] if "residual" in kwargs else (args[2] if len(args) > 2 else None)
    return hidden, residual


def _hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
    return _stream_in(args, kwargs)[0], None


def _first_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
    return (args[0] if args else next(iter(kwargs.values()))), None


def _first(output: Any) -> Picked:
    return (output[0] if isinstance(output, tuple) else output), None


def _norm_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
    """Inputs of a fused norm (x, residual): it adds them, and their sum is the stream."""
    return args[0], args[1]


def _pair(output: Any) -> Picked:
    return output[0], output[1]


#: Llama and its many relatives: norms that add the residual as they go.
_FUSED = {
    "embed": Place("", before=_hidden_in),
    "resid_pre": Place("", before=_stream_in),
    "attn_out": Place("self_attn", after=_first),
    "resid_mid": Place("post_attention_layernorm", before=_norm_in),
    "mlp_out": Place("mlp", after=_first),
    "resid_post": Place("", after=_pair),
}
#: Gemma 2 and 3 norm what a sub-layer adds before it is added.
_SANDWICH = {
    **_FUSED,
    "attn_out": Place("post_attention_layernorm", after=_first),
    "resid_mid": Place("pre_feedforward_layernorm", before=_norm_in),
    "mlp_out": Place("post_feedforward_layernorm", after=_first),
}

#: Class that defines a decoder layer's forward -> places. Each is tested against Hugging Face.
FAMILIES: dict[str, dict[str, Place]] = {
    "vllm.model_executor.models.llama.LlamaDecoderLayer": _FUSED,
    "vllm.model_executor.models.mistral.MistralDecoderLayer": _FUSED,
    "vllm.model_executor.models.qwen2.Qwen2DecoderLayer": _FUSED,
    "vllm.model_executor.models.qwen3.Qwen3DecoderLayer": _FUSED,
    "vllm.model_executor.models.gemma2.Gemma2DecoderLayer": _SANDWICH,
    "vllm.model_executor.models.gemma3.Gemma3DecoderLayer": _SANDWICH,
}


def attention_layers(model: nn.Module) -> dict[int, Attention]:
    """The decoder's attention by layer; also for families whose stream sites are unknown here."""
    found: dict[int, Attention] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            layer = extract_layer_index(module.layer_name)
            if layer in found:
                raise UnsupportedError(
                    f"layer {layer} of {type(model).__name__} has several attention modules; "
                    "head sites are not supported"
                )
            found[layer] = module
    return found


def supported_sites(model: nn.Module) -> tuple[str, ...]:
    """Names of the sites that can be armed in this model."""
    layers = dict(_decoder_layers(model))
    places = _family(next(iter(layers.values()))) if layers else None
    heads = ("q", "k", "v", "z", "attention_mass", "attention")
    return (*places, "final_norm", *heads) if places else heads


def attach(model: nn.Module, parts: Sequence[tuple[str, int, Site]]) -> None:
    """Put every part, (site, layer, module), into its place. Parts at one module run in the order given.

    Raises :class:`UnsupportedError` naming a site that has no place in this model.
    """
    attention = attention_layers(model)
    layers = dict(_decoder_layers(model))
    for name, layer, part in parts:
        if site(name).kind == "head":
            _attach_head(name, attention[layer], part)
            continue
        if layer not in layers or (places := _family(layers[layer])) is None:
            raise UnsupportedError(
                f"site {name!r}: the layers of {type(model).__name__} are of an unknown family; "
                f"only q, k, v, z and the attention sites can be armed"
            )
        if name == "final_norm":
            _hook(_final_norm(model, layers), name, part, Place("", after=_first))
        else:
            place = places[name]
            _hook(layers[layer].get_submodule(place.module), name, part, place)


def _attach_head(name: str, attention: Attention, part: nn.Module) -> None:
    """q, k, v are inputs of the attention module (after RoPE), z is its output; [T, heads * d_head]."""
    if name == "z":
        _hook(attention, name, part, Place("", after=lambda output: (_rows(output), None)))
        return
    where = {"q": ("query", 0), "k": ("key", 1), "v": ("value", 2)}[name]

    def pick(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
        rows = kwargs[where[0]] if where[0] in kwargs else args[where[1]]
        return _rows(rows), None

    _hook(attention, name, part, Place("", before=pick))


def _rows(x: Tensor) -> Tensor:
    """[T, heads * d_head] as a view: an edit of a copy would be lost."""
    return x if x.dim() == 2 else x.view(x.shape[0], -1)


def _hook(module: nn.Module, name: str, part: nn.Module, place: Place) -> None:
    attribute = f"vllm_hook_{name}"
    module.add_module(attribute, part)
    before, after = place.before, place.after
    if before is not None:

        def take_in(module: nn.Module, args: Any, kwargs: Any) -> None:
            getattr(module, attribute)(*before(args, kwargs))

        module.register_forward_pre_hook(take_in, with_kwargs=True)
    if after is not None:

        def take_out(module: nn.Module, args: Any, output: Any) -> None:
            getattr(module, attribute)(*after(output))

        module.register_forward_hook(take_out)


def _decoder_layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Decoder layers by index: the children of a ModuleList that hold decoder attention."""
    for name, module in model.named_modules():
        head, _, tail = name.rpartition(".")
        if (
            tail.isdigit()
            and head.endswith("layers")
            and any(isinstance(m, Attention) for m in module.modules())
        ):
            yield int(tail), module


def _family(layer: nn.Module) -> dict[str, Place] | None:
    """By the class that defines ``forward``: a subclass with a forward of its own is another family."""
    owner = next(c for c in type(layer).__mro__ if "forward" in vars(c))
    return FAMILIES.get(f"{owner.__module__}.{owner.__qualname__}")


def _final_norm(model: nn.Module, layers: dict[int, nn.Module]) -> nn.Module:
    any_layer = next(iter(layers.values()))
    for module in model.modules():
        children = getattr(module, "layers", None)
        if isinstance(children, nn.ModuleList) and any(child is any_layer for child in children):
            norm = getattr(module, "norm", None)
            if isinstance(norm, nn.Module):
                return norm
    raise UnsupportedError(f"site 'final_norm': {type(model).__name__} has no final norm beside its layers")
