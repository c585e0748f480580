"""Normalisation over sharded dims, with the statistics of the global array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import with_lengths
from jax_bridge.nn.sharded import Sharded
from jax_bridge.ops import all_reduce
from xshard import Layout
from xshard.errors import ShapeError, api_boundary
from xshard.notation.parser import Dim
from xshard.signatures import Count, NonNegative

Parameter = jax.Array | None


@api_boundary
def layer_norm(
    x: Sharded,
    dims: Sequence[int],
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    epsilon: NonNegative = 1e-5,
) -> Sharded:
    """Normalise a sharded array to mean 0 and variance 1 over some dims; then scale and shift.

        y = layer_norm(Sharded(x, "b s c/tp"), [-1], scale, bias)     # scale, bias: [c]

    Args:
        x: The sharded array.
        dims: The dims to normalise over; they may be sharded.
        scale: Factors with the global lengths of `dims`: this device's copy (see
            `conv_general_dilated`).
        bias: Addends with the global lengths of `dims`: this device's copy.
        epsilon: Added to the variance.

    Returns:
        The normalised array, sharded like `x`.

    Raises:
        ShapeError: A parameter does not have the lengths of `dims`.
    """
    x = x.owned()
    dims = [dim % x.block.ndim for dim in dims]
    return _scale_and_shift(x, _normalise(x, dims, epsilon), dims, scale, bias)


@api_boundary
def group_norm(
    x: Sharded,
    num_groups: Count,
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    feature_dim: int = -1,
    epsilon: NonNegative = 1e-5,
) -> Sharded:
    """Normalise each sample to mean 0 and variance 1 over groups of features and all of space.

        y = group_norm(Sharded(x, "n h/sp w c"), 8, scale, bias)     # scale, bias: [c]

    Args:
        x: The sharded array. Samples are dim 0.
        num_groups: The number of groups, which divides the number of features.
        scale: One factor per feature: this device's copy.
        bias: One addend per feature: this device's copy.
        feature_dim: The dim of the features, which must not be sharded.
        epsilon: Added to the variance.

    Returns:
        The normalised array, sharded like `x`.

    Raises:
        ShapeError: The features are sharded, or do not divide into groups.
    """
    x = x.owned()
    feature_dim %= x.block.ndim
    n_features = x.sharding.shape[feature_dim]
    features = x.layout.dims[feature_dim]
    if features.axes or n_features % num_groups:
        reason = f"{n_features} features {str(features)!r} in {num_groups} groups"
        hint = "unsharded features, and a number of groups that divides them"
        raise ShapeError(reason, text=str(x.layout), hint=hint)
    # Of the dims [samples, ..., groups, features of a group, ...] all but two are averaged over.
    grouped = _with_groups(x, feature_dim, num_groups)
    averaged = [dim for dim in range(1, grouped.block.ndim) if dim != feature_dim]
    normal = _normalise(grouped, averaged, epsilon).reshape(x.block.shape)
    return _scale_and_shift(x, normal, [feature_dim], scale, bias)


def _with_groups(x: Sharded, feature_dim: int, n_groups: int) -> Sharded:
    """Split the dim of the features, which is not sharded: [n, 8, w] in 2 groups -> [n, 2, 4, w]."""
    shape = x.sharding.shape
    group_size = shape[feature_dim] // n_groups
    new_shape = (*shape[:feature_dim], n_groups, group_size, *shape[feature_dim + 1 :])
    shards = [dim.shards for dim in x.layout.dims]
    shards.insert(feature_dim, ())
    # New names for all dims, since one for the new dim might be taken.
    dims = [Dim(f"d{i}", dim_shards) for i, dim_shards in enumerate(shards)]
    block = with_lengths(x.block, feature_dim, 1, n_groups, group_size)
    return x.with_block(block, dims, new_shape)


@api_boundary
def batch_norm(
    x: Sharded,
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    mean: Parameter = None,
    variance: Parameter = None,
    feature_dim: int = -1,
    epsilon: NonNegative = 1e-5,
) -> Sharded:
    """Normalise each feature to mean 0 and variance 1 over the batch and all of space.

        y = batch_norm(Sharded(x, "n/dp h/sp w c"), scale, bias)     # scale, bias: [c]

    Args:
        x: The sharded array.
        scale: One factor per feature: this device's copy.
        bias: One addend per feature: this device's copy.
        mean: The mean of each feature, instead of this batch's own (`moments` computes it).
        variance: The variance of each feature, instead of this batch's own.
        feature_dim: The dim of the features.
        epsilon: Added to the variance.

    Returns:
        The normalised array, sharded like `x`.

    Raises:
        ShapeError: A parameter does not have one number per feature.
    """
    x = x.owned()
    feature_dim %= x.block.ndim
    if mean is None or variance is None:
        other_dims = [dim for dim in range(x.block.ndim) if dim != feature_dim]
        normal = _normalise(x, other_dims, epsilon)
    else:
        local_mean = _local_parameter(x, mean, [feature_dim])
        local_variance = _local_parameter(x, variance, [feature_dim])
        normal = (x.block - local_mean) * lax.rsqrt(local_variance + epsilon)
    return _scale_and_shift(x, normal, [feature_dim], scale, bias)


@api_boundary
def moments(x: Sharded, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Compute the mean and the variance over some dims of the global array.

        mean, variance = moments(Sharded(x, "n/dp c"), [0])     # [1, c] each

    Args:
        x: The sharded array.
        dims: The dims to average over, which are kept with length 1.

    Returns:
        Mean and variance. Every device along the axes of `dims` has a copy of both.
    """
    x = x.owned()
    dims = [dim % x.block.ndim for dim in dims]
    mean = _mean(x, dims, x.block)
    centred = _minus(x, mean)
    return mean, _mean(x, dims, centred * centred)


def _normalise(x: Sharded, dims: Sequence[int], epsilon: float) -> jax.Array:
    """Shift and scale the block to mean 0 and variance 1 over some dims of the global array."""
    # The mean is subtracted first, and the variance taken of the differences: E[x^2] - E[x]^2, in
    # one pass, would lose its digits where the mean is large.
    centred = _minus(x, _mean(x, dims, x.block))
    variance = _mean(x, dims, centred * centred)
    return centred * lax.rsqrt(variance + epsilon)


def _minus(x: Sharded, mean: jax.Array) -> jax.Array:
    """Subtract a mean from the block, but keep zeros in its padding: sums would count others."""
    return Sharded(x.block - mean, x.sharding).owned().block


def _mean(x: Sharded, dims: Sequence[int], block: jax.Array) -> jax.Array:
    """Average over dims of the global array, of which this device has a block.

    Args:
        x: The array that has the block's sharding.
        dims: The dims, kept with length 1.
        block: The values, zero in the padding.
    """
    total = block.sum(tuple(dims), keepdims=True)  # of this device's rows
    axes = Layout(tuple(x.layout.dims[dim] for dim in dims)).axes
    if axes:
        # grad="sum": each device uses the total for its own block, so that the total's gradient is
        # the sum over devices.
        total = all_reduce(total, axes, x.sharding.mesh, grad="sum")
    # Lengths of the global array: a block's own would count its padding.
    return total / math.prod(x.sharding.shape[dim] for dim in dims)


def _scale_and_shift(
    x: Sharded, normal: jax.Array, dims: Sequence[int], scale: Parameter, bias: Parameter
) -> Sharded:
    """Multiply a normalised block by `scale` and add `bias`, which are global along `dims`."""
    if scale is not None:
        normal = normal * _local_parameter(x, scale, dims)
    if bias is not None:
        normal = normal + _local_parameter(x, bias, dims)
    return Sharded(normal, x.sharding).owned()


def _local_parameter(x: Sharded, value: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Take this device's part of a parameter, and shape it to broadcast over the block.

    4 features on 2 devices: a parameter [4] for dims=[1] of a block [n, 2, s] -> [1, 2, 1].

    Args:
        x: The sharded array.
        value: The whole parameter, with the global lengths of `dims`; each device has a copy.
        dims: The dims of `x` that the parameter has, in the parameter's order.

    Raises:
        ShapeError: The parameter has other lengths.
    """
    lengths = tuple(x.sharding.shape[dim] for dim in dims)
    if value.shape != lengths:
        reason = f"a parameter of shape {value.shape} for dims of lengths {lengths}"
        raise ShapeError(reason, text=str(x.layout))

    layout = Layout(tuple(x.layout.dims[dim] for dim in dims))
    if layout.axes:
        # `copy` says that each device has a copy of the parameter; the gradient is then their sum.
        copies = replace(layout.unsharded, tags=(("copy", layout.axes),))
        value = redistribute(value, (copies, layout), x.sharding.mesh, shape=lengths)

    # The dims of `value` are in the order of `dims`, which the user may choose.
    block_order = np.argsort(dims).tolist()
    other_dims = [dim for dim in range(x.block.ndim) if dim not in dims]
    return jnp.expand_dims(value.transpose(block_order), other_dims)
