"""Redistributions of DTensors: by placements, as `DTensor.redistribute`, and by layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_bridge.autodiff.blocks import check_not_swapped
from torch_bridge.autodiff.pending import watched
from torch_bridge.calls.move import MoveCall
from torch_bridge.comm_dtype import comm_dtype_of
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
from torch_bridge.mesh.desync import CallFacts, Compared, Sent, compare_call, derivatives_of
from torch_bridge.mesh.process_mesh import (
    callers,
    check_device,
    dtensor_axes,
    dtensor_mesh,
    takes_part,
)
from torch_bridge.replicas import comparison_of
from xshard import Layout, ProfileLike, Sharding, XshardError
from xshard.arguments import shown
from xshard.dtypes import name_of
from xshard.errors import PlanError, ShapeError
from xshard.layout.layout import NONLINEAR
from xshard.plans.expression import sides
from xshard.replicas import ReplicaCheck


def redistribute(
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
    """The DTensor under other placements, differentiable any number of times: `[Shard(0)] -> [Replicate()]`.

    Means the same as `DTensor.redistribute`, and takes more: any `Partial` as a destination, another mesh of
    the same processes, blocks of any sizes. The result is a new tensor; its gradient has any placements.

    placements: one per dim of the mesh; `Shard(-1)` is the last dim.
    device_mesh: the mesh of the result, of the same processes in any order and shape; None: the same mesh.
    forward_dtype: the dtype that travels, and the result's. backward_dtype: the dtype in which the
    gradient travels; it comes out in the input's dtype. Default: the input's dtype for both.
    grad_placements: the placements of the input's gradient. Default: the input's, `Replicate` for `Partial`.
    The gradient is the array's, as everywhere in DTensor; for a DTensor that `from_local` made, it is the
    blocks': `Partial("avg")` divides it, `Partial("max")` gives it to the winners.
    src_layout, dst_layout: the layout of the blocks where placements do not determine it, such as
    `n/sizes(a,2,3) d`. Default: a `Shard` is cut as `torch.chunk` cuts.
    profile, debug: as in `redistribute`.
    A `Partial("product")`, bitwise `Partial` or `_MaskPartial` has no layout. If it stays, its blocks and
    their gradient move like replicas; otherwise DTensor reduces it first, by its own rules and with its own
    gradient. A process outside the mesh keeps its empty block, as in torch.

    Raises, before anything is sent, MeshError (other processes), PlanError (placements that have no layout,
    or that DTensor cannot hold), ShapeError, NotationError.

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
        raise XshardError(f"{shown(dtensor)} is not a DTensor", hint=hint)
    mesh = device_mesh or dtensor.device_mesh
    kept = frozenset[int]()
    if any(map(_has_no_tag, dtensor.placements)):
        kept = _kept(dtensor.placements, placements) if mesh == dtensor.device_mesh else kept
        ended = [i for i, p in enumerate(dtensor.placements) if _has_no_tag(p) and i not in kept]
        reduced = [Replicate() if i in ended else p for i, p in enumerate(dtensor.placements)]
        dtensor = dtensor.redistribute(placements=reduced) if ended else dtensor

    def prepared() -> DTensorMove:
        shape = tuple(dtensor.shape)
        own = dtensor.device_mesh
        src = _end(own, dtensor.placements, shape, src_layout, kept)
        dst = _end(mesh, tuple(placements), shape, dst_layout, kept)
        gradient = (
            None if grad_placements is None else _end(own, tuple(grad_placements), shape).placements
        )
        options: Any = (
            {"op_dtype": forward_dtype, "out_dtype": forward_dtype} if forward_dtype else {}
        )
        options |= {"backward_dtype": backward_dtype, "gradient": gradient}
        move = moves.move_of(dtensor, src, dst, profile, **options)
        won = move.src.layout.tagged(*NONLINEAR) if move.by_block else ()
        axes = zip(dtensor_axes(own).axes, gradient or (), strict=False)
        if any(isinstance(p, Partial) and a in won for a, p in axes):
            what = f"the gradient of blocks under '{src.layout}' goes to the largest, or smallest, of them"
            raise PlanError(what, hint="grad_placements has Replicate() there")
        return move

    compares = (debug or desync.ALWAYS) and not torch.compiler.is_compiling()
    compared = None
    if compares and (takes_part(dtensor.device_mesh) or takes_part(mesh)):
        compared = _compare_moves(dtensor, mesh, prepared)
    return watched(compared, RedistributeDTensor.apply(dtensor, prepared()), dtensor)


def _has_no_tag(placement: Placement) -> bool:
    return placement.is_partial() and tag_of(placement) is None


def _kept(src: Sequence[Placement], dst: Sequence[Placement]) -> frozenset[int]:
    """The axes on which a `Partial` without a layout stays. Raises PlanError beside another reduction."""
    everything = tuple(src) == tuple(dst)  # a `_MaskPartial` knows the rows of its block
    stays = [i for i, (p, q) in enumerate(zip(src, dst, strict=False)) if p == q and _has_no_tag(p)]
    kept = frozenset(i for i in stays if everything or type(src[i]) is Partial)
    kinds = {p for i, p in enumerate(src) if i in kept}
    others = [p for p in (*src, *dst) if isinstance(p, Partial) and p not in kinds]
    if len(kinds) > 1 or (kinds and others):
        hint = "the result depends on their order: reduce one of them first"
        raise PlanError(f"{src} -> {dst} keeps one reduction and has another", hint=hint)
    return kept


@lru_cache(maxsize=4096)
def _end(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    layout: Layout | str | None = None,
    kept: frozenset[int] = frozenset(),
) -> End:
    """One end of a move, dims counted from 0; along `kept` blocks differ as no layout says."""
    placements = tuple(_counted_from_0(p, len(shape)) for p in placements)
    read = tuple(Replicate() if i in kept else p for i, p in enumerate(placements))
    axes = dtensor_axes(mesh)
    inferred = moves.layout_of(read, axes, shape)
    if layout is None:
        return End(mesh, placements, inferred)
    explicit = positional(Layout.parse(layout), len(shape))
    for axis, placement in zip(axes.axes, read, strict=True):
        cut = next((d for d, dim in enumerate(explicit.dims) if axis in dim.axes), None)
        tag = next(
            (kind for kind, tagged in explicit.tags if axis in tagged and kind != "copy"), None
        )
        if (cut, tag) != (getattr(placement, "dim", None), tag_of(placement)):
            hint = "a layout gives sizes and orders for the cuts that the placements name"
            raise PlanError(
                f"'{layout}' contradicts the placement {placement} of axis '{axis}'", hint=hint
            )
    return End(mesh, placements, explicit)


def _counted_from_0(placement: Placement, ndim: int) -> Placement:
    """The placement with its dim counted from the front. Raises ShapeError for a dim that does not exist."""
    if not isinstance(placement, Shard | _StridedShard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise ShapeError(
            f"no dim {placement.dim} in a DTensor of {ndim} dims", hint=f"placed as {placement}"
        )
    factor = (
        {"split_factor": placement.split_factor} if isinstance(placement, _StridedShard) else {}
    )
    return type(placement)(placement.dim % ndim, **factor)


def _compare_moves(
    x: DTensor, mesh: DeviceMesh, prepared: Callable[[], DTensorMove]
) -> Compared | None:
    """Raise on all ranks of the meshes unless all of them are about to make this move, and can."""
    ranks = tuple(sorted({*callers(x.device_mesh), *callers(mesh)}))
    asked = f"{x.placements} -> {mesh.mesh_dim_names or mesh.shape}"

    def facts() -> CallFacts:
        move = prepared()
        block = moves.local_block(x)
        everywhere = {
            "placements": f"{move.src.placements} -> {move.dst.placements}",
            "meshes": f"{move.src.mesh} -> {move.dst.mesh}",
            "layouts": f"{move.src.layout} -> {move.dst.layout}",
            "gradient": str(move.gradient),
            "of blocks": str(move.by_block),
        }
        sent = {
            "comm_dtype": f"{move.op_dtype}, {move.backward_dtype}",
            "device": block.device.type,
        }
        everywhere |= Sent(
            tuple(x.shape), x.dtype, "", move.profile, **sent, **derivatives_of(x)
        ).facts
        check_device(block.device)
        moves.check(move, tuple(x.shape), tuple(block.shape))
        return CallFacts(everywhere, {}, ranks, {"block": str(tuple(block.shape))})

    return compare_call(None, asked, facts, ranks)


def redistribute_by_layouts(x: DTensor, call: MoveCall, compares: bool, name: str) -> Tensor:
    """The DTensor after a call. compares: whether replicas are compared; name: the tensor's, for errors."""
    if compares:
        _compare_replicas(x, call.text, name, cotangents=False)
    y = RedistributeDTensor.apply(x, move_by_layouts(x, call))
    if compares and y.requires_grad:
        y.register_hook(
            lambda gradient: _compare_replicas(gradient, call.text, name, cotangents=True)
        )
    return _permuted(y, call)


def move_by_layouts(x: DTensor, call: MoveCall) -> DTensorMove:
    """The move of a call. Raises NotationError unless the DTensor is placed as the left side says."""
    src, dst, text = sides(call.expression)
    check_placed(x, src, text)
    src, dst = (positional(side, x.ndim) for side in (src, dst.in_order(src.names)))
    travels = comm_dtype_of(call.comm_dtype, x.dtype)
    mesh = x.device_mesh
    gradient = to_placements(gradient_layout(src), x.device_mesh, x.shape)
    here = End(mesh, x.placements, src)
    there = End(mesh, to_placements(dst, mesh, x.shape), dst)
    options: Any = {
        "op_dtype": travels.forward,
        "backward_dtype": travels.backward,
        "gradient": gradient,
    }
    return moves.move_of(x, here, there, call.profile, **options)


def local_part(
    x: DTensor, call: MoveCall
) -> tuple[Tensor, Executable, Callable[[Tensor], Tensor]] | None:
    """The block, its executable on one mesh, and the function to the DTensor's result; None if recorded."""
    move = move_by_layouts(x, call)
    block = moves.local_block(x)
    parts = moves.executables(move, x, block)
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    if is_recorded or len(parts) != 1 or not isinstance(executable := parts[0], Executable):
        return None

    def finish(y: Tensor) -> Tensor:
        return _permuted(move.dst.dtensor(y, x.shape), call)

    return block, executable.casting(x.dtype, move.op_dtype), finish


def _permuted(y: DTensor, call: MoveCall) -> Tensor:
    """A DTensor with its dims in the order of the right side."""
    src, dst, _ = sides(call.expression)
    names, order = (side.resolved(y.ndim).names for side in (src, dst))
    return y if names == order else y.permute([names.index(name) for name in order])


def _compare_replicas(x: DTensor, text: str, name: str, *, cotangents: bool) -> None:
    if not takes_part(x.device_mesh):
        return
    processes = dtensor_mesh(x.device_mesh)
    shape = tuple(x.shape)
    sharding = Sharding(moves.layout_of(x.placements, processes.mesh, shape), processes.mesh, shape)
    check = ReplicaCheck(sharding, processes.mesh, name_of(x.dtype), text, cotangents, name)
    comparison = comparison_of(check, processes)
    if comparison is not None:
        comparison(moves.local_block(x))
