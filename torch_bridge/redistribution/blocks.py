"""One tensor or DTensor, redistributed now, outside of compilers: on one mesh, or between two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.autodiff.blocks import as_tensor, is_dtensor
from torch_bridge.autodiff.function import Redistribute, apply
from torch_bridge.autodiff.pending import PendingTensor, watched
from torch_bridge.calls.move import PLAIN, MoveCall, TransferCall, check_part, ranks_of
from torch_bridge.lower.transfer import cross
from torch_bridge.mesh.desync import CallFacts, Compared, compare_call, derivatives_of
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_world, mesh_of, process_mesh
from torch_bridge.replicas import Expect, checked, comparisons_between
from xshard import ProfileLike, replicas
from xshard.arguments import lengths_of
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, PlanError
from xshard.plans.expression import Expression, sides
from xshard.plans.plan import Plan
from xshard.replicas import are_checked


class Endpoints(NamedTuple):
    """The arguments of `redistribute` that only two meshes have, and the profile."""

    src_mesh: MeshLike | None
    dst_mesh: MeshLike | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    requires_grad: bool
    relabel: bool
    profile: ProfileLike


def redistribute_between(
    x: Any,
    layouts: Expression,
    shape: Any,
    endpoints: Endpoints,
    debug: bool,
    check_replicated: bool | None,
) -> Tensor | None:
    """`redistribute` of a block, of a DTensor, or of None on a process outside the source."""
    check_world()
    src_mesh, dst_mesh, dtype, device, requires_grad, relabel, profile = endpoints

    def prepared() -> tuple[Tensor | None, TransferCall]:
        """This process's block, and the call; a DTensor brings the source's mesh and the global shape."""
        block = None if x is None else as_tensor(x)
        source = src_mesh
        lengths = shape
        if is_dtensor(block):
            from torch_bridge.dtensor.placements import local_of, whole_of

            source = block.device_mesh
            lengths = whole_of(block, None, shape)
            if src_mesh and (mesh_of(src_mesh), ranks_of(src_mesh)) != (
                mesh_of(source),
                ranks_of(source),
            ):
                what = f"the DTensor is on {source!r}, not on {src_mesh!r}"
                raise MeshError(what, hint="leave src_mesh out")
            both = layouts if isinstance(layouts, Plan) else sides(layouts)
            text = f"{both.src} -> {both.dst}"
            has_block = dist.get_rank() in callers(source)
            block = local_of(block, both.src, text) if has_block else None
        block_dtype = dtype if block is None else block.dtype
        name = None if block_dtype is None else name_of(block_dtype)
        lengths = None if lengths is None else lengths_of(lengths)
        return block, TransferCall(layouts, source, dst_mesh, lengths, name, relabel, profile)

    compared = None
    if debug and not torch.compiler.is_compiling():
        text = f"{layouts.src} -> {layouts.dst}" if isinstance(layouts, Plan) else str(layouts)

        def facts() -> CallFacts:
            block, call = prepared()
            flags = {
                "requires_grad": requires_grad,
                "check_replicated": are_checked(check_replicated),
            }
            return call.facts(block, **flags)

        compared = compare_call(None, text, facts)
    block, call = prepared()
    plan = call.plan()
    plan_dtype = getattr(torch, plan.dtype)
    if requires_grad and not (plan_dtype.is_floating_point or plan_dtype.is_complex):
        raise DtypeError(
            f"{plan.dtype} cannot have a gradient", hint="floats and complex numbers can"
        )
    tensor_device = tensor_device_of(block, device, dst_mesh)
    executable = cross(plan, tensor_device, dist.group.WORLD)
    if requires_grad:
        _ = executable.backward  # errors come early
    check_part(block, plan)
    block = torch.empty(0, dtype=plan_dtype, device=tensor_device) if block is None else block
    # Every process has a node in the graph, or none has: in the backward pass they wait for each other.
    if not requires_grad or not block.requires_grad:
        block = block.detach().requires_grad_(requires_grad)
    entering = returning = None
    if are_checked(check_replicated) and tensor_device.type != "meta":
        text = f"{plan.src} -> {plan.dst}" if isinstance(layouts, Plan) else sides(layouts).text
        entering, returning = comparisons_between(plan, text)
    y = Redistribute.apply(executable, Expect.apply(block, entering, None) if entering else block)
    y = watched(
        compared, Expect.apply(y, None, returning) if returning and requires_grad else y, block
    )
    return y if requires_grad or dist.get_rank() in plan.dst_devices else None


def tensor_device_of(x: Tensor | None, device: Any, dst_mesh: MeshLike | None) -> torch.device:
    """The device of this process's tensors: its block's, the given one, or the backend's own."""
    if x is not None or device is not None:
        return torch.device(device) if x is None else x.device
    uses_cuda = "nccl" in dist.get_backend_config() and "gloo" not in dist.get_backend_config()
    kind = (
        dst_mesh.device_type if isinstance(dst_mesh, DeviceMesh) else "cuda" if uses_cuda else "cpu"
    )
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def call_of(x: Tensor, layouts: Any, mesh: MeshLike | None, shape: Any, *options: Any) -> MoveCall:
    """The call with the arguments of `redistribute`; a DTensor brings its mesh and its shape."""
    if is_dtensor(x):
        from torch_bridge.dtensor.placements import whole_of

        shape = whole_of(x, mesh, shape)
        mesh = x.device_mesh
    return MoveCall.of(layouts, mesh, shape, *options)


def move_one(
    x: Tensor,
    call: MoveCall,
    async_op: bool = False,
    check_replicated: bool | None = None,
    name: str = "",
) -> Tensor | PendingTensor:
    """The result of a call. name: the tensor's, for errors about its replicas."""
    compares = replicas.are_checked(check_replicated) and not x.is_meta
    if type(x) not in PLAIN and is_dtensor(x):
        if async_op:
            raise PlanError(
                "async_op is for tensors", hint="a DTensor waits for its local block at once"
            )
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


def compare(
    x: Tensor,
    arguments: Any,
    async_op: bool,
    check_replicated: bool | None,
    bucket_bytes: int | None = None,
) -> Compared | None:
    """Raise on all ranks of the mesh unless all of them are about to make this call, and can."""
    layouts, mesh, *options = arguments

    def facts() -> CallFacts:
        call = call_of(x, layouts, mesh, *options)
        block = x
        if is_dtensor(x):
            from torch_bridge.dtensor.function import local_block
            from torch_bridge.dtensor.redistribution import move_by_layouts

            move_by_layouts(x, call)
            block = local_block(x)
        sent = {"async_op": async_op, "bucket_bytes": bucket_bytes, **derivatives_of(x)}
        sent["check_replicated"] = are_checked(check_replicated)
        return call.facts((block.shape, block.dtype, block.device), **sent)

    text = sides(layouts).text if isinstance(layouts, Plan) else str(layouts)
    return compare_call(x.device_mesh if is_dtensor(x) else mesh, text, facts)
