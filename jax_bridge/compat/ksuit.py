"""`ksuit.distributed` for JAX: gathers and reductions along a mesh axis, in both gradient conventions.

The functions of `torch_bridge.compat.ksuit`, which take an axis too. The axis None means "not distributed":
every block is the whole array. With types, results that are equal on all devices (reductions,
`..._overwrite`, `..._nograd`) are invariant along the axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_bridge.mesh.axis_types import axis_size
from jax_bridge.ops import Grad, all_gather, all_reduce
from jax_bridge.redistribution import redistribute
from xshard import compat
from xshard.ops import Axes

# Dtypes that are added in a wider one: a sum of bools counts, and one of bfloat16 is rounded once.
_ADDED_AS = {"bool": "int32", "bfloat16": "float32"}


def all_gather_grad(
    x: jax.typing.ArrayLike, axis: Axes | None, batch_dim: int = 0, *, shape: Sequence[int] | None = None
) -> jax.Array:
    """Concatenate all devices' blocks along `batch_dim`: [n, ...] -> [P n, ...]; gradients are summed.

    shape: of the result, needed if blocks differ in size.

    >>> jax.pmap(lambda x: all_gather_grad(x, "dp"), "dp")(jnp.ones(1)).shape  # one scalar on one device
    (1, 1)
    """
    return _gathered(x, axis, batch_dim, "sum", shape)


def all_gather_grad_autograd(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """`all_gather_grad` along the first dim: [n, ...] -> [P n, ...]; gradients are summed."""
    return _gathered(x, axis, 0, "sum")


def all_gather_grad_overwrite(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """[n, ...] -> [P n, ...]; the gradient of a block is the one on its own device."""
    return _gathered(x, axis, 0, "replicated")


def all_gather_nograd(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """[n, ...] -> [P n, ...], without a gradient."""
    return _gathered(jax.lax.stop_gradient(x), axis, 0, "replicated")


def all_gather_nograd_clipped(x: jax.typing.ArrayLike, max_length: int, axis: Axes | None) -> jax.Array:
    """Gather samples that a sampler dealt out in turns: the first `max_length`, in their original order.

    [n, ...] -> [min(P n, max_length), ...]: device r holds samples r, r + P, ..., the last ones as filling.
    With the axis None nothing was dealt out, and nothing is clipped.
    """
    block = jax.lax.stop_gradient(_rows(x))
    if axis is None:
        return block
    return redistribute(block, compat.sampler_gather(block.shape, axis))[:max_length]


def all_reduce_sum_grad(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """The sum over devices, on every device: [...] -> [...]; the gradient passes as it is.

    The sum of bools is true if any is true.

    >>> jax.pmap(lambda x: all_reduce_sum_grad(x, "dp"), "dp")(jnp.ones((1, 2))).tolist()
    [[1.0, 1.0]]
    """
    return _reduced(x, axis, mean=False)


def all_reduce_mean_grad(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """The mean over devices, on every device: [...] -> [...]; the gradient is divided by P.

    Integers have a float mean.
    """
    return _reduced(x, axis, mean=True)


def all_reduce_sum_nograd(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """The sum over devices, on every device: [...] -> [...], without a gradient."""
    return _reduced(jax.lax.stop_gradient(x), axis, mean=False)


def all_reduce_mean_nograd(x: jax.typing.ArrayLike, axis: Axes | None) -> jax.Array:
    """The mean over devices, on every device: [...] -> [...], without a gradient."""
    return _reduced(jax.lax.stop_gradient(x), axis, mean=True)


def _rows(x: jax.typing.ArrayLike) -> jax.Array:
    """An array with rows to concatenate: a scalar is one row."""
    return jnp.atleast_1d(jnp.asarray(x))


def _gathered(
    x: jax.typing.ArrayLike, axis: Axes | None, dim: int, grad: Grad, shape: Sequence[int] | None = None
) -> jax.Array:
    block = _rows(x)
    return block if axis is None else all_gather(block, dim, axis, grad=grad, shape=shape)


def _reduced(x: jax.typing.ArrayLike, axis: Axes | None, *, mean: bool) -> jax.Array:
    block = jnp.asarray(x)
    if axis is None:
        return block
    wide = _ADDED_AS.get(block.dtype.name)
    total = all_reduce(block if wide is None else block.astype(wide), axis, grad="replicated")
    if mean:
        total = total / axis_size(axis)
    return total if wide is None else total.astype(block.dtype)
