"""Parts of arrays, and which elements of one array become which of another.

An `ArrayPart` is some rows of some dims of an array, as `q` in the rows 0-3 of a fused `qkv`. A
`PartMapping` says which part of one array becomes which part of another, dim by dim (`Link`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard.layout.runs import Runs, as_few_runs, as_index, count_rows, row_numbers
from xshard.notation.row_arrays import Numbers

Shape = tuple[int, ...]

# In place of the number of a dim: the array lacks this dim, and the part has it with length 1. A member
# [8, 2] of a stack [4, 8, 2] is mapped to one row of the stack as a part [1, 8, 2], whose first dim is new.
NEW = -1


class PartDim(NamedTuple):
    """A dim of a part of an array.

    Attributes:
        dim: The dim of the array; NEW for a dim that the array lacks, as a member of a stack does.
        rows: The rows of that dim. None: all.
    """

    dim: int
    rows: Runs | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is a dim of the array, with all its rows."""
        return self.dim != NEW and self.rows is None

    def take(self, positions: Numbers, n_rows: int) -> PartDim:
        """Return the rows at some positions, in ascending order, of the part's `n_rows` rows."""
        if len(positions) == n_rows:
            return self
        return self._replace(rows=as_few_runs(_row_numbers(self.rows, n_rows)[positions]))


class ArrayPart(NamedTuple):
    """All of an array, or some rows of some of its dims.

    Attributes:
        name: The array's name.
        dims: The dims of the part: the array's in their order, and new ones between them.
    """

    name: str
    dims: tuple[PartDim, ...]

    @classmethod
    def whole(cls, name: str, ndim: int) -> ArrayPart:
        """Return all of an array with `ndim` dims."""
        return cls(name, tuple(map(PartDim, range(ndim))))

    @property
    def is_whole(self) -> bool:
        """Whether the part is the array as it is."""
        return all(dim.is_whole for dim in self.dims)

    def with_rows(self, dim_index: int, rows: Runs) -> ArrayPart:
        """Return the part with other rows of its dim `dim_index`."""
        dims = list(self.dims)
        dims[dim_index] = dims[dim_index]._replace(rows=rows)
        return self._replace(dims=tuple(dims))

    def part_shape(self, shape: Shape) -> Shape:
        """Return the shape of the part, given the shape of the array."""
        lengths = []
        for dim, rows in self.dims:
            if dim == NEW:
                lengths.append(1)
            elif rows is None:
                lengths.append(shape[dim])
            else:
                lengths.append(count_rows(rows))
        return tuple(lengths)

    def numpy_index(self, shape: Shape) -> tuple[Any, ...]:
        """Return the numpy index of the part in an array of this shape.

        Rows 2-3 of dim 0 of an array [8, 4] -> (slice(2, 4), slice(None)). A new dim is None, which
        adds a dim of length 1.
        """
        indices: list[Any] = []  # for each dim of the part
        for dim, rows in self.dims:
            if dim == NEW:
                indices.append(None)
            elif rows is None:
                indices.append(slice(None))
            else:
                indices.append(as_index(rows))
        n_index_arrays = sum(isinstance(index, np.ndarray) for index in indices)
        if n_index_arrays < 2:
            return tuple(indices)
        # numpy pairs up the rows of several arrays, unless they are shaped as an open grid. Slices
        # and new dims between arrays would change the order of dims: all become arrays.
        rows_of_dims = []
        for part_dim, index in zip(self.dims, indices, strict=True):
            if part_dim.dim == NEW:
                rows_of_dims.append(np.arange(1))
            else:
                rows_of_dims.append(np.arange(shape[part_dim.dim])[index])
        open_grid = zip(self.dims, np.ix_(*rows_of_dims), strict=True)
        return tuple(rows for part_dim, rows in open_grid if part_dim.dim != NEW)


class Link(NamedTuple):
    """A dim of a part of the source, and the same dim in the part of the target that it becomes."""

    src: PartDim
    dst: PartDim


class PartMapping(NamedTuple):
    """Elements of one array that become elements of another. Dim i of `dst` is dim `order[i]` of `src`."""

    src: ArrayPart
    dst: ArrayPart
    order: tuple[int, ...]

    @classmethod
    def of_links(cls, src_name: str, dst_name: str, links: Sequence[Link]) -> PartMapping:
        """Map a part of one array to a part of another; `links` are all their dims, in any order."""
        # A new dim of one array is where the other has it.
        src_links = sorted(links, key=lambda link: _sort_key(link.src, link.dst))
        dst_links = sorted(links, key=lambda link: _sort_key(link.dst, link.src))
        return cls(
            ArrayPart(src_name, tuple(link.src for link in src_links)),
            ArrayPart(dst_name, tuple(link.dst for link in dst_links)),
            tuple(map(src_links.index, dst_links)),
        )

    @property
    def links(self) -> list[Link]:
        """The dims of both parts, in the order of the target."""
        return [
            Link(self.src.dims[i], dim) for i, dim in zip(self.order, self.dst.dims, strict=True)
        ]

    @property
    def inverse(self) -> PartMapping:
        """The mapping from the target to the source."""
        order = sorted(range(len(self.order)), key=self.order.__getitem__)
        return PartMapping(self.dst, self.src, tuple(order))

    def then(self, following: PartMapping, shape: Shape) -> PartMapping | None:
        """Map the elements of the source through a middle array to the last one; None if none arrive.

        The source is a stack [4, 8, 2], of which row 1 becomes the middle array e [8, 2]. Rows 0-3 of
        e become the last array [4, 2]. Together: in row 1 of the stack, rows 0-3 become the last array.

        Args:
            following: A mapping from the middle array, which this one maps to.
            shape: The shape of the middle array.
        """
        # Dims of the source that the middle array lacks, such as the first one of the stack.
        links = [link for link in self.links if link.dst.dim == NEW]
        link_by_middle_dim = {link.dst.dim: link for link in self.links}
        # A dim of the middle array alone: x [8] becomes row 1 of a stack [4, 8], and y is this row.
        # Neither x nor y has the dim of 4 rows, so no link remains.
        middle_only = Link(src=PartDim(NEW), dst=PartDim(NEW))
        for link in following.links:
            middle_dim = link.src.dim
            if middle_dim == NEW:  # a dim of the last array that the middle array lacks
                links.append(link)
                continue
            joined_link = _join_links(link_by_middle_dim[middle_dim], link, shape[middle_dim])
            if joined_link is None:
                return None
            if joined_link != middle_only:
                links.append(joined_link)
        return PartMapping.of_links(self.src.name, following.dst.name, links)


class TargetArray(NamedTuple):
    """An array that names make: its shape, its dtype, and the source of each of its parts."""

    shape: Shape
    dtype: str
    pieces: tuple[PartMapping, ...]


def _sort_key(part_dim: PartDim, linked_dim: PartDim) -> tuple[int, bool]:
    """Return the key that sorts the dims of a part: by dim of the array, a new one by the linked dim."""
    if part_dim.dim == NEW:
        return linked_dim.dim, False  # before that dim of this array
    return part_dim.dim, True


def _join_links(link: Link, following: Link, length: int) -> Link | None:
    """Link a dim of the first array to one of the last, by the rows that pass through the middle one.

    Rows 0-3 become rows 4-7 of the middle dim, of which rows 6-9 become rows 0-3 -> rows 2-3 become
    rows 0-1. None if no row passes; but if one of the parts has no rows itself, neither has the
    result. `length` is that of the middle dim.
    """
    if link.dst.rows == following.src.rows:
        return Link(link.src, following.dst)
    if link.src.is_whole and link.dst.is_whole:
        return Link(link.src._replace(rows=following.src.rows), following.dst)
    arriving = _row_numbers(link.dst.rows, length)
    leaving = _row_numbers(following.src.rows, length)
    common_rows, arriving_positions, leaving_positions = np.intersect1d(
        arriving, leaving, assume_unique=True, return_indices=True
    )
    if not len(common_rows) and len(arriving) and len(leaving):
        return None
    return Link(
        link.src.take(arriving_positions, len(arriving)),
        following.dst.take(leaving_positions, len(leaving)),
    )


def _row_numbers(rows: Runs | None, length: int) -> Numbers:
    """List the row numbers of a dim; None stands for all rows."""
    return np.arange(length) if rows is None else row_numbers(rows)
