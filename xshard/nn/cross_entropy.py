"""Cross entropy of logits with sharded classes: the axes to reduce over, and who holds which class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError, XshardError
from xshard.layout import Sharding
from xshard.layout.runs import row_numbers

REDUCTIONS = ("mean", "sum", "none")
Axes = tuple[str, ...]


class ClassDim(NamedTuple):
    """The dim of classes of some logits, the axes that shard it, and those that shard the tokens."""

    dim: int
    axes: Axes
    token_axes: Axes


def class_dim(
    sharding: Sharding, name: str, block: Sequence[int], labels: Sequence[int], reduction: str
) -> ClassDim:
    """Find the dim of classes in sharded logits, and the mesh axes that shard classes and tokens.

    Logits `b/dp s v/tp` with the name "v": dim 2, axes (tp,), token axes (dp,).

    name: of the dim of classes. block, labels: the shapes of this device's logits, [b, s, v], and
    labels, [b, s]. Raises XshardError for an unknown reduction, and ShapeError unless each token
    has one label.
    """
    if reduction not in REDUCTIONS:
        hint = f"one of {', '.join(REDUCTIONS)}"
        raise XshardError(f"unknown reduction={reduction!r}", hint=hint)
    layout = sharding.layout
    d = layout.dim_index(name)
    tokens = tuple(block[:d]) + tuple(block[d + 1 :])
    if tuple(labels) != tokens:
        what = f"labels of shape {tuple(labels)}, logits of shape {tuple(block)}"
        raise ShapeError(what, text=str(layout), hint=f"labels are {tokens}, all dims but {name!r}")
    token_dims = list(layout.dims)
    class_axes = token_dims.pop(d).axes
    token_axes: Axes = ()
    for dim in token_dims:
        token_axes += dim.axes
    return ClassDim(d, class_axes, token_axes)


def rows_of_classes(sharding: Sharding, dim: int, device: int) -> NDArray[np.int64]:
    """Return the row of each class in a device's block; for classes of other devices, its number of rows.

    >>> from xshard import Mesh
    >>> rows_of_classes(Sharding("v/tp c", Mesh(tp=2), (5, 1)), 0, 1)
    array([2, 2, 2, 0, 1])
    """
    held = row_numbers(sharding.held(dim, device))
    rows = np.full(sharding.shape[dim], len(held))
    rows[held] = np.arange(len(held))
    return rows
