"""A module of the user's own inside a domain-parallel model.

Decides what is believed of it: that it does to a block what the model's does to the whole array, and leaves
the lengths of cut dims as they are. That is checked; what it computes is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.nn.layer import Layer
from torch_bridge.nn.placed import Placement, record, recorded
from xshard import ShapeError


class Converted(nn.Module):
    """Calls a module on blocks, and records where the results stand: as the first block that it is given.

    What layers inside it record of their outputs is taken over. path: what errors call it.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.path = path
        # Not a child: names of parameters are the module's own, and so is the state dict.
        self.__dict__["module"] = module
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.module.training = self.training
        found = [p for p in map(recorded, (*args, *kwargs.values())) if p is not None]
        with torch._C.DisableTorchFunction():  # what it does inside is no business of `propagation`
            if not found:
                return self.module(*args, **kwargs)
            y = torch.func.functional_call(self.module, self._copied(found[0]), args, kwargs)
        if isinstance(y, tuple | list):
            return type(y)(self._recorded(part, found[0]) for part in y)
        return self._recorded(y, found[0])

    def _copied(self, placement: Placement) -> dict[str, Tensor]:
        """Its parameters, but for those that layers copy themselves; gradients are summed as in layers."""
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
        lengths, local = list(placement.shape), placement.local_shape
        kept = y.ndim == len(local) and all(n == local[d] for d, n in enumerate(y.shape) if placement.cuts(d))
        if not kept:
            raise ShapeError(
                f"{self.path}: a block of shape {local} became one of {tuple(y.shape)}",
                text=str(placement.layout),
                hint="cut dims stay as long as they are, unless a layer returns them",
            )
        for d, n in enumerate(y.shape):
            if not placement.cuts(d):
                lengths[d] = n
        sharding = type(placement.sharding)(placement.layout, placement.sharding.mesh, tuple(lengths))
        return record(y, placement.of(sharding))
