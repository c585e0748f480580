"""Contractions in rounds: while one part is contracted, the next one travels along an axis of n devices.
In front of a reduce-scatter the sums travel: a device adds its part to the sum that it passes on.
Between few devices a part travels in pieces, since two parts hide half a move at most.
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
    rest: Plan  # of the move: before the rounds of an operand, after a result's

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
        """Tells it from the other rings of its part."""
        return self.operand, self.dim, self.axis, self.pieces

    def __str__(self) -> str:
        pieces = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"in {self.rounds} rounds{pieces} along {self.axis}"

    def order(self, device: Any) -> list[Any]:
        """The pieces in the order of a device: a number, or a scalar of JAX; its own last if sums travel."""
        first = device + (self.operand is None)
        n = self.rounds
        return [(first + k) % n * self.pieces + i for k in range(n) for i in range(self.pieces)]

    def seconds(self, part: Part) -> float:
        """Predicted seconds: one product, then the longer of the other products and the messages."""
        others = [*part.moves, part.result]
        del others[-1 if self.operand is None else self.operand]
        product_s = part.work / self.products
        moved_s = (self.products - self.pieces) * self.rotation.cost
        return sum(move.cost for move in others) + product_s + max(part.work - product_s, moved_s)


def rings(part: Part) -> Iterator[ContractionRing]:
    """The rings of a part: for moves of one step, between even contiguous blocks."""
    for i, move in enumerate(part.moves):
        gather = _only_step(move)  # to copies: each replica would give the whole gradient
        if isinstance(gather, AllGather) and gather.shards == (Shard(gather.copies[:1]),):
            if gather.dim not in part.result.src.names and gather.copies[
                0
            ] in part.result.src.tagged("copy"):
                continue  # each copy of the result would be added in another order
            block = Layout(move.src.dims, without_tags(move.dst, gather.copies).tags)
            yield from _rings(i, gather.dim, move, move.source, block)
    scatter = _only_step(part.result)
    result = part.result
    if isinstance(scatter, ReduceScatter) and scatter.op == "sum":
        axes = scatter.shards[0].axes
        if scatter.shards == (Shard(axes[:1]),):
            tags = without_tags(result.src, axes).tags
            src = result.target.with_layout(Layout(result.dst.dims, tags))
            yield from _rings(None, scatter.dim, result, src, result.dst)


def _only_step(move: Plan) -> Step | None:
    """The only step of a move beside changes of tags, if there is just one."""
    steps = [step for step in move.steps if not isinstance(step, Retag)]
    return steps[0] if len(steps) == 1 and not move.split else None


def _rings(
    operand: int | None, dim: str, move: Plan, src: Sharding, to: Layout
) -> Iterator[ContractionRing]:
    """The rings of parts under `src`, and under `to` after the rest of the move, sharded equally."""
    tags = src.layout.tags if operand is None else to.tags
    dims = src.normal.dims
    mesh = src.mesh  # groups as nested shards

    def plan(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Plan:
        array = shape, move.dtype, move.profile
        return find_plan(Request.on(mesh, src, dst, *array, devices=move.devices))

    d = src.dim_index(dim)
    (axis,), rows = dims[d].shards[-1].axes, src.max_local_shape[d]
    n = mesh.size(axis)
    rest = plan(src.layout, to, src.shape)
    for pieces in (1, 2, 4):
        if rows % pieces or (pieces > 1 and n * pieces > MAX_PRODUCTS):
            continue
        next_part = rotated((axis,), n, rows // pieces, -1)
        next_dim = replace(dims[d], shards=(*dims[d].shards[:-1], next_part))
        shape = (*src.shape[:d], src.shape[d] // pieces, *src.shape[d + 1 :])
        rotation = plan(
            Layout(dims, tags), Layout((*dims[:d], next_dim, *dims[d + 1 :]), tags), shape
        )
        yield ContractionRing(operand, dim, axis, pieces, rotation, rest)
