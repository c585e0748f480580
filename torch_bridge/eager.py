"""A redistribution carried out now: what `redistribute` does outside of compilers.

Decides what goes through autograd, for a tensor and for a DTensor, and what ranks compare before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.dtensor.function import End, Move, RedistributeDTensor, block_of, move_of
from torch_bridge.dtensor.placements import check_placed, layout_of_gradient, positional, to_placements
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_device, process_mesh
from torch_bridge.planning import executable_for, given, plan_of
from torch_bridge.replicas import checked, checked_dtensor
from xshard import MeshError, Plan, PlanError, Profile, ShapeError, dtypes
from xshard.plans.expression import Expression, sides
from xshard.replicas import are_checked


def redistribute_eagerly(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: CommDtypeLike = None,
    async_op: bool = False,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor | PendingTensor:
    """`redistribute` outside of compilers; arguments, result and errors are documented there."""
    if debug or desync.ALWAYS:
        _compare(x, expression, mesh, shape, profile, comm_dtype)
    if isinstance(x, DTensor):
        if async_op:
            raise PlanError("async_op is for tensors", hint="a DTensor waits for its local block at once")
        move = _move(x, expression, mesh, shape, profile, comm_dtype)
        run = functools.partial(RedistributeDTensor.apply, x, move)
        return checked_dtensor(x, run, sides(expression)[2]) if are_checked(check_replicated) else run()
    executable = executable_for(x, expression, mesh, shape, profile, comm_dtype)
    if are_checked(check_replicated):
        y = checked(x, executable, process_mesh(given(mesh)), sides(expression)[2])
    elif async_op and executable.is_linear:
        return PendingTensor.begin(x, executable)
    else:
        y = apply(executable, x)
    return PendingTensor(y, y.shape, y) if async_op else y


def _move(
    x: DTensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
) -> Move:
    """What a DTensor goes through, which is placed as the expression says."""
    src, dst, text = sides(expression)
    if mesh is not None and mesh != x.device_mesh:
        raise MeshError(f"the DTensor is on {x.device_mesh!r}, not on {mesh!r}", hint="leave the mesh out")
    if shape is not None and tuple(shape) != tuple(x.shape):
        raise ShapeError(f"the DTensor has shape {tuple(x.shape)}, not {tuple(shape)}")
    check_placed(x, src, text)
    start, stop = (positional(side, x.ndim) for side in (src, dst))
    target = End(x.device_mesh, to_placements(stop, x.device_mesh, x.shape), stop)
    gradient = to_placements(layout_of_gradient(start), x.device_mesh, x.shape)
    wire = comm_dtype_of(comm_dtype, x.dtype)
    return move_of(
        x,
        End(x.device_mesh, x.placements, start),
        target,
        profile,
        op_dtype=wire.forward,
        backward_dtype=wire.backward,
        gradient=gradient,
    )


def _compare(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
) -> None:
    """Raise on all ranks of the mesh unless all of them can do this and are about to."""
    where = x.device_mesh if isinstance(x, DTensor) else mesh

    def facts() -> CallFacts:
        whole = None if shape is None else tuple(shape)
        block, whole = (block_of(x), tuple(x.shape)) if isinstance(x, DTensor) else (x, whole)
        if isinstance(x, DTensor):
            _move(x, expression, mesh, shape, profile, comm_dtype)
        processes, wire = process_mesh(given(where)), comm_dtype_of(comm_dtype, block.dtype)
        check_device(block.device)
        plan, part = plan_of(expression, processes, tuple(block.shape), wire.forward, whole, profile)
        return CallFacts(
            everywhere={"expression": sides(expression)[2], "mesh": repr(processes.mesh)},
            within={
                "shape": str(plan.shape),
                "dtype": dtypes.name_of(block.dtype),
                "comm_dtype": f"{wire.forward}, {wire.backward}",
                "device": block.device.type,
                "requires_grad": str(x.requires_grad and torch.is_grad_enabled()),
                "plan": "; ".join(map(str, plan.steps)),
            },
            part=part.ranks,
            own={"block": str(tuple(block.shape)), "of": str(plan.shape)},
        )

    ranks = callers(where) if dist.is_initialized() else ()
    if ranks and dist.get_rank() in ranks:  # else nobody waits for this rank, whose error follows
        compare_ranks(ranks, sides(expression)[2] if isinstance(expression, Plan) else str(expression), facts)
