"""Views of blocks: a view of an array without data shows where each dim goes, and which rows it has there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement, needs_whole, placement_of, record
from xshard import Layout, XshardError
from xshard.layout.runs import as_intervals
from xshard.notation.parser import INTERVALS, Dim, Shard

# They merge and split neighbouring dims, so that the array without data must be contiguous.
_MERGING = frozenset(("flatten", "reshape", "unflatten", "view"))
# Their arguments are lengths, and in a model's code these are the block's.
_TAKES_LENGTHS = frozenset(("expand", "reshape", "unflatten", "view"))
VIEWS = _MERGING | _TAKES_LENGTHS | frozenset((
    "H", "T", "__getitem__", "chunk", "mH", "mT", "moveaxis", "movedim", "narrow", "permute", "select",
    "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unfold",
    "unsqueeze",
))  # fmt: skip


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the property that it reads, as "mT" for `x.mT`."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        property_name: str = func.__self__.__name__  # type: ignore[attr-defined]  # the descriptor's
        return property_name
    return name


def view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a torch function that returns views (`permute`, `x[...]`, ...) to a block.

    To learn how the result is sharded, the function is also called on a tensor without data, whose
    dims are recognised in the view by their strides and lengths. `permute` of "h/sp w" -> "w h/sp".
    Each result gets a note of its layout and global shape. Raises NotationError if the view would
    need rows of other devices.
    """
    x, *options = args
    name = function_name(func)
    placement = placement_of(x)
    if name == "__getitem__":
        _check_index(options[0])
    is_local = name in _TAKES_LENGTHS
    is_merging = name in _MERGING
    source = _without_data(x.shape if is_local else placement.shape, x.dtype, is_merging)
    targets = func(source, *options, **kwargs)
    operation = "a slice" if name == "__getitem__" else f"{name}()"
    if name == "squeeze":
        # A dim of one row in the block may have more rows in the global array. torch would drop it;
        # the view of the global shape says which dims go.
        result = _view_placement(placement, source, targets, operation, may_split=False)
        return record(x.reshape(result.local_shape), result)
    y = func(*args, **kwargs)
    for part, target in zip(_as_tensors(y), _as_tensors(targets), strict=True):
        result = _view_placement(
            placement, source, target, operation, may_split=is_local and is_merging
        )
        record(part, result)
    return y


def _check_index(index: Any) -> None:
    """Raise XshardError unless it has slices and numbers only."""
    for item in index if isinstance(index, tuple) else (index,):
        is_plain = isinstance(item, slice | int | EllipsisType | None)
        if isinstance(item, bool) or not is_plain:  # to Python, True is a number
            raise XshardError(
                "a block indexed by more than slices and numbers", hint="as in x[:, :4]"
            )


def _as_tensors(y: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(y, Tensor):
        return (y,)
    return y


def new_dims(layout: Layout) -> Iterator[Dim]:
    """Generate dims with names that a layout does not have: d0, d1, ..."""
    for i in itertools.count():
        if f"d{i}" not in layout.names:
            yield Dim(f"d{i}")


def _without_data(shape: Sequence[int], dtype: torch.dtype, is_contiguous: bool) -> Tensor:
    """Return a tensor in which strides tell the dims apart, also dims of length 1, unless contiguous."""
    if is_contiguous:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    # The strides of longer dims, which differ also where a length is 1 or 0.
    strides = torch.empty([length + 2 for length in shape], device="meta").stride()
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


class ViewedDim(NamedTuple):
    """A dim of the array as a view has it: its number there, and its length in the array."""

    number: int
    dim: Dim
    length: int


def _view_placement(
    placement: Placement, source: Tensor, target: Tensor, operation: str, *, may_split: bool
) -> Placement:
    """Derive the layout and global shape of a view from those of the viewed array.

    source, target: a tensor without data and its view. operation: for errors, as in "view()".
    may_split: `view(2, -1)` and the like are given lengths of the block, and may have split a dim.
    Raises NotationError if the view needs all rows of a sharded dim.
    """
    # Dims of the view are new and whole until a dim of the array is found in their place.
    dims = list(itertools.islice(new_dims(placement.layout), target.ndim))
    lengths = list(target.shape)
    whole: list[ViewedDim] = []
    sharded: dict[int, ViewedDim] = {}
    for d, dim in enumerate(placement.layout.dims):
        viewed = _viewed_dim(placement, source, target, d)
        if not placement.is_sharded(d):
            if viewed is not None:
                whole.append(viewed)
            continue
        if viewed is None or viewed.number in sharded:
            raise needs_whole(placement, d, operation)
        if may_split and _has_more_ones_beside(target, viewed.number, source, d):
            # `view(6, -1)` of a block with 6 of 12 rows gives [6, 1]. If 6 is a fixed number of
            # groups, one device would have [6, 2]: which one is meant cannot be told.
            message = f"{operation} puts a dim of length 1 beside '{dim}'"
            raise XshardError(message, hint="unsqueeze() does")
        sharded[viewed.number] = viewed
    # Sharded dims come last, so that they win where a whole dim was found in the same place.
    for viewed in (*whole, *sharded.values()):
        dims[viewed.number] = viewed.dim
        lengths[viewed.number] = viewed.length
    return placement.with_dims(dims, lengths)


def _viewed_dim(placement: Placement, source: Tensor, target: Tensor, d: int) -> ViewedDim | None:
    """Find a dim of an array in a view of it, by its stride.

    A view keeps the strides of its dims: in `x.permute(1, 0)` of [4, 3], the dim with stride 3 is
    the second. source, target: the array and its view, without data. d: the dim to find. A sharded
    dim must keep its length, or have a multiple of it after merging. None: it is not in the view,
    or it is unclear where.
    """
    is_sharded = placement.is_sharded(d)
    # A whole dim may have another length in the view, as by a slice.
    length = source.shape[d] if is_sharded else None
    before = _dims_with(source, source.stride(d), length)
    after = _dims_with(target, source.stride(d), length)
    # Dims of length 1 may share a stride with a neighbour. If the view has as many dims with this
    # stride as the array, they are taken to be in the same order.
    if len(before) == len(after):
        number = after[before.index(d)]
        global_length = placement.shape[d] if is_sharded else target.shape[number]
        return ViewedDim(number, placement.layout.dims[d], global_length)
    if is_sharded:
        return _grouped_dim(placement, source, target, d)
    return None


def _dims_with(x: Tensor, stride: int, length: int | None) -> list[int]:
    """Return the dims of a stride and a length (None: any); several only if some are of length 1."""
    return [i for i in range(x.ndim) if x.stride(i) == stride and length in (None, x.shape[i])]


def _grouped_dim(placement: Placement, source: Tensor, target: Tensor, d: int) -> ViewedDim | None:
    """Find the dim of a view into which a sharded dim was merged with the dims after it.

    `flatten` of "h/sp w", 4 rows of 3 on this device -> 12 rows: 3 for each row of h, so the
    merged dim is sharded as h is. source, target: the array and its view, without data. d: the
    sharded dim. None: the view has no such dim.
    """
    if not source.is_contiguous():
        return None
    stride = source.stride(d)
    for number, length in enumerate(target.shape):
        rows_per_row = stride // target.stride(number)
        is_multiple = rows_per_row * target.stride(number) == stride
        if rows_per_row > 1 and is_multiple and length == rows_per_row * source.shape[d]:
            dim = _dim_of_groups(placement, d, rows_per_row)
            return ViewedDim(number, dim, rows_per_row * placement.shape[d])
    return None


def _dim_of_groups(placement: Placement, d: int, rows_per_row: int) -> Dim:
    """Return a sharded dim with several rows in place of each row, on the same devices."""
    dim = placement.layout.dims[d]
    # Equal consecutive blocks stay so; others have other rows, which intervals list.
    if placement.sharding.is_even and {shard.order for shard in dim.shards} == {"block"}:
        return dim
    intervals = []
    for runs in placement.sharding.owned_by_position(d):
        intervals.append(tuple((rows_per_row * as_intervals(runs)).ravel().tolist()))
    return Dim(dim.name, (Shard(dim.axes, INTERVALS, tuple(intervals)),))


def _has_more_ones_beside(target: Tensor, number: int, source: Tensor, d: int) -> bool:
    """Return whether more dims of length 1 are right before or after a dim of a view than in the array."""
    is_more_before = _leading_ones(target.shape[:number][::-1]) > _leading_ones(
        source.shape[:d][::-1]
    )
    is_more_after = _leading_ones(target.shape[number + 1 :]) > _leading_ones(source.shape[d + 1 :])
    return is_more_before or is_more_after


def _leading_ones(lengths: Sequence[int]) -> int:
    """Count the lengths of 1 at the start."""
    count = 0
    for length in lengths:
        if length != 1:
            break
        count += 1
    return count
