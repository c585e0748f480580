"""Interpolation of blocks, with the values of the unsharded array: one dim after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement
from torch_bridge.nn.window import Geometry, Ints, apply_windows, geometry_of
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import OutputRun, Taps, resampled_frame, taps

# torch's modes, and how many dims they are for (None: any) -> how each dim is interpolated.
MODES = {"nearest": (None, "nearest"), "nearest-exact": (None, "nearest-exact"), "linear": (1, "linear")}
MODES |= {"bilinear": (2, "linear"), "trilinear": (3, "linear"), "bicubic": (2, "cubic")}


def interpolate(
    x: Tensor,
    placement: Placement,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    *,
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> tuple[Tensor, Placement]:
    """A block `(b, c, *spatial)` -> the block of the interpolated array of global `size`, and its placement.

    Takes the arguments of `torch.nn.functional.interpolate`. Raises XshardError, ShapeError where torch does.
    """
    rank = len(placement.shape) - 2
    mode_rank, dim_mode = MODES.get(mode, (0, ""))
    if mode_rank not in (None, rank):
        raise XshardError(f"no interpolation {mode!r} of {rank} dims", hint=f"modes are: {', '.join(MODES)}")
    lengths = placement.shape[2:]
    if (size is None) == (scale_factor is None):
        raise XshardError("one of size and scale_factor", hint="as in scale_factor=2")
    factors: tuple[float | None, ...] = (None,) * rank
    if scale_factor is None:
        outputs = (size,) * rank if isinstance(size, int) else tuple(size or ())
    else:
        scales = (scale_factor,) * rank if isinstance(scale_factor, int | float) else tuple(scale_factor)
        outputs = tuple(math.floor(n * f) for n, f in zip(lengths, scales, strict=True))
        factors = (None,) * rank if recompute_scale_factor else tuple(map(float, scales))
    if len(outputs) != rank or min(outputs, default=0) < 1:
        raise ShapeError(f"interpolation of {lengths} to {outputs}", hint="one length >= 1 per spatial dim")
    options = dim_mode, bool(align_corners), x.dtype, x.device
    resampled, local_taps = _geometry(placement, outputs, factors, *options)

    def interpolated(rows: Tensor, _: Sequence[OutputRun]) -> Tensor:
        for d, some in enumerate(local_taps, 2):
            rows = _tapped(rows, d, some)
        return rows

    return apply_windows(x, placement, resampled, interpolated)


LocalTaps = tuple[tuple[Tensor, Tensor], ...]  # the rows of the block and their weights, for each tap


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _geometry(
    placement: Placement,
    outputs: Ints,
    factors: tuple[float | None, ...],
    mode: str,
    align_corners: bool,
    dtype: torch.dtype,
    tensor_device: torch.device,
) -> tuple[Geometry, tuple[LocalTaps, ...]]:
    """The geometry of an interpolation, and the taps of this process's outputs per spatial dim."""
    global_taps, frames = [], []
    dims, lengths = placement.layout.dims[2:], placement.shape[2:]
    for dim, length, n, factor in zip(dims, lengths, outputs, factors, strict=True):
        global_taps.append(taps(mode, length, n, align_corners=align_corners, scale=factor))
        sizes = placement.sharding.mesh.sizes_of(dim.axes)
        frames.append(resampled_frame(dim, length, sizes, global_taps[-1]))
    resampled = geometry_of(placement, frames)

    def local(every: Taps, runs: tuple[OutputRun, ...]) -> LocalTaps:
        ((first, _, start, n),) = runs or (OutputRun(0, 0, 0, 0),)
        rows = torch.from_numpy(every.inputs[start : start + n] - first).to(tensor_device)
        weights = torch.from_numpy(every.weights[start : start + n]).to(tensor_device, dtype)
        return tuple(zip(rows.unbind(1), weights.unbind(1), strict=True))

    return resampled, tuple(map(local, global_taps, resampled.runs))


def _tapped(block: Tensor, d: int, local_taps: LocalTaps) -> Tensor:
    """Every output of a dim as the weighted sum of its inputs; a single input needs no weight."""
    parts = [block.index_select(d, rows) for rows, _ in local_taps]
    if len(parts) == 1:
        return parts[0]
    columns = (1,) * (block.ndim - d - 1)
    weighted = [part * w.view(-1, *columns) for part, (_, w) in zip(parts, local_taps, strict=True)]
    return sum(weighted[1:], start=weighted[0])
