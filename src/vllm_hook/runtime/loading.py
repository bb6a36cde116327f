"""From a program file to what an engine holds: checked program, its tensors, a content digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..program.check import CheckedProgram, needs, tensor_uses
from ..program.load import Source
from ..sites import Armed, ModelFacts
from ..tensors import Store, digest_tensors
from .compiled import CompiledEdits
from .inspection import Inspection, Loaded, inspect


@dataclass(frozen=True)
class LoadedProgram:
    """An immutable program, known by name and digest.

    ``tensors`` are keyed by :attr:`TensorUse.key`: the reference as written (with the features
    appended for a sparse autoencoder). ``digest`` is the hexadecimal sha256 of program and tensor
    contents; it does not depend on where files lie.
    """

    checked: CheckedProgram
    tensors: Mapping[str, Loaded]
    digest: str
    needs: Armed
    edits: CompiledEdits = field(default_factory=CompiledEdits)

    @property
    def name(self) -> str:
        return self.checked.name


def load_program(
    source: Source, facts: ModelFacts, *, store: Store | None = None, allow_files: bool = True
) -> LoadedProgram:
    """Read and check a program and its tensors. Everything that is wrong is reported at once.

    ``allow_files=False``: tensors come from ``store`` only, for programs sent to a server.
    """
    return loaded_from(inspect(source, facts, store=store, allow_files=allow_files))


def loaded_from(found: Inspection) -> LoadedProgram:
    """The program that was looked at together with a model; raises what is wrong with it."""
    found.refuse()
    assert found.checked is not None
    return LoadedProgram(found.checked, found.tensors, _digest(found), needs(found.checked), found.edits)


def _digest(found: Inspection) -> str:
    """sha256 of the program as canonical JSON, each reference to a file, those of an analyzer's options
    too, replaced by the digest of its content."""
    assert found.checked is not None
    document = found.checked.program.to_dict()
    contents = {use.path: _content_digest(found.tensors[use.key]) for use in tensor_uses(found.checked)}
    contents |= found.files
    for path, content in contents.items():
        holder: Any = document
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = f"content:{content}"
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _content_digest(loaded: Loaded) -> str:
    return digest_tensors({"": loaded} if isinstance(loaded, torch.Tensor) else loaded.tensors())
