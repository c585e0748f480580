"""A parallel model: its parameters, hooks and gradients, and their norm."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.notes import NOTE, note_on
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding, XshardError
from xshard.models import ParameterUse, use_of

ATTRIBUTE = "_xshard_parallel"
GUARDED: WeakSet[ParallelModel] = WeakSet()  # models with blocks, which torch would take for whole tensors

Arrives = Callable[[tuple[Any, ...], dict[str, Any]], dict[Any, tuple[Layout, tuple[int, ...] | None]]]


class Count(NamedTuple):
    """An integer attribute of a module: its value on one device, and its own on each of several."""

    owner: nn.Module
    name: str
    whole: int
    own: int


@dataclass(eq=False, repr=False)
class ParallelModel:
    """The state of a parallel model. uses: every parameter's use, by name. arrives: as the method `arrivals`,
    which goes by rules without it. original: the model on one device, if that is another module.
    names: the name of each module.
    """

    context: ParallelContext
    parameters: Sequence[ShardedParameter]
    uses: dict[str, ParameterUse]
    hooks: Sequence[ModuleHooks]
    gradients: Gradients
    arrives: Arrives | None = None
    original: nn.Module | None = None
    names: Mapping[nn.Module, str] = field(default_factory=dict)
    counts: Sequence[Count] = ()

    def __post_init__(self) -> None:
        self.gradients.after_first = self.compare
        GUARDED.add(self)

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
            GUARDED.add(self)  # also a copy
            self.gradients.prepare()

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """A hook of modules, always called: an error that leaves one gets a note, once."""
        error = None if torch.compiler.is_compiling() else sys.exc_info()[1]
        noted = any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))
        if error is None or noted or getattr(error.__traceback__, "tb_frame", None) is not sys._getframe(1):
            return  # no error, or one that is handled outside of the model
        error.add_note(note_on(error, self))

    def refuse(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """A hook of modules with blocks, before `state_dict()`; keep_vars asks for the tensors themselves."""
        if not keep_vars:
            what = f"state_dict() of a parallel model has blocks, as of {self.sharded[0].name}"
            hint = (
                "xt.state_dict(model) has DTensors, .full_tensor() is a whole one; keep_vars=True has blocks"
            )
            raise XshardError(what, hint=hint)

    @property
    def sharded(self) -> list[ShardedParameter]:
        """Parameters and buffers with less than the whole on a process."""
        return [each for each in self.parameters if each.sharding.layout.axes]

    @property
    def used(self) -> dict[str, Sharding]:
        """Parameters by name, as modules use them."""
        shapes = {name: each.sharding.shape for each in self.parameters for name in each.names}
        layouts = {name: use.used.in_order(use.stored.names) for name, use in self.uses.items()}
        return {name: Sharding(each, self.context.axes, shapes[name]) for name, each in layouts.items()}

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
        hint = "parallelize(model, ...)" if isinstance(model, nn.Module) else "pass the model itself"
        raise XshardError(f"a {type(model).__name__} that is not parallel", hint=hint)
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


def _scale(parameters: Any, *args: Any, **options: Any) -> None:
    """What torch's `clip_grad_norm_` ends in; raises for blocks, which its norm took for whole gradients."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    blocks = {id(each.tensor): each.name for model in GUARDED for each in model.sharded}
    if names := [blocks[id(x)] for x in parameters if id(x) in blocks]:
        what = f"torch.nn.utils.clip_grad_norm_ would take the block of {names[0]} for the whole"
        raise XshardError(what, hint="xt.clip_grad_norm_(model, max_norm)")
    torch.nn.utils.clip_grads_with_norm_(parameters, *args, **options)


clip_grad._clip_grads_with_norm_ = _scale
