"""`nvsubquadratic.parallel` for JAX: sequence and channels change places, in zigzag order."""

from __future__ import annotations

from typing import Literal

import jax

from jax_bridge.calls import redistribute
from jax_bridge.mesh.axis_types import axis_size
from xshard import compat
from xshard.errors import api_boundary
from xshard.ops import Axes, Shape


@api_boundary
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
    """Shard channels instead of the sequence: [B, C, L/P, ...] -> [B, C/P, L, ...], or back.

    Args:
        axis: The mesh axis.
        type: "split_to_full", or "full_to_split" for the way back.
        input: A block of 3, 4 or 5 dims; the sequence is the first spatial one.
        with_zigzag_splitting: Shard the sequence in zigzag order instead of contiguous parts.
        shape: The global shape, needed if it does not divide.
        channel_dim: The dim of channels.
        sequence_dim: The dim of the sequence.

    Returns:
        The block, sharded the other way.

    Raises:
        XshardError: A ValueError: for another `type` or number of dims, and without `shape` if
            parts would differ in size.

    Examples:
        >>> import jax.numpy as jnp
        >>> turn = jax.pmap(lambda x: all_to_all_single_fn("cp", "full_to_split", x), "cp")
        >>> turn(jnp.ones((1, 2, 3, 4))).shape  # one block on one device
        (1, 2, 3, 4)
    """
    expression = compat.all_to_all_single(
        type,
        input.shape,
        axis_size(axis),
        axis,
        zigzag=with_zigzag_splitting,
        even=shape is None,
        channel_dim=channel_dim,
        sequence_dim=sequence_dim,
    )
    return redistribute(input, expression, shape=shape)


@api_boundary
def zigzag_split_across_group_ranks(data: jax.Array, axis: Axes, seq_dim: int = 0) -> jax.Array:
    """Take this device's chunks r and 2P-1-r of a whole array: [L, ...] -> [L/P, ...].

    A length that does not divide into 2P chunks is sharded unevenly, like the layout
    `l/zigzag(cp)`.

    Args:
        data: The array, which every device has whole.
        axis: The mesh axis.
        seq_dim: The dim of the sequence.

    Returns:
        This device's chunks.

    Examples:
        >>> split = jax.pmap(lambda x: zigzag_split_across_group_ranks(x, "cp"), "cp")
        >>> split(jax.numpy.ones((1, 4))).shape
        (1, 4)
    """
    return redistribute(data, compat.zigzag_split(data.shape, seq_dim, axis))


@api_boundary
def zigzag_gather_from_group_ranks(
    data: jax.Array, axis: Axes, seq_dim: int = 0, *, shape: Shape = None
) -> jax.Array:
    """Gather all devices' chunks in their natural order on every device: [L/P, ...] -> [L, ...].

    Gradients are summed over devices.

    Args:
        data: This device's chunks.
        axis: The mesh axis.
        seq_dim: The dim of the sequence.
        shape: The global shape, needed if L does not divide.
    """
    return redistribute(data, compat.zigzag_gather(data.shape, seq_dim, axis), shape=shape)
