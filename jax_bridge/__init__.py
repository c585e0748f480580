"""jax_bridge: JAX runs the plans of xshard, forward and backward.

Global arrays:   place, reshard, einsum, transfer (trees, between meshes), stored_as, shard_map
Blocks inside:   redistribute, route (rows by their values), positions (of a block's rows)
Train a model:   suggest (which shardings)
Save a run:      save, async_save, load

Rooms beside the names below, imported when they are first used:
- `ops`: collectives on blocks by their usual names (`all_gather`, `halo_exchange`, ...)
- `specs`: layouts <-> JAX's PartitionSpec and NamedSharding
- `nn`: convolutions, pools, norms and attention on sharded arrays
- `torch_interop`: arrays and functions of torch and JAX together
- `compat`: functions of other systems under their own names, a module per system
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_bridge.arrays.einsum import einsum
from jax_bridge.arrays.reshard import place, reshard
from jax_bridge.arrays.shard_map import shard_map
from jax_bridge.arrays.stored import stored_as
from jax_bridge.calls import redistribute
from jax_bridge.ops import positions
from jax_bridge.routing import route

if TYPE_CHECKING:
    from jax_bridge import compat, nn, ops, specs, torch_interop  # noqa: F401
    from jax_bridge.state.files import async_save, load, save
    from jax_bridge.state.transfer import transfer
    from jax_bridge.step.suggest import suggest

__all__ = [
    "async_save",
    "einsum",
    "load",
    "place",
    "positions",
    "redistribute",
    "reshard",
    "route",
    "save",
    "shard_map",
    "stored_as",
    "suggest",
    "transfer",
]

ROOMS = ("compat", "nn", "ops", "specs", "torch_interop")
# Names of modules that are slow to import, so only when used.
_LATER = {
    "async_save": "state.files",
    "load": "state.files",
    "save": "state.files",
    "suggest": "step.suggest",
    "transfer": "state.transfer",
}


def __getattr__(name: str) -> Any:
    """Import a room, or the module of a name, when it is first used."""
    if name in ROOMS:
        return import_module(f"jax_bridge.{name}")
    if name in _LATER:
        return getattr(import_module(f"jax_bridge.{_LATER[name]}"), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; its rooms: {', '.join(ROOMS)}"
    )
