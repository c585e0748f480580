"""The parallel models of this program: what torch does with any module or tensor may concern them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from torch_bridge.models.parallel import ParallelModel

_MODELS: WeakValueDictionary[int, ParallelModel] = WeakValueDictionary()  # by id


def is_living(model: ParallelModel) -> bool:
    """Return whether a model has been added to those of this program."""
    return id(model) in _MODELS


def add_living(model: ParallelModel) -> None:
    """Add a model to those of this program, as long as it lives."""
    _MODELS[id(model)] = model


def living_models() -> list[ParallelModel]:
    """List the parallel models of this program. Other threads may make models meanwhile."""
    # `valuerefs` copies in one step, where a loop over the dict or a WeakSet would fail.
    models = [reference() for reference in _MODELS.valuerefs()]
    return [model for model in models if model is not None]
