"""The differentiable move of a DTensor: a plan for its block, and another for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_bridge.autodiff.function import share_among_winners
from torch_bridge.calls.move import MoveCall, TransferCall
from torch_bridge.dtensor.placements import (
    dtensor_of,
    from_placements,
    gradient_layout,
    to_placements,
)
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.transfer import TransferExecutable, lower_transfer
from torch_bridge.mesh.process_groups import process_group_of
from torch_bridge.mesh.process_mesh import (
    calling_ranks,
    check_world,
    dtensor_axes,
    dtensor_mesh,
    is_in_mesh,
    world_key,
)
from torch_bridge.versions.autograd import FROM_LOCAL_NODE
from torch_bridge.versions.dtensor import AsyncCollectiveTensor, shard_order
from xshard import Layout, Mesh, ProfileLike, Sharding, dtypes
from xshard.cost.machine import AUTO, resolve_profile
from xshard.errors import MeshError, PlanError, ShapeError
from xshard.layout.layout import NONLINEAR
from xshard.steps.base import without_tags

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]
AnyExecutable = Executable | TransferExecutable
# The nodes of autograd that make a DTensor of a block, torch's and the one of `_OfCopies`: its
# gradient is the block's, not the array's.
_MAKERS = (FROM_LOCAL_NODE, "_OfCopiesBackward")


@dataclass(frozen=True)
class End:
    """How a DTensor is placed on a mesh, and the layout of its blocks."""

    mesh: DeviceMesh
    placements: Placements
    layout: Layout

    def dtensor(self, block: Tensor, shape: Sequence[int]) -> DTensor:
        """Return the DTensor of global `shape` that has this block."""
        return dtensor_of(block, self.mesh, self.placements, shape)


@dataclass(frozen=True)
class DTensorMove:
    """The move of a DTensor.

    Attributes:
        src: The source.
        dst: The target.
        op_dtype: The dtype that travels.
        out_dtype: The dtype of the result.
        profile: The machine to plan for.
        backward_dtype: The dtype in which the gradient travels; None: the input's.
        gradient: The placements of the input's gradient; None: by default rules.
        gradient_is_of_blocks: Whether `DTensor.from_local` made the input, so that its gradient is that of
            the local blocks, and not of the array.
    """

    src: End
    dst: End
    op_dtype: torch.dtype
    out_dtype: torch.dtype
    profile: ProfileLike
    backward_dtype: torch.dtype | None = None
    gradient: Placements | None = None
    gradient_is_of_blocks: bool = False


class RedistributeDTensor(torch.autograd.Function):
    """The move of a DTensor as a function of autograd, differentiable any number of times.

    `RedistributeDTensor.apply(x, move)` is the DTensor after the move.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, move: DTensorMove) -> DTensor:
        """Run the executables of the move on this process's block."""
        block = local_block(x)
        ctx.move = move
        ctx.dtype = block.dtype
        if (
            move.gradient_is_of_blocks
            and move.src.layout.tagged(*NONLINEAR)
            and is_in_mesh(move.src.mesh)
        ):
            ctx.save_for_backward(block)  # the backward pass asks which blocks were the largest
        block = block.to(move.op_dtype)
        # None outside of the mesh: there the empty block stays as it is.
        for executable in executables(move, x, block):
            block = executable(block)
        return move.dst.dtensor(block.to(move.out_dtype), x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        """Redistribute the gradient of the result to the placements of the input's gradient.

        A move (Shard(0),) -> (Replicate(),) gets a gradient in any placements, and returns it as
        (Shard(0),). An input in partial sums gets a gradient in replicas. The second value returned
        is for the argument `move`, which has no gradient.
        """
        move: DTensorMove = ctx.move
        shape = tuple(gradient.shape)
        arriving = _end_like(move.dst, gradient.device_mesh, gradient.placements, shape)
        target = _gradient_end(move, arriving, shape)
        travel_dtype = ctx.dtype if move.backward_dtype is None else move.backward_dtype
        backward_move = DTensorMove(
            src=arriving,
            dst=target,
            op_dtype=travel_dtype,
            out_dtype=ctx.dtype,
            profile=move.profile,
        )
        # `apply` again: the backward pass can be differentiated too.
        moved = RedistributeDTensor.apply(gradient, backward_move)
        if not move.gradient_is_of_blocks:
            return moved, None
        # So far it is the gradient of the whole array. `DTensor.from_local` made the input of local
        # blocks, which want their own. The array was their mean: each block gets 1/n of it. Or it
        # was their maximum: the largest block gets all, the others zeros (`_winner_shares`).
        n_averaged = dtensor_axes(move.src.mesh).size(*move.src.layout.tagged("mean"))
        if n_averaged > 1:
            moved = moved / n_averaged
        if ctx.saved_tensors:
            (block,) = ctx.saved_tensors
            moved = moved * target.dtensor(_winner_shares(block, move, shape), shape)
        return moved, None


class _OfCopies(torch.autograd.Function):
    """Blocks that are copies, as a DTensor of replicas whose gradients are addends.

    `DTensor.from_local` assumes that gradients of `Replicate` are replicas, as of torch 2.13.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Tensor,
        layout: Layout,
        mesh: DeviceMesh,
        shape: Shape,
        profile: ProfileLike,
    ) -> DTensor:
        # The gradient of copies is partial: its addends are the dual of the layout.
        ctx.gradient_mesh = mesh
        ctx.profile = profile
        ctx.gradient_placements = to_placements(gradient_layout(layout), mesh, shape)
        return dtensor_of(block, mesh, to_placements(layout, mesh, shape), shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None, None, None]:
        """Move the gradient to the placements of addends, and return its block."""
        shape = tuple(gradient.shape)
        arrives = _end(gradient.device_mesh, gradient.placements, shape)
        target = _end(ctx.gradient_mesh, ctx.gradient_placements, shape)
        move = DTensorMove(
            src=arrives,
            dst=target,
            op_dtype=gradient.dtype,
            out_dtype=gradient.dtype,
            profile=ctx.profile,
        )
        return RedistributeDTensor.apply(gradient, move).to_local(), None, None, None, None


def _end(mesh: DeviceMesh, placements: Placements, shape: Shape) -> End:
    """Return an end of a gradient's move, cut as torch cuts."""
    return End(mesh, placements, layout_of(placements, dtensor_axes(mesh), shape))


def dtensor_of_block(
    local: Tensor,
    layout: Layout,
    mesh: DeviceMesh,
    shape: Sequence[int],
    profile: ProfileLike = AUTO,
) -> DTensor:
    """Return the DTensor of global `shape` that has a local block under `layout`.

    Args:
        local: This process's block.
        layout: The layout.
        mesh: The mesh of the DTensor.
        shape: The global shape.
        profile: The machine for which the moves of its gradient are planned, and the order of their sums.
    """
    if layout.tagged("copy"):  # gradients of copies are partial; a DTensor assumes `Replicate`
        return _OfCopies.apply(local, layout, mesh, tuple(shape), resolve_profile(profile))
    return dtensor_of(local, mesh, to_placements(layout, mesh, shape), shape)


def move_of(
    x: DTensor,
    src: End,
    dst: End,
    profile: ProfileLike,
    *,
    op_dtype: torch.dtype,
    out_dtype: torch.dtype,
    backward_dtype: torch.dtype | None,
    gradient: Placements | None,
) -> DTensorMove:
    """Describe a redistribution of a DTensor, without running it.

    Args:
        x: The DTensor.
        src: Mesh, placements and layout of the input.
        dst: Those of the result.
        profile: The machine to plan for.
        op_dtype: The dtype of the values that are sent.
        out_dtype: The dtype of the result.
        backward_dtype: The dtype of the gradient while it is sent; None: its own.
        gradient: Placements of the input's gradient; None: they follow from `src`.
    """
    # If local blocks were made into x, as by `DTensor.from_local`, its gradient is that of blocks.
    gradient_is_of_blocks = x.grad_fn is not None and x.grad_fn.name() in _MAKERS
    profile = resolve_profile(profile)
    return DTensorMove(
        src=src,
        dst=dst,
        op_dtype=op_dtype,
        out_dtype=out_dtype,
        profile=profile,
        backward_dtype=backward_dtype,
        gradient=gradient,
        gradient_is_of_blocks=gradient_is_of_blocks,
    )


def local_block(x: DTensor) -> Tensor:
    """Return this process's block, without history.

    Raises PlanError if torch has cut a dim in an order that placements do not say.
    """
    check_world()
    _check_shard_order(x)
    with torch.no_grad():
        block = x.to_local()
    # A DTensor's own collective may still be under way.
    return block.wait() if isinstance(block, AsyncCollectiveTensor) else block


def _check_shard_order(x: DTensor) -> None:
    """Raise PlanError unless mesh dims have cut each dim in the order of the mesh.

    Blocks in another order than placements say would be moved as if they were in order.
    """
    for entry in shard_order(x):
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            cut = f"mesh dims {entry.mesh_dims} cut dim {entry.tensor_dim}"
            hint = "DTensor.redistribute(placements=...) brings it to the order of the mesh"
            raise PlanError(f"{cut} in that order, unlike placements", hint=hint)


def check_move(move: DTensorMove, shape: Shape, local_shape: Shape) -> None:
    """Raise MeshError for meshes of different processes, ShapeError for another block shape."""
    if sorted(calling_ranks(move.src.mesh)) != sorted(calling_ranks(move.dst.mesh)):
        hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=...) moves tensors between any two"
        reason = f"{move.src.mesh!r} and {move.dst.mesh!r} are of different processes"
        raise MeshError(reason, hint=hint)
    # Blocks that torch cut unevenly, or that a user made, may have any size.
    processes = dtensor_mesh(move.src.mesh)
    expected = Sharding(move.src.layout, processes.mesh, shape).local_shape(processes.device)
    if local_shape != expected:
        expected_block = f"that is its part of a {shape} array under '{move.src.layout}'"
        hint = f"{expected_block}; blocks of other sizes need src_layout=, as 'n/sizes(a,2,3) d'"
        reason = f"the block of rank {dist.get_rank()} has shape {local_shape}, not {expected}"
        raise ShapeError(reason, hint=hint)


def executables(move: DTensorMove, x: DTensor, block: Tensor) -> tuple[AnyExecutable, ...]:
    """Return the executables of a move, in order: none on processes outside of the mesh.

    There are two where a max or min ends before another tag begins.
    """
    return _executables(move, tuple(x.shape), tuple(block.shape), block.device, world_key())


# Cached by the world too: its groups end with it.
@lru_cache(maxsize=1024)
def _executables(
    move: DTensorMove, shape: Shape, local_shape: Shape, device: torch.device, world: object
) -> tuple[AnyExecutable, ...]:
    """Plan a move of a DTensor; return the executables that run it, one after the other.

    On one mesh each of the one or two steps is a plan of collectives. A move to another mesh ends
    with messages from rank to rank. Outside of both meshes there is nothing to run: ().

    Args:
        move: The move.
        shape: The global shape.
        local_shape: The shape of this process's block.
        device: The device of blocks.
        world: Identifies the process groups to which executables are bound; a key of the cache
            only.
    """
    if not (is_in_mesh(move.src.mesh) or is_in_mesh(move.dst.mesh)):
        return ()
    check_move(move, shape, local_shape)
    src = dtensor_mesh(move.src.mesh)
    dst = dtensor_mesh(move.dst.mesh)
    is_same_mesh = move.src.mesh == move.dst.mesh
    steps = _steps(move.src.layout, move.dst.layout, is_same_mesh)
    bound_steps: list[AnyExecutable] = []
    steps_on_src = steps if is_same_mesh else steps[:-1]
    for start, stop in steps_on_src:
        call = MoveCall((start, stop), src, shape, move.profile)
        bound_steps.append(call.executable((local_shape, move.op_dtype, device)))
        # The block with which the next step begins.
        local_shape = Sharding(stop, src.mesh, shape).local_shape(src.device)
    if not is_same_mesh:
        dtype = dtypes.name_of(move.op_dtype)
        transfer = TransferCall(steps[-1], src, dst, shape, dtype, profile=move.profile)
        group = process_group_of(tuple(sorted(src.ranks)))
        bound_steps.append(lower_transfer(transfer.plan(), device, group))
    return tuple(bound_steps)


def _steps(src: Layout, dst: Layout, is_same_mesh: bool) -> list[tuple[Layout, Layout]]:
    """Divide a redistribution into one or two steps, each a pair (layout before, layout after).

    "n | max(a)" is a pending maximum, `Partial("max")`: blocks along axis a are still to be reduced.
    It is reduced before a pending sum begins, as the two do not commute: "n | max(a)" ->
    "n | sum(a)" are the steps ("n | max(a)", "n") and ("n", "n | sum(a)").

    A maximum that only dst has needs no work, and is left out: equal replicas are their own maximum.
    One that both have on an axis stays pending, if it is on the same mesh.
    """
    src_tags = _nonlinear_tags(src)  # {("max", "a")}
    dst_tags = _nonlinear_tags(dst)
    pending_tags = src_tags & dst_tags if is_same_mesh else set()
    ended_axes = [axis for _, axis in src_tags - pending_tags]
    begun_axes = [axis for _, axis in dst_tags - pending_tags]
    target = without_tags(dst, begun_axes)
    if not ended_axes or not target.tags:
        return [(src, target)]
    between = without_tags(src, ended_axes)
    return [(src, between), (between, target)]


def _nonlinear_tags(layout: Layout) -> set[tuple[str, str]]:
    """Return the axes of a max or min, each with its kind."""
    tags = set()
    for kind, axes in layout.tags:
        if kind in NONLINEAR:
            tags.update({(kind, axis) for axis in axes})
    return tags


def _gradient_end(move: DTensorMove, arriving: End, shape: Shape) -> End:
    """Choose the mesh and the placements of the gradient of a move's input.

    They are those that the user asked for, or by default those of the input, on its mesh, with
    replicas in place of partial sums: an input (Shard(0), Partial()) has a gradient
    (Shard(0), Replicate()).

    Args:
        move: The move.
        arriving: Mesh and placements of the gradient of the move's result.
        shape: The global shape.
    """
    src = move.src
    if move.gradient is not None:
        return _end_like(src, src.mesh, move.gradient, shape)
    arriving_placements = arriving.placements
    if arriving.mesh != src.mesh:
        # Partial sums on another mesh are summed on the way: on this mesh they are replicas.
        arriving_placements = (Replicate(),) * len(src.placements)
    source_and_arriving = zip(src.placements, arriving_placements, strict=True)
    placements = tuple(
        _gradient_placement(p, g, move.gradient_is_of_blocks) for p, g in source_and_arriving
    )
    return _end_like(src, src.mesh, placements, shape)


def _gradient_placement(
    placement: Placement, gradient: Placement, gradient_is_of_blocks: bool
) -> Placement:
    """Choose the placement of an input's gradient on one mesh dim, if the user has not said any.

    Shard(0) for an input Shard(0); Replicate() for an input Partial(). But if the gradient arrives
    as Partial(), too, it stays so: its sum may not be needed.

    Args:
        placement: The placement of the input.
        gradient: The placement of the gradient as it arrives.
        gradient_is_of_blocks: Whether it is the gradient of blocks, and not of the array.
    """
    if not isinstance(placement, Partial):
        return placement
    may_stay = placement.reduce_op in ("sum", "avg") or not gradient_is_of_blocks
    if may_stay and isinstance(gradient, Partial):
        return gradient
    return Replicate()


def _end_like(value: End, mesh: DeviceMesh, placements: Placements, shape: Shape) -> End:
    """Describe mesh, placements and layout of a gradient, whose blocks may be as uneven as its value's.

    Placements lack the sizes of blocks. A gradient that is placed like its value has blocks of the same
    sizes; any other is cut as torch cuts.

    Args:
        value: Mesh, placements and layout of the value.
        mesh: The mesh of the end.
        placements: The placements.
        shape: The global shape.
    """
    if mesh != value.mesh or not all(map(_are_cut_alike, placements, value.placements)):
        return _end(mesh, placements, shape)
    # The value's cuts, with the gradient's own tags.
    uncut = tuple(
        placement if isinstance(placement, Partial) else Replicate() for placement in placements
    )
    tags = layout_of(uncut, dtensor_axes(mesh), shape).tags
    return End(mesh, placements, replace(value.layout, tags=tags))


def _are_cut_alike(placement_a: Placement, placement_b: Placement) -> bool:
    """Return whether two placements cut the same dim, or none, in the same way."""
    uncut_kinds = Partial | Replicate
    are_uncut = isinstance(placement_a, uncut_kinds) and isinstance(placement_b, uncut_kinds)
    return are_uncut or placement_a == placement_b


def _winner_shares(block: Tensor, move: DTensorMove, shape: Shape) -> Tensor:
    """Return what `share_among_winners` says of this process's operand of a max or min."""
    layout = move.src.layout
    ended = without_tags(layout, layout.tagged(*NONLINEAR))
    call = MoveCall((layout, ended), dtensor_mesh(move.src.mesh), shape, move.profile)
    executable = call.executable((tuple(block.shape), block.dtype, block.device))
    return share_among_winners(executable, block, executable(block))


@lru_cache(maxsize=4096)
def layout_of(placements: Placements, axes: Mesh, shape: Shape) -> Layout:
    """Return the layout of the blocks of a DTensor, cached. Raises as `from_placements` does."""
    return from_placements(placements, axes, len(shape), shape)
