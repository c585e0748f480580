"""The names of `jax_bridge`, for type checkers and for the package, which imports them when used.

Rooms are in no star import: `torch_interop` imports torch.
"""

from jax_bridge import compat as compat
from jax_bridge import nn as nn
from jax_bridge import ops as ops
from jax_bridge import specs as specs
from jax_bridge import torch_interop as torch_interop
from jax_bridge.arrays.einsum import einsum
from jax_bridge.arrays.reshard import place, reshard
from jax_bridge.arrays.shard_map import shard_map
from jax_bridge.arrays.stored import stored_as
from jax_bridge.calls import redistribute
from jax_bridge.ops import positions
from jax_bridge.routing import route
from jax_bridge.state.files import load, save
from jax_bridge.state.transfer import transfer
from jax_bridge.step.suggest import suggest

__all__ = [
    "einsum", "load", "place", "positions", "redistribute", "reshard", "route", "save", "shard_map",
    "stored_as", "suggest", "transfer",
]  # fmt: skip
