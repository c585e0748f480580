"""Records follow blocks through a model's own code, between its layers.

Functions without a rule are refused on every process: a wrong result could have the right shape. Records also
follow blocks through the second forward pass of a checkpoint, during the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from torch_bridge.nn.placed import recorded
from torch_bridge.nn.propagation_rules import Function, not_of_blocks, of_whole, rule_of, tensors_in
from torch_bridge.nn.view_rules import VIEWS
from xshard import XshardError
from xshard.errors import with_path

# Functions that read properties of a tensor and return no tensor.
_READING = frozenset((
    "__bool__", "__format__", "__get__", "__hash__", "__len__", "__repr__", "__set__", "backward",
    "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "numel", "register_hook", "retain_grad", "size", "stride",
    "type",
))  # fmt: skip


class Propagation(TorchFunctionMode):
    """While it is active, functions of tensors with records give results with records, or are refused.

    paths: the path of each module of a model, by the module's id.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        placements = [p for p in map(recorded, tensors_in((*args, *kwargs.values()))) if p is not None]
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and func.__self__.__name__ in VIEWS:  # type: ignore[attr-defined]
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if not placements or name in _READING:
            return func(*args, **kwargs)
        try:
            if not any(placement.axes for placement in placements):
                return of_whole(func, args, kwargs, placements[0], name)
            rule = rule_of(name)
            if rule is None:
                raise not_of_blocks(name)
            if not args:
                args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
            return rule(func, args, kwargs)
        except XshardError as error:
            raise with_path(error, self._path()) from None

    def _path(self) -> str:
        """The path of the innermost module of the model on the call stack."""
        frame = sys._getframe(1)
        while frame is not None:
            path = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def is_followed() -> bool:
    """Whether records follow blocks now."""
    return any(isinstance(mode, Propagation) for mode in _get_current_function_mode_stack())


def checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, also in the code of models that become domain-parallel.

    Calls the function; the backward pass computes its activations again. options: keyword arguments of
    the function and of torch's checkpoint, except `use_reentrant`, which is False, and `context_fn`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.square, x).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    """
    return torch.utils.checkpoint.checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), Propagation({})),
        **options,
    )
