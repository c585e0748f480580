"""How the arrays of two checkpoints differ, in words that name the usual mistakes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.state.files.checkpoint import Checkpoint


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, before: Checkpoint | None = None
) -> Iterator[tuple[str, str]]:
    """Compare two checkpoints, and yield (name, how they differ) for each array that is not equal.

    Such as ("w", "only in the first"), ("b", "float32 and bfloat16"), or ("q", "transposed").

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        before: An older state of `b`, or None. An array of `b` that is as it was there is reported
            as "not updated".
    """
    for name in dict.fromkeys((*a, *b)):
        if name not in b:
            yield name, "only in the first"
        elif name not in a:
            yield name, "only in the second"
        elif a[name].dtype != b[name].dtype:
            yield name, f"{a[name].dtype} and {b[name].dtype}"
        else:
            first = _bits(a, name)
            second = _bits(b, name)
            if not np.array_equal(first, second):
                is_old = before is not None and _is_as_in(before, name, b[name].dtype, second)
                yield name, "not updated" if is_old else _describe_difference(first, second)


def _is_as_in(checkpoint: Checkpoint, name: str, dtype: str, bits: NDArray[Any]) -> bool:
    """Return whether an array of a checkpoint has these values."""
    if name not in checkpoint or checkpoint[name].dtype != dtype:
        return False
    return np.array_equal(_bits(checkpoint, name), bits)


def _bits(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """Read an array as whole numbers: so that NaN equals NaN, and -0.0 does not equal 0.0."""
    values = checkpoint.read(name)
    return values.view(f"u{values.itemsize}")


def _describe_difference(first: NDArray[Any], second: NDArray[Any]) -> str:
    """Say how two arrays differ, the likeliest mistakes first."""
    if first.ndim == 2 and np.array_equal(first.T, second):
        return "transposed"
    if first.shape != second.shape:
        return f"shape {first.shape} and {second.shape}"
    for dim_index, length in enumerate(first.shape):
        if length % 2 == 0 and np.array_equal(np.roll(first, length // 2, dim_index), second):
            return f"the halves of dim {dim_index} are swapped, as gate and up"
    for dim_index in range(min(first.ndim, 2)):
        if sorted(_row_checksums(first, dim_index)) == sorted(_row_checksums(second, dim_index)):
            return f"the rows of dim {dim_index} are in another order"
    return f"{np.count_nonzero(first != second)} of {first.size} elements differ"


def _row_checksums(values: NDArray[Any], dim_index: int) -> Iterator[int]:
    """Yield a checksum of each row of dim `dim_index`."""
    for row in np.moveaxis(values, dim_index, 0):
        yield zlib.crc32(np.ascontiguousarray(row).data)
