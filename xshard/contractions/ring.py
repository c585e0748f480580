"""Contractions in rounds: while one part is contracted, the next one travels along an axis of n devices.

Instead of a gather, parts of an operand travel. Instead of a reduce-scatter, sums travel: a device adds its
part to the sum that it passes on. Between few devices a part travels in pieces, since two parts hide half a
move at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.notation.parser import Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request
from xshard.search.states import replaced
from xshard.steps import AllGather, ReduceScatter, Retag, Step
from xshard.steps.base import without_tags

if TYPE_CHECKING:
    from xshard.contractions.plan import Part

NEVER: Final = "never"
AUTO = "auto"
ALWAYS = "always"
Overlapping = Literal["never", "auto", "always"]
OVERLAPS = get_args(Overlapping)

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
        """Return the numbers of the pieces of the sharded dim in the order a device contracts them.

        A part is one device's block, and may be cut into pieces. On device 1 of 3, with one piece a
        part: 1, 2, 0 if an operand is passed on (instead of an all-gather), and 2, 0, 1 if sums are
        (instead of a reduce-scatter).

        device: its index along the axis, a number or a scalar of JAX.
        """
        first = device  # its own part is at hand, and is contracted while the next one arrives
        # The sum for a part is passed from device to device, and the last to add is the one that
        # keeps it: so each device computes its own part last.
        if self.operand is None:
            first = device + 1
        pieces = []
        for turn in range(self.rounds):
            part = (first + turn) % self.rounds
            pieces += [part * self.pieces + i for i in range(self.pieces)]
        return pieces

    def seconds(self, part: Part) -> float:
        """Predict the seconds of a local contraction that runs in this ring, with all its moves.

        The first product overlaps with nothing; then products and messages run at the same time,
        and the longer of both counts. 4 parts in one piece, 4 s of products and messages of 2 s: 1
        + max(3, 3 * 2) = 7 s, and the other moves.
        """
        # The ring replaces one move: of one operand, or, with None, of the result, which is last.
        other_moves = [*part.moves, part.result]
        del other_moves[-1 if self.operand is None else self.operand]
        product_seconds = part.work / self.products
        # The pieces of a device's own part do not travel.
        message_seconds = (self.products - self.pieces) * self.rotation.cost
        overlapped = max(part.work - product_seconds, message_seconds)
        return sum(move.cost for move in other_moves) + product_seconds + overlapped


class TravellingDim(NamedTuple):
    """The dim whose parts travel in a ring, instead of one move, and what else that move does.

    That is `ContractionRing.remaining_move`: from `src` to `rest_dst`, which differ in tags only.
    """

    operand: int | None
    dim: str
    src: Sharding  # of the parts
    rest_dst: Layout


def rings(part: Part) -> Iterator[ContractionRing]:
    """Iterate over the rings that a part may run in: for moves of one step, between even blocks."""
    travelling = [_gathered_dim(part, i) for i in range(len(part.moves))]
    travelling.append(_scattered_dim(part.result))
    for dim, move in zip(travelling, (*part.moves, part.result), strict=True):
        if dim is not None:
            yield from _rings(dim, move)


def _gathered_dim(part: Part, i: int) -> TravellingDim | None:
    """Return what a ring would pass on instead of an operand's all-gather; None if it cannot.

    It can if the move of operand `i` is one all-gather of a dim over one mesh axis, from contiguous
    blocks to copies: as in `s/tp d -> s d | copy(tp)`.
    """
    move = part.moves[i]
    gather = _only_step(move)
    # The gathered array has to be copies, whose gradients are summed. With replicas each device
    # would have the whole gradient, and a ring does not compute that.
    if not isinstance(gather, AllGather) or gather.shards != (Shard(gather.copies[:1]),):
        return None
    result = part.result.src
    is_summed = gather.dim not in result.names
    # Each device begins with another part. If the dim is summed and the result is the same on all
    # devices, they would add in different orders, and round differently.
    has_one_order = move.profile.adds_in_order or gather.copies[0] in result.tagged("copy")
    if is_summed and has_one_order:
        return None
    tags = without_tags(move.dst, gather.copies).tags
    return TravellingDim(i, gather.dim, move.source, Layout(move.src.dims, tags))


def _scattered_dim(result: Plan) -> TravellingDim | None:
    """Return what a ring would pass on instead of the result's reduce-scatter; None if it cannot.

    It can if the move is one reduce-scatter of sums over one mesh axis, into contiguous blocks: as
    in `s f | sum(tp) -> s/tp f`.
    """
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
    """Iterate over the rings that may replace a move, with blocks sent in 1, 2 or 4 pieces.

    A part is the block of one device along the axis. In each of n rounds every device contracts a
    part, and passes it (or the sum for it) on to the device before: on 4 devices 3 sends to 2, and
    0 sends to 3.

    travelling: the dim that is passed on. move: the all-gather or reduce-scatter that is replaced.
    """
    src = travelling.src
    dims = src.normal_layout.dims  # groups as nested shards
    # Messages have the tags (partial sums or copies along other axes) of the block that is passed
    # on: of an operand just before its gather, of a result just after its reduction.
    tags = travelling.rest_dst.tags
    if travelling.operand is None:
        tags = src.layout.tags
    # What else the move does, without the dim that travels: changes of tags, or nothing.
    rest = _plan_like(move, src, travelling.rest_dst)
    d = src.dim_index(travelling.dim)
    *outer_shards, travelling_shard = dims[d].shards
    [axis] = travelling_shard.axes
    n_devices = src.mesh.size(axis)
    part_rows = src.max_local_shape[d]
    for pieces in PIECES:
        # Pieces are equal, so that all devices send messages of one size.
        if part_rows % pieces or (pieces > 1 and n_devices * pieces > MAX_PRODUCTS):
            continue
        # One round as a redistribution: an array of one piece of every device, whose blocks all go
        # to the device before.
        next_part = rotated((axis,), n_devices, part_rows // pieces, -1)
        next_dim = replace(dims[d], shards=(*outer_shards, next_part))
        next_layout = Layout(replaced(dims, d, next_dim), tags)
        shape = replaced(src.shape, d, src.shape[d] // pieces)
        rotation = _plan_like(move, Sharding(Layout(dims, tags), src.mesh, shape), next_layout)
        yield ContractionRing(travelling.operand, travelling.dim, axis, pieces, rotation, rest)


def _plan_like(move: Plan, src: Sharding, dst: Layout) -> Plan:
    """Plan a move of an array with the dtype, and on the devices, of another move."""
    array = (src.shape, move.dtype, move.profile)
    request = Request.on_mesh(src.mesh, src.layout, dst, *array, devices=move.devices)
    return find_plan(request)
