"""numpy blocks as torch tensors and back, dtypes that numpy lacks included: their bits come over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from xshard import dtypes
from xshard.dtypes import numpy_dtype
from xshard.steps.base import Block


def tensor_of(block: Block) -> Tensor:
    """A tensor of the same memory."""
    array = np.asarray(block)
    if hasattr(np, array.dtype.name):
        return torch.from_numpy(array)
    # bfloat16 and 8-bit floats, which numpy knows from ml_dtypes.
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))


def block_of(tensor: Tensor, dtype: np.dtype[Any] | None = None) -> Block:
    """An array of the same memory. dtype: what numpy calls the tensor's, looked up where it is not given."""
    dtype = numpy_dtype(dtypes.name_of(tensor.dtype)) if dtype is None else dtype
    if hasattr(np, dtype.name):
        return tensor.numpy()
    return tensor.view(getattr(torch, f"uint{8 * dtype.itemsize}")).numpy().view(dtype)
