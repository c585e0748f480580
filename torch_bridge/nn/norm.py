"""Normalising layers of blocks, with the statistics of the whole array, which redistributions sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.nn.conv import check_channels
from torch_bridge.nn.placed import Outputs, Placement
from torch_bridge.ops import all_reduce
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.modules import check_input_dim, dim_count_without_batch
from xshard import Layout
from xshard.errors import ShapeError
from xshard.ops import tag

Dims = Sequence[int]


class Standardised(NamedTuple):
    """A block with mean 0 and variance 1, and the mean and biased variance that it had."""

    block: Tensor
    mean: Tensor
    variance: Tensor


def _standardise(
    x: Tensor,
    placement: Placement,
    dims: Dims,
    array_dims: Dims,
    count: int,
    eps: float,
    *,
    is_centred: bool = True,
) -> Standardised:
    """Compute (x - mean) / sqrt(variance + eps), with mean and variance over all devices.

    Args:
        x: This process's block.
        placement: Its placement.
        dims: The dims of `x` to reduce.
        array_dims: The same dims in the global array, whose mesh axes the sums are added over; they
            differ from `dims` where `x` was reshaped into groups.
        count: Global elements per mean.
        eps: Added to the variance.
        is_centred: False takes the mean to be 0, as RMSNorm does.

    Returns:
        The block, mean and variance.
    """
    axes = placement.axes_of(array_dims)

    def global_mean(addends: Tensor) -> Tensor:
        sums = addends.sum(tuple(dims), keepdim=True)
        if axes:
            # Each process uses its own copy of the sums: the backward pass adds their gradients.
            sums = all_reduce(sums, axes, placement.processes, grad="sum")
        return sums / count

    # In a dtype that is wide enough for sums over many elements, as in torch's own norms.
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    wide = x.float() if is_half else x
    mean = wide.new_zeros(())
    if is_centred:
        mean = global_mean(wide)
        wide = wide - mean
    # A second all-reduce, of centred squares: E[x^2] - E[x]^2 would lose digits to cancellation.
    variance = global_mean(wide.square())
    standardised = wide * (variance + eps).rsqrt()
    return Standardised(standardised.to(x.dtype), mean, variance)


def group_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Normalise a block `(b, c, ...)` over each group of channels and all dims after them."""
    return _normalise_groups(layer, x, placement, layer.num_groups)


def instance_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Normalise a block `(b, c, ...)` over all dims after the channels."""
    check_input_dim(layer, x)
    if x.ndim == dim_count_without_batch(layer):
        raise placement.shape_error(f"{x.ndim} dims, without a batch", "x[None]")
    return _normalise_groups(layer, x, placement, x.shape[1])


def _normalise_groups(layer: Any, x: Tensor, placement: Placement, group_count: int) -> Outputs:
    """Apply group norm to an array `(b, c, *spatial)` whose spatial dims may be sharded.

    6 channels in 2 groups: mean and variance are over 3 channels and all spatial positions of all
    devices. `InstanceNorm` is as many groups as channels. Returns the block and its placement.
    Raises ShapeError if the groups do not divide the channels.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block.
        placement: The placement of `x`: layout, mesh and global shape.
        group_count: How many groups the channels have.
    """
    channels = placement.shape[1]
    check_channels(placement, 1, channels if layer.weight is None else len(layer.weight))
    group_size, remainder = divmod(channels, group_count)
    if remainder:
        raise placement.shape_error(f"{channels} channels in {group_count} groups")
    grouped = x.unflatten(1, (group_count, group_size))
    dims = range(2, grouped.ndim)
    # The channels are whole: only the dims after them can be sharded.
    array_dims = range(2, x.ndim)
    count = group_size * math.prod(placement.shape[2:])
    standardised = _standardise(grouped, placement, dims, array_dims, count, layer.eps)
    y = standardised.block.reshape(x.shape)
    weight, bias = placement.parameter_copies([layer.weight, layer.bias])
    return _scale_and_shift(y, weight, bias, dims_after=x.ndim - 2), placement


def layer_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply a `LayerNorm` or `RMSNorm` to an array whose last dims may be sharded.

    Mean and variance are over the global last dims, by an all-reduce where these are sharded. Weight
    and bias are replicated; each device uses the part for its block. Returns the block and its
    placement. Raises ShapeError if the last dims are others.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block.
        placement: The placement of `x`: layout, mesh and global shape.
    """
    normalized_shape = tuple(layer.normalized_shape)
    first_dim = placement.ndim - len(normalized_shape)
    if placement.shape[first_dim:] != normalized_shape:
        raise placement.shape_error(f"last dims of {placement.shape}, not {normalized_shape}")
    # First the copies whose gradients are summed over devices, then their cut to this block's part:
    # so the backward pass fills the part's gradient up with zeros, and sums whole gradients.
    is_centred = isinstance(layer, nn.LayerNorm)  # RMSNorm has no mean, and no bias
    parameters = [layer.weight, layer.bias if is_centred else None]
    copies = placement.parameter_copies(parameters)
    weight, bias = [_shard_like_last_dims(x, placement, first_dim) for x in copies]
    eps = layer.eps
    if eps is None:  # as in torch, by the dtype in which it computes
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    dims = range(first_dim, placement.ndim)
    count = math.prod(normalized_shape)
    standardised = _standardise(x, placement, dims, dims, count, eps, is_centred=is_centred)
    return _scale_and_shift(standardised.block, weight, bias, dims_after=0), placement


def _shard_like_last_dims(
    parameter: Tensor | None, placement: Placement, first_dim: int
) -> Tensor | None:
    """Cut a replicated weight or bias to the part for this process's block.

    The parameter has the dims of the array from `first_dim` on, such as `[c]` of "b s c/tp": with tp=2
    and c=8 the result has 4 rows. None stays None; without sharded dims it is returned whole.
    """
    axes = placement.axes_of(range(first_dim, placement.ndim))
    if parameter is None or not axes:
        return parameter
    # "copy" declares that each process uses its own copy, whose gradients are summed.
    layout = Layout(placement.dims[first_dim:])
    expression = f"{layout.unsharded}{tag('copy', axes)} -> {layout}"
    shape = placement.shape[first_dim:]
    return redistribute(parameter, expression, placement.processes, shape=shape)


def batch_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply a `BatchNorm` layer to an array `(b, c, ...)`, sharded along any dim except c.

    In training, mean and variance are over the global array, by all-reduces, and all devices update
    their running statistics equally. In eval mode, a layer with running statistics uses those.
    Returns the block and its placement. Raises ShapeError for a single value per channel.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block.
        placement: The placement of `x`: layout, mesh and global shape.
    """
    check_input_dim(layer, x)
    check_channels(placement, 1, layer.num_features)
    weight, bias = placement.parameter_copies([layer.weight, layer.bias])
    has_statistics = layer.running_mean is not None
    if has_statistics and not layer.training:
        y = nn.functional.batch_norm(
            x, layer.running_mean, layer.running_var, weight, bias, eps=layer.eps
        )
        return y, placement
    dims = [d for d in range(x.ndim) if d != 1]  # all but the channels
    # torch refuses one value per channel, whose variance is 0; here the global array counts.
    count = math.prod(placement.shape[d] for d in dims)
    if count <= 1:
        reason = f"one value per channel of a {placement.shape} array"
        raise ShapeError(reason, hint="normalise over more, or call eval()")
    standardised = _standardise(x, placement, dims, dims, count, layer.eps)
    if has_statistics:
        _update_statistics(layer, standardised, count)
    y = _scale_and_shift(standardised.block, weight, bias, dims_after=x.ndim - 2)
    return y, placement


def _update_statistics(layer: Any, standardised: Standardised, count: int) -> None:
    """Move the running mean and variance towards those of a batch of `count` values per channel."""
    layer.num_batches_tracked.add_(1)
    # In place: the running statistics are shared with the original model.
    momentum = layer.momentum
    if momentum is None:  # the average over all batches
        momentum = 1 / float(layer.num_batches_tracked)
    mean = standardised.mean.detach().flatten()
    # As torch: the running variance is unbiased, the one that normalises is not.
    unbiased = standardised.variance.detach().flatten() * (count / (count - 1))
    layer.running_mean.lerp_(mean.to(layer.running_mean), momentum)
    layer.running_var.lerp_(unbiased.to(layer.running_var), momentum)


def _scale_and_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, dims_after: int
) -> Tensor:
    """Return `x * weight + bias`; `dims_after` dims of the block come after the ones of the parameters."""
    ones = (1,) * dims_after
    if weight is not None:
        x = x * weight.view(*weight.shape, *ones)
    if bias is not None:
        x = x + bias.view(*bias.shape, *ones)
    return x
