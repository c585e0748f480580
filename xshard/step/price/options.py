"""The options of an operation: one rule per mesh axis, in all combinations that are possible.

An *option* has a placement (the number of the dim that is sharded, or a tag) for each array and
each mesh axis. Blocks are even, or of whole units where units do not divide. Rules number single
dims, 0 to 2 in `b (g d)`; options number dims of the array, 0 and 1. In both, a number for sharding
by units comes behind all others (`record.arrays`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY, REPLICAS, dims_of, placement_by_units
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
        units: For each rule how many units its dims have, as 6 heads; an axis may then shard by
            whole ones, 2, 2, 1 and 1 over 4 devices. 1 for even blocks only.
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
    """List the options of `options_of`, in an array that nobody may change, as it is cached.

    Args:
        rules: The operation's rules: a placement for each of `arrays`, over single dims.
        arrays: The operands, the result, then arrays inside a chain of operations, which only
            decide what is possible.
        shared_dims: Of each operand and of the result, the dims whose units devices may share.
        lengths_of_dims: The name and length of each single dim.
        mesh: The mesh.
        units: For each rule how many units its dims have.
    """
    n_visible = len(shared_dims)
    lengths = dict(lengths_of_dims)
    unit_rules = [number for number, n_units in enumerate(units) if n_units > 1]
    axis_rules = _with_rules_by_units(rules, unit_rules, arrays)
    placements = _combined_rules(axis_rules, len(mesh.axes))  # [options, arrays, axes]
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
    # Rules for several dims that are one dim of the array may be equal layouts.
    options = _first_of_equals(placements[is_possible, :n_visible])
    options.flags.writeable = False
    return options


def _first_of_equals(placements: Placements) -> Placements:
    """Leave out options that are the same layouts as one before them; the others keep their order."""
    _, first_index = np.unique(placements, axis=0, return_index=True)
    # `unique` sorts options by value: sorted indices bring their own order back.
    return placements[np.sort(first_index)]


def _with_rules_by_units(
    rules: Sequence[AxisRule], unit_rules: Sequence[int], arrays: Sequence[Layout]
) -> Ints:
    """Add to the rules those of `unit_rules` again, by units: [rules, arrays].

    `b c -> b c` with rules (0, 0) and (1, 1), of which rule 1 may shard by units, gets (3, 3): c by
    units, see `placement_by_units`.
    """
    in_even_blocks = np.array(rules)
    n_single_dims = np.array([len(dims_of(array)) for array in arrays])
    repeated = in_even_blocks[unit_rules]
    is_tag = repeated < 0
    by_units = np.where(is_tag, repeated, placement_by_units(repeated, n_single_dims))
    return np.concatenate([in_even_blocks, by_units])


def _combined_rules(axis_rules: Ints, n_axes: int) -> Placements:
    """Give each axis one of the rules, in all combinations.

    [rules, arrays] -> [rules ** axes, arrays, axes].
    """
    rule_of_axis = np.indices((len(axis_rules),) * n_axes).reshape(n_axes, -1).T  # [options, axes]
    return axis_rules[rule_of_axis].swapaxes(1, 2).copy()


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


class ShardedPart(NamedTuple):
    """How a part of a merged dim, as g or d of `(g d)`, is sharded in each layout: [layouts] each.

    is_single_rows: its shards have a length of 1. first_axis, last_axis: of those that shard it, by
    number; where none does, the first is behind all axes, and the last before.
    """

    is_single_rows: Flags
    first_axis: Ints
    last_axis: Ints

    @classmethod
    def by(cls, is_sharding: Flags, is_single_rows: Flags) -> ShardedPart:
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

    An axis that shards d by units is 2 + 3 in `placements` (d is 2 of 3 single dims), and 1 + 2 in
    the result (`(g d)` is 1 of 2 dims).

    Args:
        placements: Over single dims, of one array: [layouts, axes].
        array: Its dims, some of which may be merged.
        lengths: Of single dims, by name.
        mesh: The mesh.
        units: How many units each single dim has, by number.

    Returns:
        The new placements, and which of the layouts are possible: [layouts].
    """
    in_dims = placements.copy()
    is_possible = np.ones(len(placements), bool)
    n_single_dims = len(dims_of(array))
    single_dim = 0
    for dim_number, dim in enumerate(array.dims):
        parts: list[ShardedPart] = []
        for name in names_of_dim(dim):
            is_sharding = placements == single_dim  # [layouts, axes]
            in_dims[is_sharding] = dim_number
            n_shards = product_over(is_sharding, mesh.sizes)
            is_possible &= lengths[name] % n_shards == 0
            is_by_units = placements == placement_by_units(single_dim, n_single_dims)
            in_dims[is_by_units] = placement_by_units(dim_number, len(array.dims))
            n_blocks = product_over(is_by_units, mesh.sizes)
            # Units that divide are even blocks, which another option has.
            is_uneven = are_uneven(units.get(single_dim, 1), n_blocks)
            is_outermost = not parts  # units of d in `(g d)` are not contiguous
            is_possible &= (is_uneven & (n_shards == 1) & is_outermost) | (n_blocks == 1)
            parts.append(ShardedPart.by(is_sharding, n_shards == lengths[name]))
            single_dim += 1
        for outer, inner in combinations(parts, 2):
            is_possible &= _are_contiguous(outer, inner)
    return in_dims, is_possible


def _are_contiguous(outer: ShardedPart, inner: ShardedPart) -> Flags:
    """Tell in which layouts the blocks of two parts of a merged dim are contiguous: [layouts]."""
    is_inner_whole = inner.last_axis < 0
    return is_inner_whole | (outer.is_single_rows & (outer.last_axis < inner.first_axis))


def product_over(axes: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """Multiply the sizes of the mesh axes that flags choose: [..., axes] -> [...]."""
    return np.asarray(np.prod(np.where(axes, sizes, 1), -1))


def are_uneven(n_units: ArrayLike, n_blocks: ArrayLike) -> Flags:
    """Tell whether units make uneven blocks, none of them empty: 6 units in 4 blocks, not in 3 or 8."""
    return np.not_equal(np.mod(n_units, n_blocks), 0) & np.less_equal(n_blocks, n_units)


def unevenness(placements: Placements, units: Sequence[int], mesh: Mesh) -> Floats:
    """Return how many times an even block the largest block of an array is: [..., axes] -> [...].

    6 units over 4 devices are 1.5 each, and 2 at most: 4/3. units: of each dim.
    """
    ratio: Floats = np.ones(placements.shape[:-1])
    for dim, n_units in enumerate(units):
        if n_units > 1:
            is_by_units = placements == placement_by_units(dim, len(units))
            n_blocks = product_over(is_by_units, mesh.sizes)
            most_units = np.ceil(n_units / n_blocks)
            ratio *= most_units * n_blocks / n_units  # the mean is n_units / n_blocks
    return ratio


def distinct_layouts(layouts: Placements) -> tuple[Placements, Ints]:
    """Find the distinct layouts of options, and for each option the number of its layout.

    [options, axes] -> [distinct, axes], [options]. Nobody may change them, as they are cached.
    """
    return _distinct_layouts(layouts.tobytes(), layouts.shape)


# Operations that are alike, and the same step with other micro-batches, have the same layouts.
@lru_cache(maxsize=256)
def _distinct_layouts(content: bytes, shape: tuple[int, ...]) -> tuple[Placements, Ints]:
    layouts = np.frombuffer(content, dtype=np.int64).reshape(shape)
    distinct, numbers = np.unique(layouts, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    distinct.flags.writeable = False
    numbers.flags.writeable = False
    return distinct, numbers


def without_copies(placements: ArrayLike) -> Placements:
    """Replace COPY by REPLICAS: the layouts of arrays that have no gradient."""
    return np.where(np.equal(placements, COPY), REPLICAS, placements)
