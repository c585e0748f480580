"""Seconds of moves between layouts: bounds for all pairs at once, the planner's price for few.

A search compares thousands of pairs of layouts, and a plan takes milliseconds. So an `Edge` begins
with the table's lower bounds, bytes over bandwidth; planning overwrites an entry with the planner's
price (`raise_to_price`); and `StepSearch.offer` asks for that as soon as an assignment has the move.
Equal moves of arrays of another size share a plan: seconds are a line in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.cost.bounds import reduction_messages
from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import SubAxisMesh, root_of
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
# The host's work for each array that moves, beside the plan's own, as a multiple of an operation of a model:
# hooks, autograd, pieces of joint messages. Measured for the parameters of ZeRO-1 in torch (0.18 ms, where
# an operation takes 0.024 ms); activations have fewer hooks, and more of autograd.
MOVE_CALLS = 7
OCTAVES = 3  # one plan, and one line of prices, from 2**0 to 2**3 elements, to 2**6, ...


def dual(placements: Placements) -> Placements:
    """Return the layouts of cotangents: SUM and COPY change places."""
    return np.where(placements == SUM, COPY, np.where(placements == COPY, SUM, placements))


class AxisMove(NamedTuple):
    """What one mesh axis does in an array before a move and after it, as placements."""

    axis: int
    src: int
    dst: int

    @property
    def stays(self) -> bool:
        """Whether the axis does the same before and after."""
        return self.src == self.dst


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


class Spans(NamedTuple):
    """The mesh axes by links: one with devices in and between nodes is two spans.

    axes, sizes, is_far: for each span the number of its axis, its devices, and whether other spans
    have a faster link. far_bytes_per_s: of the fastest link of far spans.
    """

    axes: list[int]
    sizes: Floats
    is_far: Flags
    far_bytes_per_s: float


@dataclass(eq=False)
class MovePrices:
    """The seconds of moves on one mesh of one machine, for arrays of a dtype."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _tables: dict[tuple[object, ...], MoveTable] = field(default_factory=dict)

    def planned_seconds(
        self, src: Iterable[int], dst: Iterable[int], lengths: Sequence[int], share: float = 1.0
    ) -> float:
        """Price moving an array between two layouts: seconds of the plan that the planner finds.

        To plan each size of array would take too long. So a move is planned once for all sizes
        within a factor of 2**3, and the seconds are read off a line over the number of elements:
        latency plus elements over bandwidth.

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
        is_split = isinstance(self.mesh, SubAxisMesh)
        # The last two axes are parts of one axis of the user's, and move as that one if both do the same.
        if is_split and (starts[-2], ends[-2]) == (starts[-1], ends[-1]):
            return self._on_whole_axes.planned_seconds(starts[:-1], ends[:-1], lengths, share)
        all_moves = list(map(AxisMove, range(len(starts)), starts, ends))
        apart = _axes_apart(all_moves)
        # The groups along these axes move a block each, all at the same time. A sum there has
        # addends as large as the array, so that nothing is divided.
        sharding_apart = [axis for axis in apart if all_moves[axis].src >= 0]
        n_blocks = math.prod(self.mesh.sizes[axis] for axis in sharding_apart)
        elements = math.prod(lengths) / share / n_blocks  # of the whole collective, per group
        moves = self._taking_part([move for move in all_moves if move.axis not in apart])
        # Several arrays in one collective are packed: their blocks are many runs in memory.
        is_contiguous = share == 1 and _begins_with(moves, lengths)
        exponent = _line_start(elements)
        line = _line(self.mesh, self.dtype, self.profile, tuple(moves), is_contiguous, exponent)
        moving_s = share * line.seconds_at(elements)
        return self.profile.step_slowdown * moving_s + MOVE_CALLS * self.profile.call_s

    def _taking_part(self, moves: Sequence[AxisMove]) -> list[AxisMove]:
        """Keep the axes along which devices take part in a move."""
        moving = {move.axis for move in moves if not move.stays or move.src != REPLICAS}
        axes = np.array(self._spans.axes)
        is_far = self._spans.is_far
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
        """Look up or make the table of seconds of an array's moves between all pairs of layouts.

        All callers with the same layouts, shape and share have one table, so that each move is
        planned once, in other problems, too. For the arguments see `MoveTable`.
        """
        key = (src.tobytes(), dst.tobytes(), shape, is_linear, share)
        if key not in self._tables:
            self._tables[key] = MoveTable(self, src, dst, shape, is_linear, share)
        return self._tables[key]

    def bounds(
        self, src: Placements, dst: Placements, shape: Sequence[int], share: float = 1.0
    ) -> Floats:
        """Bound the seconds of moves between all pairs of layouts from below, without planning.

        No plan takes less than one launch of a collective, and the bytes that a device has to
        receive over the bandwidth of the fastest link. A device receives at least what it needs and
        lacks; where partial sums are added up, at least the mean over devices of all addends but
        one. What has to come from other nodes is shared by the links of all devices of its node.

        Args:
            src: Layouts before: [src layouts, axes].
            dst: Layouts after: [dst layouts, axes].
            shape: The global shape of the array.
            share: The array's part of the elements that move in one collective, 0 to 1.

        Returns:
            Seconds: [src layouts, dst layouts].
        """
        axes, sizes, is_far, far_bytes_per_s = self._spans
        # An axis with two spans has its placement twice: [layouts, spans].
        src = without_copies(src)[:, axes]
        dst = without_copies(dst)[:, axes]
        received = _received(src, dst, sizes)  # shares of the array, like those below
        from_other_nodes = _received_from_other_nodes(src, dst, sizes, is_far)
        from_own_node = np.maximum(received - from_other_nodes, 0)
        fabric = self.profile.fabric(self.mesh)
        byte_s = from_other_nodes / far_bytes_per_s + from_own_node / fabric.fastest_bytes_per_s
        launch_s = np.where(received > 0, fabric.least_step_s, 0.0)
        calling_s = np.where(received > 0, MOVE_CALLS * self.profile.call_s, 0.0)
        moving_s = share * launch_s + byte_s * itemsize(self.dtype) * math.prod(shape)
        return np.asarray(self.profile.step_slowdown * moving_s + calling_s)

    @cached_property
    def _on_whole_axes(self) -> MovePrices:
        return MovePrices(root_of(self.mesh), self.dtype, self.profile)

    @property
    def n_near_devices(self) -> int:
        """How many devices have links to each other that no others are faster than."""
        return int(self._spans.sizes[~self._spans.is_far].prod())

    @cached_property
    def _spans(self) -> Spans:
        fabric = self.profile.fabric(self.mesh)
        numbers = {axis: number for number, axis in enumerate(self.mesh.axes)}
        spans = sorted(fabric.spans, key=lambda span: (numbers[span.axis], -span.stride))
        rates = np.array([fabric.links[span.level].bytes_per_s for span in spans])
        is_far = rates < rates.max()
        return Spans(
            axes=[numbers[span.axis] for span in spans],
            sizes=np.array([span.size for span in spans], dtype=float),
            is_far=is_far,
            far_bytes_per_s=rates[is_far].max(initial=rates.min()),
        )


@dataclass(eq=False)
class MoveTable:
    """Seconds of all moves of an array: lower bounds, replaced by prices when a move is planned.

    Args:
        prices: The seconds of moves on the mesh.
        src: Layouts before: [src layouts, axes].
        dst: Layouts after: [dst layouts, axes].
        shape: The global shape of the array.
        is_linear: The move has an adjoint in the backward pass; else that takes no seconds.
        share: The array's part of the elements that move in one collective.
        seconds: [forward and backward, src layouts, dst layouts].
        is_planned: Which moves have prices: [src layouts, dst layouts].
    """

    prices: MovePrices
    src: Placements
    dst: Placements
    shape: tuple[int, ...]
    is_linear: bool
    share: float
    seconds: Floats = field(init=False)
    is_planned: Flags = field(init=False)

    def __post_init__(self) -> None:
        bounds = partial(self.prices.bounds, shape=self.shape, share=self.share)
        forward = bounds(self.src, self.dst)
        # Cotangents move from the dual of the destination to the dual of the source.
        backward = bounds(dual(self.dst), dual(self.src)).T
        self.seconds = np.stack([forward, backward * self.is_linear])
        self.is_planned = np.zeros(forward.shape, bool)

    def raise_to_price(self, row: int, column: int) -> float:
        """Replace the lower bound of the move between two layouts by the planner's price.

        Returns the seconds by which the bound was too low, of both passes together; 0 if the move
        was planned before.
        """
        if self.is_planned[row, column]:
            return 0.0
        src = self.src[row]
        dst = self.dst[column]
        forward = self.prices.planned_seconds(src, dst, self.shape, self.share)
        backward = 0.0
        if self.is_linear:
            backward = self.prices.planned_seconds(dual(dst), dual(src), self.shape, self.share)
        added_s = forward + backward - self.seconds[:, row, column].sum()
        self.seconds[:, row, column] = (forward, backward)
        self.is_planned[row, column] = True
        return float(added_s)


def _received_from_other_nodes(
    src: Placements, dst: Placements, sizes: Floats, is_far: Flags
) -> Floats:
    """Bound the share of an array that a device's link to other nodes has to carry.

    A node is taken for one device of a mesh that has only the far axes, those between nodes. What
    it receives, the links of all its devices share: 3/4 of an array over a node of 8 devices is
    3/32 for each.

    src, dst: [layouts, axes]. is_far: the axes between nodes. Returns [src layouts, dst layouts],
    all 0 on a single node.
    """
    node_size = np.prod(sizes[~is_far])
    between_nodes = _received(
        np.where(is_far, src, REPLICAS),
        np.where(is_far, dst, REPLICAS),
        np.where(is_far, sizes, 1),
    )
    return between_nodes / node_size


def _axes_apart(moves: Sequence[AxisMove]) -> set[int]:
    """Find the mesh axes that no element crosses: the groups along them move apart.

    `b/dp/tp -> b/dp`: each group along dp gathers its own half of b over tp, and dp is apart.
    `b/dp/tp -> b/tp`: dp is not, for it is gathered. Nor is tp, though it shards b before and after:
    it cut halves of b into parts, and cuts the whole b then, which are other parts. So an axis is
    apart if it has partial sums before and after, or if it shards the same dim before and after,
    and so do all axes that shard this dim further out.

    Returns numbers of axes.
    """
    apart = {move.axis for move in moves if move.stays and move.src == SUM}
    for dim in _sharded_dims(moves):
        # In the order of the mesh, which is from the outermost shard to the innermost.
        sharding = [move for move in moves if dim in (move.src, move.dst)]
        for move in sharding:
            if not move.stays:
                break  # all axes further inside have other blocks
            apart.add(move.axis)
    return apart


def _line_start(elements: float) -> int:
    """Round a number of elements down to 2**0, 2**3, 2**6, ..., and return the exponent: 100 -> 6.

    Small moves are latency, large ones bandwidth, and the best plan may be another: a line is good
    only within a few octaves (powers of two).
    """
    exponent = int(math.log2(max(elements, 1)))
    return exponent // OCTAVES * OCTAVES


def _begins_with(moves: Sequence[AxisMove], lengths: Sequence[int]) -> bool:
    """Tell whether an array begins with the dims that move, but for dims of length 1."""
    # A dim that is sharded by whole units has its number plus that of all dims (`placement_by_units`).
    first = min((placement % len(lengths) for placement in _sharded_dims(moves)), default=0)
    return all(length == 1 for length in lengths[:first])


@layout_cache(maxsize=2**14)
def _line(
    mesh: Mesh,
    dtype: str,
    profile: Profile,
    moves: tuple[AxisMove, ...],
    is_contiguous: bool,
    exponent: int,
) -> Line:
    """Plan one move, and price the plan at two sizes: the ends of a line of seconds over elements.

    Args:
        mesh: The whole mesh.
        dtype: Of the array.
        profile: The machine.
        moves: What each axis that takes part does; others are left out of the plan.
        is_contiguous: Every dim before those that move has length 1.
        exponent: The smaller size has about 2**exponent elements, the larger one 2**OCTAVES times
            as many.
    """
    sample = _sample_move(mesh, moves, is_contiguous)
    small = sample.shape_of(2**exponent)
    middle = sample.shape_of(2 ** (exponent + OCTAVES // 2))
    large = sample.shape_of(2 ** (exponent + OCTAVES))
    machine = profile.for_axes(sample.mesh.axes, mesh)
    request = Request.on_mesh(sample.mesh, sample.src, sample.dst, middle, dtype, machine)
    plan = find_plan(request)
    # The plan that is best for the middle size is priced at both ends, for one line has one plan.
    small_s = replace(plan, shape=small).cost
    large_s = replace(plan, shape=large).cost
    elements = math.prod(small)
    # Lengths are rounded to multiples of the devices, so that both shapes may be the same. A line
    # needs two different numbers of elements, hence one more.
    most_elements = max(math.prod(large), elements + 1)
    return Line(
        elements=elements,
        seconds=small_s,
        most_elements=most_elements,
        most_seconds=large_s,
    )


class SampleMove(NamedTuple):
    """A move of a small array, which stands for all moves that do the same with larger arrays.

    lengths: of its dims, but for a last one that no layout shards, which may have any length.
    """

    mesh: Mesh
    src: Layout
    dst: Layout
    lengths: Sequence[int]

    def shape_of(self, elements: int) -> tuple[int, ...]:
        """Choose the length of the last dim, to reach about so many elements.

        It is a multiple of the devices, so that steps of a plan may shard the dim evenly.
        """
        n_devices = self.mesh.n_devices
        elements_at_least = math.prod(self.lengths) * n_devices
        last_length = max(1, elements // elements_at_least) * n_devices
        return (*self.lengths, last_length)


def _sample_move(mesh: Mesh, moves: Sequence[AxisMove], is_contiguous: bool) -> SampleMove:
    """Make up the smallest array with the same move, so that one plan serves all alike.

    It has only the dims that are sharded before or after the move, each as long as the axes that
    shard it have devices, and one more. An axis x of size 4 moves from dim 1 to dim 3 of some large
    array: in the sample "d0/x d1 d2" -> "d0 d1/x d2" of lengths (4, 4, any), on a mesh of x alone.
    """
    lengths: list[int] = []
    if not is_contiguous:
        # Longer dims come before those that move, so that a block is many runs in memory, which take
        # longer to copy. One dim stands for all of them.
        lengths.append(LEADING)
    placement_in_sample = {REPLICAS: REPLICAS, SUM: SUM}  # tags are the same in every array
    for dim in _sharded_dims(moves):
        placement_in_sample[dim] = len(lengths)
        axes = [move.axis for move in moves if dim in (move.src, move.dst)]
        lengths.append(math.prod(mesh.sizes[axis] for axis in axes))
    names = [f"d{i}" for i in range(len(lengths) + 1)]  # with a last dim, of any length
    sample_mesh = _mesh_along(mesh, moves)

    def sample_layout(placements: Iterable[int]) -> Layout:
        placements_in_sample = [placement_in_sample[placement] for placement in placements]
        return layout_of(placements_in_sample, names, sample_mesh.axes)

    return SampleMove(
        mesh=sample_mesh,
        src=sample_layout(move.src for move in moves),
        dst=sample_layout(move.dst for move in moves),
        lengths=lengths,
    )


def _mesh_along(mesh: Mesh, moves: Sequence[AxisMove]) -> Mesh:
    """Keep the axes that take part in a move: a plan's search has more states with each axis."""
    axes = tuple(mesh.axes[move.axis] for move in moves)
    if axes == mesh.axes:
        return mesh  # a mesh of sub-axes knows which axes they are parts of
    return Mesh({axis: mesh.size(axis) for axis in axes})


def _sharded_dims(moves: Sequence[AxisMove]) -> list[int]:
    """List the dims that an axis shards before or after a move, as placements, in order."""
    placements = {move.src for move in moves} | {move.dst for move in moves}
    return sorted(placement for placement in placements if placement >= 0)


def _received(src: Placements, dst: Placements, sizes: Floats) -> Floats:
    """Bound from below the share of an array that the busiest device has to receive.

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
    # Three cases. Sums end: the mean over all devices of what they receive together.
    n_addends = product_over(is_sum_before & ~is_sum_after, sizes)
    n_copies = product_over(dst == REPLICAS, sizes)[None]
    n_sums_left = product_over(is_sum_before & is_sum_after, sizes)  # that stay as they are
    where_sums_end = reduction_messages(n_sums_left, n_addends, n_copies) / sizes.prod()
    # Sums begin, none ends: any device of a new sum may hold an element as its addend. So they may
    # divide the block that they need among them, and each holds a block already.
    n_addends_begun = product_over(is_sum_after & ~is_sum_before, sizes)
    needed = 1 / product_over(dst >= 0, sizes)[None]
    held = 1 / product_over(src >= 0, sizes)[:, None]
    where_sums_begin = np.maximum(needed / n_addends_begun - held, 0)
    # Neither: what a device needs and does not keep.
    lacking = needed - _overlap(src, dst, sizes)
    without_sums = np.where(n_addends_begun > 1, where_sums_begin, lacking)
    return np.where(n_addends > 1, where_sums_end, without_sums)


def _overlap(src: Placements, dst: Placements, sizes: Floats) -> Floats:
    """Compute the share of an array that the device keeps which keeps least in a move.

    That one receives most. Shares of the dims multiply, and for each dim there are two cases. If
    one block is inside the other on every device, the smaller one is kept: in `b/dp -> b/dp/tp` on
    2x2 devices each keeps its new quarter. Otherwise some device has blocks that do not meet, and
    keeps nothing: in `b/dp -> b/tp` device (0, 1) has the first half before, and the second half
    after.

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
        # Axes go from outer to inner. In `b/dp/tp -> b/tp` tp shards the dim at both ends, but
        # inside dp it counts quarters, without dp halves: its blocks are elsewhere, so that some
        # device keeps nothing.
        has_other_outer_axes = np.logical_or.accumulate(only_before | only_after, -1)
        keeps_nothing = (before & after & has_other_outer_axes).any(-1)
        keeps_nothing |= only_before.any(-1) & only_after.any(-1)
        overlap *= np.where(keeps_nothing, 0, 1 / n_blocks)
    return overlap
