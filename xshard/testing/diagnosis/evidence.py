"""Blocks of one array as they are and as they should be: the evidence that causes are found in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard import reference
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.runs import FILL, row_numbers
from xshard.notation.overlap import Fold
from xshard.notation.parser import Dim
from xshard.steps.base import Block
from xshard.tolerances import rounding

Mask = NDArray[np.bool_]


def settled(layout: Layout) -> Layout:
    """Drop tags, and overlaps whose rows are addends: "h/a:fold(1,1) | sum(b)" -> "h/a".

    The layout that is left determines every block, so blocks under it can be compared.
    """
    return Layout(without_overlaps(layout, Fold).dims)


def is_settled(layout: Layout) -> bool:
    """Tell whether blocks are parts of the array: no addends, and nothing still to be reduced."""
    has_open_tags = layout.tagged("sum", "mean", "max", "min")
    return not has_open_tags and settled(layout).dims == layout.dims


def without_overlaps(layout: Layout, *kinds: type) -> Layout:
    """Drop the overlaps of some kinds: "h/a:halo(1,1) w" -> "h/a w" without `Halo`."""
    dims = []
    for dim in layout.dims:
        dims.append(replace(dim, overlap=None) if isinstance(dim.overlap, kinds) else dim)
    return replace(layout, dims=tuple(dims))


def whole(blocks: Sequence[Block], sharding: Sharding) -> Block:
    """Gather the array that blocks stand for."""
    return reference.gather(blocks, sharding.layout, sharding.mesh, sharding.shape)


def settle(blocks: Sequence[Block], sharding: Sharding) -> tuple[Block, ...]:
    """Bring blocks under any layout to its settled one: addends are added up."""
    layout = sharding.layout
    if is_settled(layout):  # as most layouts: no copies are needed
        return tuple(blocks)
    return tuple(reference.scatter(whole(blocks, sharding), settled(layout), sharding.mesh))


def largest_error(got: Sequence[Block], want: Sequence[Block]) -> float:
    """Return the largest absolute error over all devices; infinite for NaN, or for other shapes or dtypes."""
    if len(got) != len(want):
        return float("inf")
    largest = 0.0
    for a, b in zip(got, want, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return float("inf")
        error = float(np.abs(in_double(a) - in_double(b)).max(initial=0))
        if np.isnan(error):
            return float("inf")
        largest = max(largest, error)
    return largest


@dataclass(frozen=True, eq=False)
class Case:
    """Blocks of one array that may be wrong, beside the right ones.

    Attributes:
        got: The blocks as they are, one per device.
        want: The right blocks.
        sharding: Of both; causes are found under a settled layout.
        tolerance: The largest error that is still rounding, relative to the largest value wanted. None: by
            the dtypes.
        largest: The largest value among arrays of this kind. The tolerance is relative to a hundredth of
            it if that is more: beside larger arrays, a deviation from zero is rounding.
        arguments: Whole arguments of the function by name: some mistakes are found by them.
    """

    got: tuple[Block, ...]
    want: tuple[Block, ...]
    sharding: Sharding
    tolerance: float | None = None
    largest: float = 0.0
    arguments: Mapping[str, Block] = field(default_factory=dict)

    def settled(self) -> Case:
        """Return the case with all addends added up, to search for the mistake between both sides.

        A layout of a sum determines only the sum, and not the addend of each device: if got is 1
        and 4, and want is 2 and 3, nothing is wrong. So addends are added up first, which gives 5
        and 5 on both sides.
        """
        return replace(
            self,
            got=settle(self.got, self.sharding),
            want=settle(self.want, self.sharding),
            sharding=self.sharding.with_layout(settled(self.sharding.layout)),
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh of all blocks."""
        return self.sharding.mesh

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims of the layout."""
        return self.sharding.layout.dims

    @property
    def pairs(self) -> Iterable[tuple[Block, Block]]:
        """The block and the right block of each device."""
        return zip(self.got, self.want, strict=True)

    @cached_property
    def scale(self) -> float:
        """The largest absolute value wanted."""
        return largest_value(self.want)

    @cached_property
    def relative_slack(self) -> float:
        """The difference that is allowed, relative to the largest value."""
        if self.tolerance is not None:
            return self.tolerance
        return rounding((self.want[0].dtype.name, self.got[0].dtype.name))

    @property
    def slack(self) -> float:
        """The absolute difference that is allowed."""
        return self.relative_slack * max(self.scale, self.largest / 100)

    def near(self, a: Any, b: Any) -> bool:
        """Tell whether two arrays are equal within the tolerance."""
        a = in_double(a)  # bfloat16 would be rounded in the difference
        b = in_double(b)
        return a.shape == b.shape and bool(self._close(a, b).all())

    def all_near(self, a: Iterable[Any], b: Iterable[Any]) -> bool:
        """Tell whether the arrays of all devices are equal within the tolerance."""
        return all(map(self.near, a, b))

    def _close(self, a: Block, b: Block) -> Mask:
        close = np.isclose(a, b, rtol=self.relative_slack, atol=self.slack, equal_nan=True)
        return np.asarray(close)

    @cached_property
    def wrong(self) -> tuple[Mask, ...]:
        """Per device, which elements of the block are wrong."""
        wrong = []
        for got, want in self.pairs:
            wrong.append(~self._close(in_double(got), in_double(want)))
        return tuple(wrong)

    @property
    def agrees(self) -> bool:
        """True if all blocks are equal within the tolerance."""
        return not self.wrong_devices

    @cached_property
    def wrong_devices(self) -> tuple[int, ...]:
        """The devices with a wrong element."""
        return tuple(device for device, mask in enumerate(self.wrong) if mask.any())

    def rows(self, dim: int, device: int) -> NDArray[np.int64]:
        """Return the global row of every row of a block, FILL beyond the ends of the array."""
        return row_numbers(self.sharding.held(dim, device))

    @cached_property
    def free_axes(self) -> tuple[str, ...]:
        """Axes of more than one device that cut nothing: along them blocks are equal."""
        cutting = self.sharding.layout.axes
        return tuple(axis for axis in self.mesh.long_axes if axis not in cutting)

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes of more than one device that cut a dim."""
        long_axes = self.mesh.long_axes
        return tuple(axis for axis in self.sharding.layout.axes if axis in long_axes)

    @cached_property
    def whole_want(self) -> Block:
        """The right array."""
        return in_double(whole(self.want, self.sharding))

    @cached_property
    def whole_got(self) -> Block | None:
        """The array that the blocks stand for; None if copies of a row differ."""
        array = in_double(whole(self.got, self.sharding))
        # Gathering takes one copy of each row: scattered again, all copies have to be equal to it.
        scattered = reference.scatter(array, self.sharding.layout, self.mesh)
        return array if self.all_near(scattered, self.got) else None

    @cached_property
    def whole_wrong(self) -> Mask:
        """Which elements of the array are wrong in some block."""
        wrong = np.zeros(self.sharding.shape, bool)
        for device, mask in enumerate(self.wrong):
            local_rows = []
            global_rows = []
            for d in range(mask.ndim):
                rows = self.rows(d, device)
                inside = np.flatnonzero(rows != FILL)  # rows beyond the ends have no place in it
                local_rows.append(inside)
                global_rows.append(rows[inside])
            wrong[np.ix_(*global_rows)] |= mask[np.ix_(*local_rows)]
        return wrong


def in_double(x: Any) -> Block:
    """Convert to double precision: float64, or complex128 for complex numbers."""
    x = np.asarray(x)
    wide: Block = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return wide


def largest_value(arrays: Iterable[Block]) -> float:
    """Return the largest finite absolute value of all arrays, 0 for none."""
    largest = 0.0
    for array in arrays:
        x = in_double(array)
        finite = np.abs(x[np.isfinite(x)])
        largest = max(largest, float(finite.max(initial=0)))
    return largest


def rows_of_dim(block: Block, dim: int) -> Block:
    """Bring a dim to the front, and flatten the others: `[..., n, ...]` -> `[n, elements]`."""
    return np.moveaxis(in_double(block), dim, 0).reshape(block.shape[dim], -1)


def wrong_rows(mask: Mask, dim: int) -> Mask:
    """Mark the rows of a dim in which anything is wrong: `[..., rows, ...]` -> `[rows]`."""
    other_dims = tuple(d for d in range(mask.ndim) if d != dim)
    return np.asarray(mask.any(axis=other_dims))


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all sets of axes but the empty one, small ones first."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def names_of(axes: Sequence[str]) -> str:
    """Name axes in a sentence, as the notation writes a group: "dp", or "(dp,tp)"."""
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"
