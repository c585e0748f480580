"""Seconds of moves between layouts: bounds for all pairs at once, the planner's price for few.

A search compares thousands of pairs of layouts, and a plan takes milliseconds. So every pair begins
with a lower bound, bytes over bandwidth, and a pair is planned as soon as an assignment has it.
Equal moves of arrays of another size share a plan: seconds are a line in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.cost.model import LOCAL, Link, Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.plans.plan import find_plan
from xshard.search.request import Request
from xshard.step.price.options import (
    Flags,
    Floats,
    Placements,
    product_over,
    without_copies,
)
from xshard.step.record.arrays import COPY, REPLICAS, SUM, layout_of

LEADING = 64  # rows of the dims before those that a move is about
OCTAVES = 3  # one plan, and one line of prices, from 2**0 to 2**3 elements, to 2**6, ...


def dual(placements: Placements) -> Placements:
    """Return the layouts of cotangents: SUM and COPY change places."""
    return np.where(placements == SUM, COPY, np.where(placements == COPY, SUM, placements))


class AxisMove(NamedTuple):
    """What one mesh axis does in an array before a move and after it, as placements."""

    axis: int
    src: int
    dst: int


class Line(NamedTuple):
    """Seconds of a move at two numbers of elements; between them they are a line."""

    elements: int
    seconds: float
    most_elements: int
    most_seconds: float

    def seconds_at(self, elements: float) -> float:
        """Read the seconds for a number of elements off the line; never below its start."""
        more = max(elements - self.elements, 0)
        rise = self.most_seconds - self.seconds
        return self.seconds + rise * more / (self.most_elements - self.elements)


class MoveTable(NamedTuple):
    """Seconds of all moves of an array: bounds, replaced by prices when a move is planned.

    seconds: [forward and backward, src layouts, dst layouts]. is_planned: [src layouts, dst
    layouts].
    """

    seconds: Floats
    is_planned: Flags


class Levels(NamedTuple):
    """The mesh axes by links; an axis is in two parts if some of its devices share a node.

    axes, sizes, links, is_far: for each part the number of its axis, its size, its link, and
    whether others are faster.
    """

    axes: list[int]
    sizes: Floats
    links: list[Link]
    is_far: Flags


@dataclass(eq=False)
class MovePrices:
    """The seconds of moves on one mesh of one machine, for arrays of a dtype."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _tables: dict[tuple[object, ...], MoveTable] = field(default_factory=dict)

    def price(
        self, src: Iterable[int], dst: Iterable[int], lengths: Sequence[int], share: float = 1.0
    ) -> float:
        """Return the seconds that the planner's plan takes to move one array between two layouts.

        It is not the plan of this very array. Moves that are alike, of arrays of other sizes, have
        one plan, whose seconds are read off a line over the number of elements.

        Args:
            src: Placements before, one per mesh axis: the number of the dim that the axis shards,
                or a negative tag.
            dst: Placements after.
            lengths: The global shape of the array.
            share: The array's part of the elements that move in one collective, 0 to 1. It is
                charged this part of the collective's seconds.
        """
        starts = without_copies(list(src)).tolist()  # a copy has the values of a replica
        ends = without_copies(list(dst)).tolist()
        if starts == ends:
            return 0.0
        moves = list(map(AxisMove, range(len(starts)), starts, ends))
        still = _still_axes(moves, len(lengths))
        # Along axes where nothing moves, each group of devices moves a block of its own, all at
        # the same time. A sum there has addends as large as the array, so that nothing is divided.
        n_blocks = math.prod(self.mesh.sizes[a] for a in still if moves[a].src >= 0)
        elements = math.prod(lengths) / share / n_blocks  # of the whole collective, per group
        moves = self._taking_part([move for move in moves if move.axis not in still])
        # Small moves are latency, large ones bandwidth: a line is good within a few octaves. So
        # sizes are rounded down to 2**0, 2**3, 2**6, ..., each with a line up to the next one.
        log_elements = int(math.log2(max(elements, 1)))
        octave = max(0, log_elements // OCTAVES * OCTAVES)
        # Several arrays in one collective are packed: their blocks are many runs in memory.
        is_contiguous = share == 1 and _begins_with(moves, lengths)
        line = _line(self.mesh, self.dtype, self.profile, tuple(moves), is_contiguous, octave)
        return share * line.seconds_at(elements)

    def _taking_part(self, moves: Sequence[AxisMove]) -> list[AxisMove]:
        """Keep the axes along which devices take part in a move."""
        moving = {move.axis for move in moves if (move.src, move.dst) != (REPLICAS, REPLICAS)}
        axes = np.array(self._levels.axes)
        is_far = self._levels.is_far
        if not moving.isdisjoint(axes[is_far].tolist()):
            # Devices with replicas help where a node has several links to others.
            moving.update(axes[~is_far].tolist())
        return [move for move in moves if move.axis in moving]

    def table(
        self,
        src: Placements,
        dst: Placements,
        shape: tuple[int, ...],
        is_linear: bool,
        share: float,
    ) -> MoveTable:
        """Return the seconds of all moves of an array between some layouts: one table for all uses.

        A new table has lower bounds. Callers write prices into it (`Edge.plan`), which all others
        with the same layouts, shape and share then see, in other problems, too.

        Args:
            src: Layouts before: [src layouts, axes].
            dst: Layouts after: [dst layouts, axes].
            shape: The global shape of the array.
            is_linear: The move has an adjoint in the backward pass; else that takes no seconds.
            share: The array's part of the elements that move in one collective.
        """
        key = (src.tobytes(), dst.tobytes(), shape, is_linear, share)
        if key not in self._tables:
            elements = math.prod(shape)
            launch_s, element_s = self.bounds(src, dst)
            forward = share * launch_s + element_s * elements
            # Cotangents move from the dual of the destination to the dual of the source.
            launch_s, element_s = self.bounds(dual(dst), dual(src))
            backward = share * launch_s + element_s * elements  # [dst, src], hence transposed
            seconds = np.stack([forward, backward.T * is_linear])
            self._tables[key] = MoveTable(seconds, np.zeros(forward.shape, bool))
        return self._tables[key]

    def bounds(self, src: Placements, dst: Placements) -> tuple[Floats, Floats]:
        """Bound the seconds of moves between all pairs of layouts from below.

        A device receives what it needs and lacks, or all addends but one in the mean. A part of
        that comes from other nodes, through the links of all devices of its node. Bytes over the
        bandwidth of the fastest such link, and one launch, are what no plan beats.

        Args:
            src: Layouts before: [src layouts, axes].
            dst: Layouts after: [dst layouts, axes].

        Returns:
            Seconds of a launch, and seconds for each element of the global array: [src, dst] each.
        """
        # An axis that spans nodes has two levels: its placement is repeated for both.
        axes, sizes, links, is_far = self._levels
        src = without_copies(src)[:, axes]
        dst = without_copies(dst)[:, axes]
        received = _received(src, dst, sizes)  # shares of the array, like those below
        from_other_nodes = _received_from_other_nodes(src, dst, sizes, is_far)
        from_own_node = np.maximum(received - from_other_nodes, 0)
        # The fastest link is within a node (`argmin` finds the first False); between nodes the best
        # case is the fastest of the others.
        near_link = links[int(is_far.argmin())]
        other_links = [link for link in links if link != near_link]
        far_link = max(other_links, key=lambda link: link.bytes_per_s, default=near_link)
        byte_s = from_other_nodes / far_link.bytes_per_s + from_own_node / near_link.bytes_per_s
        # Whatever the planner chooses has one launch at least, of the cheapest collective.
        launches = [seconds for kind, seconds in self.profile.launch_s if kind not in LOCAL]
        launch_s = min(launches, default=0.0) + near_link.latency_s
        return np.where(received > 0, launch_s, 0.0), byte_s * itemsize(self.dtype)

    @cached_property
    def slow_axes(self) -> Flags:
        """Which axes are over slower links than others."""
        far_axes = np.array(self._levels.axes)[self._levels.is_far]
        return np.isin(range(len(self.mesh.axes)), far_axes)

    @cached_property
    def _levels(self) -> Levels:
        fabric = self.profile.fabric(self.mesh)
        numbers = {axis: number for number, axis in enumerate(self.mesh.axes)}
        spans = sorted(fabric.spans, key=lambda span: (numbers[span.axis], -span.stride))
        links = [fabric.links[span.level] for span in spans]
        fastest = max(link.bytes_per_s for link in links)
        return Levels(
            axes=[numbers[span.axis] for span in spans],
            sizes=np.array([span.size for span in spans], dtype=float),
            links=links,
            is_far=np.array([link.bytes_per_s < fastest for link in links]),
        )


def _received_from_other_nodes(
    src: Placements, dst: Placements, sizes: Floats, is_far: Flags
) -> Floats:
    """Bound the share of an array that a device's links to other nodes carry: [src, dst].

    A node is like one device of a mesh of the far axes alone, and has the links of all its devices.
    """
    if not is_far.any():
        return np.zeros((len(src), len(dst)))
    node_size = np.prod(sizes[~is_far])
    between_nodes = _received(
        np.where(is_far, src, REPLICAS),
        np.where(is_far, dst, REPLICAS),
        np.where(is_far, sizes, 1),
    )
    return np.asarray(between_nodes / node_size)


def _still_axes(moves: Sequence[AxisMove], ndim: int) -> set[int]:
    """Find the axes along which nothing moves: groups of devices move their blocks apart.

    They sum at both ends, or are the outermost ones of a dim that shard it at both ends: in
    `b/dp/tp -> b/dp` dp, and in `b/dp/tp -> b/tp` none.
    """
    still = {move.axis for move in moves if move.src == move.dst == SUM}
    for dim in range(ndim):
        for move in moves:  # in the order of the mesh: outer axes of a dim first
            if dim not in (move.src, move.dst):
                continue
            if (move.src, move.dst) != (dim, dim):
                break  # axes that shard the dim further inside meet other blocks
            still.add(move.axis)
    return still


def _begins_with(moves: Sequence[AxisMove], lengths: Sequence[int]) -> bool:
    """Tell whether an array begins with the dims that move, but for dims of length 1."""
    first = min(_sharded_dims(moves), default=0)
    return all(length == 1 for length in lengths[:first])


@layout_cache(maxsize=2**14)
def _line(
    mesh: Mesh,
    dtype: str,
    profile: Profile,
    moves: tuple[AxisMove, ...],
    is_contiguous: bool,
    octave: int,
) -> Line:
    """Plan a move on the mesh of the axes that take part in it, and price it at two sizes.

    Args:
        mesh: The whole mesh.
        dtype: Of the array.
        profile: The machine.
        moves: What each axis that takes part does; others are left out of the plan.
        is_contiguous: Every dim before those that move has length 1.
        octave: The smaller size has about 2**octave elements, the larger one 2**OCTAVES times as
            many.
    """
    # Only axes that take part are planned: the state space grows with each axis.
    axes = tuple(mesh.axes[move.axis] for move in moves)
    submesh = Mesh({axis: mesh.size(axis) for axis in axes})
    # A made-up array serves all arrays that move so: dims are numbered anew in it.
    shape, placement_in_array = _small_array(mesh, moves, is_contiguous)
    names = [f"d{i}" for i in range(len(shape) + 1)]  # of its dims, and of the one that is appended
    src = layout_of([placement_in_array[move.src] for move in moves], names, axes)
    dst = layout_of([placement_in_array[move.dst] for move in moves], names, axes)
    small = _with_rows(shape, 2**octave, submesh)
    middle = _with_rows(shape, 2 ** (octave + OCTAVES // 2), submesh)
    large = _with_rows(shape, 2 ** (octave + OCTAVES), submesh)
    request = Request.on_mesh(submesh, src, dst, middle, dtype, profile.for_axes(axes, mesh))
    plan = find_plan(request)
    # The plan of the middle serves both ends: it is the best near them, too.
    small_s = replace(plan, shape=small).cost
    large_s = replace(plan, shape=large).cost
    elements = math.prod(small)
    # A large shape may be no larger, as lengths are multiples of the devices: a line needs two ends.
    return Line(elements, small_s, max(math.prod(large), elements + 1), large_s)


def _small_array(
    mesh: Mesh, moves: Sequence[AxisMove], is_contiguous: bool
) -> tuple[list[int], dict[int, int]]:
    """Return the shape of the smallest array that moves so, and each placement's number in it.

    It has the dims that are sharded before or after the move, each as long as its axes are. An axis
    of size 4 that moves from dim 1 to dim 3: the shape (4, 4), where dim 1 is 0 and dim 3 is 1.
    """
    # Blocks of inner dims are many runs in memory, which a dim before them stands for.
    shape = [] if is_contiguous else [LEADING]
    placement_in_array = {REPLICAS: REPLICAS, SUM: SUM}  # tags are the same in every array
    for dim in _sharded_dims(moves):
        placement_in_array[dim] = len(shape)
        axes = [move.axis for move in moves if dim in (move.src, move.dst)]
        shape.append(math.prod(mesh.sizes[axis] for axis in axes))
    return shape, placement_in_array


def _sharded_dims(moves: Sequence[AxisMove]) -> list[int]:
    """List the dims that an axis shards before or after a move, in order."""
    placements = {move.src for move in moves} | {move.dst for move in moves}
    return sorted(placement for placement in placements if placement >= 0)


def _with_rows(shape: Sequence[int], elements: int, mesh: Mesh) -> tuple[int, ...]:
    """Append a dim that no layout shards, to reach about so many elements.

    Its length is a multiple of the devices, so that steps of a plan may shard it evenly.
    """
    elements_at_least = math.prod(shape) * mesh.n_devices
    length = max(1, elements // elements_at_least) * mesh.n_devices
    return (*shape, length)


def _received(src: Placements, dst: Placements, sizes: Floats) -> Floats:
    """Bound the share of an array that the busiest device receives, for all pairs of layouts.

    Over 4 devices, from sharded to whole: 3/4 of the array. From partial sums to sharded (a
    reduce-scatter): 3/4, and to whole (an all-reduce): 6/4.

    Args:
        src: Layouts before, without copies: [src layouts, axes].
        dst: Layouts after, without copies: [dst layouts, axes].
        sizes: Of the axes.

    Returns:
        At least 0: [src layouts, dst layouts].
    """
    is_sum_before = (src == SUM)[:, None]  # [src layouts, 1, axes]
    is_sum_after = (dst == SUM)[None]
    n_addends = product_over(is_sum_before & ~is_sum_after, sizes)  # that are added up
    n_copies = product_over(dst == REPLICAS, sizes)[None]
    n_sums_left = product_over(is_sum_before & is_sum_after, sizes)  # that stay as they are
    # All devices together receive every addend of every element but one, and every copy but one:
    # the busiest at least the mean of that.
    by_sums = n_sums_left * (n_addends - 1 + n_copies - 1) / sizes.prod()
    # A sum that begins can spread what a device has over its addends.
    n_addends_begun = product_over(is_sum_after & ~is_sum_before, sizes)
    needed = 1 / product_over(dst >= 0, sizes)[None]
    held = 1 / product_over(src >= 0, sizes)[:, None]
    lacking = needed - _overlap(src, dst, sizes)
    by_new_sums = np.maximum(needed / n_addends_begun - held, 0)
    by_moves = np.where(n_addends_begun > 1, by_new_sums, lacking)
    return np.where(n_addends > 1, by_sums, by_moves)


def _overlap(src: Placements, dst: Placements, sizes: Floats) -> Floats:
    """Return the share of an array that the busiest device keeps: what it holds at both ends.

    The busiest one keeps least. For a dim it holds the finer of both blocks, if one is inside the
    other on every device: `b/dp -> b/dp/tp` keeps all of the new block. Else some device has
    blocks that do not meet, and keeps nothing: in `b/dp -> b/tp` device (0, 1) has the first half
    before, and the second half after.

    src, dst: [layouts, axes], without copies. Returns [src layouts, dst layouts].
    """
    overlap = np.ones((len(src), len(dst)))
    n_dims = max(src.max(initial=0), dst.max(initial=0)) + 1
    for dim in range(n_dims):
        before = (src == dim)[:, None]  # the axes that shard the dim
        after = (dst == dim)[None]
        n_blocks = np.maximum(product_over(before, sizes), product_over(after, sizes))
        only_before = before & ~after
        only_after = after & ~before
        # Axes are from outer to inner. Inside an axis that shards the dim at one end only, an axis
        # that shards it at both ends counts smaller blocks at that end: they are elsewhere.
        differs_so_far = np.logical_or.accumulate(only_before | only_after, -1)
        is_apart = (before & after & differs_so_far).any(-1)
        is_apart |= only_before.any(-1) & only_after.any(-1)
        overlap *= np.where(is_apart, 0, 1 / n_blocks)
    return overlap
