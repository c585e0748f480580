"""jax_bridge: JAX runs the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
- `ops`: collectives on blocks by their usual names (`all_gather`, `halo_exchange`, ...)
- `specs`: layouts <-> JAX's PartitionSpec and NamedSharding
- `nn`: convolutions, pools, norms and attention on sharded arrays
- `torch_interop`: arrays and functions of torch and JAX together
- `compat`: functions of other systems under their own names, a module per system
"""

from xshard.modules import import_later

# Its names are in `__init__.pyi`.
__all__, __getattr__, __dir__ = import_later(__name__, __file__, "jax")
