"""What a parallel model knows of itself: its parameters, its units, and who sums its gradients.

Decides where that is kept, and what is compared in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from torch_bridge.models.gradients import Gradients, paused
from torch_bridge.models.parameters import Kept, Setting
from torch_bridge.models.units import Unit
from xshard import XshardError
from xshard.models import Use

ATTRIBUTE = "_xshard_parallel"


class Parallel:
    """The state of a parallel model; its copies have their own. uses: of every parameter, by name."""

    def __init__(
        self,
        setting: Setting,
        kept: Sequence[Kept],
        uses: dict[str, Use],
        units: Sequence[Unit],
        gradients: Gradients,
    ) -> None:
        self.setting, self.kept, self.uses, self.units = setting, kept, uses, units
        self.gradients = gradients
        gradients.after_first = self.compare

    def begin(self, module: nn.Module, args: Any) -> None:
        """A hook of the model, before its forward pass."""
        if not torch.compiler.is_compiling():
            self.gradients.prepare()

    def compare(self) -> None:
        """Raise ReplicaError, on all processes, where what should be equal is not."""
        for each in self.kept:
            x = each.tensor
            if not isinstance(x, nn.Parameter):
                continue  # running statistics may differ
            for what, block in (("", x), ("the gradient of ", x.grad)):
                if block is not None and not block.is_meta:
                    self.setting.compare(block, each.sharding, what + each.name)


def parallel_of(model: nn.Module) -> Parallel:
    """The state of a parallel model. Raises XshardError for any other."""
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, Parallel):
        raise XshardError(
            f"a {type(model).__name__} that is not parallel", hint="parallelize(model, mesh, ...)"
        )
    return found


def check_replicas(model: nn.Module) -> None:
    """Raise ReplicaError, on all processes, where parameters, or gradients, that should be equal are not.

    All processes call it. Every parallel model is checked so after its first backward pass.
    """
    parallel_of(model).compare()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, `.grad` gathers this process's share of the gradients; the next backward pass outside sums it.

    Gradients of parameters that are gathered for use are summed at once, as ever.
    """
    return paused(parallel_of(model).gradients)
