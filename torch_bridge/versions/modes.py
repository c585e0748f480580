"""Modes that see the operations of torch or change them, and what they see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge.versions.autograd import is_forward_mode_enabled
from torch_bridge.versions.support import private_names

with private_names():
    # Tensors with shapes and without values. torch documents them, by this private address.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    # The base class of modes that see each operation; documented, by this private address.
    from torch.utils._python_dispatch import TorchDispatchMode

    # Hot: how many dispatch modes are active. Without it each call would look at each of them.
    dispatch_mode_count = torch._C._len_torch_dispatch_stack

    # Hot: whether a profiler is active. Without it every call that sends messages would record
    # their name, which takes 6 us.
    is_profiling = torch._C._autograd._profiler_enabled

    # Hot: whether autocast is active for any kind of device. Without it, every call would ask for
    # the kind of each of its blocks.
    is_any_autocast_enabled = torch._C._is_any_autocast_enabled

    # A context without dispatch modes. Without it, tensors that only we see, such as a digest of a
    # plan, would become fake while a compiler traces, and a mode would count their messages.
    from torch.utils._python_dispatch import _disable_current_modes as without_modes

    # A context in which no function mode, as of layers that follow blocks, sees the functions that
    # are called. Without it, functions inside a layer, which work on its block alone, would be
    # taken for functions of the array.
    without_torch_function: Any = torch._C.DisableTorchFunction

    # The function modes that are active now. Without it, every part of a running model would enter
    # the model anew.
    from torch.overrides import _get_current_function_mode_stack as function_modes

    # What a class of tensors has in the place of `__torch_function__` if its functions return plain
    # tensors. Without it, each attribute of a read-only block would be a function of the class.
    plain_torch_function: Any = torch._C._disabled_torch_function_impl

    # A tensor of a class of ours, with the memory of another. Without it the class could not add to
    # a tensor what it knows about its memory.
    subclass_of: Any = Tensor._make_subclass

    # The last function mode, taken from the stack and put there again.
    from torch.overrides import _pop_mode, _push_mode

    _dispatch_mode = torch._C._get_dispatch_mode
    _is_torch_function_enabled = torch._C._is_torch_function_enabled
    # What runs in place of Python's frames: the compiler's, in what it has compiled.
    _frame_evaluation = torch._C._dynamo.eval_frame.get_eval_frame_callback
    _FAKE = torch._C._TorchDispatchModeKey.FAKE

__all__ = [
    "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "constant_while_traced", "dispatch_mode_count",
    "function_modes",
    "is_any_autocast_enabled", "is_faking", "is_profiling", "plain_torch_function",
    "remove_function_mode", "schema_of", "state_of_thread", "subclass_of",
    "unset_fake_temporarily", "without_modes", "without_torch_function",
]  # fmt: skip


def constant_while_traced(function: Any) -> Any:
    """Let the compiler call a function while it traces, and take the result for a constant.

    Without it: `torch.compiler.assume_constant_result`, which does the same, imports the compiler, half
    a second for programs that compile nothing.
    """
    function._dynamo_marked_constant = True
    return function


def is_faking() -> bool:
    """Return whether torch makes fake tensors now.

    Without it, an executable made during a trace would be kept with fake constants, and used by
    ordinary calls.
    """
    return _dispatch_mode(_FAKE) is not None


def state_of_thread() -> tuple[Any, ...]:
    """Return what torch keeps for a thread, but for hooks of saved tensors: autocast, modes, the stream.

    Without it, a coroutine would go on under `no_grad` or autocast of another one of its thread.
    """
    autocast: list[Any] = [torch.is_autocast_cache_enabled()]
    for kind in ("cpu", "cuda"):
        autocast += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_forward_mode_enabled(),
        tuple(autocast),
        tuple(map(id, function_modes())),
        _is_torch_function_enabled(),
        dispatch_mode_count(),
        _frame_evaluation(),
        stream,
    )


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: its name, and its arguments with their defaults.

    Without it, a recorded operation would have only the arguments that its caller gave, without
    names.
    """
    return operation._schema


def remove_function_mode(mode: Any) -> None:
    """Remove a function mode, which others may be above of.

    Without it, a mode of a call that was interrupted would stay, or another one go in its place.
    """
    if not function_modes():
        return
    top = _pop_mode()
    if top is not mode:
        remove_function_mode(mode)
        _push_mode(top)
