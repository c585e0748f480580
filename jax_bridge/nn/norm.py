"""Normalisation over sharded dims, with the statistics of the global array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import with_lengths
from jax_bridge.nn.sharded import Sharded
from jax_bridge.ops import all_reduce
from xshard import Layout
from xshard.errors import ShapeError, api_boundary
from xshard.notation.parser import Dim

Parameter = jax.Array | None


class FeatureGroups(NamedTuple):
    """The dim of the features, and the number of groups that consecutive features form."""

    dim: int
    n_groups: int


@api_boundary
def layer_norm(
    x: Sharded,
    dims: Sequence[int],
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    epsilon: float = 1e-5,
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
    return _scaled_and_shifted(x, _normalised(x, dims, epsilon), dims, scale, bias)


@api_boundary
def group_norm(
    x: Sharded,
    num_groups: int,
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
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
    if x.layout.dims[feature_dim].axes or n_features % num_groups:
        what = f"{n_features} features {str(x.layout.dims[feature_dim])!r} in {num_groups} groups"
        hint = "unsharded features, and a number of groups that divides them"
        raise ShapeError(what, text=str(x.layout), hint=hint)
    space_dims = [dim for dim in range(1, x.block.ndim) if dim != feature_dim]
    normal = _normalised(x, space_dims, epsilon, FeatureGroups(feature_dim, num_groups))
    return _scaled_and_shifted(x, normal, [feature_dim], scale, bias)


@api_boundary
def batch_norm(
    x: Sharded,
    scale: Parameter = None,
    bias: Parameter = None,
    *,
    mean: Parameter = None,
    variance: Parameter = None,
    feature_dim: int = -1,
    epsilon: float = 1e-5,
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
        normal = _normalised(x, other_dims, epsilon)
    else:
        centred = x.block - _local_parameter(x, mean, [feature_dim])
        normal = centred * lax.rsqrt(_local_parameter(x, variance, [feature_dim]) + epsilon)
    return _scaled_and_shifted(x, normal, [feature_dim], scale, bias)


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
    mean = _mean(x, x.block, dims)
    centred = _minus(x, mean)
    return mean, _mean(x, centred * centred, dims)


def _normalised(
    x: Sharded, dims: Sequence[int], epsilon: float, groups: FeatureGroups | None = None
) -> jax.Array:
    """Shift and scale the block to mean 0 and variance 1 of the global array.

    Args:
        x: The array.
        dims: The dims to average over.
        epsilon: Added to the variance.
        groups: Groups of features to average over, too; None: each feature by itself.
    """
    # The mean is subtracted first, and the variance taken of the differences: E[x^2] - E[x]^2, in
    # one pass, would lose its digits where the mean is large.
    centred = _minus(x, _mean(x, x.block, dims, groups))
    variance = _mean(x, centred * centred, dims, groups)
    return centred * lax.rsqrt(variance + epsilon)


def _minus(x: Sharded, mean: jax.Array) -> jax.Array:
    """Subtract a mean from the block, but keep zeros in its padding: sums would count others."""
    return Sharded(x.block - mean, x.sharding).owned().block


def _mean(
    x: Sharded, block: jax.Array, dims: Sequence[int], groups: FeatureGroups | None = None
) -> jax.Array:
    """Average over dims of the global array, of which this device has a block.

    The block's rows are summed, the sums are summed over devices, and divided by the number of rows
    of the global array. With groups the mean is over each group of features as well.

    Args:
        x: The array that has the block's sharding.
        block: The values, zero in the padding.
        dims: The dims, kept with length 1.
        groups: The groups; their mean is repeated for each of their features.
    """
    total = block.sum(tuple(dims), keepdims=True)  # of this device's rows
    count = math.prod(x.sharding.shape[dim] for dim in dims)
    group_size = 1
    if groups is not None:
        group_size = total.shape[groups.dim] // groups.n_groups
        grouped = with_lengths(total, groups.dim, 1, groups.n_groups, group_size)
        total = grouped.sum(groups.dim + 1)

    axes: list[str] = []
    for dim in dims:
        axes += x.layout.dims[dim].axes
    if axes:
        # grad="sum": each device uses the total for its own block, so that the total's gradient is
        # the sum over devices.
        total = all_reduce(total, tuple(axes), x.sharding.mesh, grad="sum")
    # Lengths of the global array: a block's own would count its padding.
    mean = total / (count * group_size)
    if groups is None:
        return mean
    return mean.repeat(group_size, groups.dim)


def _scaled_and_shifted(
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
        what = f"a parameter of shape {value.shape} for dims of lengths {lengths}"
        raise ShapeError(what, text=str(x.layout))

    sharded_dims = tuple(x.layout.dims[dim] for dim in dims)
    axes: list[str] = []
    for sharded_dim in sharded_dims:
        axes += sharded_dim.axes
    if axes:
        # `copy` says that each device has a copy of the parameter; the gradient is then their sum.
        whole_dims = tuple(Dim(dim.name) for dim in sharded_dims)
        copied = Layout(whole_dims, (("copy", tuple(axes)),))
        value = redistribute(value, (copied, Layout(sharded_dims)), x.sharding.mesh, shape=lengths)

    # The dims of `value` are in the order of `dims`, which the user may choose.
    array_order = sorted(range(len(dims)), key=lambda i: dims[i])
    shape = [1] * x.block.ndim
    for dim in dims:
        shape[dim] = x.block.shape[dim]
    return value.transpose(array_order).reshape(shape)
