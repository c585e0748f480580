"""Moves from state to state: the steps that they stand for, and what each costs.

A move is a step that is not built yet. A search makes thousands of moves and prices most of them;
only those of the cheapest path become steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from xshard import steps
from xshard.cost.model import LOCAL, Profile
from xshard.layout import Layout, Sharding
from xshard.search.grid import Grid, grid
from xshard.search.states import Cut, State
from xshard.steps import Exchange, Traffic
from xshard.steps.base import DimCut


class Move(NamedTuple):
    """A step not yet built: its kind, the data of the kind, and the state that results.

    The data are plain tuples, since a search makes them by the thousand. Shards, all innermost
    ones, are numbers, and dims are indices:

        all_gather, embed       (dim, shards that leave it)
        reduce_scatter          (dim, new shards)
        slice                   for each dim, its new shards
        all_to_all              (dim, shards that leave it, dim, new shards)
        all_reduce, mask        (axes,)
        permute, exchange       ()
    """

    kind: str
    data: tuple[Any, ...]
    next_state: State


Moves = tuple[tuple[State, Move], ...]  # each with the state before it


@dataclass(frozen=True)
class SearchRoute:
    """Two states, and what differs between them."""

    grid: Grid
    start: State
    goal: State

    @cached_property
    def changing(self) -> list[int]:
        """The axes with different roles on both sides."""
        shards = self.grid.changing(self.start, self.goal)
        sums = set(self.start.sums) ^ set(self.goal.sums)
        return sorted(sums.union(shards))

    @cached_property
    def spare(self) -> Sequence[int]:
        """The axes with replicas on both sides that can take shares for those that change."""
        return self.grid.spare(self.start, self.goal, self.changing)


@dataclass(frozen=True)
class NamedRoute:
    """The route between two shardings in normal form without copies, with the names of dims.

    It translates between layouts, as users write them, and the numbered states of the search.
    """

    start: Sharding
    goal: Sharding
    itemsize: int
    profile: Profile

    @cached_property
    def grid(self) -> Grid:
        """The grid of this mesh and shape, shared by all spaces that have them."""
        return grid(self.start.mesh, self.start.shape, self.itemsize, self.profile)

    @cached_property
    def route(self) -> SearchRoute:
        """The states of both shardings."""
        start = self.state(self.start.layout)
        goal = self.state(self.goal.layout)
        return SearchRoute(self.grid, start, goal)

    @cached_property
    def op(self) -> str:
        """The kind of reduction in these layouts."""
        # Tags of one request have one kind: `check_moves` refuses others.
        for tag_kind, _ in (*self.start.layout.tags, *self.goal.layout.tags):
            return tag_kind
        return "sum"

    def state(self, layout: Layout) -> State:
        """Convert a layout of this space to its state."""
        shards = [dim.shards for dim in layout.dims]
        return self.grid.state(shards, layout.tagged(self.op))

    def layout(self, state: State) -> Layout:
        """Convert a state to its layout."""
        return self.grid.layout(state, self.start.layout.names, self.op)

    def dim_cut(self, dim_index: int, cut: Cut) -> DimCut:
        """Return the name of a dim and some of its shards, as steps have them."""
        return self.start.layout.names[dim_index], self.grid.shards_of(cut)

    def exchange(self, src: Layout, dst: Layout) -> Exchange:
        """Build an exchange, with node-local senders where the grid has nodes and sums stay."""
        has_same_sums = src.tagged(self.op) == dst.tagged(self.op)
        return Exchange(dst, self.grid.nodes if has_same_sums else None)

    def steps(self, moves: Iterable[tuple[State, Move]]) -> tuple[steps.Step, ...]:
        """Build the steps of some moves, each given with the state before it."""
        return tuple(_step(self, move, state) for state, move in moves)


def normal_form(sharding: Sharding) -> Sharding:
    """Return the sharding with the plainest layout that has the same blocks."""
    return sharding.with_layout(sharding.normal_layout)


class MoveCost(NamedTuple):
    """Cost of a move: seconds, elements received, elements held at its worst moment."""

    seconds: float
    received: int
    held_elements: int


def move_cost(grid: Grid, move: Move, state: State) -> MoveCost:
    """Price one step of a search: its seconds, and the elements that a device receives and holds.

    `state` is the layout before the move; `move.next_state` is the one after it. Each price is computed
    once for all searches on the grid.
    """
    # Hot. The details of a move follow from the two states, and need not be in the key.
    key = move.kind, state, move.next_state
    cached: MoveCost | None = grid.costs.get(key)
    if cached is not None:
        return cached
    traffic = _traffic(grid, move, state)
    # The input, the result, and for a collective the buffer in which it packs.
    held = grid.block_elements(state) + grid.block_elements(move.next_state)
    if traffic.hops:  # it communicates
        held += traffic.copied
    seconds = grid.fabric.seconds(move.kind, traffic, grid.itemsize)
    cost = MoveCost(seconds, traffic.received, held)
    grid.costs[key] = cost
    return cost


def _traffic(grid: Grid, move: Move, state: State) -> Traffic:
    """Count the traffic of a move as its step would."""
    if move.kind in LOCAL:
        return Traffic(copied=grid.block_elements(move.next_state))
    if move.kind == "exchange":
        return grid.exchange_traffic(state, move.next_state)
    axes = _group_axes(grid, move, state)
    in_place = _lands_in_place(grid, move)
    return grid.collective_traffic(move.kind, grid.block_elements(state), axes, in_place)


def _group_axes(grid: Grid, move: Move, state: State) -> tuple[int, ...]:
    """Return the axes over which a collective runs."""
    if move.kind == "permute":
        return tuple(grid.changing(state, move.next_state))
    # Shards, or of an all-reduce axes, which have the numbers of contiguous shards over them.
    return grid.axes_in(move.data[-1])


def _lands_in_place(grid: Grid, move: Move) -> bool:
    """Check that the pieces of a gather or scatter lie one after the other in the larger block."""
    if move.kind not in ("all_gather", "reduce_scatter"):
        return False
    dim_index, cut = move.data
    return dim_index == 0 and all(grid.shards[shard].order == "block" for shard in cut)


def _step(named_route: NamedRoute, move: Move, state: State) -> steps.Step:
    """Turn a move of the search into the step that a plan executes.

    Moves name axes and shards by number, steps by name: on a mesh dp=2, cp=4 the move
    ("all_gather", (1, (1,)), ...) from "b s/cp" gathers the innermost shard of dim 1,
    `AllGather("s", cp)`. The data of each kind of move are listed in `Move`.
    """
    match move.kind:
        case "permute":
            return steps.Permute(named_route.layout(move.next_state))
        case "exchange":
            return named_route.exchange(
                named_route.layout(state), named_route.layout(move.next_state)
            )
        case "slice":
            cuts = [
                named_route.dim_cut(dim_index, new_cut)
                for dim_index, new_cut in enumerate(move.data)
                if new_cut
            ]
            return steps.Slice(tuple(cuts))
        case "mask":
            return steps.Mask(named_route.grid.names(move.data[0]))
        case "all_reduce":
            return steps.AllReduce(named_route.grid.names(move.data[0]), named_route.op)

    # The data of all other kinds are a dim and shards, of an all-to-all twice.
    dim_index, cut, *arriving = move.data
    dim, shards = named_route.dim_cut(dim_index, cut)
    match move.kind:
        case "all_gather":
            return steps.AllGather(dim, shards)
        case "embed":
            return steps.Embed(dim, shards)
        case "reduce_scatter":
            return steps.ReduceScatter(dim, shards, named_route.op)
    dst, new_cut = arriving
    dst_dim, dst_shards = named_route.dim_cut(dst, new_cut)
    return steps.AllToAll(dim, shards, dst_dim, dst_shards)
