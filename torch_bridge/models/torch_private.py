"""The private names of torch that models need, one function each, with what breaks without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters, to write to.

    A module uses whatever is in it. Attributes would not do: `nn.Module` takes no plain tensor, as a
    gathered one is, in the place of a parameter.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own buffers, to write to: a buffer is replaced, not registered anew."""
    return module._buffers


def writes_to(x: Tensor) -> int:
    """Count the writes to a tensor's memory.

    It tells a parameter that an optimiser has changed from one that is as it was gathered. Without it, a
    backward pass could use other values than its forward pass.
    """
    return x._version


def is_in_backward_pass() -> bool:
    """Return whether autograd runs a backward pass on this thread, as when a checkpoint runs a module again.

    Without it, a module that is computed again would undo the backward pass that it is a part of.
    """
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Let autograd call a function at the end of the running backward pass.

    Without it, nothing would tell when the last gradient has come, as some may never come.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def shape_in_graph(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape that autograd's node for a parameter expects of a gradient.

    The node lives as long as a graph that uses the parameter. Without the question, a backward pass through
    an older graph would fail with shapes that nobody could explain.
    """
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    node: Any = view.grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it has one, and a parent
    return tuple(node._input_metadata[0].shape)


def forward_hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of a module's hooks before and after its forward pass, to delete from.

    Without them, a copy of a parallel model would keep the hooks of the original: handles stay with it.
    """
    return [module._forward_pre_hooks, module._forward_hooks]
