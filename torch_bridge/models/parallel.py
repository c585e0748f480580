"""A parallel model: its parameters, hooks and gradients, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding, XshardError
from xshard.models import ParameterUse, use_of

ATTRIBUTE = "_xshard_parallel"

Arrives = Callable[[tuple[Any, ...], dict[str, Any]], dict[Any, tuple[Layout, tuple[int, ...] | None]]]


@dataclass(eq=False, repr=False)
class ParallelModel:
    """The state of a parallel model. uses: every parameter's use, by name. arrives: as the method `arrivals`,
    which goes by rules without it. original: the model on one device, if that is another module.
    """

    context: ParallelContext
    parameters: Sequence[ShardedParameter]
    uses: dict[str, ParameterUse]
    hooks: Sequence[ModuleHooks]
    gradients: Gradients
    arrives: Arrives | None = None
    original: nn.Module | None = None

    def __post_init__(self) -> None:
        self.gradients.after_first = self.compare

    @classmethod
    def of_replicated(
        cls, model: nn.Module, context: ParallelContext, original: nn.Module, arrives: Arrives
    ) -> ParallelModel:
        """The state of a model with replicated parameters, which sums their gradients by itself."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        varying = frozenset(context.axes.axes)
        parameters, uses = [], {}
        for name, x in tensors.items():
            path, _, attribute = name.rpartition(".")
            use = use_of("...", x.ndim, context.axes, varying)
            sharding = Sharding(use.stored, context.axes, tuple(x.shape))
            owners = [(model.get_submodule(path), attribute)]
            parameters.append(ShardedParameter([name], owners, sharding, varying))
            if isinstance(x, nn.Parameter):
                uses[name] = use
        return cls(context, parameters, uses, (), Gradients(context, (), None), arrives, original)

    def arrivals(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        """The layouts and global shapes of the sharded inputs of the model, by position or name."""
        if self.arrives is not None:
            return self.arrives(args, kwargs)
        root = next((hooks for hooks in self.hooks if not hooks.name), None)
        rules = () if root is None else root.inputs
        return {root.argument(each.key, args, kwargs): (each.rule.src, None) for each in rules if root}

    def begin(self, module: nn.Module, args: Any) -> None:
        """A hook of the model, before its forward pass."""
        if not torch.compiler.is_compiling():
            self.gradients.prepare()

    def compare(self) -> None:
        """Raise ReplicaError, on all processes, if parameters or gradients that should be equal are not."""
        for each in self.parameters:
            x = each.tensor
            if not isinstance(x, nn.Parameter):
                continue  # running statistics may differ
            for what, block in (("", x), ("the gradient of ", x.grad)):
                if block is not None and not block.is_meta:
                    self.context.compare(block, each.sharding, what + each.name)


def parallel_of(model: nn.Module) -> ParallelModel:
    """Return the state of a parallel model. Raises XshardError for any other."""
    state = getattr(model, ATTRIBUTE, None)
    if not isinstance(state, ParallelModel):
        raise XshardError(f"a {type(model).__name__} that is not parallel", hint="parallelize(model, ...)")
    return state


def check_replicas(model: nn.Module) -> None:
    """Raise ReplicaError, on all processes, if parameters, or gradients, that should be equal are not.

    All processes call it. `parallelize` checks every model after its first backward pass.
    """
    parallel_of(model).compare()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, `.grad` adds up this process's share of the gradients; the next backward pass outside sums it.

    Gradients of parameters that are gathered for use, as in `domain_parallel`, are always summed at once.
    """
    gradients = parallel_of(model).gradients
    before, gradients.syncs = gradients.syncs, False
    try:
        yield
    finally:
        gradients.syncs = before


@torch.no_grad()
def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients of a parallel model, as one process would compute it: a scalar.

    Every element of the whole gradient counts once. All processes call it, after `backward()`. Raises
    XshardError if gradients are not yet summed, after passes inside `no_sync` alone.
    """
    parallel = parallel_of(model)
    if parallel.gradients.unsummed:
        hint = "one backward pass outside of no_sync sums them"
        raise XshardError("gradients are each process's share", hint=hint)
    context, is_largest = parallel.context, math.isinf(norm_type)
    coords = zip(context.axes.axes, context.axes.coords(context.processes.device), strict=True)
    later_along = {axis for axis, i in coords if i}
    example = next((each.tensor for each in parallel.parameters), torch.zeros(()))
    norms = [torch.zeros((), dtype=torch.promote_types(example.dtype, torch.float32), device=example.device)]
    for each in parallel.parameters:
        gradient = each.tensor.grad
        is_first = later_along <= set(each.sharding.layout.axes)  # of the processes with the same block
        if gradient is not None and is_first and gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide).to(norms[0]))
    block = torch.stack(norms)
    block = block.max() if is_largest else (block**norm_type).sum()
    reduction, axes = "max" if is_largest else "sum", ",".join(context.axes.axes)
    total = redistribute(block, f"() | {reduction}({axes}) -> ()", context.mesh)
    return total if is_largest else total ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a parallel model so that their norm is at most `max_norm` -> the norm before.

    As `torch.nn.utils.clip_grad_norm_`, for the whole gradient. Raises as `grad_norm` does.
    """
    total = grad_norm(model, norm_type)
    tensors = [each.tensor for each in parallel_of(model).parameters]
    torch.nn.utils.clip_grads_with_norm_([x for x in tensors if x.grad is not None], max_norm, total)
    return total
