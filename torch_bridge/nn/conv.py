"""Convolutions, transposed convolutions and pools of blocks, with the values of the unsharded array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Placement, check_whole
from torch_bridge.nn.window import Geometry, Ints, apply_windows, geometry_of, no_outputs, window_frames
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import OutputRun, pool_counts, pool_window, transposed_frame
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

Windows = tuple[Ints, ...]  # kernel, stride, dilation, padding and output padding, per spatial dim
PoolWindows = tuple[Window, ...]
Pairs = tuple[tuple[int, int], ...]  # padding before and after, per spatial dim

# torch's padding modes, as boundaries.
BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Convolution:
    """A convolution without its weights: one number, or one pair of paddings, per spatial dim."""

    kernel: Ints
    stride: Ints
    padding: Pairs
    dilation: Ints
    groups: int = 1
    padding_mode: str = "zeros"
    outputs: str = ""


def conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, convolution: Convolution
) -> tuple[Tensor, Placement]:
    """A block `(..., c, *spatial)` -> the block of the outputs, and its placement; unsharded weight, bias.

    All processes raise, before anything is sent, NotationError for sharded channels, or ShapeError.
    """
    rank, flat = len(convolution.kernel), _own_padding(placement, convolution.padding)
    mode = "constant" if convolution.padding_mode == "zeros" else convolution.padding_mode

    def convolve(rows: Tensor, _: Sequence[OutputRun], weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = F.pad(rows, flat, mode=mode) if any(flat) else rows
        options = convolution.stride, 0, convolution.dilation, convolution.groups
        return _CONV[rank - 1](padded, weight, bias, *options)

    geometry = _conv_geometry(placement, convolution, weight.shape)
    return apply_windows(x, placement, geometry, convolve, weight, bias)


@lru_cache(maxsize=4096)
def _conv_geometry(placement: Placement, convolution: Convolution, weight_shape: torch.Size) -> Geometry:
    kernel, pads = convolution.kernel, convolution.padding
    check_channels(placement, len(placement.shape) - len(kernel) - 1, weight_shape[1] * convolution.groups)
    _check_padding(placement, pads, convolution.padding_mode)
    boundary = Boundary(BOUNDARIES[convolution.padding_mode])
    numbers = zip(kernel, convolution.stride, convolution.dilation, pads, strict=True)
    windows = [Window(*some, convolution.outputs, boundary, boundary) for some in numbers]
    return geometry_of(placement, window_frames(placement, windows), weight_shape[0])


def _check_padding(placement: Placement, pads: Pairs, mode: str) -> None:
    """Raise ShapeError where torch would, on processes with nothing to pad too."""
    most = {"circular": 0, "reflect": -1}.get(mode)
    for n, pair in zip(placement.shape[-len(pads) :], pads, strict=True):
        if most is not None and not 0 <= min(pair) <= max(pair) <= n + most:
            what = f"{mode} padding {pair} of {n} rows"
            raise ShapeError(what, text=str(placement.layout), hint=f"from 0 to {n + most}")


def pad(x: Tensor, placement: Placement, pads: Pairs, mode: str, value: float) -> tuple[Tensor, Placement]:
    """A block -> the block of the array padded by `F.pad` along its last dims, and its placement."""
    _check_padding(placement, pads, mode)
    boundary = Boundary("constant", value) if mode == "constant" else Boundary(BOUNDARIES[mode])
    windows = [Window(1, 1, 1, pair, "", boundary, boundary) for pair in pads]
    geometry = geometry_of(placement, window_frames(placement, windows))
    options = _own_padding(placement, pads), mode, value or None
    return apply_windows(x, placement, geometry, lambda rows, _: F.pad(rows, *options))


def _own_padding(placement: Placement, pads: Pairs) -> list[int]:
    """The padding that torch adds, as `F.pad` takes it; the exchange brings the rows of sharded dims."""
    dims = enumerate(pads, len(placement.shape) - len(pads))
    own = [(0, 0) if placement.cuts(d) else pair for d, pair in dims]
    return list(itertools.chain.from_iterable(reversed(own)))


def check_channels(placement: Placement, dim: int, channels: int) -> None:
    """Raise NotationError if the channels are sharded, ShapeError if their number is wrong."""
    if dim < 0:
        what = f"a block with {len(placement.shape)} dims"
        raise ShapeError(what, text=str(placement.layout), hint="as in b c h w")
    check_whole(placement, (dim,), "this layer")
    if placement.shape[dim] != channels:
        what = f"{placement.shape[dim]} channels, the layer has {channels}"
        raise ShapeError(what, text=str(placement.layout))


def conv_transpose(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, windows: Windows, groups: int
) -> tuple[Tensor, Placement]:
    """A block `(..., c, *spatial)` -> the block of the transposed convolution's outputs, as in `conv`."""
    rank, (_, stride, dilation, *_) = len(windows), zip(*windows, strict=True)
    transposed = _transposed_geometry(placement, windows, weight.shape, groups)

    def spread(rows: Tensor, runs: Sequence[OutputRun], weight: Tensor, bias: Tensor | None) -> Tensor:
        if 0 in rows.shape:  # outputs that no input reaches
            y = no_outputs([0], rows, weight).sum().expand(transposed.result.local_shape)
        else:
            full = _CONV_TRANSPOSE[rank - 1](rows, weight, None, stride, 0, 0, groups, dilation)
            crop: list[int] = []
            for run, (_, s, _, p, _), n in reversed([*zip(runs, windows, full.shape[-rank:], strict=True)]):
                offset = run.start + p - run.first * s
                crop += [-offset, run.outputs + offset - n]
            y = F.pad(full, crop)
        return y if bias is None else y + bias.view(-1, *(1,) * rank)

    return apply_windows(x, placement, transposed, spread, weight, bias)


@lru_cache(maxsize=4096)
def _transposed_geometry(
    placement: Placement, windows: Windows, weight_shape: torch.Size, groups: int
) -> Geometry:
    first, frames = len(placement.shape) - len(windows), []
    check_channels(placement, first - 1, weight_shape[0])
    for d, (k, s, dilation, p, extra) in enumerate(windows, first):
        if not 0 <= extra < max(s, dilation):
            what = f"output_padding {extra} with stride {s} and dilation {dilation}"
            raise ShapeError(what, hint="output_padding must be smaller than stride or dilation")
        dim, length = placement.layout.dims[d], placement.shape[d]
        sizes = placement.sharding.mesh.sizes_of(dim.axes)
        frames.append(transposed_frame(dim, length, sizes, k=k, s=s, d=dilation, p=p, extra=extra))
        if frames[-1].length < 1:
            what = f"no output: {length} rows of dim {dim.name!r}, padding {p}"
            raise ShapeError(what, text=str(placement.layout))
    return geometry_of(placement, frames, weight_shape[1] * groups)


def padding_pairs(padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> Pairs:
    """A convolution's padding as torch writes it -> rows before and after, per spatial dim."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise XshardError(f"padding={padding!r}", hint="'same', 'valid' or numbers")
    return tuple((p, p) for p in padding)


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
    pooled, _, padding = _pool_geometry(placement, pool, Boundary("constant", float("-inf")))

    def maxima(rows: Tensor, _: Sequence[OutputRun]) -> Tensor:
        options = pool.kernel, pool.stride, padding, pool.dilation
        return _MAX[len(pool.kernel) - 1](rows, *options, ceil_mode=pool.ceil_mode)

    return apply_windows(x, placement, pooled, maxima)


def avg_pool(
    x: Tensor, placement: Placement, pool: Pool, *, count_include_pad: bool = True, divisor: int | None = None
) -> tuple[Tensor, Placement]:
    """A block `(..., *spatial)` -> the block of the averages; divisor: instead of the number of rows."""
    pooled, windows, padding = _pool_geometry(placement, pool, Boundary())
    lengths, options = placement.shape[-len(windows) :], (pool.padding, count_include_pad)

    def averages(rows: Tensor, runs: Sequence[OutputRun]) -> Tensor:
        if len(pool.kernel) == 1:  # torch has no sums over windows of one dim
            windows_2d = (1, *pool.kernel), (1, *pool.stride), (0, *padding)
            y = F.avg_pool2d(rows.unsqueeze(-2), *windows_2d, pool.ceil_mode, divisor_override=1).squeeze(-2)
        else:
            sums = F.avg_pool2d if len(pool.kernel) == 2 else F.avg_pool3d
            y = sums(rows, pool.kernel, pool.stride, padding, pool.ceil_mode, divisor_override=1)
        return y / (divisor or _counts(lengths, windows, tuple(runs), *options, y.dtype, y.device))

    return apply_windows(x, placement, pooled, averages)


@lru_cache(maxsize=4096)
def _pool_geometry(placement: Placement, pool: Pool, beyond: Boundary) -> tuple[Geometry, PoolWindows, Ints]:
    """The geometry of a pool, its windows, and the rows that torch pads, per spatial dim."""
    windows, padding = [], []
    numbers = zip(pool.kernel, pool.stride, pool.dilation, pool.padding, strict=True)
    for i, (k, s, d, p) in enumerate(numbers, len(placement.shape) - len(pool.kernel)):
        if not 0 <= p <= (d * (k - 1) + 1) // 2:
            raise ShapeError(f"padding {p} of a pool with kernel {k}", hint="at most half the kernel")
        window = Window(k, s, d, (p, p), pool.outputs, beyond, beyond)
        windows.append(pool_window(placement.shape[i], window, ceil=pool.ceil_mode))
        padding.append(0 if placement.cuts(i) else p)
    return geometry_of(placement, window_frames(placement, windows)), tuple(windows), tuple(padding)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    lengths: Ints,
    windows: PoolWindows,
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
        counts = counts[..., None] * pool_counts(length, window, outputs, padding=p, include_pad=include_pad)
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
