"""A parallel model stays made of the modules and parameters that its rules were read for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from torch_bridge.models.living import living_models
from torch_bridge.models.names import title_of
from torch_bridge.models.notes import LISTED
from xshard import XshardError

if TYPE_CHECKING:
    from torch_bridge.models.parallel import ParallelModel


@functools.cache
def watch_structures() -> None:
    """From now on, set `ParallelModel.is_changed` when a module of the model gets a part.

    torch tells of every new part of a module, to hooks that never go: once in a program.
    """
    register_module_module_registration_hook(_note_change)
    register_module_parameter_registration_hook(_note_change)


def _note_change(module: nn.Module, name: str, part: Any) -> None:
    """Note that a module gets a child or a parameter; torch calls it for every module."""
    for parallel in living_models():
        if module in parallel.names:
            parallel.is_changed = True


def check_structure(model: nn.Module, parallel: ParallelModel) -> None:
    """Raise XshardError for a parameter that no rule knows, or a module with a rule that is gone.

    Wrappers around a part, as for checkpointing, change nothing: the part keeps its hooks.
    """
    known_ids: set[int] = set()
    for parameter in parallel.parameters:
        known_ids.update(id(slot.tensors.get(slot.attribute)) for slot in parameter.slots)
    changes = []
    for name, x in model.named_parameters():
        if id(x) not in known_ids:
            changes.append(f"{name} came into it")
    modules = set(model.modules())
    for module, name in parallel.names.items():
        if name in parallel.hooks and module not in modules:
            changes.append(f"{title_of(name)} has left it")
    if changes:
        reason = f"the model has changed since parallelize: {', '.join(changes[:LISTED])}"
        hint = "build the whole model first; wrappers of a part may come later"
        raise XshardError(reason, hint=hint)
