"""Lower bounds: the fewest elements that must reach all devices, and the busiest one, whatever the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.pieces import concatenate_tables, cut_at_edges, distinct_rows, runs_by_row
from xshard.layout.providers import distinct_held_rows, wanted_rows
from xshard.layout.runs import (
    Rows,
    Run,
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
from xshard.steps.exchange.even_traffic import met_elements
from xshard.steps.exchange.sources import dim_end
from xshard.steps.exchange.traffic import (
    begun_axes,
    ended_axes,
    link_cuts,
    received_from,
    rows_in_common,
)
from xshard.steps.permute import block_keys


def received_elements(src: Sharding, dst: Sharding) -> int:
    """Return the fewest elements that the busiest device must receive, whatever the plan.

    Both shardings are in normal form, on one mesh. The bound is

    - if a reduction ends: the mean over all devices of what all of them must receive together;
    - if a sum begins: the elements that a block lacks, as the mean over the devices of a sum, since any
      of them may contribute an element;
    - else: the elements that a device's block needs and that it does not have.
    """
    mesh = dst.mesh
    if ended_axes(src.layout, dst.layout):
        return _mean_rounded_up(total_elements(src, dst), mesh.n_devices)
    if src.layout.has_overlap or dst.layout.has_overlap:
        return _received_with_overlaps(src, dst)
    begun = begun_axes(src.layout, dst.layout)
    if not begun:
        return Exchange(dst.layout).traffic(src).received
    # `_lacking_elements` has an axis for each mesh axis: its sum over a group of the sum that begins.
    total = _lacking_elements(src, dst).sum(axis=tuple(mesh.position(axis) for axis in begun))
    return _mean_rounded_up(int(total.max()), mesh.size(*begun))


def _mean_rounded_up(elements: int, n: int) -> int:
    """Divide among n devices, rounded up: the busiest has at least the mean."""
    return -(-elements // n)


def total_elements(src: Sharding, dst: Sharding) -> int:
    """Return the fewest elements that all devices together must receive, whatever the plan.

    Both shardings are in normal form, on one mesh. The bound is

    - if no reduction ends: the elements that blocks need and that their devices do not have;
    - if reductions of n addends end in m copies: n-1 + m-1 messages for each element, n-1 until some
      device has all addends, and one to every other owner of the element;
    - one message more for an element if no owner holds an addend: the first device to have all is then not
      an owner, or it received all n;
    - all of that for every sum that stays.
    """
    mesh = dst.mesh
    ended = ended_axes(src.layout, dst.layout)
    if not ended:
        return int(_lacking_elements(src, dst).sum())
    begun = begun_axes(src.layout, dst.layout)
    sums = dst.layout.tagged("sum", "max", "min")
    # How many devices own each element of the result.
    copies = mesh.n_devices // mesh.size(*dst.layout.sharding_axes, *sums)
    if src.layout.has_overlap or dst.layout.has_overlap:
        elements = _reached_elements(src, dst)
    else:
        elements = math.prod(dst.shape)
    messages = reduction_messages(elements, mesh.size(*ended), copies)
    if not begun:  # a sum that begins may have an addend anywhere, so that owners hold some
        messages += max(0, elements - _met_elements(src, dst))
    staying = [axis for axis in sums if axis not in begun]
    return messages * mesh.size(*staying)


def reduction_messages(elements: int, addends: int, copies: int) -> int:
    """Return the fewest elements received in total where sums of `addends` end in `copies`.

    100 elements, 4 addends, 1 copy (a reduce-scatter): 300; 4 copies (an all-reduce): 600.
    """
    return elements * (addends + copies - 2)


def least_received(
    elements: int, n_devices: int, addends: int, copies: int, staying_sums: int = 1
) -> int:
    """Return the fewest elements that the mean device receives in a reduction: the busiest has no fewer.

    staying_sums: how many such reductions there are side by side, under sums that stay.
    """
    # Hot: in searches, called for each pair of states.
    return -(-reduction_messages(elements, addends, copies) * staying_sums // n_devices)


def _lacking_elements(src: Sharding, dst: Sharding) -> NDArray[np.int64]:
    """Return the elements that every device needs and does not have, as an array over the mesh."""
    mesh = dst.mesh
    needed = received_from(src, dst, ()).elements
    at_hand = received_from(src, dst, mesh.axes).elements
    return np.broadcast_to(needed - at_hand, mesh.sizes)


def _received_with_overlaps(src: Sharding, dst: Sharding) -> int:
    """Return `received_elements`, if blocks may repeat rows: an element counts once for a device.

    It is the most of any device: elements of the blocks it wants, less those it has complete.
    """
    mesh = dst.mesh
    if begun_axes(src.layout, dst.layout):
        return 0  # the least that is true: no better bound is known
    # Products over dims, for each device.
    needed = np.ones(mesh.n_devices, np.int64)
    at_hand = np.ones(mesh.n_devices, np.int64)
    for d in range(len(dst.shape)):
        rows = _needed_rows(src, dst, d)
        for device in range(mesh.n_devices):
            wanted = rows.wanted[dst.dim_device(d, device)]
            complete = rows.complete[src.dim_device(d, device)]
            needed[device] *= count_rows(wanted)
            at_hand[device] *= _n_common(complete, wanted)
    return int((needed - at_hand).max())


def _reached_elements(src: Sharding, dst: Sharding) -> int:
    """Return the number of elements that some device holds at the source, and some at the destination."""
    elements = 1
    for d in range(len(src.shape)):
        elements *= _n_common(_all_held(src, d), _all_held(dst, d))
    return elements


def _all_held(sharding: Sharding, d: int) -> Runs:
    """Return the rows of a dim that some device holds, each once."""
    runs: list[Run] = []
    for held in sharding.held_by_position(d):
        runs += held
    [rows] = distinct_rows([tuple(runs)])
    return rows


class NeededRows(NamedTuple):
    """The rows of one dim that a move is about, for each place along the dim."""

    wanted: tuple[Runs, ...]  # by every place of the destination, unless they are zero everywhere
    complete: tuple[Runs, ...]  # at every place of the source, with nothing to be added


def _needed_rows(src: Sharding, dst: Sharding, d: int) -> NeededRows:
    """Return which rows of a dim devices want, and which they have complete."""
    src_dim = src.layout.dims[d]
    dst_dim = dst.layout.dims[d]
    length = src.shape[d]
    if src_dim == dst_dim and src_dim.overlap is not None:  # all rows stay on their device
        held = distinct_rows(src.held_by_position(d))
        return NeededRows(held, held)
    wanted = distinct_rows(wanted_rows(dst_dim, length, src.mesh.sizes_of(dst_dim.axes)))
    if isinstance(src_dim.overlap, Fold):
        return _needed_of_fold(wanted, distinct_rows(src.held_by_position(d)), length)
    sizes = src.mesh.sizes_of(src_dim.axes)
    return NeededRows(wanted, distinct_rows(distinct_held_rows(src_dim, length, sizes)))


def _needed_of_fold(wanted: tuple[Runs, ...], blocks: tuple[Runs, ...], length: int) -> NeededRows:
    """Return the rows wanted from blocks whose contributions are added, and those that are complete.

    A row in no block is zero: nobody sends it. A row in just one block is complete there. Blocks of
    rows 0-4 and 3-7: 3 and 4 are sums of two contributions, all others are complete.

    wanted, blocks: the rows at every place along the dim. length: of the dim.
    """
    # `Rows` are row numbers as an array: many that no few runs describe. They are counted one by one.
    if any(isinstance(rows, Rows) for rows in (*blocks, *wanted)):
        all_rows = np.concatenate([row_numbers(block) for block in blocks])
        n_blocks = np.bincount(all_rows, minlength=length)  # that hold each row
        nonzero = []
        for rows in map(row_numbers, wanted):
            nonzero.append(as_runs(rows[n_blocks[rows] > 0]))
        complete = []
        for rows in map(row_numbers, blocks):
            complete.append(as_runs(rows[n_blocks[rows] == 1]))
        return NeededRows(tuple(nonzero), tuple(complete))

    held_pieces = interval_table(blocks)
    # The same count with runs. All are divided at the edges of all others, so that two parts are
    # equal or disjoint; equal ones have the same `interval`.
    parts, interval, source = cut_at_edges(concatenate_tables(held_pieces, interval_table(wanted)))
    # `source` numbers the piece that each part is of: first the pieces of blocks, then the wanted ones.
    is_held = source < len(held_pieces.start)
    n_blocks = np.bincount(interval[is_held], minlength=len(interval))[interval]
    return NeededRows(
        runs_by_row(parts.take(~is_held & (n_blocks > 0)), len(wanted)),
        runs_by_row(parts.take(is_held & (n_blocks == 1)), len(blocks)),
    )


def _n_common(rows: Runs, others: Runs) -> int:
    """Return how many rows are in both."""
    if isinstance(rows, Rows) or isinstance(others, Rows):
        is_common = np.isin(row_numbers(others), row_numbers(rows), kind="table")
        return int(is_common.sum())
    return sum(segment.length for segment in common_segments(rows, others))


def _met_elements(src: Sharding, dst: Sharding) -> int:
    """Return the elements that some device holds on both sides; all if that has no closed form."""
    src_cuts = link_cuts(src, ())
    dst_cuts = link_cuts(dst, ())
    met = None
    if src_cuts is not None and dst_cuts is not None:
        met = met_elements(src.shape, src_cuts, dst_cuts)
    if met is None:  # too many: the bound that follows is lower, and still right
        return math.prod(src.shape)
    return met


def shared_elements(source: Sharding, target: Sharding) -> NDArray[np.int64]:
    """Return how many elements two blocks have in common: `[devices of source, devices of target]`.

    The shardings are in normal form, and may be on two meshes.
    """
    shared = np.ones((source.mesh.n_devices, target.mesh.n_devices), np.int64)
    for d in range(len(source.shape)):
        common = rows_in_common(dim_end(source, d), dim_end(target, d))
        src_places = source.mesh.indices(source.layout.dims[d].axes)
        dst_places = target.mesh.indices(target.layout.dims[d].axes)
        shared *= common[np.ix_(src_places, dst_places)]
    return shared


def have_same_blocks(a: Sharding, b: Sharding, places: Sequence[int]) -> bool:
    """Return whether devices hold the same rows and addends under both normal forms.

    places: in the mesh of `a`, of the devices of `b` in their order.
    """
    if a.shape != b.shape or a.mesh.n_devices != b.mesh.n_devices:
        return False
    if _reductions(a) != _reductions(b):
        return False
    a_keys = list(block_keys(a))
    return [a_keys[i] for i in places] == list(block_keys(b))


def _reductions(sharding: Sharding) -> list[str]:
    """Return the kinds of tags under which blocks are addends."""
    return [kind for kind, _ in sharding.layout.tags if kind != "copy"]


def received_elements_between(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> int:
    """Return the fewest elements that the busiest device must receive between two meshes.

    The higher of two bounds: what a device lacks of its block, and, where sums end,
    the messages that all devices together need, over the number of devices.
    """
    addends = source.mesh.size(*source.layout.tagged(*REDUCERS))
    sums = target.layout.tagged(*REDUCERS)
    are_disjoint = set(src_devices).isdisjoint(dst_devices)
    if addends > 1 and sums and not are_disjoint:
        return 0  # an addend may stay where it is and be one of the new sum
    lacking = lacking_elements(source, target, src_devices, dst_devices)
    fewest = _mean_rounded_up(int(lacking.max()), target.mesh.size(*sums))
    if addends == 1:
        return fewest
    copies = target.mesh.n_devices // target.mesh.size(*target.layout.sharding_axes, *sums)
    elements = math.prod(source.shape)
    messages = reduction_messages(elements, addends, copies)
    if are_disjoint:  # no owner holds an addend: one message more for each element
        messages += elements
    n_devices = len({*src_devices, *dst_devices})
    return max(fewest, _mean_rounded_up(messages, n_devices))


@layout_cache(maxsize=4096)
def lacking_elements(
    source: Sharding, target: Sharding, src_devices: tuple[int, ...], dst_devices: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return how many elements every device of the target lacks: `[devices of target]`.

    Along a new sum only the first device needs any: the others may begin with zeros.
    """
    shared = shared_elements(source, target)
    needed = target.block_sizes
    at_hand = np.zeros(len(dst_devices), np.int64)
    # An addend is no element: under a reduction nothing is at hand.
    if source.mesh.size(*source.layout.tagged(*REDUCERS)) == 1:
        src_places = {device: i for i, device in enumerate(src_devices)}
        for i, device in enumerate(dst_devices):
            if device in src_places:
                at_hand[i] = shared[src_places[device], i]
    lacking = np.zeros_like(needed)
    for group in target.mesh.groups(target.layout.tagged(*REDUCERS)):
        first = group[0]
        lacking[first] = max(needed[first] - at_hand[list(group)].sum(), 0)
    return lacking
