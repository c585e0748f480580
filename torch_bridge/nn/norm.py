"""Normalising layers of blocks, with the statistics of the whole array, which redistributions sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.nn.conv import check_channels
from torch_bridge.nn.placed import Outputs, Placement
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError
from xshard.ops import move, tag

Ints = Sequence[int]


def _standardised(
    x: Tensor,
    placement: Placement,
    dims: Ints,
    over: Ints,
    n: int,
    eps: float,
    centred: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block with mean 0 and variance 1 over `n` elements, `dims` of it; its mean and biased variance."""
    axes = tuple(axis for d in over for axis in placement.layout.dims[d].axes)

    def mean(x: Tensor) -> Tensor:
        total = x.sum(tuple(dims), keepdim=True)
        if axes:
            expression = move(total.shape, tag("sum", axes), tag("copy", axes))
            total = redistribute(total, expression, placement.processes)
        return total / n

    # In a dtype that is wide enough for sums over many elements, as in torch's own norms.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centre = mean(wide) if centred else wide.new_zeros(())
    wide = wide - centre if centred else wide
    variance = mean(wide.square())  # the mean of squares minus the square of the mean would cancel
    return (wide * (variance + eps).rsqrt()).to(x.dtype), centre, variance


def group_norm(layer: Any, x: Tensor, placement: Placement, groups: int | None = None) -> Outputs:
    """A block `(b, c, ...)`, normalised over each group of channels and all dims after them."""
    channels = placement.shape[1]
    groups = layer.num_groups if groups is None else groups
    check_channels(placement, 1, channels if layer.weight is None else len(layer.weight))
    if channels % groups:
        raise ShapeError(f"{channels} channels in {groups} groups", text=str(placement.layout))
    n = channels // groups * math.prod(placement.shape[2:])
    grouped = x.reshape(x.shape[0], groups, channels // groups, *x.shape[2:])
    y, *_ = _standardised(
        grouped, placement, range(2, grouped.ndim), range(2, x.ndim), n, layer.eps
    )
    return _scaled(
        y.reshape(x.shape), placement.copied(layer.weight, layer.bias), x.ndim - 2
    ), placement


def instance_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    layer._check_input_dim(x)
    if x.ndim == layer._get_no_batch_dim():
        raise ShapeError(
            f"{x.ndim} dims, without a batch", text=str(placement.layout), hint="x[None]"
        )
    return group_norm(layer, x, placement, x.shape[1])


def layer_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """A block normalised over its last dims, which may be sharded, by parts of the weights; `RMSNorm` too."""
    normalized = tuple(layer.normalized_shape)
    centred = isinstance(layer, nn.LayerNorm)
    first = len(placement.shape) - len(normalized)
    eps = layer.eps
    if placement.shape[first:] != normalized:
        raise ShapeError(
            f"last dims of {placement.shape}, not {normalized}", text=str(placement.layout)
        )
    last = placement.layout.dims[first:]
    over = range(first, len(placement.shape))
    copies = placement.copied(layer.weight, layer.bias if centred else None)
    if used := {axis for dim in last for axis in dim.axes}:
        others = tuple(axis for axis in placement.axes if axis not in used)
        names = " ".join(dim.name for dim in last) + (tag("copy", placement.axes))
        part = " ".join(map(str, last)) + (tag("copy", others) if others else "")
        options: Any = {"mesh": placement.processes, "shape": normalized}
        copies = [
            p if p is None else redistribute(p, f"{names} -> {part}", **options) for p in copies
        ]
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    y, *_ = _standardised(x, placement, over, over, math.prod(normalized), eps, centred)
    return _scaled(y, copies, 0), placement


def batch_norm(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """A block `(b, c, ...)`, normalised over all dims except c. All devices have equal running statistics."""
    layer._check_input_dim(x)
    check_channels(placement, 1, layer.num_features)
    weight, bias = copies = placement.copied(layer.weight, layer.bias)
    if not layer.training and layer.running_mean is not None:
        statistics = layer.running_mean, layer.running_var
        return nn.functional.batch_norm(
            x, *statistics, weight, bias, False, 0.0, layer.eps
        ), placement
    if (n := math.prod(placement.shape) // max(1, placement.shape[1])) <= 1:
        what = f"one value per channel of a {placement.shape} array"
        raise ShapeError(what, hint="normalise over more, or call eval()")
    over = [d for d in range(x.ndim) if d != 1]
    y, mean, variance = _standardised(x, placement, over, over, n, layer.eps)
    if layer.training and layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
        part = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        unbiased = variance.detach() * (n / (n - 1))
        for running, own in ((layer.running_mean, mean.detach()), (layer.running_var, unbiased)):
            running.lerp_(own.flatten().to(running), part)
    return _scaled(y, copies, x.ndim - 2), placement


def _scaled(x: Tensor, parameters: Sequence[Tensor | None], dims_after: int) -> Tensor:
    """A block times the weight plus the bias, which have `dims_after` dims less than it at its end."""
    weight, bias = (p if p is None else p.view(*p.shape, *(1,) * dims_after) for p in parameters)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
