"""The norm of the whole gradient of a parallel model, whatever its layouts.

Decides which process counts which element: blocks of cut parameters count everywhere, equal ones once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torch_bridge.models.parallel import Parallel, parallel_of
from torch_bridge.redistribution import redistribute
from xshard import XshardError


@torch.no_grad()
def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of a parallel model, as one process would compute it -> a scalar.

    Every element of the whole gradient counts once. All processes call it, after `backward()`. Raises
    XshardError where gradients are not yet summed, after passes inside `no_sync` alone.
    """
    parallel = parallel_of(model)
    if parallel.gradients.unsummed:
        raise XshardError(
            "gradients are each process's share", hint="one backward pass outside of no_sync sums them"
        )
    setting, largest = parallel.setting, math.isinf(norm_type)
    found: list[Tensor] = []
    for each in parallel.kept:
        gradient = each.tensor.grad
        if gradient is not None and _counts(parallel, each.sharding.layout.axes) and gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            found.append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    example = next((each.tensor for each in parallel.kept), torch.zeros(()))
    zero = torch.zeros((), dtype=torch.promote_types(example.dtype, torch.float32), device=example.device)
    own = torch.stack([zero, *(x.to(zero) for x in found)])
    own = own.max() if largest else (own**norm_type).sum()
    how, axes = "max" if largest else "sum", ",".join(setting.axes.axes)
    total = redistribute(own, f"() | {how}({axes}) -> ()", setting.mesh)
    return total if largest else total ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a parallel model so that their norm is at most `max_norm` -> the norm before.

    As `torch.nn.utils.clip_grad_norm_`, for the whole gradient. Raises as `grad_norm` does.
    """
    total = grad_norm(model, norm_type)
    with_gradients = [each.tensor for each in parallel_of(model).kept if each.tensor.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(with_gradients, max_norm, total)
    return total


def _counts(parallel: Parallel, cut: tuple[str, ...]) -> bool:
    """Whether this process is the first of those with equal blocks, which differ along the axes `cut`."""
    mesh, device = parallel.setting.axes, parallel.setting.processes.device
    return not any(mesh.coords(device)[mesh.position(axis)] for axis in mesh.axes if axis not in cut)
