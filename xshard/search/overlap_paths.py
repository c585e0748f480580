"""Paths between layouts with overlaps.

Overlaps that change are taken away first and rebuilt last, one dim at a time. In between, the
search moves plain shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from xshard.cost.model import Profile, price, too_large
from xshard.dtypes import check_reduction, check_signed, check_value, itemsize
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.providers import missing_rows
from xshard.layout.runs import Runs, intersections, interval_table
from xshard.layout.validation import rolled_dim
from xshard.notation.overlap import Fold, Halo, Overlap, Reads, Window, ends_of
from xshard.notation.parser import Dim
from xshard.search.a_star import Search
from xshard.search.moves import NamedRoute
from xshard.search.states import without
from xshard.steps import Exchange, Permute, Step
from xshard.steps.exchange.exchange import negates_addends
from xshard.steps.exchange.sources import DimEnd, carried_dims, dim_end, views

Steps = tuple[Step, ...]


class Candidate(NamedTuple):
    """A path with its price."""

    steps: Steps
    has_larger_blocks: bool  # than both ends: taken only if there is no other
    seconds: float
    peak_bytes: int


def best_path(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, limit: int | None
) -> Steps:
    """Find the cheapest steps between two shardings whose blocks overlap, as with a halo.

    A few paths of a fixed form are priced, and the cheapest is returned: () if both sides are
    equal.

    Raises PlanError if no path fits `limit`, the bytes that a device may hold (None: no limit).
    """
    # With wide halos every block may hold all rows, so that sharding over x and over y mean the
    # same. A step is still needed then, since the layouts after it name other axes.
    if start.means_the_same_as(goal) and set(start.layout.axes) == set(goal.layout.axes):
        return ()
    paths = paths_by_name(start, goal, dtype, profile).values()
    candidates = [_candidate(steps, start, goal, dtype, profile) for steps in paths]
    fitting = [
        candidate for candidate in candidates if limit is None or candidate.peak_bytes <= limit
    ]
    if not fitting:
        raise too_large(
            limit, min(candidate.peak_bytes for candidate in candidates), "any plan needs"
        )
    # Of those that cost the same, the first.
    return min(fitting, key=attrgetter("has_larger_blocks", "seconds")).steps


def _candidate(
    steps: Steps, start: Sharding, goal: Sharding, dtype: str, profile: Profile
) -> Candidate:
    """Price a path of steps: its seconds, the peak of memory, and the largest block on the way."""
    source = start
    seconds = 0.0
    peak_bytes = 0
    max_elements = 0
    for step in steps:
        target = step.after(source)
        step_price = price(step, source, target, itemsize(dtype), profile)
        seconds += step_price.seconds
        peak_bytes = max(peak_bytes, step_price.peak_bytes)
        max_elements = max(max_elements, target.max_local_size)
        source = target
    has_larger_blocks = max_elements > max(start.max_local_size, goal.max_local_size)
    return Candidate(steps, has_larger_blocks, seconds, peak_bytes)


def paths_by_name(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile
) -> dict[str, Steps]:
    """Return each path by name, the plainest first."""
    paths: dict[str, Steps] = {"one dim at a time": _one_by_one(start, goal, dtype, profile)}
    if not negates_addends(start, goal):
        paths["direct exchange"] = (Exchange(goal.layout),)
    return paths


def check_overlaps(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise PlanError or DtypeError if no redistribution between these overlaps is defined."""
    src = source.layout
    dst = target.layout
    for dim_index, src_dim in enumerate(src.dims):
        if isinstance(src_dim.overlap, Fold):
            check_reduction(dtype, "sum")
            if not src.is_linear:
                reason = f"'{src}' is a max of blocks that overlap as contributions"
                raise PlanError(reason, hint="reduce the max first")
        _check_rows_exist(source, target, dim_index)
        _check_contributions_fit(source, target, dim_index)
    check_boundaries(src, dtype)
    check_boundaries(dst, dtype)


def check_boundaries(layout: Layout, dtype: str) -> None:
    """Raise PlanError or DtypeError if values at the ends of dims fit no sum, or not the dtype."""
    for boundary in chain.from_iterable(ends_of(dim.overlap) for dim in layout.dims):
        if boundary.value and layout.tagged("sum", "mean"):
            reason = f"'{layout}' fills addends with {boundary}, whose sum is another number"
            raise PlanError(reason, hint="reduce first, or write zero")
        if boundary.value:
            check_value(dtype, boundary.value)
        if boundary.sign < 0:
            check_signed(dtype)


def _check_rows_exist(source: Sharding, target: Sharding, dim_index: int) -> None:
    """Raise PlanError if the destination needs a row of dim `dim_index` that no device holds.

    The blocks under a window are what a convolution reads, and it may skip rows: a kernel of 2 with
    stride 3 reads rows 0 1, 3 4, ..., and row 2 is on no device. A halo of negative width drops
    rows too.
    """
    src = dim_end(source, dim_index)
    dst = dim_end(target, dim_index)
    # Without an overlap the blocks hold all rows. Under a Fold, where the rows that several blocks
    # hold are to be added up, a row in no block is simply zero.
    if src.dim.overlap is None or isinstance(src.dim.overlap, Fold):
        return
    wanted_blocks: list[Runs] = []
    for view in views(target):
        # A dim that stays as it is needs nothing from others, unless a pole (rows mirrored beyond
        # the end of a sphere's latitude) rolls it: then its rows come from elsewhere.
        if src.dim != dst.dim or view.shifts[dim_index]:
            dim_view = dim_end(
                target, dim_index, view.pole_sides[dim_index], view.shifts[dim_index]
            )
            wanted_blocks += dim_view.wanted_rows()
    row = _first_missing(src, wanted_blocks)
    if row is not None:
        reason = f"no block under '{source.layout}' holds row {row} of dim {src.dim.name!r}, which "
        hint = "a window holds the rows that its outputs read, and no others"
        raise PlanError(f"{reason}'{target.layout}' has", hint=hint)


def _check_contributions_fit(source: Sharding, target: Sharding, dim_index: int) -> None:
    """Raise PlanError if rows of dim `dim_index` would be lost under a fold at the destination.

    A fold is the adjoint of a halo or window: blocks overlap, and what several devices hold of a
    row is to be added up. A row that no block of the window reads is in no block of the fold
    either: for a kernel of 2 with stride 3, row 2.
    """
    src = dim_end(source, dim_index)
    dst = dim_end(target, dim_index)
    if not isinstance(dst.dim.overlap, Fold) or src.dim == dst.dim:
        return  # rows are lost only in a fold that the source does not have
    offered_blocks: list[Runs] = []
    for view in views(source):
        dim_view = dim_end(source, dim_index, view.pole_sides[dim_index], view.shifts[dim_index])
        offered_blocks += chain.from_iterable(dim_view.offered_rows())
    row = _first_missing(dst, offered_blocks)
    if row is not None:
        reason = f"row {row} of dim {src.dim.name!r} is in no block under '{target.layout}'"
        raise PlanError(reason, hint="contributions to it would be lost")


def _first_missing(dim: DimEnd, blocks: Iterable[Runs]) -> int | None:
    """Return the first row of some blocks that no block of a dim holds; None if all are held."""
    missing = missing_rows(dim.dim, dim.length, dim.sizes)  # ascending
    if not missing:
        return None
    common = intersections(interval_table((missing,)), interval_table(blocks))
    return int(min(common.start)) if len(common.start) else None


def _one_by_one(start: Sharding, goal: Sharding, dtype: str, profile: Profile) -> Steps:
    """Build a path in three parts: take overlaps away, move plain shards, build overlaps up again.

    "n/x:halo(1,1)" -> "n/y:halo(1,1)" is an exchange to "n/x", the cheapest steps to "n/y", and an
    exchange to "n/y:halo(1,1)". Overlaps that are equal on both sides stay throughout. A fold that
    ends, and a halo that begins, communicate, and take an exchange for each dim; all other changes
    are local, and share one exchange.
    """
    kept_dims = carried_dims(start, goal)
    bare_start = _without_overlaps(start, kept_dims)
    bare_goal = _without_overlaps(goal, kept_dims)
    # Overlaps are dropped in the reverse of the order in which they would be added.
    *dropping, _ = _layouts(bare_start, start, one_by_one=(Fold,))
    _, *rebuilding = _layouts(bare_goal, goal, one_by_one=(Halo, Window, Reads))
    steps: list[Step] = [*map(Exchange, reversed(dropping))]
    steps += _steps_between(bare_start, bare_goal, dtype, profile)
    steps += map(Exchange, rebuilding)
    return tuple(steps)


def _without_overlaps(sharding: Sharding, kept_dims: Sequence[int]) -> Sharding:
    """Return the sharding without overlaps, except of some dims."""
    dims = list(sharding.layout.dims)
    for dim_index in without(range(len(dims)), kept_dims):
        dims[dim_index] = replace(dims[dim_index], overlap=None)
    return sharding.with_layout(replace(sharding.layout, dims=tuple(dims)))


def _layouts(
    start: Sharding, goal: Sharding, one_by_one: tuple[type[Overlap], ...]
) -> list[Layout]:
    """List the layouts in which overlaps are added dim by dim, from `start` to `goal` inclusive.

    Halos one by one: "y/a x/b", then "y/a:halo(1,1) x/b", then "y/a:halo(1,1) x/b:halo(1,1)".
    Dims whose overlaps at the goal are of the kinds `one_by_one` change one after the other, then
    all others at once. Both shardings have the same dims and shards; only overlaps differ.
    """
    goal_dims = goal.layout.dims
    dims = list(start.layout.dims)  # as in the layout listed last
    changed_dims = [dim_index for dim_index, dim in enumerate(dims) if dim != goal_dims[dim_index]]
    changed_alone = [
        dim_index
        for dim_index in changed_dims
        if isinstance(goal_dims[dim_index].overlap, one_by_one)
    ]
    changed_together = without(changed_dims, changed_alone)
    layouts = [start.layout]
    for changed_group in (*_dims_in_turn(goal, changed_alone), changed_together):
        for dim_index in changed_group:
            dims[dim_index] = goal_dims[dim_index]
        if changed_group:
            layouts.append(replace(start.layout, dims=tuple(dims)))
    return layouts


def _dims_in_turn(goal: Sharding, dims: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the dims in an order in which their overlaps can be added, in groups.

    Some dims have to wait for others. Beyond the pole of a sphere the rows of a latitude come
    again, rolled by half the longitudes: latitude first, then longitude, [[lat], [lon]]. Groups are
    single dims, but for dims that wait for each other, which come as one group.
    """
    remaining_dims: Sequence[int] = dims
    while remaining_dims:
        waiting_dims: set[int | None] = set()
        for dim_index in remaining_dims:
            waiting_for_dim = set(_dims_waiting_for(goal, dim_index))
            waiting_dims |= waiting_for_dim - {dim_index}
        ready_dims = without(remaining_dims, waiting_dims)
        # One at a time, since fewer dims may be waiting after it. If all wait in a circle, none is
        # ready, and all change together.
        group = ready_dims[:1] if ready_dims else remaining_dims
        yield group
        remaining_dims = without(remaining_dims, group)


def _dims_waiting_for(goal: Sharding, dim_index: int) -> Iterator[int | None]:
    """Yield the dims that must change after dim `dim_index`, because of the poles at its ends.

    They are the dims that a pole rolls, and those with boundary constants, which a pole with a
    negative sign would negate.
    """
    dims = goal.layout.dims
    for pole_boundary in ends_of(dims[dim_index].overlap):
        if pole_boundary.kind == "pole":
            yield rolled_dim(dims, dim_index, pole_boundary, goal.shape)
        if pole_boundary.sign < 0:
            for other_dim_index, other_dim in enumerate(dims):
                if any(boundary.value for boundary in ends_of(other_dim.overlap)):
                    yield other_dim_index


@dataclass(frozen=True)
class _Disguise:
    """Dims that keep their overlaps, shown to the search as unsharded dims as long as their blocks.

    The search knows no overlaps. What it may use are the other dims, and the axes that these leave.
    """

    overlapping_dims: dict[int, Dim]
    mesh: Mesh  # of the axes that are left
    shape: tuple[int, ...]

    @classmethod
    def of(cls, sharding: Sharding) -> _Disguise:
        """Disguise the dims of a sharding that have overlaps."""
        overlapping_dims: dict[int, Dim] = {}
        used_axes: set[str] = set()
        shape = list(sharding.shape)
        for dim_index, dim in enumerate(sharding.layout.dims):
            if dim.overlap is not None:
                overlapping_dims[dim_index] = dim
                used_axes.update(dim.axes)
                shape[dim_index] = sharding.max_local_shape[dim_index]
        mesh = sharding.mesh
        remaining_sizes = {axis: mesh.size(axis) for axis in without(mesh.axes, used_axes)}
        return cls(overlapping_dims, Mesh(remaining_sizes), tuple(shape))

    def for_search(self, sharding: Sharding) -> Sharding:
        """Return the sharding as the search sees it."""
        dims = list(sharding.layout.dims)
        for dim_index in self.overlapping_dims:
            dims[dim_index] = Dim(dims[dim_index].name)
        return Sharding(replace(sharding.layout, dims=tuple(dims)), self.mesh, self.shape)

    def for_plan(self, step: Step) -> Step:
        """Return a step of the search as it is between the real layouts."""
        if not isinstance(step, Exchange | Permute):
            return step
        dims = [
            self.overlapping_dims.get(dim_index, dim) for dim_index, dim in enumerate(step.to.dims)
        ]
        layout = replace(step.to, dims=tuple(dims))
        return type(step)(layout)  # of an exchange without node-local senders: no overlap has them

    def is_sharded(self, sharding: Sharding) -> bool:
        """Check whether the search shards a dim that only looks unsharded."""
        return any(sharding.layout.dims[dim_index].shards for dim_index in self.overlapping_dims)


def _steps_between(start: Sharding, goal: Sharding, dtype: str, profile: Profile) -> Sequence[Step]:
    """Find the cheapest steps between shardings whose overlaps are equal.

    The search does not know overlaps, so a dim that has one is shown to it as an unsharded dim, on
    a mesh without the axes of that dim. If its path shards such a dim on the way, which the real
    dim cannot be, the result is one direct exchange instead. () if both sides are equal.
    """
    if start.layout == goal.layout:
        return ()
    disguise = _Disguise.of(start)
    machine = profile.for_axes(disguise.mesh.axes, start.mesh)  # without the axes of these dims
    sharding = disguise.for_search(start)
    named_route = NamedRoute(sharding, disguise.for_search(goal), itemsize(dtype), machine)
    steps = named_route.steps(Search(named_route.route, memory_limit=None).path().moves)
    for step in steps:
        sharding = step.after(sharding)
        if disguise.is_sharded(sharding):  # the real dim cannot be sharded further
            return (Exchange(goal.layout),)
    return [disguise.for_plan(step) for step in steps]
