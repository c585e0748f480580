"""Normalisation of blocks with the statistics of the whole array.

Decides that means and variances are sums over all devices that hold a part: redistributions, which have
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_bridge.nn.conv import check_channels
from torch_bridge.nn.placed import Placement
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError
from xshard.ops import dims as dim_names
from xshard.ops import tag


def mean_and_variance(
    x: Tensor, placement: Placement, over: Sequence[int], n: int, axes: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """A block -> mean and biased variance along some dims of the array, on every device that needs them.

    over: dims of `x`, which become 1. n: the number of elements of the array per mean. axes: the mesh axes
    that cut the dims.
    """
    mean = _mean(x, placement, over, n, axes)
    # Not the mean of squares minus the square of the mean: that cancels.
    return mean, _mean((x - mean).square(), placement, over, n, axes)


def _mean(x: Tensor, placement: Placement, over: Sequence[int], n: int, axes: Sequence[str]) -> Tensor:
    summed = x.sum(tuple(over), keepdim=True)
    if axes:
        names = dim_names(summed.shape)
        expression = f"{names}{tag('sum', tuple(axes))} -> {names}{tag('copy', tuple(axes))}"
        summed = redistribute(summed, expression, placement.processes)
    return summed / n


def _standardised(
    x: Tensor, placement: Placement, over: Sequence[int], n: int, axes: Sequence[str], eps: float
) -> Tensor:
    """Mean 0 and variance 1 along some dims of the array, as in `mean_and_variance`."""
    mean, variance = mean_and_variance(x, placement, over, n, axes)
    return (x - mean) * (variance + eps).rsqrt()


def _wide(x: Tensor) -> Tensor:
    """A block in a dtype that is wide enough for sums over many elements, as in torch's own norms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _axes_cutting(placement: Placement, dims: Iterable[int]) -> tuple[str, ...]:
    return tuple(axis for d in dims for axis in placement.layout.dims[d].axes)


def group_norm(
    x: Tensor, placement: Placement, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """A block `(b, c, ...)`, normalised over each group of channels and all dims after them.

    Raises NotationError for channels that are cut, ShapeError if groups do not divide them.
    """
    channels = placement.shape[1]
    check_channels(placement, 1, channels if weight is None else len(weight))
    if channels % groups:
        raise ShapeError(f"{channels} channels in {groups} groups", text=str(placement.layout))
    n = channels // groups * math.prod(placement.shape[2:])
    weight_, bias_ = placement.copied(weight, bias)
    grouped = _wide(x).reshape(x.shape[0], groups, channels // groups, *x.shape[2:])
    axes = _axes_cutting(placement, range(2, x.ndim))
    y = _standardised(grouped, placement, range(2, grouped.ndim), n, axes, eps)
    return _scaled_and_shifted(y.reshape(x.shape).to(x.dtype), weight_, bias_, x.ndim - 2)


def layer_norm(
    x: Tensor,
    placement: Placement,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool = True,
) -> Tensor:
    """A block normalised over its last dims, which may be cut; weights are whole, each device uses a part.

    centred: True for mean 0 and variance 1, False for a mean square of 1.
    Raises ShapeError where the array does not end in `normalized_shape`.
    """
    rank = len(normalized_shape)
    if placement.shape[-rank:] != normalized_shape:
        raise ShapeError(
            f"the last dims of {placement.shape} are not {normalized_shape}", text=str(placement.layout)
        )
    first = len(placement.shape) - rank
    last = placement.layout.dims[first:]
    cut = {axis for dim in last for axis in dim.axes}
    others = tuple(axis for axis in placement.axes if axis not in cut)
    whole = " ".join(dim.name for dim in last)
    if not placement.copies and placement.axes:
        whole += tag("copy", placement.axes)  # the gradients of the processes are not summed
    part = f"{' '.join(map(str, last))}{tag('copy', others) if others else ''}"

    def own(parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not placement.axes:
            return parameter
        return redistribute(parameter, f"{whole} -> {part}", placement.processes, shape=normalized_shape)

    weight_, bias_ = own(weight), own(bias)
    n = math.prod(normalized_shape)
    over, wide = range(first, len(placement.shape)), _wide(x)
    axes = _axes_cutting(placement, over)
    if centred:
        y = _standardised(wide, placement, over, n, axes, eps)
    else:
        y = wide * (_mean(wide.square(), placement, over, n, axes) + eps).rsqrt()
    return _scaled_and_shifted(y.to(x.dtype), weight_, bias_, 0)


def batch_norm(
    x: Tensor, placement: Placement, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A block `(b, c, ...)` -> normalised over all dims except c; the mean and the unbiased variance, `(c,)`.

    Raises NotationError for channels that are cut, ShapeError if there is only one value per channel.
    """
    n = math.prod(placement.shape) // max(1, placement.shape[1])
    if n <= 1:
        raise ShapeError(
            f"one value per channel of a {placement.shape} array", hint="normalise over more, or call eval()"
        )
    weight_, bias_ = placement.copied(weight, bias)
    over, wide = [d for d in range(x.ndim) if d != 1], _wide(x)
    mean, variance = mean_and_variance(wide, placement, over, n, _axes_cutting(placement, over))
    y = ((wide - mean) * (variance + eps).rsqrt()).to(x.dtype)
    y = _scaled_and_shifted(y, weight_, bias_, x.ndim - 2)
    return y, mean.detach().flatten(), (variance.detach() * (n / (n - 1))).flatten()


def fixed_norm(
    x: Tensor,
    placement: Placement,
    statistics: tuple[Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """A block `(b, c, ...)` normalised by given `statistics`: mean and variance, `(c,)`."""
    weight_, bias_ = placement.copied(weight, bias)
    return torch.nn.functional.batch_norm(x, *statistics, weight_, bias_, False, 0.0, eps)


def _scaled_and_shifted(x: Tensor, weight: Tensor | None, bias: Tensor | None, dims_after: int) -> Tensor:
    columns = (1,) * dims_after
    if weight is not None:
        x = x * weight.view(*weight.shape, *columns)
    return x if bias is None else x + bias.view(*bias.shape, *columns)
