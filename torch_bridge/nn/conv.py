"""Convolutions of blocks, plain and transposed, equal to those of the whole array.

Decides which rows travel (those that a device's outputs read), and what torch computes then: a convolution
of the block, without padding along cut dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.nn.placed import Placement, check_whole
from torch_bridge.nn.window import Ints, Piece, by_pieces, checked_windows, no_outputs, pieces_of
from xshard import XshardError
from xshard.errors import ShapeError
from xshard.nn.receptive_fields import ReceptiveField, transposed_field
from xshard.nn.windows import WindowLayouts, output_pieces
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim

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
    out_rule: str = ""

    def windows(self, placement: Placement) -> tuple[tuple[int, Window], ...]:
        """The window over every spatial dim, which are the last ones."""
        boundary = Boundary(BOUNDARIES[self.padding_mode])
        first = len(placement.shape) - len(self.kernel)
        return tuple(
            (first + i, Window(k, s, d, p, self.out_rule, boundary, boundary))
            for i, (k, s, d, p) in enumerate(
                zip(self.kernel, self.stride, self.dilation, self.padding, strict=True)
            )
        )

    def padded(self, block: Tensor, placement: Placement) -> Tensor:
        """The block padded along the spatial dims that are whole."""
        first = len(placement.shape) - len(self.kernel)
        pads = [(0, 0) if placement.cuts(first + i) else pair for i, pair in enumerate(self.padding)]
        flat = list(itertools.chain.from_iterable(reversed(pads)))
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(block, flat, mode=mode) if any(flat) else block

    def __call__(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of rows that include the padding."""
        rank = len(self.kernel)
        return _CONV[rank - 1](block, weight, bias, self.stride, 0, self.dilation, self.groups)


@dataclass(frozen=True)
class ConvGeometry:
    """One convolution of one array, as one process computes it.

    pieces: per cut dim, its runs of rows and outputs.
    """

    windowed: WindowLayouts
    placement: Placement
    pieces: tuple[tuple[int, tuple[Piece, ...]], ...]

    @property
    def computes(self) -> bool:
        """Whether this process has any outputs."""
        return all(any(n for _, n in found) for _, found in self.pieces)


def conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, convolution: Convolution
) -> tuple[Tensor, Placement]:
    """A block `(..., c, *spatial)` -> the block of the convolution's outputs, and its placement.

    weight, bias: whole, as in the ordinary layer; their gradients are summed over the axes that cut the
    array. Raises, on all processes alike and before anything is sent, NotationError for channels that are
    cut, ShapeError for channels or outputs that do not fit.
    """
    geometry = conv_geometry(placement, convolution, weight.shape)
    weight_, bias_ = placement.copied(weight, bias)
    block = placement.moved(x, geometry.windowed.source)
    assert weight_ is not None
    if not geometry.computes:
        return no_outputs(geometry.placement.local_shape, block, weight_, bias_), geometry.placement
    y = by_pieces(
        convolution.padded(block, placement), dict(geometry.pieces), lambda b: convolution(b, weight_, bias_)
    )
    return y, geometry.placement


@lru_cache(maxsize=4096)
def conv_geometry(placement: Placement, convolution: Convolution, weight_shape: torch.Size) -> ConvGeometry:
    """Everything about a convolution that follows from shapes. Raises NotationError, ShapeError."""
    channels = len(placement.shape) - len(convolution.kernel) - 1
    check_channels(placement, channels, weight_shape[1] * convolution.groups)
    windows = convolution.windows(placement)
    _check_padding(placement, convolution)
    found, device = checked_windows(placement, windows), placement.processes.device
    own = tuple(
        (d, pieces_of(output_pieces(placement.sharding, d, w, device), w))
        for d, w in windows
        if placement.cuts(d)
    )
    return ConvGeometry(found, placement.of(found.result).with_length(channels, weight_shape[0]), own)


def _check_padding(placement: Placement, convolution: Convolution) -> None:
    """Raise ShapeError where torch would, also if this process has nothing to pad."""
    most = {"circular": 0, "reflect": -1}.get(convolution.padding_mode)
    for n, pair in zip(placement.shape[-len(convolution.padding) :], convolution.padding, strict=True):
        if most is not None and max(pair) > n + most:
            raise ShapeError(
                f"{convolution.padding_mode} padding {max(pair)} of {n} rows",
                text=str(placement.layout),
                hint=f"at most {n + most}",
            )


def check_channels(placement: Placement, dim: int, channels: int) -> None:
    """Raise NotationError if the channels are cut, ShapeError if their number is wrong."""
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
    channels = len(placement.shape) - rank - 1
    check_channels(placement, channels, weight.shape[0])
    reads = _transposed_reads(placement, tuple(weight.shape[2:]), stride, padding, output_padding, dilation)
    first, device, sharding = channels + 1, placement.processes.device, placement.sharding
    dims, results, shape = [*placement.layout.dims], [*placement.layout.dims], [*placement.shape]
    for d, found in reads.items():
        dims[d], results[d], shape[d] = found.source, found.result, found.length
    shape[channels] = weight.shape[1] * groups
    result = placement.remade(results, shape)
    weight_, bias_ = placement.copied(weight, bias)
    assert weight_ is not None
    block = placement.moved(x, replace(placement.layout, dims=tuple(dims)))
    if 0 in result.local_shape or 0 in block.shape:
        y = no_outputs([0], block, weight_).sum().expand(result.local_shape)  # rows that no input reaches
    else:
        # Whole dims are cropped like cut ones, from the outputs of all their inputs.
        full = _CONV_TRANSPOSE[rank - 1](block, weight_, None, stride, 0, 0, groups, dilation)
        crop: list[int] = []
        for i in reversed(range(rank)):
            at = sharding.dim_device(first + i, device)
            (start, _), (begin, end) = reads[first + i].inputs[at], reads[first + i].outputs[at]
            offset = begin + padding[i] - start * stride[i]
            crop += [-offset, end - begin + offset - full.shape[first + i]]
        y = F.pad(full, crop)
    if bias_ is not None:
        y = y + bias_.view(-1, *(1,) * rank)
    return y, result


@lru_cache(maxsize=4096)
def _transposed_reads(
    placement: Placement, kernel: Ints, stride: Ints, padding: Ints, output_padding: Ints, dilation: Ints
) -> dict[int, ReceptiveField]:
    first, found = len(placement.shape) - len(kernel), {}
    options = zip(kernel, stride, padding, output_padding, dilation, strict=True)
    for i, (k, s, p, extra, d) in enumerate(options):
        if not 0 <= extra < max(s, d):
            raise ShapeError(
                f"output_padding {extra} with stride {s} and dilation {d}", hint="less than one of them"
            )
        dim: Dim = placement.layout.dims[first + i]
        length, sizes = placement.shape[first + i], placement.sharding.mesh.sizes_of(dim.axes)
        found[first + i] = transposed_field(dim, length, sizes, k=k, s=s, d=d, p=p, extra=extra)
        if found[first + i].length < 1:
            raise ShapeError(
                f"no output: {length} rows of dim {dim.name!r}, padding {p}", text=str(placement.layout)
            )
    return found


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
