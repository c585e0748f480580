"""Calls that torch.compile and torch.export record.

A graph gets the plan's collectives and `torch.einsum`, as functions of tensors. A redistribution is planned
once for all lengths of a dim that no step shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import is_dtensor
from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.calls.move import TRACED, MoveCall, check_no_transform
from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of
from torch_bridge.versions.compiler import first_value, nonstrict_trace, unwrapped_mesh
from torch_bridge.versions.modes import unset_fake_temporarily
from xshard import Mesh, Plan, ProfileLike
from xshard.cost.machine import AUTO
from xshard.errors import PlanError, XshardError


@torch.compiler.disable(
    reason="torch.compile records calls on plain tensors and a Mesh or a DeviceMesh, "
    "with an expression that is text and a profile that is a name, without check_replicated"
)
def eagerly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function between two graphs; nothing is recorded."""
    return function(*arguments, **options)


def is_recorded(blocks: Sequence[Any], expression: Any, mesh: Any, profile: Any) -> bool:
    """Return whether a graph can hold the call; torch.export has no other way."""
    if not torch.compiler.is_dynamo_compiling():
        return True
    if not isinstance(expression, str) or not isinstance(profile, str):
        return False
    if mesh is None or isinstance(mesh, ProcessMesh):
        return False
    return _are_plain(blocks)


def _are_plain(blocks: Sequence[Any]) -> bool:
    return all(isinstance(x, Tensor) and not is_dtensor(x) for x in blocks)


def traced_call(
    verb: str,
    blocks: Sequence[Tensor],
    expression: Any,
    mesh: Any,
    options: dict[str, Any],
    async_op: bool,
) -> Any:
    """Put a call of a public function into the graph that torch.compile or torch.export traces.

    Returns its result, a traced tensor. Under torch.compile, options are turned into constants that
    Dynamo can pass on: text, numbers, and tuples and dicts of them.

    Args:
        verb: The name of the public function, a key of `TRACED`.
        blocks: This process's tensors.
        expression: The layouts, as text.
        mesh: The mesh; a DeviceMesh or an `xshard.Mesh` under torch.compile.
        options: Keywords of `TRACED[verb]`.
        async_op: Whether the caller wants a `PendingTensor`.
    """
    if torch.compiler.is_dynamo_compiling():
        # `_record_call` turns these constants back into what they were.
        constants = {name: value for name, value in options.items() if value is not None}
        if "comm_dtype" in constants:
            dtypes = comm_dtype_of(constants["comm_dtype"], blocks[0].dtype)
            constants["comm_dtype"] = tuple(str(dtype) for dtype in dtypes)
        constant_mesh = (mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else mesh
        y = _record_call(list(blocks), verb, expression, constant_mesh, constants)
        _raise_refusal()
    elif _are_plain(blocks):
        y = TRACED[verb](list(blocks), expression, mesh, **options)
    else:
        reason = f"torch.export records {verb} of plain tensors on one mesh"
        raise PlanError(reason, hint="export local tensors")
    if async_op:  # a graph has no calls in flight: the result is there
        return PendingTensor(y, y.shape, y)
    return y


# Dynamo replaces errors raised inside `nonstrict_trace` by its own: they are kept here and raised outside.
refusals: list[XshardError] = []


@nonstrict_trace
def _record_call(
    blocks: list[Tensor], verb: str, expression: str, mesh: Any, options: dict[str, Any]
) -> Tensor:
    """Run a public function under torch.compile, which records the tensor operations that it calls.

    Dynamo does not compile the Python code of this function (`nonstrict_trace`). `traced_call` has
    turned dtypes into text and an `xshard.Mesh` into (axes, sizes); they are turned back here. An
    error cannot leave this function: it is kept in `refusals`, and raised by `traced_call`.
    """
    if "comm_dtype" in options:
        names = options["comm_dtype"]
        comm_dtype = CommDtype(*[getattr(torch, name.removeprefix("torch.")) for name in names])
        options = {**options, "comm_dtype": comm_dtype}
    if isinstance(mesh, tuple):
        axes, sizes = mesh
        mesh = Mesh(dict(zip(axes, sizes, strict=True)))
    mesh = unwrapped_mesh(mesh)
    try:
        return TRACED[verb](blocks, expression, mesh, **options)
    except XshardError as error:
        refusals.append(error)
        return blocks[0]  # any tensor will do: `_raise_refusal` raises before it is used


@torch.compiler.assume_constant_result
def _raise_refusal() -> None:
    """Raise the error that `_record_call` kept; Dynamo calls this while it traces, and keeps None."""
    if refusals:
        raise refusals.pop()


class _TracedPlan(NamedTuple):
    """The plan of a recorded call, the processes that run it, and the plans of its derivatives.

    Attributes:
        plan: The plan.
        processes: Its processes.
        derivatives: The traced plans of its derivatives.
        variable_dims: The dims of the block whose lengths vary in the graph.
    """

    plan: Plan
    processes: ProcessMesh
    derivatives: Sequence[Plan]
    variable_dims: set[int]


def _redistribute(
    blocks: list[Tensor],
    expression: Any,
    mesh: Any,
    shape: Any = None,
    profile: ProfileLike = AUTO,
    comm_dtype: CommDtypeLike = None,
) -> Tensor:
    """Put a redistribution into a compiler's graph, for many lengths of a dim where possible.

    A dim of variable length (a symbol of torch.compile) stays variable if no step of the plan
    shards it: [s, 8] under "s i/tp -> s i" works for any s.

    Args:
        blocks: The block to move, alone in a list.
        expression: As `layouts` of `redistribute`; the others are arguments of it, too.
        mesh: The mesh.
        shape: The global shape; None: inferred.
        profile: The machine to plan for.
        comm_dtype: The dtypes that travel.
    """
    check_no_transform()
    (x,) = blocks
    call = MoveCall.of(expression, mesh, shape=None, profile=profile, comm_dtype=comm_dtype)
    traced = _plan_for_variable_lengths(call, x, shape)
    symbols = {traced.plan.source.layout.names[d]: x.shape[d] for d in traced.variable_dims}
    executable = lower(traced.plan, traced.processes, x.device, symbols)
    travels = comm_dtype_of(call.comm_dtype, x.dtype)
    return apply(executable.casting(x.dtype, travels), x)


TRACED["redistribute"] = _redistribute


def _lengths_near_first(x: Tensor, shape: Any, n_devices: int) -> dict[int, int]:
    """Choose, for each dim of variable length, a fixed length for which a plan can be made.

    It is the first value, or the next number that is coprime to the number of devices: no mesh axis
    can divide such a dim evenly, so that plans leave it whole. On 4 devices a block [s, 8] with a
    variable s that was first 6 -> {0: 7}, by the index of the dim.

    Args:
        x: This process's block.
        shape: The global shape; None if the caller gave none.
        n_devices: The number of devices of the mesh.
    """
    lengths = {}  # by the index of the dim
    for d, length in enumerate[Any](x.shape):
        if isinstance(length, int):
            continue  # no symbol
        if shape is not None and (len(shape) != x.ndim or shape[d] != x.shape[d]):
            continue  # a dim that is longer than its block is sharded
        number = first_value(length)
        while math.gcd(n_devices, number) != 1:
            number += 1
        lengths[d] = number
    return lengths


def _plan_for_variable_lengths(call: MoveCall, x: Tensor, shape: Any) -> _TracedPlan:
    """Plan a redistribution so that as many dims as possible may have other lengths later.

    The plan is made for a likely length, near the first one, that no mesh axis divides. If a step
    shards the dim all the same, it is planned again for its first length, and another length
    compiles a new graph.

    Args:
        call: The layouts, the mesh and options, without a shape.
        x: This process's block.
        shape: The global shape; None if the caller gave none.
    """
    lengths = _lengths_near_first(x, shape, mesh_of(call.mesh).n_devices)
    while True:
        traced = _plan_traced(call, x, shape, lengths)
        names = traced.plan.source.layout.names
        unsharded = {d: length for d, length in lengths.items() if _is_unsharded(traced, names[d])}
        if unsharded == lengths:
            return traced
        lengths = unsharded


def _plan_traced(call: MoveCall, x: Tensor, shape: Any, lengths: dict[int, int]) -> _TracedPlan:
    """Plan a redistribution while a compiler traces, and its backward pass if autograd records it.

    Args:
        call: The layouts, the mesh and options, without a shape.
        x: This process's block, a fake tensor.
        shape: The global shape; None if the caller gave none.
        lengths: The length for which to plan of each dim whose length varies, by the dim's index.
    """

    def planned(shape: Sequence[Any]) -> tuple[int, ...]:
        """Return a shape with the lengths for which to plan."""
        # `int` of a symbol makes it a constant of the graph, which is then valid for this length
        # alone.
        return tuple(lengths[d] if d in lengths else int(n) for d, n in enumerate(shape))

    local_shape = planned(x.shape)
    if shape is not None:
        call = call._replace(shape=planned(shape))
    travels = comm_dtype_of(call.comm_dtype, x.dtype)
    # Planning makes process groups and tensors that are cached for later calls: these must not be
    # fake.
    with unset_fake_temporarily():
        plan, processes = call.plan((local_shape, x.dtype, x.device))
        executable = lower(plan, processes, x.device).casting(x.dtype, travels)
        derivatives: list[Plan] = []
        if x.requires_grad and torch.is_grad_enabled():
            if executable.is_linear:
                derivatives.append(executable.backward.plan)
            else:
                derivatives += [winner.plan for winner in executable.max_min_derivatives]
    return _TracedPlan(plan, processes, derivatives, set(lengths))


def _is_unsharded(traced: _TracedPlan, name: str) -> bool:
    """Return whether a dim is whole in all layouts of a plan and of its derivatives.

    Only then may its length vary in a graph. It must not be sharded, get halo rows (`overlap`), or
    stand beside rows from beyond a pole, whose number depends on another dim.

    Args:
        traced: The plan and the plans of its derivatives.
        name: The name of the dim in the layouts.
    """
    for plan in (traced.plan, *traced.derivatives):
        layouts = [plan.source.layout, plan.target.layout]
        layouts += [stage.after.layout for stage in plan.stages]
        for layout in layouts:
            if "pole" in str(layout):
                return False
            dim = layout.dim(name)
            if dim.shards or dim.overlap is not None:
                return False
    return True
