"""Contractions in rounds: while one block is contracted, the next one travels along an axis of n devices.

Instead of a gather, blocks of an operand travel. Instead of a reduce-scatter, sums travel: a device adds its
addend to the sum that it passes on. Between few devices a block travels in pieces, since two blocks hide
half a move at most.
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

PIECE_COUNTS = (1, 2, 4)  # in how many pieces a block may travel
# Most products that a contraction is divided into, unless there are more devices: small ones are slow.
MAX_PRODUCTS = 8


@dataclass(frozen=True)
class ContractionRing:
    """Blocks of one dim that travel along one mesh axis, in pieces, while devices contract.

    Attributes:
        operand: The index of the operand whose blocks travel; None: sums of the result do.
        dim: The dim.
        axis: The mesh axis, which shards the dim.
        pieces: The number of pieces in which a block travels.
        rotation: The move of one round: brings a piece of the block of the axis' next device.
        remaining_move: What the replaced move does beside: before the rounds if an operand travels,
            after them if sums do.
    """

    operand: int | None
    dim: str
    axis: str
    pieces: int
    rotation: Plan
    remaining_move: Plan

    @property
    def rounds(self) -> int:
        """The number of blocks, one for each device along the axis."""
        return self.rotation.mesh.size(self.axis)

    @property
    def products(self) -> int:
        """The number of products: one for each piece of each block."""
        return self.rounds * self.pieces

    @property
    def key(self) -> tuple[int | None, str, str, int]:
        """What tells it from other rings of one local contraction; JSON stores it to find the ring."""
        return self.operand, self.dim, self.axis, self.pieces

    def __str__(self) -> str:
        pieces_text = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"in {self.rounds} rounds{pieces_text} along {self.axis}"

    def order(self, device: Any) -> list[Any]:
        """Return the indices of the pieces of the sharded dim in the order a device contracts them.

        On device 1 of 3, with one piece a block: 1, 2, 0 if an operand is passed on (instead of an
        all-gather), and 2, 0, 1 if sums are (instead of a reduce-scatter).

        device: its index along the axis, a number or a scalar of JAX.
        """
        # Its own block is at hand, and is contracted while the next one arrives.
        first_block = device
        # The sum for a block is passed from device to device, and the last to add is the one that
        # keeps it: so each device computes its own block last.
        if self.operand is None:
            first_block = device + 1
        piece_indices = []
        for turn in range(self.rounds):
            block_index = (first_block + turn) % self.rounds
            piece_indices += [block_index * self.pieces + i for i in range(self.pieces)]
        return piece_indices

    def seconds(self, part: Part) -> float:
        """Predict the seconds of a local contraction that runs in this ring, with all its moves.

        The first product overlaps with nothing; then products and messages run at the same time,
        and the longer of both counts. 4 blocks in one piece, 4 s of products and messages of 2 s: 1
        + max(3, 3 * 2) = 7 s, and the other moves.
        """
        # The ring replaces one move: of one operand, or, with None, of the result, which is last.
        other_moves = [*part.moves, part.result]
        del other_moves[-1 if self.operand is None else self.operand]
        product_seconds = part.work / self.products
        # The pieces of a device's own block do not travel.
        message_seconds = (self.products - self.pieces) * self.rotation.cost
        overlapped = max(part.work - product_seconds, message_seconds)
        return sum(move.cost for move in other_moves) + product_seconds + overlapped


class TravellingDim(NamedTuple):
    """The dim whose blocks travel in a ring, instead of one move, and what else that move does.

    The latter is `ContractionRing.remaining_move`: from `src` to `remaining_dst`, which differ in tags.
    """

    operand: int | None
    dim: str
    src: Sharding  # of the blocks that travel
    remaining_dst: Layout


def rings(part: Part) -> Iterator[ContractionRing]:
    """Iterate over the rings that may replace a move of a local contraction.

    The move has to be one step, an all-gather or a reduce-scatter, between even blocks.
    """
    travelling_dims = [_gathered_dim(part, i) for i in range(len(part.moves))]
    travelling_dims.append(_scattered_dim(part.result))
    for dim, move in zip(travelling_dims, (*part.moves, part.result), strict=True):
        if dim is not None:
            yield from _rings(dim, move)


def _gathered_dim(part: Part, operand_index: int) -> TravellingDim | None:
    """Return what a ring would pass on instead of an operand's all-gather; None if it cannot.

    It can if the operand's move is one all-gather of a dim over one mesh axis, from contiguous blocks
    to copies: as in `s/tp d -> s d | copy(tp)`.
    """
    move = part.moves[operand_index]
    gather = _only_step(move)
    # The gathered array has to be copies, whose gradients are summed. With replicas each device
    # would have the whole gradient, and a ring does not compute that.
    if not isinstance(gather, AllGather) or gather.shards != (Shard(gather.copies[:1]),):
        return None
    result = part.result.src
    is_summed = gather.dim not in result.names
    # Each device begins with another block. If the dim is summed and the result is the same on all
    # devices, they would add in different orders, and round differently.
    has_one_order = move.profile.adds_in_order or gather.copies[0] in result.tagged("copy")
    if is_summed and has_one_order:
        return None
    tags = without_tags(move.dst, gather.copies).tags
    return TravellingDim(operand_index, gather.dim, move.source, Layout(move.src.dims, tags))


def _scattered_dim(result: Plan) -> TravellingDim | None:
    """Return what a ring would pass on instead of the result's reduce-scatter; None if it cannot.

    It can if the move is one reduce-scatter of sums over one mesh axis, into contiguous blocks: as
    in `s f | sum(tp) -> s/tp f`.
    """
    scatter = _only_step(result)
    if not isinstance(scatter, ReduceScatter) or scatter.op != "sum":
        return None
    axes = scatter.shards[0].axes
    # Along one axis, in contiguous blocks: the pieces of a block are then consecutive rows.
    if scatter.shards != (Shard(axes[:1]),):
        return None
    tags = without_tags(result.src, axes).tags
    src = result.target.with_layout(Layout(result.dst.dims, tags))
    return TravellingDim(operand=None, dim=scatter.dim, src=src, remaining_dst=result.dst)


def _only_step(move: Plan) -> Step | None:
    """Return the only step of a move beside changes of tags, if there is just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    if move.split or len(steps) != 1:
        return None
    return steps[0]


def _rings(travelling: TravellingDim, move: Plan) -> Iterator[ContractionRing]:
    """Iterate over the rings that may replace a move, with blocks sent in 1, 2 or 4 pieces.

    In each of n rounds every device contracts a block, and passes it (or the sum for it) on to the
    device before: on 4 devices 3 sends to 2, and 0 sends to 3.

    travelling: the dim that is passed on. move: the all-gather or reduce-scatter that is replaced.
    """
    src = travelling.src
    dims = src.normal_layout.dims  # groups as nested shards
    # Messages have the tags (partial sums or copies along other axes) of the block that is passed
    # on: of an operand just before its gather, of a result just after its reduction.
    tags = travelling.remaining_dst.tags
    if travelling.operand is None:
        tags = src.layout.tags
    # What else the move does, without the dim that travels: changes of tags, or nothing.
    remaining_move = _plan_like(move, src, travelling.remaining_dst)
    dim_index = src.dim_index(travelling.dim)
    *outer_shards, travelling_shard = dims[dim_index].shards
    [axis] = travelling_shard.axes
    n_devices = src.mesh.size(axis)
    block_rows = src.max_local_shape[dim_index]
    for n_pieces in PIECE_COUNTS:
        # Pieces are equal, so that all devices send messages of one size.
        if block_rows % n_pieces or (n_pieces > 1 and n_devices * n_pieces > MAX_PRODUCTS):
            continue
        # One round as a redistribution: an array of one piece of every device, whose blocks all go
        # to the device before.
        next_shard = rotated((axis,), n_devices, block_rows // n_pieces, -1)
        next_dim = replace(dims[dim_index], shards=(*outer_shards, next_shard))
        next_layout = Layout(replaced(dims, dim_index, next_dim), tags)
        shape = replaced(src.shape, dim_index, src.shape[dim_index] // n_pieces)
        rotation = _plan_like(move, Sharding(Layout(dims, tags), src.mesh, shape), next_layout)
        yield ContractionRing(
            travelling.operand, travelling.dim, axis, n_pieces, rotation, remaining_move
        )


def _plan_like(move: Plan, src: Sharding, dst: Layout) -> Plan:
    """Plan a move of an array with the dtype, and on the devices, of another move."""
    array = (src.shape, move.dtype, move.profile)
    request = Request.on_mesh(src.mesh, src.layout, dst, *array, devices=move.devices)
    return find_plan(request)
