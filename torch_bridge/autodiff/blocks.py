"""User-supplied blocks -> tensors, with an error for anything else that suggests what to pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from torch_bridge.autodiff.pending import PendingTensor
from xshard.arguments import shown
from xshard.errors import XshardError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_tensor(
    x: Any, name: str = "x", usage: str = "the tensor comes first, as in redistribute(x, layouts, mesh)"
) -> Tensor:
    """The tensor, or the result of a redistribution in flight. Raises XshardError with `name` and a hint,
    `usage` by default."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, PendingTensor):
        return x.wait()
    if isinstance(x, nn.Module):
        hint = "pass dict(module.named_parameters()); nn.domain_parallel shards activations"
    elif hasattr(x, "__array__") or isinstance(x, int | float | complex):
        hint = "torch.as_tensor() makes one of it"
    elif isinstance(x, Mapping | list | tuple):
        hint = "redistribute moves the tensors of lists and dicts, transfer those between meshes"
    else:
        hint = usage
    raise XshardError(f"{name} is {shown(x)}, not a tensor", hint=hint)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Does not import DTensor, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
