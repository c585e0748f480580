"""Lower bounds: the fewest elements that must reach all devices, and the busiest one, whatever the plan."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.pieces import ascending, at_edges, distinct, joined
from xshard.layout.providers import rows_at_hand, wanted_rows
from xshard.layout.runs import Rows, Runs, as_runs, common_segments, n_rows, pieces, row_numbers
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
    """Fewest elements the busiest device must receive between two shardings in normal form. Those that its
    block lacks; their mean over a sum that begins, since any device may contribute an element; the mean over
    all devices if a reduction ends.
    """
    mesh = dst.mesh
    begins = begun_axes(src.layout, dst.layout)
    if ended_axes(src.layout, dst.layout):
        return -(-total_elements(src, dst) // mesh.n_devices)
    if src.layout.overlaps or dst.layout.overlaps:
        return _received_with_overlaps(src, dst)
    if not begins:
        return Exchange(dst.layout).traffic(src).received
    total = _lacking(src, dst).sum(axis=tuple(mesh.position(a) for a in begins))
    return -(-int(total.max()) // mesh.size(*begins))


def total_elements(src: Sharding, dst: Sharding) -> int:
    """Fewest elements that all devices together must receive between two shardings in normal form. If a
    reduction of n addends ends in m copies, an element takes n-1 + m-1 messages: n-1 until some device has
    all, and one to every other owner. It takes one more if no owner holds an addend: then the first to have
    all is not an owner, or it received all n. Every sum that stays multiplies that.
    """
    mesh = dst.mesh
    ended = ended_axes(src.layout, dst.layout)
    begins = begun_axes(src.layout, dst.layout)
    if not ended:
        return int(_lacking(src, dst).sum())
    sums = dst.layout.tagged("sum", "max", "min")
    copies = mesh.n_devices // mesh.size(*dst.layout.cut_axes, *sums)
    overlap = src.layout.overlaps or dst.layout.overlaps
    whole = _reached(src, dst) if overlap else math.prod(dst.shape)
    messages = reduction_messages(whole, mesh.size(*ended), copies)
    if not begins:
        messages += max(0, whole - _met(src, dst))
    return messages * mesh.size(*(a for a in sums if a not in begins))


def reduction_messages(elements: int, addends: int, copies: int) -> int:
    """Fewest elements received in total where sums of `addends` end in `copies`, element by element."""
    return elements * (addends + copies - 2)


def least_received(elements: int, n_devices: int, addends: int, copies: int, kept: int = 1) -> int:
    """`reduction_messages` of the mean device, a bound for the busiest; kept: sums that stay and move."""
    return -(-reduction_messages(elements, addends, copies) * kept // n_devices)


def _lacking(src: Sharding, dst: Sharding) -> np.ndarray:
    """Elements that every device needs and does not have, as an array over the mesh."""
    mesh = dst.mesh
    lacking = received_from(src, dst, ()).elements - received_from(src, dst, mesh.axes).elements
    return np.broadcast_to(lacking, mesh.sizes)


def _received_with_overlaps(src: Sharding, dst: Sharding) -> int:
    """`received_elements` with every element counted once, however often a block repeats its row."""
    mesh = dst.mesh
    if begun_axes(src.layout, dst.layout):
        return 0
    needed, at_hand = np.ones((2, mesh.n_devices), np.int64)
    for d in range(len(dst.shape)):
        wanted, complete = _needed_rows(src, dst, d)
        for device in range(mesh.n_devices):
            rows = wanted[dst.dim_device(d, device)]
            needed[device] *= n_rows(rows)
            at_hand[device] *= _common(complete[src.dim_device(d, device)], rows)
    return int((needed - at_hand).max())


def _reached(src: Sharding, dst: Sharding) -> int:
    """Elements that some device has on both sides."""
    n = 1
    for d in range(len(src.shape)):
        here, there = (distinct([tuple(itertools.chain(*end.holders(d)))])[0] for end in (src, dst))
        n *= _common(here, there)
    return n


def _needed_rows(src: Sharding, dst: Sharding, d: int) -> tuple[tuple[Runs, ...], tuple[Runs, ...]]:
    """The rows that every index of `dst` wants, and those that every index of `src` has, whole."""
    a = src.layout.dims[d]
    b = dst.layout.dims[d]
    every, asked = ((dim, src.shape[d], src.mesh.sizes_of(dim.axes)) for dim in (a, b))
    if a == b and a.overlap is not None:  # all rows stay on their device
        return (held := distinct(src.holders(d))), held
    wanted = distinct(wanted_rows(*asked))
    if not isinstance(a.overlap, Fold):
        return wanted, distinct(rows_at_hand(*every))
    blocks = distinct(src.holders(d))
    if any(isinstance(rows, Rows) for rows in (*blocks, *wanted)):
        times = np.bincount(np.concatenate([*map(row_numbers, blocks)]), minlength=src.shape[d])
        some = tuple(as_runs(rows[times[rows] > 0]) for rows in map(row_numbers, wanted))
        return some, tuple(as_runs(rows[times[rows] == 1]) for rows in map(row_numbers, blocks))
    have = pieces(blocks)
    want = pieces(wanted)
    parts, interval, which = at_edges(joined(have, want))
    held_by = np.bincount(interval[(first := which < len(have.start))], minlength=len(interval))[
        interval
    ]
    return (
        ascending(parts.take(~first & (held_by > 0)), len(wanted)),  # others are zero
        ascending(parts.take(first & (held_by == 1)), len(blocks)),
    )


def _common(rows: Runs, others: Runs) -> int:
    """How many rows are in both."""
    if isinstance(rows, Rows) or isinstance(others, Rows):
        return int(np.isin(row_numbers(others), row_numbers(rows), kind="table").sum())
    return sum(segment.length for segment in common_segments(rows, others))


def _met(src: Sharding, dst: Sharding) -> int:
    """Elements that some device holds on both sides; all if that has no closed form."""
    cuts = [link_cuts(s, ()) for s in (src, dst)]
    met = None if cuts[0] is None or cuts[1] is None else met_elements(src.shape, cuts[0], cuts[1])
    return math.prod(src.shape) if met is None else met


def shared_elements(source: Sharding, target: Sharding) -> NDArray[np.int64]:
    """(devices of the source, devices of the target): elements of both blocks. Normal forms."""
    shared = np.ones((source.mesh.n_devices, target.mesh.n_devices), np.int64)
    for d in range(len(source.shape)):
        table = rows_in_common(dim_end(source, d), dim_end(target, d))
        places = (s.mesh.indices(s.layout.dims[d].axes) for s in (source, target))
        shared *= table[np.ix_(*places)]
    return shared


def have_same_blocks(a: Sharding, b: Sharding, places: Sequence[int]) -> bool:
    """Whether devices hold the same rows and addends under both normal forms; places: in the mesh of `a`."""
    kinds = ([kind for kind, _ in sharding.layout.tags if kind != "copy"] for sharding in (a, b))
    if a.shape != b.shape or a.mesh.n_devices != b.mesh.n_devices or operator.ne(*kinds):
        return False
    keys = list(block_keys(a))
    return [keys[i] for i in places] == list(block_keys(b))


def received_elements_between(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> int:
    """Fewest elements that the busiest device must receive between meshes, whatever the plan."""
    addends = source.mesh.size(*source.layout.tagged(*REDUCERS))
    sums = target.layout.tagged(*REDUCERS)
    disjoint = not {*src_devices} & {*dst_devices}
    if addends > 1 and sums and not disjoint:
        return 0  # an addend may stay where it is and be one of the new sum
    lacking = lacking_elements(source, target, src_devices, dst_devices)
    bound = -(-int(lacking.max()) // target.mesh.size(*sums))
    if addends > 1:
        copies = target.mesh.n_devices // target.mesh.size(*target.layout.cut_axes, *sums)
        elements = math.prod(source.shape)
        messages = reduction_messages(elements, addends, copies) + elements * disjoint
        bound = max(bound, -(-messages // len({*src_devices, *dst_devices})))
    return bound


@layout_cache(maxsize=4096)
def lacking_elements(
    source: Sharding, target: Sharding, src_devices: tuple[int, ...], dst_devices: tuple[int, ...]
) -> NDArray[np.int64]:
    """Elements that every device of the target lacks; only the first along a new sum needs any."""
    positions = {device: i for i, device in enumerate(src_devices)}
    shared = shared_elements(source, target)
    needed = target.block_sizes
    held = np.array(
        [shared[positions[d], j] if d in positions else 0 for j, d in enumerate(dst_devices)]
    )
    sums = target.layout.tagged(*REDUCERS)
    if source.mesh.size(*source.layout.tagged(*REDUCERS)) > 1:
        held = np.zeros_like(held)
    lacking = np.zeros_like(needed)
    for first, *others in target.mesh.groups(sums):
        lacking[first] = max(needed[first] - held[[first, *others]].sum(), 0)
    return lacking
