"""The states between two shardings, the moves between states with their steps and costs, and an estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from xshard import steps
from xshard.cost.model import Profile
from xshard.layout import Layout, Sharding
from xshard.notation.parser import Dim
from xshard.search.grid import Cut, Grid, State, grid
from xshard.steps import Exchange, Traffic
from xshard.steps.all_gather import gather_traffic
from xshard.steps.all_reduce import all_reduce_traffic
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.base import DimCut
from xshard.steps.permute import permute_traffic
from xshard.steps.reduce_scatter import reduce_scatter_traffic
from xshard.steps.traffic import LinkSpans


class Move(NamedTuple):
    """A step not yet built: its kind, the data of the kind (`STEPS`), and its result."""

    kind: str
    data: tuple[Any, ...]
    after: State


@dataclass(frozen=True)
class SearchRoute:
    """Two states, and what differs between them."""

    grid: Grid
    start: State
    goal: State

    @cached_property
    def changing(self) -> list[int]:
        """The axes with different roles on both sides."""
        start = self.start
        goal = self.goal
        return sorted({*self.grid.changing(start, goal), *set(start.sums) ^ set(goal.sums)})

    @cached_property
    def spare(self) -> list[int]:
        """The axes with replicas on both sides that can take shares for those that change."""
        return self.grid.spare(self.start, self.goal, self.changing)


@dataclass(frozen=True)
class Space:
    """The route between two shardings in normal form without copies, with the names of their dims."""

    start: Sharding
    goal: Sharding
    itemsize: int
    profile: Profile

    @cached_property
    def grid(self) -> Grid:
        return grid(self.start.mesh, self.start.shape, self.itemsize, self.profile)

    @cached_property
    def route(self) -> SearchRoute:
        """The states of both shardings."""
        return SearchRoute(self.grid, self.state(self.start.layout), self.state(self.goal.layout))

    @cached_property
    def op(self) -> str:
        """The kind of reduction in these layouts."""
        kinds = [kind for end in (self.start, self.goal) for kind, _ in end.layout.tags]
        return kinds[0] if kinds else "sum"

    def state(self, layout: Layout) -> State:
        """A layout of this space -> its state."""
        cuts = tuple(tuple(map(self.grid.number, dim.shards)) for dim in layout.dims)
        return State(cuts, tuple(sorted(map(self.grid.axes.index, layout.tagged(self.op)))))

    def layout(self, state: State) -> Layout:
        """A state -> its layout."""
        dims = zip(self.start.layout.names, map(self.grid.cut_by, state.cuts), strict=True)
        return Layout(tuple(Dim(*dim) for dim in dims), ((self.op, self.grid.names(state.sums)),))

    def exchange(self, here: Layout, to: Layout) -> Exchange:
        """The exchange between two layouts; with node-local senders if needed."""
        return Exchange(to, self.grid.nodes if here.tagged(self.op) == to.tagged(self.op) else None)

    def steps(self, moves: Iterable[tuple[State, Move]]) -> tuple[steps.Step, ...]:
        """Moves, each with the state before it -> the steps that they stand for."""
        return tuple(STEPS[move.kind](self, move, state) for state, move in moves)


class MoveCost(NamedTuple):
    """Cost of a move: seconds, elements received, elements held at its worst moment."""

    seconds: float
    received: int
    held: int


def move_cost(grid: Grid, move: Move, state: State) -> MoveCost:
    """Cost of a move from a state, cached."""
    key = move.kind, state, move.after
    known: MoveCost | None = grid.costs.get(key)
    if known is None:
        before = grid.block(state)
        after = grid.block(move.after)
        traffic = TRAFFIC[move.kind](grid, move, state, before, after)
        held = before + after + (traffic.copied if traffic.hops else 0)
        seconds = grid.fabric.seconds(move.kind, traffic, grid.itemsize)
        known = grid.costs[key] = MoveCost(seconds, traffic.received, held)
    return known


def _innermost(move: Move, state: State) -> tuple[int, Cut]:
    """The dim of a move, and as many of its innermost shards as the move takes."""
    d, n = move.data[:2]
    return d, state.cuts[d][-n:]


def _along(grid: Grid, d: int, cut: Cut) -> tuple[LinkSpans, bool]:
    """The spans of some shards of a dim, and whether their pieces land in place."""
    return grid.group(grid.axes_in(cut)), d == 0 and all(
        grid.shards[s].order == "block" for s in cut
    )


TRAFFIC: dict[str, Callable[[Grid, Move, State, int, int], steps.Traffic]] = {
    "all_gather": lambda g, m, at, before, _: gather_traffic(
        before, *_along(g, *_innermost(m, at))
    ),
    "all_reduce": lambda g, m, at, before, _: all_reduce_traffic(before, g.group(m.data[0])),
    "reduce_scatter": lambda g, m, at, before, _: reduce_scatter_traffic(
        before, *_along(g, *m.data)
    ),
    "all_to_all": lambda g, m, at, before, _: all_to_all_traffic(
        before, g.group(g.axes_in(m.data[3]))
    ),
    "permute": lambda g, m, at, before, _: permute_traffic(
        before, g.group(tuple(g.changing(at, m.after)))
    ),
    "exchange": lambda g, m, at, *_: g.exchange_traffic(at, m.after),
    **dict.fromkeys(
        ("slice", "embed", "mask"), lambda g, m, at, _, after: steps.Traffic(copied=after)
    ),
}


# Data of a move by kind:  all_gather, embed: dim, number of shards.  reduce_scatter: dim, shards.
# slice: shards by dim.  all_to_all: dim, number of shards, dim, shards.  all_reduce, mask: axes.
STEPS: dict[str, Callable[[Space, Move, State], steps.Step]] = {
    "all_gather": lambda s, m, at: steps.AllGather(*_cut(s, *_innermost(m, at))),
    "all_reduce": lambda s, m, at: steps.AllReduce(s.grid.names(m.data[0]), s.op),
    "reduce_scatter": lambda s, m, _: steps.ReduceScatter(*_cut(s, *m.data), s.op),
    "all_to_all": lambda s, m, at: steps.AllToAll(
        *_cut(s, *_innermost(m, at)), *_cut(s, *m.data[2:])
    ),
    "permute": lambda s, m, at: steps.Permute(s.layout(m.after)),
    "exchange": lambda s, m, at: s.exchange(s.layout(at), s.layout(m.after)),
    "slice": lambda s, m, at: steps.Slice(
        tuple(_cut(s, d, cut) for d, cut in enumerate(m.data) if cut)
    ),
    "embed": lambda s, m, at: steps.Embed(*_cut(s, *_innermost(m, at))),
    "mask": lambda s, m, at: steps.Mask(s.grid.names(m.data[0])),
}


def _cut(space: Space, d: int, cut: Cut) -> DimCut:
    """A dim and some of its shards."""
    return space.start.layout.names[d], space.grid.cut_by(cut)


def estimate(grid: Grid, state: State, goal: State) -> float:
    """Seconds of an exchange, or of one collective for every kind of change, whichever takes fewer."""
    if state == goal:
        return 0.0
    ended = grid.ended(state, goal)
    near = grid.spare(state, goal, grid.changing(state, goal))
    least = min([_in_turn(grid, state, goal, axes) for axes in ([(), near] if near else [()])])
    if not set(goal.sums) - set(state.sums):
        for here, seconds in _scattered(grid, state, goal, ended):
            least = min(least, seconds + _exchange(grid, here, goal, least - seconds))
            for on_way, later in _before_gathers(grid, here, goal):
                if (below := least - seconds - later) > 0:
                    there = min(
                        _exchange(grid, here, on_way, below), _in_turn(grid, here, on_way, ())
                    )
                    least = min(least, seconds + there + later)
    pairs = enumerate(zip(state.cuts, goal.cuts, strict=True))
    if state.sums == goal.sums and all(
        grid.length(d, a) == grid.length(d, b) for d, (a, b) in pairs
    ):
        least = min(least, move_cost(grid, Move("permute", (), goal), state).seconds)
    return least


def _exchange(grid: Grid, state: State, goal: State, below: float) -> float:
    """Seconds of an exchange to the goal; infinite if not below, or to be counted per device."""
    if grid.least_exchange(state, goal) >= below or grid.even_received(state, goal) is None:
        return math.inf
    return move_cost(grid, Move("exchange", (), goal), state).seconds


def _before_gathers(grid: Grid, state: State, goal: State) -> Iterator[tuple[State, float]]:
    """The goal sharded over axes that are to hold replicas, each with the seconds to gather them."""
    free = grid.free(goal)
    for axes in dict.fromkeys((free, tuple(a for a in free if a in grid.roles(state)))):
        for d, cut in enumerate(goal.cuts):
            if axes and grid.is_even(d, cut + axes):
                on_way = goal.with_cut(d, cut + axes)
                yield (
                    on_way,
                    grid.seconds("all_gather", gather_traffic, grid.block(on_way), axes, d == 0),
                )
                break


def _scattered(grid: Grid, state: State, goal: State, ended: Cut) -> Iterator[tuple[State, float]]:
    """The start, and the state in which the sums that end are scattered over a dim, each with its seconds."""
    new = grid.roles(goal)
    yield state, 0.0
    dims = range(len(state.cuts)) if ended else ()
    for d in sorted(dims, key=lambda d: new.get(ended[0], (d,))[0] != d):
        scattered = state.with_cut(d, state.cuts[d] + ended)
        if grid.is_even(d, scattered.cuts[d]):
            after = scattered._replace(sums=tuple(a for a in state.sums if a not in ended))
            yield after, move_cost(grid, Move("reduce_scatter", (d, ended), after), state).seconds
            return


def _in_turn(grid: Grid, state: State, goal: State, near: Sequence[int]) -> float:
    """Seconds of a slice, reduction, move and gather; `near` replicas take shares in between."""
    old = grid.roles(state)
    new = grid.roles(goal)
    ended = grid.ended(state, goal)
    cut = [a for a in ended if a in new]
    sliced = [a for a in new if a not in old and a not in state.sums]
    moved = [a for a in new if a in old and old[a] != new[a]]
    gathered = [a for a in old if a not in new and a not in goal.sums]
    # A shard in place comes inside of all that the dim keeps; others have to change places afterwards.
    moved += [a for a in sliced if goal.cuts[d := new[a][0]][: len(state.cuts[d])] != state.cuts[d]]
    block = grid.block(state)
    seconds = 0.0
    price = grid.seconds
    if sliced or near:
        block = max(1, block // grid.parts([*sliced, *near]))
        seconds += grid.fabric.seconds("slice", Traffic(copied=block), grid.itemsize)
    if ended and (cut or near or gathered):
        first = all(new.get(a, (0,))[0] == 0 for a in ended)
        seconds += price("reduce_scatter", reduce_scatter_traffic, block, ended, first)
        block = max(1, block // grid.parts(ended))
        gathered += [a for a in ended if a not in new]
    elif ended:
        seconds += price("all_reduce", all_reduce_traffic, block, ended)
    if moved:
        axes = tuple(moved)
        ways = [price("all_to_all", all_to_all_traffic, block, axes)]
        if block * grid.parts(moved) <= max(grid.block(state), grid.block(goal)):
            whole = price("all_gather", gather_traffic, block, axes, False)
            ways.append(whole + grid.fabric.seconds("slice", Traffic(copied=block), grid.itemsize))
        if _permutes(
            grid, state, goal, grid.parts([*sliced, *near, *ended]), grid.parts([*gathered, *near])
        ):
            ways.append(price("permute", permute_traffic, block, axes))
        seconds += min(ways)
    if gathered or near:
        first = all(old.get(a, (0,))[0] == 0 for a in gathered)
        seconds += price("all_gather", gather_traffic, block, (*gathered, *near), first)
    return seconds


def _permutes(grid: Grid, state: State, goal: State, slices: int, gathers: int) -> bool:
    """Whether so many more parts at the start, and at the goal, can make all blocks as long as each other."""
    before, after = ([grid.parts(cut) for cut in end.cuts] for end in (state, goal))
    most = math.prod(map(math.lcm, before, after))
    return most <= math.prod(before) * slices and most <= math.prod(after) * gathers
