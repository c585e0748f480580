"""The planner: the cheapest path of steps between two layouts.

Decides what a request means: which pairs of layouts have plans, where copies and scales go.
The path is found by `search`. Sees names and shapes, never data; the same input gives the same
plan in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from xshard import dtypes, overlapped
from xshard.aligned import best_aligned
from xshard.cost import Profile, load_profile
from xshard.errors import MeshError, NotationError, PlanError, ShapeError
from xshard.fine import FineMesh, Split
from xshard.layout import Layout, check_axes, parse_expression
from xshard.mesh import Mesh
from xshard.notation import marked
from xshard.objective import FORWARD
from xshard.overlapped import overlaps
from xshard.plan import Plan
from xshard.search import Search
from xshard.sharding import Sharding
from xshard.space import Space
from xshard.steps import AllGather, AllReduce, Embed, Exchange, Mask, Permute, Retag, Scale, Slice, Step
from xshard.steps.base import axes_of, with_tag, without_tags

if TYPE_CHECKING:
    from xshard.transfer_plan import TransferPlan  # made of plans, so it is one level up


Expression = str | tuple[Layout | str, Layout | str]


@overload
def plan(
    expression: Expression,
    mesh: Mesh,
    shape: Sequence[int],
    dtype: object = "float32",
    *,
    profile: str | Path | Profile = "h100",
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> Plan: ...


@overload
def plan(
    expression: Expression,
    *,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    shape: Sequence[int],
    dtype: object = "float32",
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    relabel: bool = False,
    profile: str | Path | Profile = "h100",
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> Plan | TransferPlan: ...


def plan(
    expression: Expression,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: object = "float32",
    *,
    src_mesh: Mesh | None = None,
    dst_mesh: Mesh | None = None,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    relabel: bool = False,
    profile: str | Path | Profile = "h100",
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> Plan | TransferPlan:
    """`"layout -> layout"` for an array of global `shape` -> the cheapest plan.

    dtype: a name or a dtype of numpy, torch or JAX. profile: the machine it is priced for.
    memory_limit: bytes that no device may exceed at any moment.
    objective: "forward" plans the move; its gradient is planned on its own when it is asked for.
    "forward+backward" plans both now: `cost` is the seconds of both, both obey the limit, and what they share
    (how devices are relabelled) is decided by the sum.

    src_mesh, dst_mesh, instead of `mesh`: the left layout is on the one, the right on the other.
    src_devices, dst_devices: the number of every device, in the order of its mesh; 0, 1, 2, ... by
    default, so that two meshes share the devices of the smaller. relabel: over one set of devices,
    these may change places in the destination's mesh, so that less moves; the plan's
    `dst_devices` says how.
    Over the same devices in the same order the result is a `Plan` on the coarsest mesh that refines
    both, whose axes it prints; where there is none, and over other devices, it is a `TransferPlan`.

    Raises MeshError, NotationError, ShapeError, DtypeError; PlanError where no plan fits the limit;
    LinearityError for the gradient of a max or min, which is no plan.

    >>> p = plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8))
    >>> [str(step) for step in p.steps], p.bytes_received == p.bytes_lower_bound
    (['all_to_all s/cp -> c/cp'], True)
    >>> both = plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8), objective="forward+backward")
    >>> both.cost == p.cost + p.backward.cost
    True
    >>> str(plan("n/dp -> n/tp", src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), shape=(8,)).transfer)
    'transfer, 3 messages'
    """
    if mesh is None or relabel or (src_mesh, dst_mesh, src_devices, dst_devices) != (None,) * 4:
        from xshard.between import plan_between  # made of plans on one mesh, so it is one level up

        return plan_between(
            expression,
            *_two_meshes(mesh, src_mesh, dst_mesh),
            _lengths(shape),
            dtype,
            src_devices=src_devices,
            dst_devices=dst_devices,
            relabel=relabel,
            profile=profile,
            memory_limit=memory_limit,
            objective=objective,
        )
    lengths = _lengths(shape)
    return _plan(
        *(expression, mesh, lengths, tuple(map(type, lengths)), dtype, profile, memory_limit, objective)
    )


@lru_cache(maxsize=4096)
def _plan(
    expression: Expression,
    mesh: Mesh,
    shape: tuple[int, ...],
    _: tuple[type, ...],  # tells 4 from 4.0, which are equal keys
    dtype: object,
    profile: str | Path | Profile,
    memory_limit: int | None,
    objective: str,
) -> Plan:
    src, dst, text = sides(expression)
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    with marked(text):
        for layout in (src, dst):
            Sharding(layout, mesh, shape)  # a wrong shape is found before the cache of plans is asked
    found = find_plan(
        src, dst, mesh, shape, dtypes.name_of(dtype), load_profile(profile), memory_limit=memory_limit
    )
    return found if objective == FORWARD else replace(found, objective=objective)


def sides(expression: Expression) -> tuple[Layout, Layout, str | None]:
    """Both layouts of an expression over the same dim names, and its text where it is one."""
    if isinstance(expression, str):
        return *parse_expression(expression), expression
    src, dst = (Layout.parse(side) if isinstance(side, str) else side for side in expression)
    if src.names != dst.names:
        raise NotationError(f"dim names differ: '{src}' and '{dst}'", hint="same names, same order")
    return src, dst, None


def _two_meshes(mesh: Mesh | None, src_mesh: Mesh | None, dst_mesh: Mesh | None) -> tuple[Mesh, Mesh]:
    if mesh is not None and src_mesh is None and dst_mesh is None:
        raise MeshError(
            "src_devices, dst_devices and relabel are for two meshes",
            hint="pass src_mesh= and dst_mesh=, which may be equal, instead of the mesh",
        )
    if mesh is not None:
        raise MeshError("one mesh and two", hint="pass the mesh, or src_mesh= and dst_mesh=")
    if src_mesh is None or dst_mesh is None:
        missing = [n for n, m in (("src_mesh", src_mesh), ("dst_mesh", dst_mesh)) if m is None]
        raise MeshError(f"no {' and no '.join(missing)}", hint="pass a mesh, or src_mesh= and dst_mesh=")
    return src_mesh, dst_mesh


def _lengths(shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        raise ShapeError("no shape", hint="shape= is the global shape of the array, as in shape=(8, 4)")
    return tuple(shape)


@lru_cache(maxsize=4096)
def find_plan(
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest plan between two layouts, by value. `scale`: the constant it multiplies by, where
    that is not read off the layouts (a backward plan)."""
    source, target = Sharding(src, mesh, shape), Sharding(dst, mesh, shape)
    check_moves(source, target, dtype)
    factor = source.scale / target.scale if scale is None else scale
    start, goal = (s.with_layout(s.normal) for s in (source, target))
    ends = without_copies(start), without_copies(goal)
    split: Split = ()
    if overlaps(start) or overlaps(goal):
        path = overlapped.best_path(*ends, dtype, profile, memory_limit)
    else:
        scaled = 2 * min(start.max_local_size, goal.max_local_size) if factor != 1 else 0
        path, split = _best_path(Space(*ends, dtype, profile), memory_limit, scaled)
    if split:
        fine = FineMesh(mesh, split)
        start, goal = (s.with_layout(s.normal) for s in map(fine.divided, (source, target)))
    steps = with_scale(with_copies(path, start, goal), factor, start, goal)
    given = source.layout, target.layout, mesh, shape
    return Plan(*given, dtype, steps, factor, profile, memory_limit, split=split)


def _best_path(space: Space, memory_limit: int | None, scaled: int) -> tuple[tuple[Step, ...], Split]:
    """The steps of the cheapest path, and the axes that it divides."""
    search = Search(space, memory_limit, scaled=scaled)
    path = search.path()
    finer = best_aligned(space, path, memory_limit)
    return (search.steps(path), ()) if finer is None else (finer.steps(), finer.split)


def check_moves(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise for pairs of layouts between which no redistribution is defined."""
    src, dst = source.layout, target.layout
    overlapped.check_overlaps(source, target, dtype)
    for kind, axes in src.tags:
        if kind != "copy" and not set(axes) <= set(dst.tagged(kind)):
            dtypes.check_reduction(dtype, kind)
    for kind in ("max", "min"):
        new = [a for a in dst.tagged(kind) if a not in src.tagged(kind)]
        if new:
            raise PlanError(
                f"'{dst}' holds a {kind} over {', '.join(new)} that '{src}' does not",
                hint=f"a {kind} can be kept or reduced, not begun: write copy({','.join(new)})",
            )
    if not src.is_linear and dst.tagged("sum", "mean"):
        raise PlanError(
            f"between '{src}' and '{dst}' a max ends and a sum begins", hint="reduce first, then redistribute"
        )


def with_scale(
    steps: tuple[Step, ...], factor: Fraction, start: Sharding, goal: Sharding
) -> tuple[Step, ...]:
    """The steps with a constant multiplied in where blocks are smaller: before they grow or after."""
    if factor == 1:
        return steps
    # What a boundary fills in comes after: it is a value of the result.
    first = overlaps(goal) or start.max_local_size <= goal.max_local_size
    return (Scale(factor), *steps) if first else (*steps, Scale(factor))


def without_copies(sharding: Sharding) -> Sharding:
    """The sharding with copies read as replicas: what a search works on."""
    return sharding.with_layout(without_tags(sharding.layout, sharding.layout.tagged("copy")))


def with_copies(steps: Sequence[Step], start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """The steps with copies told from replicas, which the search does not distinguish.

    An axis whose values become whole for the last time holds copies if the goal says so; what
    no step settles is retagged at the end, where no data moves.
    """
    wanted = goal.layout.tagged("copy")
    if not wanted and not start.layout.tagged("copy"):
        return tuple(steps)
    here, result = start, []
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
    retag = Retag(
        copies=tuple(a for a in wanted if a not in have), replicas=tuple(a for a in have if a not in wanted)
    )
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
