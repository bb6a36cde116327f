"""The truth to compare with: Hugging Face, eager, float32, every site recorded by hooks.

``Reference(path).run(token_ids)`` gives all sites of all layers, [layers, positions, ...]; a site that
exists once in a model has one layer. Nothing here uses vLLM or vllm_hook.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

#: Where a family's stream sites are: (what a norm adds to the stream, the input of which norm is resid_mid).
_PLAIN = {"attn_out": "self_attn", "mlp_out": "mlp", "resid_mid": "post_attention_layernorm"}
_SANDWICH = {
    "attn_out": "post_attention_layernorm",
    "mlp_out": "post_feedforward_layernorm",
    "resid_mid": "pre_feedforward_layernorm",
}
STREAM = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
HEAD = ("q", "k", "v", "z")


class Reference:
    """A Hugging Face model and its internals."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layers = self.model.model.layers
        self.places = _SANDWICH if hasattr(self.layers[0], "pre_feedforward_layernorm") else _PLAIN

    def run(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """All sites for one sequence."""
        seen: dict[str, list[Tensor]] = {}
        with _recording(self, seen), torch.no_grad():
            out = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        found = {site: torch.stack(values) for site, values in seen.items()}
        found["logits"] = out.logits
        return found


@contextmanager
def _recording(reference: Reference, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    def keep(site: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        seen.setdefault(site, []).append(value.detach().clone().squeeze(0))

    def first(args: Any, kwargs: Any) -> Tensor:
        return args[0] if args else next(iter(kwargs.values()))

    with ExitStack() as stack:

        def on_output(module: Any, site: str) -> None:
            stack.callback(module.register_forward_hook(lambda m, a, out: keep(site, out)).remove)

        def on_input(module: Any, site: str) -> None:
            handle = module.register_forward_pre_hook(
                lambda m, args, kwargs: keep(site, first(args, kwargs)), with_kwargs=True
            )
            stack.callback(handle.remove)

        on_input(reference.layers[0], "embed")
        on_output(reference.model.model.norm, "final_norm")
        for layer in reference.layers:
            on_input(layer, "resid_pre")
            on_output(layer, "resid_post")
            on_output(layer.get_submodule(reference.places["attn_out"]), "attn_out")
            on_output(layer.get_submodule(reference.places["mlp_out"]), "mlp_out")
            on_input(layer.get_submodule(reference.places["resid_mid"]), "resid_mid")
        stack.enter_context(_attention_recorded(reference.layers[0].self_attn, seen))
        yield


@contextmanager
def _attention_recorded(self_attn: Any, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Hugging Face's eager attention function sees q and k after RoPE and returns z and the weights."""
    module = sys.modules[type(self_attn).__module__]
    original = module.eager_attention_forward

    def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(layer, query, key, value, *args, **kwargs)
        for site, tensor in (("q", query), ("k", key), ("v", value)):
            seen.setdefault(site, []).append(tensor[0].transpose(0, 1).clone())
        seen.setdefault("z", []).append(output[0].clone())
        seen.setdefault("attention", []).append(weights[0].clone())
        return output, weights

    with mock.patch.object(module, "eager_attention_forward", forward):
        yield


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of each row (over the last axis); of a row of zeros the absolute one."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    got, want = got.double(), want.double()
    size = want.norm(dim=-1)
    return (got - want).norm(dim=-1) / torch.where(size == 0, torch.ones_like(size), size)


def assert_rows_close(got: Tensor, want: Tensor, rel: float = 1e-4, what: str = "") -> float:
    """Every single row is within ``rel``; returns the largest error."""
    errors = row_errors(got, want)
    if errors.numel() == 0:
        raise AssertionError(f"{what}: no rows to compare")
    worst = float(errors.max()) if bool(torch.isfinite(errors).all()) else float("nan")
    if not worst <= rel:
        bad = int((~(errors <= rel)).sum())
        at = [int(i) for i in torch.unravel_index(errors.nan_to_num(float("inf")).argmax(), errors.shape)]
        raise AssertionError(
            f"{what}: {bad} of {errors.numel()} rows differ by more than {rel}; worst {worst:.3g} at {at}"
        )
    return worst


def assert_probs_close(
    got: Tensor, want: Tensor, dp: float = 3e-5, sums: float | None = 1e-5, what: str = ""
) -> float:
    """Attention probabilities: every one within ``dp``, rows sum to 1 +- ``sums`` (None: not checked)."""
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {list(got.shape)}, expected {list(want.shape)}")
    worst = float((got.double() - want.double()).abs().max())
    if not worst <= dp:
        raise AssertionError(f"{what}: a probability differs by {worst:.3g}, more than {dp}")
    if sums is not None:
        off = float((got.double().sum(-1) - 1).abs().max())
        if not off <= sums:
            raise AssertionError(f"{what}: a row sums to 1 +- {off:.3g}, more than {sums}")
    return worst


def fed(output: Any, sample: int = 0) -> list[int]:
    """The tokens that were fed to the model: prompt and generated, but the last sampled one."""
    return [*output.prompt_token_ids, *output.outputs[sample].token_ids][:-1]


def positions_of(
    selector: Any, prompt: Sequence[int], generated: Sequence[int], spans: dict[str, list[range]]
) -> set[int]:
    """Brute force: test every fed position against the meaning of a selector (api.md)."""
    n, total = len(prompt), len(prompt) + max(len(generated) - 1, 0)
    tokens = [*prompt, *generated]
    if isinstance(selector, list):
        return set().union(*(positions_of(s, prompt, generated, spans) for s in selector))
    found = set()
    for p in range(total):
        if selector == "all":
            hit = True
        elif selector == "prompt":
            hit = p < n
        elif selector == "generated":
            hit = p >= n
        elif selector == "last_prompt":
            hit = p == n - 1
        elif "range" in selector:
            a, b = selector["range"]
            hit = p in list(range(n))[a:b]
        elif "generated" in selector:
            a, b = selector["generated"]
            hit = p - n in range(a, total if b is None else b)
        elif "span" in selector:
            hit = any(p in r for r in spans[selector["span"]])
        else:
            hit = tokens[p] in selector["token_ids"]
        if hit:
            found.add(p)
    return found
