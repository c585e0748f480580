"""The search space: layouts as small tuples of numbers, priced without building them.

Decides how a layout in normal form is encoded (`State`), how large its blocks are and what a
move between two states costs. The formulas are those of the steps. Knows no strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xshard import dtypes
from xshard.cost import Profile
from xshard.layout import Layout
from xshard.notation import Dim, Shard
from xshard.ownership import block_length
from xshard.sharding import Cuts, Sharding
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    Traffic,
)
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.exchange import even_traffic
from xshard.steps.gather import gather_traffic
from xshard.steps.permute import permute_traffic
from xshard.steps.reduce import all_reduce_traffic, reduce_scatter_traffic

Cut = tuple[int, ...]  # the cuts of one dim, outermost first, as indices into `Space.shards`


class State(NamedTuple):
    """A layout without copy tags: the cuts of every dim, and the axes that hold addends."""

    cuts: tuple[Cut, ...]
    sums: tuple[int, ...]


class Move(NamedTuple):
    """A step not yet built: its kind, what the kind needs to know, and where it leads."""

    kind: str
    data: tuple[int | Cut, ...]
    after: State


class Price(NamedTuple):
    """What a move costs: seconds, elements received, elements held at its worst moment."""

    seconds: float
    received: int
    held: int


@dataclass(frozen=True)
class Space:
    """The states between two shardings in normal form and without copy tags, and the price of moves.

    Axes are numbered as in the mesh, those of size 1 left out. The first shards are the axes
    themselves, each a contiguous cut; then come the other cuts that the two ends name.
    """

    start: Sharding
    goal: Sharding
    dtype: str
    profile: Profile

    @cached_property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.start.mesh.axes if self.start.mesh.size(a) > 1)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        named = [s for end in (self.start, self.goal) for dim in end.layout.dims for s in dim.shards]
        return tuple(dict.fromkeys([*(Shard((a,)) for a in self.axes), *named]))

    @cached_property
    def shard_axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.axes.index(a) for a in shard.axes) for shard in self.shards)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of parts of every shard; the first are the sizes of the axes."""
        return tuple(self.start.mesh.size(*shard.axes) for shard in self.shards)

    @cached_property
    def op(self) -> str:
        """The one kind of reduction that these layouts know."""
        kinds = [kind for end in (self.start, self.goal) for kind, _ in end.layout.tags]
        return kinds[0] if kinds else "sum"

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        return self.profile.levels(self.start.mesh)

    def state(self, layout: Layout) -> State:
        """A layout of this space -> its state."""
        cuts = tuple(tuple(self.shards.index(s) for s in dim.shards) for dim in layout.dims)
        return State(cuts, tuple(sorted(self.axes.index(a) for a in layout.tagged(self.op))))

    def layout(self, state: State) -> Layout:
        """A state -> its layout."""
        dims = tuple(
            Dim(dim.name, tuple(self.shards[s] for s in cut))
            for dim, cut in zip(self.start.layout.dims, state.cuts, strict=True)
        )
        return Layout(dims, ((self.op, tuple(self.axes[a] for a in state.sums)),))

    def axes_in(self, cut: Iterable[int]) -> tuple[int, ...]:
        return tuple(a for s in cut for a in self.shard_axes[s])

    def free(self, state: State) -> tuple[int, ...]:
        """The axes that hold replicas."""
        used = {a for cut in state.cuts for a in self.axes_in(cut)} | set(state.sums)
        return tuple(a for a in range(len(self.axes)) if a not in used)

    def is_plain(self, cut: Iterable[int]) -> bool:
        """Whether every cut is contiguous, over one axis."""
        return all(s < len(self.axes) for s in cut)

    @cached_property
    def _lengths(self) -> dict[tuple[int, Cut], tuple[int, bool]]:
        return {}

    def length(self, dim: int, cut: Cut) -> tuple[int, bool]:
        """The longest block of a dim under a cut, and whether all are as long."""
        known = self._lengths.get((dim, cut))
        if known is None:
            whole, parts = self.start.shape[dim], math.prod(self.sizes[s] for s in cut)
            if self.is_plain(cut) and whole % parts == 0:
                known = whole // parts, True
            else:
                d = Dim("", tuple(self.shards[s] for s in cut))
                known = block_length(d, whole, self.start.mesh.sizes_of(d.axes))
            self._lengths[dim, cut] = known
        return known

    def is_even(self, dim: int, cut: Cut) -> bool:
        return self.length(dim, cut)[1]

    def block(self, state: State) -> int:
        """Elements of the largest block."""
        known = self._blocks.get(state.cuts)
        if known is None:
            known = math.prod(self.length(d, cut)[0] for d, cut in enumerate(state.cuts))
            self._blocks[state.cuts] = known
        return known

    @cached_property
    def _blocks(self) -> dict[tuple[Cut, ...], int]:
        return {}

    def price(self, move: Move, state: State) -> Price:
        """What a move from a state costs."""
        before, after = self.block(state), self.block(move.after)
        traffic = _TRAFFIC[move.kind](self, move, state, before, after)
        held = before + after + (traffic.copied if traffic.hops else 0)
        seconds = self.profile.seconds(move.kind, traffic, self.itemsize, self.start.mesh)
        return Price(seconds, traffic.received, held)

    def least_received(self, state: State) -> int:
        """Fewest elements that the busiest device must receive on any path from a state to the goal."""
        goal = self.goal_state
        if state.sums != goal.sums:
            return 0
        traffic = self._even_exchange(state, goal) or self._exchange_traffic(state, goal)
        return traffic.received

    def flat_received(self, state: State, after: State) -> int:
        """Elements that an exchange receives, where that is known without looking at devices; else 0."""
        traffic = self._even_exchange(state, after)
        return traffic.received if traffic else 0

    @cached_property
    def goal_state(self) -> State:
        return self.state(self.goal.layout)

    def step(self, move: Move, state: State) -> Step:
        """A move -> the step that it stands for."""
        return _STEPS[move.kind](self, move, state)

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.axes[a] for a in axes)

    def cut_by(self, cut: Iterable[int]) -> tuple[Shard, ...]:
        return tuple(self.shards[s] for s in cut)

    def group(self, axes: Iterable[int]) -> list[tuple[str, int]]:
        """Axes with their sizes, the slowest link first."""
        return [(self.axes[a], self.sizes[a]) for a in sorted(axes, key=lambda a: (self.level(a), a))]

    def level(self, axis: int) -> int:
        """How fast the link of an axis is, 0 for the slowest."""
        return self._level_of[axis]

    @cached_property
    def _level_of(self) -> tuple[int, ...]:
        return tuple(next(i for i, axes in enumerate(self.levels) if a in axes) for a in self.axes)

    def _exchange_traffic(self, state: State, after: State) -> Traffic:
        known = self._exchanges.get((state, after))
        if known is None:
            known = self._exchanges[state, after] = self._new_exchange_traffic(state, after)
        return known

    @cached_property
    def _exchanges(self) -> dict[tuple[State, State], Traffic]:
        return {}

    def _new_exchange_traffic(self, state: State, after: State) -> Traffic:
        traffic = self._even_exchange(state, after) if len(self.levels) < 2 else None
        if traffic is not None:
            return traffic
        before = self.start.with_layout(self.layout(state))
        return Exchange(self.layout(after)).traffic(before, self.levels)

    def _even_exchange(self, state: State, after: State) -> Traffic | None:
        """Traffic of an exchange over one kind of link, where no device has to be looked at."""
        if (state, after) not in self._evens:
            src, dst = self._sized(state), self._sized(after)
            found = None
            if src is not None and dst is not None and not set(after.sums) - set(state.sums):
                addends = [(self.axes[a], self.sizes[a]) for a in state.sums if a not in after.sums]
                found = even_traffic(self.start.shape, src, dst, addends)
            self._evens[state, after] = found
        return self._evens[state, after]

    @cached_property
    def _evens(self) -> dict[tuple[State, State], Traffic | None]:
        return {}

    def _sized(self, state: State) -> Cuts | None:
        """The axes that cut every dim, with sizes; None where a cut is uneven or not contiguous."""
        if state not in self._known_sized:
            even = all(self.is_plain(c) and self.is_even(d, c) for d, c in enumerate(state.cuts))
            self._known_sized[state] = (
                tuple(tuple((self.axes[s], self.sizes[s]) for s in c) for c in state.cuts) if even else None
            )
        return self._known_sized[state]

    @cached_property
    def _known_sized(self) -> dict[State, Cuts | None]:
        return {}

    def roles(self, state: State) -> dict[int, tuple[int, Cut]]:
        """What every cutting axis does: its dim and the cuts down to it."""
        return {
            a: (d, cut[: i + 1])
            for d, cut in enumerate(state.cuts)
            for i, s in enumerate(cut)
            for a in self.shard_axes[s]
        }


def _gathered(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    dim, n = move.data
    assert isinstance(dim, int) and isinstance(n, int)
    cut = state.cuts[dim][-n:]
    return gather_traffic(before, space.group(space.axes_in(cut)), dim == 0 and _in_order(space, cut))


def _all_reduced(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    return all_reduce_traffic(before, space.group(_cut(move.data[0])))


def _reduce_scattered(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    dim, cut = move.data[0], _cut(move.data[1])
    group = space.group(space.axes_in(cut))
    return reduce_scatter_traffic(before, group, dim == 0 and _in_order(space, cut))


def _moved(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    return all_to_all_traffic(before, space.group(space.axes_in(_cut(move.data[3]))))


def _permuted(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    old, new = space.roles(state), space.roles(move.after)
    return permute_traffic(before, space.group(a for a in {**old, **new} if old.get(a) != new.get(a)))


def _exchanged(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    return space._exchange_traffic(state, move.after)


def _local(space: Space, move: Move, state: State, before: int, after: int) -> Traffic:
    return Traffic(copied=after)


def _in_order(space: Space, cut: Cut) -> bool:
    return all(space.shards[s].order == "block" for s in cut)


def _cut(data: int | Cut) -> Cut:
    assert isinstance(data, tuple)
    return data


def _dim(space: Space, index: int | Cut) -> str:
    assert isinstance(index, int)
    return space.start.layout.names[index]


def _suffix(space: Space, state: State, move: Move) -> tuple[Shard, ...]:
    dim, n = move.data[:2]
    assert isinstance(dim, int) and isinstance(n, int)
    return space.cut_by(state.cuts[dim][-n:])


_TRAFFIC: dict[str, Callable[[Space, Move, State, int, int], Traffic]] = {
    "all_gather": _gathered,
    "all_reduce": _all_reduced,
    "reduce_scatter": _reduce_scattered,
    "all_to_all": _moved,
    "permute": _permuted,
    "exchange": _exchanged,
    "slice": _local,
    "embed": _local,
    "mask": _local,
}

# Data of a move by kind:  all_gather, embed: dim, number of cuts.  slice, reduce_scatter: dim, cuts.
# all_to_all: dim, number of cuts, dim, cuts.  all_reduce, mask: axes.  permute, exchange: nothing.
_STEPS: dict[str, Callable[[Space, Move, State], Step]] = {
    "all_gather": lambda s, m, at: AllGather(_dim(s, m.data[0]), _suffix(s, at, m)),
    "all_reduce": lambda s, m, at: AllReduce(s.names(_cut(m.data[0])), s.op),
    "reduce_scatter": lambda s, m, at: ReduceScatter(_dim(s, m.data[0]), s.cut_by(_cut(m.data[1])), s.op),
    "all_to_all": lambda s, m, at: AllToAll(
        _dim(s, m.data[0]), _suffix(s, at, m), _dim(s, m.data[2]), s.cut_by(_cut(m.data[3]))
    ),
    "permute": lambda s, m, at: Permute(s.layout(m.after)),
    "exchange": lambda s, m, at: Exchange(s.layout(m.after)),
    "slice": lambda s, m, at: Slice(_dim(s, m.data[0]), s.cut_by(_cut(m.data[1]))),
    "embed": lambda s, m, at: Embed(_dim(s, m.data[0]), _suffix(s, at, m)),
    "mask": lambda s, m, at: Mask(s.names(_cut(m.data[0]))),
}
