"""The options of an operation: one rule per mesh axis, in all combinations that are possible.

An option has a placement (the number of the dim that is sharded, or a tag) for each array and each
mesh axis. Blocks are even, or whole units where units do not divide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY, REPLICAS, dims_of
from xshard.step.record.op import AxisRule, Op

Ints = NDArray[np.int64]
Placements = Ints  # [layouts, axes] or [options, arrays, axes]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
ArrayDim = tuple[str, int]  # the name of an array, and the number of one of its dims


def options_of(
    op: Op,
    lengths: Mapping[str, int],
    mesh: Mesh,
    units: Sequence[int] = (),
    shared_dims: Collection[ArrayDim] = (),
) -> Placements:
    """List all ways to shard an operation over the axes of a mesh: [options, arrays, axes].

    A placement is what one mesh axis does in one array: the number of the dim that it shards, or a
    negative tag. Arrays are the operands, then the result. On two axes, the three rules of
    `b c -> b c` (shard b: (0, 0); shard c: (1, 1); idle: replicas in both) have nine combinations.

    Options are left out if a dim is not divided evenly, and if they are the same layouts as an
    option before them. The order of options is that of the rules.

    Args:
        op: The operation.
        lengths: The length of each dim.
        mesh: The mesh. If devices along the last axis may share units, it is split into two, and
            options are left out that differ along them in any other way.
        units: How many units each rule shards, as 6 heads; an axis may then shard by whole ones, 2,
            2, 1 and 1 over 4 devices. 1 for even blocks only.
        shared_dims: The dims of arrays whose units devices may share.
    """
    dims = dict.fromkeys(chain.from_iterable(map(dims_of, op.all_arrays)))
    lengths_of_dims = tuple((dim, lengths[dim]) for dim in dims)
    shared = tuple(
        tuple(dim for dim in range(len(array.dims)) if (name, dim) in shared_dims)
        for name, array in zip(op.array_names, op.arrays, strict=True)
    )
    rules = op.axis_rules
    if op.operands and op.kind != "attention" and any(shared):
        # Devices that share a unit do the same work with it, and their gradients are addends.
        all_arrays = range(len(op.all_arrays))
        copies = [REPLICAS if i in op.length_operands else COPY for i in all_arrays]
        rules = (*rules, tuple(copies))
    return _options(rules, op.all_arrays, shared, lengths_of_dims, mesh, tuple(units))


# Layers that are alike, and the same step with and without recomputing, have the same options.
@layout_cache(maxsize=256)
def _options(
    rules: tuple[AxisRule, ...],
    arrays: tuple[Layout, ...],
    shared_dims: tuple[tuple[int, ...], ...],
    lengths_of_dims: tuple[tuple[str, int], ...],
    mesh: Mesh,
    units: tuple[int, ...],
) -> Placements:
    """List the options of `options_of`, in an array that nobody may change.

    arrays: operands and result, then those inside a chain of operations. shared_dims: of each
    operand and of the result.
    """
    n_visible = len(shared_dims)
    lengths = dict(lengths_of_dims)
    axis_rules = np.array(rules)  # [rules, arrays]
    # The rules again that may shard by units, with single dims counted on.
    unit_rules = [number for number, count in enumerate(units) if count > 1]
    n_single = np.array([len(dims_of(array)) for array in arrays])
    by_units = axis_rules[unit_rules]
    axis_rules = np.concatenate(
        [axis_rules, np.where(by_units >= 0, by_units + n_single, by_units)]
    )
    n_axes = len(mesh.axes)
    # A rule for each axis, in all combinations, as numbers: [options, axes].
    rule_of_axis = np.indices((len(axis_rules),) * n_axes).reshape(n_axes, -1).T
    # Each number becomes the rule, [options, axes, arrays], and arrays come before axes.
    placements = axis_rules[rule_of_axis].swapaxes(1, 2).copy()
    is_possible = np.ones(len(placements), bool)
    for i, array in enumerate(arrays):
        units_of_dims = {rules[number][i]: units[number] for number in unit_rules}
        placements[:, i], is_possible_in_array = _in_array(
            placements[:, i], array, lengths, mesh, units_of_dims
        )
        is_possible &= is_possible_in_array
    if isinstance(mesh, SubAxisMesh):
        held_tag = REPLICAS if n_visible == 1 else COPY  # in storage, or in an operation
        for i, dims in enumerate(shared_dims):
            is_possible &= _are_of_whole_axes(placements[:, i], dims, held_tag)
    # Arrays inside a chain of operations come last, and only decide what is possible.
    placements = placements[is_possible, :n_visible]
    # Rules for several dims that are one dim of the array may be equal layouts: the first one
    # stays. `unique` sorts by value; sorting the indices brings the order of the rules back.
    _, first_index = np.unique(placements, axis=0, return_index=True)
    options = placements[np.sort(first_index)]
    options.flags.writeable = False
    return options


def _are_of_whole_axes(placements: Placements, shared_dims: Sequence[int], held_tag: int) -> Flags:
    """Tell which layouts of an array can be written without the sub-axes of the last axis: [layouts].

    Both sub-axes do the same. Or the outer one shards a dim whose units are shared, and devices
    along the inner one hold replicas or copies: `h/spread(tp)`. No other axis shards that dim.

    placements: [layouts, axes]. held_tag: REPLICAS or COPY.
    """
    outer = placements[:, -2]
    inner = placements[:, -1]
    is_shared = np.isin(outer, shared_dims) & (inner == held_tag)
    is_shared &= (placements == outer[:, None]).sum(-1) == 1
    return np.asarray(is_shared | (outer == inner))


class Sharded(NamedTuple):
    """How a part of a merged dim, as g or d of `(g d)`, is sharded in each layout: [layouts] each.

    is_single_rows: its shards have a length of 1. first_axis, last_axis: of those that shard it, by
    number; where none does, the first is behind all axes, and the last before.
    """

    is_single_rows: Flags
    first_axis: Ints
    last_axis: Ints

    @classmethod
    def by(cls, is_sharding: Flags, is_single_rows: Flags) -> Sharded:
        """Describe a part by the axes that shard it: [layouts, axes]."""
        n_axes = is_sharding.shape[-1]
        axes = np.arange(n_axes)
        first_axis = np.where(is_sharding, axes, n_axes).min(-1)
        last_axis = np.where(is_sharding, axes, -1).max(-1)
        return cls(is_single_rows, first_axis, last_axis)


def _in_array(
    placements: Placements,
    array: Layout,
    lengths: Mapping[str, int],
    mesh: Mesh,
    units: Mapping[int, int],
) -> tuple[Placements, Flags]:
    """Convert placements over single dims to those over an array's merged dims, as in `b (g d)`.

    `b (g d)` is a two-dim array whose last dim is g and d flattened. Its single dims b, g, d have
    the numbers 0, 1, 2, and are in the array's dims 0, 1, 1: an axis that shards d (2) becomes one
    that shards dim 1. Not all of this is possible as contiguous blocks of equal length. Blocks of
    `(g d)` are contiguous if axes that shard d come after those that shard g, and these leave g a
    length of 1. With g of length 4, axes of sizes 4 and 2 can shard (g, d), not (d, g).

    An axis that shards d by units has 2 + 3 here, and 1 + 2 then.

    placements: [layouts, axes]. units: of single dims. Returns the new placements, and which of the
    layouts are possible.
    """
    in_dims = placements.copy()
    is_possible = np.ones(len(placements), bool)
    n_single = len(dims_of(array))
    single_dim = 0
    for dim_number, dim in enumerate(array.dims):
        parts: list[Sharded] = []
        for name in names_of_dim(dim):
            is_sharding = placements == single_dim  # [layouts, axes]
            in_dims[is_sharding] = dim_number
            n_shards = product_over(is_sharding, mesh.sizes)
            is_possible &= lengths[name] % n_shards == 0
            is_by_units = placements == single_dim + n_single
            in_dims[is_by_units] = dim_number + len(array.dims)
            n_blocks = product_over(is_by_units, mesh.sizes)
            # Units that divide are even blocks; rows inside units are not contiguous.
            is_uneven = are_uneven(units.get(single_dim, 1), n_blocks)
            is_possible &= (is_uneven & (n_shards == 1) & (not parts)) | (n_blocks == 1)
            parts.append(Sharded.by(is_sharding, n_shards == lengths[name]))
            single_dim += 1
        for outer, inner in combinations(parts, 2):
            is_possible &= _are_contiguous(outer, inner)
    return in_dims, is_possible


def _are_contiguous(outer: Sharded, inner: Sharded) -> Flags:
    """Tell in which layouts the blocks of two parts of a merged dim are contiguous."""
    is_inner_whole = inner.last_axis < 0
    return is_inner_whole | (outer.is_single_rows & (outer.last_axis < inner.first_axis))


def product_over(axes: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """Multiply the sizes of chosen mesh axes: [..., axes] -> [...]."""
    return np.asarray(np.prod(np.where(axes, sizes, 1), -1))


def are_uneven(n_units: ArrayLike, n_blocks: ArrayLike) -> Flags:
    """Tell for numbers of blocks whether units do not divide, but every block has one or more."""
    return np.not_equal(np.mod(n_units, n_blocks), 0) & np.less_equal(n_blocks, n_units)


def unevenness(placements: Placements, units: Sequence[int], mesh: Mesh) -> Floats:
    """Return how many times an even block the largest block of an array is: [..., axes] -> [...].

    units: of each dim.
    """
    ratio: Floats = np.ones(placements.shape[:-1])
    for number, count in enumerate(units, len(units)):
        if count > 1:
            n_blocks = product_over(placements == number, mesh.sizes)
            ratio *= np.ceil(count / n_blocks) * n_blocks / count
    return ratio


def distinct_layouts(layouts: Placements) -> tuple[Placements, Ints]:
    """Find the distinct layouts of options, and for each option the number of its layout."""
    rows, numbers = np.unique(layouts, axis=0, return_inverse=True)
    return rows, numbers.reshape(-1)


def without_copies(placements: ArrayLike) -> Placements:
    """Replace COPY by REPLICAS: the layouts of arrays that have no gradient."""
    return np.where(np.equal(placements, COPY), REPLICAS, placements)
