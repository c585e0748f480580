"""Keeps torch's own code from taking the blocks of a parallel model for whole tensors.

Norms of gradients are refused, and so are optimizers whose step on a block is not that on the
whole: a trial on a small tensor tells. A `GradScaler` skips a step on all processes or on none.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_bridge.models.living import living_models
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.versions.modes import constant_while_traced
from torch_bridge.versions.modules import norm_of, replace_gradient_functions, unscale_gradients
from xshard import Sharding, XshardError

# Optimizers that were tried, with flags: which of their tensors they train.
_TRIED: WeakKeyDictionary[Optimizer, list[bool]] = WeakKeyDictionary()
_REFUSING: WeakSet[Optimizer] = WeakSet()  # optimizers whose `state_dict()` is refused


def guard_blocks() -> None:
    """From now on, let torch's own code know which tensors are blocks of parallel models."""
    _change_torch()
    _TRIED.clear()  # an optimizer may be older than the blocks that it trains


@functools.cache
def _change_torch() -> None:
    """Put the guards into torch, once in a program."""
    replace_gradient_functions(_norm_unless_blocks, _unscale_on_all_processes)
    # A compiled step calls it while it is traced.
    register_optimizer_step_pre_hook(constant_while_traced(_check_optimizer))


def _address(x: Tensor) -> int:
    """Return where the elements of a tensor are: an address that it shares with `x.detach()`."""
    if x.layout != torch.strided:
        return id(x)
    return x.data_ptr() or id(x)  # no elements, as on the meta device, are at 0


class _Block(NamedTuple):
    """A block of a parallel model: the name of its parameter, and the model's mesh and options."""

    name: str
    context: ParallelContext


def _blocks_among(tensors: Iterable[Tensor]) -> list[_Block]:
    """Find the blocks of parallel models among tensors, in their order.

    The gradient of a block is one, too. A parameter that is whole on every process is none.
    """
    blocks = {}
    for model in living_models():
        for parameter in model.cut_parameters:
            x = parameter.tensor
            if x.requires_grad:
                for block in filter(torch.is_tensor, (x, x.grad)):
                    blocks[_address(block)] = _Block(parameter.name, model.context)
    return [blocks[_address(x)] for x in tensors if _address(x) in blocks]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer trains."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def _norm_unless_blocks(tensors: Any, *args: Any, **options: Any) -> Tensor:
    """Return the norm of gradients as torch does. Raises XshardError for blocks."""
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    blocks = _blocks_among(gradients)
    if blocks:
        reason = "torch's clip_grad_norm_ and get_total_norm would take the block of "
        reason += f"{blocks[0].name} for the whole"
        hint = "xt.clip_grad_norm_(model, max_norm), or xt.grad_norm(model)"
        raise XshardError(reason, hint=hint)
    return norm_of(gradients, *args, **options)


def _unscale_on_all_processes(
    scaler: Any, optimizer: Optimizer, inverse_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> Any:
    """Unscale gradients as a `GradScaler` does, and return overflows, the same on all processes."""
    found_inf_by_device = unscale_gradients(scaler, optimizer, inverse_scale, found_inf, allow_fp16)
    # In the order of the optimizer's parameters, which is the same on all processes.
    contexts = dict.fromkeys(block.context for block in _blocks_among(parameters_of(optimizer)))
    if not contexts:
        return found_inf_by_device
    # A process without gradients takes part, too: it adds nothing to `found`, which is 0.
    found_inf = sum(found_inf_by_device.values(), found_inf)
    for context in contexts:
        found_inf = context.all_reduce(found_inf, "max")
    return {found_inf.device: found_inf}


def check_parametrizations(used: Mapping[str, Sharding]) -> None:
    """Raise XshardError if a parametrization of torch would compute a weight from blocks.

    `spectral_norm` and `orthogonal` need all of it. `weight_norm` needs the lengths (original0) of
    just those rows whose directions (original1) it has: both are "o/tp i".

    Args:
        used: How modules use each parameter, by name.
    """
    # For each weight, the tensors it is computed of, with the indices of their sharded dims.
    cut_dims_of_weights: dict[str, dict[str, list[int]]] = {}
    for name, sharding in used.items():
        if ".parametrizations." in f".{name}":
            dims = enumerate(sharding.layout.dims)
            cut_dims = [i for i, dim in dims if sharding.mesh.size(*dim.axes) > 1]
            # "....original0" and "....original1" are of one weight.
            weight = name.rpartition(".original")[0] or name
            cut_dims_of_weights.setdefault(weight, {})[name] = cut_dims
    for cut_dims_of in cut_dims_of_weights.values():
        names_of_blocks = [name for name, cut_dims in cut_dims_of.items() if cut_dims]
        first_cut_dims, *others = cut_dims_of.values()
        are_cut_alike = bool(others) and all(cut_dims == first_cut_dims for cut_dims in others)
        if names_of_blocks and not are_cut_alike:
            reason = f"a parametrization would take the block of {names_of_blocks[0]} for the whole"
            raise XshardError(reason, hint="gather it for its use, as in 'o/tp i -> o i'")


def _check_optimizer(optimizer: Optimizer, *hook_arguments: Any) -> None:
    """Raise XshardError if an optimizer would take blocks for the whole; a hook before each step.

    AdamW passes, as it updates each element by itself. Muon does not.
    """
    trains = [x.requires_grad for x in parameters_of(optimizer)]
    if _TRIED.get(optimizer) == trains:
        return
    for group in optimizer.param_groups:
        # An optimizer may treat vectors, matrices and kernels of convolutions in different ways.
        for n_dims in sorted({x.ndim for x in group["params"]}, reverse=True):
            blocks = _blocks_among(x for x in group["params"] if x.ndim == n_dims)
            if not blocks:
                continue
            _check_step_on_blocks(optimizer, group, blocks[0].name, n_dims)
            if optimizer not in _REFUSING:
                optimizer.register_state_dict_pre_hook(_refuse_state_dict)
                _REFUSING.add(optimizer)
    _TRIED[optimizer] = trains


def _refuse_state_dict(optimizer: Optimizer) -> None:
    """Raise XshardError for `state_dict()` of an optimizer of blocks, which it would give out as whole."""
    blocks = _blocks_among(parameters_of(optimizer))
    if blocks:
        reason = f"state_dict() of an optimizer of blocks has blocks, as of {blocks[0].name}"
        hint = "xt.optimizer_state_dict(model, optimizer) has DTensors; "
        hint += 'xt.save({"model": model, "optimizer": optimizer}, folder) saves both'
        raise XshardError(reason, hint=hint)


def _check_step_on_blocks(optimizer: Optimizer, group: Any, name: str, n_dims: int) -> None:
    """Raise XshardError unless stepping a block gives what stepping the whole gives for its elements.

    Args:
        optimizer: The optimizer; it is left alone, and new ones of its class are tried.
        group: A group of its parameters, for options and the device.
        name: The name of a block among them.
        n_dims: How many dims this block has.
    """
    optimizer_class: Any = type(optimizer)
    # SparseAdam is as Adam, and needs sparse gradients, where those of the trial are dense.
    if optimizer_class is SparseAdam or getattr(optimizer_class, "handles_blocks", False):
        return
    whole = _trial_values(n_dims, group["params"][0].device)
    # The middle of each dim: rows 8:32 of 48.
    block = tuple(slice(length // 6, length * 2 // 3) for length in whole.shape[1:])
    finding = "its step on a block is not that on the whole"
    try:
        expected = _parameter_after_steps(optimizer, group, whole)[block]
        result = _parameter_after_steps(optimizer, group, whole[(slice(None), *block)])
        if torch.allclose(result, expected, atol=1e-4, equal_nan=True):
            return
    except Exception as error:  # of any kind: it is the optimizer's own code
        finding = f"in a trial it raises {error!r}"
    reason = f"{optimizer_class.__name__} would take the block of {name} for the whole: {finding}"
    hint = "AdamW, or another that updates each element by itself; or store it whole; or "
    hint += f"{optimizer_class.__name__}.handles_blocks = True, if it sends what it needs"
    raise XshardError(reason, hint=hint)


def _trial_values(n_dims: int, device: torch.device) -> Tensor:
    """Make a parameter and the gradients of some steps, stacked: [13, 48, 48, 4, 4] for four dims.

    `tan` gives many magnitudes, so that limits on norms show. Steps are many and the first dims are
    long, as some optimizers begin with plain steps or treat short dims otherwise.
    """
    n_steps = 12
    shape = (48, 48, *[4] * (n_dims - 2)) if n_dims > 1 else (48 * 48,)
    n_values = (1 + n_steps) * math.prod(shape)
    return torch.arange(float(n_values), device=device).tan().view(1 + n_steps, *shape)


def _parameter_after_steps(optimizer: Optimizer, group: Any, values: Tensor) -> Tensor:
    """Train `values[0]` by a new optimizer, a step for each of the gradients `values[1:]`.

    Comparing the result for the whole with that for a block shows whether a step of an element needs
    others.

    Args:
        optimizer: The user's optimizer, which is left alone.
        group: The group of its parameters whose options the new optimizer has.
        values: As of `_trial_values`, or a block of these.
    """
    x, *gradients = values.clone()
    trial = _optimizer_like(optimizer, group, x)
    for gradient in gradients:
        x.grad = gradient
        # LBFGS and others ask for the loss: it is one number for all blocks, here 0.
        trial.step(lambda: 0.0)
    return x


def _optimizer_like(optimizer: Optimizer, group: Any, x: Tensor) -> Any:
    """Make an optimizer of one tensor with the options of a group, and the user's plain attributes."""
    # The user's rate may be 0, as a schedule begins: all optimizers would agree.
    options = {**group, "lr": 0.5, "params": [x]}
    # Some optimizers keep options as attributes: `self.max_norm = max_norm`.
    attributes = {}
    for name, value in vars(optimizer).items():
        if name not in options and isinstance(value, bool | int | float | str | None):
            attributes[name] = value
    known = {**attributes, **options}
    # Its class may have arguments without a default.
    _, *parameters = inspect.signature(type(optimizer)).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    make: Any = type(optimizer)
    like = make([options], **{name: known[name] for name in required if name in known})
    vars(like).update(attributes)
    return like
