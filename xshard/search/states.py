"""States: the layouts of arrays of one shape on one mesh, as small tuples of numbers.

A search compares and hashes layouts by the hundred thousand. So each shard gets a number, and a
layout becomes a `State`, a tuple of tuples of numbers. `States` numbers the shards, and knows how
many rows and elements blocks have. It knows nothing of links or of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from threading import Lock
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.partition import BlockLength, block_length, find_misfit
from xshard.notation.parser import Dim, Shard

Cut = tuple[int, ...]  # the shards of one dim, outermost first, as numbers
Cuts = tuple[Cut, ...]  # of all dims
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class State(NamedTuple):
    """A layout without copy tags: the shards of each dim, and the axes that hold addends.

    Shards and axes are numbers. On a mesh dp=2, cp=4 axis dp is number 0, and cp is number 1. A
    contiguous shard over one axis has the number of its axis. Others get the next free number as
    they come, here zigzag(cp) the number 2:

        b s/cp c           State(cuts=((), (1,), ()), sums=())
        b s c/cp           State(cuts=((), (), (1,)), sums=())
        b/dp s/zigzag(cp)  State(cuts=((0,), (2,)), sums=())
        b/dp s | sum(cp)   State(cuts=((0,), ()), sums=(1,))
    """

    cuts: Cuts
    sums: tuple[int, ...]

    def with_cut(self, dim_index: int, cut: Cut) -> State:
        """Return the state with other shards of one dim."""
        return State(replaced(self.cuts, dim_index, cut), self.sums)

    def with_inner(self, dim_index: int, shards: Cut) -> State:
        """Return the state with more shards of one dim, inside of those that it has."""
        return self.with_cut(dim_index, self.cuts[dim_index] + shards)

    def without_inner(self, dim_index: int, shards: Cut) -> State:
        """Return the state without some innermost shards of one dim."""
        return self.with_cut(dim_index, self.cuts[dim_index][: -len(shards)])

    def with_inner_cuts(self, inner_cuts: Cuts) -> State:
        """Return the state with more shards of every dim, inside of those that it has."""
        return State(add_inner_cuts(self.cuts, inner_cuts), self.sums)

    def with_sums(self, axes: Iterable[int]) -> State:
        """Return the state with addends along more axes."""
        return State(self.cuts, tuple(sorted((*self.sums, *axes))))

    def without_sums(self, axes: Container[int]) -> State:
        """Return the state without addends along some axes."""
        return State(self.cuts, without(self.sums, axes))


def replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Replace one item of a tuple: (4, 5, 6), 1, 9 -> (4, 9, 6)."""
    return (*items[:index], item, *items[index + 1 :])


def common(items: Iterable[T], members: Container[object]) -> tuple[T, ...]:
    """List the items that are members of a second collection, in order: (2, 1, 0), {0, 2} -> (2, 0)."""
    return tuple([item for item in items if item in members])


def without(items: Iterable[T], excluded: Container[object]) -> tuple[T, ...]:
    """List the items that are not excluded, in their order: (2, 1, 0) without {0, 2} -> (1,)."""
    return tuple([item for item in items if item not in excluded])


def add_inner_cuts(cuts: Cuts, inner_cuts: Cuts) -> Cuts:
    """Add innermost shards to each dim: ((0,), ()) and ((), (1,)) -> ((0,), (1,))."""
    return tuple(map(tuple.__add__, cuts, inner_cuts))


def common_prefix(first_cut: Cut, second_cut: Cut) -> Cut:
    """Return the leading shards that two cuts share: (0, 2, 1) and (0, 1) -> (0,)."""
    n_shared = 0
    for first_shard, second_shard in zip(first_cut, second_cut, strict=False):
        if first_shard != second_shard:
            break
        n_shared += 1
    return first_cut[:n_shared]


def starts_with(cut: Cut, beginning: Cut) -> bool:
    """Check that the outermost shards of a dim are these: (0, 2, 1) starts with (0, 2)."""
    return cut[: len(beginning)] == beginning


class AxisRole(NamedTuple):
    """What an axis shards: a dim, and the shards of the dim from the outermost down to the axis."""

    dim: int
    cut: Cut


class cached_method(Generic[P, R]):  # noqa: N801, a decorator
    """A method that an object computes once for each tuple of arguments.

    The cache belongs to the object and dies with it, where `functools.cache` would keep the object.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self.method = method

    def __get__(self, owner: Any, _: type) -> Callable[P, R]:
        """Put a cache in the object's own dict, where later look-ups find it first."""
        cached = cache(partial(self.method, owner))
        owner.__dict__[self.method.__name__] = cached
        return cached  # type: ignore[return-value]  # typeshed's cache takes any hashable


@dataclass(frozen=True, eq=False)
class States:
    """The states of arrays of one shape on one mesh, and the numbers of the shards that they name.

    shards: by number; the first are the mesh's own axes.
    shard_axes: by number, the axes of each shard.
    sizes: by number, into how many parts each shard cuts.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    shards: list[Shard] = field(default_factory=list, init=False)
    shard_axes: list[tuple[int, ...]] = field(default_factory=list, init=False)
    sizes: list[int] = field(default_factory=list, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)  # threads share the planner's caches

    def __post_init__(self) -> None:
        for axis in self.axes:
            self.shard_number(Shard((axis,)))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes by number, without axes of size 1."""
        return self.mesh.long_axes

    @cached_method
    def shard_number(self, shard: Shard) -> int:
        """Return the number of a shard, the same as long as this object lives."""
        with self._lock:
            if shard not in self.shards:
                self.shard_axes.append(tuple(map(self.axes.index, shard.axes)))
                self.sizes.append(self.mesh.size(*shard.axes))
                self.shards.append(shard)
            return self.shards.index(shard)

    def state(self, shards: Iterable[Iterable[Shard]], sums: Iterable[str]) -> State:
        """Make a state from the shards of each dim, and the names of the axes that hold addends."""
        cuts = [tuple(map(self.shard_number, dim_shards)) for dim_shards in shards]
        return State(tuple(cuts), tuple(sorted(map(self.axes.index, sums))))

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        """Return the names of numbered axes."""
        return tuple(self.axes[axis] for axis in axes)

    def shards_of(self, cut: Iterable[int]) -> tuple[Shard, ...]:
        """Return the shards with these numbers."""
        return tuple(self.shards[shard] for shard in cut)

    def axes_in(self, cut: Iterable[int]) -> tuple[int, ...]:
        """Return the axes of some shards, outermost first."""
        return tuple(chain.from_iterable([self.shard_axes[shard] for shard in cut]))

    def count_parts(self, cut: Iterable[int]) -> int:
        """Return the number of parts into which shards, or axes, cut together."""
        return math.prod([self.sizes[shard] for shard in cut])

    def is_plain(self, cut: Iterable[int]) -> bool:
        """Check that each shard is contiguous over one axis; these have the lowest numbers."""
        return max(cut, default=0) < len(self.axes)

    @cached_method
    def replica_axes(self, state: State) -> tuple[int, ...]:
        """List the axes that hold replicas."""
        used_axes = (*state.sums, *self.axes_in(chain.from_iterable(state.cuts)))
        return without(range(len(self.axes)), used_axes)

    @cached_method
    def length(self, dim_index: int, cut: Cut) -> BlockLength:
        """Measure the blocks of a dim under its shards: 10 rows over 4 -> 3, not even."""
        n_rows = self.shape[dim_index]
        n_parts = self.count_parts(cut)
        if self.is_plain(cut) and n_rows % n_parts == 0:
            return BlockLength(n_rows // n_parts, is_even=True)
        dim = Dim("", self.shards_of(cut))
        sizes = self.mesh.sizes_of(dim.axes)
        longest, is_even = block_length(dim, n_rows, sizes)
        # Documents and segments inside another shard would have other lengths: no step leads there.
        return BlockLength(longest, is_even and find_misfit(dim, n_rows, sizes) is None)

    def is_even(self, dim_index: int, cut: Cut) -> bool:
        """Check that all blocks of a dim under its shards are equally long."""
        return self.length(dim_index, cut).is_even

    @cached_method
    def lengths(self, state: State) -> tuple[BlockLength, ...]:
        """Measure the blocks of each dim."""
        return tuple([self.length(dim_index, cut) for dim_index, cut in enumerate(state.cuts)])

    @cached_method
    def block_elements(self, state: State) -> int:
        """Return the elements of the largest block."""
        return math.prod([length.longest for length in self.lengths(state)])

    @cached_method
    def is_regular(self, state: State) -> bool:
        """Check that all shards are even, contiguous and over one axis each."""
        are_even = all(length.is_even for length in self.lengths(state))
        return are_even and all(map(self.is_plain, state.cuts))

    @cached_method
    def roles(self, state: State) -> dict[int, AxisRole]:
        """Map each axis that shards to its role: the dim, and its shards down to the axis."""
        roles: dict[int, AxisRole] = {}
        for dim_index, cut in enumerate(state.cuts):
            for level, shard in enumerate(cut):
                role = AxisRole(dim_index, cut[: level + 1])
                for axis in self.shard_axes[shard]:
                    roles[axis] = role
        return roles

    @cached_method
    def changing(self, state: State, next_state: State) -> list[int]:
        """List the axes that shard something else, or elsewhere, in the next state."""
        roles = self.roles(state)
        new_roles = self.roles(next_state)
        return [axis for axis in {**roles, **new_roles} if roles.get(axis) != new_roles.get(axis)]

    def ended(self, state: State, next_state: State) -> tuple[int, ...]:
        """List the axes along which a sum ends; with both states exchanged, those where one begins."""
        return without(state.sums, next_state.sums)

    @cached_method
    def sharding(self, state: State) -> Sharding:
        """Return a state as a sharding; its dims have numbers for names."""
        names = map(str, range(len(self.shape)))
        return Sharding(self.layout(state, names, "sum"), self.mesh, self.shape)

    def layout(self, state: State, names: Iterable[str], op: str) -> Layout:
        """Return a state as a layout, with these names of dims and this kind of reduction."""
        named_cuts = zip(names, state.cuts, strict=True)
        dims = tuple([Dim(name, self.shards_of(cut)) for name, cut in named_cuts])
        return Layout(dims, ((op, self.names(state.sums)),))
