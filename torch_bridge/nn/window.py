"""Ops over windows of the last dims of an array, as one process computes them; and interpolation.

A process fetches the rows that its outputs read, its own and its neighbours', and then runs torch's kernel
on its block alone. For one dim a `Frame` of `xshard.nn.windows` says for all devices which rows they read and
which outputs they compute, in runs of consecutive rows; a `WindowPlan` has all dims, for this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.nn.placed import Outputs, Placement
from xshard import Layout
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import (
    Frame,
    OutputRun,
    Taps,
    along,
    framed_arrays,
    resampled_frame,
    taps,
    taps_of_part,
    window_frame,
)
from xshard.notation.overlap import Window

Ints = tuple[int, ...]
Factors = tuple[float | None, ...]
Runs = Sequence[OutputRun]  # one run along each dim
WindowOp = Callable[..., Tensor]  # rows, their run along each dim, copies of parameters -> outputs


class TensorOptions(NamedTuple):
    """The dtype and the device of constants."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class WindowPlan:
    """An op over windows of the last dims, as one process computes it.

    Attributes:
        source: The layout in which a process has the rows that it reads, as "b c h/sp:halo(1,1) w".
        result: The placement of the outputs.
        runs: Along each dim, the runs of rows that this process reads, and their outputs.
    """

    source: Layout
    result: Placement
    runs: tuple[tuple[OutputRun, ...], ...]


def per_dim(value: Any, rank: int) -> tuple[Any, ...]:
    """Return an option of a layer for each spatial dim: 3 -> (3, 3), (1, 2) -> (1, 2)."""
    if isinstance(value, Sequence):
        return tuple(value)
    return (value,) * rank


def window_plan(
    placement: Placement, frames: Mapping[int, Frame], channels: int | None = None
) -> WindowPlan:
    """Decide what this process reads and computes of a windowed op (convolution, pool, ...).

    A convolution over "b c h/sp w" reads "b c h/sp:halo(1,1) w", and its outputs are "b c h/sp w".

    Args:
        placement: The placement of the input.
        frames: For each spatial dim, which rows devices read, and which outputs they compute.
        channels: Of the result; None if they stay as many.
    """
    lengths = {}
    if channels is not None:
        channel_dim = min(frames) - 1  # the last before the spatial dims
        lengths[channel_dim] = channels
    arrays = framed_arrays(placement.sharding, frames, lengths)
    runs = []
    for d, frame in frames.items():
        # Processes that differ only along axes that do not shard this dim have the same rows of it.
        dim_device = placement.sharding.dim_device(d, placement.processes.device)
        runs.append(frame.runs[dim_device])
    return WindowPlan(arrays.source, replace(placement, sharding=arrays.result), tuple(runs))


def window_frames(placement: Placement, windows: Sequence[Window]) -> dict[int, Frame]:
    """Find the rows that each device needs for windows over the last dims, such as a convolution's.

    A kernel of 3 over 8 rows on 2 devices, padding 1: each needs its 4 rows, a row of its neighbour
    and a row of padding.

    Args:
        placement: The placement of the input.
        windows: Kernel, stride and padding per dim.

    Returns:
        One frame per dim, by dim.

    Raises:
        ShapeError: There would be no output.
    """
    frames = {}
    first_dim = placement.ndim - len(windows)
    for d, window in enumerate(windows, first_dim):
        rows = along(placement.sharding, d)
        frame = window_frame(rows, window)
        # A dim that is not sharded stays as it is: the op itself pads it.
        frames[d] = frame if rows.dim.axes else replace(frame, source=rows.dim)
    if any(frame.length < 1 for frame in frames.values()):
        kernel = tuple(window.k for window in windows)
        reason = f"no output: kernel {kernel} over {placement.shape[first_dim:]}"
        raise placement.shape_error(reason, "a smaller kernel, or more padding")
    return frames


def apply_windows(
    x: Tensor, placement: Placement, plan: WindowPlan, op: WindowOp, *parameters: Tensor | None
) -> Outputs:
    """Fetch the rows that this process reads, and compute its outputs.

    Args:
        x: This process's block.
        placement: Its placement.
        plan: What the process reads and computes.
        op: Takes rows, their run along each dim, and copies of the parameters; returns outputs.
        parameters: The parameters, which are replicated.
    """
    # All processes make copies, also those without outputs: all take part in the sum of gradients.
    copies = placement.parameter_copies(parameters)
    block = placement.redistribute(x, plan.source)
    if not all(plan.runs):
        return no_outputs(plan.result.local_shape, block, *copies), plan.result
    return _apply_run_by_run(block, plan.runs, op, copies), plan.result


def _apply_run_by_run(
    block: Tensor, runs_by_dim: Sequence[Runs], op: WindowOp, parameters: Sequence[Tensor | None]
) -> Tensor:
    """Apply an op to each run of consecutive rows of a block, and concatenate the outputs.

    A layout such as "h/zigzag(sp)" gives a device two runs of rows that are not neighbours, so no
    window may reach from one to the other. The block is split along the first dim with several runs;
    recursion splits it along later ones.
    """
    for dim_index, runs in enumerate(runs_by_dim):
        if len(runs) == 1:
            continue
        dim = dim_index - len(runs_by_dim)  # from the end
        # The rows of each run follow those of the one before; where they overlap they are twice
        # in the block.
        rows_of_runs = block.split([run.rows for run in runs], dim)
        outputs = []
        for rows, run in zip(rows_of_runs, runs, strict=True):
            runs_of_rows = (*runs_by_dim[:dim_index], (run,), *runs_by_dim[dim_index + 1 :])
            outputs.append(_apply_run_by_run(rows, runs_of_rows, op, parameters))
        return torch.cat(outputs, dim)
    return op(block, [runs[0] for runs in runs_by_dim], *parameters)


def no_outputs(shape: Sequence[int], *inputs: Tensor | None) -> Tensor:
    """Return an empty tensor that depends on the inputs: all devices take part in the backward pass."""
    empty = [x.reshape(-1)[:0] for x in inputs if x is not None]
    return torch.cat(empty).reshape(shape)


class Mode(NamedTuple):
    """How an interpolation works along each dim, and how many spatial dims it is for (None: any)."""

    of_dim: str
    rank: int | None = None


# torch's modes.
MODES = {
    "nearest": Mode("nearest"),
    "nearest-exact": Mode("nearest-exact"),
    "linear": Mode("linear", 1),
    "bilinear": Mode("linear", 2),
    "trilinear": Mode("linear", 3),
    "bicubic": Mode("cubic", 2),
}


class Tap(NamedTuple):
    """One of the inputs of every output of a block along a dim: its row in the block, and its weight."""

    rows: Tensor
    weights: Tensor


def interpolate(
    x: Tensor,
    placement: Placement,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    *,
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Outputs:
    """Apply torch's `interpolate` to an array whose spatial dims may be sharded.

    Returns the block of the result and its placement. Raises XshardError for a mode or arguments
    that torch does not take, ShapeError for lengths.

    Args:
        x: This process's block, `(b, c, *spatial)`.
        placement: The placement of `x`: layout, mesh and global shape.
        size: Spatial lengths of the global result.
        scale_factor: torch's argument, instead of `size`.
        mode: torch's argument.
        align_corners: torch's argument.
        recompute_scale_factor: torch's argument.
    """
    rank = placement.ndim - 2
    if mode not in MODES or MODES[mode].rank not in (None, rank):
        hint = f"modes are: {', '.join(MODES)}"
        raise XshardError(f"no interpolation {mode!r} of {rank} dims", hint=hint)
    lengths, factors = _resampled_lengths(placement.shape[2:], size, scale_factor)
    if recompute_scale_factor:  # by the rounded lengths
        factors = (None,) * rank
    mode_of_dim = MODES[mode].of_dim
    tensor_options = TensorOptions(x.dtype, x.device)
    resampled = _resampling(
        placement, lengths, factors, mode_of_dim, bool(align_corners), tensor_options
    )

    def weigh_rows(rows: Tensor, _runs: Runs) -> Tensor:
        for d, local_taps in enumerate(resampled.taps, 2):
            rows = _weighted_sum(rows, d, local_taps)
        return rows

    return apply_windows(x, placement, resampled.plan, weigh_rows)


def _resampled_lengths(
    lengths: Ints, size: int | Sequence[int] | None, scale_factor: float | Sequence[float] | None
) -> tuple[Ints, Factors]:
    """Compute the output lengths of an interpolation, and the scales for positions in the input.

    5 rows with scale_factor 1.5 -> 7 outputs and scale 1.5. For a size, scales are None: as in
    torch, positions use the ratio of lengths, 7 / 5. Raises ShapeError for an output without rows.

    Args:
        lengths: The global lengths, per spatial dim.
        size: torch's argument.
        scale_factor: torch's argument.
    """
    if (size is None) == (scale_factor is None):
        raise XshardError("one of size and scale_factor", hint="as in scale_factor=2")
    rank = len(lengths)
    if size is not None:
        outputs = per_dim(size, rank)
        factors: Factors = (None,) * rank
    else:
        scales = per_dim(scale_factor, rank)
        lengths_and_scales = zip(lengths, scales, strict=True)
        outputs = tuple(math.floor(length * scale) for length, scale in lengths_and_scales)
        factors = tuple(map(float, scales))
    if len(outputs) != rank or min(outputs, default=0) < 1:
        reason = f"interpolation of {lengths} to {outputs}"
        raise ShapeError(reason, hint="one length >= 1 per spatial dim")
    return outputs, factors


def _weighted_sum(rows: Tensor, dim: int, local_taps: Sequence[Tap]) -> Tensor:
    """Return the outputs along one dim: the sum of rows times weights."""
    if len(local_taps) == 1:  # a single input needs no weight
        return rows.index_select(dim, local_taps[0].rows)
    dims_after = (1,) * (rows.ndim - dim - 1)
    addends = []
    for tap in local_taps:
        weights = tap.weights.view(-1, *dims_after)
        addends.append(rows.index_select(dim, tap.rows) * weights)
    return sum(addends[1:], start=addends[0])


class Resampling(NamedTuple):
    """An interpolation as one process computes it: its taps along each spatial dim."""

    plan: WindowPlan
    taps: tuple[tuple[Tap, ...], ...]


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _resampling(
    placement: Placement,
    outputs: Ints,
    factors: Factors,
    mode: str,
    is_aligned: bool,
    tensor_options: TensorOptions,
) -> Resampling:
    """Work out how this process interpolates: the input rows and weights of each of its outputs.

    The result is cached, with its tensors, which have the device and dtype of `tensor_options`.

    Args:
        placement: The placement of the input.
        outputs: Global lengths of the result.
        factors: Scales per dim, None: the ratio of lengths.
        mode: The mode of one dim, such as "linear".
        is_aligned: torch's `align_corners`.
        tensor_options: The dtype and the device of the result.
    """
    global_taps = []  # of each spatial dim: the input rows of all its outputs
    frames = {}  # of each spatial dim: who needs which of these rows
    for i, factor in enumerate(factors):
        rows = along(placement.sharding, 2 + i)
        dim_taps = taps(mode, rows.length, outputs[i], align_corners=is_aligned, scale=factor)
        global_taps.append(dim_taps)
        frames[2 + i] = resampled_frame(rows, dim_taps)
    plan = window_plan(placement, frames)
    local_taps = []
    for dim_taps, runs in zip(global_taps, plan.runs, strict=True):
        local_taps.append(_local_taps(dim_taps, runs, tensor_options))
    return Resampling(plan, tuple(local_taps))


def _local_taps(dim_taps: Taps, runs: Runs, tensor_options: TensorOptions) -> tuple[Tap, ...]:
    """Return the taps of this process's outputs along a dim, by rows of its block."""
    local = taps_of_part(dim_taps, runs)
    rows = torch.from_numpy(local.inputs).to(tensor_options.device)
    weights = torch.from_numpy(local.weights).to(tensor_options.device, tensor_options.dtype)
    return tuple(map(Tap, rows.unbind(1), weights.unbind(1)))
