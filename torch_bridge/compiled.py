"""Redistributions as compilers record them: torch.compile, and torch.export.

Decides how a redistribution is planned once for all lengths of a dim that nothing cuts. Dynamo does not trace
the planner; it records the moves of the plan, with functional collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_constant

from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.eager import redistribute_eagerly
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower, lower_traced
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh
from torch_bridge.planning import plan_of, require_mesh
from xshard import Mesh, Plan, XshardError
from xshard.errors import PlanError
from xshard.plans.expression import Expression, sides

if not hasattr(device_mesh, "_register_distributed_opaque_types"):  # before torch 2.13
    register_constant(DeviceMesh)  # which Dynamo else takes for no argument of a function that it records

# A mesh in a form that Dynamo accepts as a constant and compares at every call.
ConstantMesh = DeviceMesh | tuple[tuple[str, ...], tuple[int, ...]]


def redistribute_recorded(
    x: Tensor,
    expression: Any,
    mesh: Any,
    shape: Sequence[int] | None,
    profile: Any,
    comm_dtype: CommDtypeLike,
    async_op: bool,
    check_replicated: bool | None,
) -> Any:
    """`redistribute` inside torch.compile, which traces this function, or inside torch.export."""
    if not torch.compiler.is_dynamo_compiling():
        _check_exported(x, check_replicated)
        y = apply(traced_executable(x, expression, mesh, shape, profile, comm_dtype), x)
        return PendingTensor(y, y.shape, y) if async_op else y
    is_text = isinstance(expression, str) and isinstance(profile, str)
    is_known = is_text and mesh is not None and not isinstance(mesh, ProcessMesh)
    if isinstance(x, DTensor) or not is_known or check_replicated:
        call = (x, expression, mesh, shape, profile, comm_dtype, async_op, False, check_replicated)
        return eagerly(redistribute_eagerly, *call)
    # Besides tensors, Dynamo passes on text, numbers, and tuples and dicts of them.
    options: dict[str, Any] = {} if shape is None else {"shape": tuple(shape)}
    if comm_dtype is not None:
        options["comm_dtype"] = tuple(str(dtype) for dtype in comm_dtype_of(comm_dtype, x.dtype))
    y = _recorded(x, expression, constant_mesh(mesh), profile, options)
    raise_refusal()
    return PendingTensor(y, y.shape, y) if async_op else y


def _check_exported(x: Tensor, check_replicated: bool | None) -> None:
    """Raise PlanError for calls that torch.export cannot record."""
    if check_replicated:
        raise PlanError(
            "check_replicated compares on the host, which an exported program cannot",
            hint="it is for debugging: leave it out",
        )
    if isinstance(x, DTensor):
        raise PlanError(
            "torch.export records no redistribution of a DTensor",
            hint="export functions of its local tensors",
        )


@torch.compiler.disable(
    reason="torch.compile records a redistribution of one plain tensor on a Mesh or a DeviceMesh, "
    "whose expression is text and whose profile is a name, without check_replicated"
)
def eagerly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function between two graphs, where nothing is recorded."""
    return function(*arguments, **options)


def constant_mesh(mesh: Any) -> Any:
    """A mesh in a form that Dynamo accepts as a constant."""
    return (mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else mesh


@torch._dynamo.nonstrict_trace
def _recorded(
    x: Tensor, expression: str, mesh: ConstantMesh, profile: str, options: dict[str, Any]
) -> Tensor:
    try:
        executable = traced_executable(
            x, expression, mesh_of_constant(mesh), options.get("shape"), profile, comm_dtype_of_names(options)
        )
    except XshardError as error:
        refusals.append(error)
        return x
    return apply(executable, x)


def comm_dtype_of_names(options: dict[str, Any]) -> CommDtypeLike:
    """`options["comm_dtype"]`, the names of two dtypes, as dtypes."""
    names = options.get("comm_dtype")
    return names and tuple(getattr(torch, name.removeprefix("torch.")) for name in names)


# Dynamo replaces errors raised inside `nonstrict_trace` by its own: they are kept here and raised outside.
refusals: list[XshardError] = []


@torch.compiler.assume_constant_result
def raise_refusal() -> None:
    """Raise the error that kept a redistribution from being recorded."""
    if refusals:
        raise refusals.pop()


def mesh_of_constant(mesh: ConstantMesh) -> MeshLike:
    """The inverse of `constant_mesh`."""
    if isinstance(mesh, tuple):
        return Mesh(dict(zip(*mesh, strict=True)))
    return getattr(mesh, "real_obj", mesh)  # a DeviceMesh goes through Dynamo in a wrapper


def traced_executable(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: Any,
    comm_dtype: CommDtypeLike,
) -> Executable:
    """The executable to record for a block; some of its lengths may be symbols.

    A plan needs numbers. The length of a dim that no step cuts affects only prices: it stays a symbol, and
    the plan is made for a number near its first value, one that no step could cut into equal parts.
    Any other symbol is replaced by its value, and the graph is compiled for that.
    """
    check_no_transform()
    mesh = require_mesh(mesh)
    request = expression if isinstance(expression, Plan) else sides(expression)
    travels, differentiated = comm_dtype_of(comm_dtype, x.dtype), x.requires_grad and torch.is_grad_enabled()
    n_devices = mesh_of(mesh).n_devices
    free = {d for d, n in enumerate(x.shape) if not isinstance(n, int)}
    while True:
        lengths = tuple(_uncut(n, n_devices) if d in free else int(n) for d, n in enumerate(x.shape))
        whole = None if shape is None else tuple(n if d in free else int(n) for d, n in enumerate(shape))
        with unset_fake_temporarily():  # groups and cached tensors must be real
            processes = process_mesh(mesh)
            if whole is not None:
                whole = tuple(lengths[d] if d in free else n for d, n in enumerate(whole))
            plan, processes = plan_of(request, processes, lengths, travels.forward, x.device, whole, profile)
            executable = lower(plan, processes, x.device).casting(x.dtype, travels.backward)
            plans = _plans(executable, differentiated)
        names = plan.source.layout.names
        cut = {d for d in free if not all(_is_whole(p, names[d]) for p in plans)}
        if not cut:
            break
        free -= cut
    symbols = {names[d]: x.shape[d] for d in free}
    return lower_traced(plan, processes, x.device, symbols).casting(x.dtype, travels.backward)


def check_no_transform() -> None:
    """Raise PlanError under torch.func, whose tangents torch would drop in what is recorded."""
    if torch._C._are_functorch_transforms_active():
        raise PlanError(
            "torch.func inside torch.compile does not reach through a redistribution",
            hint="torch would drop tangents without a word: use torch.func on what is not compiled",
        )


def _uncut(symbol: Any, n_devices: int) -> int:
    """The first value of a symbol, or the next number that is coprime to the number of devices."""
    return next(n for n in itertools.count(symbol.node.hint) if math.gcd(n, n_devices) == 1)


def _plans(executable: Executable, differentiated: bool) -> list[Plan]:
    """The plans of the forward and backward pass. Raises LinearityError, DtypeError without a gradient."""
    if not differentiated:
        return [executable.plan]
    derived = (executable.backward,) if executable.is_linear else executable.winners
    return [executable.plan, *(found.plan for found in derived)]


def _is_whole(plan: Plan, name: str) -> bool:
    """Whether no step cuts a dim, widens it or reads it backwards."""
    layouts = [plan.source.layout, plan.target.layout, *(stage.after.layout for stage in plan.stages)]
    if any("pole" in str(layout) for layout in layouts):  # rows beyond a pole depend on another dim
        return False
    dims = (layout.dim(name) for layout in layouts)
    return all(not dim.shards and dim.overlap is None for dim in dims)
