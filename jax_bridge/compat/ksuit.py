"""`ksuit.distributed` for JAX: gathers and reductions along a mesh axis, in both gradient conventions.

The axis None means "not distributed". With types, results that are equal on all devices (reductions,
`..._overwrite`, `..._nograd`) are invariant along the axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from jax_bridge.calls import redistribute
from jax_bridge.mesh.axis_types import axis_size
from jax_bridge.ops import all_gather, all_reduce
from xshard import compat
from xshard.ops import Axes, Grad, Shape

# Dtypes that are added in a wider one: a sum of bools counts, and one of bfloat16 is rounded once.
_ADDED_AS = {"bool": "int32", "bfloat16": "float32"}


def all_gather_grad(
    x: ArrayLike, axis: Axes | None, batch_dim: int = 0, *, shape: Shape = None
) -> jax.Array:
    """Concatenate all devices' blocks along `batch_dim`: [n, ...] -> [P n, ...]; gradients are summed.

    shape: the global shape, needed if blocks differ in size.

    >>> jax.pmap(lambda x: all_gather_grad(x, "dp"), "dp")(
    ...     jnp.ones(1)
    ... ).shape  # one scalar on one device
    (1, 1)
    """
    return _gathered(x, axis, "sum", batch_dim, shape)


def all_gather_grad_autograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """`all_gather_grad` along the first dim: [n, ...] -> [P n, ...]; gradients are summed."""
    return _gathered(x, axis, "sum")


def all_gather_grad_overwrite(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """[n, ...] -> [P n, ...]; the gradient of a block is the one on its own device."""
    return _gathered(x, axis, "replicated")


def all_gather_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """[n, ...] -> [P n, ...], without a gradient."""
    return _gathered(stop_gradient(x), axis, "replicated")


def all_gather_nograd_clipped(x: ArrayLike, max_length: int, axis: Axes | None) -> jax.Array:
    """Gather samples that a sampler dealt out in turns: the first `max_length`, in their original order.

    [n, ...] -> [min(P n, max_length), ...]: device r holds samples r, r + P, ..., the last ones as filling.
    With the axis None all samples are returned.
    """
    block = stop_gradient(jnp.atleast_1d(jnp.asarray(x)))
    if axis is None:
        return block
    return redistribute(block, compat.sampler_gather(block.shape, axis))[:max_length]


def all_reduce_sum_grad(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """The sum over devices, on every device: [...] -> [...]; the gradient passes as it is.

    The sum of bools is true if any is true.

    >>> jax.pmap(lambda x: all_reduce_sum_grad(x, "dp"), "dp")(jnp.ones((1, 2))).tolist()
    [[1.0, 1.0]]
    """
    return _reduced(x, axis, mean=False)


def all_reduce_mean_grad(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """The mean over devices, a float: [...] -> [...]; the gradient is divided by P."""
    return _reduced(x, axis, mean=True)


def all_reduce_sum_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """The sum over devices, on every device: [...] -> [...], without a gradient."""
    return _reduced(stop_gradient(x), axis, mean=False)


def all_reduce_mean_nograd(x: ArrayLike, axis: Axes | None) -> jax.Array:
    """The mean over devices, on every device: [...] -> [...], without a gradient."""
    return _reduced(stop_gradient(x), axis, mean=True)


def _gathered(
    x: ArrayLike, axis: Axes | None, grad: Grad, dim: int = 0, shape: Shape = None
) -> jax.Array:
    block = jnp.atleast_1d(jnp.asarray(x))  # a scalar is one row
    return block if axis is None else all_gather(block, dim, axis, grad=grad, shape=shape)


def _reduced(x: ArrayLike, axis: Axes | None, *, mean: bool) -> jax.Array:
    block = jnp.asarray(x)
    if axis is None:
        return block
    total = all_reduce(
        block.astype(_ADDED_AS.get(block.dtype.name, block.dtype)), axis, grad="replicated"
    )
    total = total / axis_size(axis) if mean else total
    return total.astype(block.dtype) if block.dtype.name in _ADDED_AS else total
