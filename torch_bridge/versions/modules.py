"""Modules of `torch.nn`: their dicts of parameters, children and hooks; checks of input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from xshard import XshardError

# The function in which `torch.nn.utils.clip_grad_norm_` ends: it scales, when the norm is known.
CLIP_TARGET = "_clip_grads_with_norm_"

# All hooks around the forward pass that a module has, by the name of their dict.
_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters, to write to.

    A module uses whatever is in it. Attributes would not do: `nn.Module` takes no plain tensor, as
    a gathered one is, in the place of a parameter.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own buffers, to write to.

    A buffer is replaced there, and not registered anew.
    """
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's children; None for a child that may be missing.

    `named_children` leaves out a missing child, and a second name of the same one.
    """
    return module._modules


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name: one that the model has twice has two names.

    Raises XshardError for a module inside itself.

    Without the names beside the first, rules and parameters of such a module would not meet.
    """
    try:
        return dict(model.named_modules(remove_duplicate=False))
    except RecursionError:
        hint = "a list keeps a module out of the tree of modules: self.outer = [outer]"
        raise XshardError("a module of the model is inside itself", hint=hint) from None


def replace_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Give a module another dict of children.

    Setting children by name would run the model's own `__setattr__`, and write to the dict that a
    copy of the module shares.
    """
    module._modules = children


def share_tensors_and_children(module: nn.Module, source: nn.Module) -> None:
    """Let a module have the parameters, buffers and children of another, in the same dicts.

    Without it, names of parameters and the state dict would get the name of a wrapped module before
    them.
    """
    module._parameters = source._parameters
    module._buffers = source._buffers
    module._modules = source._modules


def forward_hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of a module's hooks before and after its forward pass, to delete from.

    Without them, a copy of a parallel model would keep the hooks of the original: handles stay with
    it.
    """
    return [module._forward_pre_hooks, module._forward_hooks]


def copy_forward_hooks(module: nn.Module, source: nn.Module) -> None:
    """Give a module copies of the hooks of another.

    Without copies, a hook added to one of two modules with the same attributes would run in the
    other too.
    """
    for name in _FORWARD_HOOKS:
        module.__dict__[name] = getattr(source, name).copy()


def check_input_dim(layer: Any, x: Tensor) -> None:
    """Raise torch's own error for a number of dims that a norm layer does not take.

    Without it, `BatchNorm1d` would take a block of four dims.
    """
    layer._check_input_dim(x)


def dim_count_without_batch(layer: Any) -> int:
    """Return the number of dims of one sample of an instance norm: 2 for `InstanceNorm1d`.

    Without it, one sample would be taken for a batch of them.
    """
    count: int = layer._get_no_batch_dim()
    return count


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` wrapped; or the model itself.

    Without it, names of the modules of a compiled model would begin with the name of the wrapper.
    """
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def clipping_function() -> Any:
    """Return the function in which torch's `clip_grad_norm_` ends; None if torch lacks it."""
    return getattr(clip_grad, CLIP_TARGET, None)


def replace_clipping_function(function: Callable[..., None]) -> None:
    """Let torch's `clip_grad_norm_` end in a function of ours.

    Without it nothing stops the norm of blocks, which is too small and differs between processes:
    torch has no hook there.
    """
    setattr(clip_grad, CLIP_TARGET, function)
