"""Worked examples of the systems that the drop-ins replace: what goes in and comes out, device by device.

The numbers were read off the systems' own code. One table for both frameworks: each example is called as
torch users and as JAX users call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Blocks = tuple[np.ndarray, ...]  # one per device


@dataclass(frozen=True)
class Worked:
    """torch: (package, block) -> result; jax: (package, block, axis) -> result. Everything else is by device.

    replicated: whether results are one value, seen on every device, so that their cotangents are too.
    whole: what equal blocks are: "copies", whose gradients are addends, or "replicas", which have one.
    """

    name: str
    torch: Callable[[Any, Any], Any]
    jax: Callable[[Any, Any, str], Any]
    blocks: Blocks
    results: Blocks
    cotangents: Blocks
    gradients: Blocks
    replicated: bool = False
    whole: str = ""

    @property
    def n(self) -> int:
        return len(self.blocks)


def floats(*values: Any) -> Blocks:
    return tuple(np.asarray(value, np.float32) for value in values)
