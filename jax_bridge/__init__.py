"""jax_bridge: JAX carries out the plans of xshard, forward and backward."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_bridge.arrays.einsum import einsum
from jax_bridge.arrays.order import stored_as
from jax_bridge.arrays.partition_spec import from_partition_spec, to_named_sharding, to_partition_spec
from jax_bridge.arrays.place import place
from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.shard_map import shard_map
from jax_bridge.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    halo_exchange,
    reduce_from,
    reduce_scatter,
    slice,
    trim_halo,
)
from jax_bridge.positions import positions
from jax_bridge.redistribution import redistribute, valid_mask
from jax_bridge.state.load import load
from jax_bridge.state.save import save
from jax_bridge.state.transfer import transfer

if TYPE_CHECKING:
    from jax_bridge.torch_interop import from_torch

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "einsum",
    "from_partition_spec",
    "from_torch",
    "halo_exchange",
    "load",
    "place",
    "positions",
    "redistribute",
    "reduce_from",
    "reduce_scatter",
    "reshard",
    "save",
    "shard_map",
    "slice",
    "stored_as",
    "to_named_sharding",
    "to_partition_spec",
    "torch_interop",
    "transfer",
    "trim_halo",
    "valid_mask",
]


def __getattr__(name: str) -> Any:
    if name in ("from_torch", "torch_interop"):  # which need torch: they are imported when asked for
        interop = import_module("jax_bridge.torch_interop")
        return interop if name == "torch_interop" else interop.from_torch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
