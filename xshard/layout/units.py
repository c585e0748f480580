"""Composed dims, `(n 128)/tp`: shards that count units of rows, written as shards that count rows."""

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
    unrolled,
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
            dim = replace(_in_rows(dim, length, mesh.sizes_of(dim.axes)), parts=dim.parts)
        counted.append(dim)
    return tuple(counted)


GROUPS_HINT = (
    "a group of devices for each unit, all as large; or say how many each device has, as in "
    "sizes(tp,2,1,1)"
)


def count_groups(dim: Dim, at: int, length: int, mesh: Mesh) -> int:
    """Count the groups of devices among which a `spread` deals out units: 2 units on tp=8 -> 2.

    There is a group for each unit. With as many units as devices, or more, each device is one.

    Args:
        dim: The dim, whose units are spread.
        at: Which of its shards is the `spread`; it deals out the units of each block before it.
        length: The rows of the dim.
        mesh: The mesh.

    Raises:
        ShapeError: The dim has no whole number of units, or blocks before the `spread` differ.
    """
    n_devices = mesh.size(*dim.shards[at].axes)
    unit = 1 if dim.unit == 1 else _rows_of_unit(dim, length)
    outer = Dim(dim.name, dim.shards[:at])
    sizes = mesh.sizes_of(outer.axes)
    misfit = find_misfit(outer, length // unit, sizes)
    if misfit is not None:
        raise ShapeError(misfit, text=str(dim))
    units = sorted(block_lengths(outer, length // unit, sizes))
    if units[0] >= n_devices or units[-1] == 0:
        return n_devices
    if len(units) > 1:
        reason = (
            f"blocks of {' and '.join(map(str, units))} units are spread over {n_devices} devices"
        )
        raise ShapeError(reason, text=str(dim), hint=GROUPS_HINT)
    return units[0]


@layout_cache(maxsize=4096)
def _in_rows(dim: Dim, length: int, sizes: Sizes) -> Dim:
    """Write one dim with shards that count rows; sizes: of each axis of the dim."""
    plain = replace(dim, unit=1)
    is_routed = any(shard.order == ROUTED for shard in dim.shards)  # refused where rows are counted
    if not dim.shards or is_routed:
        return plain
    if dim.unit == 0:  # no rows in any block
        return replace(plain, shards=(Shard(dim.axes),))
    unit = _rows_of_unit(dim, length)
    misfit = find_misfit(dim, length // unit, sizes)
    if misfit is not None:
        misfit = misfit.replace(" rows", " units")
        hint = f"dim '{dim.text}' has {length // unit} units of {unit} rows"
        raise ShapeError(misfit, text=str(dim), hint=hint)
    blocks = [_scaled_rows(units, unit) for units in all_owned_rows(dim, length // unit, sizes)]
    # The plainest spelling that gives these blocks: the same orders; contiguous parts; any rows.
    listed_sizes = Shard(dim.axes, SIZES, tuple(map(count_rows, blocks)))
    same_orders = tuple(_scaled_shard(shard, unit) for shard in dim.shards)
    for shards in (same_orders, (listed_sizes,)):
        candidate = replace(plain, shards=shards)
        if find_misfit(candidate, length, sizes) is None and _has_blocks(candidate, sizes, blocks):
            return candidate
    listed_rows = tuple(map(_interval_ends, blocks))
    return replace(plain, shards=(Shard(dim.axes, INTERVALS, listed_rows),))


def _rows_of_unit(dim: Dim, length: int) -> int:
    """Return the rows of a unit: by its number, or by how many units the first shard lists."""
    name = dim.text
    unit = dim.unit
    if unit is None:
        n_units = rows_in_numbers(dim.shards[0])
        if not n_units:
            reason = f"nothing says how many rows a unit of '{name}' has"
            hint = f"write their number, as in ({dim.parts[0]} 128), or how many units each part has, as "
            raise ShapeError(reason, text=str(dim), hint=f"{hint}in {name}/sizes(tp,2,1)")
        unit = max(length // n_units, 1)
    if length % unit:
        hint = (
            f"a block has whole units: {length // unit * unit} rows, or {-(-length // unit) * unit}"
        )
        reason = f"{length} rows of dim '{name}' are no whole units of {unit}"
        raise ShapeError(reason, text=str(dim), hint=hint)
    return unit


def _has_blocks(dim: Dim, sizes: Sizes, blocks: Sequence[Runs]) -> bool:
    """Return whether a dim is cut into these blocks."""
    owned = all_owned_rows(dim, sum(map(count_rows, blocks)), sizes)
    return all(map(are_equal, owned, blocks))


def _scaled_rows(units: Runs, unit: int) -> Runs:
    """Return the rows of some units: units 2 and 3 of 4 rows -> rows 8 to 15."""
    if isinstance(units, Rows):
        return as_runs(_rows_of_each(units.rows, unit))
    return tuple(Run(r.start * unit, r.length * unit, r.repeats, r.stride * unit) for r in units)


def _rows_of_each(units: Numbers, unit: int) -> Numbers:
    """List the rows of each unit in turn: units 3 and 1 of 2 rows -> rows 6 7 2 3."""
    rows: Numbers = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    return rows


def _scaled_shard(shard: Shard, unit: int) -> Shard:
    """Return the shard with rows in place of units: `cyclic(tp)` of 4 rows each -> `cyclic(tp,4)`."""
    if shard.order == BY:
        named = shard.numbers[0]
        assert isinstance(named, NamedMap)
        owners = map_of(shard)
        parts = [_rows_of_each(owners.part(part), unit) for part in range(owners.parts)]
        return replace(shard, numbers=(NamedMap(named.name, Owners.of_rows(parts)),))
    if shard.order == "cyclic" and not shard.numbers:
        return replace(shard, numbers=(unit,))
    return replace(shard, numbers=tuple(_scaled_number(number, unit) for number in shard.numbers))


def _scaled_number(number: Width | NamedMap, unit: int) -> Width:
    assert not isinstance(number, NamedMap)
    if isinstance(number, int):
        return number * unit
    return tuple(row * unit for row in number)


def _interval_ends(runs: Runs) -> tuple[int, ...]:
    """List the start and stop of every interval of a block, as `intervals` does."""
    ends: list[int] = []
    for run in merge_adjacent(unrolled(runs)):
        ends += [run.start, run.start + run.length]
    return tuple(ends) if ends else (0, 0)
