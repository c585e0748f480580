"""Ops over windows of the last dims of a block: fetch the rows, run torch's op, and place its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement
from xshard import Layout
from xshard.errors import ShapeError
from xshard.nn.windows import Frame, OutputRun, window_frame
from xshard.notation.overlap import Window

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """An op over windows of the last dims, as one process computes it.

    source: holds the rows. result: placement of the outputs. runs: the process's own, along each dim.
    """

    source: Layout
    result: Placement
    runs: tuple[tuple[OutputRun, ...], ...]


def geometry_of(placement: Placement, frames: Sequence[Frame], channels: int | None = None) -> Geometry:
    """The geometry of an op over the last dims; channels: output channels, if the op changes their number."""
    sharding, device = placement.sharding, placement.processes.device
    sources, results, shape = [*placement.layout.dims], [*placement.layout.dims], [*placement.shape]
    first, runs = len(shape) - len(frames), []
    for d, frame in enumerate(frames, first):
        sources[d], results[d], shape[d] = frame.source, frame.result, frame.length
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
        frame = window_frame(dim, placement.shape[d], placement.sharding.mesh.sizes_of(dim.axes), window)
        frames.append(frame if dim.axes else replace(frame, source=dim))
    if any(frame.length < 1 for frame in frames):
        what = f"no output: kernel {tuple(w.k for w in windows)} over {placement.shape[-len(windows) :]}"
        raise ShapeError(what, text=str(placement.layout), hint="a smaller kernel, or more padding")
    return frames


def apply_windows(
    x: Tensor, placement: Placement, geometry: Geometry, op: Callable[..., Tensor], *parameters: Tensor | None
) -> tuple[Tensor, Placement]:
    """A block -> the block of the outputs of a window op, and its placement.

    op: computes the outputs of one run per dim, from their rows, the runs and the parameters, which are
    unsharded; their gradients are summed over the axes that shard the array.
    """
    copies = placement.copied(*parameters)
    block = placement.moved(x, geometry.source)
    if not all(geometry.runs):
        return no_outputs(geometry.result.local_shape, block, *copies), geometry.result
    return _run_by_run(block, geometry.runs, lambda rows, *runs: op(rows, runs, *copies)), geometry.result


def _run_by_run(block: Tensor, runs: Sequence[Sequence[OutputRun]], op: Callable[..., Tensor]) -> Tensor:
    """The op on the rows of every combination of runs, the outputs concatenated in order."""
    for d, several in enumerate(runs, -len(runs)):
        if len(several) > 1:
            i, parts = d + len(runs), block.split([run.rows for run in several], d)
            each = zip(parts, ([*runs[:i], (run,), *runs[i + 1 :]] for run in several), strict=True)
            return torch.cat([_run_by_run(part, rest, op) for part, rest in each], d)
    return op(block, *(run for (run,) in runs))


def no_outputs(shape: Sequence[int], *inputs: Tensor | None) -> Tensor:
    """An empty tensor that depends on the inputs: all devices take part in the backward pass."""
    return torch.cat([x.reshape(-1)[:0] for x in inputs if x is not None]).reshape(shape)
