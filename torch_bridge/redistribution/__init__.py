"""`redistribute`: one verb for tensors, DTensors and trees, on one mesh or between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor, check_not_swapped, is_dtensor
from torch_bridge.autodiff.pending import PendingTensor, watched
from torch_bridge.calls.move import PLAIN, MoveCall, named
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.redistribution.blocks import (
    Endpoints,
    call_of,
    compare,
    move_one,
    redistribute_between,
)
from torch_bridge.redistribution.tree import redistribute_tree, transfer_tree
from xshard.cost.model import ProfileLike
from xshard.errors import MeshError, PlanError
from xshard.notation.maps import Maps
from xshard.plans.plan import Plan

__all__ = ["redistribute"]

T = TypeVar("T")


@overload
def redistribute(
    x: T,
    layouts: Any,
    mesh: MeshLike | None = None,
    *,
    async_op: Literal[False] = False,
    **options: Any,
) -> T: ...


@overload
def redistribute(
    x: Tensor, layouts: Any, mesh: MeshLike | None = None, *, async_op: bool, **options: Any
) -> Tensor | PendingTensor: ...


def redistribute(  # type: ignore[misc]  # the overloads leave its options open
    x: Any,
    layouts: Any,
    mesh: MeshLike | None = None,
    *,
    src_mesh: MeshLike | None = None,
    dst_mesh: MeshLike | None = None,
    shape: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    relabel: bool = False,
    profile: ProfileLike = "auto",
    comm_dtype: CommDtypeLike = None,
    bucket_bytes: int | str | None = None,
    async_op: bool = False,
    debug: bool = False,
    check_replicated: bool | None = None,
    maps: Maps | None = None,
) -> Any:
    """Move this process's block from the left layout to the right one, differentiably.

    All processes of the mesh call it, with equal arguments except the values of `x`, and with equal
    `requires_grad`. The result is a new tensor, contiguous unless dims change their order (`n/dp d -> d n` is
    a view of the received tensor). On `meta` it has the shape and dtype alone, and nothing is sent.

    x: a tensor, a DTensor (placed as the left layout says; the result is one too, but between two meshes a
    block), or a list, dict or tree of them. The tensors of a tree share collectives if they have one dtype
    and the same steps over the same processes, forward and backward.
    layouts: `"layout -> layout"`, a pair of layouts, or a plan (`x` must have its dtype), which is run as it
    is. Axes that they do not name are left alone: blocks may differ along them. For a tree: one for all
    tensors, `xshard.Rules` over their names (`"layers.*.weight"`), or a list or dict nested like the tree,
    with either in the place of a branch.
    mesh: a `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; a DTensor brings its own.
    src_mesh, dst_mesh: two meshes instead of one; all processes of the world call it. Each may be a part of
    the world; device i of an `xshard.Mesh` is rank i. `x` is None on processes outside the source, and so is
    the result on processes outside the destination. A plan needs no mesh: its device numbers are ranks.
    shape: the global shape, needed between two meshes, and if blocks differ in size and the layout does not
    give their sizes, as `n/sizes(dp,2,3)` does. Without it all blocks are assumed to have the shape of `x`:
    if they do not, processes make different plans. For a tree: nested like `layouts`.
    profile: the machine to plan for.
    comm_dtype: the dtype in which blocks travel and are added, or a pair for forward and backward; None is
    the dtype of `x`. A narrower one compresses, a wider one adds exactly.
    bucket_bytes: about how many bytes of a tree a device sends together; all, the default, needs a copy.
    async_op: return at once, with a `PendingTensor` that any use waits for, in one order on all processes.
    debug: first compare the call with the other ranks' calls, and later its gradient: if they differ or one
    of them fails, all of them raise DesyncError and none waits. Also: `XSHARD_DEBUG=1`.
    check_replicated: for debugging, compare the replicas and copies of `x` along the axes that the layouts
    name, and the cotangents' in the backward pass. Default: XSHARD_CHECK_REPLICATED.
    maps: the `Owners` and `Needs` that layouts name; in compiled code they end a graph, and text with
    digests, `str(layout)`, does not.
    dtype, device, requires_grad, relabel: with two meshes only. dtype: the array's, for processes without a
    block. device: the result's there. requires_grad: the blocks get a gradient: processes outside the
    destination get an empty tensor, and all of them call `backward` (`y.sum().backward()` will do there).
    relabel: as in `xshard.plan`.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, LinearityError
    (the gradient is not defined), on all processes, with the name of the tensor in a tree; ShapeError for
    a block that does not fit, on its own process: unless all processes raise it, the others wait for the
    group's timeout, or raise too with `debug`. DesyncError, on all processes, if they run different plans
    that none of them has used before. CollectiveError, on the others, when a process of the mesh has
    ended. With `check_replicated` ReplicaError, on all processes, here or in the backward pass.

    >>> import torch, torch.distributed as dist, torch_bridge as xt, xshard as xs
    >>> def turn():
    ...     x = torch.full((1, 4), dist.get_rank())
    ...     return xt.redistribute(x, "s/cp c -> s c/cp", xs.Mesh(cp=2))
    >>> [y.tolist() for y in xt.testing.run_ranks(2, turn)]
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    >>> def gather():
    ...     model = {"w": torch.ones(2, 3), "b": torch.ones(1)}
    ...     moved = xt.redistribute(model, {"w": "n d/tp -> n d", "b": "n/tp -> n"}, xs.Mesh(tp=2))
    ...     return {name: tuple(x.shape) for name, x in moved.items()}
    >>> xt.testing.run_ranks(2, gather)[0]
    {'w': (2, 6), 'b': (2,)}
    """
    if maps is not None:
        layouts = named(layouts, maps)
    if torch.compiler.is_compiling():
        from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

        options: dict[str, Any] = {"shape": shape, "profile": profile, "comm_dtype": comm_dtype}
        is_dynamo = torch.compiler.is_dynamo_compiling()
        if isinstance(x, Tensor) and src_mesh is None and dst_mesh is None:
            if check_replicated and not is_dynamo:
                what = "check_replicated compares on the host, which an exported program cannot"
                raise PlanError(what, hint="it is for debugging: leave it out")
            if not check_replicated and compiled.is_recorded([x], layouts, mesh, profile):
                return compiled.recorded("redistribute", [x], layouts, mesh, options, async_op)
        if is_dynamo:
            options |= {
                "src_mesh": src_mesh,
                "dst_mesh": dst_mesh,
                "dtype": dtype,
                "device": device,
            }
            options |= {
                "requires_grad": requires_grad,
                "relabel": relabel,
                "bucket_bytes": bucket_bytes,
            }
            options |= {"async_op": async_op, "debug": debug, "check_replicated": check_replicated}
            return compiled.eagerly(redistribute, x, layouts, mesh, **options)
    check_not_swapped()
    debug = debug or desync.ALWAYS
    is_tree = type(x) not in PLAIN and isinstance(x, Mapping | list | tuple)
    if is_tree and async_op:
        raise PlanError("async_op is for one tensor", hint="a tree arrives when the call returns")
    two_meshes = src_mesh is not None or dst_mesh is not None or requires_grad or relabel
    two_meshes = two_meshes or x is None or dtype is not None or device is not None
    if type(layouts) is Plan:  # without a mesh its device numbers have to be ranks
        is_block = isinstance(x, Tensor) and not is_dtensor(x)
        two_meshes = two_meshes or bool(layouts.transfer) or (mesh is None and is_block)
    if two_meshes:
        if mesh is not None or async_op or comm_dtype is not None:
            what = "mesh=, async_op= and comm_dtype= are for one mesh; dtype=, device=, requires_grad= and "
            hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=..., shape=..., dtype=...)"
            raise MeshError(f"{what}relabel= are for two", hint=hint)
        endpoints = Endpoints(src_mesh, dst_mesh, dtype, device, requires_grad, relabel, profile)
        between = transfer_tree if is_tree else redistribute_between
        return between(x, layouts, shape, endpoints, debug, check_replicated)
    arguments = layouts, mesh, shape, profile, comm_dtype
    if is_tree:
        return redistribute_tree(x, arguments, bucket_bytes, debug, check_replicated)
    x = x if type(x) in PLAIN else as_tensor(x)
    compared = compare(x, arguments, async_op, check_replicated) if debug else None
    call = MoveCall.of(*arguments) if type(x) in PLAIN else call_of(x, *arguments)
    y = move_one(x, call, async_op, check_replicated)
    return watched(compared, y, x) if compared else y
