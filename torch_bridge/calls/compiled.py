"""Calls in torch.compile and torch.export, which record the plan's collectives and `torch.einsum` as
functions of tensors. A redistribution is planned once for all lengths of a dim that no step shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed._functional_collectives
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import register_constant

from torch_bridge.autodiff.blocks import is_dtensor
from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.calls.move import TRACED, MoveCall, check_no_transform
from torch_bridge.comm_dtype import comm_dtype_of
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of
from xshard import Mesh, Plan
from xshard.errors import PlanError, XshardError

if not hasattr(device_mesh, "_register_distributed_opaque_types"):  # before torch 2.13
    register_constant(
        DeviceMesh
    )  # which Dynamo otherwise refuses as an argument of a recorded function


@torch.compiler.disable(
    reason="torch.compile records calls on plain tensors and a Mesh or a DeviceMesh, "
    "with an expression that is text and a profile that is a name, without check_replicated"
)
def eagerly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function between two graphs; nothing is recorded."""
    return function(*arguments, **options)


def is_recorded(blocks: Sequence[Any], expression: Any, mesh: Any, profile: Any) -> bool:
    """Whether a graph can hold the call; torch.export has no other way."""
    if not torch.compiler.is_dynamo_compiling():
        return True
    is_text = isinstance(expression, str) and isinstance(profile, str)
    on_mesh = mesh is not None and not isinstance(mesh, ProcessMesh)
    return is_text and on_mesh and all(isinstance(x, Tensor) and not is_dtensor(x) for x in blocks)


def recorded(
    verb: str,
    blocks: Sequence[Tensor],
    expression: Any,
    mesh: Any,
    options: dict[str, Any],
    async_op: bool,
) -> Any:
    """A call that torch.compile or torch.export traces. options: keywords of `TRACED[verb]`."""
    if torch.compiler.is_dynamo_compiling():
        # Besides tensors, Dynamo passes on text, numbers, and tuples and dicts of them.
        constants = {name: value for name, value in options.items() if value is not None}
        if "comm_dtype" in constants:
            pair = comm_dtype_of(constants["comm_dtype"], blocks[0].dtype)
            constants["comm_dtype"] = tuple(str(dtype) for dtype in pair)
        constant_mesh = (mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else mesh
        y = _recorded(list(blocks), verb, expression, constant_mesh, constants)
        _raise_refusal()
    elif not all(isinstance(x, Tensor) and not is_dtensor(x) for x in blocks):
        what = f"torch.export records {verb} of plain tensors on one mesh"
        raise PlanError(what, hint="export local tensors")
    else:
        y = TRACED[verb](list(blocks), expression, mesh, **options)
    return PendingTensor(y, y.shape, y) if async_op else y


# Dynamo replaces errors raised inside `nonstrict_trace` by its own: they are kept here and raised outside.
refusals: list[XshardError] = []


@torch._dynamo.nonstrict_trace
def _recorded(
    blocks: list[Tensor], verb: str, expression: str, mesh: Any, options: dict[str, Any]
) -> Tensor:
    if names := options.get("comm_dtype"):
        options = {
            **options,
            "comm_dtype": [getattr(torch, name.removeprefix("torch.")) for name in names],
        }
    if isinstance(mesh, tuple):
        mesh = Mesh(dict(zip(*mesh, strict=True)))
    mesh = getattr(mesh, "real_obj", mesh)  # Dynamo wraps a DeviceMesh
    try:
        return TRACED[verb](blocks, expression, mesh, **options)
    except XshardError as error:
        refusals.append(error)
        return blocks[0]


@torch.compiler.assume_constant_result
def _raise_refusal() -> None:
    if refusals:
        raise refusals.pop()


def _redistribute(blocks: list[Tensor], expression: Any, mesh: Any, **options: Any) -> Tensor:
    """A redistribution of one block; the length of a dim that no step shards, which affects only prices,
    stays a symbol: the plan is made for a number near its first value that no step could divide evenly.
    """
    check_no_transform()
    (x,), shape = blocks, options.get("shape")
    call = MoveCall.of(
        expression, mesh, None, options.get("profile", "auto"), options.get("comm_dtype")
    )
    backward = comm_dtype_of(call.comm_dtype, x.dtype).backward
    differentiated = x.requires_grad and torch.is_grad_enabled()
    n_devices = mesh_of(call.mesh).n_devices
    first = {d: n.node.hint for d, n in enumerate[Any](x.shape) if not isinstance(n, int)}
    if shape is not None:  # a dim that is longer than its block is sharded
        first = {d: n for d, n in first.items() if len(shape) == x.ndim and shape[d] == x.shape[d]}
    # The first value of a symbol, or the next number that is coprime to the number of devices.
    nearby = {
        d: next(k for k in itertools.count(n) if math.gcd(n_devices, k) == 1)
        for d, n in first.items()
    }
    free = {*first}
    while True:
        lengths = tuple(nearby[d] if d in free else int(n) for d, n in enumerate(x.shape))
        if shape is not None:
            whole = (lengths[d] if d in free else int(n) for d, n in enumerate(shape))
            call = call._replace(shape=tuple(whole))
        with unset_fake_temporarily():  # groups and cached tensors must be real
            plan, processes = call.plan((lengths, x.dtype, x.device))
            executable = lower(plan, processes, x.device).casting(x.dtype, backward)
            plans = [plan]
            if differentiated:
                derived = (executable.backward,) if executable.is_linear else executable.winners
                plans += [each.plan for each in derived]
        names = plan.source.layout.names
        sharded = {d for d in free if not all(_is_unsharded(p, names[d]) for p in plans)}
        if not sharded:
            break
        free -= sharded
    symbols = {names[d]: x.shape[d] for d in free}
    return apply(lower(plan, processes, x.device, symbols).casting(x.dtype, backward), x)


TRACED["redistribute"] = _redistribute


def _is_unsharded(plan: Plan, name: str) -> bool:
    """Whether no step shards a dim, widens it or reads it backwards."""
    layouts = [
        plan.source.layout,
        plan.target.layout,
        *(stage.after.layout for stage in plan.stages),
    ]
    if any("pole" in str(layout) for layout in layouts):  # rows beyond a pole depend on another dim
        return False
    dims = (layout.dim(name) for layout in layouts)
    return all(not dim.shards and dim.overlap is None for dim in dims)
