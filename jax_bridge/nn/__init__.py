"""Layers inside `jax.shard_map` with the results that they have on the global array."""

from jax_bridge.nn.attention import attention, joint_attention
from jax_bridge.nn.conv import avg_pool, conv_general_dilated, max_pool, reduce_window
from jax_bridge.nn.cross_entropy import cross_entropy
from jax_bridge.nn.norm import batch_norm, group_norm, layer_norm, moments
from jax_bridge.nn.sharded import Sharded
from jax_bridge.nn.window import interpolate, resize

__all__ = [
    "Sharded",
    "attention",
    "avg_pool",
    "batch_norm",
    "conv_general_dilated",
    "cross_entropy",
    "group_norm",
    "interpolate",
    "joint_attention",
    "layer_norm",
    "max_pool",
    "moments",
    "reduce_window",
    "resize",
]
