"""An expression and a block -> the plan, and the executable of this process.

Decides what is checked about a block, and over which part of a mesh a plan is made. Sends nothing, though it
makes groups. It checks first the values that all processes have in common (expression, mesh, dtype,
`shape=`), so that all of them raise or none; then the local block, whose shape only its own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, check_device, check_world, process_mesh
from xshard import DtypeError, MeshError, Plan, Profile, ShapeError, dtypes, load_profile, planner
from xshard.layout.layout import check_axes
from xshard.plans.expression import Expression, check_block, sides, whole_shape


def require_mesh(mesh: MeshLike | None) -> MeshLike:
    """The mesh. Raises MeshError for None."""
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint="redistribute(x, expression, mesh)")
    return mesh


def executable_for(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike = None,
) -> Executable:
    """The executable of `redistribute` for a block, with its gradient planned where the block has one."""
    check_world()
    executable = executable_of(
        expression,
        mesh,
        x.shape,
        x.dtype,
        x.device,
        None if shape is None else tuple(shape),
        profile,
        None if comm_dtype is None else comm_dtype_of(comm_dtype, x.dtype),
        dist.group.WORLD,
    )
    if x.requires_grad and torch.is_grad_enabled():
        executable.plan_gradient()  # errors come early, and all processes are here to make its groups
    return executable


@lru_cache(maxsize=4096)
def executable_of(
    expression: Expression,
    mesh: MeshLike | None,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...] | None,
    profile: str | Path | Profile = "h100",
    comm_dtype: CommDtype | None = None,
    world: dist.ProcessGroup | None = None,
) -> Executable:
    """The executable of `redistribute` for such a block. Raises as `redistribute` does.

    world: a part of the cache's key, since an `xshard.Mesh` has other processes in another world.
    """
    processes = process_mesh(require_mesh(mesh))
    check_device(device)
    travels = comm_dtype or CommDtype(dtype, dtype)
    plan, processes = plan_of(expression, processes, tuple(local_shape), travels.forward, shape, profile)
    return lower(plan, processes, device).casting(dtype, travels.backward)


def plan_of(
    expression: Expression,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    profile: str | Path | Profile,
) -> tuple[Plan, ProcessMesh]:
    """The plan for such a block, and the processes that run it. Raises ShapeError unless the block fits."""
    src, dst, text = ends = sides(expression)
    name = dtypes.name_of(dtype)
    for layout in (src, dst):
        check_axes(layout, processes.mesh, text)
    if isinstance(expression, Plan):
        plan = expression
        if plan.mesh != processes.mesh:
            raise MeshError(f"the plan is for {plan.mesh!r}, this is {processes.mesh!r}")
        if plan.dtype != name:
            raise DtypeError(f"the plan is for {plan.dtype}, the block has {name}")
        if shape not in (None, plan.shape):
            raise ShapeError(f"the plan is for a {plan.shape} array, not {shape}")
    else:
        named = tuple(dict.fromkeys((*src.axes, *dst.axes)))
        # Devices have other numbers in a part of the mesh, but the same links.
        profile = load_profile(profile).along(named, processes.mesh)
        processes = processes.along(named)
        whole = whole_shape(src, processes.mesh, local_shape, text) if shape is None else shape
        plan = planner.plan(ends, processes.mesh, whole, name, profile=profile)
    device, source = processes.device, plan.source
    check_block(
        f"the block of rank {processes.ranks[device]}",
        local_shape,
        source.local_shape(device),
        source.layout.names,
        text,
        f"under '{source.layout}' that is the part of device {device} of {source.mesh!r} "
        f"of a {source.shape} array",
        inferred=shape is None,
    )
    return plan, processes
