"""What building has to know of a model before an engine starts: sizes, length, digest, tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..describe import model_facts
from ..errors import HookError
from ..sites import ModelFacts

#: Of each weight file this many blocks are hashed, at even distances, the first and the last among
#: them. A fine-tune changes nearly every weight; to hash hundreds of gigabytes would take minutes.
BLOCKS, BLOCK_BYTES = 64, 65_536
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Model:
    """``path``: a Hugging Face id or folder; ``name``: how provenance calls it; ``length``: tokens."""

    path: str
    name: str
    facts: ModelFacts
    length: int
    kind: str

    @cached_property
    def tokenizer(self) -> Any:
        from ._torchvision import hide_broken_torchvision

        hide_broken_torchvision()
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise HookError(f"model {self.path!r}: no tokenizer: {_first_line(error)}") from None

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of configuration, tokenizer and evenly spaced blocks of the weights."""
        return digest_folder(_folder(self.path))


def open_model(path: str, name: str | None = None) -> Model:
    """Reads the configuration only. HookError if there is none."""
    facts = model_facts(path)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    length = getattr(config, "max_position_embeddings", None) or 2048
    shown = name or (Path(path).resolve().name if Path(path).is_dir() else path)
    return Model(path, shown, facts, int(length), str(config.model_type))


def digest_folder(folder: Path) -> str:
    """See :attr:`Model.digest`. HookError if the folder has no weights."""
    weights = sorted(p for pattern in ("*.safetensors", "*.bin") for p in folder.glob(pattern))
    if not weights:
        raise HookError(f"{folder}: has no weights (*.safetensors or *.bin)")
    digest = hashlib.sha256()
    for path in [*(folder / name for name in TEXTS), *weights]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.name in TEXTS or size <= BLOCKS * BLOCK_BYTES:
                digest.update(file.read())
                continue
            for i in range(BLOCKS):
                file.seek((size - BLOCK_BYTES) * i // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", *TEXTS]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of several libraries
        raise HookError(f"model {path!r}: cannot be found: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
