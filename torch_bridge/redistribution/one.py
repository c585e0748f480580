"""One tensor or DTensor, redistributed now, outside of compilers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import is_dtensor
from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.calls.move import PLAIN, MoveCall
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.desync import CallFacts, compare_call
from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from torch_bridge.replicas import checked
from xshard import replicas
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.plans.expression import sides
from xshard.plans.plan import Plan


def call_of(
    x: Tensor,
    layouts: Any,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
    comm_dtype: CommDtypeLike,
) -> MoveCall:
    """The call with the arguments of `redistribute`; a DTensor brings its mesh and its shape."""
    if is_dtensor(x):
        from torch_bridge.dtensor.placements import whole_of

        shape, mesh = whole_of(x, mesh, shape), x.device_mesh
    return MoveCall.of(layouts, mesh, shape, profile, comm_dtype)


def redistribute_one(
    x: Tensor, call: MoveCall, async_op: bool = False, check_replicated: bool | None = None, name: str = ""
) -> Tensor | PendingTensor:
    """The result of a call. name: the tensor's, for errors about its replicas."""
    compares = replicas.are_checked(check_replicated) and not x.is_meta
    if type(x) not in PLAIN and is_dtensor(x):
        if async_op:
            raise PlanError("async_op is for tensors", hint="a DTensor waits for its local block at once")
        from torch_bridge.dtensor.redistribution import redistribute_by_layouts

        return redistribute_by_layouts(x, call, compares, name)
    executable = call.executable_for(x)
    if compares:
        y = checked(x, executable, process_mesh(call.mesh), call.text, name)
    elif async_op and executable.is_linear:
        return PendingTensor.begin(x, executable)
    else:
        y = apply(executable, x)
    return PendingTensor(y, y.shape, y) if async_op else y


def compare(x: Tensor, layouts: Any, mesh: MeshLike | None, *options: Any) -> None:
    """Raise on all ranks of the mesh unless all of them are about to make this call, and can."""

    def facts() -> CallFacts:
        call, block = call_of(x, layouts, mesh, *options), x
        if is_dtensor(x):
            from torch_bridge.dtensor.function import local_block
            from torch_bridge.dtensor.redistribution import move_by_layouts

            move_by_layouts(x, call)
            block = local_block(x)
        requires_grad = x.requires_grad and torch.is_grad_enabled()
        return call.facts((block.shape, block.dtype, block.device), requires_grad)

    text = sides(layouts).text if isinstance(layouts, Plan) else str(layouts)
    compare_call(x.device_mesh if is_dtensor(x) else mesh, text, facts)
