"""`nvsubquadratic.parallel` for JAX: sequence and channels change places, in zigzag order."""

from __future__ import annotations

from typing import Any, Literal

import jax

from jax_bridge.calls import redistribute
from jax_bridge.mesh.axis_types import axis_size
from xshard import compat
from xshard.ops import Axes, Shape


def all_to_all_single_fn(
    axis: Axes,
    type: Literal["split_to_full", "full_to_split"],
    input: jax.Array,
    with_zigzag_splitting: bool = True,
    *,
    shape: Shape = None,
    channel_dim: int = 1,
    sequence_dim: int = 2,
) -> jax.Array:
    """[B, C, L/P, ...] -> [B, C/P, L, ...] ("split_to_full"), or back ("full_to_split").

    input: a block of 3, 4 or 5 dims; the sequence is the first spatial one. with_zigzag_splitting: shard it
    in zigzag order instead of contiguous parts. shape: the global shape, needed if it does not divide.
    Raises XshardError, a ValueError, for another `type` or number of dims, and without `shape` if uneven.

    >>> import jax.numpy as jnp
    >>> turn = jax.pmap(lambda x: all_to_all_single_fn("cp", "full_to_split", x), "cp")
    >>> turn(jnp.ones((1, 2, 3, 4))).shape  # one block on one device
    (1, 2, 3, 4)
    """
    dims = {"channel_dim": channel_dim, "sequence_dim": sequence_dim}
    options: Any = {"zigzag": with_zigzag_splitting, "even": shape is None, **dims}
    expression = compat.all_to_all_single(type, input.shape, axis_size(axis), axis, **options)
    return redistribute(input, expression, shape=shape)


def zigzag_split_across_group_ranks(data: jax.Array, axis: Axes, seq_dim: int = 0) -> jax.Array:
    """This device's chunks r and 2P-1-r of a whole array along `seq_dim`: [L, ...] -> [L/P, ...].

    A length that does not divide into 2P chunks is sharded unevenly, like the layout `l/zigzag(cp)`.

    >>> jax.pmap(lambda x: zigzag_split_across_group_ranks(x, "cp"), "cp")(
    ...     jax.numpy.ones((1, 4))
    ... ).shape
    (1, 4)
    """
    return redistribute(data, compat.zigzag_split(data.shape, seq_dim, axis))


def zigzag_gather_from_group_ranks(
    data: jax.Array, axis: Axes, seq_dim: int = 0, *, shape: Shape = None
) -> jax.Array:
    """Gather all devices' chunks in their natural order on every device: [L/P, ...] -> [L, ...]. shape: the
    global shape, needed if L does not divide. Gradients are summed over devices.
    """
    return redistribute(data, compat.zigzag_gather(data.shape, seq_dim, axis), shape=shape)
