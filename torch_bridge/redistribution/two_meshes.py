"""Redistribution of one tensor from one mesh of processes to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.autodiff.blocks import as_tensor, is_dtensor
from torch_bridge.autodiff.function import Redistribute
from torch_bridge.calls.transfer import TransferCall, check_block, ranks_of
from torch_bridge.lower.transfer import cross
from torch_bridge.mesh.desync import compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_world, mesh_of
from torch_bridge.replicas import Expect, comparisons_between
from xshard import Profile
from xshard.arguments import lengths_of
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError
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
    profile: str | Path | Profile


def is_between(x: Any, plan: Plan, mesh: MeshLike | None) -> bool:
    """Whether a plan runs between ranks: it has two meshes, or its device numbers have to be ranks."""
    return bool(plan.transfer) or (mesh is None and isinstance(x, Tensor) and not is_dtensor(x))


def redistribute_between(
    x: Tensor | None,
    layouts: Expression,
    shape: Sequence[int] | None,
    endpoints: Endpoints,
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor | None:
    """`redistribute` of a block, of a DTensor, or of None on a process outside the source."""
    check_world()
    _, dst_mesh, _, device, requires_grad, *_ = endpoints

    def prepared() -> tuple[Tensor | None, TransferCall]:
        return _call_of(x, layouts, shape, endpoints)

    if debug and not torch.compiler.is_compiling():
        text = f"{layouts.src} -> {layouts.dst}" if isinstance(layouts, Plan) else str(layouts)

        def facts() -> Any:
            block, call = prepared()
            return call.facts(block, requires_grad)

        compare_ranks(tuple(range(dist.get_world_size())), text, facts)
    block, call = prepared()
    plan = call.plan()
    dtype = getattr(torch, plan.dtype)
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"{plan.dtype} cannot have a gradient", hint="floats and complex numbers can")
    tensor_device = tensor_device_of(block, device, dst_mesh)
    executable = cross(plan, tensor_device, dist.group.WORLD)
    if requires_grad:
        executable.plan_gradient()
    check_block(block, plan)
    block = torch.empty(0, dtype=dtype, device=tensor_device) if block is None else block
    # Every process has a node in the graph, or none has: in the backward pass they wait for each other.
    if not requires_grad or not block.requires_grad:
        block = block.detach().requires_grad_(requires_grad)
    entering = returning = None
    if are_checked(check_replicated) and tensor_device.type != "meta":
        text = f"{plan.src} -> {plan.dst}" if isinstance(layouts, Plan) else sides(layouts).text
        entering, returning = comparisons_between(plan, text)
    y = Redistribute.apply(executable, Expect.apply(block, entering, None) if entering else block)
    y = Expect.apply(y, None, returning) if returning and requires_grad else y
    return y if requires_grad or dist.get_rank() in plan.dst_devices else None


def _call_of(
    x: Any, layouts: Expression, shape: Sequence[int] | None, endpoints: Endpoints
) -> tuple[Tensor | None, TransferCall]:
    """This process's block, and the call; a DTensor brings the source's mesh and the global shape."""
    src_mesh, dst_mesh, dtype, _, _, relabel, profile = endpoints
    x = None if x is None else as_tensor(x)
    if is_dtensor(x):
        from torch_bridge.dtensor.placements import local_of, whole_of

        mesh, shape = x.device_mesh, whole_of(x, None, shape)
        if src_mesh and (mesh_of(src_mesh), ranks_of(src_mesh)) != (mesh_of(mesh), ranks_of(mesh)):
            raise MeshError(f"the DTensor is on {mesh!r}, not on {src_mesh!r}", hint="leave src_mesh out")
        src_mesh = mesh
        both = layouts if isinstance(layouts, Plan) else sides(layouts)
        x = local_of(x, both.src, f"{both.src} -> {both.dst}") if dist.get_rank() in callers(mesh) else None
    dtype = dtype if x is None else x.dtype
    name = None if dtype is None else name_of(dtype)
    lengths = None if shape is None else lengths_of(shape)
    return x, TransferCall(layouts, src_mesh, dst_mesh, lengths, name, relabel, profile)


def tensor_device_of(
    x: Tensor | None, device: torch.device | str | None, dst_mesh: MeshLike | None
) -> torch.device:
    """The device of this process's tensors: its block's, the given one, or the backend's own."""
    if x is not None:
        return x.device
    if device is not None:
        return torch.device(device)
    uses_cuda = "nccl" in dist.get_backend_config() and "gloo" not in dist.get_backend_config()
    kind = dst_mesh.device_type if isinstance(dst_mesh, DeviceMesh) else "cuda" if uses_cuda else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
