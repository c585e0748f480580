"""The cost of a move of the search, its step, and an estimate (not a bound) of the best path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xshard import steps
from xshard.notation.parser import Shard
from xshard.search.states import Cut, Move, Space, State
from xshard.steps import Traffic
from xshard.steps.collectives import (
    all_reduce_traffic,
    all_to_all_traffic,
    gather_traffic,
    reduce_scatter_traffic,
)
from xshard.steps.permute import permute_traffic


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


Axes = Sequence[int]


def estimate(space: Space, state: State, goal: State) -> float:
    """Seconds of an exchange, or of one collective for every kind of change, whichever takes fewer."""
    if state == goal:
        return 0.0
    old, new = space.roles(state), space.roles(goal)
    ended = tuple(a for a in state.sums if a not in goal.sums)
    changed = [*ended, *(a for a in {**old, **new} if old.get(a) != new.get(a))]
    slowest = min([space.levels(a)[0] for a in changed], default=0)
    free = set(space.free(goal))
    near = [a for a in space.free(state) if a in free and (ended or space.levels(a)[-1] > slowest)]
    estimates = [_in_turn(space, state, goal, ())]
    if near:
        estimates.append(_in_turn(space, state, goal, near))
    if not set(goal.sums) - set(state.sums):
        for here, seconds in _scattered(space, state, goal, ended):
            estimates.append(seconds + _exchange(space, here, goal))
            for on_way, later in _before_gathers(space, here, goal):
                there = min(_exchange(space, here, on_way), _in_turn(space, here, on_way, ()))
                estimates.append(seconds + there + later)
    dims = range(len(state.cuts))
    if state.sums == goal.sums and all(
        space.length(d, state.cuts[d]) == space.length(d, goal.cuts[d]) for d in dims
    ):
        estimates.append(move_cost(space, Move("permute", (), goal), state).seconds)
    return min(estimates)


def _exchange(space: Space, state: State, goal: State) -> float:
    """Seconds of an exchange to the goal; infinite if its traffic has to be counted per device."""
    if space.even_received(state, goal) is None:
        return math.inf
    return move_cost(space, Move("exchange", (), goal), state).seconds


def _before_gathers(space: Space, state: State, goal: State) -> Iterator[tuple[State, float]]:
    """The goal sharded over axes that are to hold replicas, each with the seconds to gather them."""
    free = space.free(goal)
    for axes in dict.fromkeys((free, tuple(a for a in free if a in space.roles(state)))):
        for d, cut in enumerate(goal.cuts):
            if axes and space.is_even(d, cut + axes):
                on_way = State((*goal.cuts[:d], cut + axes, *goal.cuts[d + 1 :]), goal.sums)
                traffic = gather_traffic(space.block(on_way), space.group(axes), d == 0)
                yield on_way, space.fabric.seconds("all_gather", traffic, space.itemsize)
                break


def _scattered(space: Space, state: State, goal: State, ended: Cut) -> Iterator[tuple[State, float]]:
    """The start, and the state in which the sums that end are scattered over a dim, each with its seconds."""
    new = space.roles(goal)
    yield state, 0.0
    dims = range(len(state.cuts)) if ended else ()
    for d in sorted(dims, key=lambda d: new.get(ended[0], (d,))[0] != d):
        cuts = (*state.cuts[:d], state.cuts[d] + ended, *state.cuts[d + 1 :])
        if space.is_even(d, cuts[d]):
            after = State(cuts, tuple(a for a in state.sums if a not in ended))
            yield after, move_cost(space, Move("reduce_scatter", (d, ended), after), state).seconds
            return


def _in_turn(space: Space, state: State, goal: State, near: Axes) -> float:
    """Seconds of a slice, reduction, move and gather; `near` replicas take shares in between."""
    old, new = space.roles(state), space.roles(goal)
    ended = [a for a in state.sums if a not in goal.sums]
    cut = [a for a in ended if a in new]
    sliced = [a for a in new if a not in old and a not in state.sums]
    moved = [a for a in new if a in old and old[a] != new[a]]
    gathered = [a for a in old if a not in new and a not in goal.sums]
    # A shard in place comes inside of all that the dim keeps; others have to change places afterwards.
    moved += [a for a in sliced if goal.cuts[d := new[a][0]][: len(state.cuts[d])] != state.cuts[d]]
    block, seconds, price = space.block(state), 0.0, space.fabric.seconds
    if sliced or near:
        block = max(1, block // _parts(space, [*sliced, *near]))
        seconds += price("slice", Traffic(copied=block), space.itemsize)
    if ended and (cut or near or gathered):
        group, first = space.group(ended), all(new.get(a, (0,))[0] == 0 for a in ended)
        seconds += price("reduce_scatter", reduce_scatter_traffic(block, group, first), space.itemsize)
        block = max(1, block // _parts(space, ended))
        gathered += [a for a in ended if a not in new]
    elif ended:
        seconds += price("all_reduce", all_reduce_traffic(block, space.group(ended)), space.itemsize)
    if moved:
        group = space.group(moved)
        ways = [price("all_to_all", all_to_all_traffic(block, group), space.itemsize)]
        if block * _parts(space, moved) <= max(space.block(state), space.block(goal)):
            whole = price("all_gather", gather_traffic(block, group, in_place=False), space.itemsize)
            ways.append(whole + price("slice", Traffic(copied=block), space.itemsize))
        if _permutes(
            space, state, goal, _parts(space, [*sliced, *near, *ended]), _parts(space, [*gathered, *near])
        ):
            ways.append(price("permute", permute_traffic(block, group), space.itemsize))
        seconds += min(ways)
    if gathered or near:
        group = space.group([*gathered, *near])
        first = all(old.get(a, (0,))[0] == 0 for a in gathered)
        seconds += price("all_gather", gather_traffic(block, group, first), space.itemsize)
    return seconds


def _permutes(space: Space, state: State, goal: State, slices: int, gathers: int) -> bool:
    """Whether so many more parts at the start, and at the goal, can make all blocks as long as each other."""
    before, after = ([_parts(space, cut) for cut in end.cuts] for end in (state, goal))
    common = list(map(math.lcm, before, after))
    most = math.prod(common)
    return most <= math.prod(before) * slices and most <= math.prod(after) * gathers


def _parts(space: Space, axes: Axes) -> int:
    return math.prod([space.sizes[a] for a in axes])
