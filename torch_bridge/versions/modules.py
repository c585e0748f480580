"""Modules of `torch.nn`: their dicts of parameters, children and hooks; checks of input; gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import utils
from torch.nn.utils import get_total_norm

from torch_bridge.versions.support import private_names
from xshard import XshardError

Function = TypeVar("Function", bound=Callable[..., Any])

with private_names():
    norm_of = get_total_norm.__closure__[0].cell_contents  # type: ignore[index]
    unscale_gradients = GradScaler._unscale_grads_
    # As FSDP2 finds tensors in arguments and results. Without it, those in a dataclass would not be cast.
    apply_to_tensors = utils._apply_to_tensors

    # Frames that Dynamo neither compiles nor looks into, unless a frame that it compiles calls them.
    # Without it, `module.compile()` would compile hooks apart from the forward pass: parameters would be
    # gathered in graphs that await them, and nothing would travel ahead.
    _frames: Any = torch._C._dynamo.eval_frame
    _SKIP = _frames._FrameAction.SKIP
    _EAGER = _frames._FrameExecStrategy(_SKIP, _SKIP)  # the frame, and those that it calls

# The code of a module's call, by which its frame is found on the stack.
CALL_CODE = nn.Module._call_impl.__code__

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


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before the module's forward pass.

    Without it, those that compute a weight of parameters, as of `torch.nn.utils.weight_norm`, would
    find blocks.
    """
    return bool(module._forward_pre_hooks)


def copy_forward_hooks(module: nn.Module, source: nn.Module) -> None:
    """Give a module copies of the hooks of another.

    Without copies, a hook added to one of two modules with the same attributes would run in the
    other too.
    """
    for name in _FORWARD_HOOKS:
        module.__dict__[name] = getattr(source, name).copy()


def beside_graphs(hook: Function) -> Function:
    """Let a hook run eagerly before or after the graph of a module that is compiled by itself.

    In the graph of a module around it, the hook is compiled with all else.
    """
    _frames.set_code_exec_strategy(cast(FunctionType, hook).__code__, _EAGER)
    return hook


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


COMPILED = "_orig_mod."  # what names have in them of modules inside a wrapper of `torch.compile`


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` wrapped; or the model itself.

    Without it, names of the modules of a compiled model would begin with the name of the wrapper.
    """
    inner: nn.Module = getattr(model, COMPILED.removesuffix("."), model)
    return inner


def replace_gradient_functions(norm: Any, unscale: Any) -> None:
    """Let torch call functions of ours in the place of `norm_of` and `unscale_gradients`.

    A program may have imported `get_total_norm` by name before. What it has is a wrapper of torch,
    which calls what is in its cell; `clip_grad_norm_` calls the wrapper. A `GradScaler` skips a step
    if its method finds overflows. Without ours, each process would decide by its blocks.
    """
    get_total_norm.__closure__[0].cell_contents = norm  # type: ignore[index]
    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
