"""The cost of a move of the search, and its step. The formulas are those in `xshard.steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xshard import steps
from xshard.notation.parser import Shard
from xshard.search.states import Cut, Move, Space, State
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.gather import gather_traffic
from xshard.steps.permute import permute_traffic
from xshard.steps.reduce import all_reduce_traffic, reduce_scatter_traffic


class MoveCost(NamedTuple):
    """Cost of a move: seconds, elements received, elements held at its worst moment."""

    seconds: float
    received: int
    held: int


def move_cost(space: Space, move: Move, state: State) -> MoveCost:
    """Cost of a move from a state, cached."""
    key = move.kind, state, move.after
    known: MoveCost | None = space.tables.costs.get(key)
    if known is None:
        before, after = space.block(state), space.block(move.after)
        traffic = TRAFFIC[move.kind](space, move, state, before, after)
        held = before + after + (traffic.copied if traffic.hops else 0)
        seconds = space.fabric.seconds(move.kind, traffic, space.itemsize)
        known = space.tables.costs[key] = MoveCost(seconds, traffic.received, held)
    return known


def step_of(space: Space, move: Move, state: State) -> steps.Step:
    """A move -> the step that it stands for."""
    return STEPS[move.kind](space, move, state)


def _gathered(space: Space, move: Move, state: State, before: int, after: int) -> steps.Traffic:
    dim, n = move.data
    assert isinstance(dim, int) and isinstance(n, int)
    cut = state.cuts[dim][-n:]
    return gather_traffic(before, space.group(space.axes_in(cut)), dim == 0 and _in_order(space, cut))


def _reduce_scattered(space: Space, move: Move, state: State, before: int, after: int) -> steps.Traffic:
    dim, cut = move.data[0], _cut(move.data[1])
    group = space.group(space.axes_in(cut))
    return reduce_scatter_traffic(before, group, dim == 0 and _in_order(space, cut))


def _permuted(space: Space, move: Move, state: State, before: int, after: int) -> steps.Traffic:
    old, new = space.roles(state), space.roles(move.after)
    return permute_traffic(before, space.group(a for a in {**old, **new} if old.get(a) != new.get(a)))


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


TRAFFIC: dict[str, Callable[[Space, Move, State, int, int], steps.Traffic]] = {
    "all_gather": _gathered,
    "all_reduce": lambda s, m, at, before, _: all_reduce_traffic(before, s.group(_cut(m.data[0]))),
    "reduce_scatter": _reduce_scattered,
    "all_to_all": lambda s, m, at, before, _: all_to_all_traffic(before, s.group(s.axes_in(_cut(m.data[3])))),
    "permute": _permuted,
    "exchange": lambda s, m, at, *_: s.exchange_traffic(at, m.after),
    **dict.fromkeys(("slice", "embed", "mask"), lambda s, m, at, _, after: steps.Traffic(copied=after)),
}


# Data of a move by kind:  all_gather, embed: dim, number of shards.  reduce_scatter: dim, shards.
# slice: shards by dim.  all_to_all: dim, number of shards, dim, shards.  all_reduce, mask: axes.
STEPS: dict[str, Callable[[Space, Move, State], steps.Step]] = {
    "all_gather": lambda s, m, at: steps.AllGather(_dim(s, m.data[0]), _suffix(s, at, m)),
    "all_reduce": lambda s, m, at: steps.AllReduce(s.names(_cut(m.data[0])), s.op),
    "reduce_scatter": lambda s, m, _: steps.ReduceScatter(
        _dim(s, m.data[0]), s.cut_by(_cut(m.data[1])), s.op
    ),
    "all_to_all": lambda s, m, at: steps.AllToAll(
        _dim(s, m.data[0]), _suffix(s, at, m), _dim(s, m.data[2]), s.cut_by(_cut(m.data[3]))
    ),
    "permute": lambda s, m, at: steps.Permute(s.layout(m.after)),
    "exchange": lambda s, m, at: s.exchange(s.layout(m.after), s.layout(at)),
    "slice": lambda s, m, at: steps.Slice(
        tuple((_dim(s, d), s.cut_by(_cut(new))) for d, new in enumerate(m.data) if new)
    ),
    "embed": lambda s, m, at: steps.Embed(_dim(s, m.data[0]), _suffix(s, at, m)),
    "mask": lambda s, m, at: steps.Mask(s.names(_cut(m.data[0]))),
}
