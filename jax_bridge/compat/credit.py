"""`credit.domain_parallel` for JAX: blocks of a sphere, widened by rows of their neighbours. Layers are
functions in `jax_bridge.nn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jax_bridge import calls, ops
from jax_bridge.mesh.axis_types import axis_size
from xshard import compat
from xshard.ops import Axes, Grad, HaloWidth, Shape

AXIS = "domain"


def halo_exchange(
    x: jax.Array,
    halo_width: HaloWidth,
    dim: int = -2,
    axis: Axes = AXIS,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> jax.Array:
    """`HaloExchange(halo_width, dim)(x)`: [h, ...] -> [h + 2 halo_width, ...] along `dim`.

    halo_width, boundary, shape: as in `jax_bridge.ops.halo_exchange`.

    >>> import jax.numpy as jnp
    >>> jax.pmap(lambda x: halo_exchange(x, 1), "domain")(jnp.ones((1, 4, 2))).shape
    (1, 6, 2)
    """
    options: Any = {"boundary": boundary, "shape": shape}
    return x if halo_width == 0 else ops.halo_exchange(x, halo_width, dim, axis, **options)


def trim(x: jax.Array, halo_before: int, halo_after: int, dim: int = -2) -> jax.Array:
    """Remove rows at both ends: [h, ...] -> [h - halo_before - halo_after, ...] along `dim`."""
    return jax.lax.slice_in_dim(x, halo_before, x.shape[dim] - halo_after, axis=dim)


def shard_tensor(
    x: jax.Array, dim: int = -2, axis: Axes = AXIS, *, uneven: bool = False
) -> jax.Array:
    """This device's part of an array that every device has whole: [H, ...] -> [H/P, ...] along `dim`. uneven:
    allow parts of different sizes, padded to the largest. Otherwise raises ShapeError, a ValueError.
    """
    return calls.redistribute(
        x, compat.shard_whole(x.shape, dim, axis_size(axis), axis, uneven=uneven)
    )


def gather_tensor(
    x: jax.Array, dim: int = -2, axis: Axes = AXIS, *, shape: Shape = None, grad: Grad = "sum"
) -> jax.Array:
    """Gather all devices' parts on every device, differentiable: [H/P, ...] -> [H, ...] along `dim`. shape:
    the global shape, needed if H does not divide. grad: as in `jax_bridge.all_gather`.
    """
    return ops.all_gather(x, dim, axis, grad=grad, shape=shape)


def shard_batch(
    batch: Mapping[str, Any],
    spatial_dims_5d: int = -2,
    spatial_dims_4d: int = -2,
    axis: Axes = AXIS,
) -> dict[str, Any]:
    """Apply `shard_tensor` to arrays with 4 and with 5 dims; keep everything else."""
    dims = {4: spatial_dims_4d, 5: spatial_dims_5d}
    arrays = {key: x for key, x in batch.items() if isinstance(x, jax.Array) and x.ndim in dims}
    return {**batch, **{key: shard_tensor(x, dims[x.ndim], axis) for key, x in arrays.items()}}
