"""Environment variables that switch checks on for a whole program. They are read once, at import."""

from __future__ import annotations

import os


def is_on(variable: str) -> bool:
    """Whether the environment variable is set to anything but nothing or 0.

    >>> is_on("XSHARD_THAT_NOBODY_SETS")
    False
    """
    return os.environ.get(variable, "0") not in ("", "0")
