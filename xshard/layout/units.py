"""Composed dims, `(n 128)/tp`: shards that count units of rows, written as shards that count rows.

A *unit* is the rows that stay together: 128 rows in `(n 128)`, one head of `(h d)`. A unit is never
cut, and so `(n 128)/tp` of 3 units over 2 devices gives 2 units to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xshard.caches import layout_cache
from xshard.errors import ShapeError
from xshard.layout.mesh import Mesh
from xshard.layout.partition import (
    Sizes,
    all_owned_rows,
    block_lengths,
    find_misfit,
    map_of,
    rows_in_numbers,
)
from xshard.layout.runs import (
    Rows,
    Run,
    Runs,
    are_equal,
    as_runs,
    count_rows,
    merge_adjacent,
    unroll,
)
from xshard.notation.maps import NamedMap, Owners
from xshard.notation.overlap import Width
from xshard.notation.parser import BY, INTERVALS, ROUTED, SIZES, Dim, Shard
from xshard.notation.row_arrays import Numbers


def dims_in_rows(dims: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> tuple[Dim, ...]:
    """Write dims with shards that count rows: `(n 128)/tp` of 3 units over 2 -> `n_128/sizes(tp,256,128)`.

    Plans, rules and pictures of rows then need to know nothing about units, and equal blocks have
    equal normal forms however they are written.

    Args:
        dims: The dims of a layout.
        shape: The length of each.
        mesh: The mesh.

    Raises:
        ShapeError: A dim has no whole number of units, or other units than its shards list.
    """
    counted = []
    for dim, length in zip(dims, shape, strict=True):
        if dim.unit != 1:
            # Caches know no parts, which are no part of a dim's value.
            dim = replace(_dim_in_rows(dim, length, mesh.sizes_of(dim.axes)), parts=dim.parts)
        counted.append(dim)
    return tuple(counted)


GROUPS_HINT = (
    "a group of devices for each unit, all as large; or say how many each device has, as in "
    "sizes(tp,2,1,1)"
)


def count_groups(dim: Dim, spread_index: int, length: int, mesh: Mesh) -> int:
    """Count the groups of devices among which a `spread` deals out units: 2 units on tp=8 -> 2.

    There is a group for each unit. With as many units as devices, or more, each device is one.

    Args:
        dim: The dim, whose units are spread.
        spread_index: Which of its shards is the `spread`; it deals out the units of each block before it.
        length: The rows of the dim.
        mesh: The mesh.

    Raises:
        ShapeError: The dim has no whole number of units, or blocks before the `spread` differ.
    """
    n_devices = mesh.size(*dim.shards[spread_index].axes)
    unit_rows = 1 if dim.unit == 1 else _rows_of_unit(dim, length)
    outer_dim = Dim(dim.name, dim.shards[:spread_index])
    sizes = mesh.sizes_of(outer_dim.axes)
    misfit = find_misfit(outer_dim, length // unit_rows, sizes)
    if misfit is not None:
        raise ShapeError(misfit, text=str(dim))
    block_units = sorted(block_lengths(outer_dim, length // unit_rows, sizes))
    if block_units[0] >= n_devices or block_units[-1] == 0:
        return n_devices
    if len(block_units) > 1:
        reason = f"blocks of {' and '.join(map(str, block_units))} units are spread over {n_devices} devices"
        raise ShapeError(reason, text=str(dim), hint=GROUPS_HINT)
    return block_units[0]


@layout_cache(maxsize=4096)
def _dim_in_rows(dim: Dim, length: int, sizes: Sizes) -> Dim:
    """Write one dim with shards that count rows; `sizes` has the size of each axis of the dim."""
    dim_in_rows = replace(dim, unit=1)
    is_routed = any(shard.order == ROUTED for shard in dim.shards)  # refused where rows are counted
    if not dim.shards or is_routed:
        return dim_in_rows
    if dim.unit == 0:  # no rows in any block
        return replace(dim_in_rows, shards=(Shard(dim.axes),))
    unit_rows = _rows_of_unit(dim, length)
    misfit = find_misfit(dim, length // unit_rows, sizes)
    if misfit is not None:
        misfit = misfit.replace(" rows", " units")
        hint = f"dim '{dim.text}' has {length // unit_rows} units of {unit_rows} rows"
        raise ShapeError(misfit, text=str(dim), hint=hint)
    blocks = [
        _rows_of_units(units, unit_rows)
        for units in all_owned_rows(dim, length // unit_rows, sizes)
    ]
    # The plainest spelling that gives these blocks: the same orders; contiguous parts; any rows.
    listed_sizes = Shard(dim.axes, SIZES, tuple(map(count_rows, blocks)))
    same_orders = tuple(_shard_in_rows(shard, unit_rows) for shard in dim.shards)
    for shards in (same_orders, (listed_sizes,)):
        candidate = replace(dim_in_rows, shards=shards)
        if find_misfit(candidate, length, sizes) is None and _has_blocks(candidate, sizes, blocks):
            return candidate
    listed_rows = tuple(map(_interval_ends, blocks))
    return replace(dim_in_rows, shards=(Shard(dim.axes, INTERVALS, listed_rows),))


def _rows_of_unit(dim: Dim, length: int) -> int:
    """Return the rows of a unit: by its number, or by how many units the first shard lists."""
    name = dim.text
    unit_rows = dim.unit
    if unit_rows is None:
        n_units = rows_in_numbers(dim.shards[0])
        if not n_units:
            reason = f"nothing says how many rows a unit of '{name}' has"
            hint = f"write their number, as in ({dim.parts[0]} 128), or how many units each part has, as "
            raise ShapeError(reason, text=str(dim), hint=f"{hint}in {name}/sizes(tp,2,1)")
        unit_rows = max(length // n_units, 1)
    if length % unit_rows:
        rounded_down = length // unit_rows * unit_rows
        hint = f"a block has whole units: {rounded_down} rows, or {rounded_down + unit_rows}"
        reason = f"{length} rows of dim '{name}' are no whole units of {unit_rows}"
        raise ShapeError(reason, text=str(dim), hint=hint)
    return unit_rows


def _has_blocks(dim: Dim, sizes: Sizes, blocks: Sequence[Runs]) -> bool:
    """Return whether a dim is cut into these blocks."""
    owned = all_owned_rows(dim, sum(map(count_rows, blocks)), sizes)
    return all(map(are_equal, owned, blocks))


def _rows_of_units(units: Runs, unit_rows: int) -> Runs:
    """Return the rows of some units: units 2 and 3 of 4 rows -> rows 8 to 15."""
    if isinstance(units, Rows):
        return as_runs(_rows_of_each(units.rows, unit_rows))
    return tuple(
        Run(
            start=run.start * unit_rows,
            length=run.length * unit_rows,
            repeats=run.repeats,
            stride=run.stride * unit_rows,
        )
        for run in units
    )


def _rows_of_each(units: Numbers, unit_rows: int) -> Numbers:
    """List the rows of each unit in turn: units 3 and 1 of 2 rows -> rows 6 7 2 3."""
    rows: Numbers = (units[:, None] * unit_rows + np.arange(unit_rows)).reshape(-1)
    return rows


def _shard_in_rows(shard: Shard, unit_rows: int) -> Shard:
    """Return the shard with rows in place of units: `cyclic(tp)` of 4 rows each -> `cyclic(tp,4)`."""
    if shard.order == BY:
        units_map = shard.numbers[0]
        assert isinstance(units_map, NamedMap)
        owners = map_of(shard)
        rows_of_parts = [
            _rows_of_each(owners.part(part_index), unit_rows) for part_index in range(owners.parts)
        ]
        return replace(shard, numbers=(NamedMap(units_map.name, Owners.of_rows(rows_of_parts)),))
    if shard.order == "cyclic" and not shard.numbers:
        return replace(shard, numbers=(unit_rows,))
    return replace(
        shard, numbers=tuple(_width_in_rows(width, unit_rows) for width in shard.numbers)
    )


def _width_in_rows(width: Width | NamedMap, unit_rows: int) -> Width:
    """Turn units into rows, in a size or in the bounds of intervals: 3 units of 4 rows -> 12."""
    assert not isinstance(width, NamedMap)
    if isinstance(width, int):
        return width * unit_rows
    return tuple(row * unit_rows for row in width)


def _interval_ends(runs: Runs) -> tuple[int, ...]:
    """List the start and stop of every interval of a block, as `intervals` does."""
    bounds: list[int] = []
    for run in merge_adjacent(unroll(runs)):
        bounds += [run.start, run.start + run.length]
    return tuple(bounds) if bounds else (0, 0)
