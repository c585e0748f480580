"""Convolutions, transposed convolutions and pools of blocks, with the values of the unsharded array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Outputs, Placement, check_whole
from torch_bridge.nn.window import (
    Geometry,
    Ints,
    Like,
    apply_windows,
    geometry_of,
    no_outputs,
    window_frames,
)
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import OutputRun, pool_counts, pool_window, transposed_frame
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

Windows = tuple[Ints, ...]  # kernel, stride, dilation, padding and output padding, per spatial dim
PoolWindows = tuple[Window, ...]
Runs = tuple[OutputRun, ...]
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


def rank_of(layer: Any) -> int:
    """The number of spatial dims, as in `Conv2d`."""
    return int(type(layer).__name__[-2])


def each(value: Any, rank: int) -> tuple[Any, ...]:
    """A number per spatial dim."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * rank


def conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, form: Convolution
) -> Outputs:
    """A block `(..., c, *spatial)` -> the block of the outputs; raises before anything is sent."""
    rank = len(form.kernel)
    flat = _own_padding(placement, form.padding)
    mode = "constant" if form.padding_mode == "zeros" else form.padding_mode

    def convolve(
        rows: Tensor, _: Sequence[OutputRun], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        padded = F.pad(rows, flat, mode=mode) if any(flat) else rows
        return _CONV[rank - 1](padded, weight, bias, form.stride, 0, form.dilation, form.groups)

    return apply_windows(
        x, placement, _conv_geometry(placement, form, weight.shape), convolve, weight, bias
    )


@lru_cache(maxsize=4096)
def _conv_geometry(placement: Placement, form: Convolution, weights: torch.Size) -> Geometry:
    check_channels(placement, len(placement.shape) - len(form.kernel) - 1, weights[1] * form.groups)
    _check_padding(placement, form.padding, form.padding_mode)
    boundary = Boundary(BOUNDARIES[form.padding_mode])
    numbers = zip(form.kernel, form.stride, form.dilation, form.padding, strict=True)
    windows = [Window(*some, form.outputs, boundary, boundary) for some in numbers]
    return geometry_of(placement, window_frames(placement, windows), weights[0])


def _check_padding(placement: Placement, pads: Pairs, mode: str) -> None:
    """Raise ShapeError where torch would, on processes with nothing to pad too."""
    most = {"circular": 0, "reflect": -1}.get(mode)
    for n, pair in zip(placement.shape[-len(pads) :], pads, strict=True):
        if most is not None and not 0 <= min(pair) <= max(pair) <= n + most:
            what = f"{mode} padding {pair} of {n} rows"
            raise ShapeError(what, text=str(placement.layout), hint=f"from 0 to {n + most}")


def pad(x: Tensor, placement: Placement, pads: Pairs, mode: str, value: float) -> Outputs:
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
    layer: Any, x: Tensor, placement: Placement, output_size: Ints | None = None
) -> Outputs:
    """A block `(..., c, *spatial)` -> the block of the transposed convolution's outputs, as in `conv`."""
    options = (layer.kernel_size, layer.stride, layer.dilation, layer.padding)
    extra = layer.output_padding
    rank = len(layer.kernel_size)
    groups = layer.groups
    if output_size is not None:  # a global length
        lengths = zip(output_size[-rank:], placement.shape[-rank:], *options, strict=True)
        extra = tuple(
            n - ((rows - 1) * s - 2 * p + d * (k - 1) + 1) for n, rows, k, s, d, p in lengths
        )
    windows = tuple(zip(*options, extra, strict=True))
    transposed = _transposed(placement, windows, layer.weight.shape, groups)

    def spread(
        rows: Tensor, runs: Sequence[OutputRun], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        if 0 in rows.shape:  # outputs that no input reaches
            y = no_outputs([0], rows, weight).sum().expand(transposed.result.local_shape)
        else:
            full = _CONV_TRANSPOSE[rank - 1](
                rows, weight, None, layer.stride, 0, 0, groups, layer.dilation
            )
            crop: list[int] = []
            for run, (_, s, _, p, _), n in reversed(
                [*zip(runs, windows, full.shape[-rank:], strict=True)]
            ):
                offset = run.start + p - run.first * s
                crop += [-offset, run.outputs + offset - n]
            y = F.pad(full, crop)
        return y if bias is None else y + bias.view(-1, *(1,) * rank)

    return apply_windows(x, placement, transposed, spread, layer.weight, layer.bias)


@lru_cache(maxsize=4096)
def _transposed(
    placement: Placement, windows: Windows, weights: torch.Size, groups: int
) -> Geometry:
    first = len(placement.shape) - len(windows)
    frames = []
    check_channels(placement, first - 1, weights[0])
    for d, (k, s, dilation, p, extra) in enumerate(windows, first):
        if not 0 <= extra < max(s, dilation):
            what = f"output_padding {extra} with stride {s} and dilation {dilation}"
            raise ShapeError(what, hint="output_padding must be smaller than stride or dilation")
        dim = placement.layout.dims[d]
        length = placement.shape[d]
        sizes = placement.sharding.mesh.sizes_of(dim.axes)
        frames.append(transposed_frame(dim, length, sizes, k=k, s=s, d=dilation, p=p, extra=extra))
        if frames[-1].length < 1:
            what = f"no output: {length} rows of dim {dim.name!r}, padding {p}"
            raise ShapeError(what, text=str(placement.layout))
    return geometry_of(placement, frames, weights[1] * groups)


def padding_pairs(
    padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> Pairs:
    """A convolution's padding as torch writes it -> rows before and after, per spatial dim."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise XshardError(f"padding={padding!r}", hint="'same', 'valid' or numbers")
    return tuple((p, p) for p in padding)


def max_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """A block `(..., *spatial)` -> the block of the maxima."""
    pooled, windows, padding = _pooling(
        placement, *_pool(layer, Boundary("constant", float("-inf")))
    )

    def maxima(rows: Tensor, _: Sequence[OutputRun]) -> Tensor:
        options = layer.kernel_size, layer.stride, padding, layer.dilation
        return _MAX[len(windows) - 1](rows, *options, ceil_mode=layer.ceil_mode)

    return apply_windows(x, placement, pooled, maxima)


def avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """A block `(..., *spatial)` -> the block of the averages."""
    own, ceil = _pool(layer, Boundary())
    pooled, windows, padding = _pooling(placement, own, ceil)
    options = placement.shape[-len(windows) :], windows, tuple(w.padding[0] for w in own)
    kernel, stride = (tuple(getattr(w, name) for w in windows) for name in "ks")

    def averages(rows: Tensor, runs: Sequence[OutputRun]) -> Tensor:
        if len(windows) == 1:  # torch has no sums over windows of one dim
            windows_2d = (1, *kernel), (1, *stride), (0, *padding)
            y = F.avg_pool2d(rows.unsqueeze(-2), *windows_2d, ceil, divisor_override=1).squeeze(-2)
        else:
            sums = F.avg_pool2d if len(windows) == 2 else F.avg_pool3d
            y = sums(rows, kernel, stride, padding, ceil, divisor_override=1)
        divisor = getattr(layer, "divisor_override", None)  # one dim has none
        return y / (
            divisor or _counts(*options, tuple(runs), layer.count_include_pad, (y.dtype, y.device))
        )

    return apply_windows(x, placement, pooled, averages)


def _pool(layer: Any, beyond: Boundary) -> tuple[PoolWindows, bool]:
    """The windows of a pool, without what `ceil_mode` adds, and this mode."""
    options = (layer.kernel_size, layer.stride, getattr(layer, "dilation", 1), layer.padding)
    numbers = zip(*(each(value, rank_of(layer)) for value in options), strict=True)
    windows = (Window(k, s, d, (p, p), layer.outputs, beyond, beyond) for k, s, d, p in numbers)
    return tuple(windows), layer.ceil_mode


@lru_cache(maxsize=4096)
def _pooling(
    placement: Placement, windows: PoolWindows, ceil: bool
) -> tuple[Geometry, PoolWindows, Ints]:
    """The geometry of a pool, its windows, and the rows that torch pads, per spatial dim."""
    wider = []
    padding = []
    for i, window in enumerate(windows, len(placement.shape) - len(windows)):
        if not 0 <= (p := window.padding[0]) <= (window.d * (window.k - 1) + 1) // 2:
            raise ShapeError(
                f"padding {p} of a pool with kernel {window.k}", hint="at most half the kernel"
            )
        wider.append(pool_window(placement.shape[i], window, ceil=ceil))
        padding.append(0 if placement.cuts(i) else p)
    return geometry_of(placement, window_frames(placement, wider)), tuple(wider), tuple(padding)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    lengths: Ints, windows: PoolWindows, padding: Ints, runs: Runs, include_pad: bool, like: Like
) -> int | Tensor:
    """The divisors of some outputs; a single number if they are equal."""
    counts = np.ones((), np.int64)
    for length, window, run, p in zip(lengths, windows, runs, padding, strict=True):
        outputs = range(run.start, run.start + run.outputs)
        counts = counts[..., None] * pool_counts(
            length, window, outputs, padding=p, include_pad=include_pad
        )
    every = math.prod(window.k for window in windows)
    return every if (counts == every).all() else torch.from_numpy(counts).to(like[1], like[0])


def global_avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """A block `(..., *spatial)` -> the means over the spatial dims, which the result does not shard."""
    first = len(placement.shape) - rank_of(layer)
    over = range(first, len(placement.shape))
    dims = list(placement.layout.dims)
    n = math.prod(placement.shape[first:])
    axes = tuple(axis for d in over for axis in dims[d].axes)
    dims[first:] = [Dim(dim.name) for dim in dims[first:]]
    result = placement.remade(dims, (*placement.shape[:first], *(1 for _ in over)))
    total = x.sum(tuple(over), keepdim=True)
    if axes:
        partial = replace(result.layout, tags=(("sum", axes),))
        total = redistribute(
            total, (partial, result.layout), placement.processes, shape=result.shape
        )
    return total / n, result
