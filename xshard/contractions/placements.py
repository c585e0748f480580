"""The placements of a contraction: the role of every mesh axis while devices contract their blocks.

An axis shards a dim, holds partial sums of an operand, holds copies of which each device uses its own, or is
idle: then the devices along it are replicas, which repeat the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from typing import NamedTuple

from xshard.layout import Layout, Sharding
from xshard.layout.partition import block_length, find_misfit
from xshard.layout.sharding import normal_dim
from xshard.notation.parser import Dim, Shard
from xshard.search.states import cached_method, replaced, without
from xshard.steps.base import axes_of

# With more placements, searches climb from the arrays' own placements, one change at a time.
MAX_PLACEMENTS = 5000
RESULT = -1  # the index of the result among the arrays of a contraction: it is the last
Axes = frozenset[str]
Shards = tuple[Shard, ...]
Sums = tuple[tuple[str, int], ...]  # axes, each with the operand that has partial sums along it


@dataclass(frozen=True, eq=False)
class DimSharding:
    """How a dim is sharded. Equal shardings are one object: placements are compared by identity."""

    shards: Shards  # outermost first
    axes: Axes
    block_rows: int  # of the longest block
    is_possible: bool  # whether a dim of that length can be so
    normal_shards: Shards  # the simplest with the same blocks


Dims = tuple[DimSharding, ...]


class Placement(NamedTuple):
    """What each mesh axis does while blocks are contracted.

    An axis shards a dim, or holds partial sums of one operand, or holds copies of all operands; an
    axis that does none of these is idle, and its devices repeat the work.

    Attributes:
        dims: How each dim of the contraction is sharded, in the order of `EinsumShardings.lengths`.
        sums: The axes with partial sums of an operand: (axis, index of the operand).
        copies: The axes along which each device uses its own copy of all operands.
        active_axes: The axes that are not idle.
    """

    dims: Dims
    sums: Sums
    copies: tuple[str, ...]
    active_axes: Axes

    @property
    def fits(self) -> bool:
        """Whether every dim can be sharded so."""
        return all(dim.is_possible for dim in self.dims)

    @classmethod
    def of(cls, dims: Dims, sums: Sums = (), copies: tuple[str, ...] = ()) -> Placement:
        """Build a placement, and find which of its axes are active."""
        active_axes = Axes(copies).union([axis for axis, _ in sums], *[dim.axes for dim in dims])
        return cls(dims, sums, copies, active_axes)


class PlacedArray(NamedTuple):
    """One array in a placement: an operand as it is contracted, or the local result, index `RESULT`."""

    array_index: int
    dims: Dims  # of this array
    placement: Placement


class OperandSharding(NamedTuple):
    """How an array is sharded: its dims, and the axes that hold its partial sums and its copies."""

    dims: Dims  # in the order of the array's names
    sums: Axes  # partial sums, and the addends of a mean
    copies: Axes


class ArrayMove(NamedTuple):
    """A move of an array, of a global shape, from one layout to another."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    @property
    def dual(self) -> ArrayMove:
        """The move of the gradient."""
        return ArrayMove(self.dst.dual, self.src.dual, self.shape)


def dim_lengths(operands: Iterable[Layout], shapes: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return the length of every dim by name, in the order of the operands."""
    lengths: dict[str, int] = {}
    for layout, shape in zip(operands, shapes, strict=True):
        lengths.update(zip(layout.names, shape, strict=True))
    return lengths


@dataclass(frozen=True, repr=False)
class EinsumShardings:
    """The operands of a contraction as given, and the result as wanted; enumerates placements."""

    operands: tuple[Sharding, ...]
    result: Sharding
    # The shardings of dims met so far, by length and shards. Contractions share them, since a placement
    # of one is compared with a placement of another by the identity of its dims.
    dim_shardings: dict[tuple[int, Shards], DimSharding] = field(
        default_factory=dict, compare=False
    )
    stays: bool = False  # the result stays as devices compute it: another contraction takes it

    @cached_property
    def arrays(self) -> tuple[Sharding, ...]:
        """The operands, then the result."""
        return (*self.operands, self.result)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of every dim, in the order of the operands."""
        layouts = [operand.layout for operand in self.operands]
        return dim_lengths(layouts, [operand.shape for operand in self.operands])

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device."""
        return self.result.mesh.long_axes

    @cached_property
    def idle(self) -> Placement:
        """The placement in which every device contracts the whole arrays."""
        return self._sharded_by({})

    def _sharded_by(self, shards: Mapping[str, Shards]) -> Placement:
        """Return the placement in which dims have these shards by name, and all others have none."""
        dims = [
            self._dim(dim_index, shards.get(name, ()))
            for dim_index, name in enumerate(self.lengths)
        ]
        return Placement.of(tuple(dims))

    @cached_property
    def placements(self) -> list[Placement]:
        """All placements, each once; of more than `MAX_PLACEMENTS`, one more than that."""
        # One more than the limit tells that there are too many, without counting them all.
        placements = self._extensions(self.idle, Axes(self.axes))
        return list(islice(placements, MAX_PLACEMENTS + 1))

    def neighbors(self, placement: Placement) -> Iterator[Placement]:
        """Iterate over the placements that differ from this one in what one mesh axis does.

        A placement says what each axis does while blocks are contracted. From "dp shards b, tp
        idle" for example: dp idle, dp shards c, tp shards b or c. An axis that shares a shard with
        others, as in `b/(dp tp)`, changes together with them. Placements whose blocks cannot be cut
        so, since a dim is too short or not divisible, are left out.
        """
        for axis in self.axes:
            # Take the axis out of all that it does, and let it do everything else that it can.
            dims = []
            for dim_index, dim in enumerate(placement.dims):
                other_shards = tuple([shard for shard in dim.shards if axis not in shard.axes])
                dims.append(self._dim(dim_index, other_shards))
            sums = tuple([(sum_axis, i) for sum_axis, i in placement.sums if sum_axis != axis])
            copies = without(placement.copies, (axis,))
            without_axis = Placement.of(tuple(dims), sums, copies)
            idle_axes = Axes(self.axes) - without_axis.active_axes
            for neighbor in self._with_role(without_axis, axis, idle_axes):
                if neighbor.fits:
                    yield neighbor

    def seeds(self) -> Iterator[Placement]:
        """Iterate over the idle placement, then those that each operand, and the result, already has."""
        yield self.idle
        for array in self.arrays:
            yield self._sharded_by({dim.name: dim.shards for dim in array.normal_layout.dims})

    def _extensions(self, placement: Placement, idle_axes: Axes) -> Iterator[Placement]:
        """Give each idle axis a role, one after the other, in all ways that fit."""
        for axis in self.axes:  # in one order, so that no placement comes twice
            if axis in idle_axes:
                for extended in self._with_role(placement, axis, idle_axes):
                    yield from self._extensions(extended, idle_axes - extended.active_axes - {axis})
                return
        if placement.fits:
            yield placement

    def _with_role(self, placement: Placement, axis: str, idle_axes: Axes) -> Iterator[Placement]:
        """Iterate over the placements in which one mesh axis, idle so far, has a role.

        It stays idle; or it shards a dim; or partial sums of one operand along it stay unreduced;
        or each device along it uses its own copy of all operands. For tp and `b s, s f` all
        unsharded: idle, b/tp, s/tp, f/tp.

        idle_axes: of the placement. A shard over several axes, as (dp tp), needs all of them.
        """
        yield placement  # the axis stays idle
        dims, sums, copies, active_axes = placement
        for dim_index, dim in enumerate(dims):
            # `added_axes` are those of the shard: this axis and any that it shares the shard with.
            for finer_dim, added_axes in self._finer_shardings(dim_index, dim, axis):
                if added_axes <= idle_axes:
                    yield Placement(
                        replaced(dims, dim_index, finer_dim),
                        sums=sums,
                        copies=copies,
                        active_axes=active_axes | added_axes,
                    )
        *operands, result = self.endpoints
        for i, operand in enumerate(operands):
            # An operand given as partial sums need not be reduced first: a contraction is linear in
            # each operand, so that its results are partial sums, too.
            if axis in operand.sums:
                yield Placement(
                    dims,
                    sums=(*sums, (axis, i)),
                    copies=copies,
                    active_axes=active_axes | {axis},
                )
        # Copies of all operands give copies of the result, not replicas: only if that is wanted.
        if axis in result.copies:
            yield Placement(
                dims,
                sums=sums,
                copies=(*copies, axis),
                active_axes=active_axes | {axis},
            )

    @cached_method
    def _finer_shardings(
        self, dim_index: int, dim: DimSharding, axis: str
    ) -> list[tuple[DimSharding, Axes]]:
        """Shard a dim once more over one mesh axis, in all ways: `b/dp` -> `b/tp/dp`, `b/dp/tp`.

        dim_index: in the contraction. dim: how it is sharded so far. Returns each
        finer sharding with the mesh axes that were added: {tp}, or more for a shard over several
        axes. Results are cached, since many placements have the same shardings of dims.
        """
        finer_shardings: list[tuple[DimSharding, Axes]] = []
        length = self._all_lengths[dim_index]
        mesh = self.result.mesh
        for shard in self._shards[dim_index]:
            if axis not in shard.axes:
                continue
            # At each level, since the order of nested shards counts.
            for level in range(len(dim.shards) + 1):
                shards = (*dim.shards[:level], shard, *dim.shards[level:])
                # A short dim is sharded no further, unless an array is given so: then it is free.
                has_rows_for_all = mesh.size(*axes_of(shards)) <= length
                if has_rows_for_all or shards in self._array_shards:
                    finer_shardings.append((self._dim(dim_index, shards), Axes(shard.axes)))
        return finer_shardings

    def _dim(self, dim_index: int, shards: Shards) -> DimSharding:
        """Return the sharding of a dim by some shards, with its longest block and whether it fits.

        A dim of 10 rows by (dp,) on 4 devices: blocks of 3, 3, 3 and 1 rows, so `block_rows` is 3.
        Equal lengths and shards give the same object: placements are compared by identity.

        dim_index: of the dim whose length is looked up. shards: outermost first; () for none.
        """
        length = self._all_lengths[dim_index]
        sharding = self.dim_shardings.get((length, shards))
        if sharding is None:
            dim = Dim("", shards)  # without a name: dims of one length share what is found
            mesh = self.result.mesh
            sizes = mesh.sizes_of(dim.axes)
            sharding = DimSharding(
                shards,
                axes=Axes(dim.axes).intersection(self.axes),  # an axis of one device does nothing
                block_rows=block_length(dim, length, sizes).longest,
                is_possible=find_misfit(dim, length, sizes) is None,
                normal_shards=normal_dim(dim, length, mesh).shards,
            )
            self.dim_shardings[length, shards] = sharding
        return sharding

    @cached_property
    def _shards(self) -> tuple[Shards, ...]:
        """The shards to try for each dim."""
        return tuple(map(self._shards_to_try, self.lengths))

    def _shards_to_try(self, name: str) -> Shards:
        """Return the shards to try for a dim: those that an array has, and blocks over each mesh axis.

        For the operand `b/zigzag(cp) d` on axes cp and tp: zigzag(cp) and tp for b, cp and tp for d.
        """
        array_shards: dict[Shard, None] = {}  # an ordered set
        for dim in self._array_dims:
            if dim.name == name:
                array_shards |= dict.fromkeys(dim.shards)
        # If an array shards this dim over an axis in another order than blocks (zigzag, cyclic), or
        # over several axes in one shard, then the axis is tried in just that way, and not in
        # contiguous blocks as well. That keeps placements few.
        specially_ordered: set[str] = set()
        for shard in array_shards:
            if shard.order != "block" or len(shard.axes) > 1:
                specially_ordered.update(shard.axes)
        block_shards = dict.fromkeys(
            Shard((axis,)) for axis in self.axes if axis not in specially_ordered
        )
        return tuple(array_shards | block_shards)

    @cached_property
    def _array_shards(self) -> set[Shards]:
        """All shards of a dim in an array: they are possible, however short the dim is."""
        return {dim.shards for dim in self._array_dims}

    @cached_property
    def _array_dims(self) -> list[Dim]:
        """The dims of all arrays, as they are given or wanted."""
        return [*chain.from_iterable(array.normal_layout.dims for array in self.arrays)]

    @cached_property
    def _all_lengths(self) -> tuple[int, ...]:
        return tuple(self.lengths.values())

    @cached_property
    def endpoints(self) -> tuple[OperandSharding, ...]:
        """The operands as they are given, then the result as it is wanted."""
        endpoints = []
        for (_, positions), array in zip(self._positions, self.arrays, strict=True):
            dims = []
            for dim_index, dim in zip(positions, array.normal_layout.dims, strict=True):
                dims.append(self._dim(dim_index, dim.shards))
            sums = Axes(array.layout.tagged("sum", "mean")).intersection(self.axes)
            copies = Axes(array.layout.tagged("copy")).intersection(self.axes)
            endpoints.append(OperandSharding(tuple(dims), sums, copies))
        return tuple(endpoints)

    def placed_arrays(self, placement: Placement) -> list[PlacedArray]:
        """Return each operand, and the local result, in a placement."""
        dims = placement.dims  # hot: called for each placement that is weighed
        placed_arrays = []
        for array_index, positions in self._positions:
            dims_of_array = tuple([dims[dim_index] for dim_index in positions])
            placed_arrays.append(PlacedArray(array_index, dims_of_array, placement))
        return placed_arrays

    def local(self, placed: PlacedArray) -> OperandSharding:
        """Return how an array is sharded where it is contracted; the result, as devices compute it."""
        array_index, dims, placement = placed  # hot: called for each array of each placement
        other_active_axes = placement.active_axes.difference(*[dim.axes for dim in dims])
        if array_index == RESULT:
            # What axes do that shard none of its dims gives addends, but for those that hold copies.
            return OperandSharding(
                dims,
                sums=other_active_axes.difference(placement.copies),
                copies=Axes(placement.copies),
            )
        sums = Axes([axis for axis, operand in placement.sums if operand == array_index])
        return OperandSharding(dims, sums=sums, copies=other_active_axes - sums)

    def move(self, placed: PlacedArray, local: OperandSharding) -> ArrayMove:
        """Return the redistribution of an operand before a contraction, or of the result after it.

        For example, an operand `d f/tp` that each device along `tp` needs in full moves
        `d f/tp -> d f | copy(tp)`.

        placed: which array it is, and the placement in which devices contract. local: how the array
        is sharded in that placement (`self.local(placed)`). A result that another contraction takes
        (`stays`) moves nowhere: both ends are the same.
        """
        # Axes along which some operand is tagged `mean`: partial results along them are averaged,
        # not added.
        means: set[str] = set()
        for axis, operand in placed.placement.sums:
            if axis in self.operands[operand].layout.tagged("mean"):
                means.add(axis)
        # In any order: a layout sorts its tags.
        tags = [("copy", local.copies), ("mean", local.sums & means), ("sum", local.sums - means)]
        array = self.arrays[placed.array_index]
        named_dims = zip(array.layout.names, local.dims, strict=True)
        dims = tuple(Dim(name, dim.shards) for name, dim in named_dims)
        layout = Layout(dims, tuple((tag, tuple(axes)) for tag, axes in tags))
        if placed.array_index != RESULT:
            return ArrayMove(array.layout, layout, array.shape)
        if self.stays:
            return ArrayMove(layout, layout, array.shape)
        return ArrayMove(layout, array.layout, array.shape)

    def dual_move(self, placed: PlacedArray, local: OperandSharding) -> ArrayMove:
        """Return the redistribution of the gradient of an array."""
        return self.move(placed, local).dual

    @cached_property
    def _positions(self) -> list[tuple[int, list[int]]]:
        """The index of each array, and the positions of its dims among all dims.

        `b d, d f -> b f` with all dims (b, d, f): (0, [0, 1]), (1, [1, 2]), (RESULT, [0, 2]).
        """
        names = list(self.lengths)
        positions = []
        for array_index in (*range(len(self.operands)), RESULT):
            layout = self.arrays[array_index].layout
            positions.append((array_index, [names.index(name) for name in layout.names]))
        return positions

    @cached_property
    def has_means(self) -> bool:
        """Whether an array is a mean: its moves multiply by a constant."""
        return any(array.layout.tagged("mean") for array in self.arrays)

    @cached_property
    def accesses(self) -> tuple[int, ...]:
        """How often each operand, and the local result, is read or written."""
        return accesses([array.layout.names for array in self.arrays])

    def flops(self, placement: Placement) -> int:
        """Return the floating point operations of the busiest device."""
        has_sum = len(self.result.shape) < len(self.lengths)  # the result lacks a dim
        block = [dim.block_rows for dim in placement.dims]
        return operations(block, len(self.operands), has_sum=has_sum)


def operations(lengths: Iterable[int], n_operands: int, *, has_sum: bool) -> int:
    """Return the floating point operations of a contraction with dims of these lengths.

    A product of several operands is one for each element, and an addition to a sum is another:
    2 * m * n * k for a product of matrices.
    """
    n_products = 1 if n_operands > 1 else 0
    n_additions = 1 if has_sum else 0
    return (n_products + n_additions) * math.prod(lengths)


def accesses(arrays: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Count how often a contraction reads or writes each array: 1, or 3 if it is copied first.

    A contraction runs as a product of matrices, for each index of a batch. It takes an array as it is
    if its dims fall into those of a matrix, and perhaps of a batch before them:

    - `b s d, d f -> b s f`: b and s, in the same arrays, are the rows of one matrix: (1, 1, 1).
    - `b d s, d f -> b s f`: d lies between b and s. A transposed copy of this operand is read and
      written beside the operand itself: (3, 1, 1).

    A gradient is a contraction of the same arrays in other roles, with the same counts.

    arrays: the names of the dims of each operand, then of the result.
    """
    if len(arrays) < 3:  # a sum of one operand is no product
        return (1,) * len(arrays)
    return tuple(1 if _is_matrix(dims, arrays) else 3 for dims in arrays)


def _is_matrix(dims: Sequence[str], arrays: Sequence[Sequence[str]]) -> bool:
    """Tell whether a product of matrices takes an array with these dims without a copy.

    Dims that occur in the same arrays are one dim of the matrices: rows, columns or batch. They have
    to lie side by side, and the batch, which is in all arrays, must not come last: the last dim of a
    matrix in memory is its rows or its columns.
    """

    def arrays_with(dim: str) -> tuple[int, ...]:
        return tuple(i for i, dims_of_array in enumerate(arrays) if dim in dims_of_array)

    # A matrix dim is told by the arrays that have it: in `b s d, d f -> b s f`, the dims of the first
    # operand are b, s: (0, 2), of the first and the result, and d: (0, 1), of the first two.
    matrix_dims = [array_indices for array_indices, _ in groupby(dims, arrays_with)]
    is_side_by_side = len(set(matrix_dims)) == len(matrix_dims)  # none occurs a second time
    has_batch_last = len(matrix_dims) > 1 and len(matrix_dims[-1]) == len(arrays)
    return is_side_by_side and not has_batch_last
