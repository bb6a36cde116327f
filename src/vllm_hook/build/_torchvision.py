"""A torchvision that was built for another torch stops transformers from loading any model."""

from __future__ import annotations

import importlib
import importlib.util
import sys


def hide_broken_torchvision() -> None:
    """Make this process pass over a torchvision that is installed but fails to import.

    Without it transformers cannot load models beside a torchvision that was built for another torch.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # found by nobody from here on
        utils = sys.modules.get("transformers.utils.import_utils")
        forget = getattr(getattr(utils, "is_torchvision_available", None), "cache_clear", None)
        if forget is not None:
            forget()
