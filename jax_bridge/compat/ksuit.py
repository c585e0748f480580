"""`ksuit.distributed` for JAX: gathers and reductions along a mesh axis, in both gradient conventions.

The axis None means "not distributed". With types, results that are equal on all devices
(reductions, `..._overwrite`, `..._nograd`) are invariant along the axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from jax_bridge.calls import redistribute
from jax_bridge.mesh.axis_types import as_varying, axis_size
from jax_bridge.ops import all_gather, all_reduce
from xshard import compat
from xshard.errors import api_boundary
from xshard.ops import Axes, Grad, Shape
from xshard.signatures import Length

# Dtypes that are added in a wider one: a sum of bools counts, and one of bfloat16 is rounded once.
_ADDED_AS = {"bool": "int32", "bfloat16": "float32"}


@api_boundary
def all_gather_grad(
    x: ArrayLike, axis: Axes | None, batch_dim: int = 0, *, shape: Shape = None
) -> jax.Array:
    """Concatenate all devices' blocks along `batch_dim`: [n, ...] -> [P n, ...].

    Gradients are summed.

    Args:
        x: This device's block.
        axis: The mesh axis.
        batch_dim: The dim along which blocks are joined.
        shape: The global shape, needed if blocks differ in size.

    Returns:
        The whole array.

    Examples:
        >>> gathered = jax.pmap(lambda x: all_gather_grad(x, "dp"), "dp")
        >>> gathered(jnp.ones(1)).shape  # one scalar on one device
        (1, 1)
    """
    return _gather(x, axis, "sum", batch_dim, shape)


@api_boundary
def all_gather_grad_autograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Gather blocks along the first dim: [n, ...] -> [P n, ...]; gradients are summed."""
    return _gather(x, axis, "sum")


@api_boundary
def all_gather_grad_overwrite(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Gather blocks along the first dim: [n, ...] -> [P n, ...].

    The gradient of a block is the one on its own device.
    """
    return _gather(x, axis, "replicated")


@api_boundary
def all_gather_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Gather blocks along the first dim, without a gradient: [n, ...] -> [P n, ...]."""
    return _gather(stop_gradient(x), axis, "replicated")


@api_boundary
def all_gather_nograd_clipped(x: ArrayLike, max_length: Length, axis: Axes | None) -> jax.Array:
    """Gather the samples that a distributed sampler dealt out to P devices, in their first order.

    Device r has the samples r, r + P, r + 2 P, ... If their number does not divide, the sampler
    gives the first ones again as filling, which is left out here: samples 0, 2, 4 on device 0 and
    1, 3, 0 on device 1 with max_length 5 -> 0, 1, 2, 3, 4. [n, ...] -> [min(P n, max_length), ...].

    Args:
        x: This device's samples.
        max_length: The number of samples without filling.
        axis: The mesh axis. With None all samples are returned.
    """
    block = stop_gradient(jnp.atleast_1d(jnp.asarray(x)))
    if axis is None:
        return block
    return redistribute(block, compat.sampler_gather(block.shape, axis))[:max_length]


@api_boundary
def all_reduce_sum_grad(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Sum over devices, on every device: [...] -> [...]; the gradient passes as it is.

    The sum of bools is true if any is true.

    Args:
        x: This device's array.
        axis: The mesh axis.

    Returns:
        The sum.

    Examples:
        >>> jax.pmap(lambda x: all_reduce_sum_grad(x, "dp"), "dp")(jnp.ones((1, 2))).tolist()
        [[1.0, 1.0]]
    """
    return _reduce(x, axis, mean=False)


@api_boundary
def all_reduce_mean_grad(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Average over devices, as a float: [...] -> [...]; the gradient is divided by P."""
    return _reduce(x, axis, mean=True)


@api_boundary
def all_reduce_sum_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Sum over devices, on every device, without a gradient: [...] -> [...]."""
    return _reduce(stop_gradient(x), axis, mean=False)


@api_boundary
def all_reduce_mean_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """Average over devices, on every device, without a gradient: [...] -> [...]."""
    return _reduce(stop_gradient(x), axis, mean=True)


def _gather(
    x: ArrayLike, axis: Axes | None, grad: Grad, dim: int = 0, shape: Shape = None
) -> jax.Array:
    """Gather blocks along a dim; a scalar is one row."""
    block = jnp.atleast_1d(jnp.asarray(x))
    return block if axis is None else all_gather(block, dim, axis, grad=grad, shape=shape)


def _reduce(x: ArrayLike, axis: Axes | None, *, mean: bool) -> jax.Array:
    """Sum or average over devices, in a wider dtype where that is more exact."""
    block = jnp.asarray(x)
    if axis is None:
        return block
    # Values of several devices are added up, also those that JAX knows to be equal.
    block = as_varying(block, [axis] if isinstance(axis, str) else axis)
    dtype = block.dtype
    wide_dtype = _ADDED_AS.get(dtype.name, dtype)
    result = all_reduce(block.astype(wide_dtype), axis, grad="replicated")
    if mean:
        result = result / axis_size(axis)
    return result.astype(dtype) if dtype.name in _ADDED_AS else result
