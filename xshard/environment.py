"""Environment variables that switch checks on for a whole program. Callers read them once, at import."""

from __future__ import annotations

import os


def is_on(variable: str) -> bool:
    """True if the variable is set and is neither empty nor "0"."""
    return os.environ.get(variable, "0") not in ("", "0")
