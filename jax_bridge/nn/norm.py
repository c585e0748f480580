"""Normalisation over sharded dims, with the statistics of the global array."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

from jax_bridge.calls import redistribute
from jax_bridge.nn.sharded import Sharded
from jax_bridge.ops import all_reduce
from xshard import Layout
from xshard.errors import ShapeError
from xshard.notation.parser import Dim

Groups = tuple[int, int]  # the dim of the features, and the number of groups that they form
Numbers = jax.Array | None


def layer_norm(
    x: Sharded,
    dims: Sequence[int],
    scale: Numbers = None,
    bias: Numbers = None,
    *,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise to mean 0 and variance 1 over some dims; then scale and shift. Blocks keep their layout.

    scale, bias: with the global lengths of `dims`; this device's copies (see `conv_general_dilated`).
    """
    x, dims = x.owned(), [d % x.block.ndim for d in dims]
    return _affine(x, _normalised(x, dims, epsilon), dims, scale, bias)


def group_norm(
    x: Sharded,
    num_groups: int,
    scale: Numbers = None,
    bias: Numbers = None,
    *,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise each sample to mean 0 and variance 1 over groups of features and all of space.

    Samples are dim 0. scale, bias: one number per feature. Raises ShapeError for features that are sharded or
    do not divide.
    """
    x, feature = x.owned(), feature_dim % x.block.ndim
    n = x.sharding.shape[feature]
    if x.layout.dims[feature].axes or n % num_groups:
        what = f"{n} features {str(x.layout.dims[feature])!r} in {num_groups} groups"
        hint = "unsharded features, and a number of groups that divides them"
        raise ShapeError(what, text=str(x.layout), hint=hint)
    space = [d for d in range(1, x.block.ndim) if d != feature]
    return _affine(x, _normalised(x, space, epsilon, (feature, num_groups)), [feature], scale, bias)


def batch_norm(
    x: Sharded,
    scale: Numbers = None,
    bias: Numbers = None,
    *,
    mean: Numbers = None,
    variance: Numbers = None,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
) -> Sharded:
    """Normalise each feature to mean 0 and variance 1 over the batch and all of space.

    scale, bias: one number per feature. mean, variance: statistics to use instead of this batch's own, one
    number per feature (`moments` computes them).
    """
    x, feature = x.owned(), feature_dim % x.block.ndim
    if mean is None or variance is None:
        normal = _normalised(x, [d for d in range(x.block.ndim) if d != feature], epsilon)
    else:
        centred = x.block - _parameter(x, mean, [feature])
        normal = centred * lax.rsqrt(_parameter(x, variance, [feature]) + epsilon)
    return _affine(x, normal, [feature], scale, bias)


def moments(x: Sharded, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over some dims of the global array, kept with length 1.

    Every device along the axes of `dims` has a copy of both.
    """
    x, dims = x.owned(), [d % x.block.ndim for d in dims]
    mean, centred = _centred(x, dims)
    return mean, _mean(x, centred * centred, dims)


def _normalised(
    x: Sharded, dims: Sequence[int], epsilon: float, groups: Groups | None = None
) -> jax.Array:
    _, centred = _centred(x, dims, groups)
    return centred * lax.rsqrt(_mean(x, centred * centred, dims, groups) + epsilon)


def _centred(
    x: Sharded, dims: Sequence[int], groups: Groups | None = None
) -> tuple[jax.Array, jax.Array]:
    """The mean, and the block minus it, zero in the padding: E[x^2] - E[x]^2 would cancel."""
    mean = _mean(x, x.block, dims, groups)
    return mean, Sharded(x.block - mean, x.sharding).owned().block


def _mean(
    x: Sharded, block: jax.Array, dims: Sequence[int], groups: Groups | None = None
) -> jax.Array:
    """The mean of a block with zeros in its padding, over some dims and over the features of a group."""
    total = block.sum(tuple(dims), keepdims=True)
    count = math.prod(x.sharding.shape[d] for d in dims)
    if groups is not None:
        feature, n = groups
        size = total.shape[feature] // n
        shape = total.shape
        total = total.reshape(*shape[:feature], n, size, *shape[feature + 1 :]).sum(feature + 1)
        count *= size
    if axes := tuple(axis for d in dims for axis in x.layout.dims[d].axes):
        total = all_reduce(total, axes, x.sharding.mesh, grad="sum")
    return total / count if groups is None else (total / count).repeat(size, feature)


def _affine(
    x: Sharded, normal: jax.Array, dims: Sequence[int], scale: Numbers, bias: Numbers
) -> Sharded:
    normal = normal if scale is None else normal * _parameter(x, scale, dims)
    normal = normal if bias is None else normal + _parameter(x, bias, dims)
    return Sharded(normal, x.sharding).owned()


def _parameter(x: Sharded, value: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Numbers for all rows of some dims -> the numbers of this device's rows, to be broadcast."""
    lengths = tuple(x.sharding.shape[d] for d in dims)
    if value.shape != lengths:
        what = f"a parameter of shape {value.shape} for dims of lengths {lengths}"
        raise ShapeError(what, text=str(x.layout))
    sharded = tuple(x.layout.dims[d] for d in dims)
    if axes := tuple(axis for dim in sharded for axis in dim.axes):
        whole = Layout(tuple(Dim(dim.name) for dim in sharded), (("copy", axes),))
        value = redistribute(value, (whole, Layout(sharded)), x.sharding.mesh, shape=lengths)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return value.transpose(order).reshape(
        [n if d in dims else 1 for d, n in enumerate(x.block.shape)]
    )
