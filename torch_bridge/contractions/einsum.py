"""`einsum`: the public verb, and its DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.autodiff.blocks import as_tensor, check_not_swapped, is_dtensor
from torch_bridge.autodiff.pending import PendingTensor, compare_gradients_of
from torch_bridge.calls.move import with_maps_between_graphs
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.contractions.call import HINT, EinsumCall, check_operand_count
from torch_bridge.lower.executable import check_dense
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.versions.modes import is_any_autocast_enabled
from xshard import ProfileLike
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import NEVER, OVERLAPS, Overlapping
from xshard.contractions.shapes import for_operands, shapes_of, written_shardings
from xshard.cost.machine import with_addends
from xshard.cost.model import FREE, Addends
from xshard.errors import (
    MeshError,
    PlanError,
    ShapeError,
    XshardError,
    check_arguments,
    end_at_user,
)
from xshard.notation.maps import Maps
from xshard.notation.parser import text_spans, with_map_digests
from xshard.signatures import Bytes

SAVES = ("used", "given")  # which operands the backward pass keeps


class EinsumKeywords(TypedDict, total=False):
    """The keywords of `einsum` on which the type of its result does not depend."""

    mesh: MeshLike | None
    shape: Sequence[Sequence[int]] | None
    sizes: Mapping[str, int] | None
    profile: ProfileLike
    memory_limit: Bytes
    save: Literal["used", "given"]
    overlap: Overlapping
    comm_dtype: CommDtypeLike
    addends: Addends
    maps: Maps | None


@overload
def einsum(
    expression: str | ContractionPlan,
    *operands: Tensor,
    async_op: Literal[True],
    **options: Unpack[EinsumKeywords],
) -> PendingTensor: ...


@overload
def einsum(
    expression: str | ContractionPlan,
    *operands: Tensor,
    async_op: bool = False,
    **options: Unpack[EinsumKeywords],
) -> Tensor: ...


def einsum(  # noqa: PLR0913  a verb with the options of plans and of calls
    expression: str | ContractionPlan,
    *operands: Tensor,
    mesh: MeshLike | None = None,
    shape: Sequence[Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "auto",
    memory_limit: Bytes = None,
    save: Literal["used", "given"] = "used",
    overlap: Overlapping = NEVER,
    comm_dtype: CommDtypeLike = None,
    addends: Addends = FREE,
    async_op: bool = False,
    maps: Maps | None = None,
) -> Tensor:
    """Contract sharded operands, differentiably: this process's blocks -> its block of the result.

        y = xt.einsum("b s/tp d, d f/tp -> b s f/tp", x, w, mesh=mesh)  # [b, s/4, d], [d, f/4] -> [b, s, f/4]

    Operands are moved as the plan says, each process contracts its blocks, and the result is moved. All
    processes of the mesh call it, with equal arguments except the values of blocks, and with equal
    `requires_grad`. Products are in the operands' dtype, as by `torch.einsum`.

    Args:
        expression: Every operand under its layout, and the result, in which dims that it lacks are summed;
            `...`, composed dims, `(h d)/tp`, and diagonals, `i i`, are as in numpy and einops. Or a plan
            (`xshard.plan`), which is run as it is. Axes that it does not name are left alone: blocks may
            differ along them.
        *operands: This process's blocks. DTensors must be placed as their layouts say, and the result is a
            DTensor.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; DTensors bring their own.
        shape: The global shape of every operand, if blocks differ in size.
        sizes: Lengths of dims by name. A dim in neither is as long as an operand says that has it whole,
            else blocks are equal.
        profile: The machine to plan for.
        memory_limit: Bytes, or "2GiB", that no device may exceed, forward.
        save: The operands to keep for the gradients: as they were "used", or as they were "given", to be
            moved once more, as in ZeRO-3.
        overlap: Whether a gather or a reduce-scatter may run in rounds, in which one part is contracted while
            the next travels: "never", "auto" where the profile predicts a gain, "always" where it can.
        comm_dtype: As in `redistribute`.
        addends: As in `redistribute`, for the moves. Which products are added follows from the plan.
        async_op: Return at once, with a `PendingTensor`; the move of the result is under way.
        maps: As in `redistribute`.

    Returns:
        This process's block of the result: a new tensor, contiguous.

    Raises:
        MeshError, NotationError, DtypeError, PlanError: Before anything is sent, on all processes.
        ShapeError: For a block that does not fit, on its own process.
        DesyncError: With XSHARD_DEBUG=1, on all processes, if their calls differ.

    Examples:
        >>> import torch, torch.distributed as dist, torch_bridge as xt, xshard as xs
        >>> def layer():
        ...     x, w = torch.ones(1, 4), torch.full((4, 1), dist.get_rank())
        ...     return xt.einsum(
        ...         "s/tp d, d f/tp -> s f/tp", x.long(), w, mesh=xs.Mesh(tp=2)
        ...     ).tolist()
        >>> xt.testing.run_ranks(2, layer)
        [[[0], [0]], [[4], [4]]]
    """
    if addends != FREE:
        profile = with_addends(profile, addends, expression)
    options: dict[str, Any] = {
        "shape": shape,
        "sizes": sizes,
        "profile": profile,
        "overlap": overlap,
        "memory_limit": memory_limit,
        "comm_dtype": comm_dtype,
    }
    if torch.compiler.is_compiling():  # outside of a try, in which Dynamo could not break its graph
        if maps is not None:
            expression = with_maps_between_graphs(expression, maps)
        return _compiled(expression, operands, mesh, save, async_op, options)
    try:
        if maps is not None:
            expression = with_map_digests(expression, maps)
        _check_choices(save, overlap)
        is_usual = shape is None and memory_limit is None and expression.__hash__ is not None
        if not is_usual or type(async_op) is not bool or type(sizes) not in (dict, NoneType):
            unusual = {
                "expression": expression,
                "shape": shape,
                "sizes": sizes,
                "async_op": async_op,
            }
            check_arguments(einsum, memory_limit=memory_limit, **unusual)
        check_not_swapped()
        call = EinsumCall.of(expression, mesh, **options)
        blocks = list(operands)
        if not all(isinstance(x, Tensor) for x in blocks):
            check_operand_count(call.contraction, blocks)
            blocks = [as_tensor(x, f"tensor {i + 1}", HINT) for i, x in enumerate(blocks)]
        keeps = save == "used"
        if not any(map(is_dtensor, blocks)):
            return _of_blocks(call, blocks, keeps, async_op)
        if async_op:
            hint = "a DTensor waits for its local block at once"
            raise PlanError("async_op is for tensors", hint=hint)
        return _of_dtensors(call, blocks, keeps)
    except XshardError as error:
        end_at_user(error)
        raise


def _check_choices(save: str, overlap: str) -> None:
    """Raise PlanError for an unknown `save` or `overlap`."""
    if save not in SAVES:
        hint = '"used": operands where they are contracted, or "given"'
        raise PlanError(f"save is {save!r}", hint=hint)
    if overlap not in OVERLAPS:
        raise PlanError(f"no overlap {overlap!r}", hint=f"there are: {', '.join(OVERLAPS)}")


def _compiled(
    expression: str | ContractionPlan,
    operands: Sequence[Tensor],
    mesh: MeshLike | None,
    save: str,
    async_op: bool,
    options: dict[str, Any],
) -> Any:
    """Run an einsum inside `torch.compile`: as one operator of the graph, if a graph can hold it.

    Else, as with DTensors, it runs eagerly between two graphs (a graph break).

    Args:
        expression: The expression, or a plan.
        operands: This process's blocks, or DTensors.
        mesh: The mesh.
        save: Which operands the backward pass keeps.
        async_op: Whether to return at once.
        options: The other arguments of `einsum`, by name.
    """
    from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

    _check_choices(save, options["overlap"])
    blocks = [_autocast(x) for x in operands]
    if compiled.is_recorded(blocks, expression, mesh, options["profile"]):
        recorded_options = {**options, "save": save}
        return compiled.traced_call("einsum", blocks, expression, mesh, recorded_options, async_op)
    return compiled.eagerly(
        einsum, expression, *operands, mesh=mesh, save=save, async_op=async_op, **options
    )


# Hot: every cached call comes through here.
def _of_blocks(
    call: EinsumCall, blocks: list[Tensor], keeps: bool, async_op: bool = False
) -> Tensor | PendingTensor:
    """Compare the call with other ranks, if asked for, and run its executable."""
    for x in blocks:
        check_dense(x)
    if is_any_autocast_enabled():
        blocks = [_autocast(x) for x in blocks]
    compared = None
    if desync.ALWAYS:
        prepare = partial(call.facts, blocks, keeps, async_op)
        compared = desync.compare_call(call.mesh, call.contraction.text, prepare)
    return compare_gradients_of(compared, call.executable(blocks)(blocks, keeps, async_op), *blocks)


def _autocast(x: Any) -> Any:
    """Return the block in the dtype in which autocast multiplies, cast before it travels."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if x.dtype == torch.float64 or x.is_meta:  # autocast leaves them as they are
        return x
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _of_dtensors(call: EinsumCall, operands: list[Any], keeps: bool) -> Tensor:
    """Contract DTensors, whose placements must be those that the expression says; return a DTensor.

    "m k/tp, k/tp n -> m n" takes operands with Shard(1) and Shard(0).

    Args:
        call: The call.
        operands: The DTensors.
        keeps: Whether moved operands are kept for the backward pass.

    Raises:
        MeshError: Operands are no DTensors, or on several meshes.
        ShapeError: `sizes=` or `shape=` contradict their shapes.
        NotationError: They have other placements.
    """
    from torch_bridge.dtensor.function import dtensor_of_block
    from torch_bridge.dtensor.placements import (
        checked_global_shape,
        local_block_under,
        to_placements,
    )

    text = call.contraction.text
    check_operand_count(call.contraction, operands)
    mesh = _one_mesh(operands, text)
    global_shapes = tuple(checked_global_shape(x, call.mesh, shape=None) for x in operands)
    contraction = for_operands(call.contraction, global_shapes)  # "..." stands for their dims
    shapes = call.shapes
    if shapes is None:
        _, shapes = shapes_of(contraction, call.sizes, global_shapes)
    *arrays, result = written_shardings(contraction, mesh_of(mesh), shapes)
    # `sizes=` or `shape=`, if given, may say otherwise than the DTensors.
    stated_shapes = tuple(array.shape for array in arrays)
    if stated_shapes != global_shapes:
        reason = f"the DTensors have shapes {global_shapes}, not {stated_shapes}"
        raise ShapeError(reason, text=text, hint="leave sizes= and shape= out")
    to_placements(result.layout, mesh, result.shape)  # raises if no DTensor is placed so

    spans = text_spans(text).layouts  # the result's is at the end
    blocks = [
        local_block_under(x, array.layout, text, span)
        for x, array, span in zip(operands, arrays, spans, strict=False)
    ]
    y = _of_blocks(call._replace(mesh=mesh, shapes=shapes), blocks, keeps)
    return dtensor_of_block(as_tensor(y), result.layout, mesh, result.shape, call.profile)


def _one_mesh(operands: Sequence[Any], text: str) -> DeviceMesh:
    """Return the mesh of all operands. Raises MeshError unless they are DTensors on one."""
    meshes = [x.device_mesh for x in operands if is_dtensor(x)]
    # A plain tensor beside them could be a block or a whole array.
    if len(meshes) < len(operands) or any(mesh != meshes[0] for mesh in meshes):
        reason = "not all operands are DTensors of one mesh"
        raise MeshError(reason, text=text, hint="all or none are")
    return meshes[0]
