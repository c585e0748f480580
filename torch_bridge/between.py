"""Redistribution from one mesh of processes to another.

Decides what is refused before anything is sent, and what a process without a block gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.function import Redistribute
from torch_bridge.autodiff.recomputed import check_not_swapped
from torch_bridge.dtensor.placements import local_of, whole_of
from torch_bridge.lower.transfer import cross
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, check_world, mesh_of
from torch_bridge.planning import plan_between, ranks_of
from torch_bridge.replicas import Expect, comparisons_between
from xshard import Plan, Profile, dtypes
from xshard.errors import DtypeError, MeshError, ShapeError
from xshard.plans.expression import Expression, sides
from xshard.replicas import are_checked


def redistribute_between(
    x: Tensor | None,
    expression: Expression,
    src_mesh: MeshLike | None = None,
    dst_mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    relabel: bool = False,
    profile: str | Path | Profile = "auto",
    debug: bool = False,
    check_replicated: bool | None = None,
) -> Tensor | None:
    """This process's block on one mesh -> its block on another, differentiable.

    All processes of the world call it, with equal arguments but for `x` and `device`. The result is
    a new tensor, or None on processes that are not in the destination.

    x: the block, or a DTensor, which brings its mesh and its shape and is placed as the left layout says;
    None on processes that are not in the source. The result is a block in either case.
    expression: `"layout -> layout"`, a pair of layouts, or a plan, whose device numbers are global ranks
    and which is carried out as it is; a plan on one mesh takes the ranks of `src_mesh`, if that is given.
    src_mesh, dst_mesh: a `DeviceMesh` with named dims, which may be a part of the world, or an
    `xshard.Mesh`, whose device i is rank i. Not needed with a plan.
    shape, dtype: of the global array; of a plan they are known, and a process that has a block
    knows the dtype.
    device: where a process that has no block wants the result.
    requires_grad: whether the blocks get a gradient. Then processes outside the destination get an
    empty tensor instead of None, and all of them call `backward`: `y.sum().backward()` will do there.
    relabel, profile: as in `xshard.plan`. debug, check_replicated: as in `redistribute`, on all processes.

    Raises, before anything is sent, MeshError, NotationError, ShapeError, DtypeError, PlanError,
    LinearityError (a gradient that is not defined), ReplicaError, on all processes; ShapeError for a block
    that does not fit or is missing, on its own process: the others then wait for the group's timeout, unless
    `debug`.

    >>> from xshard import Mesh
    >>> redistribute_between(torch.ones(4), "n/a -> n/b", Mesh(a=1), Mesh(b=1), shape=(4,))
    tensor([1., 1., 1., 1.])
    """
    check_world()
    check_not_swapped()

    def prepared() -> tuple[Tensor | None, Plan]:
        """This process's block and the plan, which fit each other."""
        block, mesh, whole = _block_of(x, expression, src_mesh, shape)
        kind = dtype if block is None else block.dtype
        name = None if kind is None else dtypes.name_of(kind)
        made = plan_between(expression, mesh, dst_mesh, whole, name, relabel, profile)
        _check_ranks(made)
        return block, made

    if (debug or desync.ALWAYS) and not torch.compiler.is_compiling():
        _compare(expression, prepared, requires_grad)
    block, made = prepared()
    kind = getattr(torch, made.dtype)
    if requires_grad and not (kind.is_floating_point or kind.is_complex):
        raise DtypeError(f"{made.dtype} has no gradient", hint="floats and complex numbers have one")
    where = tensor_device_of(block, device, dst_mesh)
    crossing = cross(made, where, dist.group.WORLD)
    if requires_grad:
        crossing.plan_gradient()
    _check_block(block, made)
    block = torch.empty(0, dtype=kind, device=where) if block is None else block
    # Every process has a node in the graph, or none has: what one sends back another waits for.
    if not requires_grad or not block.requires_grad:
        block = block.detach().requires_grad_(requires_grad)
    entering = returning = None
    if are_checked(check_replicated) and where.type != "meta":
        text = f"{made.src} -> {made.dst}" if isinstance(expression, Plan) else sides(expression).text
        entering, returning = comparisons_between(made, text)
    y = Redistribute.apply(crossing, Expect.apply(block, entering, None) if entering else block)
    y = Expect.apply(y, None, returning) if returning and requires_grad else y
    return y if requires_grad or dist.get_rank() in made.dst_devices else None


def _block_of(
    x: Tensor | None, expression: Expression, src_mesh: MeshLike | None, shape: Sequence[int] | None
) -> tuple[Tensor | None, MeshLike | None, Sequence[int] | None]:
    """The block of this process, the source's mesh and the global shape, which a DTensor brings."""
    x = None if x is None else as_tensor(x)
    if not isinstance(x, DTensor):
        return x, src_mesh, shape
    mesh, whole = x.device_mesh, whole_of(x, None, shape)
    if src_mesh is not None and (mesh_of(src_mesh), ranks_of(src_mesh)) != (mesh_of(mesh), ranks_of(mesh)):
        raise MeshError(f"the DTensor is on {mesh!r}, not on {src_mesh!r}", hint="leave src_mesh out")
    if dist.get_rank() not in callers(mesh):
        return None, mesh, whole
    ends = expression if isinstance(expression, Plan) else sides(expression)
    return local_of(x, ends.src, f"{ends.src} -> {ends.dst}"), mesh, whole


def _compare(
    expression: Expression, prepared: Callable[[], tuple[Tensor | None, Plan]], requires_grad: bool
) -> None:
    """Raise on all ranks of the world unless all of them can do this and are about to."""
    everyone = tuple(range(dist.get_world_size()))

    def facts() -> CallFacts:
        x, made = prepared()
        _check_block(x, made)
        known = {
            "expression": f"{made.src} -> {made.dst}",
            "meshes": f"{made.src_mesh!r} on {made.src_devices}, {made.dst_mesh!r} on {made.dst_devices}",
            "shape": str(made.shape),
            "dtype": made.dtype,
            "requires_grad": str(requires_grad),
            "plan": "; ".join(map(str, made.steps)),
            "profile": made.profile.name,
        }
        own = {"block": "none" if x is None else str(tuple(x.shape))}
        return CallFacts(known, {}, everyone, own)

    text = f"{expression.src} -> {expression.dst}" if isinstance(expression, Plan) else None
    compare_ranks(everyone, text or str(expression), facts)


def _check_ranks(made: Plan) -> None:
    last = max(*made.src_devices, *made.dst_devices)
    if last >= dist.get_world_size():
        raise MeshError(
            f"the meshes have a rank {last}, the world has {dist.get_world_size()} processes",
            hint="device numbers of a plan are global ranks",
        )


def tensor_device_of(
    x: Tensor | None, device: torch.device | str | None, dst_mesh: MeshLike | None
) -> torch.device:
    """Where this process's tensors are: its block's, the one asked for, or the backend's own."""
    if x is not None:
        return x.device
    if device is not None:
        return torch.device(device)
    uses_cuda = "nccl" in dist.get_backend_config() and "gloo" not in dist.get_backend_config()
    kind = dst_mesh.device_type if isinstance(dst_mesh, DeviceMesh) else "cuda" if uses_cuda else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _check_block(x: Tensor | None, made: Plan) -> None:
    """Raise unless this process brings the block that the source gives it, and no other."""
    rank, source = dist.get_rank(), made.source
    if rank not in made.src_devices:
        if x is not None:
            raise ShapeError(f"rank {rank} is not in the source and has no block", hint="pass None there")
        return
    expected = source.local_shape(made.src_devices.index(rank))
    found = None if x is None else tuple(x.shape)
    if found != expected:
        raise ShapeError(
            f"the block of rank {rank} has shape {found}, not {expected}"
            if found is not None
            else f"rank {rank} is in the source and brings no block",
            hint=f"under '{source.layout}' on {source.mesh!r} that is its part of a {source.shape} array",
        )
    if x is not None and dtypes.name_of(x.dtype) != made.dtype:
        raise DtypeError(f"the block of rank {rank} is {x.dtype}, the plan is for {made.dtype}")
