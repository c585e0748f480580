"""The options of an operation: one rule per mesh axis, in all combinations that divide evenly.

An option has a placement (the number of the dim that is sharded, or a tag) for each array and each
mesh axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY, REPLICAS, dims_of
from xshard.step.record.op import AxisRule, Op

Ints = NDArray[np.int64]
Placements = Ints  # [layouts, axes] or [options, arrays, axes]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def options_of(op: Op, lengths: Mapping[str, int], mesh: Mesh) -> Placements:
    """List all ways to shard an operation over the axes of a mesh: [options, arrays, axes].

    A placement is what one mesh axis does in one array: the number of the dim that it shards, or a
    negative tag. Arrays are the operands, then the result. On two axes, the three rules of
    `b c -> b c` (shard b: (0, 0); shard c: (1, 1); idle: replicas in both) have nine combinations.

    Options are left out if a dim is not divided evenly, and if they are the same layouts as an
    option before them. The order of options is that of the rules.
    """
    dims = dict.fromkeys(chain.from_iterable(map(dims_of, op.all_arrays)))
    lengths_of_dims = tuple((dim, lengths[dim]) for dim in dims)
    return _options(op.axis_rules, op.all_arrays, len(op.arrays), lengths_of_dims, mesh)


# Layers that are alike, and the same step with and without recomputing, have the same options.
@layout_cache(maxsize=256)
def _options(
    rules: tuple[AxisRule, ...],
    arrays: tuple[Layout, ...],
    n_visible: int,
    lengths_of_dims: tuple[tuple[str, int], ...],
    mesh: Mesh,
) -> Placements:
    """List the options of `options_of`, in an array that nobody may change.

    arrays: after the first `n_visible` come those inside a chain of operations.
    """
    lengths = dict(lengths_of_dims)
    axis_rules = np.array(rules)  # [rules, arrays]
    n_axes = len(mesh.axes)
    # A rule for each axis, in all combinations, as numbers: [options, axes].
    rule_of_axis = np.indices((len(axis_rules),) * n_axes).reshape(n_axes, -1).T
    # Each number becomes the rule, [options, axes, arrays], and arrays come before axes.
    placements = axis_rules[rule_of_axis].swapaxes(1, 2).copy()
    is_possible = np.ones(len(placements), bool)
    for i, array in enumerate(arrays):
        placements[:, i], is_possible_in_array = _in_array(placements[:, i], array, lengths, mesh)
        is_possible &= is_possible_in_array
    # Arrays inside a chain of operations come last, and only decide what is possible.
    placements = placements[is_possible, :n_visible]
    # Rules for several dims that are one dim of the array may be equal layouts: the first one
    # stays. `unique` sorts by value; sorting the indices brings the order of the rules back.
    _, first_index = np.unique(placements, axis=0, return_index=True)
    options = placements[np.sort(first_index)]
    options.flags.writeable = False
    return options


class Sharded(NamedTuple):
    """How a part of a merged dim, as g or d of `(g d)`, is sharded in each layout: [layouts] each.

    is_single_rows: its shards have a length of 1. first_axis, last_axis: of those that shard it, by
    number; where none does, the first is behind all axes, and the last before.
    """

    is_single_rows: Flags
    first_axis: Ints
    last_axis: Ints


def _in_array(
    placements: Placements, array: Layout, lengths: Mapping[str, int], mesh: Mesh
) -> tuple[Placements, Flags]:
    """Convert placements over single dims to those over an array's merged dims, as in `b (g d)`.

    `b (g d)` is a two-dim array whose last dim is g and d flattened. Its single dims b, g, d have
    the numbers 0, 1, 2, and are in the array's dims 0, 1, 1: an axis that shards d (2) becomes one
    that shards dim 1. Not all of this is possible as contiguous blocks of equal length. Blocks of
    `(g d)` are contiguous if axes that shard d come after those that shard g, and these leave g a
    length of 1. With g of length 4, axes of sizes 4 and 2 can shard (g, d), not (d, g).

    placements: [layouts, axes]. Returns the new ones, and which of the layouts are possible.
    """
    in_dims = placements.copy()
    is_possible = np.ones(len(placements), bool)
    axes = np.arange(len(mesh.axes))
    single_dim = 0
    for dim_number, dim in enumerate(array.dims):
        parts: list[Sharded] = []
        for name in names_of_dim(dim):
            is_sharding = placements == single_dim  # [layouts, axes]
            in_dims[is_sharding] = dim_number
            n_shards = product_over(is_sharding, mesh.sizes)
            is_possible &= lengths[name] % n_shards == 0
            first_axis = np.where(is_sharding, axes, len(axes)).min(-1)
            last_axis = np.where(is_sharding, axes, -1).max(-1)
            parts.append(Sharded(n_shards == lengths[name], first_axis, last_axis))
            single_dim += 1
        for outer, inner in combinations(parts, 2):
            is_contiguous = outer.is_single_rows & (outer.last_axis < inner.first_axis)
            is_sharded = inner.last_axis >= 0
            is_possible &= ~is_sharded | is_contiguous
    return in_dims, is_possible


def product_over(axes: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """Multiply the sizes of chosen mesh axes: [..., axes] -> [...]."""
    return np.asarray(np.prod(np.where(axes, sizes, 1), -1))


def distinct_layouts(layouts: Placements) -> tuple[Placements, Ints]:
    """Find the distinct layouts of options, and for each option the number of its layout."""
    rows, numbers = np.unique(layouts, axis=0, return_inverse=True)
    return rows, numbers.reshape(-1)


def without_copies(placements: ArrayLike) -> Placements:
    """Replace COPY by REPLICAS: the layouts of arrays that have no gradient."""
    return np.where(np.equal(placements, COPY), REPLICAS, placements)
