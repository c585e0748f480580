"""Activation checkpoints in the code of a domain-parallel model.

Decides that records also follow blocks through the second forward pass, which torch runs during the backward
pass, after the model has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint

from torch_bridge.nn.propagation import Propagation


def checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, also in the code of models that become domain-parallel.

    Calls the function; the backward pass computes its activations again. options: those of the function and
    of torch's checkpoint, except `use_reentrant`, which is False, and `context_fn`.

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
