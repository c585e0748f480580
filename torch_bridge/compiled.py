"""Redistributions as compilers record them: torch.compile, and torch.export.

Decides how a redistribution is planned once for all lengths of a dim that nothing cuts. Dynamo does not look
into what plans; what is recorded is what the plan's moves do, with functional collectives.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.eager import redistribute_eagerly
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower, lower_traced
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh
from torch_bridge.planning import plan_of
from xshard import Mesh, MeshError, Plan, PlanError, XshardError
from xshard.plans.expression import Expression

# A mesh as Dynamo takes it: values that it compares at every call.
PlainMesh = DeviceMesh | tuple[tuple[str, ...], tuple[int, ...]]


def redistribute(
    x: Tensor,
    expression: Any,
    mesh: Any,
    shape: Sequence[int] | None,
    profile: Any,
    comm_dtype: CommDtypeLike,
    async_op: bool,
    check_replicated: bool | None,
) -> Any:
    """`redistribute` inside torch.compile, which runs this line by line, or torch.export."""
    if not torch.compiler.is_dynamo_compiling():
        _check_exported(x, check_replicated)
        y = apply(traced_executable(x, expression, mesh, shape, profile, comm_dtype), x)
        return PendingTensor(y, y.shape, y) if async_op else y
    is_text = isinstance(expression, str) and isinstance(profile, str)
    is_known = is_text and mesh is not None and not isinstance(mesh, ProcessMesh)
    if isinstance(x, DTensor) or not is_known or check_replicated:
        options_ = {
            "shape": shape,
            "profile": profile,
            "comm_dtype": comm_dtype,
            "async_op": async_op,
            "check_replicated": check_replicated,
        }
        return eagerly(redistribute_eagerly, x, expression, mesh, **options_)
    # Of what is not a tensor Dynamo passes on text, numbers, and tuples and dicts of them.
    options: dict[str, Any] = {} if shape is None else {"shape": tuple(shape)}
    if comm_dtype is not None:
        options["comm_dtype"] = tuple(str(dtype) for dtype in comm_dtype_of(comm_dtype, x.dtype))
    y = _recorded(x, expression, plain(mesh), profile, options)
    _raise_refusal()
    return PendingTensor(y, y.shape, y) if async_op else y


def _check_exported(x: Tensor, check_replicated: bool | None) -> None:
    """Raise PlanError for what torch.export cannot record."""
    if check_replicated:
        raise PlanError(
            "check_replicated compares on the host, which an exported program cannot",
            hint="it is for debugging: leave it out",
        )
    if isinstance(x, DTensor):
        raise PlanError(
            "torch.export records no redistribution of a DTensor",
            hint="export what is done with its local tensors",
        )


@torch.compiler.disable(
    reason="what is recorded is a redistribution of one plain tensor on a Mesh or a DeviceMesh, "
    "whose expression is text and whose profile is a name, without check_replicated"
)
def eagerly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function where nothing is recorded, between two graphs."""
    return function(*arguments, **options)


def plain(mesh: Any) -> Any:
    """A mesh as Dynamo takes it."""
    return (mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else mesh


@torch._dynamo.nonstrict_trace
def _recorded(x: Tensor, expression: str, mesh: PlainMesh, profile: str, options: dict[str, Any]) -> Tensor:
    names = options.get("comm_dtype")
    comm_dtype = names and tuple(getattr(torch, name.removeprefix("torch.")) for name in names)
    try:
        executable = traced_executable(
            x, expression, mesh_of_plain(mesh), options.get("shape"), profile, comm_dtype
        )
    except XshardError as error:
        _refusals.append(error)
        return x
    return apply(executable, x)


# Dynamo replaces what is raised where it does not look by an error of its own: kept until it looks.
_refusals: list[XshardError] = []


@torch.compiler.assume_constant_result
def _raise_refusal() -> None:
    """Raise what has kept a redistribution from being recorded."""
    if _refusals:
        raise _refusals.pop()


def mesh_of_plain(mesh: PlainMesh) -> MeshLike:
    """The mesh that `plain` was given."""
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
    """What is recorded for a block some of whose lengths may be symbols.

    A plan is made of numbers. Where a dim is whole all along, its length matters to prices alone: it stays a
    symbol, and the plan is that of about its first value, of one that no step can cut into equal parts.
    Any other symbol becomes the number that it is, for which it is then compiled.
    """
    if torch._C._are_functorch_transforms_active():
        raise PlanError(
            "torch.func inside torch.compile does not reach through a redistribution",
            hint="torch would drop tangents without a word: use torch.func on what is not compiled",
        )
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint="redistribute(x, expression, mesh)")
    wire, differentiated = comm_dtype_of(comm_dtype, x.dtype), x.requires_grad and torch.is_grad_enabled()
    n_devices = mesh_of(mesh).n_devices
    free = {d for d, n in enumerate(x.shape) if not isinstance(n, int)}
    while True:
        lengths = tuple(_uncut(n, n_devices) if d in free else int(n) for d, n in enumerate(x.shape))
        whole = None if shape is None else tuple(n if d in free else int(n) for d, n in enumerate(shape))
        with unset_fake_temporarily():  # groups are made, and plans kept, as where nothing is recorded
            processes = process_mesh(mesh)
            if whole is not None:
                whole = tuple(lengths[d] if d in free else n for d, n in enumerate(whole))
            plan, processes = plan_of(expression, processes, lengths, wire.forward, whole, profile)
            alone = lower(plan, processes, x.device).casting(x.dtype, wire.backward)
            plans = _plans(alone, differentiated)
        cut = {d for d in free if not all(_is_whole(p, d) for p in plans)}
        if not cut:
            break
        free -= cut
    symbols = {d - x.ndim: x.shape[d] for d in free}
    return lower_traced(plan, processes, x.device, symbols).casting(x.dtype, wire.backward)


def _uncut(symbol: Any, n_devices: int) -> int:
    """The first value of a symbol, or the next that has no divisor in common with the devices' number."""
    return next(n for n in itertools.count(symbol.node.hint) if math.gcd(n, n_devices) == 1)


def _plans(executable: Executable, differentiated: bool) -> list[Plan]:
    """All that runs. Raises LinearityError, DtypeError where there is no gradient."""
    if not differentiated:
        return [executable.plan]
    derived = (executable.backward,) if executable.is_linear else executable.winners
    return [executable.plan, *(found.plan for found in derived)]


def _is_whole(plan: Plan, d: int) -> bool:
    """Whether no step cuts a dim, widens it or reads it backwards."""
    layouts = [plan.source.layout, plan.target.layout, *(stage.after.layout for stage in plan.stages)]
    if any("pole" in str(layout) for layout in layouts):  # whose rows depend on another dim
        return False
    return all(not layout.dims[d].shards and layout.dims[d].overlap is None for layout in layouts)
