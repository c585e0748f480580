"""Windows over one sharded dim, by torch's formulas: the rows that every part reads, and its outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.errors import ShapeError, XshardError
from xshard.layout import Layout, Sharding
from xshard.layout.block_rows import output_dim, window_outputs
from xshard.layout.partition import Sizes, all_owned_rows, ceil_div
from xshard.layout.runs import Runs, count_rows, unroll
from xshard.notation.overlap import Boundary, Halo, Window
from xshard.notation.parser import SIZES, Dim, Shard

Interval = tuple[int, int]  # start, stop
# Outputs [start, stop) -> the rows [first, last) that they read.
Reads = Callable[[int, int], Interval]
EMPTY = Boundary("none")
MODES = ("nearest", "nearest-exact", "linear", "cubic")
CUBIC = -0.75  # the constant of the cubic kernel (Keys 1981 has -0.5; torch, OpenCV -0.75)


class ShardedDim(NamedTuple):
    """A dim without an overlap, the number of its rows, and the sizes of the axes that shard it."""

    dim: Dim
    length: int
    sizes: Sizes


def along(sharding: Sharding, dim_index: int) -> ShardedDim:
    """Return dim `dim_index` of a sharded array, with every row at its owner only."""
    dim = replace(sharding.layout.dims[dim_index], overlap=None)
    return ShardedDim(dim, sharding.shape[dim_index], sharding.mesh.sizes_of(dim.axes))


class OutputRun(NamedTuple):
    """Consecutive outputs of one part, and the rows that they read: numbers of the first, and counts."""

    first: int  # row, below 0 in the padding
    rows: int
    start: int  # output
    outputs: int


@dataclass(frozen=True)
class Frame:
    """One dim of an op; a part's block holds the rows of each of its runs in turn."""

    source: Dim  # with the overlap that brings every part its rows
    result: Dim
    length: int  # of the result
    runs: tuple[tuple[OutputRun, ...], ...]  # of each part


class FramedArrays(NamedTuple):
    """The arrays of an op over some dims of a sharded array."""

    source: Layout  # of the array that the op reads: a move to it brings every device its rows
    result: Sharding


def framed_arrays(
    sharding: Sharding, frames: Mapping[int, Frame], lengths: Mapping[int, int]
) -> FramedArrays:
    """Combine the frames of the dims of an op into layouts of its whole arrays.

    frames: by dim. lengths: the new lengths of other dims, as of the channels; all else stays as it
    is, without overlaps.
    """
    source_dims = dims_without_overlaps(sharding.layout)
    result_dims = list(source_dims)
    shape = {**dict(enumerate(sharding.shape)), **lengths}
    for dim_index, frame in frames.items():
        source_dims[dim_index] = frame.source
        result_dims[dim_index] = frame.result
        shape[dim_index] = frame.length
    source = replace(sharding.layout, dims=tuple(source_dims))
    result = replace(sharding.layout, dims=tuple(result_dims))
    return FramedArrays(source, Sharding(result, sharding.mesh, tuple(shape.values())))


def dims_without_overlaps(layout: Layout) -> list[Dim]:
    """Return the dims of a layout with every row at its owner only: "h/sp:halo(1,1)" -> "h/sp"."""
    return [replace(dim, overlap=None) for dim in layout.dims]


@layout_cache(maxsize=4096)
def window_frame(rows: ShardedDim, window: Window, input_dilation: int = 1) -> Frame:
    """Plan a convolution or a pool along a sharded dim: which rows each device reads and computes.

    3 taps with padding 1 over 8 rows on 2 devices: outputs 0-3 read rows -1 to 4, and outputs 4-7
    read rows 3 to 8, where -1 and 8 are padding.

    input_dilation: the dilation of the input: 2 puts one place between neighbouring rows, which holds the
    boundary's value.
    """
    if input_dilation > 1 or min(window.padding) < 0:
        return _halo_frame(rows, window, input_dilation)
    window_dim, length, sizes = rows
    source = replace(window_dim, overlap=window)
    result, n_outputs = output_dim(source, length, sizes)
    runs_of_parts = []
    for coords in itertools.product(*map(range, sizes)):
        output_runs = []
        for outputs in unroll(window_outputs(source, window, length, sizes, coords)):
            if outputs.length:
                stop = outputs.start + outputs.length
                first_row, stop_row = window.rows_read(outputs.start, stop)
                output_runs.append(
                    OutputRun(
                        first=first_row,
                        rows=stop_row - first_row,
                        start=outputs.start,
                        outputs=outputs.length,
                    )
                )
        runs_of_parts.append(tuple(output_runs))
    return Frame(source, result, n_outputs, tuple(runs_of_parts))


def _halo_frame(rows: ShardedDim, window: Window, input_dilation: int) -> Frame:
    """Plan a window that the notation of layouts lacks, by a halo of the rows that outputs read.

    input_dilation: the dilation of the input, as in `window_frame`.
    """
    # The rows, and the empty ones between them.
    dilated_rows = max(0, (rows.length - 1) * input_dilation + 1)
    n_outputs = window.output_length(dilated_rows)
    rows_read = _tap_rows(window, input_dilation)
    return interval_frame(rows, n_outputs, rows_read, rule=window.out, beyond=window.before)


class TransposedWindow(NamedTuple):
    """One dim of a transposed convolution, by torch's names."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    @property
    def span(self) -> int:
        """The outputs from the first tap of an input to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def output_length(self, length: int) -> int:
        """Count the outputs of `length` rows; below 0 where padding is more than there is."""
        outputs_of_rows = (length - 1) * self.stride + self.span
        return outputs_of_rows - 2 * self.padding + self.output_padding


@layout_cache(maxsize=4096)
def transposed_frame(rows: ShardedDim, window: TransposedWindow) -> Frame:
    """Plan a transposed convolution along a sharded dim: which rows each device reads and computes.

    Tap j adds row i to output `i * stride - padding + dilation * j`, as in torch.
    """
    n_outputs = 0
    if rows.length:
        n_outputs = max(0, window.output_length(rows.length))
    # The same as a convolution of stride 1 over rows with stride - 1 empty ones between them.
    padding = window.span - 1 - window.padding
    taps_of_outputs = Window(window.kernel, d=window.dilation, p=padding)
    return interval_frame(rows, n_outputs, _tap_rows(taps_of_outputs, input_dilation=window.stride))


def interval_frame(
    rows: ShardedDim,
    n_outputs: int,
    rows_read: Reads,
    rule: str = "",
    beyond: Boundary = EMPTY,
) -> Frame:
    """Plan an op along a sharded dim in which each device's outputs read one interval of rows.

    The result has the halo of each block that brings those rows, and how the outputs are sharded.
    8 rows on 2 devices, windows of 3 rows with a padding of 1: device 0 computes the outputs 0-3,
    which read the rows -1 to 4. It has 0-3, so that its halo is 1 before and 1 after.

    Args:
        rows: The dim.
        n_outputs: The number of outputs.
        rows_read: Outputs [start, stop) -> the rows [first, stop) that they read.
        rule: How outputs are sharded. Empty: like the rows, or aligned if the rows have given sizes.
            "balanced". "aligned": a part has the same share of the outputs as of the rows.
        beyond: What lies beyond the ends. If there are no rows, intervals end with the array.

    Raises:
        ShapeError: The parts of the dim are not intervals.
    """
    owned = all_owned_rows(rows.dim, rows.length, rows.sizes)
    for owned_rows in owned:
        if len(owned_rows) > 1 or any(owned_run.repeats > 1 for owned_run in owned_rows):
            reason = f"the parts of '{rows.dim}' are not intervals"
            raise ShapeError(reason, hint="redistribute to contiguous parts first, as in h/sp")
    row_intervals = _intervals(owned)
    # Which outputs a part has decides which rows it reads.
    result = _result_dim(rows, n_outputs, row_intervals, rule)
    output_intervals = _intervals(all_owned_rows(result, n_outputs, rows.sizes))
    halo_before = []  # rows to receive; below 0: own rows that the part does not read
    halo_after = []
    runs_of_parts: list[tuple[OutputRun, ...]] = []
    for (own_start, own_stop), (start, stop) in zip(row_intervals, output_intervals, strict=True):
        if start == stop:  # a part without outputs reads nothing
            halo_before.append(0)
            halo_after.append(own_start - own_stop)
            runs_of_parts.append(())
            continue
        first_read, stop_read = rows_read(start, stop)
        if beyond == EMPTY:
            first_read, stop_read = _clip_interval(first_read, stop_read, rows.length)
        stop_read = max(first_read, stop_read)  # empty, not negative
        halo_before.append(own_start - first_read)
        halo_after.append(stop_read - own_stop)
        output_run = OutputRun(
            first=first_read,
            rows=stop_read - first_read,
            start=start,
            outputs=stop - start,
        )
        runs_of_parts.append((output_run,))
    halo = Halo(tuple(halo_before), tuple(halo_after), beyond, beyond)
    source = replace(rows.dim, overlap=halo)
    return Frame(source, result, n_outputs, tuple(runs_of_parts))


def _clip_interval(start: int, stop: int, length: int) -> Interval:
    """Cut an interval at the ends of an array of `length` rows: -1 to 3 -> (0, 3)."""
    return min(max(start, 0), length), min(stop, length)


def _tap_rows(window: Window, input_dilation: int) -> Reads:
    """Return which rows the outputs of a window read, if row i stands at position `i * input_dilation`."""

    def reads(start: int, stop: int) -> Interval:
        first_place, end_place = window.rows_read(start, stop)
        first_row = ceil_div(first_place, input_dilation)
        return first_row, (end_place - 1) // input_dilation + 1

    return reads


def _result_dim(rows: ShardedDim, n_outputs: int, row_intervals: list[Interval], rule: str) -> Dim:
    """Return how the outputs of an operation are sharded along a dim.

    Args:
        rows: The dim of the input, sharded into intervals of rows.
        n_outputs: The outputs of all devices.
        row_intervals: The rows [start, stop) of each device.
        rule: How to shard them.

            - "balanced": blocks of outputs differ by one at most.
            - "aligned": each device has the same share of outputs as of rows: 4 + 2 rows, so 2 + 1
              outputs of 3.
            - "": as the rows are sharded, `h/sp` -> `h/sp`. But if the layout lists how many rows
              each device has, as `h/sizes(sp,4,2)`, then "aligned": these sizes, 6 together, do
              not fit 3 outputs.
    """
    dim = rows.dim
    if not dim.axes:
        return dim
    if rule == "balanced":
        return Dim(dim.name, (Shard(dim.axes, rule),))
    has_given_sizes = any(shard.order == SIZES for shard in dim.shards)
    if rule == "aligned" or has_given_sizes:
        sizes = _aligned_sizes(row_intervals, rows.length, n_outputs)
        return Dim(dim.name, (Shard(dim.axes, SIZES, sizes),))
    return dim


def _aligned_sizes(
    row_intervals: Sequence[Interval], n_rows: int, n_outputs: int
) -> tuple[int, ...]:
    """Count each device's outputs, if it has the same share of them as of rows: rows 4 + 2 -> 2 + 1."""
    first_outputs = [0]
    for _, stop in row_intervals:
        first_outputs.append(math.ceil(stop * n_outputs / max(n_rows, 1)))
    return tuple(stop - start for start, stop in itertools.pairwise(first_outputs))


def _intervals(rows_of_parts: tuple[Runs, ...]) -> list[Interval]:
    """Return the intervals of contiguous parts: 2, 0 and 3 rows -> (0, 2), (2, 2), (2, 5).

    An empty part stands at the end of the parts before it.
    """
    edges = itertools.accumulate(map(count_rows, rows_of_parts), initial=0)
    return list(itertools.pairwise(edges))


def pool_window(length: int, window: Window, *, ceil: bool) -> Window:
    """Return the window of a pool; with `ceil`, padded further at its end, as torch's `ceil_mode`.

    5 rows, 2 taps, stride 2: two windows; with `ceil` a third one, over row 4 and a row of padding.
    """
    if not ceil:
        return window
    padding_before, padding_after = window.padding
    padded = length + padding_before + padding_after
    # Rounded up: the last window may need more padding.
    last_index = ceil_div(padded - window.span, window.s)
    last_start = last_index * window.s
    # A last window that would begin in the padding after the array does not count.
    if last_start >= length + padding_before:
        return window
    n_missing = last_start + window.span - padded
    return replace(window, p=(padding_before, padding_after + n_missing))


def pool_counts(
    length: int, window: Window, output_indices: Sequence[int], *, padding: int, include_pad: bool
) -> NDArray[np.int64]:
    """Return the number of rows by which an average pool divides each output, as in torch.

    3 taps with padding 1 over 4 rows: 3 for each output with `include_pad`; without it 2, 3, 3, 2.

    length: number of rows. outputs: the numbers of the outputs to count for. padding: how many rows
    after the array count as padding. include_pad: torch's `count_include_pad`.
    """
    starts = np.asarray(output_indices, np.int64) * window.s
    first_rows = starts - window.padding[0]
    stop_rows = np.minimum(first_rows + window.k, length + padding)
    if not include_pad:
        first_rows = np.maximum(first_rows, 0)
        stop_rows = np.minimum(stop_rows, length)
    return np.asarray(stop_rows - first_rows, np.int64)


class Taps(NamedTuple):
    """Arrays (outputs, taps): the inputs of every output, and their weights."""

    inputs: NDArray[np.int64]
    weights: NDArray[np.float64]


def taps(
    mode: str,
    length: int,
    n_outputs: int,
    *,
    align_corners: bool = False,
    scale: float | None = None,
) -> Taps:
    """Return which rows each output of an interpolation reads, and with which weights, as in torch.

    "linear", 2 rows to 4 outputs: output 1 reads rows 0 and 1 with weights 0.75 and 0.25. Arrays
    are (outputs, taps): 1 tap for nearest, 2 for linear, 4 for cubic.

    length, n_outputs: the numbers of rows and of outputs. scale: outputs per row; None: n_outputs /
    length. Raises XshardError for a mode not in `MODES`.
    """
    if mode not in MODES:
        raise XshardError(f"no interpolation {mode!r}", hint=f"modes are: {', '.join(MODES)}")
    # 5 rows with a scale of 1.5 are 7 outputs: torch then steps by 1 / 1.5, not by 5 / 7.
    step = length / n_outputs if scale is None else 1 / scale
    position = _output_positions(mode, length, n_outputs, step, align_corners=align_corners)
    first_row = np.floor(position).astype(np.int64)
    fraction = position - first_row
    if mode.startswith("nearest"):
        offsets = np.arange(1)
        weights = [np.ones(n_outputs)]
    elif mode == "linear":
        offsets = np.arange(2)
        weights = [1 - fraction, fraction]
    else:
        offsets = np.arange(-1, 3)
        distances = (fraction + 1, fraction, 1 - fraction, 2 - fraction)
        weights = list(map(_cubic, distances))
    # Beyond the ends the first or the last row counts again.
    inputs = np.clip(first_row[:, None] + offsets, 0, length - 1)
    return Taps(inputs, np.stack(weights, 1))


def _output_positions(
    mode: str, length: int, n_outputs: int, step: float, *, align_corners: bool
) -> NDArray[np.float64]:
    """Return where each output lies among the rows: 0.25 is a quarter of the way from row 0 to row 1.

    step: the rows from one output to the next.
    """
    output_index = np.arange(n_outputs, dtype=np.float64)
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0  # of the centers of pixels
        return (output_index + shift) * step
    if align_corners:
        # The first and the last output lie on the first and the last row.
        position = output_index * ((length - 1) / max(n_outputs - 1, 1))
    else:
        position = (output_index + 0.5) * step - 0.5
    # As torch does: linear clamps positions before the first row, cubic does not.
    return np.maximum(position, 0.0) if mode == "linear" else position


def taps_of_part(resampling: Taps, output_runs: Sequence[OutputRun]) -> Taps:
    """Return the taps of one part's outputs, with the inputs as rows of its block.

    An output that reads the rows 9 and 10 reads 1 and 2 of a block that begins at row 8.
    """
    output_run = OutputRun(first=0, rows=0, start=0, outputs=0)  # of a part without outputs
    if output_runs:
        (output_run,) = output_runs  # an interpolation has one run of outputs at most
    outputs = slice(output_run.start, output_run.start + output_run.outputs)
    return Taps(resampling.inputs[outputs] - output_run.first, resampling.weights[outputs])


def resampled_frame(rows: ShardedDim, resampling: Taps) -> Frame:
    """Return the frame of an interpolation, with outputs sharded like the dim.

    Raises ShapeError if the parts of the dim are not intervals.
    """

    def reads(start: int, stop: int) -> Interval:
        inputs = resampling.inputs[start:stop]
        return int(inputs.min()), int(inputs.max()) + 1

    return interval_frame(rows, len(resampling.inputs), reads)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weight of a row at a distance of 0 to 2, in cubic convolution (Keys 1981)."""
    weight_within_1 = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    weight_beyond_1 = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    return np.where(distance <= 1, weight_within_1, weight_beyond_1)
