"""The placements of a contraction: the role of every mesh axis while devices contract their blocks.
An axis shards a dim, holds partial sums of an operand or copies, or is idle: replicas repeat the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import NamedTuple

from xshard.layout import Layout, Sharding
from xshard.layout.partition import block_length, misfit
from xshard.layout.sharding import normal_dim
from xshard.notation.parser import Dim, Shard
from xshard.search.states import remembered
from xshard.steps.base import axes_of

MAX_PLACEMENTS = (
    5000  # beyond, searches climb from the arrays' own placements, one change at a time
)
Axes = frozenset[str]
Shards = tuple[Shard, ...]
Sums = tuple[tuple[str, int], ...]  # axes, each with the operand that has partial sums along it


@dataclass(frozen=True, eq=False)
class DimSharding:
    """How a dim is sharded. Equal shardings are one object: placements are compared by identity."""

    shards: Shards  # outermost first
    axes: Axes
    rows: int  # of the longest block
    fits: bool  # whether the dim can be so
    normal: Shards  # the simplest with the same blocks


Dims = tuple[DimSharding, ...]


class Placement(NamedTuple):
    """The roles of all axes: shards, axes with their operands of partial sums, copies; busy: not idle."""

    dims: Dims
    sums: Sums
    copies: tuple[str, ...]
    busy: Axes

    @property
    def fits(self) -> bool:
        """Whether every dim can be sharded so."""
        return all(dim.fits for dim in self.dims)

    @classmethod
    def of(cls, dims: Dims, sums: Sums = (), copies: tuple[str, ...] = ()) -> Placement:
        """A placement with its busy axes."""
        busy = Axes(copies).union((axis for axis, _ in sums), *(dim.axes for dim in dims))
        return cls(dims, sums, copies, busy)


class OperandSharding(NamedTuple):
    """How an array is sharded: its dims, and the axes that hold its partial sums and its copies."""

    dims: Dims
    sums: Axes
    copies: Axes


class ArrayMove(NamedTuple):
    """An array of a global shape is to go from one layout to another."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    @property
    def dual(self) -> ArrayMove:
        """The move of the gradient."""
        return ArrayMove(self.dst.dual, self.src.dual, self.shape)


def dim_lengths(operands: Iterable[Layout], shapes: Iterable[Sequence[int]]) -> dict[str, int]:
    """The length of every dim, in the order of the operands."""
    pairs = zip(operands, shapes, strict=True)
    return {name: n for layout, shape in pairs for name, n in zip(layout.names, shape, strict=True)}


@dataclass(frozen=True, repr=False)
class EinsumShardings:
    """The operands as given and the result as wanted; enumerates placements. Array -1 is the result."""

    operands: tuple[Sharding, ...]
    result: Sharding
    # The shardings of dims met so far, by length and shards: contractions share them.
    dim_shardings: dict[tuple[int, Shards], DimSharding] = field(
        default_factory=dict, compare=False
    )
    stays: bool = False  # the result stays at the contraction

    @cached_property
    def arrays(self) -> tuple[Sharding, ...]:
        """The operands, then the result."""
        return (*self.operands, self.result)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of every dim, in the order of the operands."""
        return dim_lengths((o.layout for o in self.operands), (o.shape for o in self.operands))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device."""
        return self.result.mesh.long_axes

    @cached_property
    def idle(self) -> Placement:
        """Every device contracts all."""
        return Placement.of(tuple(self._sharded(d, ()) for d in range(len(self.lengths))))

    @cached_property
    def placements(self) -> list[Placement]:
        """All placements, each once; of more than `MAX_PLACEMENTS`, one more than that."""
        return list(islice(self._extensions(self.idle, Axes(self.axes)), MAX_PLACEMENTS + 1))

    def neighbors(self, placement: Placement) -> Iterator[Placement]:
        """The placements in which one axis, with the axes of its shard, does something else."""
        for axis in self.axes:
            shards = (tuple(s for s in dim.shards if axis not in s.axes) for dim in placement.dims)
            dims = [self._sharded(d, others) for d, others in enumerate(shards)]
            sums = tuple(pair for pair in placement.sums if pair[0] != axis)
            rest = Placement.of(tuple(dims), sums, tuple(a for a in placement.copies if a != axis))
            others = self._with_axis(rest, axis, Axes(self.axes) - rest.busy)
            yield from (other for other in others if other.fits)

    def seeds(self) -> Iterator[Placement]:
        """The idle placement, then the placement that each operand, and the result, already has."""
        yield self.idle
        for array in self.arrays:
            shards = {dim.name: dim.shards for dim in array.normal.dims}
            dims = (self._sharded(d, shards.get(name, ())) for d, name in enumerate(self.lengths))
            yield Placement.of(tuple(dims))

    def _extensions(self, placement: Placement, free: Axes) -> Iterator[Placement]:
        axis = next((a for a in self.axes if a in free), None)
        if axis is None:
            if placement.fits:
                yield placement
            return
        for extended in self._with_axis(placement, axis, free):
            yield from self._extensions(extended, free - extended.busy - {axis})

    def _with_axis(self, placement: Placement, axis: str, free: Axes) -> Iterator[Placement]:
        """`axis` idle, then everything else that it can do, with free axes only."""
        yield placement
        dims, sums, copies, busy = placement
        for d, dim in enumerate(dims):
            for finer, axes in self._finer_shardings(d, dim, axis):
                if axes <= free:
                    yield Placement((*dims[:d], finer, *dims[d + 1 :]), sums, copies, busy | axes)
        *operands, result = self.endpoints
        for i, operand in enumerate(operands):
            if axis in operand.sums:
                yield Placement(dims, (*sums, (axis, i)), copies, busy | {axis})
        if axis in result.copies:
            yield Placement(dims, sums, (*copies, axis), busy | {axis})

    @remembered
    def _finer_shardings(
        self, d: int, dim: DimSharding, axis: str
    ) -> list[tuple[DimSharding, Axes]]:
        """Dim `d` sharded once more by an axis, each time with the axes that it takes."""
        finer = list[tuple[DimSharding, Axes]]()
        length = self._all_lengths[d]
        mesh = self.result.mesh
        for shard in self._shards[d]:
            for i in range(len(dim.shards) + 1) if axis in shard.axes else ():
                shards = (*dim.shards[:i], shard, *dim.shards[i:])
                if shards in self._given_shards or mesh.size(*axes_of(shards)) <= length:
                    finer.append((self._sharded(d, shards), Axes(shard.axes)))
        return finer

    def _sharded(self, d: int, shards: Shards) -> DimSharding:
        """Dim `d` with these shards."""
        length = self._all_lengths[d]
        known = self.dim_shardings.get((length, shards))
        if known is None:
            dim = Dim("", shards)
            sizes = self.result.mesh.sizes_of(dim.axes)
            rows = block_length(dim, length, sizes)[0]
            fits = misfit(dim, length, sizes) is None
            axes = Axes(dim.axes).intersection(self.axes)
            normal = normal_dim(dim, length, self.result.mesh)
            known = DimSharding(shards, axes, rows, fits, normal.shards)
            self.dim_shardings[length, shards] = known
        return known

    @cached_property
    def _shards(self) -> tuple[Shards, ...]:
        """The shards that each dim may have, from an array or else one axis each, in contiguous blocks."""
        options: dict[str, dict[Shard, None]] = {name: {} for name in self.lengths}
        for array in self.arrays:
            for dim in array.normal.dims:
                options[dim.name] |= dict.fromkeys(dim.shards)
        for shards in options.values():
            odd = {a for s in shards for a in s.axes if s.order != "block" or len(s.axes) > 1}
            shards |= dict.fromkeys(Shard((a,)) for a in self.axes if a not in odd)
        return tuple(map(tuple, options.values()))

    @cached_property
    def _given_shards(self) -> set[Shards]:
        """All shards of a dim in an array: they are possible, however short the dim is."""
        return {dim.shards for array in self.arrays for dim in array.normal.dims}

    @cached_property
    def _all_lengths(self) -> tuple[int, ...]:
        return tuple(self.lengths.values())

    @cached_property
    def endpoints(self) -> tuple[OperandSharding, ...]:
        """The operands as they are given, then the result as it is wanted."""
        endpoints = []
        for (_, positions), array in zip(self._positions, self.arrays, strict=True):
            dims = (
                self._sharded(d, dim.shards)
                for d, dim in zip(positions, array.normal.dims, strict=True)
            )
            tagged = (array.layout.tagged(*kinds) for kinds in (("sum", "mean"), ("copy",)))
            endpoints.append(
                OperandSharding(tuple(dims), *(Axes(a).intersection(self.axes) for a in tagged))
            )
        return tuple(endpoints)

    def places(self, placement: Placement) -> list[tuple[int, Dims, Sums, tuple[str, ...], Axes]]:
        """The operands and the local result, -1, in a placement: their dims, and the roles of other axes."""
        dims = placement.dims
        roles = placement[1:]
        return [
            (i, tuple([dims[d] for d in positions]), *roles) for i, positions in self._positions
        ]

    def local(
        self, i: int, dims: Dims, sums: Sums, copies: Sequence[str], busy: Axes
    ) -> OperandSharding:
        """An operand as it is contracted in such a place; -1 is the local result."""
        others = busy.difference(*[dim.axes for dim in dims])
        if i < 0:
            return OperandSharding(dims, others.difference(copies), Axes(copies))
        own = Axes([axis for axis, owner in sums if owner == i])
        return OperandSharding(dims, own, others - own)

    def move(self, i: int, local: OperandSharding, sums: Sums) -> ArrayMove:
        """The move of operand `i` to where it is contracted; -1 is the result, from there."""
        means = {axis for axis, owner in sums if axis in self.operands[owner].layout.tagged("mean")}
        tags = [
            ("copy", tuple(local.copies)),
            *(("mean" if a in means else "sum", (a,)) for a in local.sums),
        ]
        array = self.arrays[i]
        dims = (
            Dim(name, dim.shards) for name, dim in zip(array.layout.names, local.dims, strict=True)
        )
        layout = Layout(tuple(dims), tuple(tags))
        endpoints = (
            (array.layout, layout) if i >= 0 else (layout, layout if self.stays else array.layout)
        )
        return ArrayMove(*endpoints, array.shape)

    @cached_property
    def _positions(self) -> list[tuple[int, list[int]]]:
        """The number of each array, and the positions of its dims among all dims."""
        names = list(self.lengths)
        numbers = (*range(len(self.operands)), -1)
        return [(i, [names.index(name) for name in self.arrays[i].layout.names]) for i in numbers]

    @cached_property
    def has_means(self) -> bool:
        """Whether an array is a mean: its moves multiply by a constant."""
        return any(array.layout.tagged("mean") for array in self.arrays)

    @cached_property
    def accesses(self) -> tuple[int, ...]:
        """How often each operand, and the local result, is read or written."""
        return accesses([array.layout.names for array in self.arrays])

    def flops(self, placement: Placement) -> int:
        """Floating point operations of the busiest device."""
        has_sum = len(self.result.shape) < len(self.lengths)
        return operations([dim.rows for dim in placement.dims], len(self.operands), has_sum=has_sum)


def operations(lengths: Iterable[int], n_operands: int, *, has_sum: bool) -> int:
    """Floating point operations on a block: the products of several operands, and the additions of sums."""
    return ((n_operands > 1) + has_sum) * math.prod(lengths)


def accesses(arrays: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The dims of operands and result -> how often each array is read or written; a copy is one of both."""
    # A product of matrices takes arrays with the dims that the same arrays have side by side, and the dims of
    # all arrays not last; others are copied, also for a gradient, since its arrays have the same dims.

    def owners(name: str) -> tuple[bool, ...]:
        return tuple(name in dims for dims in arrays)

    counts = []
    for dims in arrays:
        runs = [run for run, _ in groupby(dims, owners)]
        is_matrix = len(set(runs)) == len(runs) and not (len(runs) > 1 and all(runs[-1]))
        counts.append(
            1 if is_matrix or len(arrays) < 3 else 3
        )  # a sum of one operand is not a product
    return tuple(counts)
