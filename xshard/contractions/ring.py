"""Contractions in rounds: while one part is contracted, the next one travels along an axis of n devices.

Instead of a gather, parts of an operand travel. Instead of a reduce-scatter, sums travel: a device adds its
part to the sum that it passes on. Between few devices a part travels in pieces, since two parts hide half a
move at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.notation.parser import Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request
from xshard.steps import AllGather, ReduceScatter, Retag, Step
from xshard.steps.base import without_tags

if TYPE_CHECKING:
    from xshard.contractions.plan import Part

NEVER = "never"
AUTO = "auto"
ALWAYS = "always"
OVERLAPS = (NEVER, AUTO, ALWAYS)

PIECES = (1, 2, 4)  # in how many a part may travel
# Most products that a contraction is divided into, unless there are more devices: small ones are slow.
MAX_PRODUCTS = 8


@dataclass(frozen=True)
class ContractionRing:
    """Parts of `dim` that travel along one mesh axis, in pieces, while devices contract."""

    operand: int | None  # that travels; None: the sums of the result do
    dim: str
    axis: str
    pieces: int
    rotation: Plan  # brings a piece of the part of the axis' next device
    remaining_move: Plan  # of the move: before the rounds of an operand, after a result's

    @property
    def rounds(self) -> int:
        """The number of parts."""
        return self.rotation.mesh.size(self.axis)

    @property
    def products(self) -> int:
        """The number of pieces of all parts."""
        return self.rounds * self.pieces

    @property
    def key(self) -> tuple[int | None, str, str, int]:
        """What tells it from the other rings of its part; JSON stores it, and finds the ring by it."""
        return self.operand, self.dim, self.axis, self.pieces

    def __str__(self) -> str:
        pieces = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"in {self.rounds} rounds{pieces} along {self.axis}"

    def order(self, device: Any) -> list[Any]:
        """Return the pieces in the order in which a device contracts them.

        On device 1 of 3 with one piece a part: 1, 2, 0; if sums travel 2, 0, 1, its own part last.
        device: its place along the axis, a number or a scalar of JAX.
        """
        first = device  # its own part is there, while the next one arrives
        if self.operand is None:  # the sum for a part ends on the device that keeps it
            first = device + 1
        pieces = []
        for turn in range(self.rounds):
            part = (first + turn) % self.rounds
            pieces += [part * self.pieces + i for i in range(self.pieces)]
        return pieces

    def seconds(self, part: Part) -> float:
        """Predict the seconds of a part: one product, then the longer of other products and messages."""
        moves = [*part.moves, part.result]
        # Without the move that rounds replace.
        if self.operand is None:
            moves.pop()
        else:
            del moves[self.operand]
        product_seconds = part.work / self.products
        # The pieces of a device's own part do not travel.
        message_seconds = (self.products - self.pieces) * self.rotation.cost
        overlapped = max(part.work - product_seconds, message_seconds)
        return sum(move.cost for move in moves) + product_seconds + overlapped


class TravellingDim(NamedTuple):
    """What a ring would replace: the dim whose parts travel, and the layouts on both sides of the rest."""

    operand: int | None
    dim: str
    src: Sharding  # of the parts
    rest_dst: Layout  # `remaining_move` leads from `src` to it; both shard dims equally


def rings(part: Part) -> Iterator[ContractionRing]:
    """Iterate over the rings that a part may run in: for moves of one step, between even blocks."""
    for i, move in enumerate(part.moves):
        gathered = _gathered_dim(part, i, move)
        if gathered is not None:
            yield from _rings(gathered, move)
    scattered = _scattered_dim(part.result)
    if scattered is not None:
        yield from _rings(scattered, part.result)


def _gathered_dim(part: Part, i: int, move: Plan) -> TravellingDim | None:
    """Return the dim that an operand's move gathers, if it does just that along one axis."""
    gather = _only_step(move)
    # A gather to copies, not to replicas, each of which would give the whole gradient.
    if not isinstance(gather, AllGather) or gather.shards != (Shard(gather.copies[:1]),):
        return None
    result = part.result.src
    is_summed = gather.dim not in result.names
    if is_summed and gather.copies[0] in result.tagged("copy"):
        return None  # each copy of the result would be added in another order
    tags = without_tags(move.dst, gather.copies).tags
    return TravellingDim(i, gather.dim, move.source, Layout(move.src.dims, tags))


def _scattered_dim(result: Plan) -> TravellingDim | None:
    """Return the dim that the result's move scatters, if it does just that along one axis."""
    scatter = _only_step(result)
    if not isinstance(scatter, ReduceScatter) or scatter.op != "sum":
        return None
    axes = scatter.shards[0].axes
    # Along one axis, in contiguous blocks: the pieces of a part are then consecutive rows.
    if scatter.shards != (Shard(axes[:1]),):
        return None
    tags = without_tags(result.src, axes).tags
    src = result.target.with_layout(Layout(result.dst.dims, tags))
    return TravellingDim(None, scatter.dim, src, result.dst)


def _only_step(move: Plan) -> Step | None:
    """Return the only step of a move beside changes of tags, if there is just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    if move.split or len(steps) != 1:
        return None
    return steps[0]


def _rings(travelling: TravellingDim, move: Plan) -> Iterator[ContractionRing]:
    """Iterate over the rings that replace a move, with parts in one piece or in several.

    A part is the block of one device along the axis. In each of n rounds every device contracts a
    part, and passes it (or the sum for it) on to the device before.
    """
    src = travelling.src
    mesh = src.mesh
    dims = src.normal_layout.dims  # groups as nested shards
    # Sums travel as they are after the reduction, parts of an operand as they are before the gather.
    tags = travelling.rest_dst.tags
    if travelling.operand is None:
        tags = src.layout.tags
    d = src.dim_index(travelling.dim)
    [axis] = dims[d].shards[-1].axes  # the innermost shard travels
    n_devices = mesh.size(axis)
    rows = src.max_local_shape[d]  # of a part

    def plan(src_layout: Layout, dst_layout: Layout, shape: tuple[int, ...]) -> Plan:
        array = (shape, move.dtype, move.profile)
        request = Request.on_mesh(mesh, src_layout, dst_layout, *array, devices=move.devices)
        return find_plan(request)

    # What else the move does, without the dim that travels: changes of tags, or nothing.
    rest = plan(src.layout, travelling.rest_dst, src.shape)
    for pieces in PIECES:
        # Pieces are equal, so that all devices send messages of one size.
        if rows % pieces or (pieces > 1 and n_devices * pieces > MAX_PRODUCTS):
            continue
        next_part = rotated((axis,), n_devices, rows // pieces, -1)
        next_dim = replace(dims[d], shards=(*dims[d].shards[:-1], next_part))
        rotated_dims = (*dims[:d], next_dim, *dims[d + 1 :])
        # One piece of every device, as an array: each block goes to the device before.
        shape = (*src.shape[:d], src.shape[d] // pieces, *src.shape[d + 1 :])
        rotation = plan(Layout(dims, tags), Layout(rotated_dims, tags), shape)
        yield ContractionRing(travelling.operand, travelling.dim, axis, pieces, rotation, rest)
