"""Interpolation of blocks, equal to that of the whole array.

Decides that every dim is resampled separately, with some taps per output; where the dim is cut, an exchange
brings their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement
from torch_bridge.nn.window import no_outputs
from xshard import Layout, XshardError
from xshard.errors import ShapeError
from xshard.nn.resample import resampled_field, taps

# torch's modes, and how many dims they are for (None: any) -> how each dim is interpolated.
MODES = {
    "nearest": (None, "nearest"),
    "nearest-exact": (None, "nearest-exact"),
    "linear": (1, "linear"),
    "bilinear": (2, "linear"),
    "trilinear": (3, "linear"),
    "bicubic": (2, "cubic"),
}


@dataclass(frozen=True)
class ResampleGeometry:
    """One interpolation of one array, as one process computes it.

    source: the layout with the rows that it needs. taps: per spatial dim, for each tap of its outputs the
    rows of the block and their weights.
    """

    source: Layout
    placement: Placement
    taps: tuple[tuple[int, tuple[tuple[Tensor, Tensor], ...]], ...]


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
    """A block `(b, c, *spatial)` -> the block of the interpolated array, and its placement.

    size: global. The other arguments are those of `torch.nn.functional.interpolate`.
    Raises XshardError, ShapeError for arguments that torch refuses too.
    """
    rank = len(placement.shape) - 2
    known, one_dim = MODES.get(mode, (0, ""))
    if known not in (None, rank):
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
    geometry = _geometry(placement, outputs, factors, one_dim, bool(align_corners), x.dtype, x.device)
    block = placement.moved(x, geometry.source)
    if 0 in geometry.placement.local_shape:
        return no_outputs(geometry.placement.local_shape, block), geometry.placement
    for d, found in geometry.taps:
        block = _tapped(block, d, found)
    return block, geometry.placement


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may be used by a backward pass later
def _geometry(
    placement: Placement,
    outputs: tuple[int, ...],
    factors: tuple[float | None, ...],
    mode: str,
    align_corners: bool,
    dtype: torch.dtype,
    tensor_device: torch.device,
) -> ResampleGeometry:
    dims, results, shape = [*placement.layout.dims], [*placement.layout.dims], [*placement.shape]
    found: list[tuple[int, tuple[tuple[Tensor, Tensor], ...]]] = []
    mesh, device = placement.sharding.mesh, placement.processes.device
    for i, (n, factor) in enumerate(zip(outputs, factors, strict=True)):
        d = 2 + i
        every = taps(mode, shape[d], n, align_corners=align_corners, scale=factor)
        read = resampled_field(dims[d], shape[d], mesh.sizes_of(dims[d].axes), every)
        at = placement.sharding.dim_device(d, device)
        (first, _), (start, stop) = read.inputs[at], read.outputs[at]
        dims[d], results[d], shape[d] = read.source, read.result, n
        rows = torch.from_numpy(every.inputs[start:stop] - first).to(tensor_device)
        weights = torch.from_numpy(every.weights[start:stop]).to(tensor_device, dtype)
        found.append((d, tuple(zip(rows.unbind(1), weights.unbind(1), strict=True))))
    result = placement.remade(results, shape)
    return ResampleGeometry(replace(placement.layout, dims=tuple(dims)), result, tuple(found))


def _tapped(block: Tensor, d: int, found: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """Every output of a dim as the weighted sum of its inputs; a single input needs no weight."""
    parts = [block.index_select(d, rows) for rows, _ in found]
    if len(parts) == 1:
        return parts[0]
    columns = (1,) * (block.ndim - d - 1)
    weighted = [part * w.view(-1, *columns) for part, (_, w) in zip(parts, found, strict=True)]
    return sum(weighted[1:], start=weighted[0])
