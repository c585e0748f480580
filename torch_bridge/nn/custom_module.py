"""A module of the user's own inside a domain-parallel model.

Decides what is assumed about it: that it is right on blocks, and leaves the lengths of cut dims as they
are. The lengths are checked; the values are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.recomputed import check_no_checkpoint
from torch_bridge.nn.layers import Layer
from torch_bridge.nn.placed import Placement, record, recorded
from torch_bridge.nn.propagation_rules import tensors_in
from xshard.errors import ShapeError


class Converted(nn.Module):
    """Calls a module on blocks, and records the placement of its first block for the results.

    Records that layers inside it make are kept. path: its name in errors.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.path = path
        # Not a child: names of parameters, and the state dict, stay those of the module.
        self.__dict__["module"] = module
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.module.training = self.training
        found = [p for p in map(recorded, (*args, *kwargs.values())) if p is not None]
        with torch._C.DisableTorchFunction():  # `propagation` does not look inside
            if not found:
                return self.module(*args, **kwargs)
            copies = self._copied(found[0])
            y = torch.func.functional_call(self.module, copies, args, kwargs)
            if copies:
                check_no_checkpoint(self.path, tensors_in((y,)), tensors_in((*args, *kwargs.values())))
        if isinstance(y, tuple | list):
            return type(y)(self._recorded(part, found[0]) for part in y)
        return self._recorded(y, found[0])

    def _copied(self, placement: Placement) -> dict[str, Tensor]:
        """Copies of its parameters, except those of layers, which copy their own; as in layers."""
        own = {
            name: parameter
            for prefix, module in self.module.named_modules()
            if not isinstance(module, Layer)
            for name, parameter in module.named_parameters(prefix, recurse=False)
        }
        copies = placement.copied(*own.values())
        return {name: copy for name, copy in zip(own, copies, strict=True) if copy is not None}

    def _recorded(self, y: Any, placement: Placement) -> Any:
        if not isinstance(y, Tensor) or recorded(y) is not None:
            return y
        local = placement.local_shape
        kept = y.ndim == len(local) and all(n == local[d] for d, n in enumerate(y.shape) if placement.cuts(d))
        if not kept:
            raise ShapeError(
                f"{self.path}: a block of shape {local} became one of {tuple(y.shape)}",
                text=str(placement.layout),
                hint="cut dims keep their lengths, unless a layer returns them",
            )
        lengths = [placement.shape[d] if placement.cuts(d) else n for d, n in enumerate(y.shape)]
        return record(y, placement.remade(placement.layout.dims, lengths))
