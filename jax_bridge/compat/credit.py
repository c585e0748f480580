"""`credit.domain_parallel` for JAX: blocks of a sphere, widened by rows of their neighbours.

Layers are functions in `jax_bridge.nn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jax_bridge import calls, ops
from jax_bridge.mesh.axis_types import axis_size
from xshard import compat
from xshard.errors import api_boundary
from xshard.ops import Axes, Grad, HaloWidth, Shape

AXIS = "domain"


@api_boundary
def halo_exchange(
    x: jax.Array,
    halo_width: HaloWidth,
    dim: int = -2,
    axis: Axes = AXIS,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> jax.Array:
    """Widen a block by its neighbours' rows: [h, ...] -> [h + 2 halo_width, ...] along `dim`.

    It is `HaloExchange(halo_width, dim)(x)`.

    Args:
        x: This device's block.
        halo_width: As in `jax_bridge.ops.halo_exchange`; 0 leaves the block as it is.
        dim: The dim that is sharded.
        axis: The mesh axis.
        boundary: As in `jax_bridge.ops.halo_exchange`.
        shape: As in `jax_bridge.ops.halo_exchange`.

    Returns:
        The block with its halo.

    Examples:
        >>> import jax.numpy as jnp
        >>> jax.pmap(lambda x: halo_exchange(x, 1), "domain")(jnp.ones((1, 4, 2))).shape
        (1, 6, 2)
    """
    if halo_width == 0:
        return x
    return ops.halo_exchange(x, halo_width, dim, axis, boundary=boundary, shape=shape)


@api_boundary
def trim(x: jax.Array, halo_before: int, halo_after: int, dim: int = -2) -> jax.Array:
    """Remove rows at both ends: [h, ...] -> [h - halo_before - halo_after, ...] along `dim`.

    Args:
        x: This device's block with its halo.
        halo_before: How many rows to remove at the beginning.
        halo_after: How many rows to remove at the end.
        dim: The dim.
    """
    return jax.lax.slice_in_dim(x, halo_before, x.shape[dim] - halo_after, axis=dim)


@api_boundary
def shard_tensor(
    x: jax.Array, dim: int = -2, axis: Axes = AXIS, *, uneven: bool = False
) -> jax.Array:
    """Take this device's part of a whole array: [H, ...] -> [H/P, ...] along `dim`.

    Args:
        x: The array, which every device has whole.
        dim: The dim to shard.
        axis: The mesh axis.
        uneven: Allow parts of different sizes, padded to the largest.

    Raises:
        ShapeError: A ValueError: parts would differ in size, and `uneven` is not set.
    """
    expression = compat.shard_whole(x.shape, dim, axis_size(axis), axis, uneven=uneven)
    return calls.redistribute(x, expression)


@api_boundary
def gather_tensor(
    x: jax.Array, dim: int = -2, axis: Axes = AXIS, *, shape: Shape = None, grad: Grad = "sum"
) -> jax.Array:
    """Gather all devices' parts on every device, differentiably: [H/P, ...] -> [H, ...].

    Args:
        x: This device's part.
        dim: The dim along which parts are joined.
        axis: The mesh axis.
        shape: The global shape, needed if H does not divide.
        grad: As in `jax_bridge.all_gather`.
    """
    return ops.all_gather(x, dim, axis, grad=grad, shape=shape)


@api_boundary
def shard_batch(
    batch: Mapping[str, Any],
    spatial_dims_5d: int = -2,
    spatial_dims_4d: int = -2,
    axis: Axes = AXIS,
) -> dict[str, Any]:
    """Apply `shard_tensor` to JAX arrays with 4 and with 5 dims; keep everything else.

    Args:
        batch: Arrays and other values by name.
        spatial_dims_5d: Which dim of arrays with 5 dims to shard.
        spatial_dims_4d: Which dim of arrays with 4 dims to shard.
        axis: The mesh axis or axes to shard over.
    """
    dim_by_ndim = {4: spatial_dims_4d, 5: spatial_dims_5d}
    result = dict(batch)
    for key, x in batch.items():
        if isinstance(x, jax.Array) and x.ndim in dim_by_ndim:
            result[key] = shard_tensor(x, dim_by_ndim[x.ndim], axis)
    return result
