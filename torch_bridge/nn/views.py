"""Views of blocks: a view of an array without data shows where each dim goes, and which rows it has there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.nn.function_call import FunctionCall, Rule, same_rule, tensors_in
from torch_bridge.nn.placed import Placement, needs_whole, placement_of, record
from xshard import Layout, XshardError
from xshard.layout.runs import as_intervals
from xshard.notation.parser import INTERVALS, Dim, Shard


def view(call: FunctionCall, *, takes_lengths: bool = False, is_merging: bool = False) -> Any:
    """Apply a torch function that returns views of its first argument, here a block.

    `permute` of "h/sp w" returns "w h/sp". This is found out by a trial: the function is also
    called on a tensor without data, and the strides of that view tell which dim is where. Records
    the layout and global shape of each result. Raises NotationError if the view would need rows of
    other devices.

    Args:
        call: The call.
        takes_lengths: Whether lengths are arguments, as in `x.view(2, -1)`. In the code of a model
            they are lengths of the block, not of the array.
        is_merging: Whether the view may merge neighbouring dims, or split them, as `flatten`.
    """
    x, *options = call.args
    placement = placement_of(x)
    trial_shape = x.shape if takes_lengths else placement.shape
    source = _without_data(trial_shape, x.dtype, is_contiguous=is_merging)
    targets = call.func(source, *options, **call.kwargs)
    operation = "a slice" if call.name == "__getitem__" else f"{call.name}()"
    may_split = takes_lengths and is_merging
    y = call.run()
    for viewed, target in zip(tensors_in((y,)), tensors_in((targets,)), strict=True):
        trial = _Trial(placement, source, target)
        record(viewed, trial.placement_of_view(operation, may_split=may_split))
    return y


def _slice(call: FunctionCall) -> Any:
    """Take rows of a block, as `x[:, :4]`. Raises XshardError unless all indices are slices or numbers."""
    x, index = call.args
    placement_of(x)  # raises for any other tensor, such as a table that a block is the index of
    for item in index if isinstance(index, tuple) else (index,):
        is_plain = isinstance(item, slice | int | EllipsisType | None)
        if isinstance(item, bool) or not is_plain:  # to Python, True is a number
            reason = "a block indexed by more than slices and numbers"
            raise XshardError(reason, hint="as in x[:, :4]")
    return view(call)


def _squeeze(call: FunctionCall) -> Tensor:
    """Drop the dims that have length 1 in the array.

    torch would also drop a dim with one row in this block, though the array may have more rows. So
    the trial with the array's shape says which dims go.
    """
    x, *options = call.args
    placement = placement_of(x)
    source = _without_data(placement.shape, x.dtype)
    trial = _Trial(placement, source, call.func(source, *options, **call.kwargs))
    result = trial.placement_of_view("squeeze()")
    return record(x.reshape(result.local_shape), result)


# Functions and properties that return views -> their rules.
VIEWS: dict[str, Rule] = {
    **same_rule(
        "H T chunk mH mT moveaxis movedim narrow permute select split swapaxes swapdims t tensor_split"
        " transpose unbind unfold unsqueeze",
        view,
    ),
    "__getitem__": _slice,
    "squeeze": _squeeze,
    "expand": partial(view, takes_lengths=True),
    "flatten": partial(view, is_merging=True),
    **same_rule("reshape unflatten view", partial(view, takes_lengths=True, is_merging=True)),
}


def new_dims(layout: Layout) -> Iterator[Dim]:
    """Generate dims with names that a layout does not have: d0, d1, ..."""
    for i in itertools.count():
        if f"d{i}" not in layout.names:
            yield Dim(f"d{i}")


def _without_data(
    shape: Sequence[int], dtype: torch.dtype, *, is_contiguous: bool = False
) -> Tensor:
    """Return a tensor in which strides tell the dims apart, also dims of length 1, unless contiguous."""
    if is_contiguous:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    # The strides of longer dims, which differ also where a length is 1 or 0.
    longer = torch.empty([length + 2 for length in shape], device="meta")
    return torch.empty_strided(tuple(shape), longer.stride(), dtype=dtype, device="meta")


class _ViewedDim(NamedTuple):
    """A dim of the array as a view has it.

    Attributes:
        view_dim: Its index in the view.
        dim: Its name and shards.
        length: Its length in the view of the whole array.
    """

    view_dim: int
    dim: Dim
    length: int


class _Trial(NamedTuple):
    """A view of a tensor without data, `source` -> `target`, and the placement of the viewed block."""

    placement: Placement
    source: Tensor
    target: Tensor

    def placement_of_view(self, operation: str, *, may_split: bool = False) -> Placement:
        """Derive the layout and global shape of the same view of the block.

        Args:
            operation: For errors, as "view()".
            may_split: Whether a dim may have been split by lengths of the block.

        Raises:
            NotationError: The view needs all rows of a sharded dim.
        """
        placement = self.placement
        # Dims of the view are new and unsharded until a dim of the array is found to be one of them.
        dims = list(itertools.islice(new_dims(placement.layout), self.target.ndim))
        lengths = list(self.target.shape)
        sharded_view_dims = set()
        # Unsharded dims come first, so that a sharded one wins where both are found to be one dim.
        for d in sorted(range(placement.ndim), key=placement.is_sharded):
            viewed = self._find(d)
            if placement.is_sharded(d):
                if viewed is None or viewed.view_dim in sharded_view_dims:
                    raise needs_whole(placement, d, operation)
                if may_split:
                    self._check_ones_beside(viewed.view_dim, d, operation)
                sharded_view_dims.add(viewed.view_dim)
            if viewed is not None:
                dims[viewed.view_dim] = viewed.dim
                lengths[viewed.view_dim] = viewed.length
        return placement.with_dims(dims, lengths)

    def _find(self, d: int) -> _ViewedDim | None:
        """Find dim `d` of the array in the view, by its stride.

        A view keeps the strides of its dims: in `x.permute(1, 0)` of [4, 3], the dim with stride 3
        is the second. A sharded dim must keep its length, or have a multiple of it after merging.
        None: it is not in the view, or it is unclear where.
        """
        is_sharded = self.placement.is_sharded(d)
        stride = self.source.stride(d)
        # A whole dim may have another length in the view, as by a slice.
        length = self.source.shape[d] if is_sharded else None
        same_stride = _dims_with(self.source, stride, length)
        same_stride_in_view = _dims_with(self.target, stride, length)
        # Dims of length 1 may share a stride with a neighbour. If the view has as many dims with
        # this stride as the array, they are taken to be in the same order.
        if len(same_stride) == len(same_stride_in_view):
            view_dim = same_stride_in_view[same_stride.index(d)]
            global_length = self.target.shape[view_dim]
            if is_sharded:
                global_length = self.placement.shape[d]
            return _ViewedDim(view_dim, self.placement.dims[d], global_length)
        return self._find_merged(d) if is_sharded else None

    def _find_merged(self, d: int) -> _ViewedDim | None:
        """Find the dim of the view into which a sharded dim was merged with the dims after it.

        `flatten` of "h/sp w", 4 rows of 3 on this device -> 12 rows: 3 for each row of h, so the
        merged dim is sharded as h is. None: the view has no such dim.
        """
        if not self.source.is_contiguous():
            return None
        stride = self.source.stride(d)
        for view_dim, length in enumerate(self.target.shape):
            rows_per_row, remainder = divmod(stride, self.target.stride(view_dim))
            has_all_rows = length == rows_per_row * self.source.shape[d]
            if rows_per_row > 1 and remainder == 0 and has_all_rows:
                dim = dim_of_groups(self.placement, d, rows_per_row)
                return _ViewedDim(view_dim, dim, rows_per_row * self.placement.shape[d])
        return None

    def _check_ones_beside(self, view_dim: int, d: int, operation: str) -> None:
        """Raise XshardError if the view has more dims of length 1 beside a sharded dim than the array.

        `view(6, -1)` of a block with 6 of 12 rows gives [6, 1]. If 6 is a fixed number of groups,
        one device would have [6, 2]: which one is meant cannot be told.
        """
        n_before, n_after = _ones_beside(self.source.shape, d)
        n_before_in_view, n_after_in_view = _ones_beside(self.target.shape, view_dim)
        if n_before_in_view > n_before or n_after_in_view > n_after:
            dim = self.placement.dims[d]
            reason = f"{operation} puts a dim of length 1 beside '{dim}'"
            raise XshardError(reason, hint="unsqueeze() does")


def _dims_with(x: Tensor, stride: int, length: int | None) -> list[int]:
    """Return the dims of a stride and a length (None: any); several only if some are of length 1."""
    dims = []
    for d in range(x.ndim):
        if x.stride(d) == stride and length in (None, x.shape[d]):
            dims.append(d)
    return dims


def dim_of_groups(placement: Placement, d: int, rows_per_row: int) -> Dim:
    """Return a sharded dim with several rows in place of each row, on the same devices."""
    dim = placement.dims[d]
    # Equal consecutive blocks stay so; others have other rows, which intervals list.
    if placement.sharding.is_even and {shard.order for shard in dim.shards} == {"block"}:
        return dim
    intervals = []
    for runs in placement.sharding.owned_by_position(d):
        starts_and_stops = rows_per_row * as_intervals(runs)
        no_rows = (0, 0)  # text lists one interval or more
        intervals.append(tuple(starts_and_stops.ravel().tolist()) or no_rows)
    return Dim(dim.name, (Shard(dim.axes, INTERVALS, tuple(intervals)),))


def _ones_beside(shape: Sequence[int], d: int) -> tuple[int, int]:
    """Count the dims of length 1 right before dim `d` and right after it: [1, 1, 8, 1, 3], 2 -> (2, 1)."""
    start = d
    while start > 0 and shape[start - 1] == 1:
        start -= 1
    end = d + 1
    while end < len(shape) and shape[end] == 1:
        end += 1
    return d - start, end - d - 1
