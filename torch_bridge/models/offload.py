"""Parameters that are stored on the CPU: their copies where modules use them, and the gradients' way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_bridge.autodiff.function import Redistribute


@dataclass(frozen=True)
class DeviceCopy:
    """The copy of a tensor from one device to another, as a linear map; its adjoint copies back."""

    src: torch.device
    dst: torch.device
    is_linear: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        # The host may read at once what is copied to it. A device reads it later, in its own order.
        return x.to(self.dst, non_blocking=self.dst.type != "cpu", copy=True)

    @property
    def backward(self) -> DeviceCopy:
        return DeviceCopy(self.dst, self.src)

    @property
    def tangent(self) -> DeviceCopy:
        return self

    def batched(self, _: int) -> DeviceCopy:
        return self


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device, in new memory also on the same one, differentiably."""
    if torch.compiler.is_compiling():
        return x.to(device, copy=True)
    return Redistribute.apply(DeviceCopy(x.device, device), x)
