"""Parts of arrays, and which elements of one array become which of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard.layout.runs import Runs, as_few_runs, as_index, count_rows, row_numbers
from xshard.notation.row_arrays import Numbers

Shape = tuple[int, ...]

NEW = -1  # in place of the number of a dim: the array lacks it, the part has it with length 1


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
        return self._replace(rows=as_few_runs(_numbers(self.rows, n_rows)[positions]))


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

    def with_rows(self, d: int, rows: Runs) -> ArrayPart:
        """Return the part with other rows of its dim `d`."""
        dims = list(self.dims)
        dims[d] = dims[d]._replace(rows=rows)
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
        """Return the numpy index of the part in an array of this shape."""
        index: list[Any] = []
        for _, rows in self.dims:
            index.append(slice(None) if rows is None else as_index(rows))
        is_new = [dim == NEW for dim, _ in self.dims]
        if sum(isinstance(rows, np.ndarray) for rows in index) < 2:
            # None adds a dim of length 1.
            return tuple(None if new else rows for new, rows in zip(is_new, index, strict=True))
        # numpy pairs up the rows of several arrays, unless they are shaped as an open grid. Slices
        # and new dims between arrays would change the order of dims: all become arrays.
        lengths = [1 if dim == NEW else shape[dim] for dim, _ in self.dims]
        grid = np.ix_(*(np.arange(n)[rows] for n, rows in zip(lengths, index, strict=True)))
        return tuple(rows for new, rows in zip(is_new, grid, strict=True) if not new)


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
    def linked(cls, src: str, dst: str, links: Sequence[Link]) -> PartMapping:
        """Map a part of the array `src` to a part of `dst`; `links` are all their dims, in any order."""
        # A new dim of one array is where the other has it.
        src_links = sorted(links, key=lambda link: _place(link.src, link.dst))
        dst_links = sorted(links, key=lambda link: _place(link.dst, link.src))
        return cls(
            ArrayPart(src, tuple(link.src for link in src_links)),
            ArrayPart(dst, tuple(link.dst for link in dst_links)),
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
        """Map the elements of the source to those that they become by two mappings; None if to none.

        Row 1 of a stack [4, 8, 2] becomes e.1 [8, 2], and rows 0-3 of e.1 become gate [4, 2]: rows
        0-3 in row 1 of the stack become gate.

        Args:
            following: A mapping from the array that this one maps to.
            shape: The shape of that array.
        """
        links = [link for link in self.links if link.dst.dim == NEW]
        link_to = {link.dst.dim: link for link in self.links}  # by dim of the array between
        for link in following.links:
            if link.src.dim == NEW:
                links.append(link)
                continue
            joint = _joint(link_to[link.src.dim], link, shape[link.src.dim])
            if joint is None:
                return None
            if joint != (PartDim(NEW), PartDim(NEW)):  # a row that neither array has as a dim
                links.append(joint)
        return PartMapping.linked(self.src.name, following.dst.name, links)


class TargetArray(NamedTuple):
    """An array that names make: its shape, its dtype, and the source of each of its parts."""

    shape: Shape
    dtype: str
    pieces: tuple[PartMapping, ...]


def _place(dim: PartDim, other: PartDim) -> tuple[int, bool]:
    """Return the place of a dim of a part among the others; a new one is where the other array has it."""
    if dim.dim == NEW:
        return other.dim, False  # before that dim of this array
    return dim.dim, True


def _joint(link: Link, following: Link, length: int) -> Link | None:
    """Link the rows that become rows of a dim of the array between, and go on; None if there are none.

    `length` is that of the dim between. If one of the parts has no rows itself, nor has the result.
    """
    if link.dst.rows == following.src.rows:
        return Link(link.src, following.dst)
    if link.src.is_whole and link.dst.is_whole:
        return Link(link.src._replace(rows=following.src.rows), following.dst)
    arriving = _numbers(link.dst.rows, length)
    leaving = _numbers(following.src.rows, length)
    common, in_arriving, in_leaving = np.intersect1d(
        arriving, leaving, assume_unique=True, return_indices=True
    )
    if not len(common) and len(arriving) and len(leaving):
        return None
    return Link(
        link.src.take(in_arriving, len(arriving)), following.dst.take(in_leaving, len(leaving))
    )


def _numbers(rows: Runs | None, length: int) -> Numbers:
    """Return the numbers of rows of a dim; None stands for all."""
    return np.arange(length) if rows is None else row_numbers(rows)
