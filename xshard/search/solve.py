"""The cheapest steps between two shardings: the search, with copies, scales and overlaps around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from xshard.caches import layout_cache
from xshard.dtypes import check_reduction, itemsize
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.search import overlap_paths
from xshard.search.a_star import Path, Search
from xshard.search.moves import SearchRoute, Space
from xshard.search.request import Request
from xshard.search.sub_axis_paths import SubAxisPath, best_sub_axis_path
from xshard.steps import (
    AllGather,
    AllReduce,
    Embed,
    Exchange,
    Mask,
    Permute,
    Retag,
    Scale,
    Slice,
    Step,
)
from xshard.steps.base import axes_of, with_tag, without_tags


@layout_cache(maxsize=4096)
def solve(request: Request) -> tuple[tuple[Step, ...], Split]:
    """The cheapest steps on one mesh, and the axes that they split. Raises PlanError, DtypeError."""
    source = request.source
    target = request.target
    dtype = request.dtype
    profile = request.machine
    factor = request.factor
    memory_limit = request.memory_limit
    check_moves(source, target, dtype)
    start, goal = (s.with_layout(s.normal) for s in (source, target))
    endpoints = without_copies(start), without_copies(respelled(goal, start))
    split: Split = ()
    if start.layout.overlaps or goal.layout.overlaps:
        path = overlap_paths.best_path(*endpoints, dtype, profile, memory_limit)
    else:
        scaled = 2 * min(start.max_local_size, goal.max_local_size) if factor != 1 else 0
        space = Space(*endpoints, itemsize(dtype), profile)
        best = best_path(space.route, memory_limit, scaled)
        if isinstance(best, SubAxisPath) and (split := best.split):
            fine = SubAxisMesh(source.mesh, split)
            start, goal = (s.with_layout(s.normal) for s in map(fine.factored, (source, target)))
            space = Space(without_copies(start), without_copies(goal), space.itemsize, profile)
        path = space.steps(best.moves)
    return with_scale(with_copies(path, start, goal), factor, start, goal), split


@layout_cache(maxsize=4096)
def best_path(
    route: SearchRoute, memory_limit: int | None = None, scaled: int = 0
) -> Path | SubAxisPath:
    """The cheapest path, for all names of dims and copies. Raises PlanError if none fits the limit."""
    path = Search(route, memory_limit, scaled=scaled).path()
    return best_sub_axis_path(route, path, memory_limit) or path


def respelled(goal: Sharding, start: Sharding) -> Sharding:
    """The goal with every dim as the start has it if that means the same, over the same axes."""
    pairs = enumerate(zip(start.layout.dims, goal.layout.dims, strict=True))
    dims = (
        a if sorted(a.axes) == sorted(b.axes) and start.agrees_with(goal, d) else b
        for d, (a, b) in pairs
    )
    return goal.with_layout(replace(goal.layout, dims=tuple(dims)))


def check_moves(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise PlanError or DtypeError if no redistribution between these layouts is defined."""
    src = source.layout
    dst = target.layout
    overlap_paths.check_overlaps(source, target, dtype)
    for kind, axes in src.tags:
        if kind != "copy" and not set(axes) <= set(dst.tagged(kind)):
            check_reduction(dtype, kind)
    for kind in ("max", "min"):
        new = [a for a in dst.tagged(kind) if a not in src.tagged(kind)]
        if new:
            hint = f"a {kind} can be kept or reduced, not begun: write copy({','.join(new)})"
            raise PlanError(
                f"'{dst}' holds a {kind} over {', '.join(new)} that '{src}' does not", hint=hint
            )
    if not src.is_linear and dst.tagged("sum", "mean"):
        reason = f"between '{src}' and '{dst}' a max ends and a sum begins"
        raise PlanError(reason, hint="reduce first, then redistribute")


def with_scale(
    steps: tuple[Step, ...], factor: Fraction, start: Sharding, goal: Sharding
) -> tuple[Step, ...]:
    """The steps and a `Scale`, put where blocks are smaller: first or last."""
    if factor == 1:
        return steps
    # Rows that a boundary fills are values of the result: they are not scaled.
    first = goal.layout.overlaps or start.max_local_size <= goal.max_local_size
    return (Scale(factor), *steps) if first else (*steps, Scale(factor))


def without_copies(sharding: Sharding) -> Sharding:
    """The sharding with copies read as replicas, as the search sees it."""
    return sharding.with_layout(without_tags(sharding.layout, sharding.layout.tagged("copy")))


def with_copies(steps: Sequence[Step], start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """The steps with copies marked, by the last steps that leave replicas and by a final retag."""
    wanted = goal.layout.tagged("copy")
    if not wanted and not start.layout.tagged("copy"):
        return tuple(steps)
    here = start
    result = []
    for i, step in enumerate(steps):
        later = {a for s in steps[i + 1 :] for a in _consumed(s)}
        copies = tuple(a for a in wanted if a not in later)
        if isinstance(step, AllGather):
            step = replace(step, copies=tuple(a for a in axes_of(step.shards) if a in copies))
        elif isinstance(step, AllReduce):
            step = replace(step, copies=tuple(a for a in step.axes if a in copies))
        elif isinstance(step, Exchange | Permute):
            free = [a for a in copies if a not in step.to.axes]
            step = replace(step, to=with_tag(step.to, "copy", free))
        result.append(step)
        here = step.after(here)
    have = here.layout.tagged("copy")
    copies, replicas = (
        tuple(a for a in x if a not in y) for x, y in ((wanted, have), (have, wanted))
    )
    retag = Retag(copies, replicas)
    return (*result, retag) if retag != Retag() else tuple(result)


def _consumed(step: Step) -> tuple[str, ...]:
    """Axes that a step takes out of replicas or copies."""
    if isinstance(step, Slice):
        return tuple(axis for _, shards in step.cuts for axis in axes_of(shards))
    if isinstance(step, Embed):
        return axes_of(step.shards)
    if isinstance(step, Mask):
        return step.axes
    return step.to.axes if isinstance(step, Exchange | Permute) else ()
