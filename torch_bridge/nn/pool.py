"""Pools of blocks, with the values of the unsharded array; averages divide by the counts that torch uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Placement
from torch_bridge.nn.window import Geometry, Ints, apply_windows, geometry_of, window_frames
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError
from xshard.nn.windows import OutputRun, pool_counts, pool_window
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
Windows = tuple[Window, ...]


@dataclass(frozen=True)
class Pool:
    """The windows of a pool, one number per spatial dim; `outputs` as in `Convolution`."""

    kernel: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    ceil_mode: bool = False
    outputs: str = ""


def max_pool(x: Tensor, placement: Placement, pool: Pool) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the block of the maxima, and its placement. Raises ShapeError."""
    pooled, _, padding = _geometry(placement, pool, Boundary("constant", float("-inf")))

    def maxima(rows: Tensor, _: Sequence[OutputRun]) -> Tensor:
        options = pool.kernel, pool.stride, padding, pool.dilation
        return _MAX[len(pool.kernel) - 1](rows, *options, ceil_mode=pool.ceil_mode)

    return apply_windows(x, placement, pooled, maxima)


def avg_pool(
    x: Tensor, placement: Placement, pool: Pool, *, count_include_pad: bool = True, divisor: int | None = None
) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the block of the averages; divisor: instead of the number of rows."""
    pooled, windows, padding = _geometry(placement, pool, Boundary())
    lengths, options = placement.shape[-len(windows) :], (pool.padding, count_include_pad)

    def averages(rows: Tensor, runs: Sequence[OutputRun]) -> Tensor:
        if len(pool.kernel) == 1:  # torch has no sums over windows of one dim
            kernel, stride, pad = (
                (n, *pair) for n, pair in zip((1, 1, 0), (pool.kernel, pool.stride, padding), strict=True)
            )
            y = F.avg_pool2d(rows.unsqueeze(-2), kernel, stride, pad, pool.ceil_mode, divisor_override=1)
            y = y.squeeze(-2)
        else:
            sums = F.avg_pool2d if len(pool.kernel) == 2 else F.avg_pool3d
            y = sums(rows, pool.kernel, pool.stride, padding, pool.ceil_mode, divisor_override=1)
        return y / (divisor or _counts(lengths, windows, tuple(runs), *options, y.dtype, y.device))

    return apply_windows(x, placement, pooled, averages)


@lru_cache(maxsize=4096)
def _geometry(placement: Placement, pool: Pool, boundary: Boundary) -> tuple[Geometry, Windows, Ints]:
    """The geometry of a pool, its windows, and the rows that torch pads, per spatial dim."""
    windows, padding = [], []
    numbers = zip(pool.kernel, pool.stride, pool.dilation, pool.padding, strict=True)
    for i, (k, s, d, p) in enumerate(numbers, len(placement.shape) - len(pool.kernel)):
        if not 0 <= p <= (d * (k - 1) + 1) // 2:
            raise ShapeError(f"padding {p} of a pool with kernel {k}", hint="at most half the kernel")
        window = Window(k, s, d, (p, p), pool.outputs, boundary, boundary)
        windows.append(pool_window(placement.shape[i], window, ceil=pool.ceil_mode))
        padding.append(0 if placement.cuts(i) else p)
    return geometry_of(placement, window_frames(placement, windows)), tuple(windows), tuple(padding)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    lengths: Ints,
    windows: Windows,
    runs: tuple[OutputRun, ...],
    padding: Ints,
    include_pad: bool,
    dtype: torch.dtype,
    tensor_device: torch.device,
) -> int | Tensor:
    """The divisors of some outputs; a single number if they are equal."""
    counts = np.ones((), np.int64)
    for length, window, run, p in zip(lengths, windows, runs, padding, strict=True):
        outputs = range(run.start, run.start + run.outputs)
        along = pool_counts(length, window, outputs, padding=p, include_pad=include_pad)
        counts = counts[..., None] * along
    every = math.prod(window.k for window in windows)
    return every if (counts == every).all() else torch.from_numpy(counts).to(tensor_device, dtype)


def global_avg_pool(x: Tensor, placement: Placement, rank: int) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the means over the last `rank` dims, which the result does not shard."""
    first = len(placement.shape) - rank
    over = range(first, len(placement.shape))
    dims, shape, n = list(placement.layout.dims), list(placement.shape), math.prod(placement.shape[first:])
    axes = tuple(axis for d in over for axis in dims[d].axes)
    for d in over:
        dims[d], shape[d] = Dim(dims[d].name), 1
    result = placement.remade(dims, shape)
    total = x.sum(tuple(over), keepdim=True)
    if axes:
        partial = replace(result.layout, tags=(("sum", axes),))
        total = redistribute(total, (partial, result.layout), placement.processes, shape=result.shape)
    return total / n, result
