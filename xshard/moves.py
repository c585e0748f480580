"""Which steps are worth trying from one layout on the way to another.

Decides the planner's step set, goal-directed: an axis is moved only to where the goal wants
it, gathered only where the goal does not have it. `Exchange` to the goal is always among them.
Layouts here are in normal form and without copy tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from xshard.layout import Layout
from xshard.notation import Dim, Shard
from xshard.sharding import Sharding
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from xshard.steps.base import axes_of
from xshard.steps.exchange import begun, ended

# Rearrangements by permutation that are tried from one layout.
MAX_PERMUTES = 8


def moves(here: Sharding, goal: Sharding) -> Iterator[Step]:
    """Every step worth trying from `here` towards `goal`, in a fixed order."""
    src, dst = here.layout, goal.layout
    yield Exchange(dst)
    yield from _reductions(src, dst)
    yield from _slices(here, dst)
    yield from _all_to_alls(src, dst)
    yield from _gathers(src, dst)
    yield from _into_sums(src, dst, here)
    yield from _permutes(here, goal)


def _reductions(src: Layout, dst: Layout) -> Iterator[Step]:
    for kind in ("sum", "max", "min"):
        ending = tuple(a for a in ended(src, dst) if a in src.tagged(kind))
        groups = dict.fromkeys([ending, *((a,) for a in ending)]) if ending else {}
        for axes in groups:
            yield AllReduce(axes, kind)
            for dim in src.dims:
                yield ReduceScatter(dim.name, tuple(Shard((a,)) for a in axes), kind)
        for dim in src.dims:
            wanted = _next_shards(dim, dst.dim(dim.name))
            for n in range(len(wanted), 0, -1):
                if set(axes_of(wanted[:n])) <= set(ending):
                    yield ReduceScatter(dim.name, wanted[:n], kind)


def _slices(here: Sharding, dst: Layout) -> Iterator[Step]:
    src = here.layout
    free = [a for a, n in zip(here.mesh.axes, here.mesh.sizes, strict=True) if n > 1 and a not in src.axes]
    for dim in src.dims:
        goal = dst.dim(dim.name)
        wanted = _next_shards(dim, goal)
        ready = 0
        while ready < len(wanted) and set(wanted[ready].axes) <= set(free):
            ready += 1
        if ready:
            yield Slice(dim.name, wanted[:ready])
        for shard in goal.shards:  # out of order: a permutation puts it right later
            if shard not in wanted[:ready] and set(shard.axes) <= set(free):
                yield Slice(dim.name, (shard,))


def _gathers(src: Layout, dst: Layout) -> Iterator[Step]:
    for dim in src.dims:
        for n in range(1, len(_misplaced(dim, dst)) + 1):
            yield AllGather(dim.name, dim.shards[-n:])


def _all_to_alls(src: Layout, dst: Layout) -> Iterator[Step]:
    for dim in src.dims:
        for n in range(1, len(_misplaced(dim, dst)) + 1):
            moving = dim.shards[-n:]
            for other in src.dims:
                if other is dim:
                    continue
                goal = dst.dim(other.name)
                wanted = _next_shards(other, goal)
                fits = next(
                    (wanted[:k] for k in range(1, len(wanted) + 1) if _same_axes(wanted[:k], moving)), None
                )
                if fits:
                    yield AllToAll(dim.name, moving, other.name, fits)
                elif set(axes_of(moving)) <= set(goal.axes):
                    yield AllToAll(dim.name, moving, other.name, moving)


def _into_sums(src: Layout, dst: Layout, here: Sharding) -> Iterator[Step]:
    begins = begun(src, dst)
    for dim in src.dims:
        for n in range(1, len(dim.shards) + 1):
            if set(axes_of(dim.shards[-n:])) <= set(begins):
                yield Embed(dim.name, dim.shards[-n:])
    free = tuple(a for a in begins if a not in src.axes)
    if free:
        yield Mask(free)


def _permutes(here: Sharding, goal: Sharding) -> Iterator[Step]:
    """Rearrangements that keep every local length: the goal itself, else as much of it as fits."""
    src, dst = here.layout, goal.layout
    if src.tags == dst.tags and here.max_local_shape == goal.max_local_shape:
        yield Permute(dst)
    if any(shard.order != "block" or len(shard.axes) > 1 for dim in src.dims for shard in dim.shards):
        return
    partial = {a for _, axes in src.tags for a in axes}
    usable = [a for a, n in zip(here.mesh.axes, here.mesh.sizes, strict=True) if n > 1 and a not in partial]
    found = 0
    for dims in _arrangements(src.dims, dst, usable, here):
        if dims != src.dims and dims != dst.dims:
            yield Permute(replace(src, dims=dims))
            found += 1
            if found == MAX_PERMUTES:
                return


def _arrangements(
    dims: tuple[Dim, ...], dst: Layout, usable: list[str], here: Sharding
) -> Iterator[tuple[Dim, ...]]:
    """Ways to cut the dims into as many parts as now, the goal's leading cuts first."""
    if not dims:
        yield ()
        return
    dim, size = dims[0], here.mesh.size
    parts = size(*dim.axes)
    goal = [shard for shard in dst.dim(dim.name).shards if len(shard.axes) == 1 and shard.order == "block"]
    for n in range(len(goal), -1, -1):
        lead = axes_of(goal[:n])
        if not set(lead) <= set(usable) or parts % size(*lead):
            continue
        rest = [a for a in usable if a not in lead]
        wanted = [a for a in rest if a in dim.axes] + [a for a in rest if a not in dim.axes]
        for tail in _factors(wanted, parts // size(*lead), here):
            shards = tuple(Shard((a,)) for a in (*lead, *tail))
            left = [a for a in rest if a not in tail]
            for others in _arrangements(dims[1:], dst, left, here):
                yield (replace(dim, shards=shards), *others)


def _factors(axes: list[str], product: int, here: Sharding) -> Iterator[tuple[str, ...]]:
    """Sequences of axes whose sizes multiply to `product`, shortest first, in the given order."""
    for n in range(len(axes) + 1):
        for chosen in permutations(axes, n):
            if here.mesh.size(*chosen) == product:
                yield chosen
                break  # the order of axes that the goal does not want there is indifferent


def _next_shards(dim: Dim, goal: Dim) -> tuple[Shard, ...]:
    """The goal's cuts that come after those of `dim`, if those lead up to them."""
    n = len(dim.shards)
    return goal.shards[n:] if goal.shards[:n] == dim.shards else ()


def _misplaced(dim: Dim, dst: Layout) -> tuple[Shard, ...]:
    """The cuts of a dim beyond those it shares with the goal."""
    goal = dst.dim(dim.name).shards
    shared = 0
    while shared < min(len(goal), len(dim.shards)) and goal[shared] == dim.shards[shared]:
        shared += 1
    return dim.shards[shared:]


def _same_axes(a: tuple[Shard, ...], b: tuple[Shard, ...]) -> bool:
    return sorted(axes_of(a)) == sorted(axes_of(b))
