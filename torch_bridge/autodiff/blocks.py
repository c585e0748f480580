"""What users pass as a block -> a tensor.

Decides what is refused, and what the error suggests instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_bridge.autodiff.pending import PendingTensor
from xshard import XshardError
from xshard.arguments import shown


def as_tensor(
    x: Any, name: str = "x", usage: str = "the tensor comes first, as in redistribute(x, expression, mesh)"
) -> Tensor:
    """The tensor itself, or that of a redistribution in flight. Raises XshardError for anything else.

    name: what the error calls it. usage: what it says of a value that nothing makes a tensor of.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, PendingTensor):
        return x.wait()
    if isinstance(x, nn.Module):
        hint = "redistribute_many moves dict(module.named_parameters()), nn.domain_parallel cuts activations"
    elif hasattr(x, "__array__") or isinstance(x, int | float | complex):
        hint = "torch.as_tensor() makes one of it"
    elif isinstance(x, Mapping | list | tuple):
        hint = "redistribute_many moves the tensors of lists and dicts, transfer those between meshes"
    else:
        hint = usage
    raise XshardError(f"{name} is {shown(x)}, not a tensor", hint=hint)
