"""Convolutions and transposed convolutions of blocks, with the values of the unsharded array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Placement, check_whole
from torch_bridge.nn.window import Geometry, Ints, apply_windows, geometry_of, no_outputs, window_frames
from xshard.errors import ShapeError, XshardError
from xshard.nn.windows import OutputRun, transposed_frame
from xshard.notation.overlap import Boundary, Window

Pairs = tuple[tuple[int, int], ...]  # padding before and after, per spatial dim

# torch's padding modes, as boundaries.
BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}

_CONV = (F.conv1d, F.conv2d, F.conv3d)
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
    rank = len(convolution.kernel)
    # The exchange brings the padding of sharded dims; torch pads the others.
    pads = [
        (0, 0) if placement.cuts(d) else pair for d, pair in enumerate(convolution.padding, x.ndim - rank)
    ]
    flat = list(itertools.chain.from_iterable(reversed(pads)))
    mode = "constant" if convolution.padding_mode == "zeros" else convolution.padding_mode

    def convolve(rows: Tensor, _: Sequence[OutputRun], weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = F.pad(rows, flat, mode=mode) if any(flat) else rows
        options = convolution.stride, 0, convolution.dilation, convolution.groups
        return _CONV[rank - 1](padded, weight, bias, *options)

    return apply_windows(
        x, placement, _conv_geometry(placement, convolution, weight.shape), convolve, weight, bias
    )


@lru_cache(maxsize=4096)
def _conv_geometry(placement: Placement, convolution: Convolution, weight_shape: torch.Size) -> Geometry:
    rank = len(convolution.kernel)
    check_channels(placement, len(placement.shape) - rank - 1, weight_shape[1] * convolution.groups)
    # Raise where torch would, on processes with nothing to pad too.
    most = {"circular": 0, "reflect": -1}.get(convolution.padding_mode)
    for n, pair in zip(placement.shape[-rank:], convolution.padding, strict=True):
        if most is not None and max(pair) > n + most:
            raise ShapeError(
                f"{convolution.padding_mode} padding {max(pair)} of {n} rows",
                text=str(placement.layout),
                hint=f"at most {n + most}",
            )
    boundary = Boundary(BOUNDARIES[convolution.padding_mode])
    numbers = zip(
        convolution.kernel, convolution.stride, convolution.dilation, convolution.padding, strict=True
    )
    windows = [Window(*some, convolution.outputs, boundary, boundary) for some in numbers]
    return geometry_of(placement, window_frames(placement, windows), weight_shape[0])


def check_channels(placement: Placement, dim: int, channels: int) -> None:
    """Raise NotationError if the channels are sharded, ShapeError if their number is wrong."""
    if dim < 0:
        raise ShapeError(
            f"a block with {len(placement.shape)} dims", text=str(placement.layout), hint="as in b c h w"
        )
    check_whole(placement, (dim,), "this layer")
    if placement.shape[dim] != channels:
        raise ShapeError(
            f"{placement.shape[dim]} channels, the layer has {channels}", text=str(placement.layout)
        )


def conv_transpose(
    x: Tensor,
    placement: Placement,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    dilation: Ints,
    groups: int = 1,
) -> tuple[Tensor, Placement]:
    """A block `(..., c, *spatial)` -> the block of the transposed convolution's outputs, as in `conv`."""
    rank = weight.ndim - 2
    windows = tuple(zip(weight.shape[2:], stride, dilation, padding, output_padding, strict=True))
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
    placement: Placement, windows: tuple[Ints, ...], weight_shape: torch.Size, groups: int
) -> Geometry:
    """windows: kernel, stride, dilation, padding and output padding of every spatial dim."""
    first, frames = len(placement.shape) - len(windows), []
    check_channels(placement, first - 1, weight_shape[0])
    for d, (k, s, dilation, p, extra) in enumerate(windows, first):
        if not 0 <= extra < max(s, dilation):
            raise ShapeError(
                f"output_padding {extra} with stride {s} and dilation {dilation}",
                hint="output_padding must be smaller than stride or dilation",
            )
        dim, length = placement.layout.dims[d], placement.shape[d]
        sizes = placement.sharding.mesh.sizes_of(dim.axes)
        frames.append(transposed_frame(dim, length, sizes, k=k, s=s, d=dilation, p=p, extra=extra))
        if frames[-1].length < 1:
            raise ShapeError(
                f"no output: {length} rows of dim {dim.name!r}, padding {p}", text=str(placement.layout)
            )
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
