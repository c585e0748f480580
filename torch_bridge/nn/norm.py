"""Normalisation of blocks with the statistics of the whole array, which redistributions sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torch_bridge.nn.conv import check_channels
from torch_bridge.nn.placed import Placement
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError
from xshard.ops import dims as dim_names
from xshard.ops import tag

Parameters = tuple[Tensor | None, Tensor | None]  # weight and bias


class _Sums:
    """Means over `n` elements: over the dims `dims` of blocks, which become 1, and `over` of the array."""

    def __init__(self, placement: Placement, dims: Sequence[int], over: Sequence[int], n: int) -> None:
        self.processes, self.dims, self.n = placement.processes, tuple(dims), n
        self.axes = tuple(axis for d in over for axis in placement.layout.dims[d].axes)

    def mean(self, x: Tensor) -> Tensor:
        total = x.sum(self.dims, keepdim=True)
        if self.axes:
            names = dim_names(total.shape)
            expression = f"{names}{tag('sum', self.axes)} -> {names}{tag('copy', self.axes)}"
            total = redistribute(total, expression, self.processes)
        return total / self.n

    def standardised(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """A block with mean 0 and variance 1; the mean, and the biased variance."""
        mean = self.mean(x)
        # The mean of squares minus the square of the mean would cancel.
        variance = self.mean((x - mean).square())
        return (x - mean) * (variance + eps).rsqrt(), mean, variance


def _wide(x: Tensor) -> Tensor:
    """A block in a dtype that is wide enough for sums over many elements, as in torch's own norms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def group_norm(x: Tensor, placement: Placement, groups: int, parameters: Parameters, eps: float) -> Tensor:
    """A block `(b, c, ...)`, normalised over each group of channels and all dims after them.

    Raises NotationError for sharded channels, ShapeError if groups do not divide them.
    """
    channels, weight = placement.shape[1], parameters[0]
    check_channels(placement, 1, channels if weight is None else len(weight))
    if channels % groups:
        raise ShapeError(f"{channels} channels in {groups} groups", text=str(placement.layout))
    n = channels // groups * math.prod(placement.shape[2:])
    grouped = _wide(x).reshape(x.shape[0], groups, channels // groups, *x.shape[2:])
    sums = _Sums(placement, range(2, grouped.ndim), range(2, x.ndim), n)
    y = sums.standardised(grouped, eps)[0]
    return _scaled(y.reshape(x.shape).to(x.dtype), placement.copied(*parameters), x.ndim - 2)


def layer_norm(
    x: Tensor, placement: Placement, lengths: Sequence[int], parameters: Parameters, eps: float, centred: bool
) -> Tensor:
    """A block normalised over its last dims, which may be sharded; each device uses its part of the weights.

    centred: mean 0 and variance 1, else a mean square of 1. Raises ShapeError for other `lengths`.
    """
    normalized, first = tuple(lengths), len(placement.shape) - len(lengths)
    if placement.shape[first:] != normalized:
        what = f"the last dims of {placement.shape} are not {normalized}"
        raise ShapeError(what, text=str(placement.layout))
    last, over = placement.layout.dims[first:], range(first, len(placement.shape))
    used = {axis for dim in last for axis in dim.axes}
    others = tuple(axis for axis in placement.axes if axis not in used)
    names = " ".join(dim.name for dim in last) + (tag("copy", placement.axes))
    part = " ".join(map(str, last)) + (tag("copy", others) if others else "")
    copies = placement.copied(*parameters)
    if used:
        move = partial(redistribute, layouts=f"{names} -> {part}", mesh=placement.processes, shape=normalized)
        copies = [p if p is None else move(p) for p in copies]
    wide, sums = _wide(x), _Sums(placement, over, over, math.prod(normalized))
    y = sums.standardised(wide, eps)[0] if centred else wide * (sums.mean(wide.square()) + eps).rsqrt()
    return _scaled(y.to(x.dtype), copies, 0)


def batch_norm(
    x: Tensor, placement: Placement, parameters: Parameters, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A block `(b, c, ...)` -> normalised over all dims except c; the mean and the unbiased variance, `(c,)`.

    Raises NotationError for sharded channels, ShapeError if there is only one value per channel.
    """
    n = math.prod(placement.shape) // max(1, placement.shape[1])
    if n <= 1:
        what = f"one value per channel of a {placement.shape} array"
        raise ShapeError(what, hint="normalise over more, or call eval()")
    over = [d for d in range(x.ndim) if d != 1]
    y, mean, variance = _Sums(placement, over, over, n).standardised(_wide(x), eps)
    y = _scaled(y.to(x.dtype), placement.copied(*parameters), x.ndim - 2)
    return y, mean.detach().flatten(), (variance.detach() * (n / (n - 1))).flatten()


def _scaled(x: Tensor, parameters: Sequence[Tensor | None], dims_after: int) -> Tensor:
    """A block times the weight plus the bias, which have `dims_after` dims less than it at its end."""
    weight, bias = (p if p is None else p.view(*p.shape, *(1,) * dims_after) for p in parameters)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias
