"""Ring forms: a gather and the contraction behind it, or a contraction and its reduce-scatter, in rounds.

Decides which moves may run so, and what that costs. With n devices along the axis there are n rounds: in
each, a device contracts one of n parts, while the part of the next round travels by a permutation. A gathered
dim that the result keeps gives parts that lie side by side; one that is summed gives parts that are added. In
front of a reduce-scatter the sums travel: what a device gets is added to its own part and passed on.
Between few devices a part travels in pieces, each contracted as it comes: two parts hide half a move at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.notation.parser import Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request
from xshard.steps import AllGather, ReduceScatter, Retag, Step
from xshard.steps.base import without_tags

if TYPE_CHECKING:
    from xshard.contractions.plan import Part

NEVER, AUTO, ALWAYS = OVERLAPS = "never", "auto", "always"

# Products that a contraction is cut into, unless there are more devices: small ones are slow.
MAX_PRODUCTS = 8


@dataclass(frozen=True)
class Ring:
    """What travels along one axis while devices contract.

    operand: which one is passed on in parts; None: the sums of the result are. dim: the one that is cut in
    parts. pieces: how many a part travels in. rotation: the plan by which every device gets a piece of the
    part of the next device of the axis. rest: what the move does beside it: to an operand's block before the
    rounds, to the result's block after them.
    """

    operand: int | None
    dim: str
    axis: str
    pieces: int
    rotation: Plan
    rest: Plan

    @property
    def rounds(self) -> int:
        """How many parts there are."""
        return self.rotation.mesh.size(self.axis)

    @property
    def products(self) -> int:
        """How many pieces all parts have."""
        return self.rounds * self.pieces

    @property
    def key(self) -> tuple[int | None, str, str, int]:
        """What tells it from the other rings of its part."""
        return self.operand, self.dim, self.axis, self.pieces

    def __str__(self) -> str:
        pieces = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"in {self.rounds} rounds{pieces} along {self.axis}"

    def order(self, device: Any) -> list[Any]:
        """The piece that a device contracts in each of its products, where sums travel its own ones last.

        device: its position along the axis, a number or a scalar of JAX, as what is returned.
        """
        first, n = device + (self.operand is None), self.rounds
        return [(first + k) % n * self.pieces + i for k in range(n) for i in range(self.pieces)]

    def seconds(self, part: Part) -> float:
        """Predicted seconds of the part. Products fill the time, or messages do."""
        around = [*part.moves, part.result]
        del around[-1 if self.operand is None else self.operand]
        share, moved = part.work / self.products, (self.products - self.pieces) * self.rotation.cost
        return sum(move.cost for move in around) + share + max(part.work - share, moved)


def rings(part: Part) -> Iterator[Ring]:
    """The rings that a part may be computed in: of moves of one step, between even contiguous blocks.

    What is gathered has to be copies: replicas would each give the gradient of one.
    """
    for i, move in enumerate(part.moves):
        gather = _only_step(move)
        if isinstance(gather, AllGather) and gather.shards == (Shard(gather.copies[:1]),):
            if gather.dim not in part.result.src.names and gather.copies[0] in part.result.src.tagged("copy"):
                continue  # each copy of the result would be added in another order
            block = Layout(move.src.dims, without_tags(move.dst, gather.copies).tags)
            yield from _rings(i, gather.dim, move, move.source, block)
    scatter = _only_step(part.result)
    if isinstance(scatter, ReduceScatter) and scatter.op == "sum" and _is_plain(scatter.shards):
        move, tags = part.result, without_tags(part.result.src, scatter.shards[0].axes).tags
        src = move.target.with_layout(Layout(move.dst.dims, tags))
        yield from _rings(None, scatter.dim, move, src, move.dst)


def _only_step(move: Plan) -> Step | None:
    """The only step of a move that does more than rename, if it has just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    return steps[0] if len(steps) == 1 and not move.split else None


def _is_plain(shards: tuple[Shard, ...]) -> bool:
    return len(shards) == 1 and shards[0] == Shard(shards[0].axes[:1])


def _rings(operand: int | None, dim: str, move: Plan, src: Sharding, dst: Layout) -> Iterator[Ring]:
    """The rings of parts under `src`, and under `dst` after the rest of the move: the same cuts."""
    tags = src.layout.tags if operand is None else dst.tags
    dims, ends = src.normal.dims, (src.mesh, src.mesh, move.devices, move.devices)  # groups as nested cuts
    at = src.dim_index(dim)
    (axis,), rows = dims[at].shards[-1].axes, src.max_local_shape[at]
    n, machine = src.mesh.size(axis), (move.dtype, move.profile)
    rest = find_plan(Request(src.layout, dst, *ends, src.shape, *machine))
    for pieces in (1, 2, 4):
        if rows % pieces or (pieces > 1 and n * pieces > MAX_PRODUCTS):
            continue
        piece = rows // pieces
        turned = replace(dims[at], shards=(*dims[at].shards[:-1], rotated((axis,), n, piece, -1)))
        here, there = Layout(dims, tags), Layout((*dims[:at], turned, *dims[at + 1 :]), tags)
        shape = (*src.shape[:at], src.shape[at] // pieces, *src.shape[at + 1 :])
        yield Ring(operand, dim, axis, pieces, find_plan(Request(here, there, *ends, shape, *machine)), rest)
