"""A parallel model stays made of the modules and parameters that its rules were read for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from torch_bridge.models.names import title_of
from xshard import XshardError

if TYPE_CHECKING:
    from torch_bridge.models.parallel import ParallelModel

_WATCHED: WeakSet[ParallelModel] = WeakSet()


def watch_structure(parallel: ParallelModel) -> None:
    """From now on, set `parallel.is_changed` when a module of the model gets a part."""
    if not _WATCHED:  # once in a program, or again after all models have gone: which does no harm
        register_module_module_registration_hook(_note_change)
        register_module_parameter_registration_hook(_note_change)
    _WATCHED.add(parallel)


def _note_change(module: nn.Module, name: str, part: Any) -> None:
    """Note that a module gets a child or a parameter; torch calls it for every module."""
    for parallel in _WATCHED:
        if module in parallel.names:
            parallel.is_changed = True


def check_structure(model: nn.Module, parallel: ParallelModel) -> None:
    """Raise XshardError for a parameter that no rule knows, or a module with a rule that is gone.

    Wrappers around a part, as for checkpointing, change nothing: the part keeps its hooks.
    """
    hint = "build the whole model, then call parallelize"
    known = set()
    for parameter in parallel.parameters:
        for name, place in zip(parameter.names, parameter.places, strict=True):
            if place.attribute not in place.tensors:
                raise XshardError(f"{name} has left the model after parallelize", hint=hint)
            known.add(id(place.get()))
    for name, x in model.named_parameters():
        if id(x) not in known:
            raise XshardError(
                f"{name} came into the model after parallelize: no rule shards it", hint=hint
            )
    modules = set(model.modules())
    for module, name in parallel.names.items():
        if name in parallel.hooks and module not in modules:
            what = f"{title_of(name)} has left the model after parallelize: its rules do not run"
            raise XshardError(what, hint=hint)
