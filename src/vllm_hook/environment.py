"""Defaults of vLLM's environment for commands that start an engine in their own process.

vLLM reads most of its settings once, at import: call :func:`for_engine` before that. What the user has
set is left as it is.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's own default fails on small machines. GPUs do not read it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: starts faster, and Ctrl-C ends all of it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def for_engine(model: str | Path | None = None) -> None:
    """Quiet and in one process. ``model``: a folder needs no model hub; None: nothing does."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if model is None or Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch)\.")
    # vLLM warns of a missing Triton backend before it has set up its logger; without a handler here
    # Python would print that.
    logging.getLogger("vllm").addHandler(logging.NullHandler())


def has_gpu() -> bool:
    """Whether vLLM would run on a GPU here. ``is_available`` would set CUDA up, and an engine that is
    forked from this process later could not use it; to count devices the driver's library is asked."""
    import torch

    return torch.cuda.device_count() > 0
