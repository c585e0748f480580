"""The planner: the cheapest path of steps between two layouts.

Decides what a request means: which pairs of layouts have plans, where copies and scales go.
The path is found by `search`. Sees names and shapes, never data; the same input gives the same
plan in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from xshard import dtypes
from xshard.cost.model import Profile, load_profile
from xshard.errors import MeshError, ShapeError
from xshard.layout.layout import check_axes
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.notation.parser import mark_errors
from xshard.plans.expression import LayoutPair, sides
from xshard.plans.plan import Plan, find_plan
from xshard.plans.priced import FORWARD
from xshard.plans.two_meshes import plan_between

if TYPE_CHECKING:
    from xshard.plans.transfer_plan import TransferPlan  # made of plans, so it is one level up


@overload
def plan(
    expression: LayoutPair,
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
    expression: LayoutPair,
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
    expression: LayoutPair,
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
    expression: LayoutPair,
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
    with mark_errors(text):
        for layout in (src, dst):
            Sharding(layout, mesh, shape)  # a wrong shape is found before the cache of plans is asked
    found = find_plan(
        src, dst, mesh, shape, dtypes.name_of(dtype), load_profile(profile), memory_limit=memory_limit
    )
    return found if objective == FORWARD else replace(found, objective=objective)


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
