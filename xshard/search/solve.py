"""The cheapest steps between two shardings: the search, and what it does not see.

The search knows neither copies, nor factors, nor overlaps: they are added around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from xshard.caches import layout_cache
from xshard.cost.model import Profile
from xshard.dtypes import check_reduction, itemsize
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split, root_of, split_as, split_of
from xshard.search import overlap_paths
from xshard.search.a_star import Path, Search
from xshard.search.moves import NamedRoute, SearchRoute, normal_form
from xshard.search.request import Request
from xshard.search.states import common, without
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

Steps = tuple[Step, ...]


class Solution(NamedTuple):
    """The steps between two shardings on one mesh, and the axes that they split."""

    steps: Steps
    split: Split


@layout_cache(maxsize=4096)
def solve(request: Request) -> Solution:
    """Find the cheapest steps on one mesh, with copies and the scale. Raises PlanError, DtypeError.

    The search sees simplified layouts: each in its normal form, the plainest with the same blocks,
    and `copy` tags (replicas whose gradients differ) left out. There are three cases: with overlaps
    such as halos, a few fixed paths are compared; else A* searches, on the mesh itself, or on the
    finer mesh that splits some axes, if that is cheaper.
    """
    request = request.on_sub_axes
    check_moves(request.source, request.target, request.dtype)
    profile = request.machine
    start = normal_form(request.source)
    goal = normal_form(request.target)
    # Copies hold the same values as replicas: their tags are added to the steps afterwards.
    bare_start = without_copies(start)
    # A dim whose blocks are the same on both sides is written as at the start: it needs no step.
    bare_goal = without_copies(with_dims_of_start(goal, start))
    if start.layout.has_overlap or goal.layout.has_overlap:
        steps = overlap_paths.best_path(
            bare_start, bare_goal, request.dtype, profile, request.memory_limit
        )
        return Solution(_complete_steps(steps, request, start, goal), split_of(start.mesh))

    named_route = NamedRoute(bare_start, bare_goal, itemsize(request.dtype), profile)
    scaled_elements = 0
    if request.factor != 1:  # the step that multiplies holds the smaller block, and its result
        scaled_elements = 2 * min(start.max_local_size, goal.max_local_size)
    path = best_path(named_route.route, request.memory_limit, scaled_elements)
    if isinstance(path, SubAxisPath):
        # The best path may split axes of the mesh: layouts and steps are written on the finer mesh.
        fine_mesh = split_as(root_of(start.mesh), path.route.grid.mesh.sizes)
        start = normal_form(request.source.on_sub_axes(fine_mesh))
        goal = normal_form(request.target.on_sub_axes(fine_mesh))
        named_route = NamedRoute(
            without_copies(start), without_copies(goal), named_route.itemsize, profile
        )
    split = split_of(start.mesh)
    return Solution(_complete_steps(named_route.steps(path.moves), request, start, goal), split)


def _complete_steps(steps: Steps, request: Request, start: Sharding, goal: Sharding) -> Steps:
    """Add to the steps of a search what it does not see: copies, and the scale.

    A step that multiplies by the factor is added where blocks are smaller.

    start, goal: the normal forms, with copies, on the mesh of the steps.
    """
    steps = with_copies(steps, start, goal)
    return with_scale(steps, request.factor, start, goal, request.profile)


@layout_cache(maxsize=4096)
def best_path(
    route: SearchRoute, memory_limit: int | None = None, scaled: int = 0
) -> Path | SubAxisPath:
    """Find the cheapest path, for all names of dims and copies.

    Raises PlanError if none fits the limit.
    """
    path = Search(route, memory_limit, scaled=scaled).path()
    on_sub_axes = best_sub_axis_path(route, path, memory_limit)
    return path if on_sub_axes is None else on_sub_axes


def with_dims_of_start(goal: Sharding, start: Sharding) -> Sharding:
    """Write each dim of the goal as the start has it, if that means the same over the same axes."""
    dims = list(goal.layout.dims)
    for dim_index, (old_dim, new_dim) in enumerate(zip(start.layout.dims, dims, strict=True)):
        if sorted(old_dim.axes) == sorted(new_dim.axes) and start.agrees_with(goal, dim_index):
            dims[dim_index] = old_dim
    return goal.with_layout(replace(goal.layout, dims=tuple(dims)))


def check_moves(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise PlanError or DtypeError if no redistribution between these layouts is defined.

    Layouts may hold partial results, to be reduced by sum, mean, max or min. A reduction that ends,
    as in "n | sum(x)" -> "n", needs a dtype that can be reduced. A max or min may be kept or
    reduced, but not begun; and it may not end while a sum begins, since the order is not said.
    """
    src = source.layout
    dst = target.layout
    overlap_paths.check_overlaps(source, target, dtype)
    for tag, axes in src.tags:
        is_ending = not set(axes) <= set(dst.tagged(tag))
        if tag != "copy" and is_ending:
            check_reduction(dtype, tag)
    for tag in ("max", "min"):
        # A sum begins locally, with zeros on all devices but one. There is no such step for a max.
        new_axes = without(dst.tagged(tag), src.tagged(tag))
        if new_axes:
            hint = f"a {tag} can be kept or reduced, not begun: write copy({','.join(new_axes)})"
            reason = f"'{dst}' holds a {tag} over {', '.join(new_axes)} that '{src}' does not"
            raise PlanError(reason, hint=hint)
    if not src.is_linear and dst.tagged("sum", "mean"):
        reason = f"between '{src}' and '{dst}' a max ends and a sum begins"
        raise PlanError(reason, hint="reduce first, then redistribute")


def with_scale(
    steps: Steps, factor: Fraction, start: Sharding, goal: Sharding, profile: Profile
) -> Steps:
    """Add a `Scale` to the steps where blocks are smaller: first or last."""
    if factor == 1:
        return steps
    # Rows that a boundary fills are values of the result: they are not scaled. So a mean in a fixed
    # order is a sum of shares everywhere.
    is_first = goal.layout.has_overlap or profile.adds_in_order
    is_first = is_first or start.max_local_size <= goal.max_local_size
    return (Scale(factor), *steps) if is_first else (*steps, Scale(factor))


def without_copies(sharding: Sharding) -> Sharding:
    """Read copies as replicas, as the search does."""
    return sharding.with_layout(without_tags(sharding.layout, sharding.layout.tagged("copy")))


def with_copies(steps: Sequence[Step], start: Sharding, goal: Sharding) -> Steps:
    """Add `copy` tags to steps that were planned without them.

    Copies are replicas whose gradients differ and are added up; their values are those of replicas,
    and only the tag in the layout tells them apart. A step that leaves replicas, such as an
    all-gather, can tag them. Tags that no step adds or removes are left to one `Retag` at the end.

    Args:
        steps: Steps between the shardings without copies.
        start: The start; it may have copies.
        goal: The goal; it may have others.
    """
    goal_copies = goal.layout.tagged("copy")
    if not goal_copies and not start.layout.tagged("copy"):
        return tuple(steps)
    # Backwards: if a later step shards over an axis, or makes partial sums along it, no tag is set.
    consumed_later: set[str] = set()
    tagged_steps: list[Step] = []
    for step in reversed(steps):
        missing_copies = without(goal_copies, consumed_later)
        tagged_steps.insert(0, _with_copies_after(step, missing_copies))
        consumed_later.update(_consumed_axes(step))
    sharding = start
    for step in tagged_steps:
        sharding = step.after(sharding)
    present_copies = sharding.layout.tagged("copy")
    missing_copies = without(goal_copies, present_copies)
    ended_copies = without(present_copies, goal_copies)  # no copies any more
    if missing_copies or ended_copies:
        tagged_steps.append(Retag(missing_copies, ended_copies))
    return tuple(tagged_steps)


def _with_copies_after(step: Step, copies: tuple[str, ...]) -> Step:
    """Return the step with those of its replicas marked as copies that are among `copies`."""
    if isinstance(step, AllGather):
        return replace(step, copies=common(axes_of(step.shards), copies))
    if isinstance(step, AllReduce):
        return replace(step, copies=common(step.axes, copies))
    if isinstance(step, Exchange | Permute):  # they name the whole layout afterwards
        free_copies = without(copies, step.to.axes)
        return replace(step, to=with_tag(step.to, "copy", free_copies))
    return step


def _consumed_axes(step: Step) -> tuple[str, ...]:
    """List the axes that a step takes out of replicas or copies."""
    if isinstance(step, Slice):
        return tuple(chain.from_iterable(axes_of(shards) for _, shards in step.cuts))
    if isinstance(step, Embed):
        return axes_of(step.shards)
    if isinstance(step, Mask):
        return step.axes
    return step.to.axes if isinstance(step, Exchange | Permute) else ()
