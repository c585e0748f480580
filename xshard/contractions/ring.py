"""Ring forms: a gather and the contraction behind it, or a contraction and its reduce-scatter, in rounds.

Decides which moves may run so, and what that costs. With n devices along the axis there are n rounds: in
each, a device contracts one of n parts, while the part of the next round travels by a permutation. A gathered
dim that the result keeps gives parts that lie side by side; one that is summed gives parts that are added. In
front of a reduce-scatter the sums travel: what a device gets is added to its own part and passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xshard.layout import Layout, Sharding
from xshard.notation.parser import INTERVALS, Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request
from xshard.steps import AllGather, ReduceScatter, Retag, Step
from xshard.steps.base import without_tags

if TYPE_CHECKING:
    from xshard.contractions.plan import Part

NEVER, AUTO, ALWAYS = OVERLAPS = "never", "auto", "always"


@dataclass(frozen=True)
class Ring:
    """What travels along one axis while devices contract.

    operand: which one is passed on in parts; None: the sums of the result are. dim: the one that is cut in
    parts. rotation: the plan by which every device gets the part of the next device of the axis. rest: what
    the move does beside it: to an operand's block before the rounds, to the result's block after them.
    """

    operand: int | None
    dim: str
    axis: str
    rotation: Plan
    rest: Plan

    @property
    def rounds(self) -> int:
        """How many parts there are."""
        return self.rotation.mesh.size(self.axis)

    def seconds(self, part: Part, work: float) -> float:
        """Predicted seconds of the part; work: of its operations. A round takes the longer of its halves."""
        around = [*part.moves, part.result]
        del around[-1 if self.operand is None else self.operand]
        share = work / self.rounds
        return sum(move.cost for move in around) + share + (self.rounds - 1) * max(share, self.rotation.cost)


def best_ring(part: Part, work: float) -> tuple[Ring, float] | None:
    """The ring in which a part takes the fewest seconds, and these; work: seconds of its operations."""
    found = [(ring, ring.seconds(part, work)) for ring in rings(part)]
    return min(found, key=lambda pair: pair[1], default=None)


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
            yield _ring(i, gather.dim, move, move.source, block)
    scatter = _only_step(part.result)
    if isinstance(scatter, ReduceScatter) and scatter.op == "sum" and _is_plain(scatter.shards):
        move, tags = part.result, without_tags(part.result.src, scatter.shards[0].axes).tags
        yield _ring(None, scatter.dim, move, move.target.with_layout(Layout(move.dst.dims, tags)), move.dst)


def _only_step(move: Plan) -> Step | None:
    """The only step of a move that does more than rename, if it has just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    return steps[0] if len(steps) == 1 and not move.split else None


def _is_plain(shards: tuple[Shard, ...]) -> bool:
    return len(shards) == 1 and shards[0] == Shard(shards[0].axes[:1])


def _ring(operand: int | None, dim: str, move: Plan, src: Sharding, dst: Layout) -> Ring:
    """The ring of parts under `src`, and under `dst` after the rest of the move: the same cuts."""
    tags = src.layout.tags if operand is None else dst.tags
    dims, ends = src.normal.dims, (src.mesh, src.mesh, move.devices, move.devices)  # groups as nested cuts
    at = src.dim_index(dim)
    (axis,), rows = dims[at].shards[-1].axes, src.max_local_shape[at]
    n = src.mesh.size(axis)
    numbers = tuple((start, start + rows) for start in ((i + 1) % n * rows for i in range(n)))
    turned = replace(dims[at], shards=(*dims[at].shards[:-1], Shard((axis,), INTERVALS, numbers)))
    what = src.shape, move.dtype, move.profile
    rotation = Request(Layout(dims, tags), Layout((*dims[:at], turned, *dims[at + 1 :]), tags), *ends, *what)
    rest = Request(src.layout, dst, *ends, *what)
    return Ring(operand, dim, axis, find_plan(rotation), find_plan(rest))
