"""Convolutions, transposed convolutions and pools of blocks, with the values of the unsharded array.

Rows of sharded dims come from an exchange with their padding; torch's own kernels pad the other dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Outputs, Placement, check_whole
from torch_bridge.nn.window import (
    Geometry,
    Ints,
    Like,
    Runs,
    apply_windows,
    geometry_of,
    no_outputs,
    window_frames,
)
from torch_bridge.redistribution import redistribute
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import Frame, OutputRun, pool_counts, pool_window, transposed_frame
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

PoolWindows = tuple[Window, ...]
Pairs = tuple[tuple[int, int], ...]  # padding before and after, per spatial dim

# torch's padding modes, as boundaries.
BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_MAX_POOL = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
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
    """Return the number of spatial dims of a layer, which the name of its class says: 2 for `Conv2d`."""
    return int(type(layer).__name__[-2])


def per_dim(value: Any, rank: int) -> tuple[Any, ...]:
    """Return an option of a layer for each spatial dim: 3 -> (3, 3), (1, 2) -> (1, 2)."""
    if isinstance(value, Sequence):
        return tuple(value)
    return (value,) * rank


def conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, form: Convolution
) -> Outputs:
    """Convolve an array whose spatial dims may be sharded, exchanging the rows at the borders.

    x: this process's block, `(..., c, *spatial)`; placement: the layout and global shape of its
    array. A kernel of 3 over "h/sp" needs one row of each neighbour. Returns the block of the
    outputs and their placement. Raises NotationError and ShapeError before anything is sent.
    """
    # torch's conv1d, conv2d or conv3d, by the number of spatial dims.
    convolve = _CONV[len(form.kernel) - 1]
    geometry = _conv_geometry(placement, form, weight.shape)
    local_padding = _local_padding(placement, form.padding)
    pad_mode = "constant" if form.padding_mode == "zeros" else form.padding_mode

    # Exchanged rows include the zeros beyond the ends of sharded dims. Only dims that are not
    # sharded are padded here, before torch convolves without padding.
    def convolve_rows(rows: Tensor, _runs: Runs, weight: Tensor, bias: Tensor | None) -> Tensor:
        if any(local_padding):  # a copy of the rows
            rows = F.pad(rows, local_padding, mode=pad_mode)
        return convolve(rows, weight, bias, form.stride, 0, form.dilation, form.groups)

    return apply_windows(x, placement, geometry, convolve_rows, weight, bias)


@lru_cache(maxsize=4096)
def _conv_geometry(placement: Placement, form: Convolution, weight_shape: torch.Size) -> Geometry:
    """Return which rows this process reads, and where its outputs are. Raises ShapeError."""
    channel_dim = len(placement.shape) - len(form.kernel) - 1
    check_channels(placement, channel_dim, weight_shape[1] * form.groups)
    _check_padding(placement, form.padding, form.padding_mode)
    # Beyond the ends of the array, the exchange brings what torch's padding would.
    boundary = Boundary(BOUNDARIES[form.padding_mode])
    windows = [
        Window(kernel, stride, dilation, padding, form.outputs, boundary, boundary)
        for kernel, stride, dilation, padding in zip(
            form.kernel, form.stride, form.dilation, form.padding, strict=True
        )
    ]
    return geometry_of(placement, window_frames(placement, windows), weight_shape[0])


def _check_padding(placement: Placement, pads: Pairs, mode: str) -> None:
    """Raise ShapeError where torch would, on processes with nothing to pad too."""
    # A circular padding has at most all rows; a reflected one does not repeat the first row.
    repeated_rows = {"circular": 0, "reflect": 1}.get(mode)
    if repeated_rows is None:
        return
    for length, pair in zip(placement.shape[-len(pads) :], pads, strict=True):
        longest_padding = length - repeated_rows
        if not 0 <= min(pair) <= max(pair) <= longest_padding:
            message = f"{mode} padding {pair} of {length} rows"
            raise ShapeError(
                message, text=str(placement.layout), hint=f"from 0 to {longest_padding}"
            )


def pad(x: Tensor, placement: Placement, pads: Pairs, mode: str, value: float) -> Outputs:
    """Pad an array as `F.pad` does, where the padded dims may be sharded.

    x: this process's block. pads: rows before and after, per dim, for the last dims of the array:
    8 rows on 2 devices padded by (1, 1) are 10 rows, of which each device gets its part.
    Returns that part, and its placement (layout and global shape).
    """
    _check_padding(placement, pads, mode)
    if mode == "constant":
        boundary = Boundary("constant", value)
    else:
        boundary = Boundary(BOUNDARIES[mode])
    # A convolution with a kernel of one row and this padding has just these outputs: its exchange
    # of rows is used.
    windows = [Window(1, 1, 1, pair, "", boundary, boundary) for pair in pads]
    geometry = geometry_of(placement, window_frames(placement, windows))
    local_padding = _local_padding(placement, pads)

    def pad_rows(rows: Tensor, _runs: Runs) -> Tensor:
        # Modes other than "constant" refuse a value.
        return F.pad(rows, local_padding, mode, value if value else None)

    return apply_windows(x, placement, geometry, pad_rows)


def _local_padding(placement: Placement, pads: Pairs) -> list[int]:
    """Return the padding of dims that are not sharded, as `F.pad` takes it: the last dim first."""
    first = len(placement.shape) - len(pads)
    local_padding: list[int] = []
    for d, pair in reversed(list(enumerate(pads, first))):
        # Sharded dims get their padding with the rows of neighbours.
        local_padding.extend((0, 0) if placement.is_sharded(d) else pair)
    return local_padding


def check_channels(placement: Placement, dim: int, channels: int) -> None:
    """Raise NotationError if the channels are sharded, ShapeError if their number is wrong."""
    if dim < 0:  # the layer has more dims than the block
        message = f"a block with {len(placement.shape)} dims"
        raise ShapeError(message, text=str(placement.layout), hint="as in b c h w")
    check_whole(placement, (dim,), "this layer")
    if placement.shape[dim] != channels:
        message = f"{placement.shape[dim]} channels, the layer has {channels}"
        raise ShapeError(message, text=str(placement.layout))


class TransposedWindow(NamedTuple):
    """One spatial dim of a transposed convolution, by torch's names."""

    kernel: int
    stride: int
    dilation: int
    padding: int
    output_padding: int


def conv_transpose(
    layer: Any, x: Tensor, placement: Placement, output_size: Ints | None = None
) -> Outputs:
    """Apply a `ConvTranspose` layer to an array whose spatial dims may be sharded.

    x: this process's block, `(..., c, *spatial)`; placement: the layout and global shape of its
    array. output_size: torch's argument, spatial lengths of the global result; None: as the
    layer's output padding gives. Returns the block of the outputs and their placement.
    """
    windows = _transposed_windows(layer, placement, output_size)
    geometry = _transposed_geometry(placement, windows, layer.weight.shape, layer.groups)
    spread = _CONV_TRANSPOSE[len(windows) - 1]

    def spread_rows(rows: Tensor, runs: Runs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run torch's transposed convolution on the rows, and keep this device's outputs only."""
        if 0 in rows.shape:  # no input reaches these outputs
            y = no_outputs([0], rows, weight).sum().expand(geometry.result.local_shape)
        else:
            full = spread(rows, weight, None, layer.stride, 0, 0, layer.groups, layer.dilation)
            # Rows of neighbours also reach outputs of theirs. `_crop` gives negative padding, which
            # cuts these off.
            y = F.pad(full, _crop(runs, windows, full.shape[-len(windows) :]))
        if bias is None:
            return y
        return y + bias.view(-1, *(1,) * len(windows))

    return apply_windows(x, placement, geometry, spread_rows, layer.weight, layer.bias)


def _transposed_windows(
    layer: Any, placement: Placement, output_size: Ints | None
) -> tuple[TransposedWindow, ...]:
    """Return kernel, stride, padding and so on of a transposed convolution, one record per dim.

    output_size: torch's argument: the spatial lengths of the global result, or None. It replaces
    the layer's output padding, as a stride of 2 makes 8 or 9 outputs from equally many inputs.
    """
    rank = len(layer.kernel_size)
    options = (layer.kernel_size, layer.stride, layer.dilation, layer.padding, layer.output_padding)
    windows = list(map(TransposedWindow, *options))
    if output_size is not None:
        # As in torch's layer: output padding is the asked length minus the length without it.
        lengths = zip(windows, output_size[-rank:], placement.shape[-rank:], strict=True)
        windows = [
            window._replace(output_padding=length - _unpadded_length(window, rows))
            for window, length, rows in lengths
        ]
    return tuple(windows)


def _unpadded_length(window: TransposedWindow, rows: int) -> int:
    """Return the length of a transposed convolution of some rows, without output padding."""
    span = window.dilation * (window.kernel - 1) + 1
    return (rows - 1) * window.stride - 2 * window.padding + span


def _crop(runs: Runs, windows: Sequence[TransposedWindow], lengths: Sequence[int]) -> list[int]:
    """Return the (negative) padding that leaves this process's outputs, as `F.pad` takes it.

    lengths: of the outputs of the rows that the process has, which begin at row `run.first * stride` of the
    array before its padding is cut off.
    """
    crop: list[int] = []
    # `F.pad` takes the last dim first.
    for run, window, length in reversed(list(zip(runs, windows, lengths, strict=True))):
        offset = run.start + window.padding - run.first * window.stride
        crop.append(-offset)
        crop.append(run.outputs + offset - length)
    return crop


@lru_cache(maxsize=4096)
def _transposed_geometry(
    placement: Placement,
    windows: tuple[TransposedWindow, ...],
    weight_shape: torch.Size,
    groups: int,
) -> Geometry:
    """Return which rows reach this process's outputs. Raises ShapeError."""
    first = len(placement.shape) - len(windows)
    check_channels(placement, first - 1, weight_shape[0])
    frames = [_transposed_frame(placement, d, window) for d, window in enumerate(windows, first)]
    return geometry_of(placement, frames, weight_shape[1] * groups)


def _transposed_frame(placement: Placement, d: int, window: TransposedWindow) -> Frame:
    """Find which inputs each device needs along one dim of a transposed convolution.

    A frame has these rows for all devices, the outputs that each computes, and the global length
    of the result. d: the dim of the array. Raises ShapeError for an output padding that torch
    refuses too, and if there would be no output.
    """
    extra = window.output_padding
    if not 0 <= extra < max(window.stride, window.dilation):
        message = (
            f"output_padding {extra} with stride {window.stride} and dilation {window.dilation}"
        )
        raise ShapeError(message, hint="output_padding must be smaller than stride or dilation")
    dim = placement.layout.dims[d]
    frame = transposed_frame(
        dim,
        placement.shape[d],
        placement.sharding.mesh.sizes_of(dim.axes),
        k=window.kernel,
        s=window.stride,
        d=window.dilation,
        p=window.padding,
        extra=extra,
    )
    if frame.length < 1:
        message = (
            f"no output: {placement.shape[d]} rows of dim {dim.name!r}, padding {window.padding}"
        )
        raise ShapeError(message, text=str(placement.layout))
    return frame


def padding_pairs(
    padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> Pairs:
    """Return a convolution's padding as rows before and after, per spatial dim.

    padding: torch's argument. (1, 2) -> ((1, 1), (2, 2)); "valid" -> no padding; "same" -> as many
    rows as keep the length at stride 1: kernel 4 -> (1, 2), the odd row after the end as in torch.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise XshardError(f"padding={padding!r}", hint="'same', 'valid' or numbers")
    return tuple((p, p) for p in padding)


class Pooling(NamedTuple):
    """A pool as one process computes it."""

    geometry: Geometry
    windows: PoolWindows  # with the padding that `ceil_mode` adds
    local_padding: Ints  # that torch adds, per spatial dim


def max_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply a `MaxPool` layer to an array whose spatial dims may be sharded.

    x: this process's block, `(..., *spatial)`; placement: the layout and global shape of its array.
    Windows over a border use rows of neighbours. Returns the block of maxima and their placement.
    """
    # Padding with -inf: it never is the maximum.
    windows = _pool_windows(layer, Boundary("constant", float("-inf")))
    pooling = _pooling(placement, windows, layer.ceil_mode)
    take_maxima = _MAX_POOL[len(windows) - 1]

    def pool_rows(rows: Tensor, _runs: Runs) -> Tensor:
        return take_maxima(
            rows,
            layer.kernel_size,
            layer.stride,
            pooling.local_padding,
            layer.dilation,
            ceil_mode=layer.ceil_mode,
        )

    return apply_windows(x, placement, pooling.geometry, pool_rows)


def avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply an `AvgPool` layer to an array whose spatial dims may be sharded.

    x: this process's block, `(..., *spatial)`; placement: the layout and global shape of its array.
    Windows are summed on the block. The divisor is counted in the global array, as windows at its
    ends may have fewer elements. Returns the block of averages and their placement.
    """
    windows = _pool_windows(layer, Boundary())
    pooling = _pooling(placement, windows, layer.ceil_mode)

    def pool_rows(rows: Tensor, runs: Runs) -> Tensor:
        sums = _window_sums(rows, pooling, is_ceil=layer.ceil_mode)
        divisor = getattr(layer, "divisor_override", None)  # 1-D pools have none
        if not divisor:
            divisor = _counts(
                placement.shape[-len(windows) :],
                pooling.windows,
                tuple(window.padding[0] for window in windows),
                tuple(runs),
                include_pad=layer.count_include_pad,
                like=Like(sums.dtype, sums.device),
            )
        return sums / divisor

    return apply_windows(x, placement, pooling.geometry, pool_rows)


def _window_sums(rows: Tensor, pooling: Pooling, *, is_ceil: bool) -> Tensor:
    """Return the sums of the rows of every window."""
    kernel = tuple(window.k for window in pooling.windows)
    stride = tuple(window.s for window in pooling.windows)
    padding = pooling.local_padding
    if len(kernel) == 1:
        # torch has no sums over windows of one dim: they are windows of two, one row high.
        kernel = (1, *kernel)
        stride = (1, *stride)
        padding = (0, *padding)
        wide = rows.unsqueeze(-2)
        return F.avg_pool2d(wide, kernel, stride, padding, is_ceil, divisor_override=1).squeeze(-2)
    average = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return average(rows, kernel, stride, padding, is_ceil, divisor_override=1)


def _pool_windows(layer: Any, boundary: Boundary) -> PoolWindows:
    """Return the windows of a pool, without what `ceil_mode` adds; boundary: the values of its padding."""
    rank = rank_of(layer)
    numbers = zip(
        per_dim(layer.kernel_size, rank),
        per_dim(layer.stride, rank),
        per_dim(getattr(layer, "dilation", 1), rank),
        per_dim(layer.padding, rank),
        strict=True,
    )
    return tuple(
        Window(kernel, stride, dilation, (padding, padding), layer.outputs, boundary, boundary)
        for kernel, stride, dilation, padding in numbers
    )


@lru_cache(maxsize=4096)
def _pooling(placement: Placement, windows: PoolWindows, is_ceil: bool) -> Pooling:
    """Work out what this process needs for a pooling layer: rows of neighbours, and padding.

    windows: kernel, stride and padding, one per spatial dim. is_ceil: torch's `ceil_mode`. In the
    result, padding is 0 on sharded dims, where the exchanged rows include it. Raises ShapeError for
    padding of more than half the kernel, as torch does.
    """
    wider_windows = []
    local_padding = []
    for d, window in enumerate(windows, len(placement.shape) - len(windows)):
        padding = window.padding[0]
        span = window.d * (window.k - 1) + 1
        if not 0 <= padding <= span // 2:
            message = f"padding {padding} of a pool with kernel {window.k}"
            raise ShapeError(message, hint="at most half the kernel")
        # `ceil_mode` may add a last window, which begins in the array and reads beyond it.
        wider_windows.append(pool_window(placement.shape[d], window, ceil=is_ceil))
        local_padding.append(0 if placement.is_sharded(d) else padding)
    geometry = geometry_of(placement, window_frames(placement, wider_windows))
    return Pooling(geometry, tuple(wider_windows), tuple(local_padding))


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    lengths: Ints,
    windows: PoolWindows,
    padding: Ints,
    runs: tuple[OutputRun, ...],
    *,
    include_pad: bool,
    like: Like,
) -> int | Tensor:
    """Count the elements in each window of an average pool, which are the divisors of its sums.

    lengths: of the global array, per spatial dim. runs: which outputs this block has, per dim.
    Returns a tensor `[outputs of each dim]`, or the kernel's size if all windows are full.
    8 rows, kernel 3, stride 1, padding 1, without `include_pad`: 2, 3, 3, 3, 3, 3, 3, 2.
    """
    counts = np.ones((), np.int64)  # the product of the counts along each dim
    for length, window, run, padding_after in zip(lengths, windows, runs, padding, strict=True):
        outputs = range(run.start, run.start + run.outputs)
        dim_counts = pool_counts(
            length, window, outputs, padding=padding_after, include_pad=include_pad
        )
        counts = counts[..., None] * dim_counts
    kernel_size = math.prod(window.k for window in windows)
    if (counts == kernel_size).all():
        return kernel_size
    return torch.from_numpy(counts).to(like.device, like.dtype)


def global_avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Average an array over its spatial dims, which may be sharded: "b c h/sp w" -> "b c h w".

    x: this process's block, `(..., *spatial)`; placement: the layout and global shape of its array.
    Blocks are summed, the sums are added over the devices, and divided by the global size. Returns
    `(..., 1, 1)`, equal on all devices along the spatial dims' axes, and its placement.
    """
    first = len(placement.shape) - rank_of(layer)
    spatial_dims = tuple(range(first, len(placement.shape)))
    axes: list[str] = []
    for d in spatial_dims:
        axes.extend(placement.layout.dims[d].axes)
    dims = list(placement.layout.dims)
    dims[first:] = [Dim(dim.name) for dim in dims[first:]]
    result = placement.with_dims(dims, (*placement.shape[:first], *(1 for _ in spatial_dims)))

    # The mesh axes that shard the spatial dims hold different rows: an all-reduce adds their sums.
    total = x.sum(spatial_dims, keepdim=True)
    if axes:
        partial_sums = replace(result.layout, tags=(("sum", tuple(axes)),))
        layouts = (partial_sums, result.layout)
        total = redistribute(total, layouts, placement.processes, shape=result.shape)
    return total / math.prod(placement.shape[first:]), result
