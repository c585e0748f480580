"""jax_bridge: JAX carries out the plans of xshard, forward and backward."""

from jax_bridge.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    halo_exchange,
    redistribute,
    reduce_from,
    reduce_scatter,
    slice,
    trim_halo,
    valid_mask,
)
from jax_bridge.positions import positions
from jax_bridge.reshard import reshard
from jax_bridge.sharding import from_partition_spec, to_named_sharding, to_partition_spec

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "from_partition_spec",
    "halo_exchange",
    "positions",
    "redistribute",
    "reduce_from",
    "reduce_scatter",
    "reshard",
    "slice",
    "to_named_sharding",
    "to_partition_spec",
    "trim_halo",
    "valid_mask",
]
