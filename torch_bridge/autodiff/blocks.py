"""What users pass becomes tensors, and tensors become arrays; one kind of checkpoint is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.mesh.desync import graph_nodes
from torch_bridge.versions.autograd import is_forward_mode_enabled
from xshard.dtypes import numpy_dtype
from xshard.errors import XshardError
from xshard.signatures import short_repr
from xshard.steps.base import Block

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


CHECKPOINT_HINT = (
    "its second pass, within the backward pass, has the module's own parameters: gradients would be wrong; "
    "pass use_reentrant=False"
)


def as_tensor(
    x: Any,
    name: str = "x",
    usage: str = "the tensor comes first, as in redistribute(x, layouts, mesh)",
) -> Tensor:
    """Check that an argument is a tensor; of a `PendingTensor`, wait for its result and return it.

    Args:
        x: The value.
        name: Its name in errors.
        usage: The hint of the error for a value that no other hint fits.

    Raises:
        XshardError: It is no tensor.
    """
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
    raise XshardError(f"{name} is {short_repr(x)}, not a tensor", hint=hint)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without importing DTensor, which takes half a second."""
    # There are no DTensors before their module has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_not_swapped() -> None:
    """Raise XshardError in the first pass of a reentrant checkpoint inside `functional_call`.

    `functional_call` swaps the parameters of a module for the time of one call. A reentrant
    checkpoint (`use_reentrant=True`) runs the module again in the backward pass, when its own
    parameters are back: gradients would be wrong. Every `redistribute` calls this, so that it has
    to be quick.
    """
    # Most calls end here: a reentrant checkpoint disables forward mode of autograd, so that none is
    # active where it is enabled. Inference has no backward pass.
    if is_forward_mode_enabled() or torch.is_inference_mode_enabled():
        return
    # Outwards through the stack: first the checkpoint, then the `functional_call` around it.
    frame = sys._getframe(1)
    is_checkpointed = False
    while frame is not None:
        name = frame.f_code.co_qualname
        # The name of torch's class, which Megatron's and DeepSpeed's own checkpoints have, too.
        if name == "CheckpointFunction.forward":
            is_checkpointed = True
        elif is_checkpointed and name == "functional_call":
            reason = "a reentrant checkpoint inside torch.func.functional_call"
            raise XshardError(reason, hint=CHECKPOINT_HINT)
        frame = frame.f_back  # type: ignore[assignment]


def check_no_checkpoint(path: str, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
    """Raise XshardError if a reentrant checkpoint made outputs of the converted module `path`."""
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes(outputs, inputs)):
        raise XshardError(
            f"{path}: a reentrant checkpoint inside a converted module", hint=CHECKPOINT_HINT
        )


def tensor_of(block: Block) -> Tensor:
    """View an array as a tensor of the same memory."""
    array = np.asarray(block)
    if hasattr(np, array.dtype.name):
        return torch.from_numpy(array)
    # bfloat16 and 8-bit floats, which numpy knows from ml_dtypes: by way of integers of their width.
    bits = torch.from_numpy(array.view(f"u{array.itemsize}"))
    return bits.view(getattr(torch, array.dtype.name))


def array_of(tensor: Tensor) -> Block:
    """View a contiguous tensor on the CPU as an array of the same memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(np, name):
        return tensor.numpy()
    bits = tensor.view(getattr(torch, f"uint{8 * tensor.itemsize}"))
    return bits.numpy().view(numpy_dtype(name))
