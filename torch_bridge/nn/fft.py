"""Fourier transforms along sharded dims: one move makes them whole, another shards them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import Lengths, Placement, placed_as, record
from xshard import Layout, XshardError
from xshard.notation.parser import Dim, Shard

KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def fft(
    x: Tensor,
    layout: Layout | str,
    mesh: MeshLike,
    dims: str,
    *,
    kind: str = "fft",
    lengths: Sequence[int] | None = None,
    norm: str | None = None,
    shape: Lengths = None,
) -> Tensor:
    """A block -> the block of the Fourier transform of the array, under the same layout.

    All processes of the mesh call it. Two moves: sharded dims are whole while they are transformed, and
    another dim is sharded. dims: names, as in "h w"; real kinds halve the last. kind: "fft", "ifft", "rfft",
    "irfft", "hfft", "ihfft". lengths: torch's `s`, global. norm: torch's. shape: global, if blocks differ in
    size. If its sizes or intervals do not fit its new length, a dim is balanced (`sharding_of`).

    Raises XshardError for another kind or dim, ShapeError for a block that does not fit.

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
    placement = placed_as(as_tensor(x, "x"), layout, mesh, shape)
    names = placement.layout.names
    numbers = dims.split()
    if kind not in KINDS:
        raise XshardError(f"kind={kind!r}", hint=f"there are: {', '.join(KINDS)}")
    if not numbers or not {*numbers} <= {*names}:
        raise XshardError(
            f"dims={dims!r}", text=str(placement.layout), hint='names of dims, as in "h w"'
        )
    steps = [*zip(map(names.index, numbers), lengths or [-1] * len(numbers), strict=True)]
    # The last dim is the first if its input is real, and the last if its output is.
    (end, _), first, last = steps[-1], kind in ("rfft", "ihfft"), kind in ("irfft", "hfft")
    steps = steps[:: -1 if first else 1]
    sharded, whole = (
        [step for step in steps if placement.cuts(step[0]) is cut] for cut in (True, False)
    )
    for group in (sharded, whole) if (first if placement.cuts(end) else last) else (whole, sharded):
        home = [*placement.layout.dims]
        moves = group is sharded and group
        if moves:
            away = _elsewhere(placement, [d for d, _ in group])
            x = placement.moved(x, away)
            placement = placement.remade(away.dims, placement.shape)
        for d, n in group:
            name = kind if d == end else "ifft" if kind in ("ifft", "irfft", "ihfft") else "fft"
            y = getattr(torch.fft, name)(x, None if n == -1 else n, d, norm)
            if y.shape[d] != x.shape[d] and any(shard.numbers for shard in home[d].shards):
                home[d] = Dim(home[d].name, (Shard(home[d].axes, "balanced"),))
            x = y
            placement = placement.with_length(d, y.shape[d])
        back = placement.remade(home, placement.shape)
        x = placement.moved(x, back.layout) if moves else x
        placement = back
    return record(x, placement)


def _elsewhere(placement: Placement, dims: Sequence[int]) -> Layout:
    """The layout in which some dims are whole, and the longest of the others is sharded instead."""
    every = list(placement.layout.dims)
    axes = [a for d in dims for a in placement.layout.dims[d].axes]
    for d in dims:
        every[d] = Dim(every[d].name)
    if others := [d for d in range(len(every)) if d not in dims]:
        host = max(others, key=lambda d: max(placement.sharding.local_sizes[d]))
        every[host] = replace(
            every[host], shards=(*every[host].shards, Shard(tuple(axes), "balanced"))
        )
    return Layout(tuple(every))
