"""The truth for interventions: a Hugging Face model edited by hooks, from the program as written.

``with edited(reference, programs, tensors, prompt, generated): reference.run(ids)`` gives all sites of
the edited model. Methods, selectors and gates are written out here from their definitions (api.md);
nothing of vllm_hook is used. ``tensors``: the reference as written -> a tensor, or the tensors of a file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from oracle import HEAD, Reference, fed, positions_of, row_errors

#: Logits closer than this are a near tie: either token is right, and the sequences may part there.
GAP = 1e-3
Program = Mapping[str, Any]


class Tensors(dict):
    """Vectors, probes and autoencoders in files of ``folder``, by the reference a program uses."""

    def __init__(self, folder: str | Path, hidden: int, head_dim: int, seed: int = 1) -> None:
        g = torch.Generator().manual_seed(seed)
        self.folder = Path(folder)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        self.put("vectors", {n: random(hidden) for n in "vwxy"} | {f"h{n}": random(head_dim) for n in "vwxy"})
        for width, name in ((hidden, "sae"), (head_dim, "hsae")):
            file = {
                "W_enc": random(width, 6) / width**0.5,
                "b_enc": random(6) * 0.1,
                "W_dec": random(6, width),
                "b_dec": random(width) * 0.1,
            }
            self.put(name, file, whole=True)
            self.put(f"{name}-jump", {**file, "threshold": random(6).abs() * 0.3}, whole=True)
        self.put(
            "probe",
            {
                "weight": random(hidden),
                "bias": random(1),
                "mean": random(hidden),
                "scale": random(hidden).abs() + 0.5,
            },
            whole=True,
        )

    def put(self, file: str, tensors: dict[str, Tensor], whole: bool = False) -> None:
        path = self.folder / f"{file}.safetensors"
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        self.update({str(path): tensors} if whole else {f"{path}#{n}": t for n, t in tensors.items()})

    def ref(self, name: str, file: str = "vectors") -> str:
        return f"{self.folder / file}.safetensors" + (f"#{name}" if name else "")


def method(edit: Mapping[str, Any], tensors: Mapping[str, Any], x_D: Tensor) -> Tensor:
    """Rows [..., D] after an edit."""
    y = x_D
    kind = edit["method"]
    if kind == "add":
        y = x_D + edit.get("strength", 1.0) * tensors[edit["vector"]]
    elif kind == "affine":
        u, v = tensors[edit["u"]], tensors[edit["v"]]
        y = x_D + (edit["a"] + edit["b"] * (x_D @ u))[..., None] * v
    elif kind in ("clamp", "ablate"):
        u = tensors[edit["vector"]] / tensors[edit["vector"]].norm()
        y = x_D + (edit.get("target", 0.0) - x_D @ u)[..., None] * u
    elif kind == "rotate":
        first = tensors[edit["vector"]] / tensors[edit["vector"]].norm()
        second = tensors[edit["second"]] - (tensors[edit["second"]] @ first) * first
        second = second / second.norm()
        a, b = x_D @ first, x_D @ second
        length, angle = (a**2 + b**2).sqrt(), math.radians(edit["angle"])
        y = x_D - a[..., None] * first - b[..., None] * second
        y = y + (length * math.cos(angle))[..., None] * first + (length * math.sin(angle))[..., None] * second
    elif kind == "sae":
        file = tensors[edit["sae"]]
        for f in edit["features"]:
            y = y + (edit["target"] - activation(file, f, y))[..., None] * file["W_dec"][f]
    else:
        raise KeyError(kind)
    if edit.get("keep_norm"):
        y = y * (x_D.norm(dim=-1) / y.norm(dim=-1))[..., None]
    return y


def activation(file: Mapping[str, Tensor], feature: int, x_D: Tensor) -> Tensor:
    """Of a feature of a sparse autoencoder."""
    centre = 0.0 if "threshold" in file else file["b_dec"]  # as the common releases do it
    score = (x_D - centre) @ file["W_enc"][:, feature] + file["b_enc"][feature]
    floor = file["threshold"][feature] if "threshold" in file else 0.0
    return torch.where(score > floor, score, torch.zeros_like(score))


def reading(reduce: Mapping[str, Any], tensors: Mapping[str, Any], x_D: Tensor) -> Tensor:
    """The number that a condition reads of each row."""
    (kind, ref), *_ = reduce.items()
    if kind == "norm":
        return x_D.norm(dim=-1)
    if kind == "sae":
        (feature,) = reduce["features"]
        return activation(tensors[ref], feature, x_D)
    if kind == "probe":
        p = tensors[ref]
        return ((x_D - p["mean"]) / p["scale"]) @ p["weight"] + p["bias"][0]
    u = tensors[ref] / tensors[ref].norm()
    return x_D @ u if kind == "projection" else x_D @ u / x_D.norm(dim=-1)


class _Run:
    """One sequence: who is edited where."""

    def __init__(
        self, reference: Reference, tensors: Mapping[str, Any], prompt: Sequence[int], new: Sequence[int]
    ) -> None:
        self.reference, self.tensors, self.prompt, self.new = reference, tensors, prompt, new
        self.rows = len(prompt) + max(len(new) - 1, 0)
        self.at: dict[tuple[str, int], list[Callable[[Tensor], Tensor]]] = {}
        self.attend: dict[int, list[Callable[[Tensor], Tensor]]] = {}

    def mask(self, selector: Any, program: Program) -> Tensor:
        spans = {n: [range(*s["tokens"])] for n, s in program.get("spans", {}).items()}
        chosen = positions_of(selector, self.prompt, self.new, spans)
        return torch.tensor([p in chosen for p in range(self.rows)])

    def add(self, program: Program) -> None:
        gates = {}
        for id, edit in program["intervene"].items():
            if "when" in edit:
                gates[id] = self.gate(program, edit["when"])
        for id, edit in program["intervene"].items():
            mask = self.mask(edit.get("rows" if edit["method"] == "attend" else "positions", "all"), program)
            chosen = self.chosen(mask, gates.get(id))
            if edit["method"] == "attend":
                self.add_attend(program, edit, chosen)
                continue
            layers = [0] if edit["site"] == "embed" else edit.get("layers", [len(self.reference.layers) - 1])
            for layer in layers:
                self.at.setdefault((edit["site"], layer), []).append(self.change(edit, chosen))

    def chosen(self, mask: Tensor, gate: dict[str, Tensor] | None) -> Callable[[], Tensor]:
        return lambda: mask if gate is None else mask & gate["open"]

    def gate(self, program: Program, when: Mapping[str, Any]) -> dict[str, Tensor]:
        """The rows it opens, filled in when its own site is run."""
        o = program["observe"][when["observe"]]
        watched = self.mask(o["positions"], program)
        listed = o["positions"] if isinstance(o["positions"], list) else [o["positions"]]
        latched = all(
            s in ("prompt", "last_prompt") or (isinstance(s, dict) and ("range" in s or "span" in s))
            for s in listed
        )
        found: dict[str, Tensor] = {}

        def look(x_TD: Tensor) -> Tensor:
            value = reading(o["reduce"], self.tensors, x_TD)
            below = "below" in when
            over = {"any": Tensor.any, "all": Tensor.all}.get(when.get("over", "any"))

            def holds(v: Tensor) -> Tensor:
                return v < when["below"] if below else v > when["above"]

            if not latched:
                found["open"] = holds(value) & watched
            else:
                v = value[watched]
                yes = over(holds(v)) if over is not None else holds(v.mean())
                found["open"] = yes.expand(self.rows)
            return x_TD

        self.at.setdefault((o["site"], o["layers"][0]), []).insert(0, look)
        return found

    def change(self, edit: Mapping[str, Any], chosen: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x_TD: Tensor) -> Tensor:
            """[T, D], or [T, heads, D]."""
            rows, y = chosen(), x_TD.clone()
            if edit["site"] in HEAD:
                for head in edit.get("heads", range(x_TD.shape[1])):
                    y[rows, head] = method(edit, self.tensors, x_TD[rows, head])
            else:
                y[rows] = method(edit, self.tensors, x_TD[rows])
            return y

        return run

    def add_attend(self, program: Program, edit: Mapping[str, Any], chosen: Callable[[], Tensor]) -> None:
        keys = torch.zeros(self.rows, dtype=torch.bool)
        for name in edit["keys"]:
            keys[slice(*program["spans"][name]["tokens"])] = True
        layers = range(len(self.reference.layers))
        for layer in layers:
            heads = [h for y, h in edit["heads"] if y == layer]

            def run(probs_HTK: Tensor, heads: list[int] = heads) -> Tensor:
                out = probs_HTK.clone()
                for h in heads:
                    share = probs_HTK[h][:, keys].sum(-1)
                    if "weight" in edit:
                        w = torch.full_like(share, edit["weight"])
                    else:
                        m = edit["mass"]
                        w = torch.where((share > 0) & (share < m), m * (1 - share) / (share * (1 - m)), 1.0)
                    w = torch.where(chosen(), w, 1.0)
                    p = probs_HTK[h] * torch.where(keys[None], w[:, None], 1.0)
                    out[h] = p / p.sum(-1, keepdim=True)
                return out

            if heads:
                self.attend.setdefault(layer, []).append(run)

    def apply(self, site: str, layer: int, x: Tensor) -> Tensor:
        for step in self.at.get((site, layer), ()):
            x = step(x)
        return x


@contextmanager
def edited(
    reference: Reference,
    programs: Sequence[Program],
    tensors: Mapping[str, Any],
    prompt: Sequence[int],
    generated: Sequence[int] = (),
) -> Iterator[None]:
    """The model with the interventions of ``programs``, in order, for one sequence run in one piece.

    (Edits of ``resid_pre`` at block 0 also show in what :class:`Reference` records as ``embed``.)
    """
    run = _Run(reference, tensors, prompt, generated)
    for program in programs:
        if program.get("intervene"):
            run.add(program)
    with ExitStack() as stack:

        def on_output(module: Any, site: str, layer: int) -> None:
            def hook(m: Any, args: Any, out: Any) -> Any:
                first = out[0] if isinstance(out, tuple) else out
                new = run.apply(site, layer, first[0])[None]
                return (new, *out[1:]) if isinstance(out, tuple) else new

            if (site, layer) in run.at:
                stack.callback(module.register_forward_hook(hook).remove)

        def on_input(module: Any, site: str, layer: int) -> None:
            def hook(m: Any, args: Any, kwargs: Any) -> None:
                x = args[0] if args else next(iter(kwargs.values()))
                x.copy_(run.apply(site, layer, x[0])[None])  # in place: the residual is the same tensor

            if (site, layer) in run.at:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        model = reference.model.model
        on_output(model.embed_tokens, "embed", 0)
        on_output(model.norm, "final_norm", len(reference.layers) - 1)
        for i, layer in enumerate(reference.layers):
            on_input(layer, "resid_pre", i)
            on_output(layer, "resid_post", i)
            on_output(layer.get_submodule(reference.places["attn_out"]), "attn_out", i)
            on_output(layer.get_submodule(reference.places["mlp_out"]), "mlp_out", i)
            on_input(layer.get_submodule(reference.places["resid_mid"]), "resid_mid", i)
        stack.enter_context(_attention_edited(reference, run))
        yield


@contextmanager
def _attention_edited(reference: Reference, run: _Run) -> Iterator[None]:
    """q and k behind RoPE and before the attention function, v from its projection; z and the
    probabilities in the attention function. What :class:`Reference` records is what was edited."""
    module = sys.modules[type(reference.layers[0].self_attn).__module__]
    rotary, attention = module.apply_rotary_pos_emb, module.eager_attention_forward
    calls = [0]

    def edit_heads(site: str, layer: int, x_BHTD: Tensor) -> Tensor:
        return run.apply(site, layer, x_BHTD[0].transpose(0, 1)).transpose(0, 1)[None]

    def rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = calls[0] % len(reference.layers)
        calls[0] += 1
        q, k = rotary(q, k, *args, **kwargs)
        return edit_heads("q", layer, q), edit_heads("k", layer, k)

    def forward(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
        i = layer.layer_idx
        out, probs = attention(layer, q, k, v, mask, *args, **kwargs)
        if i in run.attend:
            for step in run.attend[i]:
                probs = step(probs[0])[None]
            values = v.repeat_interleave(layer.num_key_value_groups, dim=1)
            out = (probs @ values).transpose(1, 2).contiguous()
        return run.apply("z", i, out[0])[None], probs

    with ExitStack() as stack:
        for i, layer in enumerate(reference.layers):
            if ("v", i) in run.at:

                def project(m: Any, args: Any, out: Tensor, i: int = i) -> Tensor:
                    heads = out[0].unflatten(-1, (-1, reference.layers[i].self_attn.head_dim))
                    return run.apply("v", i, heads).flatten(-2)[None]

                stack.callback(layer.self_attn.v_proj.register_forward_hook(project).remove)
        stack.enter_context(mock.patch.object(module, "apply_rotary_pos_emb", rotated))
        stack.enter_context(mock.patch.object(module, "eager_attention_forward", forward))
        yield


def compare(
    reference: Reference,
    output: Any,
    programs: Sequence[Program],
    tensors: Mapping[str, Any],
    sample: int = 0,
) -> dict[str, Any]:
    """A result against Hugging Face with the same edits, teacher-forced on the result's own tokens.

    ``equal``: greedy tokens that agree before the first near tie (two logits closer than :data:`GAP`;
    the comparison of the sequence stops there); ``wrong``: [step, gap] of a token that differs with no
    tie; ``rel``: the largest relative error of an observed row, by site.
    """
    prompt, new = list(output.prompt_token_ids), list(output.outputs[sample].token_ids)
    with edited(reference, programs, tensors, prompt, new):
        want = reference.run(fed(output, sample))
    logits = want["logits"][0, len(prompt) - 1 :]
    best, gaps = logits.argmax(-1).tolist(), _gaps(logits)
    told: dict[str, Any] = {"equal": 0, "wrong": None, "tie": None, "gap": min(gaps), "rel": {}}
    for step, token in enumerate(new):
        behind = float(logits[step].max() - logits[step, token])
        if best[step] != token and behind >= GAP:
            told["wrong"] = [step, behind]
            break
        if gaps[step] < GAP:
            told["tie"] = step
            break
        told["equal"] += 1
    hook = output.outputs[sample].hook
    for name, got in (hook.observed if hook is not None else {}).items():
        rows = got.values.ndim > 2 and got.values.shape[-1] > 1  # not one number a row
        if got.site in want and got.site != "attention" and rows:
            layers = [0] if got.site in ("embed", "final_norm") else list(got.layers)
            errors = row_errors(got.values, want[got.site][layers][:, got.positions])
            told["rel"][name.rpartition("/")[2]] = float(errors.max())
    told["errors"] = {} if hook is None else hook.errors
    told["cached"], told["tokens"], told["prompt"] = output.num_cached_tokens, new, len(prompt)
    return told


def _gaps(logits: Tensor) -> list[float]:
    top = logits.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()
