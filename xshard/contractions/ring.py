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

from xshard.layout import Sharding
from xshard.notation.parser import INTERVALS, Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request
from xshard.steps import AllGather, ReduceScatter, Retag, Step

if TYPE_CHECKING:
    from xshard.contractions.plan import Part

NEVER, AUTO, ALWAYS = OVERLAPS = "never", "auto", "always"


@dataclass(frozen=True)
class Ring:
    """What travels along one axis while devices contract.

    operand: which one is passed on in parts; None: the sums of the result are. dim: the one that is cut in
    parts. rotation: the plan by which every device gets the part of the next device of the axis.
    """

    operand: int | None
    dim: str
    axis: str
    rotation: Plan

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
        if isinstance(gather, AllGather) and gather.shards == (Shard(gather.copies),):
            yield Ring(i, gather.dim, gather.copies[0], _rotation(move, move.source, gather.dim))
    scatter = _only_step(part.result)
    if isinstance(scatter, ReduceScatter) and scatter.op == "sum" and _is_plain(scatter.shards):
        axis = scatter.shards[0].axes[0]
        yield Ring(None, scatter.dim, axis, _rotation(part.result, part.result.target, scatter.dim))


def _only_step(move: Plan) -> Step | None:
    """The only step of a move that does more than rename, if it has just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    return steps[0] if len(steps) == 1 and not move.split else None


def _is_plain(shards: tuple[Shard, ...]) -> bool:
    return len(shards) == 1 and shards[0] == Shard(shards[0].axes[:1])


def _rotation(move: Plan, at: Sharding, dim: str) -> Plan:
    """The plan by which a device gets the block of the next one along the innermost cut of a dim."""
    old = at.layout.dim(dim)
    n = at.mesh.size(*old.shards[-1].axes)
    rows = at.max_local_shape[at.dim_index(dim)]
    starts = [(i + 1) % n * rows for i in range(n)]
    numbers = tuple((start, start + rows) for start in starts)
    new = replace(old, shards=(*old.shards[:-1], Shard(old.shards[-1].axes, INTERVALS, numbers)))
    to = replace(at.layout, dims=tuple(new if d.name == dim else d for d in at.layout.dims))
    ends = at.layout, to, at.mesh, at.mesh, move.devices, move.devices
    return find_plan(Request(*ends, at.shape, move.dtype, move.profile))
