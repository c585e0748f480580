"""Ops over windows of the last dims of a block, and interpolation: rows are fetched, outputs placed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from torch_bridge.nn.placed import Outputs, Placement
from xshard import Layout
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import Frame, OutputRun, Taps, resampled_frame, taps, window_frame
from xshard.notation.overlap import Window

Ints = tuple[int, ...]
Factors = tuple[float | None, ...]
Like = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Geometry:
    """An op over windows of the last dims, as one process computes it."""

    source: Layout  # holds the rows
    result: Placement  # of the outputs
    runs: tuple[tuple[OutputRun, ...], ...]  # the process's own, along each dim


def geometry_of(
    placement: Placement, frames: Sequence[Frame], channels: int | None = None
) -> Geometry:
    """The geometry of an op over the last dims; channels: output channels, if the op changes their number."""
    sharding = placement.sharding
    device = placement.processes.device
    sources = [*placement.layout.dims]
    results = [*placement.layout.dims]
    shape = [*placement.shape]
    first = len(shape) - len(frames)
    runs = []
    for d, frame in enumerate(frames, first):
        sources[d] = frame.source
        results[d] = frame.result
        shape[d] = frame.length
        runs.append(frame.runs[sharding.dim_device(d, device)])
    if channels is not None:
        shape[first - 1] = channels
    source = replace(placement.layout, dims=tuple(sources))
    return Geometry(source, placement.remade(results, shape), tuple(runs))


def window_frames(placement: Placement, windows: Sequence[Window]) -> list[Frame]:
    """The frames of windows over the last dims, or ShapeError without outputs; the op pads unsharded dims."""
    frames = []
    for d, window in enumerate(windows, len(placement.shape) - len(windows)):
        dim = placement.layout.dims[d]
        frame = window_frame(
            dim, placement.shape[d], placement.sharding.mesh.sizes_of(dim.axes), window
        )
        frames.append(frame if dim.axes else replace(frame, source=dim))
    if any(frame.length < 1 for frame in frames):
        what = f"no output: kernel {tuple(w.k for w in windows)} over {placement.shape[-len(windows) :]}"
        raise ShapeError(what, text=str(placement.layout), hint="a smaller kernel, or more padding")
    return frames


def apply_windows(
    x: Tensor,
    placement: Placement,
    geometry: Geometry,
    op: Callable[..., Tensor],
    *parameters: Tensor | None,
) -> Outputs:
    """A block -> the block of a window op; op: rows, runs, and copies of unsharded parameters -> outputs."""
    copies = placement.copied(*parameters)
    block = placement.moved(x, geometry.source)
    if not all(geometry.runs):
        return no_outputs(geometry.result.local_shape, block, *copies), geometry.result
    return _run_by_run(
        block, geometry.runs, lambda rows, *runs: op(rows, runs, *copies)
    ), geometry.result


def _run_by_run(
    block: Tensor, runs: Sequence[Sequence[OutputRun]], op: Callable[..., Tensor]
) -> Tensor:
    """The op on the rows of every combination of runs, the outputs concatenated in order."""
    for d, several in enumerate(runs, -len(runs)):
        if len(several) > 1:
            i = d + len(runs)
            parts = block.split([run.rows for run in several], d)
            each = zip(parts, ([*runs[:i], (run,), *runs[i + 1 :]] for run in several), strict=True)
            return torch.cat([_run_by_run(part, rest, op) for part, rest in each], d)
    return op(block, *(run for (run,) in runs))


def no_outputs(shape: Sequence[int], *inputs: Tensor | None) -> Tensor:
    """An empty tensor that depends on the inputs: all devices take part in the backward pass."""
    return torch.cat([x.reshape(-1)[:0] for x in inputs if x is not None]).reshape(shape)


# torch's modes, and how many dims they are for (None: any) -> how each dim is interpolated.
MODES = {
    "nearest": (None, "nearest"),
    "nearest-exact": (None, "nearest-exact"),
    "linear": (1, "linear"),
}
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
) -> Outputs:
    """A block `(b, c, *spatial)` -> the block of torch's `interpolate`, with its arguments, of the array."""
    rank = len(placement.shape) - 2
    mode_rank, dim_mode = MODES.get(mode, (0, ""))
    if mode_rank not in (None, rank):
        raise XshardError(
            f"no interpolation {mode!r} of {rank} dims", hint=f"modes are: {', '.join(MODES)}"
        )
    lengths = placement.shape[2:]
    if (size is None) == (scale_factor is None):
        raise XshardError("one of size and scale_factor", hint="as in scale_factor=2")
    factors: Factors = (None,) * rank
    if scale_factor is None:
        outputs = (size,) * rank if isinstance(size, int) else tuple(size or ())
    else:
        scales = (
            (scale_factor,) * rank if isinstance(scale_factor, int | float) else tuple(scale_factor)
        )
        outputs = tuple(math.floor(n * f) for n, f in zip(lengths, scales, strict=True))
        factors = (None,) * rank if recompute_scale_factor else tuple(map(float, scales))
    if len(outputs) != rank or min(outputs, default=0) < 1:
        raise ShapeError(
            f"interpolation of {lengths} to {outputs}", hint="one length >= 1 per spatial dim"
        )
    options = dim_mode, bool(align_corners), (x.dtype, x.device)
    resampled, local_taps = _geometry(placement, outputs, factors, *options)

    def interpolated(rows: Tensor, _: Sequence[OutputRun]) -> Tensor:
        for d, some in enumerate(local_taps, 2):
            parts = [rows.index_select(d, inputs) for inputs, _ in some]
            if len(parts) > 1:  # a single input needs no weight
                along = -1, *(1,) * (rows.ndim - d - 1)
                parts = [
                    part * weight.view(along) for part, (_, weight) in zip(parts, some, strict=True)
                ]
            rows = sum(parts[1:], start=parts[0])
        return rows

    return apply_windows(x, placement, resampled, interpolated)


LocalTaps = tuple[
    tuple[Tensor, Tensor], ...
]  # the rows of the block and their weights, for each tap


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _geometry(
    placement: Placement, outputs: Ints, factors: Factors, mode: str, aligned: bool, like: Like
) -> tuple[Geometry, tuple[LocalTaps, ...]]:
    """The geometry of an interpolation, and the taps of this process's outputs per spatial dim."""
    global_taps = []
    frames = []
    dims = placement.layout.dims[2:]
    lengths = placement.shape[2:]
    for dim, length, n, factor in zip(dims, lengths, outputs, factors, strict=True):
        global_taps.append(taps(mode, length, n, align_corners=aligned, scale=factor))
        sizes = placement.sharding.mesh.sizes_of(dim.axes)
        frames.append(resampled_frame(dim, length, sizes, global_taps[-1]))
    resampled = geometry_of(placement, frames)

    def local(every: Taps, runs: tuple[OutputRun, ...]) -> LocalTaps:
        ((first, _, start, n),) = runs or (OutputRun(0, 0, 0, 0),)
        rows = torch.from_numpy(every.inputs[start : start + n] - first).to(like[1])
        weights = torch.from_numpy(every.weights[start : start + n]).to(like[1], like[0])
        return tuple(zip(rows.unbind(1), weights.unbind(1), strict=True))

    return resampled, tuple(map(local, global_taps, resampled.runs))
