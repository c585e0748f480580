"""Blocks of one array, or sums of addends, as they are and as they should be: the evidence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard import reference
from xshard.layout import Layout, Sharding
from xshard.layout.runs import FILL, row_numbers
from xshard.notation.overlap import Fold
from xshard.steps.base import Block
from xshard.tolerances import rounding

Mask = NDArray[np.bool_]


def settled(layout: Layout) -> Layout:
    """The layout without addends and contributions: cuts and overlaps alone, which determine the blocks."""
    return Layout(
        tuple(replace(d, overlap=None) if isinstance(d.overlap, Fold) else d for d in layout.dims)
    )


def whole(blocks: Sequence[Block], sharding: Sharding) -> Block:
    """The array that blocks stand for."""
    return reference.gather(blocks, sharding.layout, sharding.mesh, sharding.shape)


def settle(blocks: Sequence[Block], sharding: Sharding) -> tuple[Block, ...]:
    """Blocks under any layout -> under its settled one; addends and contributions are added."""
    layout = sharding.layout
    if not layout.tagged("sum", "mean", "max", "min") and settled(layout).dims == layout.dims:
        return tuple(blocks)
    return tuple(reference.scatter(whole(blocks, sharding), settled(layout), sharding.mesh))


def largest_error(got: Sequence[Block], want: Sequence[Block]) -> float:
    """Largest absolute error over all devices; infinite if shapes or dtypes differ, or for NaN."""
    pairs = list(zip(got, want, strict=False))
    if len(got) != len(want) or any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return float("inf")
    errors = (np.abs(in_double(a) - in_double(b)).max(initial=0) for a, b in pairs)
    return max((float("inf") if np.isnan(error) else float(error) for error in errors), default=0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """got, want: a block per device, both under `sharding`, with a settled layout. tolerance: relative to the
    largest value wanted, or to `largest` / 100 if that is more: beside larger arrays, a deviation from zero
    is rounding. arguments: whole arrays by name.
    """

    got: tuple[Block, ...]
    want: tuple[Block, ...]
    sharding: Sharding
    tolerance: float
    largest: float = 0.0
    arguments: Mapping[str, Block] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        got: Sequence[Block],
        want: Sequence[Block],
        on: Sharding,
        tolerance: float | None,
        *beside: Any,
    ) -> Case:
        """Blocks under any layout as evidence. tolerance: None goes by the dtype."""
        if tolerance is None:
            tolerance = rounding((want[0].dtype.name, got[0].dtype.name))
        return cls(
            settle(got, on),
            settle(want, on),
            on.with_layout(settled(on.layout)),
            tolerance,
            *beside,
        )

    @cached_property
    def scale(self) -> float:
        """The largest absolute value wanted."""
        return largest_value(self.want)

    @property
    def slack(self) -> float:
        """The absolute difference that is allowed."""
        return self.tolerance * max(self.scale, self.largest / 100)

    def near(self, a: Any, b: Any) -> bool:
        """Whether arrays are equal within the tolerance."""
        a = in_double(a)
        b = in_double(b)
        return a.shape == b.shape and bool(self._close(a, b).all())

    def _close(self, a: Any, b: Any) -> Mask:
        return np.asarray(np.isclose(a, b, rtol=self.tolerance, atol=self.slack, equal_nan=True))

    @cached_property
    def wrong(self) -> tuple[Mask, ...]:
        """Per device, which elements are wrong."""
        pairs = zip(map(in_double, self.got), map(in_double, self.want), strict=True)
        return tuple(~self._close(got, want) for got, want in pairs)

    @property
    def agrees(self) -> bool:
        """True if all blocks are equal within the tolerance."""
        return not self.wrong_devices

    @cached_property
    def wrong_devices(self) -> tuple[int, ...]:
        return tuple(device for device, mask in enumerate(self.wrong) if mask.any())

    def rows(self, dim: int, device: int) -> NDArray[np.int64]:
        """The global row of every row of a block, FILL beyond the ends of the array."""
        return row_numbers(self.sharding.held(dim, device))

    @cached_property
    def free_axes(self) -> tuple[str, ...]:
        """Axes of more than one device that cut nothing: along them blocks are equal."""
        return tuple(a for a in self.sharding.mesh.long_axes if a not in self.sharding.layout.axes)

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.sharding.layout.axes if a in self.sharding.mesh.long_axes)

    @cached_property
    def whole_want(self) -> Block:
        return in_double(whole(self.want, self.sharding))

    @cached_property
    def whole_got(self) -> Block | None:
        """The array that the blocks stand for; None if copies of a row differ."""
        array = in_double(whole(self.got, self.sharding))
        again = reference.scatter(array, self.sharding.layout, self.sharding.mesh)
        return array if all(map(self.near, again, self.got)) else None

    @cached_property
    def whole_wrong(self) -> Mask:
        """Which elements of the array are wrong in some block."""
        wrong = np.zeros(self.sharding.shape, bool)
        for device, mask in enumerate(self.wrong):
            rows = [self.rows(d, device) for d in range(mask.ndim)]
            inside = np.ix_(*(np.flatnonzero(r != FILL) for r in rows))
            wrong[np.ix_(*(r[r != FILL] for r in rows))] |= mask[inside]
        return wrong


def in_double(x: Any) -> Block:
    """The array in double precision, complex if it was."""
    x = np.asarray(x)
    wide: Block = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return wide


def largest_value(arrays: Iterable[Block]) -> float:
    """Largest finite absolute value of all arrays."""
    sizes = (np.abs(x).max(initial=0, where=np.isfinite(x)) for x in map(in_double, arrays))
    return float(max(sizes, default=0.0))


def wrong_rows(mask: Mask, dim: int) -> Mask:
    """The rows of a dim in which anything is wrong."""
    return np.asarray(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim)))


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All sets of axes, small before large."""
    for n in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, n)


def first_of(axes: Sequence[str], fits: Callable[[tuple[str, ...]], bool]) -> str | None:
    """The first set of axes for which it holds, in a sentence."""
    return next((names_of(each) for each in subsets(axes) if fits(each)), None)


def names_of(axes: Sequence[str]) -> str:
    """Axes in a sentence, as the notation writes a group."""
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"
