"""Normalisation of blocks with the statistics of the whole array.

Means and variances are sums over all devices that hold a part: redistributions, which have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.nn.conv import check_channels
from torch_bridge.nn.placed import Placement
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError
from xshard.ops import dims as dim_names
from xshard.ops import tag


class _Sums:
    """Sums of blocks over some dims of the array, on every device that needs them.

    dims: dims of the blocks to sum over, which become 1. over: dims of the array to sum over. n: number of
    elements of the array per sum.
    """

    def __init__(self, placement: Placement, dims: Sequence[int], over: Sequence[int], n: int) -> None:
        self.processes, self.dims, self.n = placement.processes, tuple(dims), n
        self.axes = tuple(axis for d in over for axis in placement.layout.dims[d].axes)

    def mean(self, x: Tensor) -> Tensor:
        total = x.sum(self.dims, keepdim=True)
        if self.axes:
            names = dim_names(total.shape)
            total = redistribute(
                total, f"{names}{tag('sum', self.axes)} -> {names}{tag('copy', self.axes)}", self.processes
            )
        return total / self.n

    def mean_and_variance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The variance is biased."""
        mean = self.mean(x)
        # The mean of squares minus the square of the mean would cancel.
        return mean, self.mean((x - mean).square())


def _standardised(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return (x - mean) * (variance + eps).rsqrt()


def _wide(x: Tensor) -> Tensor:
    """A block in a dtype that is wide enough for sums over many elements, as in torch's own norms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def group_norm(
    x: Tensor, placement: Placement, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """A block `(b, c, ...)`, normalised over each group of channels and all dims after them.

    Raises NotationError for sharded channels, ShapeError if groups do not divide them.
    """
    channels = placement.shape[1]
    check_channels(placement, 1, channels if weight is None else len(weight))
    if channels % groups:
        raise ShapeError(f"{channels} channels in {groups} groups", text=str(placement.layout))
    n = channels // groups * math.prod(placement.shape[2:])
    grouped = _wide(x).reshape(x.shape[0], groups, channels // groups, *x.shape[2:])
    sums = _Sums(placement, range(2, grouped.ndim), range(2, x.ndim), n)
    y = _standardised(grouped, *sums.mean_and_variance(grouped), eps)
    return _scaled(y.reshape(x.shape).to(x.dtype), placement.copied(weight, bias), x.ndim - 2)


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
    """A block normalised over its last dims, which may be sharded; each device uses its part of the weights.

    centred: True for mean 0 and variance 1, False for a mean square of 1.
    Raises ShapeError unless the array ends in `normalized_shape`.
    """
    rank = len(normalized_shape)
    if placement.shape[-rank:] != normalized_shape:
        raise ShapeError(
            f"the last dims of {placement.shape} are not {normalized_shape}", text=str(placement.layout)
        )
    first = len(placement.shape) - rank
    last, over = placement.layout.dims[first:], range(first, len(placement.shape))
    used = {axis for dim in last for axis in dim.axes}
    others = tuple(axis for axis in placement.axes if axis not in used)
    names = " ".join(dim.name for dim in last) + (tag("copy", placement.axes))
    part = " ".join(map(str, last)) + (tag("copy", others) if others else "")
    parameters = [
        p
        if p is None or not used
        else redistribute(p, f"{names} -> {part}", placement.processes, shape=normalized_shape)
        for p in placement.copied(weight, bias)
    ]
    wide, sums = _wide(x), _Sums(placement, over, over, math.prod(normalized_shape))
    if centred:
        y = _standardised(wide, *sums.mean_and_variance(wide), eps)
    else:
        y = wide * (sums.mean(wide.square()) + eps).rsqrt()
    return _scaled(y.to(x.dtype), parameters, 0)


def batch_norm(
    x: Tensor, placement: Placement, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A block `(b, c, ...)` -> normalised over all dims except c; the mean and the unbiased variance, `(c,)`.

    Raises NotationError for sharded channels, ShapeError if there is only one value per channel.
    """
    n = math.prod(placement.shape) // max(1, placement.shape[1])
    if n <= 1:
        raise ShapeError(
            f"one value per channel of a {placement.shape} array", hint="normalise over more, or call eval()"
        )
    over, wide = [d for d in range(x.ndim) if d != 1], _wide(x)
    mean, variance = _Sums(placement, over, over, n).mean_and_variance(wide)
    y = _standardised(wide, mean, variance, eps).to(x.dtype)
    y = _scaled(y, placement.copied(weight, bias), x.ndim - 2)
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
    weight, bias = placement.copied(weight, bias)
    return torch.nn.functional.batch_norm(x, *statistics, weight, bias, False, 0.0, eps)


def _scaled(x: Tensor, parameters: Sequence[Tensor | None], dims_after: int) -> Tensor:
    """A block times the weight plus the bias, which have `dims_after` dims less than it at its end."""
    weight, bias = (p if p is None else p.view(*p.shape, *(1,) * dims_after) for p in parameters)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias
