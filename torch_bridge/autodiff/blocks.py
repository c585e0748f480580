"""Blocks and numpy arrays -> tensors; reentrant checkpoints inside `torch.func.functional_call` refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.mesh.desync import graph_nodes
from xshard.arguments import shown
from xshard.dtypes import numpy_dtype
from xshard.errors import XshardError
from xshard.steps.base import Block

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_tensor(
    x: Any,
    name: str = "x",
    usage: str = "the tensor comes first, as in redistribute(x, layouts, mesh)",
) -> Tensor:
    """The tensor, or the result of one in flight. Raises XshardError with a hint, by default `usage`."""
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


_HINT = (
    "its second pass, within the backward pass, has the module's own parameters: gradients would be wrong; "
    "pass use_reentrant=False"
)


def check_not_swapped() -> None:
    """Raise XshardError in the first pass of a reentrant checkpoint inside `functional_call`."""
    if torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
        return  # only the forward pass of an autograd.Function disables it: a stack is slow to read
    frame = sys._getframe(1)
    is_checkpointed = False
    while frame is not None:
        name = frame.f_code.co_qualname
        is_checkpointed |= name == "CheckpointFunction.forward"  # also Megatron's and DeepSpeed's
        if is_checkpointed and name == "functional_call":
            raise XshardError(
                "a reentrant checkpoint inside torch.func.functional_call", hint=_HINT
            )
        frame = frame.f_back  # type: ignore[assignment]


def check_no_checkpoint(path: str, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
    """Raise XshardError if a reentrant checkpoint made outputs of the module `path`, parameters swapped."""
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes(outputs, inputs)):
        raise XshardError(f"{path}: a reentrant checkpoint inside a converted module", hint=_HINT)


def tensor_of(block: Block) -> Tensor:
    """An array -> a tensor of the same memory."""
    array = np.asarray(block)
    if hasattr(np, array.dtype.name):
        return torch.from_numpy(array)
    # bfloat16 and 8-bit floats, which numpy knows from ml_dtypes.
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))


def array_of(tensor: Tensor) -> Block:
    """A contiguous tensor on the CPU -> an array of the same memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(np, name):
        return tensor.numpy()
    return tensor.view(getattr(torch, f"uint{8 * tensor.itemsize}")).numpy().view(numpy_dtype(name))
