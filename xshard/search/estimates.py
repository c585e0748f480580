"""Estimates of the seconds between two states, without a search.

A contraction compares thousands of pairs of states. An estimate tries a few paths of a fixed form,
and is close to the search where one of them is the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xshard.search.grid import Grid
from xshard.search.moves import Move, move_cost
from xshard.search.states import Cut, State, common, starts_with, without
from xshard.steps import Traffic


class Leg(NamedTuple):
    """The first or last part of a path: the state where it meets the rest, and its seconds."""

    state: State
    seconds: float


def estimate(grid: Grid, state: State, goal: State) -> float:
    """Estimate the seconds to redistribute from one layout to another, without a search.

    A state is a layout. The estimate is the price of the cheapest of a few paths:

    - one collective for each kind of change, in a fixed order;
    - the same, where devices with equal blocks on both sides each move a share (`spare` axes);
    - one exchange, also with a reduce-scatter before it or an all-gather after it;
    - one permutation of whole blocks.
    """
    if state == goal:
        return 0.0
    # Axes along which devices hold equal blocks on both sides: each device may move a share of its
    # block and gather the shares afterwards, so that less crosses slow links.
    spare = grid.spare(state, goal, grid.changing(state, goal))
    best_s = _price_collectives_in_turn(grid, state, goal, ())
    if spare:
        best_s = min(best_s, _price_collectives_in_turn(grid, state, goal, spare))
    # An exchange that begins a sum is not tried: its traffic would have to be counted per device.
    if not grid.ended(goal, state):
        for first_leg in _reduced_first(grid, state, goal):
            best_s = _with_exchange(grid, first_leg, goal, best_s)
    if state.sums == goal.sums and grid.lengths(state) == grid.lengths(goal):
        best_s = min(
            best_s, move_cost(grid, Move("permute", data=(), next_state=goal), state).seconds
        )
    return best_s


def _with_exchange(grid: Grid, first_leg: Leg, goal: State, best_s: float) -> float:
    """Price the paths that go on with an exchange, and return the fewest seconds known.

    An exchange is a general step: each device takes from any others what it lacks. It leads from
    the layout of `first_leg` to the goal, or to a layout from which one all-gather leads to the goal.

    Args:
        grid: The grid of the states.
        first_leg: The layout from which the exchange starts, and the seconds to get there.
        goal: The layout at the end.
        best_s: The seconds of the best path so far: the result if none here takes fewer.
    """
    exchange_s = _exchange_seconds(grid, first_leg.state, goal, best_s - first_leg.seconds)
    best_s = min(best_s, first_leg.seconds + exchange_s)
    for last_leg in _before_gathers(grid, first_leg.state, goal):
        # The middle of the path may take no longer.
        limit_s = best_s - first_leg.seconds - last_leg.seconds
        if limit_s <= 0:
            continue  # the first and last legs alone take as long as the best path
        exchange_path_s = _exchange_seconds(grid, first_leg.state, last_leg.state, limit_s)
        collectives_path_s = _price_collectives_in_turn(grid, first_leg.state, last_leg.state, ())
        middle_s = min(exchange_path_s, collectives_path_s)
        best_s = min(best_s, first_leg.seconds + middle_s + last_leg.seconds)
    return best_s


def _exchange_seconds(grid: Grid, state: State, goal: State, below: float) -> float:
    """Price an exchange to the goal; infinite if not below a limit, or to be counted per device."""
    if grid.exchange_lower_bound_s(state, goal) >= below or grid.even_received(state, goal) is None:
        return math.inf
    return move_cost(grid, Move("exchange", data=(), next_state=goal), state).seconds


def _before_gathers(grid: Grid, state: State, goal: State) -> Iterator[Leg]:
    """Yield layouts from which one all-gather leads to the goal, with the seconds that it takes.

    They are the goal, further sharded over mesh axes along which it has replicas: over all of
    these, then over those that shard something at the start, so at most two. Mesh axes have
    numbers. If the goal is "b c" on axes 0 and 1, and the start is sharded over axis 1: "b/0/1 c",
    then "b/1 c". The first dim that the axes divide evenly is sharded.
    """
    replica_axes = grid.replica_axes(goal)
    sharding_at_start = common(replica_axes, grid.roles(state))
    for axes in dict.fromkeys((replica_axes, sharding_at_start)):  # once if both are the same
        if not axes:
            continue
        dim_index = _first_even_dim(grid, range(len(goal.cuts)), goal, axes)
        if dim_index is not None:
            sharded = goal.with_inner(dim_index, axes)
            in_place = dim_index == 0  # pieces of dim 0 lie one after the other in the result
            block_elements = grid.block_elements(sharded)
            seconds = grid.collective_seconds("all_gather", block_elements, axes, in_place=in_place)
            yield Leg(sharded, seconds)


def _first_even_dim(grid: Grid, dims: Iterable[int], state: State, axes: Cut) -> int | None:
    """Find the first dim that some axes divide evenly if they shard it further; None if none."""
    for dim_index in dims:
        if grid.is_even(dim_index, state.cuts[dim_index] + axes):
            return dim_index
    return None


def _reduced_first(grid: Grid, state: State, goal: State) -> Iterator[Leg]:
    """Yield ways to begin a path: do nothing, or reduce-scatter partial sums; with their seconds.

    A sum ends along axes where the start has partial sums and the goal has none. The scatter is
    over all such axes, and shards the first dim that they divide evenly: "b c | sum(0)" -> "b/0 c".
    If the goal shards a dim over the first of the axes, that dim is tried first, since the shards
    may then stay where they are. Without a sum that ends, or an even dim, only "do nothing" is
    yielded.
    """
    yield Leg(state, seconds=0.0)
    ended_axes = grid.ended(state, goal)
    if not ended_axes:
        return
    dims = list(range(len(state.cuts)))  # in the order of trying
    role = grid.roles(goal).get(ended_axes[0])
    if role is not None:
        dims.insert(0, role.dim)
    dim_index = _first_even_dim(grid, dims, state, ended_axes)
    if dim_index is not None:
        reduced_state = state.without_sums(ended_axes).with_inner(dim_index, ended_axes)
        move = Move("reduce_scatter", (dim_index, ended_axes), reduced_state)
        yield Leg(reduced_state, move_cost(grid, move, state).seconds)


class AxisChanges(NamedTuple):
    """What happens to the axes between two states."""

    ended: Cut  # hold addends of a sum that ends
    sliced: list[int]  # begin to shard
    moved_axes: list[int]  # shard in another place, or have to change places after a slice
    gathered: list[int]  # shard no more


def _axis_changes(grid: Grid, state: State, goal: State) -> AxisChanges:
    """Sort the mesh axes by what has to happen to them between two layouts.

    "b/0 s/1 c" -> "b s/2 c/1" on mesh axes 0, 1, 2: axis 2 held replicas and now shards, so blocks
    are sliced along it; axis 1 moves to another dim; axis 0 is gathered. Axes of sums that end, as
    0 in "b | sum(0)" -> "b", are a fourth group.
    """
    old_roles = grid.roles(state)
    new_roles = grid.roles(goal)
    sliced = [axis for axis in new_roles if axis not in old_roles and axis not in state.sums]
    moved = [axis for axis in new_roles if axis in old_roles and old_roles[axis] != new_roles[axis]]
    # A slice adds an innermost shard: "s/1" -> "s/1/2". If the goal has the axis further out, as in
    # "s/2/1", or the dim keeps less, it has to move after the slice.
    for axis in sliced:
        dim_index = new_roles[axis].dim
        if not starts_with(goal.cuts[dim_index], state.cuts[dim_index]):
            moved.append(axis)
    gathered = [axis for axis in old_roles if axis not in new_roles and axis not in goal.sums]
    return AxisChanges(
        ended=grid.ended(state, goal),
        sliced=sliced,
        moved_axes=moved,
        gathered=gathered,
    )


class Reduction(NamedTuple):
    """The collective that ends sums: its seconds, a block after it, and the axes that it scattered.

    They are the axes that shard nothing at the goal, and are to be gathered.
    """

    seconds: float
    block_elements: int
    scattered: Cut


def _price_collectives_in_turn(
    grid: Grid, state: State, goal: State, spare: Sequence[int]
) -> float:
    """Price a fixed path: one slice, one reduction, one move of shards and one all-gather.

    Each step is for all axes that need it, and is left out if none does. The order keeps blocks
    small: a slice and a reduce-scatter make them smaller for what follows, a gather comes last.
    "b/0 s/1 c" -> "b s/2 c/1" is a slice over axis 2, an all-to-all over 1, and a gather over 0.

    Args:
        grid: The grid of the states.
        state: The state at the start.
        goal: The state at the end.
        spare: Axes with replicas on both sides, which are sliced first and gathered last, so that
            each device moves only a share of its block in between; may be empty.
    """
    changes = _axis_changes(grid, state, goal)
    sliced = (*changes.sliced, *spare)
    gathered = (*changes.gathered, *spare)
    block_elements = grid.block_elements(state)  # elements per device, at this point of the path
    seconds = 0.0
    if sliced:
        # Uneven blocks are taken as even: an estimate may be off by a row.
        block_elements = max(1, block_elements // grid.count_parts(sliced))
        seconds += _copy_seconds(grid, block_elements)
    if changes.ended:
        reduction = _reduction(grid, block_elements, changes.ended, goal, has_gather=bool(gathered))
        seconds += reduction.seconds
        block_elements = reduction.block_elements
        gathered += reduction.scattered
    if changes.moved_axes:
        # The slice, scatter and gather of this path may make all blocks equally long; then whole
        # blocks can change places.
        n_slices = grid.count_parts((*sliced, *changes.ended))
        n_gathers = grid.count_parts(gathered)
        can_permute = _can_match_by_slices(grid, state, goal, n_slices, n_gathers)
        max_elements = max(grid.block_elements(state), grid.block_elements(goal))
        seconds += _moving_seconds(
            grid, tuple(changes.moved_axes), block_elements, max_elements, can_permute
        )
    if gathered:
        old_roles = grid.roles(state)
        # Shards of dim 0 lie one after the other in the gathered block, and need no copy.
        in_place = all(axis not in old_roles or old_roles[axis].dim == 0 for axis in gathered)
        seconds += grid.collective_seconds(
            "all_gather", block_elements, gathered, in_place=in_place
        )
    return seconds


def _reduction(
    grid: Grid, block_elements: int, ended: Cut, goal: State, *, has_gather: bool
) -> Reduction:
    """Price the collective that ends sums: a reduce-scatter, or an all-reduce.

    A reduce-scatter pays if the goal shards over these axes, or if a gather follows in any case,
    which can gather these shards too.
    """
    new_roles = grid.roles(goal)
    dims = [new_roles[ended_axis].dim for ended_axis in ended if ended_axis in new_roles]
    if not dims and not has_gather:
        return Reduction(
            seconds=grid.collective_seconds("all_reduce", block_elements, ended),
            block_elements=block_elements,
            scattered=(),
        )
    # Pieces of dim 0 lie one after the other: they need no packing. An axis that shards no dim at
    # the goal may scatter dim 0.
    in_place = all(dim == 0 for dim in dims)
    return Reduction(
        seconds=grid.collective_seconds("reduce_scatter", block_elements, ended, in_place=in_place),
        block_elements=max(1, block_elements // grid.count_parts(ended)),
        scattered=without(ended, new_roles),
    )


def _moving_seconds(
    grid: Grid, axes: tuple[int, ...], block_elements: int, max_block: int, can_permute: bool
) -> float:
    """Price the cheapest way to move shards from dim to dim, as in "s/x c" -> "s c/x".

    The ways are an all-to-all, a gather and a slice, or a permutation of whole blocks among
    devices.

    Args:
        grid: The grid of the states.
        axes: The axes that move.
        block_elements: Elements of each device's block before the move.
        max_block: The most elements that a gathered block may have.
        can_permute: Whether whole blocks may just change places: all have the same shape.
    """
    best_s = grid.collective_seconds("all_to_all", block_elements, axes)
    # The gathered block has the blocks of all devices along the axes.
    if block_elements * grid.count_parts(axes) <= max_block:
        gather_s = grid.collective_seconds("all_gather", block_elements, axes)
        best_s = min(best_s, gather_s + _copy_seconds(grid, block_elements))
    if can_permute:
        best_s = min(best_s, grid.collective_seconds("permute", block_elements, axes))
    return best_s


def _copy_seconds(grid: Grid, block_elements: int) -> float:
    """Price a slice that leaves `block_elements` elements."""
    return grid.fabric.seconds("slice", Traffic(copied=block_elements), grid.itemsize)


def _can_match_by_slices(
    grid: Grid, state: State, goal: State, n_slices: int, n_gathers: int
) -> bool:
    """Check whether a slice before and a gather after let whole blocks just change places.

    Blocks can be permuted among devices if each dim is cut into the same number of parts on both
    sides. The least is the common multiple: 2 parts before and 3 after -> 6, if the start is sliced
    into 3 times as many parts, and the goal is gathered from 2 times as many.

    Args:
        grid: The grid of the states.
        state: The state before.
        goal: The state after.
        n_slices: Into how many more parts the start may be cut.
        n_gathers: Into how many more parts the goal may be cut, to be gathered afterwards.
    """
    start_parts = [grid.count_parts(cut) for cut in state.cuts]
    goal_parts = [grid.count_parts(cut) for cut in goal.cuts]
    multiple = math.prod(map(math.lcm, start_parts, goal_parts))
    return (
        multiple <= math.prod(start_parts) * n_slices
        and multiple <= math.prod(goal_parts) * n_gathers
    )
