"""Plans from one mesh to another: what a request for two meshes means.

Decides between one plan on a refined mesh (the same devices under other axes) and a transfer,
and whether devices change places. How transfers are found is the business of `transfer_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xshard import dtypes
from xshard.cost.model import Profile, load_profile
from xshard.errors import MeshError, NotationError
from xshard.layout.layout import Layout, check_axes
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.notation import parser
from xshard.plans.expression import LayoutPair, sides
from xshard.plans.plan import Plan
from xshard.plans.priced import FORWARD
from xshard.plans.transfer_plan import TransferPlan, check_devices, find_refined, find_transfer
from xshard.plans.transfer_table import numbers


def plan_between(
    expression: LayoutPair,
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
    with parser.mark_errors(text):
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


def _check_destination(dst: Layout, mesh: Mesh, text: str | None) -> None:
    """Every axis of the destination exists on its mesh; the mark is right of the arrow."""
    for axis in dst.axes:
        if axis not in mesh.axes:
            marked = str(dst) if text is None else text
            found = [span for name, span in parser.text_spans(marked).axes if name == axis]
            raise NotationError(
                f"unknown mesh axis {axis!r}",
                text=marked,
                span=found[-1],
                hint=f"the destination's mesh has: {mesh.describe()}",
            )
