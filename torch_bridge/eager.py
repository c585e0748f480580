"""A redistribution run now, outside of compilers.

Decides which parts go through autograd, for a tensor and for a DTensor, and what ranks compare before they
begin. Arguments, results and errors are documented at `torch_bridge.redistribute`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.autodiff.recomputed import check_not_swapped
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.dtensor.function import DTensorMove, End, RedistributeDTensor, local_block, move_of
from torch_bridge.dtensor.placements import (
    check_placed,
    layout_of_gradient,
    positional,
    to_placements,
    whole_of,
)
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_device, process_mesh
from torch_bridge.planning import executable_for, plan_of, require_mesh
from torch_bridge.replicas import checked, checked_dtensor
from xshard import Plan, Profile, dtypes
from xshard.arguments import lengths_of
from xshard.errors import PlanError
from xshard.plans.expression import Expression, Sides, sides
from xshard.replicas import are_checked


def redistribute_eagerly(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
    async_op: bool,
    debug: bool,
    check_replicated: bool | None,
    name: str = "",
) -> Tensor | PendingTensor:
    """`redistribute` outside of compilers. name: of the tensor, in errors about its replicas."""
    check_not_swapped()
    x = as_tensor(x)
    if debug or desync.ALWAYS:
        compare_calls(x, expression, mesh, shape, profile, comm_dtype)
    compares = are_checked(check_replicated) and not x.is_meta
    if isinstance(x, DTensor):
        if async_op:
            raise PlanError("async_op is for tensors", hint="a DTensor waits for its local block at once")
        ends = sides(expression)
        move = dtensor_move(x, ends, mesh, shape, profile, comm_dtype)
        run = functools.partial(RedistributeDTensor.apply, x, move)
        return permuted(checked_dtensor(x, run, ends.text, name) if compares else run(), ends)
    executable = executable_for(x, expression, mesh, shape, profile, comm_dtype)
    if compares:
        y = checked(x, executable, process_mesh(require_mesh(mesh)), sides(expression).text, name)
    elif async_op and executable.is_linear:
        return PendingTensor.begin(x, executable)
    else:
        y = apply(executable, x)
    return PendingTensor(y, y.shape, y) if async_op else y


def dtensor_move(
    x: DTensor,
    ends: Sides,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
) -> DTensorMove:
    """The move of a DTensor that is placed as the left side says, its dims in their order there."""
    whole_of(x, mesh, shape)
    check_placed(x, ends.src, ends.text)
    src, dst = (positional(side, x.ndim) for side in (ends.src, ends.dst.in_order(ends.src.names)))
    travels = comm_dtype_of(comm_dtype, x.dtype)
    return move_of(
        x,
        End(x.device_mesh, x.placements, src),
        End(x.device_mesh, to_placements(dst, x.device_mesh, x.shape), dst),
        profile,
        op_dtype=travels.forward,
        backward_dtype=travels.backward,
        gradient=to_placements(layout_of_gradient(src), x.device_mesh, x.shape),
    )


def permuted(y: DTensor, ends: Sides) -> Tensor:
    """A DTensor with its dims in the order of the right side."""
    names, order = (side.resolved(y.ndim).names for side in (ends.src, ends.dst))
    return y if names == order else y.permute([names.index(name) for name in order])


def compare_calls(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
) -> None:
    """Raise on all ranks of the mesh unless all of them are about to make this call, and can."""
    where = x.device_mesh if isinstance(x, DTensor) else mesh

    def facts() -> CallFacts:
        ends = sides(expression)
        block, whole = x, None if shape is None else lengths_of(shape)
        if isinstance(x, DTensor):
            block, whole = local_block(x), tuple(x.shape)
            dtensor_move(x, ends, mesh, shape, profile, comm_dtype)
        processes, travels = process_mesh(require_mesh(where)), comm_dtype_of(comm_dtype, block.dtype)
        check_device(block.device)
        request = expression if isinstance(expression, Plan) else ends
        facts_of_block = tuple(block.shape), travels.forward, block.device
        plan, part = plan_of(request, processes, *facts_of_block, whole, profile)
        return CallFacts(
            everywhere={"expression": ends.text, "mesh": repr(processes.mesh)},
            within={
                "shape": str(plan.shape),
                "dtype": dtypes.name_of(block.dtype),
                "comm_dtype": f"{travels.forward}, {travels.backward}",
                "device": block.device.type,
                "requires_grad": str(x.requires_grad and torch.is_grad_enabled()),
                "plan": "; ".join(map(str, plan.steps)),
            },
            part=part.ranks,
            own={"block": str(tuple(block.shape)), "of": str(plan.shape)},
        )

    ranks = callers(where) if dist.is_initialized() else ()
    if ranks and dist.get_rank() in ranks:  # no rank waits for one outside, which raises later
        compare_ranks(
            ranks, sides(expression).text if isinstance(expression, Plan) else str(expression), facts
        )
