"""What a parallel model knows of itself: its parameters, its units, and who sums its gradients.

Decides where that is kept, what is compared in the first step, and for the norm of the whole gradient which
process counts which element: blocks of cut parameters count everywhere, equal ones once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.models.gradients import Gradients, paused
from torch_bridge.models.parameters import Kept, Setting
from torch_bridge.models.units import Unit
from torch_bridge.redistribution import redistribute
from xshard import XshardError
from xshard.models import Use

ATTRIBUTE = "_xshard_parallel"


@dataclass(eq=False, repr=False)
class Parallel:
    """The state of a parallel model; its copies have their own. uses: of every parameter, by name."""

    setting: Setting
    kept: Sequence[Kept]
    uses: dict[str, Use]
    units: Sequence[Unit]
    gradients: Gradients

    def __post_init__(self) -> None:
        self.gradients.after_first = self.compare

    def begin(self, module: nn.Module, args: Any) -> None:
        """A hook of the model, before its forward pass."""
        if not torch.compiler.is_compiling():
            self.gradients.prepare()

    def compare(self) -> None:
        """Raise ReplicaError, on all processes, where what should be equal is not."""
        for each in self.kept:
            x = each.tensor
            if not isinstance(x, nn.Parameter):
                continue  # running statistics may differ
            for what, block in (("", x), ("the gradient of ", x.grad)):
                if block is not None and not block.is_meta:
                    self.setting.compare(block, each.sharding, what + each.name)


def parallel_of(model: nn.Module) -> Parallel:
    """The state of a parallel model. Raises XshardError for any other."""
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, Parallel):
        raise XshardError(
            f"a {type(model).__name__} that is not parallel", hint="parallelize(model, mesh, ...)"
        )
    return found


def check_replicas(model: nn.Module) -> None:
    """Raise ReplicaError, on all processes, where parameters, or gradients, that should be equal are not.

    All processes call it. Every parallel model is checked so after its first backward pass.
    """
    parallel_of(model).compare()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, `.grad` gathers this process's share of the gradients; the next backward pass outside sums it.

    Gradients of parameters that are gathered for use are summed at once, as ever.
    """
    return paused(parallel_of(model).gradients)


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
