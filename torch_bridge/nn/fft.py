"""Fourier transforms along sharded dims: one move makes them whole, another shards them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import Lengths, Outputs, Placement, placed_as, record
from torch_bridge.nn.window import no_outputs
from xshard import Layout, XshardError
from xshard.errors import api_boundary
from xshard.notation.parser import Dim, Shard

Transform = Callable[..., Tensor]


class Kind(NamedTuple):
    """How a transform of several dims is made of transforms of one dim each."""

    last_dim: Transform  # of the last dim, which a real kind halves or doubles
    other_dims: Transform
    has_real_input: bool = False
    has_real_output: bool = False


KINDS = {
    "fft": Kind(torch.fft.fft, torch.fft.fft),
    "ifft": Kind(torch.fft.ifft, torch.fft.ifft),
    "rfft": Kind(torch.fft.rfft, torch.fft.fft, has_real_input=True),
    "irfft": Kind(torch.fft.irfft, torch.fft.ifft, has_real_output=True),
    "hfft": Kind(torch.fft.hfft, torch.fft.fft, has_real_output=True),
    "ihfft": Kind(torch.fft.ihfft, torch.fft.ifft, has_real_input=True),
}


class DimTransform(NamedTuple):
    """The transform of one dim: to `length` rows; None: as many as it takes by itself."""

    dim: int
    length: int | None
    transform: Transform


@api_boundary
def fft(
    x: Tensor,
    layout: Layout | str,
    mesh: MeshLike,
    dims: str,
    *,
    kind: Literal["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"] = "fft",
    lengths: Sequence[int] | None = None,
    norm: str | None = None,
    shape: Lengths = None,
) -> Tensor:
    """Compute the Fourier transform of a sharded array; each process gets its block of the result.

        y = xt.nn.fft(x, "h/sp w", mesh, "h w")     # [h/2, w] -> [h/2, w], complex, on 2 processes

    All processes of the mesh call it. The result has the layout of the input. Sharded dims are
    gathered for their transform, while another dim is sharded instead: two collectives in all.

    Args:
        x: This process's block.
        layout: The layout of the array.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world.
        dims: Names of the dims to transform, as in "h w"; real kinds halve the last.
        kind: "fft", "ifft", "rfft", "irfft", "hfft" or "ihfft".
        lengths: torch's `s`: a length for each of `dims`, in which the array is cut or padded. Global.
        norm: torch's `norm`.
        shape: The global shape, if blocks differ in size.

    Returns:
        This process's block of the result. A dim "h/sizes(sp,3,5)" that gets a length other than 8 is
        divided as "h/balanced(sp)" instead, into parts as even as possible: `sharding_of` tells.

    Raises:
        XshardError: For another kind or dim.
        ShapeError: For a block that does not fit.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def turn():
        ...     x = torch.arange(8.0).view(4, 2)
        ...     block = x.chunk(2)[torch.distributed.get_rank()]
        ...     y = xt.nn.fft(block, "h/sp w", Mesh(sp=2), "h w")
        ...     return torch.allclose(y, torch.fft.fft2(x).chunk(2)[torch.distributed.get_rank()])
        >>> xt.testing.run_ranks(2, turn)
        [True, True]
    """
    # All checks come before the first move: all processes raise, or none.
    placement = placed_as(as_tensor(x, "x"), layout, mesh, shape)
    names = dims.split()
    if not names:
        raise XshardError("no dims to transform", hint='their names, as in "h w"')
    dim_indices = list(map(placement.layout.dim_index, names))
    y, placement_of_y = transform_dims(x, placement, KINDS[kind], dim_indices, lengths, norm)
    return record(y, placement_of_y)


def transform_dims(
    x: Tensor,
    placement: Placement,
    kind: Kind,
    dims: Sequence[int],
    lengths: Sequence[int] | None,
    norm: str | None,
) -> Outputs:
    """Transform some dims of an array by FFT: sharded dims in one group, the others in another.

    Around the group of sharded dims, one all-to-all makes them whole, and one shards them as
    before; so all of them share two moves.

    Args:
        x: This process's block.
        placement: Its placement.
        kind: The transform.
        dims: The indices of the dims; the last one is halved by real kinds such as "rfft".
        lengths: As for `fft`.
        norm: As for `fft`.

    Returns:
        The block of the result, and its placement.
    """
    transforms = _dim_transforms(kind, dims, lengths)
    # A real input ("rfft") is transformed along the last dim first, and a real output ("irfft")
    # last; all other transforms are complex. The group with the last dim goes first or last, too.
    if kind.has_real_input:
        transforms.reverse()
    sharded = [step for step in transforms if placement.is_sharded(step.dim)]
    unsharded = [step for step in transforms if not placement.is_sharded(step.dim)]
    is_last_sharded = placement.is_sharded(dims[-1])
    begins_with_sharded = kind.has_real_input if is_last_sharded else kind.has_real_output
    if begins_with_sharded:
        x, placement = _transform_sharded_dims(x, placement, sharded, norm)
        return _transform_whole_dims(x, placement, unsharded, norm)
    x, placement = _transform_whole_dims(x, placement, unsharded, norm)
    return _transform_sharded_dims(x, placement, sharded, norm)


def _dim_transforms(
    kind: Kind, dims: Sequence[int], lengths: Sequence[int] | None
) -> list[DimTransform]:
    """Return the transforms of single dims, in the order of `dims`."""
    if not lengths:
        lengths = [-1] * len(dims)
    transforms = []
    for dim, length in zip(dims, lengths, strict=True):
        transform = kind.last_dim if dim == dims[-1] else kind.other_dims
        # For the length that there is, torch's `s` has -1, and its `n` has None.
        transforms.append(DimTransform(dim, None if length == -1 else length, transform))
    return transforms


def _transform_sharded_dims(
    x: Tensor, placement: Placement, transforms: Sequence[DimTransform], norm: str | None
) -> Outputs:
    """Gather some dims by an all-to-all, transform them by FFT, and shard them as before.

    "h/sp w", transforming h -> "h w/balanced(sp)" in between. Returns the block of the result and
    its placement: its layout and global shape. Without transforms nothing is sent.

    Args:
        x: This process's block.
        placement: The placement of `x`: layout, mesh and global shape.
        transforms: The transforms of sharded dims, in order.
        norm: torch's `norm`.
    """
    if not transforms:
        return x, placement
    transformed = [step.dim for step in transforms]
    layout = _layout_with_whole(placement, transformed)
    x = placement.redistribute(x, layout)
    gathered = placement.with_dims(layout.dims, placement.shape)
    y, gathered = _transform_whole_dims(x, gathered, transforms, norm)
    dims = list(placement.dims)
    for d in transformed:
        # Real kinds change the length of a dim, and lengths= of any. Sizes or intervals in the
        # layout, such as 3 and 5 of 8 rows, then do not fit: as even parts as possible replace them.
        dim = dims[d]
        has_sizes = any(shard.numbers for shard in dim.shards)
        if has_sizes and gathered.shape[d] != placement.shape[d]:
            dims[d] = Dim(dim.name, (Shard(dim.axes, "balanced"),))
    result = gathered.with_dims(dims, gathered.shape)
    return gathered.redistribute(y, result.layout), result


def _transform_whole_dims(
    x: Tensor, placement: Placement, transforms: Sequence[DimTransform], norm: str | None
) -> Outputs:
    """Transform dims that each process has whole; their lengths may change."""
    for step in transforms:
        x = _transform_dim(x, step, norm)
        placement = placement.with_length(step.dim, x.shape[step.dim])
    return x, placement


def _transform_dim(x: Tensor, step: DimTransform, norm: str | None) -> Tensor:
    """Transform one dim, which is whole, of a block that may have no rows of other dims."""
    length = x.shape[step.dim]
    if x.numel() or not length:
        return step.transform(x, step.length, step.dim, norm)
    # MKL refuses such a block. The length and the dtype are those of one row.
    row = step.transform(x.sum().expand(length), step.length, -1, norm)
    shape = list(x.shape)
    shape[step.dim] = len(row)
    return no_outputs(shape, row)


def _layout_with_whole(placement: Placement, whole_dims: Sequence[int]) -> Layout:
    """Return a layout in which some dims are whole, and the longest other dim is sharded instead.

    "h/sp w" with h whole -> "h w/balanced(sp)"; balanced: the sizes of blocks differ by at most 1.
    Without another dim, each device gets the whole array.
    """
    dims = list(placement.dims)
    for d in whole_dims:
        dims[d] = Dim(dims[d].name)
    candidates = [d for d in range(len(dims)) if d not in whole_dims]
    if candidates:
        # A longer dim is cut into more even parts. The length is that of a device's block, as the
        # dim may be sharded already; then it is cut further.
        block_lengths = [max(sizes) for sizes in placement.sharding.local_sizes]
        longest_dim = max(candidates, key=block_lengths.__getitem__)
        shard = Shard(placement.axes_of(whole_dims), "balanced")
        dims[longest_dim] = replace(dims[longest_dim], shards=(*dims[longest_dim].shards, shard))
    return Layout(tuple(dims))
