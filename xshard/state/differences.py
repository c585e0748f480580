"""Differences of two checkpoints, bit by bit, with the name of a common mistake that explains them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.state.files.checkpoint import Checkpoint


class Difference(NamedTuple):
    name: str
    what: str


def diff_checkpoints(a: Checkpoint, b: Checkpoint, before: Checkpoint | None = None) -> Iterator[Difference]:
    """The arrays of `b` that are not as in `a`. before: an older state of `b`, to detect missing updates."""
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield Difference(name, f"only in the {'first' if name in a else 'second'}")
        elif a[name].dtype != b[name].dtype:
            yield Difference(name, f"{a[name].dtype} and {b[name].dtype}")
        else:
            x, y = _bits(a, name), _bits(b, name)
            if x.shape != y.shape or not np.array_equal(x, y):
                stale = before is not None and name in before and before[name].dtype == b[name].dtype
                old = before is not None and stale and np.array_equal(_bits(before, name), y)
                yield Difference(name, "not updated" if old else _how(x, y))


def _bits(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    values = checkpoint.read(name)
    return values.view(f"u{values.itemsize}")


def _how(x: NDArray[Any], y: NDArray[Any]) -> str:
    if x.ndim == 2 and np.array_equal(x.T, y):
        return "transposed"
    if x.shape != y.shape:
        return f"shape {x.shape} and {y.shape}"
    for d, n in enumerate(x.shape):
        if n % 2 == 0 and np.array_equal(np.roll(x, n // 2, d), y):
            return f"the halves of dim {d} are swapped, as gate and up"
    for d in range(min(x.ndim, 2)):
        if sorted(_rows(x, d)) == sorted(_rows(y, d)):
            return f"the rows of dim {d} are in another order"
    return f"{np.count_nonzero(x != y)} of {x.size} elements differ"


def _rows(x: NDArray[Any], d: int) -> Iterator[int]:
    return (zlib.crc32(np.ascontiguousarray(row).data) for row in np.moveaxis(x, d, 0))
