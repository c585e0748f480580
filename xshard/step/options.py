"""What every operation, parameter and input of a step may do on a mesh: a rule for each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.layout import Mesh
from xshard.step.moves import Floats, Ways
from xshard.step.op import REPLICAS, Dims, Op

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class NodeOptions:
    """The options of an operation: the number of the rule of every axis, and the layout of every array.

    rules: [options, axes]; ways: [options, arrays, axes]; the last array is the result. Dims are
    the arrays' own: names in parentheses are one.
    """

    rules: Indices
    ways: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ways)

    def layouts(self, array: int) -> tuple[Ways, Indices]:
        """The distinct layouts of an array, and the number of the one that each option has."""
        rows, index = np.unique(self.ways[:, array], axis=0, return_inverse=True)
        return rows, index.reshape(-1)

    def only(self, keep: Flags | Indices) -> NodeOptions:
        """Some of the options."""
        return NodeOptions(self.rules[keep], self.ways[keep])


def shares(ways: Ways, mesh: Mesh) -> Floats:
    """The share of an array that a device has in each layout."""
    share: Floats = np.prod(np.where(ways >= 0, 1 / np.array(mesh.sizes, dtype=float), 1.0), -1)
    return share


def options_of(op: Op, lengths: Mapping[str, int], mesh: Mesh) -> NodeOptions:
    """All combinations of rules, one for each axis, that divide the dims of all arrays evenly."""
    table = np.array([(*rule.operands, rule.result) for rule in op.axis_rules])
    chosen = _products(len(table), mesh)
    ways, fits = np.swapaxes(table[chosen], 1, 2).copy(), np.ones(len(chosen), bool)
    for j, dims in enumerate(op.arrays):
        ways[:, j], fitting = _in_array(ways[:, j], dims, [lengths[d] for d in dims], mesh)
        fits &= fitting
    return NodeOptions(chosen, ways).only(fits)


def storage(shape: Sequence[int], mesh: Mesh) -> NodeOptions:
    """All ways to store an array: each axis shards a dim or has replicas."""
    chosen = _products(len(shape) + 1, mesh)
    dims = Dims.parse(" ".join(f"d{d}" for d in range(len(shape))), "")
    ways, fits = _in_array(np.array([*range(len(shape)), REPLICAS])[chosen], dims, shape, mesh)
    return NodeOptions(chosen, ways[:, None]).only(fits)


def _products(n: int, mesh: Mesh) -> Indices:
    """All choices of one of n for each axis, the last of n last."""
    return np.indices((n,) * len(mesh.sizes)).reshape(len(mesh.sizes), -1).T


def _in_array(ways: Ways, dims: Dims, lengths: Sequence[int], mesh: Mesh) -> tuple[Ways, Flags]:
    """Layouts of dims -> layouts of the array that has some of them as one dim, and which are possible.

    There a dim is sharded only once the dims before it are down to 1, by later axes of the mesh.
    """
    grouped, fits, d = ways.copy(), np.ones(len(ways), bool), 0
    sizes, axes = np.array(mesh.sizes), np.arange(len(mesh.sizes))
    for group, members in enumerate(dims.members):
        down, last = np.ones(len(ways), bool), np.full(len(ways), -1)
        for _ in members:
            here = ways == d
            factor, any_here = np.prod(np.where(here, sizes, 1), -1), here.any(-1)
            first = np.where(here, axes, len(axes)).min(-1)
            fits &= (lengths[d] % factor == 0) & (~any_here | (down & (first > last)))
            down, last = down & (factor == lengths[d]), np.maximum(last, np.where(here, axes, -1).max(-1))
            grouped[here] = group
            d += 1
    return grouped, fits


def array_shape(dims: Dims, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """The lengths of the dims of the array."""
    return tuple(math.prod(lengths[name] for name in members) for members in dims.members)
