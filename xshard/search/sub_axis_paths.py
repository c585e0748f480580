"""Paths over sub-axes: slice replicas until blocks match, permute whole blocks, gather the rest.

If shards over `x` of 4 become shards over `y` of 2, half of `x` may stand for `y`, so that only the
other half is gathered. Every dim is sharded into the least common multiple of its parts, by free
axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, pairwise, permutations
from operator import attrgetter
from typing import Any, NamedTuple

from xshard.cost.model import LOCAL
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.search.a_star import Path
from xshard.search.moves import Move, Moves, NamedRoute, SearchRoute, move_cost, normal_form
from xshard.search.states import Cut, Cuts, State, common, without

# How many ways to shard dims further are tried from either side; they differ in the links they use.
MAX_WAYS = 16
LEAST_GAIN = 1e-9  # of the seconds: less is rounding


class Factors(NamedTuple):
    """The factors by which start and goal shard each dim further, so that their blocks match.

    "n/x" on x=4 and "n/y" on y=6 have 12 parts in common: the factors are (3,) and (2,).
    """

    start: Sequence[int]
    goal: Sequence[int]

    @property
    def are_any(self) -> bool:
        """Whether any dim is sharded further."""
        return any(n > 1 for n in (*self.start, *self.goal))


@dataclass(frozen=True)
class SubAxisPath:
    """A path, its seconds, and the route with the axes that it names."""

    seconds: float
    route: SearchRoute
    moves: Moves

    @property
    def split(self) -> Split:
        """The axes that it splits."""
        mesh = self.route.grid.mesh
        return mesh.split if isinstance(mesh, SubAxisMesh) else ()


def best_sub_axis_path(
    route: SearchRoute, path: Path, memory_limit: int | None
) -> SubAxisPath | None:
    """Look for a cheaper path that splits mesh axes: a slice, a permutation of blocks, and gathers.

    From "n/x" to "n/y" with x=4 and y=2, half of x may stand for y, and only the other half is
    gathered. Returns None if no such path beats `path`, the best one on whole axes, or fits
    `memory_limit`, the bytes that a device may hold (None: no limit). Cheap checks come first: most
    searches end at one of them.
    """
    grid = route.grid
    sent_kinds = [move.kind for _, move in path.moves if move.kind not in LOCAL]
    if len(sent_kinds) < 2 and not {"exchange", "permute"} & set(sent_kinds):
        return None  # one collective: there is nothing to save
    factors = _matching_factors(route)
    if factors is None or not (factors.are_any or route.spare):
        return None  # impossible, or both sides cut alike, where whole axes can be permuted
    if grid.lower_bound_s(route.start, route.goal) >= path.seconds:
        return None  # `path` meets the lower bound: no path at all is cheaper
    # Search on the finest sub-axes; the path that is found is written with as few as possible.
    split = tuple(_finest_split(route))
    if not split:
        return None
    fine_route = _split_route(route, split)
    limit = math.inf if memory_limit is None else memory_limit / grid.itemsize  # elements
    best: SubAxisPath | None = None
    seconds_to_beat = path.seconds  # what the next path has to beat
    for first_moves, gathers in _paths(fine_route, factors, limit):
        if gathers.seconds >= seconds_to_beat:
            continue
        # The price is infinite if any move holds more than the limit: such a path never wins.
        seconds = _price_moves(fine_route, first_moves, limit) + gathers.seconds
        if seconds < seconds_to_beat * (1 - LEAST_GAIN):
            best = SubAxisPath(seconds, fine_route, (*first_moves, *gathers.moves))
            seconds_to_beat = seconds
    return None if best is None else _merge_sub_axes(route, best)


def _matching_factors(route: SearchRoute) -> Factors | None:
    """Find how much further both sides must shard each dim so that their blocks match.

    If both sides cut each dim into the same number of parts, devices can just swap whole blocks.
    The fewest parts are the least common multiple: 4 and 6 parts -> 12, so the start is sharded 3
    times further and the goal 2 times: factors (3,) and (2,), one per dim.

    None if a sum begins or ends, shards are uneven or not contiguous, rows do not divide by the
    common number of parts, or there are too few axes with replicas to shard further.
    """
    grid = route.grid
    start = route.start
    goal = route.goal
    if start.sums != goal.sums or not (grid.is_regular(start) and grid.is_regular(goal)):
        return None
    start_factors: list[int] = []
    goal_factors: list[int] = []
    for length, start_cut, goal_cut in zip(grid.shape, start.cuts, goal.cuts, strict=True):
        start_parts = grid.count_parts(start_cut)
        goal_parts = grid.count_parts(goal_cut)
        multiple = math.lcm(start_parts, goal_parts)
        if length % multiple:
            return None  # uneven blocks have several lengths, and cannot take each other's places
        start_factors.append(multiple // start_parts)
        goal_factors.append(multiple // goal_parts)
    for state, factors in ((start, start_factors), (goal, goal_factors)):
        # The free axes that change have to be enough to shard the dims by these factors.
        usable = common(grid.replica_axes(state), route.changing)
        if math.prod(factors) > grid.count_parts(usable):
            return None
    return Factors(start_factors, goal_factors)


def _finest_split(route: SearchRoute) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each mesh axis that may be split, with the sizes of its sub-axes, outermost first.

    Axes whose use changes are split into prime factors, spare ones (replicas on both sides) only at
    the boundary of nodes: x=8 in nodes of 4 -> ("x", (2, 2, 2)) if it changes, else ("x", (2, 4)).
    """
    grid = route.grid
    for axis in (*route.changing, *route.spare):
        # A span is a part of an axis over links of one speed. Outermost first: by longest stride.
        spans = sorted(grid.group((axis,)), key=lambda span: -span.stride)
        if any(grid.fabric.links[span.level].topology == "ring" for span in spans):
            continue  # collectives over a part of a ring would not have the links of a ring
        sizes: list[int] = []
        for span in spans:
            sizes += _prime_factors(span.size) if axis in route.changing else [span.size]
        if len(sizes) > 1:
            yield grid.axes[axis], tuple(sizes)


def _prime_factors(remaining: int) -> list[int]:
    """Factor a number: 12 -> [2, 2, 3]."""
    factors: list[int] = []
    divisor = 2
    while remaining > 1:
        while remaining % divisor == 0:
            factors.append(divisor)
            remaining //= divisor
        divisor += 1
    return factors


def _split_route(route: SearchRoute, split: Split) -> SearchRoute:
    """Return the route on a mesh with some axes split."""
    grid = route.grid
    mesh = SubAxisMesh(grid.mesh, split)
    start = normal_form(grid.sharding(route.start).on_sub_axes(mesh))
    goal = normal_form(grid.sharding(route.goal).on_sub_axes(mesh))
    return NamedRoute(start, goal, grid.itemsize, grid.profile).route


def _options(route: SearchRoute, factors: Factors) -> Iterator[tuple[Factors, Sequence[int]]]:
    """Yield the least factors for which blocks match, and then, dim by dim, factors that share work.

    The latter include spare axes, along which there are replicas on both sides: each device then
    moves only a share of its block between nodes, and the shares are gathered afterwards. Each
    comes with the axes that may shard further by them.

    Factors (3, 1) and (2, 1) for two dims, and 4 spare replicas -> the same; then (12, 1) and
    (8, 1); then (3, 4) and (2, 4).
    """
    grid = route.grid
    if factors.are_any:
        yield factors, route.changing
    # Only axes with links of one speed: others would gather the shares over slow links again.
    fast_axes = [axis for axis in route.spare if len(grid.levels(axis)) == 1]
    n_shares = grid.count_parts(fast_axes)
    if n_shares == 1:
        return
    for dim_index, cut in enumerate(route.goal.cuts):
        if (
            grid.shape[dim_index] % (grid.count_parts(cut) * factors.goal[dim_index] * n_shares)
            == 0
        ):
            start = [*factors.start]
            goal = [*factors.goal]
            start[dim_index] *= n_shares
            goal[dim_index] *= n_shares
            yield Factors(start, goal), [*route.changing, *fast_axes]


def _paths(route: SearchRoute, factors: Factors, limit: float) -> Iterator[tuple[Moves, Gathers]]:
    """Yield paths of one slice, one permutation of blocks, and gathers, the first two as moves.

    Every way to choose the axes of the slice is combined with every way to choose those of the
    gathers, up to MAX_WAYS of each.

    Args:
        route: The start and the goal, on a mesh with axes split into sub-axes.
        factors: The least by which the start and the goal are sharded further.
        limit: The most elements that a device may hold.
    """
    # start -> slice -> permutation -> `arrival`, the goal with extra shards -> gathers -> goal.
    for raised_factors, axes in _options(route, factors):
        slices = _new_cuts_of(route, route.start, raised_factors.start, axes)
        for gather_cuts in _new_cuts_of(route, route.goal, raised_factors.goal, axes):
            arrival = route.goal.with_inner_cuts(gather_cuts)
            gathers = _best_gathers(route, arrival, gather_cuts, limit)
            for slice_cuts in slices:
                first_moves = _slice_and_permute(route, slice_cuts, arrival)
                if first_moves is not None:
                    yield first_moves, gathers


def _new_cuts_of(
    route: SearchRoute, state: State, factors: Sequence[int], axes: Sequence[int]
) -> list[Cuts]:
    """List ways to shard the dims of a state further, over axes of `axes` with replicas."""
    free_axes = common(route.grid.replica_axes(state), axes)
    return list(islice(_new_cuts(route, free_axes, factors), MAX_WAYS))


def _new_cuts(
    route: SearchRoute, free_axes: Sequence[int], factors: Sequence[int]
) -> Iterator[Cuts]:
    """Yield the ways to shard every dim by a factor, over axes that hold replicas.

    One tuple of axis numbers per dim. Free axes 0, 1, 2 of 2 devices each, factors (2, 2) ->
    ((2,), (1,)), ((2,), (0,)), ...: dim 0 over axis 2 and dim 1 over axis 1, and so on. Goes dim by
    dim, by recursion.

    Args:
        route: The route, whose grid has the axes.
        free_axes: The axes that hold replicas, outermost first.
        factors: For each dim from here on, how many parts a block is to be cut into.
    """
    if not factors:
        yield ()
        return
    grid = route.grid
    tried: set[tuple[object, ...]] = set()
    for n_axes in range(len(free_axes) + 1):
        for cut in reversed(list(combinations(free_axes, n_axes))):  # the innermost axes first
            if grid.count_parts(cut) != factors[0]:
                continue
            # Parts of one mesh axis on equal links are equally good: only the first cut of each
            # kind is tried.
            axis_kinds = tuple(
                (grid.mesh.origin(grid.axes[axis]), grid.levels(axis)) for axis in cut
            )
            if axis_kinds in tried:
                continue
            tried.add(axis_kinds)
            unused_axes = without(free_axes, cut)
            for other_cuts in _new_cuts(route, unused_axes, factors[1:]):
                yield (cut, *other_cuts)


def _slice_and_permute(route: SearchRoute, sliced: Cuts, arrival: State) -> Moves | None:
    """Make the moves from the start to `arrival`; None if a slice alone leads there."""
    start = route.start
    ready = start.with_inner_cuts(sliced)
    if ready == arrival:
        return None
    permuting = (ready, Move("permute", data=(), next_state=arrival))
    if not any(sliced):
        return (permuting,)
    return (start, Move("slice", sliced, ready)), permuting


class Gathers(NamedTuple):
    """The moves that gather some shards, and their seconds."""

    seconds: float
    moves: Moves


def _best_gathers(route: SearchRoute, state: State, gathered: Cuts, limit: float) -> Gathers:
    """Find the cheapest order in which the dims may gather these innermost shards."""
    dims = [dim_index for dim_index, cut in enumerate(gathered) if cut]
    orders: list[Gathers] = []
    for order in permutations(dims):
        moves: Moves = ()
        state_before = state
        for dim_index in order:
            state_after = state_before.without_inner(dim_index, gathered[dim_index])
            moves += (
                (state_before, Move("all_gather", (dim_index, gathered[dim_index]), state_after)),
            )
            state_before = state_after
        orders.append(Gathers(_price_moves(route, moves, limit), moves))
    return min(orders, key=attrgetter("seconds"))


def _price_moves(route: SearchRoute, moves: Moves, limit: float) -> float:
    """Add up the seconds of some moves; infinite if one holds too much."""
    seconds = 0.0
    for state, move in moves:
        price = move_cost(route.grid, move, state)
        if price.held_elements > limit:
            return math.inf
        seconds += price.seconds
    return seconds


def _merge_sub_axes(route: SearchRoute, path: SubAxisPath) -> SubAxisPath:
    """Rewrite a path with as few sub-axes as possible: merge those that are never separated.

    The search split mesh axes as finely as possible. If x=8 was split into x_0, x_1, x_2 of 2
    devices each, and no layout on the path separates x_1 from x_2, sub-axes of 2 and 4 devices do.

    Args:
        route: The start and the goal, on whole axes.
        path: A path on sub-axes.

    Returns:
        The same path, on the mesh with the merged sub-axes; on whole axes if all are merged.
    """
    fine_grid = path.route.grid
    groups_of = _group_sub_axes(path)
    split: list[tuple[str, tuple[int, ...]]] = []
    for axis, _ in path.split:
        sizes = tuple(map(fine_grid.count_parts, groups_of[axis]))
        if len(sizes) > 1:
            split.append((axis, sizes))
    coarse_route = _split_route(route, tuple(split)) if split else route
    # Layouts name axes by number. The first sub-axis of each group gets the group's number on the
    # merged mesh, which has its axes in the same order; the others of the group are dropped.
    merged_number: dict[int, int] = {}  # number on the fine mesh -> number on the merged one
    for first_axis, *_ in chain.from_iterable(groups_of.values()):
        merged_number[first_axis] = len(merged_number)
    moves = [_merge_axes_of_move(state, move, merged_number) for state, move in path.moves]
    return SubAxisPath(path.seconds, coarse_route, tuple(moves))


def _group_sub_axes(path: SubAxisPath) -> dict[str, list[list[int]]]:
    """Group the sub-axes of each whole axis that stay side by side on a path."""
    fine_grid = path.route.grid
    groups: dict[str, list[list[int]]] = {}
    for axis_number, sub_axis in enumerate(fine_grid.axes):
        axis_groups = groups.setdefault(fine_grid.mesh.origin(sub_axis), [])
        if axis_groups and _stay_together(axis_groups[-1][-1], axis_number, path.moves):
            axis_groups[-1].append(axis_number)
        else:
            axis_groups.append([axis_number])
    return groups


def _stay_together(outer_axis: int, inner_axis: int, moves: Moves) -> bool:
    """Check that after each move two sub-axes shard a dim one after the other, or neither does."""
    for _, move in moves:
        for cut in move.next_state.cuts:
            if outer_axis in cut or inner_axis in cut:
                if (outer_axis, inner_axis) not in pairwise(cut):
                    return False
                break  # an axis shards one dim at most
    return True


def _merge_axes_of_move(
    state: State, move: Move, merged_number: dict[int, int]
) -> tuple[State, Move]:
    """Rewrite one move, and the layout before it, after some sub-axes were merged into one.

    `merged_number` gives the new number of each axis that is kept. If axes 1 and 2 are merged into 1, a
    gather of the two shards (1, 2) becomes a gather of one.
    """
    merged_state = State(_merge_cuts(state.cuts, merged_number), state.sums)
    merged_next_state = State(
        _merge_cuts(move.next_state.cuts, merged_number), move.next_state.sums
    )
    data: tuple[Any, ...] = move.data  # () for a permutation
    if move.kind == "slice":
        data = _merge_cuts(move.data, merged_number)
    elif move.kind == "all_gather":
        dim_index, *leaving = move.data
        data = (dim_index, *_merge_cuts(leaving, merged_number))
    return merged_state, Move(move.kind, data, merged_next_state)


def _merge_cuts(cuts: Iterable[Cut], merged_number: dict[int, int]) -> Cuts:
    """Replace each group of merged sub-axes by one number."""
    merged: list[Cut] = []
    for cut in cuts:
        merged.append(tuple(merged_number[axis] for axis in cut if axis in merged_number))
    return tuple(merged)
