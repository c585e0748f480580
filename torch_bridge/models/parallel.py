"""A parallel model: its parameters, hooks and gradients; their norm, and its state for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import from_placements, to_placements
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.redistribution import redistribute
from xshard import Layout, Mesh, Sharding, XshardError
from xshard.errors import PlanError, ShapeError, with_path
from xshard.models import ParameterUse, use_of
from xshard.state.files.loading import in_both

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


@torch.no_grad()
def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a parallel model under its own names: a DTensor for each sharded tensor.

    They share memory with the model, so that `torch.distributed.checkpoint` saves blocks and loads into them;
    `load_state_dict` ends a loading. A block under a layout that DTensors cannot have, as zigzag, or some
    uneven ones, is gathered, and its tensor is a whole copy. All processes call it.
    """
    parallel, state = parallel_of(model), model.state_dict()
    for each in parallel.parameters:
        if each.sharding.layout.axes:
            x = _stored(parallel, each)
            state.update((name, x) for name in each.names if name in state)
    return state


@torch.no_grad()
def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Copy values into the blocks of a parallel model: whole tensors, or DTensors under any placements.

    strict: require every name in both. Raises XshardError for a name in one of them only, and ShapeError.
    """
    parallel, own = parallel_of(model), model.state_dict()
    by_name = {name: each for each in parallel.parameters for name in each.names}
    for name in in_both(state, [[name] for name in own], strict, ("model", "state dict")):
        if name is not None:
            each = by_name.get(name)
            block = own[name] if each is None else each.tensor
            try:
                value = state[name] if each is None else _block(parallel, each, state[name])
                if value.shape != block.shape:
                    raise ShapeError(f"a value of shape {tuple(value.shape)} for {tuple(block.shape)}")
            except XshardError as error:
                raise with_path(error, name) from None
            block.copy_(value)


def _stored(parallel: ParallelModel, each: ShardedParameter) -> Tensor:
    sharding, context, block = each.sharding, parallel.context, each.tensor.detach()
    mesh: Any = context.mesh
    mesh = mesh if isinstance(mesh, DeviceMesh) else _device_mesh(mesh, block.device.type)
    try:
        to_placements(sharding.layout, mesh, sharding.shape)
    except PlanError:
        return each.gathered(context)
    return as_dtensor(block, sharding.layout, mesh, sharding.shape)


def _block(parallel: ParallelModel, each: ShardedParameter, value: Tensor) -> Tensor:
    layout, shape, context = each.sharding.layout, each.sharding.shape, parallel.context
    if tuple(value.shape) != shape:
        raise ShapeError(f"a value of shape {tuple(value.shape)}, not {shape}")
    value = value.to(each.tensor.device)
    if not isinstance(value, DTensor):
        return each.cut(value, context)
    src = from_placements(value.placements, value.device_mesh, value.ndim, shape).named(layout.names)
    return context.moved(value.to_local(), src, layout, shape)


@lru_cache(maxsize=64)
def _device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    return init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
