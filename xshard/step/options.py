"""The options of operations on a mesh: a rule for each axis. Layouts are rows of numbers (`Ways`).

A row has a number per mesh axis: the dim that the axis shards, or a tag (`op`). Dims are the arrays'
own: names in parentheses are one. Several axes shard a dim in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.layout import Layout, Mesh
from xshard.notation.parser import parts_of
from xshard.step.op import COPY, REPLICAS, Op

Ways = NDArray[np.int64]  # [layouts, axes]
Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def options_of(op: Op, lengths: Mapping[str, int], mesh: Mesh) -> NDArray[np.int64]:
    """All combinations of rules, one per axis, that divide all dims evenly -> [options, arrays, axes]."""
    table, n_axes = np.array(op.axis_rules), len(mesh.axes)
    chosen = np.indices((len(table),) * n_axes).reshape(n_axes, -1).T
    ways, fits = np.swapaxes(table[chosen], 1, 2).copy(), np.ones(len(chosen), bool)
    for j, array in enumerate(op.arrays):
        ways[:, j], fitting = _in_array(ways[:, j], array, lengths, mesh)
        fits &= fitting
    return ways[fits]


def _in_array(ways: Ways, array: Layout, lengths: Mapping[str, int], mesh: Mesh) -> tuple[Ways, Flags]:
    """Layouts of dims -> layouts of the array that has some of them as one dim, and which are possible.

    There a dim is sharded only once the dims before it are down to 1, by later axes of the mesh.
    """
    grouped, fits, d = ways.copy(), np.ones(len(ways), bool), 0
    axes = np.arange(len(mesh.axes))
    for group, dim in enumerate(array.dims):
        down, last = np.ones(len(ways), bool), np.full(len(ways), -1)
        for name in parts_of(dim):
            here = ways == d
            factor, any_here = product(here, mesh.sizes), here.any(-1)
            first = np.where(here, axes, len(axes)).min(-1)
            fits &= (lengths[name] % factor == 0) & (~any_here | (down & (first > last)))
            down, last = down & (factor == lengths[name]), np.maximum(last, np.where(here, axes, -1).max(-1))
            grouped[here] = group
            d += 1
    return grouped, fits


def product(which: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """The product of the sizes of some axes, which come last."""
    factor: Floats = np.prod(np.where(which, sizes, 1), -1)
    return factor


def distinct(ways: Ways) -> tuple[Ways, Indices]:
    """The distinct layouts, and the number of the one that each option has."""
    rows, index = np.unique(ways, axis=0, return_inverse=True)
    return rows, index.reshape(-1)


def without_copies(ways: ArrayLike) -> Ways:
    """The layouts of arrays that need no gradient here."""
    return np.where(np.equal(ways, COPY), REPLICAS, ways)
