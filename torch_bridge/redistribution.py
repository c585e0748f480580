"""`redistribute`: what users call.

Decides how a tensor and an expression become a plan, and what is refused before anything is
sent. First comes what all processes see alike (expression, mesh, dtype, `shape=`), so that all
of them raise or none; then the local block, whose shape only its own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.autograd import apply
from torch_bridge.dtensor import as_dtensor, local_of, to_placements
from torch_bridge.executable import Executable
from torch_bridge.groups import MeshLike, ProcessMesh, process_mesh
from torch_bridge.lower import lower
from torch_bridge.pending import PendingTensor
from torch_bridge.wire import Wire, WireLike, wire_of
from xshard import (
    DtypeError,
    MeshError,
    Plan,
    PlanError,
    Profile,
    ShapeError,
    dtypes,
    load_profile,
    notation,
    planner,
)
from xshard.layout import check_axes
from xshard.spelling import Expression, sides, whole_shape


@overload
def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: WireLike = None,
    async_op: Literal[False] = False,
) -> Tensor: ...


@overload
def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: WireLike = None,
    async_op: bool,
) -> Tensor | PendingTensor: ...


def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: WireLike = None,
    async_op: bool = False,
) -> Tensor | PendingTensor:
    """This process's block under the left layout -> its block under the right one, differentiable.

    All processes of the mesh call it, with equal arguments but for the values of `x`, and with
    equal `requires_grad`. The result is a new tensor; `x` is left as it is.

    expression: `"layout -> layout"`, a pair of layouts, or a plan (whose dtype `x` must have). Axes
    that the layouts do not name are left alone: blocks may differ along them. A plan is
    carried out as it is.
    mesh: a `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; a DTensor brings its own.
    shape: the global shape, where blocks differ in size. Without it every block is taken to be
    as large as `x`: where that is not so, processes plan differently and nobody can tell in time.
    profile: the machine it is planned for.
    comm_dtype: the dtype in which blocks travel and are added, forward and backward, or a pair of
    them, where None is that of `x`: a narrower one compresses, a wider one adds exactly.
    async_op: return at once, with a `PendingTensor` that any use waits for. All processes wait for
    theirs in the same order.
    A DTensor must be placed as the left layout says, and the result is a DTensor.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, LinearityError
    (a gradient that is not defined), on all processes; ShapeError for a block that does not fit,
    on its own process: if that is not all of them, the others wait for the group's timeout.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     x = torch.full((1, 4), dist.get_rank())
    ...     return xt.redistribute(x, "s/cp c -> s c/cp", Mesh(cp=2))
    >>> [y.tolist() for y in xt.run_ranks(2, turn)]
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    if torch.compiler.is_dynamo_compiling():
        from torch_bridge import compiled  # which takes half a second to import

        return compiled.redistribute(x, expression, mesh, shape, profile, comm_dtype, async_op)
    if isinstance(x, DTensor):
        if async_op:
            raise PlanError("async_op is for tensors", hint="a DTensor waits for its local block at once")
        return _redistribute_dtensor(x, expression, mesh, shape, profile, comm_dtype)
    if torch.compiler.is_compiling():  # torch.export, which runs this with symbols for lengths
        from torch_bridge import compiled

        executable = compiled.traced_executable(x, expression, mesh, shape, profile, comm_dtype)
    else:
        executable = executable_for(x, expression, mesh, shape, profile, comm_dtype)
    if async_op and executable.is_linear:
        return PendingTensor.begin(x, executable)
    y = apply(executable, x)
    return PendingTensor(y, y.shape, y) if async_op else y


def executable_for(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: WireLike = None,
) -> Executable:
    """What `redistribute` carries out for a block, and its gradient planned where it has one."""
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint="redistribute(x, expression, mesh)")
    global_shape = None if shape is None else tuple(shape)
    executable = executable_of(
        expression,
        process_mesh(mesh),
        tuple(x.shape),
        x.dtype,
        x.device,
        global_shape,
        profile,
        None if comm_dtype is None else wire_of(comm_dtype, x.dtype),
    )
    if x.requires_grad and torch.is_grad_enabled():
        executable.plan_gradient()  # refused now if at all, and its groups made while all are here
    return executable


def _redistribute_dtensor(
    x: DTensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: WireLike,
) -> DTensor:
    src, dst, text = sides(expression)
    if mesh is not None and mesh != x.device_mesh:
        raise MeshError(f"the DTensor is on {x.device_mesh!r}, not on {mesh!r}", hint="leave the mesh out")
    if shape is not None and tuple(shape) != tuple(x.shape):
        raise ShapeError(f"the DTensor has shape {tuple(x.shape)}, not {tuple(shape)}")
    to_placements(dst, x.device_mesh, x.shape)  # refused here, before anything is sent
    local = local_of(x, src, text)
    y = redistribute(
        local, expression, x.device_mesh, shape=tuple(x.shape), profile=profile, comm_dtype=comm_dtype
    )
    return as_dtensor(y, dst, x.device_mesh, tuple(x.shape))


@lru_cache(maxsize=4096)
def executable_of(
    expression: Expression,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...] | None,
    profile: str | Path | Profile = "h100",
    wire: Wire | None = None,
) -> Executable:
    """What `redistribute` carries out for such a block; raises what it raises."""
    wire = wire or Wire(dtype, dtype)
    plan, processes = plan_of(expression, processes, local_shape, wire.forward, shape, profile)
    return lower(plan, processes, device).casting(dtype, wire.backward)


def plan_of(
    expression: Expression,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    profile: str | Path | Profile,
) -> tuple[Plan, ProcessMesh]:
    """The plan for such a block, and the processes that take part; raises what `redistribute` raises."""
    src, dst, text = sides(expression)
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
        # Devices of a part of the mesh have other numbers; what connects them stays the same.
        machine = load_profile(profile)
        links = tuple((axis, machine.link(axis, processes.mesh)) for axis in named)
        profile = replace(machine, axes=links)
        processes = processes.along(named)
        whole = whole_shape(src, processes.mesh, local_shape, text) if shape is None else shape
        plan = planner.plan(expression, processes.mesh, whole, name, profile=profile)
    _check_block(plan, processes, local_shape, text, inferred=shape is None)
    return plan, processes


def _check_block(
    plan: Plan, processes: ProcessMesh, local_shape: tuple[int, ...], text: str, *, inferred: bool
) -> None:
    device, source = processes.device, plan.source
    expected = source.local_shape(device)
    if local_shape == expected:
        return
    names = source.layout.names
    wrong = [n for n, have, want in zip(names, local_shape, expected, strict=False) if have != want]
    where = dict(reversed(notation.spans(text).dims))  # the left side's, which come first
    raise ShapeError(
        f"the block of rank {processes.ranks[device]} has shape {local_shape}, not {expected}",
        text=text,
        span=where.get(wrong[0], where.get(notation.ELLIPSIS)) if wrong else None,
        hint=f"under '{source.layout}' that is the part of device {device} of {source.mesh!r} "
        f"of a {source.shape} array"
        + ("; where blocks differ in size, pass shape= (the global shape)" if inferred else ""),
    )
