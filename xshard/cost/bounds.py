"""Lower bounds: the fewest elements that must reach all devices, and the busiest one, whatever the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.partition import ceil_div
from xshard.layout.pieces import concatenate_tables, cut_at_edges, distinct_rows, runs_by_row
from xshard.layout.providers import distinct_held_rows, wanted_rows
from xshard.layout.runs import (
    Rows,
    Runs,
    as_runs,
    common_segments,
    count_rows,
    interval_table,
    row_numbers,
)
from xshard.notation.overlap import Fold
from xshard.steps import Exchange
from xshard.steps.base import REDUCERS
from xshard.steps.exchange.even_traffic import elements_staying
from xshard.steps.exchange.sources import dim_end
from xshard.steps.exchange.traffic import (
    begun_axes,
    ended_axes,
    link_cuts,
    received_from,
    rows_in_common,
)
from xshard.steps.permute import block_keys

Count = TypeVar("Count", int, NDArray[np.float64])


def received_elements(source: Sharding, target: Sharding) -> int:
    """Return a lower bound of the elements that the busiest device receives in a redistribution.

    `n/dp -> n` of 8 on 4 devices: a device has 2 of 8, and lacks 6. Both shardings are in normal
    form, on one mesh. The bound is

    - if partial sums are reduced: what all devices must receive together, over their number;
    - if blocks may repeat rows (halos): what a device lacks, with each row counted once;
    - if a value becomes partial sums: what the devices of one sum lack together, over their number,
      since any of them may hold an element as its addend, and the others zeros;
    - else: the elements of a device's new block that it does not have.
    """
    mesh = target.mesh
    if ended_axes(source.layout, target.layout):
        return ceil_div(total_elements(source, target), mesh.n_devices)
    if source.layout.has_overlap or target.layout.has_overlap:
        return _received_with_overlaps(source, target)
    begun_sum_axes = begun_axes(source.layout, target.layout)
    if not begun_sum_axes:
        return Exchange(target.layout).traffic(source).received
    # `_lacking_elements` has a dim for each mesh axis. Add up the devices that hold
    # addends of one sum.
    lacking_of_sums = _lacking_elements(source, target).sum(
        axis=tuple(mesh.position(axis) for axis in begun_sum_axes)
    )
    return ceil_div(int(lacking_of_sums.max()), mesh.size(*begun_sum_axes))


def total_elements(source: Sharding, target: Sharding) -> int:
    """Return a lower bound of the elements that all devices together receive in a redistribution.

    Both shardings are in normal form, on one mesh. An owner of an element is a device whose new
    block has it. The bound is

    - without a reduction: the elements of all new blocks that their devices do not have;
    - with one, of n addends to m owners: n-1 + m-1 for each element, since n-1 messages bring the
      addends together on some device, and m-1 go to the other owners. 100 elements that are
      all-reduced on 4 devices: 100 * (3 + 3) = 600;
    - one more for an element if no owner holds an addend: an owner then receives all n addends, or
      the sum from a device that is no owner;
    - all of that times the number of partial sums that remain along other mesh axes.
    """
    mesh = target.mesh
    ended_sum_axes = ended_axes(source.layout, target.layout)
    if not ended_sum_axes:
        return int(_lacking_elements(source, target).sum())
    begun_sum_axes = begun_axes(source.layout, target.layout)
    # With halos of negative width, some elements of the array may be in no block.
    if source.layout.has_overlap or target.layout.has_overlap:
        elements = _elements_in_both(source, target)
    else:
        elements = math.prod(target.shape)
    n_messages = reduction_messages(elements, mesh.size(*ended_sum_axes), _n_owners(target))
    # An element whose owners hold no addend takes one message more. If a value also becomes partial
    # sums along other axes, any device may hold the addend, and nothing more is certain.
    if not begun_sum_axes:
        n_messages += max(0, elements - _elements_staying(source, target))
    sums = target.layout.tagged(*REDUCERS)
    # Partial sums before and after.
    kept_sum_axes = [axis for axis in sums if axis not in begun_sum_axes]
    return n_messages * mesh.size(*kept_sum_axes)


def _n_owners(sharding: Sharding) -> int:
    """Count the devices that have each element, or each addend of it."""
    mesh = sharding.mesh
    used_axes = (*sharding.layout.sharding_axes, *sharding.layout.tagged(*REDUCERS))
    return mesh.n_devices // mesh.size(*used_axes)


def reduction_messages(elements: Count, addends: Count, copies: Count) -> Count:
    """Return the fewest elements received in total where sums of `addends` end in `copies`.

    100 elements, 4 addends, 1 copy (a reduce-scatter): 300; 4 copies (an all-reduce): 600. Arrays
    of numbers give an array.
    """
    return elements * (addends + copies - 2)


def _lacking_elements(source: Sharding, target: Sharding) -> NDArray[np.int64]:
    """Return the elements that every device needs and does not have, as an array over the mesh."""
    mesh = target.mesh
    needed = received_from(source, target, ()).elements
    at_hand = received_from(source, target, mesh.axes).elements
    return np.broadcast_to(needed - at_hand, mesh.sizes)


def _received_with_overlaps(source: Sharding, target: Sharding) -> int:
    """Return the most elements that any device lacks of its new block, where blocks have halos.

    Rows that a block holds twice count once. A row whose contributions are still to be added up
    (`fold`) is not complete, and does not count as held.
    """
    mesh = target.mesh
    if begun_axes(source.layout, target.layout):
        return 0  # a lower bound, if a poor one: with halos no better one is known
    # Products over dims, for each device.
    wanted_elements = np.ones(mesh.n_devices, np.int64)
    present_elements = np.ones(mesh.n_devices, np.int64)
    for dim_index in range(len(target.shape)):
        needed_rows = _needed_rows(source, target, dim_index)
        for device in range(mesh.n_devices):
            wanted_rows = needed_rows.wanted[target.dim_device(dim_index, device)]
            complete_rows = needed_rows.complete[source.dim_device(dim_index, device)]
            wanted_elements[device] *= count_rows(wanted_rows)
            present_elements[device] *= _n_common(complete_rows, wanted_rows)
    return int((wanted_elements - present_elements).max())


def _elements_in_both(source: Sharding, target: Sharding) -> int:
    """Count the elements that any device holds at the source, and any at the destination."""
    elements = 1
    for dim_index in range(len(source.shape)):
        elements *= _n_common(_all_held(source, dim_index), _all_held(target, dim_index))
    return elements


def _all_held(sharding: Sharding, dim_index: int) -> Runs:
    """Return the rows of a dim that some device holds, each once."""
    rows_of_blocks = tuple(chain.from_iterable(sharding.held_by_position(dim_index)))
    [rows] = distinct_rows([rows_of_blocks])
    return rows


class NeededRows(NamedTuple):
    """The rows of one dim that a move is about: one entry for each position along the dim.

    Attributes:
        wanted: The rows that a device of the target has to have. Rows that are zero everywhere are
            left out: nobody sends them.
        complete: The rows that a device of the source holds with their final values. Rows that are
            the sum of what several blocks hold (under `fold`) are left out.
    """

    wanted: tuple[Runs, ...]
    complete: tuple[Runs, ...]


def _needed_rows(source: Sharding, target: Sharding, dim_index: int) -> NeededRows:
    """Find, for every position along dim `dim_index`, which rows its device wants, and which it has.

    `n/sp -> n/sp:halo(1,1)` of 4 rows on 2 devices: rows 0-2 and 1-3 are wanted, 0-1 and 2-3 are
    there. Each row is listed once, though a block may repeat it.
    """
    mesh = source.mesh
    src_dim = source.layout.dims[dim_index]
    dst_dim = target.layout.dims[dim_index]
    length = source.shape[dim_index]
    if src_dim == dst_dim and src_dim.overlap is not None:
        # An overlap that stays as it is: every device wants just what it holds. Under `fold` these
        # are contributions, not final values, but nothing is added up in this move.
        held_blocks = distinct_rows(source.held_by_position(dim_index))
        return NeededRows(wanted=held_blocks, complete=held_blocks)
    wanted_blocks = distinct_rows(wanted_rows(dst_dim, length, mesh.sizes_of(dst_dim.axes)))
    if isinstance(src_dim.overlap, Fold):
        contributions = distinct_rows(source.held_by_position(dim_index))
        return _needed_of_fold(wanted_blocks, contributions, length)
    present_blocks = distinct_held_rows(src_dim, length, mesh.sizes_of(src_dim.axes))
    return NeededRows(wanted=wanted_blocks, complete=distinct_rows(present_blocks))


def _needed_of_fold(
    target_blocks: tuple[Runs, ...], source_blocks: tuple[Runs, ...], length: int
) -> NeededRows:
    """Find which rows must be received, and which need no more addends, if overlaps are added up.

    Under `fold`, rows that several blocks hold are contributions to be added. A row in no block is
    zero: nobody sends it. A row in just one block is complete there. Blocks of rows 0-4 and 3-7: 3
    and 4 are sums of two contributions, all others are complete.

    target_blocks, source_blocks: the rows of the new blocks and of the old ones, by position along the
    dim. length: of the dim.
    """
    # `Rows` are row numbers as an array: many that no few runs describe. They are counted one by one.
    if any(isinstance(rows, Rows) for rows in (*source_blocks, *target_blocks)):
        all_rows = np.concatenate([row_numbers(block) for block in source_blocks])
        n_blocks = np.bincount(all_rows, minlength=length)  # that hold each row
        return NeededRows(
            wanted=tuple(
                as_runs(rows[n_blocks[rows] > 0]) for rows in map(row_numbers, target_blocks)
            ),
            complete=tuple(
                as_runs(rows[n_blocks[rows] == 1]) for rows in map(row_numbers, source_blocks)
            ),
        )
    return _needed_runs_of_fold(target_blocks, source_blocks)


def _needed_runs_of_fold(
    target_blocks: tuple[Runs, ...], source_blocks: tuple[Runs, ...]
) -> NeededRows:
    """Find the rows of `_needed_of_fold` by runs, without listing every row.

    All intervals are cut at the ends of all others, so that any two fragments are equal or disjoint;
    equal ones have one cell. 0-4 and 3-7 are fragments 0-2 (0), 3-4 (1), 3-4 (1) and 5-7 (2).
    """
    held_intervals = interval_table(source_blocks)
    target_intervals = interval_table(target_blocks)
    all_intervals = concatenate_tables(held_intervals, target_intervals)  # held ones first
    fragments, cell_index, interval_index = cut_at_edges(all_intervals)
    is_held = interval_index < len(held_intervals.start)
    n_fragments = len(cell_index)
    n_blocks = np.bincount(cell_index[is_held], minlength=n_fragments)[cell_index]
    return NeededRows(
        wanted=runs_by_row(fragments.take(~is_held & (n_blocks > 0)), len(target_blocks)),
        complete=runs_by_row(fragments.take(is_held & (n_blocks == 1)), len(source_blocks)),
    )


def _n_common(first_rows: Runs, second_rows: Runs) -> int:
    """Count the rows that are in both."""
    if isinstance(first_rows, Rows) or isinstance(second_rows, Rows):
        is_common = np.isin(row_numbers(second_rows), row_numbers(first_rows), kind="table")
        return int(is_common.sum())
    return sum(segment.length for segment in common_segments(first_rows, second_rows))


def _elements_staying(source: Sharding, target: Sharding) -> int:
    """Count the elements that one device holds on both sides; all if that has no closed form."""
    src_cuts = link_cuts(source, ())
    dst_cuts = link_cuts(target, ())
    if src_cuts is not None and dst_cuts is not None:
        n_staying = elements_staying(source.shape, src_cuts, dst_cuts)
        if n_staying is not None:
            return n_staying
    return math.prod(source.shape)  # too many: the bound that follows is lower, and still right


def shared_elements(source: Sharding, target: Sharding) -> NDArray[np.int64]:
    """Count the elements that each source block and each target block have in common.

    `n/a` and `n/b` of 4 rows on meshes of 2 and 4 devices: [[1, 1, 0, 0], [0, 0, 1, 1]]. Returns
    `[devices of source, devices of target]`. The shardings are in normal form, and may
    be on two meshes.
    """
    shared = np.ones((source.mesh.n_devices, target.mesh.n_devices), np.int64)
    for dim_index in range(len(source.shape)):
        common_rows = rows_in_common(dim_end(source, dim_index), dim_end(target, dim_index))
        src_indices = source.mesh.indices(source.layout.dims[dim_index].axes)
        dst_indices = target.mesh.indices(target.layout.dims[dim_index].axes)
        shared *= common_rows[np.ix_(src_indices, dst_indices)]
    return shared


def have_same_blocks(a: Sharding, b: Sharding, positions: Sequence[int]) -> bool:
    """Return whether devices hold the same rows and addends under both normal forms.

    positions: in the mesh of `a`, of the devices of `b` in their order.
    """
    if a.shape != b.shape or a.mesh.n_devices != b.mesh.n_devices:
        return False
    if _reductions(a) != _reductions(b):
        return False
    a_keys = list(block_keys(a))
    return [a_keys[position] for position in positions] == list(block_keys(b))


def _reductions(sharding: Sharding) -> list[str]:
    """Return the kinds of tags under which blocks are addends."""
    return [tag for tag, _ in sharding.layout.tags if tag != "copy"]


def received_elements_between(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> int:
    """Return a lower bound of the elements that the busiest device receives between two meshes.

    It is the most that a device of the target lacks of its block; or, if partial sums are reduced,
    the elements that all devices receive together, over the number of devices, if that is more.

    src_devices, dst_devices: the number of each device of the two meshes, in their order. A device
    may be in both.
    """
    addends = source.mesh.size(*source.layout.tagged(*REDUCERS))
    sums = target.layout.tagged(*REDUCERS)
    are_disjoint = set(src_devices).isdisjoint(dst_devices)
    if addends > 1 and sums and not are_disjoint:
        # Partial sums on both sides: an addend may stay where it is, as one of the new sum.
        return 0
    lacking = lacking_elements(source, target, src_devices, dst_devices)
    mean_lacking = ceil_div(int(lacking.max()), target.mesh.size(*sums))
    if addends == 1:
        return mean_lacking
    elements = math.prod(source.shape)
    messages = reduction_messages(elements, addends, _n_owners(target))
    # No device of the target holds an addend, so that each element is received once more.
    if are_disjoint:
        messages += elements
    n_devices = len({*src_devices, *dst_devices})
    return max(mean_lacking, ceil_div(messages, n_devices))


@layout_cache(maxsize=4096)
def lacking_elements(
    source: Sharding, target: Sharding, src_devices: tuple[int, ...], dst_devices: tuple[int, ...]
) -> NDArray[np.int64]:
    """Count the elements that every device of the target must receive: `[devices of target]`.

    Those are the elements of its block that it does not hold under `source`. If the target is
    partial sums, one device of each sum receives them, and the others may hold zeros.

    src_devices, dst_devices: the number of each device of the two meshes.
    """
    shared = shared_elements(source, target)
    needed = target.block_sizes
    present = np.zeros(len(dst_devices), np.int64)
    # If the source is partial sums, a device holds an addend of an element and not the element.
    if source.mesh.size(*source.layout.tagged(*REDUCERS)) == 1:
        src_position = {device: i for i, device in enumerate(src_devices)}
        for i, device in enumerate(dst_devices):
            if device in src_position:
                present[i] = shared[src_position[device], i]
    lacking = np.zeros_like(needed)
    # The devices of a group hold addends of one sum; without new sums each is a group of its own.
    for sum_group in target.mesh.groups(target.layout.tagged(*REDUCERS)):
        receiver = sum_group[0]
        lacking[receiver] = max(needed[receiver] - present[list(sum_group)].sum(), 0)
    return lacking
