"""The differentiable move of a DTensor: a plan for its block, and another for its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_bridge.autodiff.function import winner_shares
from torch_bridge.calls.move import MoveCall, TransferCall
from torch_bridge.dtensor.placements import (
    dtensor_of,
    from_placements,
    gradient_layout,
    to_placements,
)
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.transfer import TransferExecutable, cross
from torch_bridge.mesh.process_groups import group_of
from torch_bridge.mesh.process_mesh import (
    callers,
    check_world,
    dtensor_axes,
    dtensor_mesh,
    takes_part,
    world,
)
from xshard import Layout, Mesh, ProfileLike, Sharding, dtypes
from xshard.cost.machine import AUTO, asked_for
from xshard.errors import MeshError, PlanError, ShapeError
from xshard.layout.layout import NONLINEAR
from xshard.steps.base import without_tags

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]
_MAKERS = (
    "_FromTorchTensorBackward",
    "_OfCopiesBackward",
)  # what makes DTensors of blocks with a gradient


@dataclass(frozen=True)
class End:
    """How a DTensor is placed on a mesh, and the layout of its blocks."""

    mesh: DeviceMesh
    placements: Placements
    layout: Layout

    def dtensor(self, block: Tensor, shape: Sequence[int]) -> DTensor:
        """A block -> the DTensor of global `shape`."""
        return dtensor_of(block, self.mesh, self.placements, shape)


@dataclass(frozen=True)
class DTensorMove:
    """The move of a DTensor."""

    src: End
    dst: End
    op_dtype: torch.dtype
    out_dtype: torch.dtype
    profile: ProfileLike
    backward_dtype: torch.dtype | None = None  # None, as for the gradient: the input's
    gradient: Placements | None = None
    by_block: bool = False  # the gradient is the blocks', as `DTensor.from_local` made the input


class RedistributeDTensor(torch.autograd.Function):
    """`RedistributeDTensor.apply(x, move)`: a DTensor after a move, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, move: DTensorMove) -> DTensor:
        block = local_block(x)
        ctx.move = move
        ctx.dtype = block.dtype
        if move.by_block and move.src.layout.tagged(*NONLINEAR) and takes_part(move.src.mesh):
            ctx.save_for_backward(block)
        block = block.to(move.op_dtype)
        for executable in executables(move, x, block):
            block = executable(block)
        return move.dst.dtensor(block.to(move.out_dtype), x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        move: DTensorMove = ctx.move
        shape = tuple(gradient.shape)
        here = _end_like(move.dst, gradient.device_mesh, gradient.placements, shape)
        there = _gradient_end(move, here, shape)
        back = DTensorMove(here, there, move.backward_dtype or ctx.dtype, ctx.dtype, move.profile)
        moved = RedistributeDTensor.apply(gradient, back)
        if move.by_block:
            averaged = dtensor_axes(move.src.mesh).size(*move.src.layout.tagged("mean"))
            if averaged > 1:
                moved = moved / averaged
            if ctx.saved_tensors:
                shares = _winner_shares(ctx.saved_tensors[0], move, shape)
                moved = moved * there.dtensor(shares, gradient.shape)
        return moved, None


class _OfCopies(torch.autograd.Function):
    """Blocks that are copies as a DTensor of replicas, with addends as gradients (as torch 2.13 knows)."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, layout: Layout, mesh: DeviceMesh, shape: Shape) -> DTensor:
        ctx.gradient = mesh, to_placements(gradient_layout(layout), mesh, shape)
        return dtensor_of(block, mesh, to_placements(layout, mesh, shape), shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None, None]:
        axes = dtensor_axes(gradient.device_mesh)
        shape = tuple(gradient.shape)
        here, there = (
            End(mesh, placements, layout_of(placements, axes, shape))
            for mesh, placements in ((gradient.device_mesh, gradient.placements), ctx.gradient)
        )
        move = DTensorMove(here, there, gradient.dtype, gradient.dtype, AUTO)
        return RedistributeDTensor.apply(gradient, move).to_local(), None, None, None


def as_dtensor(local: Tensor, layout: Layout, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A local block under `layout` -> the DTensor of global `shape`."""
    if layout.tagged("copy"):  # gradients of copies are partial; a DTensor assumes `Replicate`
        return _OfCopies.apply(local, layout, mesh, tuple(shape))
    return dtensor_of(local, mesh, to_placements(layout, mesh, shape), shape)


def move_of(x: DTensor, src: End, dst: End, profile: ProfileLike, **options: Any) -> DTensorMove:
    """The move of a DTensor, in its own dtype unless the options say otherwise."""
    by_block = x.grad_fn is not None and x.grad_fn.name() in _MAKERS
    options = {"op_dtype": x.dtype, "out_dtype": x.dtype, **options}
    return DTensorMove(src, dst, profile=asked_for(profile), by_block=by_block, **options)


def local_block(x: DTensor) -> Tensor:
    """This process's block, without history. Raises PlanError if torch cut in an order unlike placements."""
    check_world()
    for entry in getattr(x._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            what = f"mesh dims {entry.mesh_dims} cut dim {entry.tensor_dim} in that order, unlike placements"
            hint = "DTensor.redistribute(placements=...) brings it to the order of the mesh"
            raise PlanError(what, hint=hint)
    with torch.no_grad():
        block = x.to_local()
    return block.wait() if isinstance(block, AsyncCollectiveTensor) else block


def check(move: DTensorMove, shape: Shape, local_shape: Shape) -> None:
    """Raise MeshError unless both meshes have the same processes, ShapeError for another block shape."""
    if sorted(callers(move.src.mesh)) != sorted(callers(move.dst.mesh)):
        hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=...) moves tensors between any two"
        raise MeshError(
            f"{move.src.mesh!r} and {move.dst.mesh!r} are of different processes", hint=hint
        )
    processes = dtensor_mesh(move.src.mesh)
    expected = Sharding(move.src.layout, processes.mesh, shape).local_shape(processes.device)
    if local_shape != expected:
        part = f"that is its part of a {shape} array under '{move.src.layout}'"
        hint = f"{part}; blocks of other sizes need src_layout=, as 'n/sizes(a,2,3) d'"
        what = f"the block of rank {dist.get_rank()} has shape {local_shape}, not {expected}"
        raise ShapeError(what, hint=hint)


def executables(
    move: DTensorMove, x: DTensor, block: Tensor
) -> tuple[Executable | TransferExecutable, ...]:
    """The executables of a move: one, two where a max ends before a sum begins, or none outside the mesh."""
    return _executables(move, tuple(x.shape), tuple(block.shape), block.device, world())


@lru_cache(maxsize=1024)
def _executables(
    move: DTensorMove, shape: Shape, local_shape: Shape, device: torch.device, world: object
) -> tuple[Executable | TransferExecutable, ...]:
    """Cached by the world too: its groups end with it."""
    if not (takes_part(move.src.mesh) or takes_part(move.dst.mesh)):
        return ()
    check(move, shape, local_shape)
    src = dtensor_mesh(move.src.mesh)
    dst = dtensor_mesh(move.dst.mesh)
    same = move.src.mesh == move.dst.mesh
    parts: list[Executable | TransferExecutable] = []
    legs = _legs(move.src.layout, move.dst.layout, same)
    for start, stop in itertools.pairwise(legs):
        if same or stop is not legs[-1]:
            call = MoveCall((start, stop), src, shape, move.profile)
            parts.append(call.executable((local_shape, move.op_dtype, device)))
            local_shape = Sharding(stop, src.mesh, shape).local_shape(src.device)
        else:
            name = dtypes.name_of(move.op_dtype)
            between = TransferCall((start, stop), src, dst, shape, name, False, move.profile)
            parts.append(cross(between.plan(), device, group_of(tuple(sorted(src.ranks)))))
    return tuple(parts)


def _legs(src: Layout, dst: Layout, same: bool) -> list[Layout]:
    """The layouts that a move passes; replicas take the tag of a max: equal values are their own."""
    tags = ([tag for tag in end.tags if tag[0] in NONLINEAR] for end in (src, dst))
    sides = [{(kind, axis) for kind, axes in own for axis in axes} for own in tags]
    kept = sides[0] & sides[1] if same else set()
    ended, begun = (tuple(axis for _, axis in sorted(tags - kept)) for tags in sides)
    target = without_tags(dst, begun)
    return [src, without_tags(src, ended), target] if ended and target.tags else [src, target]


def _gradient_end(move: DTensorMove, here: End, shape: Shape) -> End:
    """The end to which the gradient of a move's input goes when it arrives as `here`."""
    src = move.src
    placements = move.gradient
    if placements is None:
        # If the input has addends, addends of its gradient stay addends: the sum may not be needed.
        arrives = here.placements if here.mesh == src.mesh else [Replicate()] * len(src.placements)

        def of_addend(of: Partial, gradient: Placement) -> Placement:
            stays = of.reduce_op in ("sum", "avg") or not move.by_block
            return gradient if isinstance(gradient, Partial) and stays else Replicate()

        pairs = zip(src.placements, arrives, strict=True)
        placements = tuple(of_addend(of, g) if isinstance(of, Partial) else of for of, g in pairs)
    return _end_like(src, src.mesh, placements, shape)


def _end_like(value: End, mesh: DeviceMesh, placements: Placements, shape: Shape) -> End:
    """The end of a gradient: it has the value's cuts where it has its placements, which lack the sizes."""
    axes = dtensor_axes(mesh)
    pairs = zip(placements, value.placements, strict=False)
    uncut_kinds = Partial | Replicate
    same_cuts = all(p == q or all(isinstance(x, uncut_kinds) for x in (p, q)) for p, q in pairs)
    if mesh != value.mesh or not same_cuts:
        return End(mesh, placements, layout_of(placements, axes, shape))
    uncut = tuple(p if isinstance(p, Partial) else Replicate() for p in placements)
    return End(mesh, placements, replace(value.layout, tags=layout_of(uncut, axes, shape).tags))


def _winner_shares(block: Tensor, move: DTensorMove, shape: Shape) -> Tensor:
    """As `winner_shares`, of this process's operand of a max or min."""
    layout = move.src.layout
    ended = without_tags(layout, layout.tagged(*NONLINEAR))
    call = MoveCall((layout, ended), dtensor_mesh(move.src.mesh), shape, move.profile)
    executable = call.executable((tuple(block.shape), block.dtype, block.device))
    return winner_shares(executable, block, executable(block))


@lru_cache(maxsize=4096)
def layout_of(placements: Placements, axes: Mesh, shape: Shape) -> Layout:
    """The layout of the blocks of a DTensor. Raises as `from_placements` does."""
    return from_placements(placements, axes, len(shape), shape)
