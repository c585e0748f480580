"""`redistribute`: what users call.

Decides what goes through autograd, for a tensor and for a DTensor, and what ranks compare before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge import agreement
from torch_bridge.agreement import Facts, agree
from torch_bridge.autograd import apply
from torch_bridge.dtensor import check_placed, layout_of_gradient, positional, to_placements
from torch_bridge.dtensor_moves import End, Move, RedistributeDTensor, block_of, move_of
from torch_bridge.groups import MeshLike, callers, check_device, process_mesh
from torch_bridge.pending import PendingTensor
from torch_bridge.planned import executable_for, given, plan_of
from torch_bridge.replicas import checked, checked_dtensor
from torch_bridge.wire import WireLike, wire_of
from xshard import MeshError, Plan, PlanError, Profile, ShapeError, dtypes
from xshard.replicas import are_checked
from xshard.spelling import Expression, sides


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
    debug: bool = False,
    check_replicated: bool | None = None,
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
    debug: bool = False,
    check_replicated: bool | None = None,
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
    debug: bool = False,
    check_replicated: bool | None = None,
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
    debug: first compare with the other ranks what is about to be done, so that all of them raise
    DesyncError where they differ or one of them fails, and none waits. Also: `XSHARD_DEBUG=1`.
    check_replicated: for debugging, compare replicas and copies, of `x` and of the cotangents that come back;
    where left out, as the environment variable XSHARD_CHECK_REPLICATED says. All processes run the
    backward pass then.
    A DTensor must be placed as the left layout says, and the result is a DTensor.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, LinearityError
    (a gradient that is not defined), on all processes; ShapeError for a block that does not fit,
    on its own process: if that is not all of them, the others wait for the group's timeout, unless
    `debug`. CollectiveError, on the others, when a process of the mesh has ended. With
    `check_replicated` ReplicaError, on all processes, here or in the backward pass.

    >>> import torch, torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     x = torch.full((1, 4), dist.get_rank())
    ...     return xt.redistribute(x, "s/cp c -> s c/cp", Mesh(cp=2))
    >>> [y.tolist() for y in xt.run_ranks(2, turn)]
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    if torch.compiler.is_compiling():
        from torch_bridge import compiled  # which takes half a second to import

        return compiled.redistribute(
            x, expression, mesh, shape, profile, comm_dtype, async_op, check_replicated
        )
    if debug or agreement.ALWAYS:
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
    comm_dtype: WireLike,
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
    wire = wire_of(comm_dtype, x.dtype)
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
    comm_dtype: WireLike,
) -> None:
    """Raise on all ranks of the mesh unless all of them can do this and are about to."""
    where = x.device_mesh if isinstance(x, DTensor) else mesh

    def facts() -> Facts:
        whole = None if shape is None else tuple(shape)
        block, whole = (block_of(x), tuple(x.shape)) if isinstance(x, DTensor) else (x, whole)
        if isinstance(x, DTensor):
            _move(x, expression, mesh, shape, profile, comm_dtype)
        processes, wire = process_mesh(given(where)), wire_of(comm_dtype, block.dtype)
        check_device(block.device)
        plan, part = plan_of(expression, processes, tuple(block.shape), wire.forward, whole, profile)
        return Facts(
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
        agree(ranks, sides(expression)[2] if isinstance(expression, Plan) else str(expression), facts)
