"""Contractions as compilers record them: torch.compile, and torch.export.

Decides which calls are recorded. Dynamo does not trace the planner; it records the moves of the plan, with
functional collectives, and `torch.einsum`. All lengths are compiled for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torch_bridge import compiled
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import comm_dtype_of
from torch_bridge.contractions.einsum import autocast, einsum
from torch_bridge.contractions.planning import Asked, executable_of
from torch_bridge.lower.executable import Executable
from torch_bridge.lower.rules import lower_traced
from torch_bridge.mesh.process_mesh import ProcessMesh, world
from xshard import Plan, XshardError
from xshard.errors import PlanError


def einsum_recorded(
    expression: Any, operands: Sequence[Tensor], save: str, async_op: bool, options: dict[str, Any]
) -> Any:
    """`einsum` inside torch.compile, which traces this function, or inside torch.export."""
    mesh, comm_dtype = options["mesh"], options["comm_dtype"]
    is_text = isinstance(expression, str) and isinstance(options["profile"], str)
    is_known = is_text and mesh is not None and not isinstance(mesh, ProcessMesh)
    are_placed = any(isinstance(x, DTensor) for x in operands)
    if not torch.compiler.is_dynamo_compiling():
        if are_placed:
            raise PlanError("torch.export records no contraction of DTensors", hint="export local tensors")
        y = _traced(expression, list(operands), save, options)
    elif are_placed or not is_known:
        return compiled.eagerly(einsum, expression, *operands, save=save, async_op=async_op, **options)
    else:
        # Besides tensors, Dynamo passes on text, numbers, and tuples and dicts of them.
        given = {key: value for key, value in options.items() if value is not None}
        given["mesh"] = compiled.constant_mesh(mesh)
        if comm_dtype is not None:
            pair = comm_dtype_of(comm_dtype, operands[0].dtype)
            given["comm_dtype"] = tuple(str(dtype) for dtype in pair)
        y = _recorded([autocast(x) for x in operands], expression, save, given)
        compiled.raise_refusal()
    return PendingTensor(y, y.shape, y) if async_op else y


@torch._dynamo.nonstrict_trace
def _recorded(operands: list[Tensor], expression: str, save: str, options: dict[str, Any]) -> Tensor:
    mesh, comm_dtype = compiled.mesh_of_constant(options["mesh"]), compiled.comm_dtype_of_names(options)
    try:
        return _traced(expression, operands, save, {**options, "mesh": mesh, "comm_dtype": comm_dtype})
    except XshardError as error:
        compiled.refusals.append(error)
        return operands[0]


def _traced(expression: Any, blocks: list[Tensor], save: str, options: dict[str, Any]) -> Tensor:
    compiled.check_no_transform()
    facts = tuple((tuple(map(int, x.shape)), x.dtype, x.device) for x in blocks)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in blocks)
    with unset_fake_temporarily(), disable_proxy_modes_tracing():  # groups and cached tensors must be real
        executable = executable_of(Asked.of(expression, **options), facts, differentiated, world())
    lowering = replace(executable.lowering, lower=_lowered)
    return lowering.contraction(executable.plan)(blocks, save == "used", False)


def _lowered(plan: Plan, processes: ProcessMesh, tensor_device: torch.device) -> Executable:
    return lower_traced(plan, processes, tensor_device, {})
