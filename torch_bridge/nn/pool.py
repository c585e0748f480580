"""Pools of blocks, equal to those of the whole array.

Decides that the rows of cut dims travel as for a convolution, filled with -inf for a maximum, and that an
average is a sum divided by the count that torch uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Placement
from torch_bridge.nn.window import Ints, Piece, by_pieces, checked_windows, no_outputs, pieces_of
from torch_bridge.redistribution import redistribute
from xshard import Layout
from xshard.errors import ShapeError
from xshard.layout.runs import Run
from xshard.nn.windows import output_pieces, pool_counts, pool_window
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


@dataclass(frozen=True)
class Pool:
    """The windows of a pool: one number per spatial dim, the last ones of the array."""

    kernel: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    ceil_mode: bool = False
    out_rule: str = ""


@dataclass(frozen=True)
class PoolGeometry:
    """One pool of one array, as one process computes it.

    runs: per spatial dim, the outputs that it computes. pieces: per cut dim, the numbers of rows and outputs.
    padding: per spatial dim, the rows that torch adds.
    """

    source: Layout
    placement: Placement
    windows: tuple[Window, ...]
    runs: tuple[tuple[Run, ...], ...]
    pieces: tuple[tuple[int, tuple[Piece, ...]], ...]
    padding: Ints


def max_pool(x: Tensor, placement: Placement, pool: Pool) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the block of the maxima, and its placement. Raises ShapeError."""
    geometry = pool_geometry(placement, pool, Boundary("constant", float("-inf")))
    options = pool.kernel, pool.stride, geometry.padding, pool.dilation
    local = _MAX[len(pool.kernel) - 1]
    return _pooled(x, placement, geometry, lambda block: local(block, *options, ceil_mode=pool.ceil_mode))


def avg_pool(
    x: Tensor, placement: Placement, pool: Pool, *, count_include_pad: bool = True, divisor: int | None = None
) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the block of the averages, and its placement. Raises ShapeError.

    divisor: divides the sums, instead of the number of rows.
    """
    geometry = pool_geometry(placement, pool, Boundary())

    def sums(block: Tensor) -> Tensor:
        if len(pool.kernel) == 1:  # torch has no sums over windows of one dim
            kernel, stride, padding = (
                (n, *pair)
                for n, pair in zip((1, 1, 0), (pool.kernel, pool.stride, geometry.padding), strict=True)
            )
            y = F.avg_pool2d(block.unsqueeze(-2), kernel, stride, padding, pool.ceil_mode, divisor_override=1)
            return y.squeeze(-2)
        local = F.avg_pool2d if len(pool.kernel) == 2 else F.avg_pool3d
        return local(block, pool.kernel, pool.stride, geometry.padding, pool.ceil_mode, divisor_override=1)

    y, result = _pooled(x, placement, geometry, sums)
    if divisor is None:
        return y / _counts(placement, pool, geometry, count_include_pad, y.dtype, y.device), result
    return y / divisor, result


@lru_cache(maxsize=4096)
def pool_geometry(placement: Placement, pool: Pool, boundary: Boundary) -> PoolGeometry:
    """Everything about a pool that follows from shapes. Raises ShapeError."""
    rank = len(pool.kernel)
    first = len(placement.shape) - rank
    windows = []
    for i, (k, s, d, p) in enumerate(zip(pool.kernel, pool.stride, pool.dilation, pool.padding, strict=True)):
        if not 0 <= p <= (d * (k - 1) + 1) // 2:
            raise ShapeError(f"padding {p} of a pool with kernel {k}", hint="at most half the kernel")
        window = Window(k, s, d, (p, p), pool.out_rule, boundary, boundary)
        windows.append(pool_window(placement.shape[first + i], window, ceil=pool.ceil_mode))
    over = tuple((first + i, window) for i, window in enumerate(windows))
    found = checked_windows(placement, over)
    runs = tuple(
        output_pieces(placement.sharding, d, window, placement.processes.device) for d, window in over
    )
    own = tuple((d, pieces_of(of, w)) for (d, w), of in zip(over, runs, strict=True) if placement.cuts(d))
    padding = tuple(0 if placement.cuts(first + i) else p for i, p in enumerate(pool.padding))
    return PoolGeometry(found.source, placement.of(found.result), tuple(windows), runs, own, padding)


def _pooled(
    x: Tensor, placement: Placement, geometry: PoolGeometry, local: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Placement]:
    block = placement.moved(x, geometry.source)
    if not all(geometry.runs):
        return no_outputs(geometry.placement.local_shape, block), geometry.placement
    return by_pieces(block, dict(geometry.pieces), local), geometry.placement


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    placement: Placement,
    pool: Pool,
    geometry: PoolGeometry,
    include_pad: bool,
    dtype: torch.dtype,
    tensor_device: torch.device,
) -> int | Tensor:
    """The divisors of this process's sums; a single number where they are equal."""
    first, counts = len(placement.shape) - len(pool.kernel), np.ones((), np.int64)
    for i, (window, runs) in enumerate(zip(geometry.windows, geometry.runs, strict=True)):
        one = pool_counts(
            placement.shape[first + i], window, runs, padding=pool.padding[i], include_pad=include_pad
        )
        counts = counts[..., None] * one
    every = math.prod(pool.kernel)
    return every if (counts == every).all() else torch.from_numpy(counts).to(tensor_device, dtype)


def global_avg_pool(x: Tensor, placement: Placement, rank: int) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the means over the last `rank` dims of the array; these are whole then."""
    first = len(placement.shape) - rank
    over = range(first, len(placement.shape))
    dims, shape, n = list(placement.layout.dims), list(placement.shape), math.prod(placement.shape[first:])
    axes = tuple(axis for d in over for axis in dims[d].axes)
    for d in over:
        dims[d], shape[d] = Dim(dims[d].name), 1
    result = placement.remade(dims, shape)
    summed = x.sum(tuple(over), keepdim=True)
    if axes:
        addends = replace(result.layout, tags=(("sum", axes),))
        summed = redistribute(summed, (addends, result.layout), placement.processes, shape=result.shape)
    return summed / n, result
