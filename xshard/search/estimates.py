"""Estimates of the seconds between two states, without a search.

A contraction compares thousands of pairs of states. An estimate tries a few paths of a fixed form,
and is close to the search where one of them is the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xshard.search.grid import Grid
from xshard.search.moves import Move, move_cost
from xshard.search.states import Cut, State
from xshard.steps import Traffic


class Leg(NamedTuple):
    """The first or last part of a path: the state where it meets the rest, and its seconds."""

    state: State
    seconds: float


def estimate(grid: Grid, state: State, goal: State) -> float:
    """Estimate the seconds between two states: the price of the cheapest of a few paths.

    The paths tried are:

    - one collective for each kind of change, in a fixed order;
    - the same, with shares of what moves on axes that hold replicas on both sides (`spare`);
    - one exchange, also with a reduce-scatter before it or an all-gather after it;
    - one permutation of whole blocks.
    """
    if state == goal:
        return 0.0
    # Spare replicas may take shares of what moves: with them, less crosses slow links.
    spare = grid.spare(state, goal, grid.changing(state, goal))
    least = _collectives_in_turn(grid, state, goal, ())
    if spare:
        least = min(least, _collectives_in_turn(grid, state, goal, spare))
    # An exchange that begins a sum is not priced: it would have to be counted per device.
    if not set(goal.sums) - set(state.sums):
        for reduced in _reduced_first(grid, state, goal):
            least = _with_exchange(grid, reduced, goal, least)
    if state.sums == goal.sums and _has_equal_lengths(grid, state, goal):
        least = min(least, move_cost(grid, Move("permute", (), goal), state).seconds)
    return least


def _has_equal_lengths(grid: Grid, state: State, goal: State) -> bool:
    """Check that the blocks of each dim are equally long on both sides: they may be permuted."""
    for d, (cut, goal_cut) in enumerate(zip(state.cuts, goal.cuts, strict=True)):
        if grid.length(d, cut) != grid.length(d, goal_cut):
            return False
    return True


def _with_exchange(grid: Grid, first: Leg, goal: State, least: float) -> float:
    """Return the fewest seconds of the paths with an exchange that begin with `first`.

    They lead from `first` to the goal directly, or to a state from which gathers lead there.

    Args:
        grid: The grid of the states.
        first: The state from which the exchange starts, and the seconds to get there.
        goal: The state at the end.
        least: The seconds of the best path so far: the result if none here takes fewer.
    """
    exchange_s = _exchange_seconds(grid, first.state, goal, least - first.seconds)
    least = min(least, first.seconds + exchange_s)
    for last in _before_gathers(grid, first.state, goal):
        below = least - first.seconds - last.seconds  # what is left for the middle of the path
        if below <= 0:
            continue
        by_exchange = _exchange_seconds(grid, first.state, last.state, below)
        by_collectives = _collectives_in_turn(grid, first.state, last.state, ())
        seconds = min(by_exchange, by_collectives)
        least = min(least, first.seconds + seconds + last.seconds)
    return least


def _exchange_seconds(grid: Grid, state: State, goal: State, below: float) -> float:
    """Price an exchange to the goal; infinite if not below a limit, or to be counted per device."""
    if grid.least_exchange(state, goal) >= below or grid.even_received(state, goal) is None:
        return math.inf
    return move_cost(grid, Move("exchange", (), goal), state).seconds


def _before_gathers(grid: Grid, state: State, goal: State) -> Iterator[Leg]:
    """Yield the goal sharded over axes that are to hold replicas, and the seconds to gather them.

    First over all such axes, then over those that also shard at the start: at most two legs. With
    axes (0, 1) free at the goal "b c" and axis 1 sharding at the start: "b/0/1 c", then "b/1 c".
    The first dim that the axes cut evenly is sharded.
    """
    free = grid.replica_axes(goal)
    sharding_at_start = tuple(a for a in free if a in grid.roles(state))
    for axes in dict.fromkeys((free, sharding_at_start)):  # once if both are the same
        if not axes:
            continue
        for d, cut in enumerate(goal.cuts):
            if grid.is_even(d, cut + axes):
                sharded = goal.with_cut(d, cut + axes)
                in_place = d == 0  # pieces of dim 0 lie one after the other in the result
                block = grid.block(sharded)
                yield Leg(sharded, grid.collective_seconds("all_gather", block, axes, in_place))
                break


def _reduced_first(grid: Grid, state: State, goal: State) -> Iterator[Leg]:
    """Yield the ways to begin a path: with nothing, and with a reduce-scatter of all sums that end.

    The scatter shards the first dim that its axes cut evenly. The dim that the goal shards over the
    first of these axes is tried before the others, since the shards may then stay there.
    """
    yield Leg(state, 0.0)
    ended = grid.ended(state, goal)
    if not ended:
        return
    dims = list(range(len(state.cuts)))  # in the order of trying
    role = grid.roles(goal).get(ended[0])
    if role is not None:
        dims.remove(role.dim)
        dims.insert(0, role.dim)
    for d in dims:
        scattered = state.with_cut(d, state.cuts[d] + ended)
        if grid.is_even(d, scattered.cuts[d]):
            after = scattered._replace(sums=tuple(a for a in state.sums if a not in ended))
            move = Move("reduce_scatter", (d, ended), after)
            yield Leg(after, move_cost(grid, move, state).seconds)
            return


class AxisChanges(NamedTuple):
    """What happens to the axes between two states."""

    ended: Cut  # hold addends of a sum that ends
    sliced: list[int]  # shard new
    moved_axes: list[int]  # shard otherwise, or have to change places after a slice
    gathered: list[int]  # shard no more


def _axis_changes(grid: Grid, state: State, goal: State) -> AxisChanges:
    """Sort the axes by what happens to them between two states.

    "b/0 s/1 c" -> "b s/2 c/1": axis 2 is sliced (it held replicas), 1 is moved, 0 is gathered.
    """
    old_roles = grid.roles(state)
    new_roles = grid.roles(goal)
    sliced = [a for a in new_roles if a not in old_roles and a not in state.sums]
    moved = [a for a in new_roles if a in old_roles and old_roles[a] != new_roles[a]]
    # A slice adds shards inside of all that the dim has; the goal may have them further out.
    for axis in sliced:
        d = new_roles[axis].dim
        n_shards = len(state.cuts[d])
        if goal.cuts[d][:n_shards] != state.cuts[d]:
            moved.append(axis)
    gathered = [a for a in old_roles if a not in new_roles and a not in goal.sums]
    return AxisChanges(grid.ended(state, goal), sliced, moved, gathered)


def _collectives_in_turn(grid: Grid, state: State, goal: State, spare: Sequence[int]) -> float:
    """Price a path of one slice, one reduction, one move of shards and one gather, in this order.

    Each is for all axes that need it, and is left out if none does. The order keeps blocks small:
    a slice and a reduce-scatter make them smaller for what follows, a gather comes last.

    Args:
        grid: The grid of the states.
        state: The state at the start.
        goal: The state at the end.
        spare: Axes with replicas that are sliced at first and gathered at last, so that each device
            moves only a share of its block in between.
    """
    changes = _axis_changes(grid, state, goal)
    gathered = [*changes.gathered]
    block = grid.block(state)  # elements per device, at this point of the path
    seconds = 0.0
    if changes.sliced or spare:
        # Uneven blocks are taken as even: an estimate may be off by a row.
        block = max(1, block // grid.count_parts([*changes.sliced, *spare]))
        seconds += _copy_seconds(grid, block)
    if changes.ended:
        ended = changes.ended
        new_roles = grid.roles(goal)
        # To scatter pays if shards are wanted, or if a gather follows in any case.
        if spare or gathered or any(a in new_roles for a in ended):
            seconds += _scatter_seconds(grid, block, ended, goal)
            block = max(1, block // grid.count_parts(ended))
            gathered += [a for a in ended if a not in new_roles]  # scattered only for the while
        else:
            seconds += grid.collective_seconds("all_reduce", block, ended, False)
    if changes.moved_axes:
        slices = grid.count_parts([*changes.sliced, *spare, *changes.ended])
        gathers = grid.count_parts([*gathered, *spare])
        can_permute = _can_match_by_slices(grid, state, goal, slices, gathers)
        largest = max(grid.block(state), grid.block(goal))
        seconds += _moving_seconds(grid, tuple(changes.moved_axes), block, largest, can_permute)
    if gathered or spare:
        old_roles = grid.roles(state)
        in_place = all(a not in old_roles or old_roles[a].dim == 0 for a in gathered)
        axes = (*gathered, *spare)
        seconds += grid.collective_seconds("all_gather", block, axes, in_place)
    return seconds


def _scatter_seconds(grid: Grid, block: int, axes: Cut, goal: State) -> float:
    """Price a reduce-scatter of a block over some axes, to the dims that they shard at the goal."""
    new_roles = grid.roles(goal)
    # Pieces of dim 0 lie one after the other: they need no packing. An axis that shards no dim at
    # the goal may scatter dim 0.
    in_place = all(a not in new_roles or new_roles[a].dim == 0 for a in axes)
    return grid.collective_seconds("reduce_scatter", block, axes, in_place)


def _moving_seconds(
    grid: Grid, axes: tuple[int, ...], block: int, largest: int, can_permute: bool
) -> float:
    """Price the cheapest way to move shards: an all-to-all, a gather and a slice, or a permutation.

    Args:
        grid: The grid of the states.
        axes: The axes that move.
        block: Elements of a block at this moment.
        largest: Elements that a block may have meanwhile.
        can_permute: Whole blocks may change places.
    """
    least = grid.collective_seconds("all_to_all", block, axes, False)
    if (
        block * grid.count_parts(axes) <= largest
    ):  # the gathered block is `count_parts` times as large
        gather = grid.collective_seconds("all_gather", block, axes, False)
        least = min(least, gather + _copy_seconds(grid, block))
    if can_permute:
        least = min(least, grid.collective_seconds("permute", block, axes, False))
    return least


def _copy_seconds(grid: Grid, block: int) -> float:
    """Price a slice that leaves `block` elements."""
    return grid.fabric.seconds("slice", Traffic(copied=block), grid.itemsize)


def _can_match_by_slices(grid: Grid, state: State, goal: State, slices: int, gathers: int) -> bool:
    """Check whether slices and gathers can make all blocks of both sides equally long.

    Blocks can be permuted if each dim is cut into the same number of parts on both sides, at least
    the least common multiple of the two numbers: 2 and 3 parts -> 6, by 3 slices and 2 gathers.

    Args:
        grid: The grid of the states.
        state: The state before.
        goal: The state after.
        slices: Into how many more parts the start may be cut.
        gathers: Into how many more parts the goal may be cut, to be gathered afterwards.
    """
    parts = [grid.count_parts(cut) for cut in state.cuts]
    goal_parts = [grid.count_parts(cut) for cut in goal.cuts]
    common = math.prod(map(math.lcm, parts, goal_parts))
    return common <= math.prod(parts) * slices and common <= math.prod(goal_parts) * gathers
