"""Redistribution from one mesh of processes to another.

Decides how a tensor, or none, and an expression become a plan between two meshes, what is
refused before anything is sent, and what a process without a block gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.lower.transfer import cross
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, callers, mesh_of
from xshard import DtypeError, Mesh, MeshError, Plan, Profile, ShapeError, dtypes, plan
from xshard.plans.expression import Expression


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
    profile: str | Path | Profile = "h100",
    debug: bool = False,
) -> Tensor | None:
    """This process's block on one mesh -> its block on another, differentiable.

    All processes of the world call it, with equal arguments but for `x` and `device`. The result is
    a new tensor, or None on processes that are not in the destination.

    x: the block; None on processes that are not in the source.
    expression: `"layout -> layout"`, a pair of layouts, or a plan, whose device numbers are global ranks
    and which is carried out as it is; a plan on one mesh takes the ranks of `src_mesh`, if that is given.
    src_mesh, dst_mesh: a `DeviceMesh` with named dims, which may be a part of the world, or an
    `xshard.Mesh`, whose device i is rank i. Not needed with a plan.
    shape, dtype: of the global array; of a plan they are known, and a process that has a block
    knows the dtype.
    device: where a process that has no block wants the result.
    requires_grad: whether the blocks get a gradient. Then processes outside the destination get an
    empty tensor instead of None, and all of them call `backward`: `y.sum().backward()` will do there.
    relabel, profile: as in `xshard.plan`. debug: as in `redistribute`.

    Raises, before anything is sent, MeshError, NotationError, ShapeError, DtypeError, PlanError,
    LinearityError (a gradient that is not defined), on all processes; ShapeError for a block that does not
    fit or is missing, on its own process: the others then wait for the group's timeout, unless `debug`.

    >>> from xshard import Mesh
    >>> redistribute_between(torch.ones(4), "n/a -> n/b", Mesh(a=1), Mesh(b=1), shape=(4,))
    tensor([1., 1., 1., 1.])
    """
    if not dist.is_initialized():
        raise MeshError(
            "no process group is initialised",
            hint="call torch.distributed.init_process_group() in every process, started by torchrun",
        )
    kind = dtype if x is None else x.dtype
    name = None if kind is None else dtypes.name_of(kind)
    planned = functools.partial(plan_between, expression, src_mesh, dst_mesh, shape, name, relabel, profile)
    if (debug or desync.ALWAYS) and not torch.compiler.is_compiling():
        _compare(x, expression, planned, requires_grad)
    made = planned()
    _check_ranks(made)
    kind = getattr(torch, made.dtype)
    if requires_grad and not (kind.is_floating_point or kind.is_complex):
        raise DtypeError(f"{made.dtype} has no gradient", hint="floats and complex numbers have one")
    where = _tensor_device(x, device, dst_mesh)
    crossing = cross(made, where, dist.group.WORLD)
    if requires_grad:
        crossing.plan_gradient()
    _check_block(x, made)
    block = torch.empty(0, dtype=kind, device=where) if x is None else x
    # Every process has a node in the graph, or none has: what one sends back another waits for.
    if not requires_grad or not block.requires_grad:
        block = block.detach().requires_grad_(requires_grad)
    y = Redistribute.apply(crossing, block)
    return y if requires_grad or dist.get_rank() in made.dst_devices else None


def _compare(
    x: Tensor | None, expression: Expression, planned: Callable[[], Plan], requires_grad: bool
) -> None:
    """Raise on all ranks of the world unless all of them can do this and are about to."""
    everyone = tuple(range(dist.get_world_size()))

    def facts() -> CallFacts:
        made = planned()
        _check_ranks(made)
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


def plan_between(
    expression: Expression,
    src_mesh: MeshLike | None,
    dst_mesh: MeshLike | None,
    shape: Sequence[int] | None,
    dtype: str | None,
    relabel: bool,
    profile: str | Path | Profile,
) -> Plan:
    """The plan that is asked for; its devices are ranks."""
    if isinstance(expression, Plan):
        ranks = expression.src_devices if src_mesh is None else _ranks(src_mesh)
        if expression.transfer or ranks == expression.src_devices:
            return expression
        return replace(expression, devices=ranks)
    if src_mesh is None or dst_mesh is None:
        raise MeshError(
            "two meshes are needed", hint="redistribute_between(x, expression, src_mesh, dst_mesh)"
        )
    if shape is None or dtype is None:
        missing = "shape" if shape is None else "dtype"
        raise ShapeError(
            f"no {missing}",
            hint="shape= and dtype= of the global array: processes without a block know neither",
        )
    return plan(
        expression,
        src_mesh=mesh_of(src_mesh),
        dst_mesh=mesh_of(dst_mesh),
        shape=shape,
        dtype=dtype,
        src_devices=_ranks(src_mesh),
        dst_devices=_ranks(dst_mesh),
        relabel=relabel,
        profile=profile,
    )


def _ranks(mesh: MeshLike) -> tuple[int, ...]:
    """The global rank of every device of a mesh, in its order."""
    return tuple(range(mesh.n_devices)) if isinstance(mesh, Mesh) else callers(mesh)


def _tensor_device(
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
