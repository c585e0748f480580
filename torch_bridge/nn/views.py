"""Views of blocks: a view of an array without data shows where each dim goes, and which rows it has there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import gt
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement, check_whole, placement_of, record
from xshard import Layout, XshardError
from xshard.layout.runs import as_intervals
from xshard.notation.parser import INTERVALS, Dim, Shard

# They merge and split neighbouring dims, so that the array without data must be contiguous.
_MERGING = frozenset(("flatten", "reshape", "unflatten", "view"))
# Their arguments are lengths, and in a model's code those are the block's.
_OF_LENGTHS = frozenset(("expand", "reshape", "unflatten", "view"))
VIEWS = _MERGING | _OF_LENGTHS | frozenset((
    "H", "T", "__getitem__", "chunk", "mH", "mT", "moveaxis", "movedim", "narrow", "permute", "select",
    "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unfold",
    "unsqueeze",
))  # fmt: skip


def view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of an array without data shows where each dim goes: it keeps its stride and its length."""
    x, *rest = args
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # type: ignore[attr-defined]
    placement = placement_of(x)
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else rest
        if any(
            isinstance(i, bool) or not isinstance(i, slice | int | EllipsisType | None)
            for i in index
        ):
            raise XshardError(
                "a block indexed by more than slices and numbers", hint="as in x[:, :4]"
            )
    local = name in _OF_LENGTHS
    merging = name in _MERGING
    empty = _without_data(x.shape if local else placement.shape, x.dtype, merging)
    aims = func(empty, *rest, **kwargs)
    what = "a slice" if name == "__getitem__" else f"{name}()"
    if name == "squeeze":  # one row here may be one of many
        seen = _seen(placement, empty, aims, what, splits=False)
        return record(x.reshape(seen.local_shape), seen)
    y = func(*args, **kwargs)
    for part, aim in zip(*((z,) if isinstance(z, Tensor) else z for z in (y, aims)), strict=True):
        record(part, _seen(placement, empty, aim, what, splits=local and merging))
    return y


def new_dims(layout: Layout) -> Iterator[Dim]:
    return (Dim(name) for name in map("d{}".format, itertools.count()) if name not in layout.names)


def _without_data(shape: Sequence[int], dtype: torch.dtype, contiguous: bool) -> Tensor:
    """A tensor in which strides tell the dims apart, also dims of length 1, unless it is contiguous."""
    if contiguous:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    strides = torch.empty([n + 2 for n in shape], device="meta").stride()
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def _seen(
    placement: Placement, empty: Tensor, aim: Tensor, what: str, *, splits: bool
) -> Placement:
    """The placement of a view of an array without data; splits: lengths of the block may have split a dim."""
    dims = list(itertools.islice(new_dims(placement.layout), aim.ndim))
    lengths = list(aim.shape)
    whole = dict[int, tuple[Dim, int]]()
    sharded = dict[int, tuple[Dim, int]]()
    for d, dim in enumerate(placement.layout.dims):

        def places(x: Tensor, d: int = d) -> list[int]:
            """Dims that the dim may be; a whole one may have another length."""
            n = empty.shape[d] if placement.cuts(d) else None
            return [
                i
                for i in range(x.ndim)
                if x.stride(i) == empty.stride(d) and n in (None, x.shape[i])
            ]

        before = places(empty)
        after = places(aim)
        e = after[before.index(d)] if len(before) == len(after) else None
        if not placement.cuts(d):
            whole |= {} if e is None else {e: (dim, aim.shape[e])}
            continue
        place = _grouped(placement, empty, d, aim) if e is None else {e: (dim, placement.shape[d])}
        check_whole(placement, (d,) if place.keys() <= sharded.keys() else (), what)
        # Rows in groups of a block's number look like the rows of the block beside a dim of length 1.
        if splits and any(map(gt, _ones_beside(aim, *place), _ones_beside(empty, d))):
            raise XshardError(
                f"{what} puts a dim of length 1 beside '{dim}'", hint="unsqueeze() does"
            )
        sharded |= place
    for i, (dim, length) in (whole | sharded).items():
        dims[i] = dim
        lengths[i] = length
    return placement.remade(dims, lengths)


def _grouped(placement: Placement, x: Tensor, d: int, y: Tensor) -> dict[int, tuple[Dim, int]]:
    """The dim of a view with some rows for each row of a sharded dim: its number, itself, its length."""
    step = x.stride(d)
    dim = placement.layout.dims[d]
    owners = placement.sharding.owners(d)
    for i, n in enumerate(y.shape if x.is_contiguous() else ()):
        rows = step // y.stride(i)
        if rows > 1 and rows * y.stride(i) == step and n == rows * x.shape[d]:
            if not placement.sharding.is_even or {shard.order for shard in dim.shards} != {"block"}:
                parts = tuple(
                    tuple((rows * as_intervals(part)).ravel().tolist()) for part in owners
                )
                dim = Dim(dim.name, (Shard(dim.axes, INTERVALS, parts),))
            return {i: (dim, rows * placement.shape[d])}
    return {}


def _ones_beside(x: Tensor, d: int) -> tuple[int, ...]:
    """The number of dims of length 1 right before a dim, and right after it."""
    sides = (reversed(x.shape[:d]), x.shape[d + 1 :])
    return tuple(len(list(itertools.takewhile((1).__eq__, side))) for side in sides)
