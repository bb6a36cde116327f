"""The last norm and the unembedding of a model, in a file of their own: what the logit lens needs.

``python -m vllm_hook.unembedding MODEL_FOLDER OUT.safetensors`` takes them out of a Hugging Face folder.
The file holds ``norm`` [d], ``unembed`` [V, d], optionally ``norm_bias`` [d] (a layer norm then, else an
RMS norm), ``eps``, ``divide`` and ``soft_cap`` [1], and as metadata the text of every token.

Shapes: R rows, d width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import ProgramError

FORMAT = "vllm-hook-unembedding/1"
#: Tokens whose rows are held in float32 at a time.
VOCABULARY_BLOCK = 16384
#: These store the weight of their norms less 1.
LESS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next")


@dataclass(frozen=True)
class Unembedding:
    """``tokens``: a text per token id; empty where the folder had no tokenizer."""

    norm: torch.Tensor
    unembed: torch.Tensor
    eps: float
    norm_bias: torch.Tensor | None = None
    divide: float = 1.0
    soft_cap: float | None = None
    tokens: Sequence[str] = ()

    @property
    def width(self) -> int:
        return int(self.norm.shape[0])

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, d]`` residual stream -> ``[R, V]`` float32 logits, as if it were the last layer's."""
        x = rows.float()
        if self.norm_bias is not None:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        if self.norm_bias is not None:
            x = x + self.norm_bias.float()
        parts = [x @ block.float().T for block in self.unembed.split(VOCABULARY_BLOCK)]
        logits = torch.cat(parts, -1) / self.divide
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits


def read(path: str | Path) -> Unembedding:
    """Read a file of :func:`extract`. ProgramError if it is none."""
    try:
        with safe_open(str(path), framework="pt") as f:
            head = f.metadata() or {}
            if head.get("format") != FORMAT:
                raise ProgramError(
                    str(path), "is not an unembedding; make one with `python -m vllm_hook.unembedding`"
                )
            # Copies: what safetensors gives lies in the file, and would change with it.
            t = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise ProgramError(str(path), f"cannot be read as safetensors: {error}") from None
    cap = float(t["soft_cap"]) if "soft_cap" in t else None
    return Unembedding(
        t["norm"], t["unembed"], float(t["eps"]), t.get("norm_bias"), float(t["divide"]), cap,
        json.loads(head["tokens"]),
    )  # fmt: skip


def extract(folder: str | Path, out: str | Path) -> Path:
    """Write the norm and the unembedding of the model in ``folder`` to ``out``, in its own dtype.

    ProgramError if the folder has no safetensors, or not the names that Llama-like models use.
    """
    folder, out = Path(folder), Path(out)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProgramError(str(folder / "config.json"), f"cannot be read: {error}") from None
    config = {**config, **config.get("text_config", {})}
    names = _names(folder)
    unknown = [key for key in ("logit_scale",) if config.get(key)] + [n for n in names if n == "lm_head.bias"]
    if unknown:
        raise ProgramError(str(folder), f"ends in a way that is not known here ({', '.join(unknown)})")
    norm = _one(folder, names, ("model.norm.weight", "model.final_layernorm.weight", "norm.weight"))
    head = None if config.get("tie_word_embeddings") else _find(names, ("lm_head.weight",))
    unembed = _one(folder, names, (head,) if head else ("embed_tokens.weight",))
    if config.get("model_type") in LESS_ONE:
        norm = norm.float() + 1
    tensors = {
        "norm": norm,
        "unembed": unembed,
        "eps": torch.tensor([float(config.get("rms_norm_eps", config.get("layer_norm_eps", 1e-5)))]),
        "divide": torch.tensor([float(config.get("logits_scaling") or 1.0)]),
    }
    if config.get("final_logit_softcapping"):
        tensors["soft_cap"] = torch.tensor([float(config["final_logit_softcapping"])])
    if bias := _find(names, ("model.norm.bias", "model.final_layernorm.bias")):
        tensors["norm_bias"] = _load(names[bias], bias)
    meta = {"format": FORMAT, "tokens": json.dumps(_token_texts(folder, len(unembed)))}
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(out), metadata=meta)
    return out


def _names(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as f:
            names.update(dict.fromkeys(f.keys(), file))
    if not names:
        raise ProgramError(str(folder), "holds no *.safetensors")
    return names


def _find(names: dict[str, Path], ends: Sequence[str]) -> str | None:
    """The tensor with one of these names, perhaps with more in front (``model.language_model.``)."""
    for end in ends:
        for name in names:
            if name == end or name.endswith(f".{end}"):
                return name
    return None


def _one(folder: Path, names: dict[str, Path], ends: Sequence[str]) -> torch.Tensor:
    name = _find(names, ends)
    if name is None:
        raise ProgramError(str(folder), f"has no tensor named {' or '.join(ends)}")
    return _load(names[name], name)


def _load(file: Path, name: str) -> torch.Tensor:
    with safe_open(str(file), framework="pt") as f:
        tensor: torch.Tensor = f.get_tensor(name)
    return tensor


def _token_texts(folder: Path, count: int) -> list[str]:
    if not (folder / "tokenizer_config.json").is_file():
        return []
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    return [str(tokenizer.decode([i])) for i in range(min(count, len(tokenizer)))]


def main(argv: Sequence[str] | None = None) -> None:
    """Take the last norm and the unembedding out of a model folder."""
    parser = argparse.ArgumentParser(prog="vllm_hook.unembedding", description=main.__doc__)
    parser.add_argument("folder", help="folder of a Hugging Face model with safetensors")
    parser.add_argument("out", help="file to write, .safetensors")
    args = parser.parse_args(argv)
    sys.stdout.write(f"written: {extract(args.folder, args.out)}\n")


if __name__ == "__main__":
    main()
