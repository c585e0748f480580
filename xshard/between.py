"""Plans from one mesh to another: what a request for two meshes means.

Decides between one plan on a refined mesh (the same devices under other axes) and a transfer,
and whether devices change places. How transfers are found is the business of `transfer_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from xshard import dtypes, notation
from xshard.cost import Profile, load_profile
from xshard.errors import MeshError, NotationError, PlanError
from xshard.layout import Layout, check_axes
from xshard.links import located
from xshard.mesh import Mesh
from xshard.objective import FORWARD
from xshard.plan import Plan
from xshard.planner import Expression, find_plan, sides
from xshard.refine import refine
from xshard.sharding import Sharding
from xshard.transfer_plan import TransferPlan, check_devices
from xshard.transfer_search import Transfers
from xshard.transfer_table import numbers
from xshard.units import format_bytes


def plan_between(
    expression: Expression,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    shape: tuple[int, ...],
    dtype: object = "float32",
    *,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    relabel: bool = False,
    profile: str | Path | Profile = "h100",
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> Plan | TransferPlan:
    """`xshard.plan` for two meshes."""
    src, dst, text = sides(expression)
    check_axes(src, src_mesh, text)
    _check_destination(dst, dst_mesh, text)
    givers, takers = (
        tuple(range(mesh.n_devices)) if devices is None else tuple(devices)
        for mesh, devices in ((src_mesh, src_devices), (dst_mesh, dst_devices))
    )
    check_devices("source", src_mesh, givers)
    check_devices("destination", dst_mesh, takers)
    if relabel and sorted(givers) != sorted(takers):
        raise MeshError(
            "relabel=True is for two meshes over the same devices",
            hint=f"the source has {numbers(givers)}, the destination {numbers(takers)}",
        )
    with notation.marked(text):
        for layout, mesh in ((src, src_mesh), (dst, dst_mesh)):
            Sharding(layout, mesh, shape)  # a wrong shape is found before the cache of plans is asked
    name, machine = dtypes.name_of(dtype), load_profile(profile)
    if givers == takers and not relabel:
        ends = src, dst, src_mesh, dst_mesh, givers
        found = find_refined(*ends, shape, name, machine, memory_limit=memory_limit)
        if found is not None:
            return found if objective == FORWARD else replace(found, objective=objective)
    return find_transfer(
        *(src, dst, src_mesh, dst_mesh, givers, takers, shape, name, machine),
        relabel=relabel,
        memory_limit=memory_limit,
        objective=objective,
    )


def find_refined(
    src: Layout,
    dst: Layout,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    devices: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    memory_limit: int | None = None,
) -> Plan | None:
    """The cheapest plan on the common refinement of two meshes over the same devices, if there is one."""
    common = refine(src_mesh, dst_mesh)
    if common is None:
        return None
    if scale is None:
        scale = Sharding(src, src_mesh, shape).scale / Sharding(dst, dst_mesh, shape).scale
    return find_plan(
        common.source(src),
        common.target(dst),
        common.mesh,
        shape,
        dtype,
        located(common.profile(profile), common.mesh, devices),
        scale=scale,
        memory_limit=memory_limit,
    )


@lru_cache(maxsize=1024)
def find_transfer(
    src: Layout,
    dst: Layout,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    src_devices: tuple[int, ...],
    dst_devices: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    relabel: bool = False,
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> TransferPlan:
    """The cheapest plan between two meshes, by value; the options are those of `xshard.plan`.

    scale: the constant it multiplies by, where that is not read off the layouts (a backward plan).
    """
    source, target = Sharding(src, src_mesh, shape), Sharding(dst, dst_mesh, shape)
    factor = source.scale / target.scale if scale is None else scale
    transfers = Transfers(source, target, src_devices, dst_devices, dtype, profile, factor, memory_limit)
    refined = None
    if src_devices == dst_devices:
        ends = src, dst, src_mesh, dst_mesh, src_devices
        refined = find_refined(*ends, shape, dtype, profile, scale=factor, memory_limit=memory_limit)
    plain = transfers.made(refined, None) if refined else transfers.cheapest()
    if plain is None:
        least = transfers.least_peak_bytes()
        raise PlanError(
            f"no plan stays within {format_bytes(memory_limit or 0)} per device",
            hint=f"the least of those weighed is {format_bytes(least)} ({least} bytes)",
        )
    if objective != FORWARD:
        plain = replace(plain, objective=objective)
    if not relabel or plain.bytes_received == 0 or dst.tagged("max", "min"):
        return plain
    moved = transfers.cheapest(relabel=True)
    if moved and objective != FORWARD:
        moved = replace(moved, objective=objective)
    better = moved and moved.cost < plain.cost and moved.bytes_received <= plain.bytes_received
    return moved if moved and better else plain


def _check_destination(dst: Layout, mesh: Mesh, text: str | None) -> None:
    """Every axis of the destination exists on its mesh; the mark is right of the arrow."""
    for axis in dst.axes:
        if axis not in mesh.axes:
            marked = str(dst) if text is None else text
            found = [span for name, span in notation.spans(marked).axes if name == axis]
            raise NotationError(
                f"unknown mesh axis {axis!r}",
                text=marked,
                span=found[-1],
                hint=f"the destination's mesh has: {mesh.describe()}",
            )
