"""Tensors that programs name: vectors, probes and sparse-autoencoder features.

A reference is ``file``, ``file#tensor``, or ``sha256:<hex>#tensor`` for tensors uploaded to a
server. Files are safetensors, or ``.pt`` read with ``weights_only=True``; nothing executable is
ever read. Everything comes back as float32 on the CPU, checked to be finite.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .errors import ProgramError

_multiarray: Any = (np._core if hasattr(np, "_core") else np.core).multiarray  # numpy 2, numpy 1

Store = Mapping[str, Mapping[str, torch.Tensor]]
"""Uploaded tensors: the hexadecimal sha256 of a file -> its tensors by name."""


@dataclass(frozen=True)
class Probe:
    """A linear probe of width d: logit = weight.((h - mean) / scale) + bias.

    ``weight`` f32[d], ``bias`` a number, ``mean`` and ``scale`` f32[d] or None.
    """

    weight: torch.Tensor
    bias: float
    mean: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {
            "weight": self.weight,
            "bias": torch.tensor([self.bias]),
            "mean": self.mean,
            "scale": self.scale,
        }
        return {name: t for name, t in named.items() if t is not None}


@dataclass(frozen=True)
class SaeFeatures:
    """k features of a sparse autoencoder of width d: f = relu(encoder (h - centre) + bias).

    ``encoder`` and ``decoder`` f32[k, d]; ``bias`` f32[k]; ``centre`` f32[d] or None; with
    ``threshold`` f32[k] (jump-relu) an activation at or below it is 0.
    """

    encoder: torch.Tensor
    bias: torch.Tensor
    decoder: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    threshold: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}


def read_tensors(ref: str, base_dir: Path | None, store: Store | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the file of a reference, by name. ``base_dir`` None refuses files."""
    file, _, _ = ref.partition("#")
    if file.startswith("sha256:"):
        uploaded = (store or {}).get(file.removeprefix("sha256:"))
        if uploaded is None:
            raise ProgramError(file, "no tensors with this digest were uploaded")
        return dict(uploaded)
    if base_dir is None:
        raise ProgramError(file, "files are not read here; upload the tensors and name them by sha256:<hex>")
    path = base_dir / file
    if not path.is_file():
        raise ProgramError(str(path), "is a directory" if path.is_dir() else "no such file")
    return _read_pt(path) if path.suffix == ".pt" else _read_safetensors(path)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ProgramError(str(path), f"cannot be read as safetensors: {error}") from None


#: What a weights-only reader may build besides tensors: arrays of numbers, as older vector files hold.
_NUMPY = [
    *(np.ndarray, np.dtype, _multiarray._reconstruct, _multiarray.scalar),
    *(type(np.dtype(name)) for name in ("float16", "float32", "float64", "int32", "int64")),
]


def _read_pt(path: Path) -> dict[str, torch.Tensor]:
    try:
        with torch.serialization.safe_globals(_NUMPY):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises whatever its unpickler met: a damaged file can give almost any exception.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProgramError(
            str(path), f"cannot be read as a weights-only .pt file; save it as safetensors ({first})"
        ) from None
    if isinstance(content, torch.Tensor):
        content = {"tensor": content}
    if not isinstance(content, dict):
        raise ProgramError(str(path), f"holds a {type(content).__name__}, not tensors by name")
    found: dict[str, torch.Tensor] = {}
    for name, value in content.items():
        if isinstance(value, (int, float, list, tuple, np.ndarray, np.generic)) and not isinstance(
            value, bool
        ):
            try:
                value = torch.tensor(value)
            except (ValueError, TypeError, RuntimeError):
                continue
        if isinstance(value, torch.Tensor):
            found[str(name)] = value
    return found


def read_tensor(ref: str, base_dir: Path | None, store: Store | None = None) -> torch.Tensor:
    """The tensor of a reference, float32. A file with one tensor needs no ``#tensor``."""
    tensors = read_tensors(ref, base_dir, store)
    source, name = _source(ref, base_dir), ref.partition("#")[2]
    if not name:
        if len(tensors) != 1:
            raise ProgramError(source, f"holds {_names(tensors)}; name one, as file#tensor")
        name = next(iter(tensors))
    if name not in tensors:
        raise ProgramError(source, f"has no tensor {name!r}; it holds {_names(tensors)}")
    return _finite(source, name, tensors[name])


def read_vector(
    ref: str, base_dir: Path | None, width: int | None, store: Store | None = None
) -> torch.Tensor:
    """A vector f32[width], of any width if that is None; a leading dimension of 1 is dropped."""
    source = _source(ref, base_dir)
    return _of_width(source, ref.partition("#")[2], read_tensor(ref, base_dir, store), width)


def read_scalar(ref: str, base_dir: Path | None, store: Store | None = None) -> float:
    """A tensor of one number."""
    tensor = read_tensor(ref, base_dir, store)
    if tensor.numel() != 1:
        raise ProgramError(_source(ref, base_dir), f"has shape {list(tensor.shape)}; one number is needed")
    return float(tensor.reshape(()))


def read_probe(ref: str, base_dir: Path | None, width: int | None, store: Store | None = None) -> Probe:
    """A probe file: ``weight`` [width], ``bias`` [1], optionally ``mean`` and ``scale`` [width].

    ``file#name`` reads ``name.weight``, ``name.bias``, ... of a file with several probes.
    """
    tensors, source = _part(ref, base_dir, store)
    weight = _of_width(source, "weight", _required(source, tensors, "weight"), width)
    width = weight.numel()
    bias = _required(source, tensors, "bias")
    if bias.numel() != 1:
        raise ProgramError(source, f"tensor 'bias' has shape {list(bias.shape)}; [1] is needed")
    mean, scale = (
        _of_width(source, name, _required(source, tensors, name), width) if name in tensors else None
        for name in ("mean", "scale")
    )
    if scale is not None and bool((scale == 0).any()):
        at = int((scale == 0).nonzero()[0])
        raise ProgramError(source, f"tensor 'scale' is zero at index {at}, and rows are divided by it")
    return Probe(weight, float(bias.reshape(())), mean, scale)


def read_sae(
    ref: str, base_dir: Path | None, width: int | None, features: tuple[int, ...], store: Store | None = None
) -> SaeFeatures:
    """The listed features of a sparse autoencoder of n features.

    The feature axis is the last of ``W_enc`` and the first of ``W_dec``.
    Tensors, as SAELens and Gemma Scope name them: ``W_enc`` [width, n] and ``b_enc`` [n]; optionally
    ``W_dec`` [n, width], ``b_dec`` [width] and ``threshold`` [n] (jump-relu). The names of
    ``torch.nn.Linear`` layers (``encoder.weight`` [n, width], ``encoder.bias``, ``decoder.weight``
    [width, n], ``bias`` for ``b_dec``) are taken too. ``b_dec`` is subtracted before encoding, except
    in a jump-relu SAE; a tensor ``apply_b_dec_to_input`` of 0 or 1 says otherwise.
    """
    tensors, source = _part(ref, base_dir, store)
    tensors = _common_names(tensors)
    encoder, bias = _required(source, tensors, "W_enc"), _required(source, tensors, "b_enc")
    if encoder.ndim != 2 or (width is not None and encoder.shape[0] != width):
        needed = f"[{'width' if width is None else width}, features]"
        raise _misshapen(source, "W_enc", encoder, needed, encoder.shape[1:] == (width,))
    width, count = encoder.shape
    if missing := [f for f in features if f >= count]:
        raise ProgramError(source, f"has {count} features, so no feature {missing[0]}")
    index = torch.tensor(features)
    decoder = _required(source, tensors, "W_dec") if "W_dec" in tensors else None
    if decoder is not None and tuple(decoder.shape) != (count, width):
        turned = tuple(decoder.shape) == (width, count)
        raise _misshapen(source, "W_dec", decoder, f"[{count}, {width}]", turned)
    threshold = None
    if "threshold" in tensors:
        raw = _required(source, tensors, "threshold")
        threshold = _of_width(source, "threshold", raw, count)[index]
    centre = None
    subtract = "threshold" not in tensors
    if "apply_b_dec_to_input" in tensors:
        subtract = bool(tensors["apply_b_dec_to_input"].reshape(()))
    if "b_dec" in tensors and subtract:
        centre = _of_width(source, "b_dec", _required(source, tensors, "b_dec"), width)
    return SaeFeatures(
        encoder=encoder[:, index].T.contiguous(),
        bias=_of_width(source, "b_enc", bias, count)[index],
        decoder=None if decoder is None else decoder[index],
        centre=centre,
        threshold=threshold,
    )


def _misshapen(source: str, name: str, tensor: torch.Tensor, needed: str, turned: bool) -> ProgramError:
    hint = (
        "; it is transposed: features are the columns of W_enc and the rows of W_dec (the other way round "
        "in encoder.weight and decoder.weight of Linear layers)"
    )
    return ProgramError(
        source,
        f"tensor {name!r} has shape {list(tensor.shape)}; {needed} is needed" + (hint if turned else ""),
    )


def _common_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of Linear layers -> those of weight matrices."""
    named = dict(tensors)
    for old, new, turned in (
        ("encoder.weight", "W_enc", True),
        ("encoder.bias", "b_enc", False),
        ("decoder.weight", "W_dec", True),
        ("bias", "b_dec", False),
    ):
        if old in named and new not in named:
            named[new] = named[old].T if turned and named[old].ndim == 2 else named[old]
    return named


def file_of(ref: str, base_dir: Path) -> Path:
    """``file`` or ``file#tensor`` with the file as an absolute path; one that is relative is so to
    ``base_dir``."""
    return base_dir.absolute() / ref


def digest_file(ref: str) -> str:
    """Hexadecimal sha256 of the file of a reference, and of the name of the tensor after ``#``."""
    file, _, tensor = ref.partition("#")
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    digest.update(f"#{tensor}".encode())
    return digest.hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hexadecimal sha256 of names, dtypes, shapes and contents; the order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- checks -------------------------------------------------------------------------------------


def _source(ref: str, base_dir: Path | None) -> str:
    file = ref.partition("#")[0]
    return file if base_dir is None or file.startswith("sha256:") else str(base_dir / file)


def _part(ref: str, base_dir: Path | None, store: Store | None) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a reference without the ``name.`` of ``file#name``, and what to call it in errors."""
    tensors = read_tensors(ref, base_dir, store)
    source, part = _source(ref, base_dir), ref.partition("#")[2]
    if not part:
        return tensors, source
    found = {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
    if not found:
        raise ProgramError(source, f"has no tensors {part}.*; it holds {_names(tensors)}")
    return found, f"{source}#{part}"


def _required(source: str, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ProgramError(source, f"has no tensor {name!r}; it holds {_names(tensors)}")
    return _finite(source, name, tensors[name])


def _finite(source: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex() or tensor.is_sparse or tensor.is_quantized:
        raise ProgramError(source, f"tensor {name!r} is {tensor.dtype}, not dense real numbers")
    # A copy: what safetensors gives lies in the file, and would change with it.
    tensor = tensor.to(torch.float32, copy=True)
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        raise ProgramError(
            source, f"tensor {name!r} has {int(bad.sum())} values that are not finite in float32"
        )
    return tensor.contiguous()


def _of_width(source: str, name: str, tensor: torch.Tensor, width: int | None) -> torch.Tensor:
    flat = tensor.reshape(-1) if tensor.numel() == math.prod(tensor.shape[-1:]) else tensor
    if flat.ndim != 1 or (width is not None and flat.numel() != width):
        needed = "width" if width is None else width
        which = f"tensor {name!r}" if name else "its tensor"
        raise ProgramError(source, f"{which} has shape {list(tensor.shape)}; [{needed}] is needed")
    return flat


def _names(tensors: Mapping[str, torch.Tensor]) -> str:
    if not tensors:
        return "no tensors"
    shown = sorted(tensors)[:20]
    return ", ".join(shown) + (f" and {len(tensors) - 20} more" if len(tensors) > 20 else "")
