"""Cross entropy of logits with sharded classes: the axes to reduce over, and who holds which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError, XshardError
from xshard.layout import Sharding
from xshard.layout.runs import row_numbers

REDUCTIONS = ("mean", "sum", "none")
Axes = tuple[str, ...]


def class_dim(
    sharding: Sharding, name: str, block: Sequence[int], labels: Sequence[int], reduction: str
) -> tuple[int, Axes, Axes]:
    """The dim `name` of logits, the axes that shard it, and tokens. block, labels: shapes of blocks."""
    if reduction not in REDUCTIONS:
        raise XshardError(
            f"unknown reduction={reduction!r}", hint=f"one of {', '.join(REDUCTIONS)}"
        )
    dims = sharding.layout.dims
    d = sharding.layout.dim_index(name)
    if tuple(labels) != (tokens := (*block[:d], *block[d + 1 :])):
        what = f"labels of shape {tuple(labels)}, logits of shape {tuple(block)}"
        raise ShapeError(
            what, text=str(sharding.layout), hint=f"labels are {tokens}, all dims but {name!r}"
        )
    return d, dims[d].axes, tuple(axis for dim in (*dims[:d], *dims[d + 1 :]) for axis in dim.axes)


def rows_of_classes(sharding: Sharding, dim: int, device: int) -> NDArray[np.int64]:
    """The row of each class in a device's block; the number of rows there for classes that others hold.

    >>> from xshard import Mesh
    >>> rows_of_classes(Sharding("v/tp c", Mesh(tp=2), (5, 1)), 0, 1)
    array([2, 2, 2, 0, 1])
    """
    own = row_numbers(sharding.held(dim, device))
    rows = np.full(sharding.shape[dim], len(own))
    rows[own] = np.arange(len(own))
    return rows
