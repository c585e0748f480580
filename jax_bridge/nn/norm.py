"""Normalisation over dims that may be cut, with the statistics of the global array.

Decides how a mean is taken over blocks: sums without padding, added over the axes that cut the dims.
Every device uses the result, so the gradients of these uses add up too (`copy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.nn.sharded import Sharded
from jax_bridge.ops import all_reduce
from jax_bridge.redistribution import redistribute
from xshard import Layout
from xshard.errors import ShapeError
from xshard.notation.parser import Dim


def layer_norm(
    x: Sharded,
    dims: Sequence[int],
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise to mean 0 and variance 1 over some dims; then scale and shift. Blocks keep their layout.

    scale, bias: of the global lengths of `dims`, in their order; this device's copies, like all parameters
    (see `conv_general_dilated`).
    """
    x, dims = x.owned(), [d % x.block.ndim for d in dims]
    normal = _normalised(x, x.block, dims, epsilon)
    return _affine(x, normal, dims, scale, bias)


def group_norm(
    x: Sharded,
    num_groups: int,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise each sample to mean 0 and variance 1 over groups of features and all of space.

    scale, bias: one number per feature. Raises ShapeError for features that are cut or do not divide.
    """
    x, feature = x.owned(), feature_dim % x.block.ndim
    n = x.sharding.shape[feature]
    if x.layout.dims[feature].axes or n % num_groups:
        raise ShapeError(
            f"{n} features {str(x.layout.dims[feature])!r} in {num_groups} groups",
            text=str(x.layout),
            hint="whole features, and a number of groups that divides them",
        )
    shape = x.block.shape
    grouped = x.block.reshape(*shape[:feature], num_groups, n // num_groups, *shape[feature + 1 :])
    # For every dim of the grouped block, its dim in x (None for the group's index).
    origin: list[int | None] = list(range(len(shape)))
    origin.insert(feature, None)
    over = [at for at, d in enumerate(origin) if d is not None and d > 0]
    normal = _normalised(x, grouped, over, epsilon, origin).reshape(shape)
    return _affine(x, normal, [feature], scale, bias)


def batch_norm(
    x: Sharded,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    mean: jax.Array | None = None,
    variance: jax.Array | None = None,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise each feature to mean 0 and variance 1 over the batch and all of space.

    scale, bias: one number per feature. mean, variance: of every feature, to use instead of this batch's
    own (which `moments` gives).
    """
    x, feature = x.owned(), feature_dim % x.block.ndim
    if mean is None or variance is None:
        others = [d for d in range(x.block.ndim) if d != feature]
        normal = _normalised(x, x.block, others, epsilon)
    else:
        centred = x.block - _parameter(x, mean, [feature])
        normal = centred * lax.rsqrt(_parameter(x, variance, [feature]) + epsilon)
    return _affine(x, normal, [feature], scale, bias)


def moments(x: Sharded, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over some dims of the global array, kept with length 1.

    Every device along the axes of `dims` has a copy of both.
    """
    x = x.owned()
    mean, centred = _centred(x, x.block, [d % x.block.ndim for d in dims], None)
    return mean, _mean(x, centred * centred, [d % x.block.ndim for d in dims], None)


Origin = Sequence[int | None]  # for every dim of a reshaped block, its dim in the array


def _normalised(
    x: Sharded, block: jax.Array, over: Sequence[int], epsilon: float, origin: Origin | None = None
) -> jax.Array:
    _, centred = _centred(x, block, over, origin)
    return centred * lax.rsqrt(_mean(x, centred * centred, over, origin) + epsilon)


def _centred(
    x: Sharded, block: jax.Array, over: Sequence[int], origin: Origin | None
) -> tuple[jax.Array, jax.Array]:
    """The mean, and the block minus the mean, zero in the padding.

    The variance is the mean of the squared difference; E[x^2] - E[x]^2 would need one sum less, but cancels.
    """
    mean = _mean(x, block, over, origin)
    centred = (block - mean).reshape(x.block.shape)
    return mean, Sharded(centred, x.sharding).owned().block.reshape(block.shape)


def _mean(x: Sharded, block: jax.Array, over: Sequence[int], origin: Origin | None) -> jax.Array:
    """The mean over some dims of a block whose padding is zero."""
    origin = range(block.ndim) if origin is None else origin
    cut = [d for at in over if (d := origin[at]) is not None]
    # Dims split by a reshape are whole: their lengths are the block's.
    count = math.prod(
        x.sharding.shape[d] if x.layout.dims[d].axes else block.shape[at]
        for at, d in zip(over, cut, strict=True)
    )
    total = jnp.sum(block, axis=tuple(over), keepdims=True)
    axes = tuple(a for d in cut for a in x.layout.dims[d].axes)
    if axes:
        total = all_reduce(total, axes, x.sharding.mesh, grad="sum")
    return total / count


def _affine(
    x: Sharded, normal: jax.Array, dims: Sequence[int], scale: jax.Array | None, bias: jax.Array | None
) -> Sharded:
    if scale is not None:
        normal = normal * _parameter(x, scale, dims)
    if bias is not None:
        normal = normal + _parameter(x, bias, dims)
    return Sharded(normal, x.sharding).owned()


def _parameter(x: Sharded, value: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Numbers for all rows of some dims -> the ones of this device's rows, to be broadcast."""
    lengths = tuple(x.sharding.shape[d] for d in dims)
    if value.shape != lengths:
        raise ShapeError(
            f"a parameter of shape {value.shape} for dims of lengths {lengths}", text=str(x.layout)
        )
    cuts = [x.layout.dims[d] for d in dims]
    if axes := tuple(a for dim in cuts for a in dim.axes):
        whole = Layout(tuple(Dim(dim.name) for dim in cuts), (("copy", axes),))
        value = redistribute(value, (whole, Layout(tuple(cuts))), x.sharding.mesh, shape=lengths)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    shape = [n if d in dims else 1 for d, n in enumerate(x.block.shape)]
    return value.transpose(order).reshape(shape)
