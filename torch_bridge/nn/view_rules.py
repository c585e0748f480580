"""Rules for views of blocks: where the dims of the array go.

The same view of an array without data shows where each dim goes: it keeps its stride and its length.
"""

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
from xshard.notation.parser import Dim

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
    """Any view, as one tensor or several. Raises NotationError if it changes or drops a sharded dim."""
    x, *rest = args
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # type: ignore[attr-defined]
    placement = placement_of(x)
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else rest
        if any(isinstance(i, bool) or not isinstance(i, slice | int | EllipsisType | None) for i in index):
            raise XshardError("a block indexed by more than slices and numbers", hint="as in x[:, :4]")
    local, merging = name in _OF_LENGTHS, name in _MERGING
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
    """Whole dims with names that a layout does not have."""
    return (Dim(name) for name in map("d{}".format, itertools.count()) if name not in layout.names)


def _without_data(shape: Sequence[int], dtype: torch.dtype, contiguous: bool) -> Tensor:
    """A tensor in which strides tell the dims apart, also dims of length 1, unless it is contiguous."""
    if contiguous:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n + 2
    return torch.empty_strided(tuple(shape), strides[::-1], dtype=dtype, device="meta")


def _seen(placement: Placement, empty: Tensor, aim: Tensor, what: str, *, splits: bool) -> Placement:
    """The placement of a view of an array without data.

    splits: whether lengths of the block may have split a dim. Then rows in groups of as many as the block has
    look like the rows of the block beside a dim of length 1.
    """
    dims, lengths = list(itertools.islice(new_dims(placement.layout), aim.ndim)), list(aim.shape)
    for d, dim in enumerate(placement.layout.dims):

        def places(x: Tensor, d: int = d) -> list[int]:
            """Dims that the dim may be; a whole one may have another length."""
            n = empty.shape[d] if placement.cuts(d) else None
            return [i for i in range(x.ndim) if x.stride(i) == empty.stride(d) and n in (None, x.shape[i])]

        before, after = places(empty), places(aim)
        if len(before) == len(after):
            e = after[before.index(d)]
            if splits and placement.cuts(d) and any(map(gt, _ones_beside(aim, e), _ones_beside(empty, d))):
                raise XshardError(f"{what} puts a dim of length 1 beside '{dim}'", hint="unsqueeze() does")
            dims[e], lengths[e] = dim, placement.shape[d] if placement.cuts(d) else aim.shape[e]
        else:
            check_whole(placement, (d,), what)
    return placement.remade(dims, lengths)


def _ones_beside(x: Tensor, d: int) -> tuple[int, int]:
    """The number of dims of length 1 right before a dim, and right after it."""
    sides = (reversed(x.shape[:d]), x.shape[d + 1 :])
    before, after = (len(list(itertools.takewhile((1).__eq__, side))) for side in sides)
    return before, after
