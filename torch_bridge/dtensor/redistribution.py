"""Redistributions of DTensors: by placements, as `DTensor.redistribute`, and by layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_bridge.autodiff.blocks import check_not_swapped
from torch_bridge.autodiff.pending import compare_gradients_of
from torch_bridge.calls.move import MoveCall
from torch_bridge.comm_dtype import CommDtype, comm_dtype_of
from torch_bridge.dtensor import function as moves
from torch_bridge.dtensor.function import DTensorMove, End, RedistributeDTensor
from torch_bridge.dtensor.placements import (
    check_placed,
    gradient_layout,
    positional,
    tag_of,
    to_placements,
)
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh import desync
from torch_bridge.mesh.desync import CallFacts, Compared, Sent, compare_call, derivative_facts
from torch_bridge.mesh.process_mesh import (
    calling_ranks,
    check_device,
    dtensor_axes,
    dtensor_mesh,
    is_in_mesh,
)
from torch_bridge.replicas import comparison_of
from torch_bridge.versions.dtensor import StridedShard
from xshard import Layout, ProfileLike, Sharding, XshardError
from xshard.dtypes import name_of
from xshard.errors import PlanError, ShapeError, api_boundary
from xshard.layout.layout import NONLINEAR
from xshard.plans.expression import sides
from xshard.replicas import ReplicaCheck
from xshard.signatures import short_repr


@api_boundary
def redistribute(  # noqa: PLR0913  the arguments of `DTensor.redistribute`, and layouts
    dtensor: DTensor,
    placements: Sequence[Placement],
    *,
    device_mesh: DeviceMesh | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    src_layout: Layout | str | None = None,
    dst_layout: Layout | str | None = None,
    profile: ProfileLike = "auto",
    debug: bool = False,
) -> DTensor:
    """Place a DTensor in another way, differentiably any number of times.

        y = xt.dtensor.redistribute(x, [Replicate()])      # [Shard(0)] -> [Replicate()]

    Means the same as `DTensor.redistribute`, and takes more: any `Partial` as a destination,
    another mesh of the same processes, blocks of any sizes. The result is a new tensor; its
    gradient has any placements.

    A `Partial("product")`, bitwise `Partial` or `_MaskPartial` has no layout. If it stays, its
    blocks and their gradient move like replicas; otherwise DTensor reduces it first, by its own
    rules and with its own gradient. A process outside the mesh keeps its empty block, as in torch.

    Args:
        dtensor: The DTensor.
        placements: One per dim of the mesh; `Shard(-1)` is the last dim.
        device_mesh: The mesh of the result, of the same processes in any order and shape. None: the
            same mesh.
        forward_dtype: The dtype that travels, and the result's. Default: the input's.
        backward_dtype: The dtype in which the gradient travels; it comes out in the input's dtype.
            Default: the input's.
        grad_placements: The placements of the input's gradient. Default: the input's, `Replicate`
            for `Partial`. The gradient is the array's, as everywhere in DTensor. For a DTensor that
            `from_local` made, it is the blocks': `Partial("avg")` divides it, `Partial("max")`
            gives it to the winners.
        src_layout: The layout of the blocks where placements do not determine it, such as
            `n/sizes(a,2,3) d`. Default: a `Shard` is cut as `torch.chunk` cuts.
        dst_layout: The same for the result.
        profile: As in `xt.redistribute`.
        debug: As in `xt.redistribute`.

    Returns:
        A new DTensor with the same values.

    Raises:
        MeshError: The mesh has other processes; before anything is sent, as for all errors.
        PlanError: The placements have no layout, or DTensor cannot hold them.
        ShapeError: A dim does not exist, or a block has another shape than its layout says.
        NotationError: A layout does not parse.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> import torch_bridge as xt
        >>> def turn():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.arange(6).view(2, 3), mesh, [Shard(0)])
        ...     return xt.dtensor.redistribute(x, [Shard(1)]).to_local().tolist()
        >>> xt.testing.run_ranks(2, turn)
        [[[0, 1], [3, 4]], [[2], [5]]]
    """
    check_not_swapped()
    if not isinstance(dtensor, DTensor):
        hint = "redistribute(x, layouts, mesh) moves tensors"
        raise XshardError(f"{short_repr(dtensor)} is not a DTensor", hint=hint)
    mesh = dtensor.device_mesh if device_mesh is None else device_mesh
    pending_dims = frozenset[int]()  # mesh dims whose reduction has no layout, and stays pending
    if any(map(_has_no_layout, dtensor.placements)):
        if mesh == dtensor.device_mesh:
            pending_dims = _dims_left_pending(dtensor.placements, placements)
        dtensor = _without_reductions(dtensor, pending_dims)

    def prepared() -> DTensorMove:
        """Check the arguments of `redistribute`, and return the move that they mean.

        Nothing is sent. It is called twice in debugging: inside the comparison of ranks, where an
        error on one rank is raised on all, and for the move itself.
        """
        shape = tuple(dtensor.shape)
        src = _end(dtensor.device_mesh, dtensor.placements, shape, src_layout, pending_dims)
        dst = _end(mesh, tuple(placements), shape, dst_layout, pending_dims)
        gradient = None
        if grad_placements is not None:
            gradient = _end(dtensor.device_mesh, tuple(grad_placements), shape).placements
        # One dtype for what is sent and for the result, as in `DTensor.redistribute`.
        dtype = dtensor.dtype if forward_dtype is None else forward_dtype
        move = moves.move_of(
            dtensor,
            src,
            dst,
            profile,
            op_dtype=dtype,
            out_dtype=dtype,
            backward_dtype=backward_dtype,
            gradient=gradient,
        )
        _check_gradient_of_winners(move)
        return move

    # A compiler records what is sent, and cannot ask a store.
    compares = (debug or desync.ALWAYS) and not torch.compiler.is_compiling()
    compared = None
    if compares and (is_in_mesh(dtensor.device_mesh) or is_in_mesh(mesh)):
        compared = _compare_moves(dtensor, mesh, prepared)
    return compare_gradients_of(compared, RedistributeDTensor.apply(dtensor, prepared()), dtensor)


def _has_no_layout(placement: Placement) -> bool:
    """Return whether a placement is a pending reduction that no layout has, as `Partial("product")`."""
    return placement.is_partial() and tag_of(placement) is None


def _without_reductions(dtensor: DTensor, pending_dims: frozenset[int]) -> DTensor:
    """Let torch do the reductions of a DTensor that no layout has, but for those of some mesh dims.

    (Partial("product"), Shard(0)) -> (Replicate(), Shard(0)); with `pending_dims` {0} as it is.
    """
    reduced = []
    for i, placement in enumerate(dtensor.placements):
        is_reduced = _has_no_layout(placement) and i not in pending_dims
        reduced.append(Replicate() if is_reduced else placement)
    if reduced == list(dtensor.placements):
        return dtensor
    return dtensor.redistribute(placements=reduced)


def _dims_left_pending(src: Sequence[Placement], dst: Sequence[Placement]) -> frozenset[int]:
    """Find the mesh dims with a pending reduction that no layout can describe, and that stays pending.

    Layouts have sums, means, maxima and minima, but no products. A product that source and target
    both have stays pending, and need not be described: (Partial("product"), Shard(0)) ->
    (Partial("product"), Replicate()) gives {0}, the index of the mesh dim.

    Raises PlanError if another reduction is pending beside such a one.
    """
    # A subclass of `Partial` stays only if no placement changes, as it may depend on all of them: a
    # `_MaskPartial` knows the rows of its block.
    is_unchanged = tuple(src) == tuple(dst)
    pending_dims = {}
    for i, (placement, target) in enumerate(zip(src, dst, strict=False)):
        may_stay = is_unchanged or type(placement) is Partial
        if may_stay and placement == target and _has_no_layout(placement):
            pending_dims[i] = placement
    # A sum of products is no product of sums: two kinds of reductions would depend on their order.
    all_reductions = {placement for placement in (*src, *dst) if isinstance(placement, Partial)}
    if pending_dims and len(all_reductions.union(pending_dims.values())) > 1:
        hint = "the result depends on their order: reduce one of them first"
        raise PlanError(f"{src} -> {dst} keeps one reduction and has another", hint=hint)
    return frozenset(pending_dims)


def _check_gradient_of_winners(move: DTensorMove) -> None:
    """Raise PlanError for addends as the gradient of a max or min, which goes to one block."""
    if not move.gradient_is_of_blocks or move.gradient is None:
        return
    winner_axes = move.src.layout.tagged(*NONLINEAR)
    axes = dtensor_axes(move.src.mesh).axes
    for axis, placement in zip(axes, move.gradient, strict=False):
        if axis in winner_axes and isinstance(placement, Partial):
            blocks = f"blocks under '{move.src.layout}'"
            reason = f"the gradient of {blocks} goes to the largest, or smallest, of them"
            raise PlanError(reason, hint="grad_placements has Replicate() there")


# Cached: every call asks for both ends.
@lru_cache(maxsize=4096)
def _end(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    layout: Layout | str | None = None,
    pending_dims: frozenset[int] = frozenset(),
) -> End:
    """Describe one end of a DTensor's move, source or target: mesh, placements and layout.

    [Shard(-1)] on a mesh (dp=2), of 2 dims -> (Shard(1),) and the layout "d0 d1/dp". Raises
    PlanError if the placements have no layout, or if the user's layout contradicts them.

    Args:
        mesh: The mesh.
        placements: The placements.
        shape: The global shape.
        layout: The user's layout, as placements do not tell which rows each device has of uneven
            blocks; None: it is inferred from the placements.
        pending_dims: The mesh dims on which a reduction that no layout can describe, such as a
            product, stays pending.
    """
    placements = tuple(_with_positive_dim(placement, len(shape)) for placement in placements)
    # The layout has replicas in place of reductions that stay pending: their values are not touched.
    without_pending = list(placements)
    for i in pending_dims:
        without_pending[i] = Replicate()
    axes = dtensor_axes(mesh)
    # Inferred also if a layout is given: this raises for placements without one.
    inferred = moves.layout_of(tuple(without_pending), axes, shape)
    if layout is None:
        return End(mesh, placements, inferred)
    user_layout = positional(Layout.parse(layout), len(shape))
    # What each axis does, the dim that it cuts or "sum", must be the same in both.
    user_uses = _uses_of_axes(user_layout)
    inferred_uses = _uses_of_axes(inferred)
    for axis, placement in zip(axes.axes, without_pending, strict=True):
        if user_uses.get(axis) != inferred_uses.get(axis):
            hint = "a layout gives sizes and orders for the cuts that the placements name"
            reason = f"'{layout}' contradicts the placement {placement} of axis '{axis}'"
            raise PlanError(reason, hint=hint)
    return End(mesh, placements, user_layout)


def _uses_of_axes(layout: Layout) -> dict[str, int | str]:
    """Return the index of the dim that each axis cuts, or its tag; none for axes of replicas.

    "d0/dp d1 | sum(tp)" -> {"dp": 0, "tp": "sum"}. Copies are placed like replicas.
    """
    uses: dict[str, int | str] = {}
    for d, dim in enumerate(layout.dims):
        uses.update(dict.fromkeys(dim.axes, d))
    for tag, tagged_axes in layout.tags:
        if tag != "copy":
            uses.update(dict.fromkeys(tagged_axes, tag))
    return uses


def _with_positive_dim(placement: Placement, ndim: int) -> Placement:
    """Return the placement with its dim counted from the front: Shard(-1), of 3 dims -> Shard(2).

    Raises ShapeError for a dim that does not exist.
    """
    if not isinstance(placement, Shard | StridedShard):
        return placement
    if not -ndim <= placement.dim < ndim:
        reason = f"no dim {placement.dim} in a DTensor of {ndim} dims"
        raise ShapeError(reason, hint=f"placed as {placement}")
    dim = placement.dim % ndim
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return type(placement)(dim)


def _compare_moves(
    x: DTensor, mesh: DeviceMesh, prepared: Callable[[], DTensorMove]
) -> Compared | None:
    """Check that all ranks of both meshes are about to make the same move of a DTensor.

    Ranks send each other texts that describe the call, and raise DesyncError where they differ.
    Returns what the backward pass compares later; None where there is nothing to compare.

    Args:
        x: The DTensor.
        mesh: The mesh of the result.
        prepared: Checks the arguments and returns the move; an error in it on one rank is raised on
            all.
    """
    ranks = tuple(sorted({*calling_ranks(x.device_mesh), *calling_ranks(mesh)}))
    mesh_text = mesh.mesh_dim_names or mesh.shape

    def facts() -> CallFacts:
        """Check this rank's move, and describe it by texts that ranks compare."""
        move = prepared()
        block = moves.local_block(x)
        check_device(block.device)
        moves.check_move(move, tuple(x.shape), tuple(block.shape))
        equal_on_all = _facts_of(move, x, block.device.type)
        # Blocks may differ in shape between ranks: this is for the text of an error only.
        not_compared = {"block": str(tuple(block.shape))}
        return CallFacts(equal_on_all, peers=ranks, not_compared=not_compared)

    return compare_call(None, f"{x.placements} -> {mesh_text}", facts, ranks)


def _facts_of(move: DTensorMove, x: DTensor, device_type: str) -> dict[str, str]:
    """Describe the move of a DTensor by texts, which must be equal on all ranks.

    {"placements": "(Shard(dim=0),) -> (Replicate(),)", "meshes": ..., ...}: an error says the key
    with which ranks differ.
    """
    facts_of_any_call = Sent(
        shape=tuple(x.shape),
        dtype=x.dtype,
        plan="",  # no text of its own: it follows from placements, meshes and layouts below
        profile=move.profile,
        comm_dtype=f"{move.op_dtype}, {move.backward_dtype}",
        device=device_type,
        **derivative_facts(x),
    ).facts
    return {
        "placements": f"{move.src.placements} -> {move.dst.placements}",
        "meshes": f"{move.src.mesh} -> {move.dst.mesh}",
        "layouts": f"{move.src.layout} -> {move.dst.layout}",
        "gradient": str(move.gradient),
        # Whether the gradient is that of local blocks (the input is from `DTensor.from_local`).
        "of blocks": str(move.gradient_is_of_blocks),
        **facts_of_any_call,
    }


def redistribute_by_layouts(x: DTensor, call: MoveCall, compares: bool, name: str) -> Tensor:
    """Redistribute a DTensor by an expression of layouts, such as "n/dp d -> n d/dp", differentiably.

    Args:
        x: The DTensor.
        call: The expression and its options.
        compares: Whether to check, for debugging, that replicas hold equal values: now and, by a
            hook of the result, those of the gradient in the backward pass.
        name: The tensor's, for errors.
    """
    if compares:
        _compare_replicas(x, call.text, name, cotangents=False)
    y = RedistributeDTensor.apply(x, move_by_layouts(x, call))
    if compares and y.requires_grad:
        compare = partial(_compare_replicas, text=call.text, name=name, cotangents=True)
        y.register_hook(compare)
    return _permute_result(y, call)


def move_by_layouts(x: DTensor, call: MoveCall) -> DTensorMove:
    """Turn an expression of layouts into source and target placements for a DTensor.

    "n/dp d -> n d/dp" on a mesh (dp=2) -> (Shard(0),) to (Shard(1),), and placements of the
    gradient. Raises NotationError unless the DTensor is placed as the left side says.
    """
    src, dst, text = sides(call.expression)
    check_placed(x, src, text)
    mesh = x.device_mesh
    src_layout = positional(src, x.ndim)
    # Placements know dims by index only. The move keeps the left side's order of dims; if the
    # right side has another one, `_permute_result` brings the result to it.
    dst_layout = positional(dst.in_order(src.names), x.ndim)
    dtypes = comm_dtype_of(call.comm_dtype, x.dtype)
    return moves.move_of(
        x,
        End(mesh, x.placements, src_layout),
        End(mesh, to_placements(dst_layout, mesh, x.shape), dst_layout),
        call.profile,
        op_dtype=dtypes.forward,
        out_dtype=x.dtype,
        backward_dtype=dtypes.backward,
        gradient=to_placements(gradient_layout(src_layout), mesh, x.shape),
    )


class LocalMove(NamedTuple):
    """A DTensor's block, the executable that moves it, and a function: the new block -> the DTensor."""

    block: Tensor
    executable: Executable
    finish: Callable[[Tensor], Tensor]


def local_move(x: DTensor, call: MoveCall) -> LocalMove | None:
    """Prepare a DTensor's move so that a caller can run it together with those of other tensors.

    Returns this process's block, the executable that moves the block, and a function that makes a
    DTensor of the moved block: callers join many executables in one collective. Nothing is sent
    here. Returns None if the move must run by itself: if autograd records it, if it has several
    steps, or if it goes to another mesh.
    """
    move = move_by_layouts(x, call)
    block = moves.local_block(x)
    executables = moves.executables(move, x, block)
    # The gradient of a DTensor may have any placements, so a recorded call needs a node of its own
    # in autograd's graph.
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    if is_recorded or len(executables) != 1:
        return None
    (executable,) = executables
    if not isinstance(executable, Executable):
        return None

    def finish(y: Tensor) -> Tensor:
        return _permute_result(move.dst.dtensor(y, x.shape), call)

    travels = CommDtype(move.op_dtype, move.op_dtype, result=x.dtype)
    return LocalMove(block, executable.casting(x.dtype, travels), finish)


def _permute_result(y: DTensor, call: MoveCall) -> Tensor:
    """Return a DTensor with its dims in the order of the right side."""
    src, dst, _ = sides(call.expression)
    src_names = src.resolved(y.ndim).names
    dst_names = dst.resolved(y.ndim).names
    if src_names == dst_names:
        return y
    return y.permute([src_names.index(name) for name in dst_names])


def _compare_replicas(x: DTensor, text: str, name: str, *, cotangents: bool) -> None:
    """Compare the replicas of a DTensor's blocks, as `check_replicated=True` asks for."""
    if not is_in_mesh(x.device_mesh):
        return
    processes = dtensor_mesh(x.device_mesh)
    shape = tuple(x.shape)
    layout = moves.layout_of(x.placements, processes.mesh, shape)
    sharding = Sharding(layout, processes.mesh, shape)
    check = ReplicaCheck(
        sharding=sharding,
        mesh=processes.mesh,
        dtype=name_of(x.dtype),
        text=text,
        cotangents=cotangents,
        name=name,
    )
    comparison = comparison_of(check, processes)
    if comparison is not None:
        comparison(moves.local_block(x))
