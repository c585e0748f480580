"""Paths between layouts with overlaps: other overlaps go first and are rebuilt last, one dim at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from xshard.cost.model import Profile, price, too_large
from xshard.dtypes import check_reduction, check_signed, check_value, itemsize
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.providers import missing_rows, offered_rows, wanted_rows
from xshard.layout.runs import Runs, met, pieces
from xshard.layout.validation import rolled_dim
from xshard.notation.overlap import Fold, Halo, Reads, Window, ends_of
from xshard.notation.parser import Dim
from xshard.search.a_star import Search
from xshard.search.moves import Space
from xshard.steps import Exchange, Step
from xshard.steps.exchange.exchange import negates_addends
from xshard.steps.exchange.sources import dim_end, views

Steps = tuple[Step, ...]


def best_path(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, limit: int | None
) -> Steps:
    """The cheapest path. Raises PlanError if none fits the limit."""
    # If every block holds everything, sharding changes nothing, but a step must still rename the axis.
    if start.means_the_same_as(goal) and set(start.layout.axes) == set(goal.layout.axes):
        return ()
    largest = max(start.max_local_size, goal.max_local_size)
    candidates: list[tuple[bool, float, int, int, Steps]] = []
    for steps in ways(start, goal, dtype, profile).values():
        here = start
        seconds = 0.0
        peak = 0
        block = 0
        for step in steps:
            after = step.after(here)
            cost = price(step, here, after, itemsize(dtype), profile)
            seconds = seconds + cost.seconds
            peak = max(peak, cost.peak_bytes)
            here = after
            block = max(block, after.max_local_size)
        candidates.append((block > largest, seconds, len(candidates), peak, steps))
    fitting = [way for way in candidates if limit is None or way[3] <= limit]
    if not fitting:
        raise too_large(limit, min(way[3] for way in candidates), "any plan needs")
    return min(fitting)[-1]


def ways(start: Sharding, goal: Sharding, dtype: str, profile: Profile) -> dict[str, Steps]:
    """Every path by name, the plainest first."""
    dims = zip(start.layout.dims, goal.layout.dims, strict=True)
    kept = [a.overlap is not None and a == b for a, b in dims]
    paths: dict[str, Steps] = {"one dim at a time": _one_by_one(start, goal, kept, dtype, profile)}
    if not negates_addends(start, goal):
        paths["direct exchange"] = (Exchange(goal.layout),)
    return paths


def check_overlaps(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise PlanError or DtypeError if no redistribution between these overlaps is defined."""
    src = source.layout
    dst = target.layout
    for d, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)):
        if isinstance(a.overlap, Fold):
            check_reduction(dtype, "sum")
            if not src.is_linear:
                reason = f"'{src}' is a max of blocks that overlap as contributions"
                raise PlanError(reason, hint="reduce the max first")
        _check_lost(source, target, d)
        for dim, layout in ((a, src), (b, dst)):
            for end in ends_of(dim.overlap):
                if end.value and layout.tagged("sum", "mean"):
                    reason = f"'{layout}' fills addends with {end}, whose sum is another number"
                    raise PlanError(reason, hint="reduce first, or write zero")
                if end.value:
                    check_value(dtype, end.value)
                if end.sign < 0:
                    check_signed(dtype)


def _one_by_one(
    start: Sharding, goal: Sharding, kept: list[bool], dtype: str, profile: Profile
) -> Steps:
    bare, aim = (_without_overlaps(sharding, kept) for sharding in (start, goal))
    # Local steps run while blocks are small: overlaps are trimmed first, folds begin last.
    dropped = _layouts(bare, start, one_by_one=Fold)
    rebuilt = _layouts(aim, goal, one_by_one=(Halo, Window, Reads))
    steps: list[Step] = [Exchange(layout) for layout in dropped[-2::-1]]
    steps += _between(bare, aim, dtype, profile)
    return (*steps, *(Exchange(layout) for layout in rebuilt[1:]))


def _layouts(start: Sharding, goal: Sharding, one_by_one: type | tuple[type, ...]) -> list[Layout]:
    """Layouts from `start` to `goal`: overlaps of some kinds one at a time, then the rest at once."""
    bare = start.layout
    full = goal.layout
    dims = list(bare.dims)
    layouts = [bare]
    changed = [d for d, (a, b) in enumerate(zip(bare.dims, full.dims, strict=True)) if a != b]
    rest = [d for d in changed if not isinstance(full.dims[d].overlap, one_by_one)]
    for group in (*_in_turn(goal, [d for d in changed if d not in rest]), rest):
        for d in group:
            dims[d] = full.dims[d]
        if group:
            layouts.append(replace(bare, dims=tuple(dims)))
    return layouts


def _in_turn(goal: Sharding, dims: list[int]) -> Iterator[list[int]]:
    """One dim after the other, a dim with a pole before the dims that wait for it; a cycle as one group."""
    while dims:
        waiting = {after for d in dims for after in _waiting(goal, d) if after != d}
        group = next(([d] for d in dims if d not in waiting), dims)
        yield group
        dims = [d for d in dims if d not in group]


def _waiting(goal: Sharding, d: int) -> Iterator[int | None]:
    """The dims that the poles of a dim roll, and dims with constants that the poles would negate."""
    dims = goal.layout.dims
    for end in ends_of(dims[d].overlap):
        if end.kind == "pole":
            yield rolled_dim(dims, d, end, goal.shape)
        if end.sign < 0:
            yield from (
                i
                for i, dim in enumerate(dims)
                if any(other.value for other in ends_of(dim.overlap))
            )


def _without_overlaps(sharding: Sharding, kept: list[bool]) -> Sharding:
    pairs = zip(sharding.layout.dims, kept, strict=True)
    dims = tuple(dim if keep else replace(dim, overlap=None) for dim, keep in pairs)
    return sharding.with_layout(replace(sharding.layout, dims=dims))


def _between(bare: Sharding, aim: Sharding, dtype: str, profile: Profile) -> Steps:
    """The path of `Search`, to which a dim that still overlaps is an unsharded dim as long as its block."""
    if bare.layout == aim.layout:
        return ()
    mesh = bare.mesh
    fixed = {d: dim for d, dim in enumerate(bare.layout.dims) if dim.overlap is not None}
    busy = {axis for dim in fixed.values() for axis in dim.axes}
    free = Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis not in busy})
    machine = profile.along(free.axes, mesh)
    shape = tuple(bare.max_local_shape[d] if d in fixed else n for d, n in enumerate(bare.shape))

    def plain(sharding: Sharding) -> Sharding:
        dims = tuple(
            Dim(dim.name) if d in fixed else dim for d, dim in enumerate(sharding.layout.dims)
        )
        return Sharding(replace(sharding.layout, dims=dims), free, shape)

    def restored(step: Step) -> Step:
        to = getattr(step, "to", None)
        if not isinstance(to, Layout):
            return step
        to = replace(to, dims=tuple(fixed.get(d, dim) for d, dim in enumerate(to.dims)))
        # Node-local senders are not for blocks that overlap.
        return Exchange(to) if isinstance(step, Exchange) else replace(step, to=to)  # type: ignore[type-var]

    space = Space(here := plain(bare), plain(aim), itemsize(dtype), machine)
    steps = space.steps(Search(space.route, None).path().moves)
    for step in steps:
        here = step.after(here)
        if any(here.layout.dims[d].shards for d in fixed):  # a way through a dim that overlaps
            return (Exchange(aim.layout),)
    return tuple(map(restored, steps))


def _check_lost(source: Sharding, target: Sharding, d: int) -> None:
    """Raise PlanError for rows that only the destination has, or contributions that it would lose."""
    src = dim_end(source, d)
    dst = dim_end(target, d)
    name = src.dim.name
    if src.dim.overlap is not None and not isinstance(src.dim.overlap, Fold):
        # A block keeps what it holds, but what another dim's pole rolls comes from elsewhere.
        parts = [view for view in views(target) if src.dim != dst.dim or view.shifts[d]]
        wanted = (wanted_rows(*dst[:3], view.sides[d], view.shifts[d]) for view in parts)
        row = _first_common(missing_rows(*src[:3]), itertools.chain(*wanted))
        if row is not None:
            reason = f"no block under '{source.layout}' holds row {row} of dim {name!r}, which "
            hint = "a window holds the rows that its outputs read, and no others"
            raise PlanError(f"{reason}'{target.layout}' has", hint=hint)
    if isinstance(dst.dim.overlap, Fold) and src.dim != dst.dim:
        offered = (offered_rows(*src[:3], view.sides[d], view.shifts[d]) for view in views(source))
        row = _first_common(missing_rows(*dst[:3]), itertools.chain(*itertools.chain(*offered)))
        if row is not None:
            reason = f"row {row} of dim {name!r} is in no block under '{target.layout}'"
            raise PlanError(reason, hint="contributions to it would be lost")


def _first_common(rows: Runs, blocks: Iterable[Runs]) -> int | None:
    """The first of some rows, in ascending order, that is also in a block; None if none is."""
    starts = met(pieces((rows,)), pieces(blocks))[2] if rows else ()
    return int(min(starts)) if len(starts) else None
