"""The options of an operation: one rule per mesh axis, in all combinations that divide evenly.

An option has a placement (the number of the dim that is sharded, or a tag) for each array and each
mesh axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.layout import Layout, Mesh
from xshard.notation.parser import parts_of
from xshard.step.record.arrays import COPY, REPLICAS
from xshard.step.record.op import Op

Ints = NDArray[np.int64]
Placements = Ints  # [layouts, axes] or [options, arrays, axes]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def options_of(op: Op, lengths: Mapping[str, int], mesh: Mesh) -> Placements:
    """List all ways to shard an operation, one rule per mesh axis -> [options, arrays, axes].

    On two axes, the rules of `b c -> b c` (shard b, shard c, idle) have nine combinations. Options
    are left out if a dim is not divided evenly, and if they are the same layouts as an option
    before them.
    """
    axis_rules = np.array(op.axis_rules)  # [rules, arrays]
    n_axes = len(mesh.axes)
    rule_of_axis = np.indices((len(axis_rules),) * n_axes).reshape(n_axes, -1).T  # [options, axes]
    placements = np.swapaxes(axis_rules[rule_of_axis], 1, 2).copy()  # [options, arrays, axes]
    is_possible = np.ones(len(placements), bool)
    for i, array in enumerate(op.all_arrays):
        placements[:, i], is_possible_here = _in_array(placements[:, i], array, lengths, mesh)
        is_possible &= is_possible_here
    # Arrays inside a chain of operations only decide what is possible.
    placements = placements[is_possible, : len(op.arrays)]
    # Rules for several dims that are one dim of the array may be equal layouts: the first one
    # stays.
    _, first = np.unique(placements, axis=0, return_index=True)
    return placements[np.sort(first)]


def _in_array(
    placements: Placements, array: Layout, lengths: Mapping[str, int], mesh: Mesh
) -> tuple[Placements, Flags]:
    """Turn placements over single dims into placements over the dims of an array, such as `(g d)`.

    Returns the placements and which of them are possible: blocks of `(g d)` are contiguous, so axes
    shard d only after other axes, before them in the mesh, have sharded g down to a length of 1.
    """
    placed = placements.copy()
    is_possible = np.ones(len(placements), bool)
    axes = np.arange(len(mesh.axes))
    number = 0  # of the single dim
    for group, dim in enumerate(array.dims):
        is_outer_down = np.ones(
            len(placements), bool
        )  # the dims before it in the group have length 1
        last_outer_axis = np.full(len(placements), -1)
        for name in parts_of(dim):
            is_sharding = placements == number  # [layouts, axes]
            n_shards = product_over(is_sharding, mesh.sizes)
            first_axis = np.where(is_sharding, axes, len(axes)).min(-1)
            last_axis = np.where(is_sharding, axes, -1).max(-1)
            is_contiguous = is_outer_down & (first_axis > last_outer_axis)
            is_possible &= lengths[name] % n_shards == 0
            is_possible &= ~is_sharding.any(-1) | is_contiguous
            is_outer_down = is_outer_down & (n_shards == lengths[name])
            last_outer_axis = np.maximum(last_outer_axis, last_axis)
            placed[is_sharding] = group
            number += 1
    return placed, is_possible


def product_over(axes: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """Multiply the sizes of chosen mesh axes: [..., axes] -> [...]."""
    return np.asarray(np.prod(np.where(axes, sizes, 1), -1))


def distinct(layouts: Placements) -> tuple[Placements, Ints]:
    """Find the distinct layouts of options, and for each option the number of its layout."""
    rows, numbers = np.unique(layouts, axis=0, return_inverse=True)
    return rows, numbers.reshape(-1)


def without_copies(placements: ArrayLike) -> Placements:
    """Replace COPY by REPLICAS: the layouts of arrays that have no gradient."""
    return np.where(np.equal(placements, COPY), REPLICAS, placements)
