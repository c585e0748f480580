"""An expression and a block -> the plan, and the executable of this process.

Decides what is checked about a block, over which part of a mesh a plan is made, and what is asked for
between two meshes. Sends nothing, though it makes groups. It checks first the values that all processes have
in common (expression, mesh, dtype, `shape=`), so that all of them raise or none; then the local block, whose
shape only its own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of
from torch_bridge.lower.executable import Executable, check_dense
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    ProcessMesh,
    World,
    callers,
    check_device,
    check_world,
    mesh_of,
    process_mesh,
    world,
)
from xshard import Mesh, Plan, Profile, dtypes, load_profile, planner
from xshard.arguments import lengths_of
from xshard.cost.device_links import located
from xshard.cost.machine import asked_for
from xshard.errors import DtypeError, MeshError, ShapeError
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Expression, as_expression, check_block, sides


def require_mesh(mesh: MeshLike | None, hint: str = "redistribute(x, expression, mesh)") -> MeshLike:
    """The mesh. Raises MeshError for None, and for what is no mesh."""
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint=hint)
    if not isinstance(mesh, MeshLike):
        mesh_of(mesh)  # raises
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
    check_dense(x)
    request = (
        as_expression(expression),
        require_mesh(mesh),
        x.shape,
        x.dtype,
        x.device,
        None if shape is None else lengths_of(shape),
        asked_for(profile),
        None if comm_dtype is None else comm_dtype_of(comm_dtype, x.dtype),
        world(),
    )
    if isinstance(x, FakeTensor):
        with x.fake_mode:  # the tensors that an executable keeps are fake too: it is not cached
            return _with_gradient(executable_of.__wrapped__(*request), x)
    return _with_gradient(executable_of(*request), x)


def _with_gradient(executable: Executable, x: Tensor) -> Executable:
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
    profile: str | Path | Profile = "auto",
    comm_dtype: CommDtype | None = None,
    world: World | None = None,
) -> Executable:
    """The executable of `redistribute` for such a block. Raises as `redistribute` does.

    world: a part of the cache's key, since an `xshard.Mesh` has other processes in another world.
    """
    processes = process_mesh(require_mesh(mesh))
    check_device(device)
    travels = comm_dtype or CommDtype(dtype, dtype)
    block = tuple(local_shape), travels.forward, device
    plan, processes = plan_of(expression, processes, *block, shape, profile)
    return lower(plan, processes, device).casting(dtype, travels.backward)


def plan_of(
    expression: Expression,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
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
        profile = links_along(machine(profile, device), named, processes)
        processes = processes.along(named)
        whole = global_shape(src, processes.mesh, local_shape, text) if shape is None else shape
        plan = planner.plan(ends, processes.mesh, whole, name, profile=profile)
    at, source = processes.device, plan.source
    check_block(
        f"the block of rank {processes.ranks[at]}",
        local_shape,
        source.local_shape(at),
        source.layout.names,
        text,
        f"under '{source.layout}' that is the part of device {at} of {source.mesh!r} "
        f"of a {source.shape} array",
        inferred=shape is None,
    )
    return plan, processes


def links_along(profile: str | Path | Profile, axes: Sequence[str], processes: ProcessMesh) -> Profile:
    """The profile for some axes of a mesh, whose nodes are runs of ranks, wherever those are in the mesh."""
    found = located(load_profile(profile), processes.mesh, processes.ranks)
    return found.along(axes, processes.mesh)


def plan_between(
    expression: Expression,
    src_mesh: MeshLike | None,
    dst_mesh: MeshLike | None,
    shape: Sequence[int] | None,
    dtype: str | None,
    relabel: bool,
    profile: str | Path | Profile,
) -> Plan:
    """The plan that is asked for; its devices are ranks."""
    if isinstance(expression, Plan):
        ranks = expression.src_devices if src_mesh is None else ranks_of(src_mesh)
        if expression.transfer or ranks == expression.src_devices:
            return expression
        return replace(expression, devices=ranks)
    if src_mesh is None or dst_mesh is None:
        raise MeshError(
            "two meshes are needed", hint="redistribute_between(x, expression, src_mesh, dst_mesh)"
        )
    if shape is None or dtype is None:
        missing = "shape" if shape is None else "dtype"
        raise ShapeError(
            f"no {missing}",
            hint="shape= and dtype= of the global array: processes without a block know neither",
        )
    return planner.plan(
        expression,
        src_mesh=mesh_of(src_mesh),
        dst_mesh=mesh_of(dst_mesh),
        shape=shape,
        dtype=dtype,
        src_devices=ranks_of(src_mesh),
        dst_devices=ranks_of(dst_mesh),
        relabel=relabel,
        profile=machine(profile),
    )


def ranks_of(mesh: MeshLike) -> tuple[int, ...]:
    """The global rank of every device of a mesh, in its order."""
    return tuple(range(mesh.n_devices)) if isinstance(mesh, Mesh) else callers(mesh)
