"""Names that do not exist: what may have been meant, and what there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``; None if none does."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), sorted(by_lower), n=1)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing: the end of a message."""
    close = closest(name, known)
    return "" if close is None else f"; did you mean {close!r}?"


def unknown(what: str, name: str, known: Iterable[str], plural: str = "") -> str:
    """``unknown site 'resid_pots'; did you mean 'resid_post'? known sites: embed, ...``"""
    names = list(known)
    message = f"unknown {what} {name!r}{did_you_mean(name, names)}"
    joint = " " if message.endswith("?") else "; "
    return f"{message}{joint}known {plural or what + 's'}: {', '.join(names) or 'none'}"
