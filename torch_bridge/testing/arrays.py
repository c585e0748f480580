"""numpy arrays as torch tensors and back, over the same memory; dtypes that numpy lacks travel as bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xshard.dtypes import numpy_dtype
from xshard.steps.base import Block


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
