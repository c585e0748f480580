"""A parallel model: its parameters, hooks and gradients, their norm, and notes on errors inside it."""

from __future__ import annotations

import itertools
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.redistribution import redistribute
from xshard import Sharding, XshardError
from xshard.models import ParameterUse, written

ATTRIBUTE = "_xshard_parallel"
GUARDED: WeakSet[ParallelModel] = (
    WeakSet()
)  # models with blocks, which torch would take for whole tensors
NOTE = "in the parallel module "
LISTED = 8  # most parameters, and most attributes, in a note


@dataclass(eq=False, repr=False)
class ParallelModel:
    """The state of a parallel model. uses, hooks: by names of parameters and modules. arrives: `arrivals` of
    a model without rules. original: the model on one device, if that is another module. names: the modules'.
    counts: modules, attributes that count a process's part, and their values on one device.
    """

    context: ParallelContext
    parameters: Sequence[ShardedParameter]
    uses: dict[str, ParameterUse]
    hooks: Mapping[str, ModuleHooks]
    gradients: Gradients
    arrives: Callable[[Mapping[Any, Any]], dict[Any, Any]] | None = None
    original: nn.Module | None = None
    names: Mapping[nn.Module, str] = field(default_factory=dict)
    counts: Sequence[tuple[nn.Module, str, int]] = ()

    def __post_init__(self) -> None:
        self.gradients.after_first = self.compare
        GUARDED.add(self)

    def arrivals(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """The layouts and global shapes of the sharded inputs of the model, by position or name."""
        if self.arrives is not None:
            return self.arrives(values)
        roots = [self.hooks[""]] if "" in self.hooks else []
        return {
            root.argument(x.key, values): (x.rule.src, None) for root in roots for x in root.inputs
        }

    def begin(self, module: nn.Module, args: Any) -> None:
        """A hook of the model, before its forward pass."""
        if not torch.compiler.is_compiling():
            GUARDED.add(self)  # also a copy
            self.gradients.prepare()

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """A hook of modules, always called: an error that leaves one gets a note, once."""
        error = None if torch.compiler.is_compiling() else sys.exc_info()[1]
        noted = any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))
        # An error of another frame is handled outside of the model.
        if (
            error
            and not noted
            and getattr(error.__traceback__, "tb_frame", None) is sys._getframe(1)
        ):
            error.add_note(_note_on(error, self))

    def refuse(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """A hook of modules with blocks, before `state_dict()`; keep_vars asks for the tensors themselves."""
        if not keep_vars:
            what = f"state_dict() of a parallel model has blocks, as of {self.sharded[0].name}"
            hint = "xt.state_dict(model) has DTensors, .full_tensor() is whole; keep_vars=True has blocks"
            raise XshardError(what, hint=hint)

    @property
    def unsummed(self) -> bool:
        """Whether gradients are each process's share, after passes inside `no_sync` alone."""
        return self.gradients.unsummed or any(
            each.kept and each.kept.waits for each in self.hooks.values()
        )

    @property
    def sharded(self) -> list[ShardedParameter]:
        """Parameters and buffers with less than the whole on a process."""
        return [each for each in self.parameters if each.sharding.layout.axes]

    @property
    def by_name(self) -> dict[str, ShardedParameter]:
        """Parameters and buffers under each of their names."""
        return {name: each for each in self.parameters for name in each.names}

    def used_inside(self, path: str) -> dict[str, Sharding]:
        """The parameters inside a module by name, as modules use them."""
        return {
            name: each.sharding.with_layout(
                self.uses[name].used.in_order(self.uses[name].stored.names)
            )
            for name, each in self.by_name.items()
            if name in self.uses and name.startswith(path and f"{path}.")
        }

    def compare(self) -> None:
        """Raise ReplicaError, on all processes, if parameters or gradients that should be equal are not."""
        # Statistics, which are buffers, may differ.
        trained = [each for each in self.parameters if isinstance(each.tensor, nn.Parameter)]
        pairs = [(each, what) for each in trained for what in ("", "the gradient of ")]
        blocks = (
            (what + x.name, x.tensor.grad if what else x.tensor, x.sharding) for x, what in pairs
        )
        self.context.compare(each for each in blocks if each[1] is not None and not each[1].is_meta)


def parallel_of(model: nn.Module) -> ParallelModel:
    """Return the state of a parallel model. Raises XshardError for any other."""
    state = getattr(model, ATTRIBUTE, None)
    if not isinstance(state, ParallelModel):
        hint = (
            "parallelize(model, ...)" if isinstance(model, nn.Module) else "pass the model itself"
        )
        raise XshardError(f"a {type(model).__name__} that is not parallel", hint=hint)
    return state


def described(title: str, parallel: ParallelModel, path: str, ruled: str | None = None) -> str:
    """A title, the rules of a module (`ruled`, or `path`), and the parameters inside a path, with blocks."""
    hooks = parallel.hooks.get(path if ruled is None else ruled)
    lines = [title]
    for side, rules in (("input", hooks.inputs), ("output", hooks.outputs)) if hooks else ():
        of = f"{side} of {(hooks and hooks.name) or 'the model'}"
        lines += [f"{of}: {text}" for text in [each.rule.text for each in rules] or ["no rule"]]
    for name, each in [*parallel.used_inside(path).items()][:LISTED]:
        block = each.local_shape(parallel.context.processes.device)
        lines.append(f"{name}: {written(each.layout)}, block {block} of {each.shape}")
    return "\n  ".join(lines)


def _note_on(error: BaseException, parallel: ParallelModel) -> str:
    """A note on an error in one of the modules: its rules and blocks, and what it counts by itself."""
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [
        *dict.fromkeys(x for x in called if isinstance(x, nn.Module) and x in parallel.names)
    ][::-1]
    paths = [parallel.names[module] for module in modules]
    title = f"{NOTE}{paths[0] or '(the model)'}, a {type(modules[0]).__name__}"
    ruled = next((path for path in paths if path in parallel.hooks), paths[0])
    path = next((path for path in paths if parallel.used_inside(path)), "")
    lines = [described(title, parallel, path, ruled)]
    every = parallel.used_inside(paths[-1]).values()
    sharded = {
        n for each in every for n, dim in zip(each.shape, each.layout.dims, strict=True) if dim.axes
    }
    for path, module in zip(paths, modules, strict=True):
        if counted := ", ".join(_counted(module, sharded)[:LISTED]):
            hint = "whole lengths of sharded dims: counts= makes them local"
            lines.append(f"{path or 'the model'} has {counted}, {hint}")
    return "\n  ".join(lines)


def _counted(module: nn.Module, lengths: Collection[int]) -> list[str]:
    """The attributes of a module, and products of two, that are equal to one of the lengths."""
    if isinstance(module, nn.Linear | nn.Embedding):  # which do not read theirs
        return []
    numbers = [(f"{name}={n}", n) for name, n in vars(module).items() if type(n) is int and n > 1]
    products = [(f"{a} * {b}", m * n) for (a, m), (b, n) in itertools.combinations(numbers, 2)]
    return [text for text, n in (*numbers, *products) if n in lengths]


def check_replicas(model: nn.Module) -> None:
    """Raise ReplicaError, on all processes, if parameters, or gradients, that should be equal are not.

    All processes call it. `parallelize` checks every model after its first backward pass.
    """
    parallel_of(model).compare()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, `.grad` adds up this process's share of the gradients; the next backward pass outside sums it.

    Parameters that `keep=` of `parallelize` names are gathered once, by the first pass inside, and their
    gradients summed once, too. Gradients of others that are gathered for use are always summed at once.
    """
    gradients = parallel_of(model).gradients
    before = gradients.syncs
    gradients.syncs = False
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
    if parallel.unsummed:
        raise XshardError(
            "gradients are each process's share", hint="a pass outside of no_sync sums them"
        )
    context = parallel.context
    is_largest = math.isinf(norm_type)
    coords = zip(context.axes.axes, context.axes.coords(context.processes.device), strict=True)
    later_along = {axis for axis, i in coords if i}
    example = next((each.tensor for each in parallel.parameters), torch.zeros(()))
    norms = [
        torch.zeros(
            (), dtype=torch.promote_types(example.dtype, torch.float32), device=example.device
        )
    ]
    for each in parallel.parameters:
        gradient = each.tensor.grad
        # The first of the processes with the same block counts it.
        if (
            gradient is not None
            and later_along <= set(each.sharding.layout.axes)
            and gradient.numel()
        ):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide).to(norms[0]))
    block = torch.stack(norms)
    block = block.max() if is_largest else (block**norm_type).sum()
    reduction = "max" if is_largest else "sum"
    axes = ",".join(context.axes.axes)
    total = redistribute(block, f"() | {reduction}({axes}) -> ()", context.mesh)
    return total if is_largest else total ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a parallel model so that their norm is at most `max_norm` -> the norm before.

    As `torch.nn.utils.clip_grad_norm_`, for the whole gradient. Raises as `grad_norm` does.
    """
    total = grad_norm(model, norm_type)
    tensors = [each.tensor for each in parallel_of(model).parameters]
    torch.nn.utils.clip_grads_with_norm_(
        [x for x in tensors if x.grad is not None], max_norm, total
    )
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
