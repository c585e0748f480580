"""`redistribute`: one verb for tensors, DTensors and trees, on one mesh or between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor, check_not_swapped
from torch_bridge.autodiff.pending import PendingTensor, compare_gradients_of
from torch_bridge.calls.move import PLAIN_TYPES, MoveCall, with_maps_between_graphs
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.redistribution.blocks import call_of, compare, move_one, redistribute_between
from torch_bridge.redistribution.options import (
    MoveKeywords,
    Options,
    TwoMeshKeywords,
    TwoMeshOptions,
)
from torch_bridge.redistribution.tree import redistribute_tree, transfer_tree
from xshard.cost.machine import with_addends
from xshard.cost.model import FREE, Addends, ProfileLike
from xshard.errors import PlanError, XshardError, check_arguments, end_at_user
from xshard.notation.maps import Maps
from xshard.notation.parser import with_map_digests
from xshard.plans.expression import LayoutsLike
from xshard.plans.plan import Plan
from xshard.signatures import Bytes

__all__ = ["redistribute"]

T = TypeVar("T")


@overload
def redistribute(
    x: Tensor,
    layouts: LayoutsLike,
    mesh: MeshLike | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[MoveKeywords],
) -> PendingTensor: ...


@overload
def redistribute(
    x: None, layouts: LayoutsLike, **options: Unpack[MoveKeywords]
) -> Tensor | None: ...


@overload
def redistribute(
    x: T,
    layouts: LayoutsLike,
    mesh: MeshLike | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[MoveKeywords],
) -> T: ...


@overload
def redistribute(
    x: Any,
    layouts: Any,
    mesh: MeshLike | None = None,
    *,
    async_op: bool,
    **options: Unpack[MoveKeywords],
) -> Any: ...


def redistribute(  # noqa: PLR0913  one verb for all moves: most calls pass three of its options
    x: Any,
    layouts: LayoutsLike,
    mesh: MeshLike | None = None,
    *,
    shape: Any = None,
    profile: ProfileLike = "auto",
    comm_dtype: CommDtypeLike = None,
    addends: Addends = FREE,
    bucket_bytes: Bytes = None,
    async_op: bool = False,
    debug: bool = False,
    check_replicated: bool | None = None,
    maps: Maps | None = None,
    **two_meshes: Unpack[TwoMeshKeywords],
) -> Any:
    """Move this process's block from one layout to another, differentiably.

        y = xt.redistribute(x, "s/cp c -> s c/cp", mesh)     # [s/4, c] -> [s, c/4] on 4 processes

    All processes of the mesh call it. Their arguments are equal, except the values of `x`; so is
    `requires_grad`. The result is a new tensor. It is contiguous unless dims change their order
    (`n/dp d -> d n` is a view of the received tensor). On `meta` it has the shape and dtype alone, and
    nothing is sent.

    Args:
        x: A tensor, a DTensor, or a list, dict or tree of them. A DTensor is placed as the left layout
            says, and the result is one too, but between two meshes a block. The tensors of a tree share
            collectives if they have one dtype and the same steps over the same processes, forward and
            backward.
        layouts: `"layout -> layout"`, a pair of layouts, or a plan, which is run as it is (`x` has its
            dtype). Axes that they do not name are left alone: blocks may differ along them. For a tree:
            one for all tensors, `xshard.Rules` over their names (`"layers.*.weight"`), or a list or dict
            nested like the tree, with either in the place of a branch.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world. A DTensor brings its own.
        shape: The global shape. Without it all blocks are assumed to have the shape of `x`: if they do
            not, processes make different plans. Pass it between two meshes, and if blocks differ in size
            and the layout does not give their sizes, as `n/sizes(dp,2,3)` does. For a tree: nested like
            `layouts`.
        profile: The machine to plan for.
        comm_dtype: The dtype in which blocks travel and are added, or a pair for forward and backward.
            None is the dtype of `x`. A narrower one compresses, a wider one adds exactly.
        addends: "ranks" adds in the order of ranks, forward and backward: every path gives equal bits. By
            default, "free", backends add in an order of their own, and less may travel.
        bucket_bytes: About how many bytes of a tree a device sends together. All, the default, needs a
            copy.
        async_op: Return at once, with a `PendingTensor`, or a tree of them. Any use of it waits, in one order
            on all processes. Until then `x` must not be written to, as in torch's own collectives.
        debug: First compare the call with the other ranks' calls, and later its gradient. If they differ,
            or one of them fails, all of them raise DesyncError and none waits. Also: `XSHARD_DEBUG=1`.
        check_replicated: For debugging, compare the replicas and copies of `x` along the axes that the
            layouts name, and the cotangents' in the backward pass. Default: XSHARD_CHECK_REPLICATED.
        maps: The `Owners` and `Needs` that layouts name. In compiled code they end a graph; text with
            digests, `str(layout)`, does not.
        **two_meshes: For a move between two meshes, in place of `mesh`. The processes of both call it; one
            of neither may, and takes no part. With `async_op` a sender gets a `PendingTensor`, too.
            `src_mesh`, `dst_mesh`: where blocks are, and where they go. Each may be a part of the world;
            device i of an `xshard.Mesh` is rank i. `x` is None on processes outside the source, the
            result is None on processes outside the destination. A plan needs no mesh: its device
            numbers are ranks.
            `dtype`: the array's, for processes without a block.
            `device`: the result's, on processes without a block.
            `requires_grad`: the blocks get a gradient. Processes outside the destination get an empty
            tensor, and those of both meshes call `backward` (`y.sum().backward()` will do there).
            `relabel`: as in `xshard.plan`.

    Returns:
        This process's block under the right layout; for a tree, a tree of the same structure.

    Raises:
        MeshError: The mesh or an axis does not exist, or options for one and two meshes are mixed.
        NotationError: The text is wrong, marked with a caret. On all processes, before anything is sent,
            with the name of the tensor in a tree; so are MeshError, DtypeError, PlanError, LinearityError.
        TypeError: There is no such option; the nearest one is named.
        DtypeError: Values of this dtype cannot be reduced, or travel, like this.
        PlanError: No plan leads from one layout to the other, or the trees do not match.
        LinearityError: The gradient is not defined.
        ShapeError: A block does not fit, on its own process. Unless all processes raise it, the others
            wait for the group's timeout, or raise too with `debug`.
        DesyncError: On all processes, if they run different plans that none of them has used before.
        CollectiveError: On the others, when a process of the mesh has ended.
        ReplicaError: With `check_replicated`, on all processes, here or in the backward pass.

    Examples:
        >>> import torch, torch.distributed as dist, torch_bridge as xt, xshard as xs
        >>> def turn():
        ...     x = torch.full((1, 4), dist.get_rank())
        ...     return xt.redistribute(x, "s/cp c -> s c/cp", xs.Mesh(cp=2))
        >>> [y.tolist() for y in xt.testing.run_ranks(2, turn)]
        [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
        >>> def gather():
        ...     model = {"w": torch.ones(2, 3), "b": torch.ones(1)}
        ...     layouts = {"w": "n d/tp -> n d", "b": "n/tp -> n"}
        ...     moved = xt.redistribute(model, layouts, xs.Mesh(tp=2))
        ...     return {name: tuple(x.shape) for name, x in moved.items()}
        >>> xt.testing.run_ranks(2, gather)[0]
        {'w': (2, 6), 'b': (2,)}
    """
    if addends != FREE:
        profile = with_addends(profile, addends, layouts)
    # Outside of the `try`, in which Dynamo could not break its graph.
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and maps is not None:
        layouts = with_maps_between_graphs(layouts, maps)

    try:
        if maps is not None and not is_compiling:
            layouts = with_map_digests(layouts, maps)
        # Hot: most calls move one tensor on one mesh by text. They build no options value. A subclass of
        # Tensor has rules of its own, and a plan may lead to another mesh.
        is_move = type(x) in PLAIN_TYPES and type(layouts) is not Plan and not two_meshes
        is_usual = is_move and type(async_op) is bool and check_replicated is bucket_bytes is None
        if is_usual and debug is False and not is_compiling and not desync.ALWAYS:
            check_not_swapped()
            call = MoveCall.of(layouts, mesh, shape, profile, comm_dtype)
            return move_one(x, call, async_op, check_replicated)
        if not is_compiling and debug is not True and not desync.ALWAYS:
            check_arguments(
                redistribute,
                bucket_bytes=bucket_bytes,
                async_op=async_op,
                debug=debug,
                check_replicated=check_replicated,
            )

        options = Options(
            layouts,
            mesh,
            shape,
            profile,
            comm_dtype,
            bucket_bytes,
            async_op,
            debug or desync.ALWAYS,
            check_replicated,
            TwoMeshOptions.of(two_meshes),
        )
        if not is_compiling:
            return _redistribute_now(x, options)
    except XshardError as error:
        end_at_user(error)
        raise
    return _redistribute_traced(x, options)


def _redistribute_now(x: Any, options: Options) -> Any:
    """Redistribute outside of compilers: a tensor, a DTensor or a tree, on one mesh or between two."""
    check_not_swapped()
    # The type of a plain tensor, which is no tree, is looked up first: `isinstance` with several
    # types is slow.
    is_tree = type(x) not in PLAIN_TYPES and isinstance(x, Mapping | list | tuple)
    if options.is_transfer(x):
        options.check_transfer()
        return transfer_tree(x, options) if is_tree else redistribute_between(x, options)
    if is_tree:
        return redistribute_tree(x, options)

    # `bucket_bytes` is for trees: without it, calls that differ in nothing else count as equal.
    options = options._replace(bucket_bytes=None)
    x = as_tensor(x)
    compared = compare(x, options) if options.debug else None
    call = call_of(x, options)
    y = move_one(x, call, options.async_op, options.check_replicated)
    return compare_gradients_of(compared, y, x)


def _redistribute_traced(x: Any, options: Options) -> Any:
    """Redistribute while torch.compile or torch.export traces.

    A plain tensor on one mesh becomes a part of the graph. For anything else Dynamo breaks the
    graph, and the call runs between two graphs; torch.export cannot do that, and traces the call as
    it is.
    """
    from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

    # Dynamo can leave its graph and come back; torch.export has to record everything.
    is_dynamo = torch.compiler.is_dynamo_compiling()
    is_one_mesh = options.transfer.src_mesh is None and options.transfer.dst_mesh is None
    is_one_block = isinstance(x, Tensor) and is_one_mesh
    if is_one_block and options.check_replicated and not is_dynamo:
        reason = "check_replicated compares on the host, which an exported program cannot"
        raise PlanError(reason, hint="it is for debugging: leave it out")
    arguments = [x], options.layouts, options.mesh
    may_record = is_one_block and not options.check_replicated
    if may_record and compiled.is_recorded(*arguments, options.profile):
        recorded_options = {
            "shape": options.shape,
            "profile": options.profile,
            "comm_dtype": options.comm_dtype,
        }
        return compiled.traced_call("redistribute", *arguments, recorded_options, options.async_op)
    if is_dynamo:
        return compiled.eagerly(_redistribute_now, x, options)
    return _redistribute_now(x, options)
