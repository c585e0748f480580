"""Convolutions, transposed convolutions and pools of blocks, with the values of the unsharded array.

Rows of sharded dims come from an exchange with their padding; torch's own kernels pad the other dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Outputs, Placement, check_whole
from torch_bridge.nn.window import (
    Ints,
    Runs,
    TensorOptions,
    WindowPlan,
    apply_windows,
    no_outputs,
    per_dim,
    window_frames,
    window_plan,
)
from torch_bridge.ops import all_reduce
from xshard.errors import ShapeError
from xshard.nn.windows import (
    Frame,
    OutputRun,
    TransposedWindow,
    along,
    pool_counts,
    pool_window,
    transposed_frame,
)
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

PoolWindows = tuple[Window, ...]
PaddingPairs = tuple[tuple[int, int], ...]  # rows of padding before and after, per spatial dim

# torch's padding modes, as boundaries.
BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}


@dataclass(frozen=True)
class Convolution:
    """A convolution without its weights: one number, or one pair of paddings, per spatial dim."""

    kernel: Ints
    stride: Ints
    padding: PaddingPairs
    dilation: Ints
    groups: int = 1
    padding_mode: str = "zeros"
    outputs: str = ""


def rank_of(layer: Any) -> int:
    """Return the number of spatial dims of a layer, which the name of its class says: 2 for `Conv2d`."""
    return int(type(layer).__name__[-2])


def conv_layer(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply a `Conv` layer to an array whose spatial dims may be sharded."""
    form = Convolution(
        kernel=layer.kernel_size,
        stride=layer.stride,
        padding=padding_pairs(layer.padding, layer.kernel_size, layer.dilation),
        dilation=layer.dilation,
        groups=layer.groups,
        padding_mode=layer.padding_mode,
        outputs=layer.outputs,
    )
    return conv(x, placement, layer.weight, layer.bias, form)


def conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, form: Convolution
) -> Outputs:
    """Convolve an array whose spatial dims may be sharded, exchanging the rows at the borders.

    A kernel of 3 over "h/sp" needs one row of each neighbour. Returns the block of the outputs and
    their placement. Raises NotationError and ShapeError before anything is sent.

    Args:
        x: This process's block, `(..., c, *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
        weight: The kernel.
        bias: The bias, if any.
        form: Strides, paddings and so on.
    """
    convolve = getattr(F, f"conv{len(form.kernel)}d")
    plan = _conv_plan(placement, form, weight.shape)
    local_padding = _local_padding(placement, form.padding)
    pad_mode = "constant" if form.padding_mode == "zeros" else form.padding_mode

    # Exchanged rows include the zeros beyond the ends of sharded dims. Only dims that are not
    # sharded are padded here, before torch convolves without padding.
    def convolve_rows(rows: Tensor, _runs: Runs, weight: Tensor, bias: Tensor | None) -> Any:
        if any(local_padding):  # a copy of the rows
            rows = F.pad(rows, local_padding, mode=pad_mode)
        return convolve(rows, weight, bias, form.stride, 0, form.dilation, form.groups)

    return apply_windows(x, placement, plan, convolve_rows, weight, bias)


@lru_cache(maxsize=4096)
def _conv_plan(placement: Placement, form: Convolution, weight_shape: torch.Size) -> WindowPlan:
    """Return which rows this process reads, and where its outputs are. Raises ShapeError."""
    channel_dim = placement.ndim - len(form.kernel) - 1
    check_channels(placement, channel_dim, weight_shape[1] * form.groups)
    _check_padding(placement, form.padding, form.padding_mode)
    # Beyond the ends of the array, the exchange brings what torch's padding would.
    boundary = Boundary(BOUNDARIES[form.padding_mode])
    windows = [
        Window(k=k, s=s, d=d, p=p, out=form.outputs, before=boundary, after=boundary)
        for k, s, d, p in zip(form.kernel, form.stride, form.dilation, form.padding, strict=True)
    ]
    return window_plan(placement, window_frames(placement, windows), weight_shape[0])


def _check_padding(placement: Placement, pads: PaddingPairs, mode: str) -> None:
    """Raise ShapeError where torch would, on processes with nothing to pad too."""
    # A circular padding has at most all rows; a reflected one leaves out the row at the end.
    n_rows_left_out = {"circular": 0, "reflect": 1}.get(mode)
    if n_rows_left_out is None:
        return
    for length, pair in zip(placement.shape[-len(pads) :], pads, strict=True):
        max_padding = length - n_rows_left_out
        if not 0 <= min(pair) <= max(pair) <= max_padding:
            reason = f"{mode} padding {pair} of {length} rows"
            raise placement.shape_error(reason, f"from 0 to {max_padding}")


def pad(x: Tensor, placement: Placement, pads: PaddingPairs, mode: str, value: float) -> Outputs:
    """Pad an array as `F.pad` does, where the padded dims may be sharded.

    8 rows on 2 devices padded by (1, 1) are 10 rows, of which each device gets 5. Returns this
    process's block of the result, and its placement.

    Args:
        x: This process's block.
        placement: The placement of `x`: layout, mesh and global shape.
        pads: Rows before and after, per dim, for the last dims of the array.
        mode: torch's `mode`.
        value: The constant, for the mode "constant".
    """
    _check_padding(placement, pads, mode)
    boundary = Boundary(mode, value) if mode == "constant" else Boundary(BOUNDARIES[mode])
    # A convolution with a kernel of one row and this padding has just these outputs: its exchange
    # of rows is used.
    windows = [Window(k=1, p=pair, before=boundary, after=boundary) for pair in pads]
    plan = window_plan(placement, window_frames(placement, windows))
    local_padding = _local_padding(placement, pads)

    def pad_rows(rows: Tensor, _runs: Runs) -> Tensor:
        # Modes other than "constant" refuse a value.
        return F.pad(rows, local_padding, mode, value if value else None)

    return apply_windows(x, placement, plan, pad_rows)


def _local_padding(placement: Placement, pads: PaddingPairs) -> list[int]:
    """Return the padding of dims that are not sharded, as `F.pad` takes it: the last dim first."""
    first_dim = placement.ndim - len(pads)
    local_padding: list[int] = []
    for d, pair in reversed(list(enumerate(pads, first_dim))):
        # Sharded dims get their padding with the rows of neighbours.
        local_padding.extend((0, 0) if placement.is_sharded(d) else pair)
    return local_padding


def check_channels(placement: Placement, dim: int, channels: int) -> None:
    """Raise NotationError if the channels are sharded, ShapeError if their number is wrong."""
    if dim < 0:  # the layer has more dims than the block
        raise placement.shape_error(f"a block with {placement.ndim} dims", "as in b c h w")
    check_whole(placement, (dim,), "this layer")
    if placement.shape[dim] != channels:
        raise placement.shape_error(f"{placement.shape[dim]} channels, the layer has {channels}")


def conv_transpose(
    layer: Any, x: Tensor, placement: Placement, output_size: Ints | None = None
) -> Outputs:
    """Apply a `ConvTranspose` layer to an array whose spatial dims may be sharded.

    Returns the block of the outputs and their placement.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block, `(..., c, *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
        output_size: torch's argument, spatial lengths of the global result; None: as the layer's
            output padding gives.
    """
    windows = _transposed_windows(layer, placement, output_size)
    plan = _transposed_plan(placement, windows, layer.weight.shape, layer.groups)
    spread = getattr(F, f"conv_transpose{len(windows)}d")

    def spread_rows(rows: Tensor, runs: Runs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run torch's transposed convolution on the rows, and keep this device's outputs only."""
        if 0 in rows.shape:  # no input reaches these outputs
            zero = no_outputs([0], rows, weight).sum()
            y = zero.expand(plan.result.local_shape)
        else:
            # The bias is added below, once for each output; paddings are cut off by `_crop`.
            y = spread(
                rows, weight, stride=layer.stride, groups=layer.groups, dilation=layer.dilation
            )
            # Rows of neighbours also reach outputs of theirs. `_crop` gives negative padding, which
            # cuts these off.
            y = F.pad(y, _crop(runs, windows, y.shape[-len(windows) :]))
        if bias is None:
            return y
        spatial_ones = (1,) * len(windows)
        return y + bias.view(-1, *spatial_ones)

    return apply_windows(x, placement, plan, spread_rows, layer.weight, layer.bias)


def _transposed_windows(
    layer: Any, placement: Placement, output_size: Ints | None
) -> tuple[TransposedWindow, ...]:
    """Return kernel, stride, padding and so on of a transposed convolution, one record per dim.

    Args:
        layer: The module of torch, for its options and parameters.
        placement: The placement of the input.
        output_size: torch's argument: the spatial lengths of the global result, or None. It
            replaces the layer's output padding, as a stride of 2 makes 8 or 9 outputs from equally
            many inputs.
    """
    options = (layer.kernel_size, layer.stride, layer.dilation, layer.padding)
    if output_size is None:
        return tuple(map(TransposedWindow, *options, layer.output_padding))
    windows = list(map(TransposedWindow, *options))
    rank = len(windows)
    lengths = zip(placement.shape[-rank:], output_size[-rank:], strict=True)
    for i, (length, outputs) in enumerate(lengths):
        missing = outputs - windows[i].output_length(length)
        windows[i] = windows[i]._replace(output_padding=missing)
    return tuple(windows)


def _crop(runs: Runs, windows: Sequence[TransposedWindow], lengths: Sequence[int]) -> list[int]:
    """Return the (negative) padding that leaves this process's outputs, as `F.pad` takes it.

    Args:
        runs: The rows that the process has, and the outputs to leave, along each dim.
        windows: The windows.
        lengths: How many outputs torch has computed from these rows, along each dim.
    """
    crop: list[int] = []
    for run, window, length in zip(runs, windows, lengths, strict=True):
        # Padding of a transposed convolution cuts off that many of its first outputs.
        first_output = run.first * window.stride - window.padding
        cut_before = run.start - first_output
        cut_after = length - cut_before - run.outputs
        crop[:0] = (-cut_before, -cut_after)  # `F.pad` takes the last dim first
    return crop


@lru_cache(maxsize=4096)
def _transposed_plan(
    placement: Placement,
    windows: tuple[TransposedWindow, ...],
    weight_shape: torch.Size,
    groups: int,
) -> WindowPlan:
    """Return which rows reach this process's outputs. Raises ShapeError."""
    first_dim = placement.ndim - len(windows)
    check_channels(placement, first_dim - 1, weight_shape[0])
    frames = {}
    for d, window in enumerate(windows, first_dim):
        frames[d] = _transposed_frame(placement, d, window)
    return window_plan(placement, frames, weight_shape[1] * groups)


def _transposed_frame(placement: Placement, d: int, window: TransposedWindow) -> Frame:
    """Find which inputs each device needs along one dim of a transposed convolution.

    A frame has these rows for all devices, the outputs that each computes, and the global length of
    the result. Raises ShapeError for an output padding that torch refuses too, and if there would
    be no output.

    Args:
        placement: The placement of the input.
        d: The dim of the array.
        window: The window over it.
    """
    output_padding = window.output_padding
    if not 0 <= output_padding < max(window.stride, window.dilation):
        reason = f"output_padding {output_padding} with stride {window.stride} and dilation {window.dilation}"
        raise ShapeError(reason, hint="output_padding must be smaller than stride or dilation")
    rows = along(placement.sharding, d)
    frame = transposed_frame(rows, window)
    if frame.length < 1:
        reason = f"no output: {rows.length} rows of dim {rows.dim.name!r}, padding {window.padding}"
        raise placement.shape_error(reason)
    return frame


def padding_pairs(
    padding: Literal["same", "valid"] | Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
) -> PaddingPairs:
    """Return a convolution's padding as rows before and after, per spatial dim.

    Args:
        padding: torch's argument. (1, 2) -> ((1, 1), (2, 2)); "valid" -> no padding; "same" -> as
            many rows as keep the length at stride 1: kernel 4 -> (1, 2), the odd row after the end
            as in torch.
        kernel: The size of the kernel, per spatial dim.
        dilation: Its dilation, per spatial dim.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        pairs = []
        for kernel_size, row_distance in zip(kernel, dilation, strict=True):
            total_padding = row_distance * (kernel_size - 1)
            padding_before = total_padding // 2
            pairs.append((padding_before, total_padding - padding_before))
        return tuple(pairs)
    return tuple((rows, rows) for rows in padding)


class Pooling(NamedTuple):
    """A pool as one process computes it."""

    plan: WindowPlan
    windows: PoolWindows  # with the padding that `ceil_mode` adds
    local_padding: Ints  # that torch adds, per spatial dim


def max_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply a `MaxPool` layer to an array whose spatial dims may be sharded.

    Windows over a border use rows of neighbours. Returns the block of maxima and their placement.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block, `(..., *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
    """
    # Padding with -inf: it never is the maximum.
    windows = _pool_windows(layer, Boundary("constant", float("-inf")))
    pooling = _pooling(placement, windows, layer.ceil_mode)
    take_maxima = getattr(F, f"max_pool{len(windows)}d")

    def pool_rows(rows: Tensor, _runs: Runs) -> Any:
        return take_maxima(
            rows,
            layer.kernel_size,
            layer.stride,
            pooling.local_padding,
            layer.dilation,
            ceil_mode=layer.ceil_mode,
        )

    return apply_windows(x, placement, pooling.plan, pool_rows)


def avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Apply an `AvgPool` layer to an array whose spatial dims may be sharded.

    Windows are summed on the block. The divisor is counted in the global array, as windows at its
    ends may have fewer elements. Returns the block of averages and their placement.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block, `(..., *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
    """
    windows = _pool_windows(layer, Boundary())
    pooling = _pooling(placement, windows, layer.ceil_mode)

    def pool_rows(rows: Tensor, runs: Runs) -> Tensor:
        sums = _window_sums(rows, pooling, is_ceil=layer.ceil_mode)
        divisor = getattr(layer, "divisor_override", None)  # 1-D pools have none
        if not divisor:
            lengths = placement.shape[-len(windows) :]
            tensor_options = TensorOptions(sums.dtype, sums.device)
            divisor = _counts(
                lengths, pooling.windows, tuple(runs), layer.count_include_pad, tensor_options
            )
        return sums / divisor

    return apply_windows(x, placement, pooling.plan, pool_rows)


def _window_sums(rows: Tensor, pooling: Pooling, *, is_ceil: bool) -> Tensor:
    """Return the sums of the rows of every window."""
    kernel = tuple(window.k for window in pooling.windows)
    stride = tuple(window.s for window in pooling.windows)
    padding = pooling.local_padding
    rank = len(kernel)
    if rank == 1:
        # torch has no sums over windows of one dim: they are windows of two, one row high.
        rows = rows.unsqueeze(-2)
        kernel = (1, *kernel)
        stride = (1, *stride)
        padding = (0, *padding)
    average = F.avg_pool3d if rank == 3 else F.avg_pool2d
    sums = average(rows, kernel, stride, padding, is_ceil, divisor_override=1)
    return sums.squeeze(-2) if rank == 1 else sums


def _pool_windows(layer: Any, boundary: Boundary) -> PoolWindows:
    """Return the windows of a pool, without what `ceil_mode` adds; boundary: the values of its padding."""
    layer_dilation = getattr(layer, "dilation", 1)  # average pools have none
    options = (layer.kernel_size, layer.stride, layer_dilation, layer.padding)
    options_by_dim = [per_dim(option, rank_of(layer)) for option in options]
    windows = []
    for kernel, stride, dilation, padding in zip(*options_by_dim, strict=True):
        padding_pair = (padding, padding)
        windows.append(
            Window(
                k=kernel,
                s=stride,
                d=dilation,
                p=padding_pair,
                out=layer.outputs,
                before=boundary,
                after=boundary,
            )
        )
    return tuple(windows)


@lru_cache(maxsize=4096)
def _pooling(placement: Placement, windows: PoolWindows, is_ceil: bool) -> Pooling:
    """Work out what this process needs for a pooling layer: rows of neighbours, and padding.

    In the result, padding is 0 on sharded dims, where the exchanged rows include it. Raises
    ShapeError for padding of more than half the kernel, as torch does.

    Args:
        placement: The placement of the input.
        windows: Kernel, stride and padding, one per spatial dim.
        is_ceil: torch's `ceil_mode`.
    """
    wider_windows = []
    local_padding = []
    for d, window in enumerate(windows, placement.ndim - len(windows)):
        padding = window.padding[0]
        if not 0 <= padding <= window.span // 2:
            reason = f"padding {padding} of a pool with kernel {window.k}"
            raise ShapeError(reason, hint="at most half the kernel")
        # `ceil_mode` may add a last window, which begins in the array and reads beyond it.
        wider_windows.append(pool_window(placement.shape[d], window, ceil=is_ceil))
        local_padding.append(0 if placement.is_sharded(d) else padding)
    plan = window_plan(placement, window_frames(placement, wider_windows))
    return Pooling(plan, tuple(wider_windows), tuple(local_padding))


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _counts(
    lengths: Ints,
    windows: PoolWindows,
    runs: tuple[OutputRun, ...],
    include_pad: bool,
    tensor_options: TensorOptions,
) -> int | Tensor:
    """Count the elements in each window of an average pool, which are the divisors of its sums.

    Returns a tensor `[outputs of each dim]`, or the kernel's size if all windows are full.
    8 rows, kernel 3, stride 1, padding 1, without `include_pad` -> 2, 3, 3, 3, 3, 3, 3, 2.

    Args:
        lengths: The lengths of the global array, per spatial dim.
        windows: The windows, per spatial dim.
        runs: Which outputs this block has, per dim.
        include_pad: Whether padding counts.
        tensor_options: The dtype and the device of the result.
    """
    counts = np.ones((), np.int64)  # the product of the counts along each dim
    for length, window, run in zip(lengths, windows, runs, strict=True):
        outputs = range(run.start, run.start + run.outputs)
        # Rows that `ceil_mode` adds after the end do not count: as many do as before the array.
        padding = window.padding[0]
        dim_counts = pool_counts(length, window, outputs, padding=padding, include_pad=include_pad)
        counts = counts[..., None] * dim_counts
    kernel_size = math.prod(window.k for window in windows)
    if (counts == kernel_size).all():
        return kernel_size
    return torch.from_numpy(counts).to(tensor_options.device, tensor_options.dtype)


def global_avg_pool(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    """Average an array over its spatial dims, which may be sharded: "b c h/sp w" -> "b c h w".

    Blocks are summed, the sums are added over the devices, and divided by the global size. Returns
    `(..., 1, 1)`, equal on all devices along the spatial dims' axes, and its placement.

    Args:
        layer: The module of torch, for its options and parameters.
        x: This process's block, `(..., *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
    """
    first_dim = placement.ndim - rank_of(layer)
    spatial_dims = tuple(range(first_dim, placement.ndim))
    block_sums = x.sum(spatial_dims, keepdim=True)
    sums, result = total_over_blocks(block_sums, placement, spatial_dims)
    return sums / math.prod(placement.shape[first_dim:]), result


def total_over_blocks(sums: Tensor, placement: Placement, dims: Sequence[int]) -> Outputs:
    """Add up the sums of blocks over the processes along the axes that shard some dims.

    Sums over h and w of blocks of "b c h/sp w" -> "b c", or "b c 1 1" if dims were kept. Returns the
    total, equal on all devices of sp, and its placement.
    """
    # The mesh axes that shard the dims hold different rows: an all-reduce adds their sums.
    axes = placement.axes_of(dims)
    if axes:
        sums = all_reduce(sums, axes, placement.processes, grad="replicated")
    total_dims = []
    shape = []
    for d, dim in enumerate(placement.dims):
        if d not in dims:
            total_dims.append(dim)
            shape.append(placement.shape[d])
        elif sums.ndim == placement.ndim:
            total_dims.append(Dim(dim.name))
            shape.append(1)
    return sums, placement.with_dims(total_dims, shape)
