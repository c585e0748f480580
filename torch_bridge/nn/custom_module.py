"""A module of the user's own inside a domain-parallel model.

It has to be right on blocks, and to leave the lengths of sharded dims as they are. The lengths are checked;
the values are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.blocks import check_no_checkpoint
from torch_bridge.nn.layers import Layer
from torch_bridge.nn.placed import Placement, record, recorded
from torch_bridge.nn.propagation_rules import tensors_in
from xshard.errors import ShapeError


class Converted(nn.Module):
    """Calls a module on blocks, and records the placement of its first block for the results.

    Records that layers inside it make stay. path: its name in errors.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.path = path
        # The module is not a child: names of parameters, and the state dict, stay as they are.
        self.__dict__["module"] = module
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.module.training = self.training
        placement = next((p for p in map(recorded, (*args, *kwargs.values())) if p is not None), None)
        with torch._C.DisableTorchFunction():  # `propagation` does not look inside
            if placement is None:
                return self.module(*args, **kwargs)
            copies = self._copies(placement)
            y = torch.func.functional_call(self.module, copies, args, kwargs)
            if copies:
                check_no_checkpoint(self.path, tensors_in((y,)), tensors_in((*args, *kwargs.values())))
        if isinstance(y, tuple | list):
            return type(y)(self._recorded(part, placement) for part in y)
        return self._recorded(y, placement)

    def _copies(self, placement: Placement) -> dict[str, Any]:
        """Copies of its parameters, except parameters of layers, which copy their own."""
        own = {
            name: parameter
            for prefix, module in self.module.named_modules()
            if not isinstance(module, Layer)
            for name, parameter in module.named_parameters(prefix, recurse=False)
        }
        return dict(zip(own, placement.copied(*own.values()), strict=True))

    def _recorded(self, y: Any, placement: Placement) -> Any:
        if not isinstance(y, Tensor) or recorded(y) is not None:
            return y
        local = placement.local_shape
        if y.ndim != len(local) or any(n != local[d] for d, n in enumerate(y.shape) if placement.cuts(d)):
            raise ShapeError(
                f"{self.path}: a block of shape {local} became one of {tuple(y.shape)}",
                text=str(placement.layout),
                hint="sharded dims keep their lengths, unless a layer returns them",
            )
        lengths = [placement.shape[d] if placement.cuts(d) else n for d, n in enumerate(y.shape)]
        return record(y, placement.remade(placement.layout.dims, lengths))
