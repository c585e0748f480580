"""One tensor or DTensor, redistributed now, outside of compilers: on one mesh, or between two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.autodiff.blocks import as_tensor, is_dtensor
from torch_bridge.autodiff.function import Redistribute, apply
from torch_bridge.autodiff.pending import PendingTensor, compare_gradients_of, move_in_turn
from torch_bridge.autodiff.turns import RUNNING, current_part
from torch_bridge.calls.move import (
    PLAIN_TYPES,
    MoveCall,
    TransferCall,
    check_source_block,
    ranks_of,
)
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.transfer import TransferExecutable, lower_transfer, ranks_of_plans
from torch_bridge.mesh.desync import CallFacts, Compared, compare_call, derivative_facts
from torch_bridge.mesh.process_groups import process_group_of
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    calling_ranks,
    check_world,
    mesh_of,
    process_mesh,
)
from torch_bridge.redistribution.options import Options
from torch_bridge.replicas import (
    Comparison,
    comparisons_between,
    redistribute_and_check,
    with_comparisons,
)
from xshard import replicas
from xshard.arguments import lengths_of
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, PlanError
from xshard.plans.expression import Expression, sides
from xshard.plans.plan import Plan
from xshard.replicas import are_replicas_checked


def call_of(x: Tensor, options: Options) -> MoveCall:
    """Return the call on one mesh; a DTensor brings its mesh and its global shape."""
    mesh = options.mesh
    shape = options.shape
    if is_dtensor(x):
        from torch_bridge.dtensor.placements import checked_global_shape  # slow: it imports DTensor

        shape = checked_global_shape(x, mesh, shape)  # raises if `mesh` or `shape` is another one
        mesh = x.device_mesh
    return MoveCall.of(options.layouts, mesh, shape, options.profile, options.comm_dtype)


def move_one(
    x: Tensor,
    call: MoveCall,
    async_op: bool,
    check_replicated: bool | None,
    name: str = "",
) -> Tensor | PendingTensor:
    """Run a redistribution of one tensor or DTensor on one mesh, and return its result.

    Every `redistribute` comes through here, so that it has to be quick.

    Args:
        x: This process's block, or a DTensor.
        call: The layouts and the mesh.
        async_op: Whether to return a `PendingTensor` while the collective is under way.
        check_replicated: Whether to check that blocks which should be equal on several processes
            are; None goes by the global setting.
        name: The name of the tensor in errors about replicas; "" for none.
    """
    compares = replicas.are_replicas_checked(check_replicated) and not x.is_meta
    if type(x) not in PLAIN_TYPES and is_dtensor(x):
        if async_op:
            check_awaitable(x)
        from torch_bridge.dtensor.redistribution import redistribute_by_layouts

        return redistribute_by_layouts(x, call, compares, name)

    executable = call.executable_for(x)
    # The backward pass of a max or min needs its result, so that it cannot be left pending.
    if async_op and executable.is_linear and not compares:
        return PendingTensor.begin(x, executable)
    if compares:
        y = redistribute_and_check(x, executable, process_mesh(call.mesh), call.text, name)
    elif (
        RUNNING and executable.is_linear and current_part() is not None and _travels(x, executable)
    ):
        y = move_in_turn(executable, x)
    else:
        y = apply(executable, x)
    return PendingTensor(y, y.shape, y) if async_op else y  # pending in name: it has arrived


def _travels(x: Tensor, executable: Executable) -> bool:
    """Return whether a process sends something, forward or backward."""
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return executable.plan.bytes_received > 0 or (is_recorded and executable.sends_gradient)


def check_awaitable(x: Tensor) -> None:
    """Raise PlanError for a DTensor, which cannot be under way."""
    if is_dtensor(x):
        hint = "a DTensor waits for its local block at once"
        raise PlanError("async_op is for tensors", hint=hint)


def compare(x: Tensor, options: Options) -> Compared | None:
    """Check, before anything is sent, that all ranks make the same call of `redistribute`.

    For debug=True. Raises on all ranks of the mesh if calls differ, or if one of them would fail.
    The result later compares the backward passes; it is None if there is nothing to compare there.
    """
    mesh = x.device_mesh if is_dtensor(x) else options.mesh
    return compare_call(mesh, _as_asked(options.layouts), partial(_facts, x, options))


def _facts(x: Tensor, options: Options) -> CallFacts:
    """Describe this rank's call, for the comparison; raise what the call would raise.

    The other ranks then hear of the error, and do not wait.
    """
    call = call_of(x, options)
    block = x
    if is_dtensor(x):
        from torch_bridge.dtensor.function import local_block
        from torch_bridge.dtensor.redistribution import move_by_layouts

        move_by_layouts(x, call)  # only for its errors
        block = local_block(x)
    return call.facts(
        (block.shape, block.dtype, block.device),
        async_op=options.async_op,
        bucket_bytes=options.bucket_bytes,
        check_replicated=are_replicas_checked(options.check_replicated),
        **derivative_facts(x),
    )


def _as_asked(layouts: Any) -> str:
    """Write layouts as you passed them: a wrong text has no other form. A plan has both of its ends."""
    if isinstance(layouts, Plan):
        return f"{layouts.src} -> {layouts.dst}"
    return str(layouts)


def redistribute_between(x: Any, options: Options) -> Tensor | PendingTensor | None:
    """Move a block from one mesh to another; the processes of both call it.

    `x` is None on a process outside the source's mesh; the result is None on a process outside the
    destination's, unless gradients are asked for, or the sending goes on. A process of neither mesh
    may call it: it takes no part.
    """
    check_world()
    requires_grad = options.transfer.requires_grad
    source, call = _transfer_call(x, options)
    compared = None
    if options.debug and not torch.compiler.is_compiling():
        compared = _compare_transfer(x, options, call.ranks)

    plan = call.plan()
    ranks = tuple(ranks_of_plans([plan]))
    device = tensor_device_of(source, options.transfer.device, options.transfer.dst_mesh)
    if dist.get_rank() not in ranks:
        check_source_block(source, plan)
        return torch.empty(0, device=device, requires_grad=True) if requires_grad else None
    executable = _transfer_executable(plan, device, requires_grad=requires_grad)
    # The last check, because it may raise on this process alone; those above raise on all.
    check_source_block(source, plan)

    block = _block_for_autograd(source, executable, requires_grad)
    input_check, cotangent_check = _replica_comparisons(plan, options, ranks, device)
    if not requires_grad:
        cotangent_check = None
    if options.async_op and executable.is_linear and input_check is cotangent_check is None:
        return PendingTensor.begin(block, executable)
    move = partial(Redistribute.apply, executable)
    y = with_comparisons(move, block, input_check, cotangent_check)
    y = compare_gradients_of(compared, y, block)
    if options.async_op:  # pending in name: it has arrived
        return PendingTensor(y, y.shape, y)
    # Outside the destination an empty tensor is returned only if you have to call `backward` on it.
    if requires_grad or dist.get_rank() in plan.dst_devices:
        return y
    return None


def _transfer_executable(
    plan: Plan, device: torch.device, *, requires_grad: bool
) -> TransferExecutable:
    """Prepare a move between two meshes. Raises on all processes of both, or on none.

    Args:
        plan: The plan.
        device: The device of blocks, on a process without a block, too.
        requires_grad: Whether a gradient will be needed.
    """
    dtype = getattr(torch, plan.dtype)
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        hint = "floats and complex numbers can"
        raise DtypeError(f"{plan.dtype} cannot have a gradient", hint=hint)
    group = process_group_of(tuple(ranks_of_plans([plan])))
    executable = lower_transfer(plan, device, group)
    if requires_grad:
        _ = executable.backward  # planned now, so that a plan without a gradient raises here
    return executable


def _transfer_call(x: Any, options: Options) -> tuple[Tensor | None, TransferCall]:
    """Turn the arguments of a move between two meshes into a block and a hashable call.

    The block is None on a process outside the source. A DTensor brings the source's mesh and its
    global shape, which plain tensors need `src_mesh=` and `shape=` for.
    """
    block = None if x is None else as_tensor(x)
    if is_dtensor(block):
        block, options = _dtensor_source(block, options)
    two_meshes = options.transfer
    shape = options.shape
    dtype = two_meshes.dtype if block is None else block.dtype
    call = TransferCall(
        options.layouts,
        two_meshes.src_mesh,
        two_meshes.dst_mesh,
        None if shape is None else lengths_of(shape),
        None if dtype is None else name_of(dtype),
        two_meshes.relabel,
        options.profile,
    )
    return block, call


def _dtensor_source(x: Any, options: Options) -> tuple[Tensor | None, Options]:
    """Take a DTensor apart: return its local block, and options with its mesh and global shape.

    The block is None on a process outside the DTensor's mesh. Raises MeshError if `src_mesh` is
    given, and is another mesh.
    """
    from torch_bridge.dtensor.placements import checked_global_shape, local_block_under

    mesh = x.device_mesh
    shape = checked_global_shape(x, None, options.shape)
    src_mesh = options.transfer.src_mesh
    if src_mesh:
        is_same = mesh_of(src_mesh) == mesh_of(mesh) and ranks_of(src_mesh) == ranks_of(mesh)
        if not is_same:
            reason = f"the DTensor is on {mesh!r}, not on {src_mesh!r}"
            raise MeshError(reason, hint="leave src_mesh out")
    options = options._replace(shape=shape, transfer=options.transfer._replace(src_mesh=mesh))
    layouts: Expression = options.layouts
    # `sides` refuses a plan between two meshes, as it is meant for one.
    ends = layouts if isinstance(layouts, Plan) else sides(layouts)
    if dist.get_rank() not in calling_ranks(mesh):
        return None, options
    return local_block_under(x, ends.src, f"{ends.src} -> {ends.dst}"), options


def _compare_transfer(x: Any, options: Options, ranks: Sequence[int]) -> Compared | None:
    """Raise on all ranks of both meshes unless all of them are about to make this move, and can."""

    def facts() -> CallFacts:
        block, call = _transfer_call(x, options)
        return call.facts(
            block,
            requires_grad=options.transfer.requires_grad,
            check_replicated=are_replicas_checked(options.check_replicated),
        )

    return compare_call(None, _as_asked(options.layouts), facts, ranks)


def _block_for_autograd(
    block: Tensor | None, executable: TransferExecutable, requires_grad: bool
) -> Tensor:
    """Return the block, or an empty tensor in its place, that autograd records as on all processes.

    Every process has a node in the graph, or none has: in the backward pass they wait for each other.
    """
    if block is None:
        dtype = getattr(torch, executable.plan.dtype)
        block = torch.empty(0, dtype=dtype, device=executable.tensor_device)
    if requires_grad and block.requires_grad:
        return block
    return block.detach().requires_grad_(requires_grad)


def _replica_comparisons(
    plan: Plan, options: Options, ranks: Sequence[int], device: torch.device
) -> tuple[Comparison | None, Comparison | None]:
    """Return the checks of replicas before the move, and of their cotangents, if they are asked for."""
    if not are_replicas_checked(options.check_replicated) or device.type == "meta":
        return None, None
    if isinstance(options.layouts, Plan):
        return comparisons_between(plan, ranks, _as_asked(plan))
    return comparisons_between(plan, ranks, sides(options.layouts).text)


def tensor_device_of(
    x: Tensor | None = None, device: Any = None, dst_mesh: MeshLike | None = None
) -> torch.device:
    """Choose the torch device on which this process receives, in a move between two meshes.

    The first of these that is known: the device of its block `x`; `device`; that of `dst_mesh`, a
    DeviceMesh. Else it is the GPU if the world has NCCL and no gloo, and the CPU otherwise.
    """
    if x is not None:
        return x.device
    if device is not None:
        return torch.device(device)
    if isinstance(dst_mesh, DeviceMesh):
        kind = dst_mesh.device_type
    else:
        # A world with both backends has no one kind of device: the CPU's tensors always travel.
        backends = dist.get_backend_config()
        kind = "cuda" if "nccl" in backends and "gloo" not in backends else "cpu"
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)
