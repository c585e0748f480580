"""A DTensor moved by the layouts of an expression: it is placed as the left one says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.calls.move import MoveCall
from torch_bridge.comm_dtype import comm_dtype_of
from torch_bridge.dtensor.function import (
    DTensorMove,
    End,
    RedistributeDTensor,
    executables,
    local_block,
    move_of,
)
from torch_bridge.dtensor.placements import (
    check_placed,
    dtensor_of,
    from_placements,
    layout_of_gradient,
    positional,
    to_placements,
)
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh.process_mesh import dtensor_mesh, takes_part
from torch_bridge.replicas import comparison_of
from xshard import Sharding
from xshard.dtypes import name_of
from xshard.plans.expression import sides
from xshard.replicas import ReplicaCheck


def redistribute_by_layouts(x: DTensor, call: MoveCall, compares: bool, name: str) -> Tensor:
    """The DTensor after a call. compares: whether replicas are compared; name: the tensor's, for errors."""
    run = functools.partial(RedistributeDTensor.apply, x, move_by_layouts(x, call))
    return _permuted(_checked(x, run, call.text, name) if compares else run(), call)


def move_by_layouts(x: DTensor, call: MoveCall) -> DTensorMove:
    """The move of a call. Raises NotationError unless the DTensor is placed as the left side says."""
    src, dst, text = sides(call.expression)
    check_placed(x, src, text)
    src, dst = (positional(side, x.ndim) for side in (src, dst.in_order(src.names)))
    travels = comm_dtype_of(call.comm_dtype, x.dtype)
    return move_of(
        x,
        End(x.device_mesh, x.placements, src),
        End(x.device_mesh, to_placements(dst, x.device_mesh, x.shape), dst),
        call.profile,
        op_dtype=travels.forward,
        backward_dtype=travels.backward,
        gradient=to_placements(layout_of_gradient(src), x.device_mesh, x.shape),
    )


def local_part(x: DTensor, call: MoveCall) -> tuple[Tensor, Executable, Callable[[Tensor], Tensor]] | None:
    """The block, its executable, and the function from its result to the DTensor's.

    None if autograd records the move, or if it takes another executable than one on one mesh.
    """
    move, block = move_by_layouts(x, call), local_block(x)
    parts = executables(move, tuple(x.shape), tuple(block.shape), block.device)
    if (x.requires_grad and torch.is_grad_enabled()) or len(parts) != 1:
        return None

    def finish(y: Tensor) -> Tensor:
        return _permuted(dtensor_of(y, x.device_mesh, move.dst.placements, x.shape), call)

    (executable,) = parts
    is_one = isinstance(executable, Executable)
    return (block, executable.casting(x.dtype, move.op_dtype), finish) if is_one else None


def _permuted(y: DTensor, call: MoveCall) -> Tensor:
    """A DTensor with its dims in the order of the right side."""
    src, dst, _ = sides(call.expression)
    names, order = (side.resolved(y.ndim).names for side in (src, dst))
    return y if names == order else y.permute([names.index(name) for name in order])


def _checked(x: DTensor, run: Callable[[], DTensor], text: str, name: str) -> DTensor:
    """Call `run`; compares the replicas of `x`, and the replicas of the result's gradient."""
    _compare(x, text, name, cotangents=False)
    y = run()
    if y.requires_grad:
        y.register_hook(lambda gradient: _compare(gradient, text, name, cotangents=True))
    return y


def _compare(x: DTensor, text: str, name: str, *, cotangents: bool) -> None:
    if not takes_part(x.device_mesh):
        return
    processes, shape = dtensor_mesh(x.device_mesh), tuple(x.shape)
    sharding = Sharding(from_placements(x.placements, processes.mesh, x.ndim, shape), processes.mesh, shape)
    check = ReplicaCheck(sharding, processes.mesh, name_of(x.dtype), text, cotangents, name)
    comparison = comparison_of(check, processes)
    if comparison is not None:
        comparison(local_block(x))
