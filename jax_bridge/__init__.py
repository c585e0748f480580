"""jax_bridge: JAX carries out the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `specs` layouts and PartitionSpecs; `nn` layers on sharded arrays;
`torch_interop` arrays and functions of torch and JAX together; `compat` functions of other systems, a module
per system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_bridge.arrays.einsum import einsum
from jax_bridge.arrays.order import stored_as
from jax_bridge.arrays.place import place
from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.shard_map import shard_map
from jax_bridge.positions import positions
from jax_bridge.redistribution import redistribute
from jax_bridge.state.files import load, save
from jax_bridge.state.transfer import transfer

if TYPE_CHECKING:
    from jax_bridge import compat, nn, ops, specs, torch_interop  # noqa: F401

__all__ = [
    "einsum",
    "load",
    "place",
    "positions",
    "redistribute",
    "reshard",
    "save",
    "shard_map",
    "stored_as",
    "transfer",
]

ROOMS = ("compat", "nn", "ops", "specs", "torch_interop")


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return import_module(f"jax_bridge.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
