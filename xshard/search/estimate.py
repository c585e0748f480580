"""An estimate, not a bound, of the best path: the cheapest of a few fixed paths. It tells what to search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from xshard.search.move_costs import move_cost
from xshard.search.states import Cut, Move, Space, State
from xshard.steps import Traffic
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.gather import gather_traffic
from xshard.steps.permute import permute_traffic
from xshard.steps.reduce import all_reduce_traffic, reduce_scatter_traffic

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
            for on_way, later in _gathered(space, here, goal):
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


def _gathered(space: Space, state: State, goal: State) -> Iterator[tuple[State, float]]:
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
