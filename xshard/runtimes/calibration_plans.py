"""The plans of a calibration: plans of one step to fit a profile to, and others to test it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from xshard.cost.model import Profile
from xshard.errors import MeshError
from xshard.layout import Layout, Mesh
from xshard.notation.parser import Dim, Shard
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.steps import AllGather, AllReduce, AllToAll, Embed, Exchange, Permute, ReduceScatter, Slice, Step

SIZES = tuple(4**i * 1024 for i in range(8))  # bytes of the larger block: 1 KiB .. 16 MiB
HELD_OUT = 20
DTYPE, ITEMSIZE = "float32", 4
_DRAWS = 20  # per held-out plan, before plans of several steps are given up
_ROWS = 16  # per device, of a dim that is cut


def fitted_plans(mesh: Mesh, sizes: Sequence[int] = SIZES) -> tuple[Plan, ...]:
    """Plans of one step each: every kind of step, over each axis and over all axes, in every size.

    sizes: about the bytes of the larger of a device's two blocks. Raises MeshError for a mesh of one device.
    """
    axes = _long_axes(mesh)
    groups = [(a,) for a in axes] + ([axes] if len(axes) > 1 else [])
    plans = [_plan(mesh, step, size) for group in groups for step in _steps(group) for size in sizes]
    turns = [_plan(mesh, step, size) for step in _turns(mesh, axes) for size in sizes]
    # A small copy is all overhead, and the model of a local step has none.
    large = [size for size in sizes if size >= max(sizes) / 16]
    copies = [_plan(mesh, step, size) for group in groups for step in _copies(group) for size in large]
    return (*plans, *turns, *copies)


def held_out_plans(
    mesh: Mesh,
    sizes: Sequence[int] = SIZES,
    count: int = HELD_OUT,
    seed: int = 0,
    profile: str | Path | Profile = "h100",
) -> tuple[Plan, ...]:
    """Random plans that communicate, as the planner makes them.

    Layouts, lengths and sizes are random, between the smallest size and the largest; equal seeds draw equal
    plans. At least every third has several steps, if the mesh has such plans. profile: they are planned for.
    Raises MeshError for a mesh of one device.
    """
    axes, rng = _long_axes(mesh), random.Random(seed)
    plans: list[Plan] = []
    singles = 0
    for draws in itertools.count():
        if len(plans) == count:
            break
        plan = _random_plan(mesh, axes, sizes, rng, profile)
        single = len(plan.steps) == 1
        # One axis may have too few plans of several steps: then any plan counts.
        full = single and singles >= count - count // 3 and draws < _DRAWS * count
        if plan.bytes_received and plan not in plans and not full:
            plans.append(plan)
            singles += single
    return tuple(plans)


def _random_plan(
    mesh: Mesh, axes: Sequence[str], sizes: Sequence[int], rng: random.Random, profile: str | Path | Profile
) -> Plan:
    src, dst = _random_sides(axes, rng)
    size = min(sizes) * (max(sizes) / min(sizes)) ** rng.random()
    elements = size / ITEMSIZE * min(_parts(mesh, src), _parts(mesh, dst))
    rows = [mesh.n_devices * rng.choice((1, 2, 4, 6)) for _ in range(2)]
    columns = mesh.n_devices * max(1, round(elements / (rows[0] * rows[1] * mesh.n_devices)))
    return make_plan((src, dst), mesh, (*rows, columns), DTYPE, profile=profile)


def _long_axes(mesh: Mesh) -> tuple[str, ...]:
    axes = tuple(a for a, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1)
    if not axes:
        raise MeshError(f"nothing to measure on {mesh!r}: it has one device", hint="as in --mesh dp=2,cp=2")
    return axes


def _layout(first: Sequence[str] = (), second: Sequence[str] = (), sums: Sequence[str] = ()) -> Layout:
    """A layout of two dims, each cut by axes, and a sum over others."""
    dims = tuple(Dim(name, tuple(Shard((a,)) for a in cut)) for name, cut in (("n", first), ("d", second)))
    return Layout(dims, (("sum", tuple(sums)),) if sums else ())


def _steps(group: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Every kind of step over a group of axes, with the layouts before and after it."""
    cut = tuple(Shard((a,)) for a in group)
    whole, rows, columns, partial = _layout(), _layout(group), _layout((), group), _layout(sums=group)
    yield rows, whole, AllGather("n", cut)
    yield columns, whole, AllGather("d", cut)
    yield partial, whole, AllReduce(group)
    yield partial, rows, ReduceScatter("n", cut)
    yield partial, columns, ReduceScatter("d", cut)
    yield rows, columns, AllToAll("n", cut, "d", cut)
    yield rows, columns, Exchange(columns)
    yield columns, whole, Exchange(whole)


def _copies(group: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Steps that only copy."""
    cut = tuple(Shard((a,)) for a in group)
    yield _layout(), _layout((), group), Slice((("d", cut),))
    yield _layout((), group), _layout(sums=group), Embed("d", cut)


def _turns(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Permutations of devices: all axes change roles, and pairs of axes of one size."""
    if len(axes) > 1:
        after = _layout(axes[::-1])
        yield _layout(axes), after, Permute(after)
    for a, b in itertools.permutations(axes, 2):
        if mesh.size(a) == mesh.size(b):
            after = _layout((b,))
            yield _layout((a,)), after, Permute(after)


def _plan(mesh: Mesh, sample: tuple[Layout, Layout, Step], size: int) -> Plan:
    """The plan of one step; the larger of a device's two blocks has about `size` bytes."""
    src, dst, step = sample
    least = min(_parts(mesh, src), _parts(mesh, dst))
    elements = size // ITEMSIZE * least
    rows = mesh.n_devices * (_ROWS if elements > _ROWS * mesh.n_devices**2 else 1)
    columns = mesh.n_devices * max(1, elements // (rows * mesh.n_devices))
    return Plan(src, dst, mesh, (rows, columns), DTYPE, (step,))


def _parts(mesh: Mesh, layout: Layout) -> int:
    return mesh.size(*(a for dim in layout.dims for a in dim.axes))


def _random_sides(axes: Sequence[str], rng: random.Random) -> tuple[Layout, Layout]:
    """Two layouts of three dims: every axis cuts a dim, holds replicas or, before the plan, addends."""
    sides = []
    for roles in ("abc-+", "abc-"):
        role = {a: rng.choice(roles) for a in rng.sample(axes, len(axes))}
        cuts = {name: [a for a in role if role[a] == name] for name in "abc"}
        dims = tuple(Dim(name, tuple(Shard((a,)) for a in cut)) for name, cut in cuts.items())
        sums = tuple(a for a in role if role[a] == "+")
        sides.append(Layout(dims, (("sum", sums),) if sums else ()))
    return sides[0], sides[1]
