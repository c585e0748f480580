"""A* search for the cheapest path of moves: fewest seconds, then least memory, then the plainest."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from xshard.cost.model import LOCAL, too_large
from xshard.errors import PlanError
from xshard.search.grid import State
from xshard.search.moves import Move, SearchRoute, move_cost
from xshard.search.successors import Moves
from xshard.steps import Permute

# How many states of a directed space are settled before the best path so far is taken: once by nearness to
# the goal, once by cost. Complete spaces are searched to the end.
MAX_SETTLED = 32

Rank = tuple[
    float, float, int
]  # seconds, elements held, plainness; paths are compared by their ranks
_WORST: Rank = (math.inf, 0, 0)


class Path(NamedTuple):
    """Moves made so far and what they cost."""

    seconds: float
    plainness: int
    held: int
    least: float  # elements held that count: to hold less is no gain
    moves: tuple[tuple[State, Move], ...]

    def rank(self, seconds: float = 0.0, plainness: int = 0) -> Rank:
        """The rank with this much added."""
        held = self.held if self.held > self.least else self.least
        return round(self.seconds + seconds, 15), held, self.plainness + plainness


@dataclass(frozen=True)
class Search:
    """Cheapest-first search of a route; scaled: elements held by the step that multiplies by the scale."""

    route: SearchRoute
    memory_limit: int | None
    exchanges: bool = True
    scaled: int = 0

    @cached_property
    def moves(self) -> Moves:
        return Moves(self.route)

    def path(self) -> Path:
        """The cheapest path within the memory limit. Raises PlanError if none fits."""
        path = self._search()
        if path is None and not self.exchanges:
            raise PlanError("no path of collectives leads there")
        if path is None:
            least = replace(self, memory_limit=None)._least_peak_bytes()
            raise too_large(self.memory_limit, least, "any plan needs")
        return path

    @cached_property
    def _least_step(self) -> float:
        """Seconds that any step with communication takes, at least."""
        return self.route.grid.least_launch + self.route.grid.least_latency

    def _search(self) -> Path | None:
        # A path that comes nearer to the goal with every step is found soon, and bounds the others.
        return self._explored(None if self.moves.complete else self._explored(None, nearest=True))

    def _explored(self, best: Path | None, *, nearest: bool = False) -> Path | None:
        """The best path, `best` or better; nearest: collectives alone, the state with least to do first."""
        grid = self.route.grid
        start = self.route.start
        goal = self.route.goal
        settled: set[State] = set()
        reached: dict[State, Rank] = {}
        tie = itertools.count()
        held = max(grid.block(start), self.scaled)
        if self.memory_limit is not None and held * grid.itemsize > self.memory_limit:
            return None
        # A path may hold both blocks at no cost, and any number if a sum ends; no block in between is larger.
        both, largest = (of((grid.block(start), grid.block(goal))) for of in (sum, max))
        path = Path(0.0, 0, held, math.inf if set(start.sums) - set(goal.sums) else both, ())
        if start == goal:
            return path
        queue = [(path.rank(), next(tie), start, path)]
        least = _WORST if best is None else best.rank()
        while queue:
            estimate, _, state, path = heapq.heappop(queue)
            if not nearest and estimate >= least:
                break
            if state in settled:
                continue
            settled.add(state)
            if (
                (nearest or best is not None)
                and not self.moves.complete
                and len(settled) > MAX_SETTLED
            ):
                break
            if nearest and round(path.seconds + self._remaining(state), 15) > least[0]:
                continue
            for move in self._moves(state, path, best, nearest):
                if move.after in settled or grid.block(move.after) > largest:
                    continue
                soonest = round(path.seconds + self._least(state, move), 15)
                if soonest > reached.get(move.after, _WORST)[0] or (
                    best is not None and round(soonest + self._remaining(move.after), 15) > least[0]
                ):
                    continue
                longer = self._extended(path, state, move)
                if longer is None or (rank := longer.rank()) >= reached.get(move.after, _WORST):
                    continue
                reached[move.after] = rank
                if move.after == goal:
                    best, least = (longer, rank) if rank < least else (best, least)
                    continue
                bound = longer.rank(
                    self._expected(move.after) if nearest else self._remaining(move.after), 1
                )
                if nearest or bound < least:
                    heapq.heappush(queue, (bound, next(tie), move.after, longer))
        return best

    def _expected(self, state: State) -> float:
        """Seconds that collectives take from a state, if each axis that is to be changed takes one."""
        goal = self.route.goal
        wanted = self.route.grid.roles(goal)
        ending = sum(a not in goal.sums for a in state.sums)
        moving = sum(
            role != wanted.get(axis) for axis, role in self.route.grid.roles(state).items()
        )
        return max(self._remaining(state), (ending + moving) * self._least_step)

    def _moves(self, state: State, path: Path, best: Path | None, nearest: bool) -> Iterator[Move]:
        """The moves from a state, the direct exchange first: it bounds all others."""
        if self.exchanges:
            yield Move("exchange", (), self.route.goal)
        yield from self.moves.collectives(state)
        if nearest or not self.exchanges:
            return
        # After any other exchange at least one more step communicates: the direct exchange includes all
        # local changes. Only a sum may begin better locally.
        begins = set(self.route.goal.sums) - set(state.sums)
        least = (
            path.seconds
            + self.route.grid.profile.launch("exchange")
            + self.route.grid.least_latency
        )
        if best is None or least + (0.0 if begins else self._remaining(state)) < best.seconds:
            yield from self.moves.exchanges(state)

    def _least(self, state: State, move: Move) -> float:
        """A lower bound for the seconds of a move."""
        if move.kind == "exchange":
            return self.route.grid.least_exchange(state, move.after)
        return 0.0 if move.kind in LOCAL else self._least_step

    def _extended(self, path: Path, state: State, move: Move) -> Path | None:
        """The path with a move added, unless it holds too much."""
        if move.kind == "permute" and not self._permutes(state, move.after):
            return None
        price = move_cost(self.route.grid, move, state)
        if (
            self.memory_limit is not None
            and price.held * self.route.grid.itemsize > self.memory_limit
        ):
            return None
        # Among paths that hold the same, the plainest wins: local moves, then collectives, then exchanges.
        plainness = 3 if move.kind == "exchange" else 2 if price.received else 1
        seconds = path.seconds + price.seconds
        held = max(path.held, price.held)
        return Path(
            seconds, path.plainness + plainness, held, path.least, (*path.moves, (state, move))
        )

    def _permutes(self, state: State, after: State) -> bool:
        """Whether both states have the same blocks: known for even shards, looked up for others."""
        if self.route.grid.is_regular(state) and self.route.grid.is_regular(after):
            return True
        try:
            Permute(self.route.grid.sharding(after).layout).after(self.route.grid.sharding(state))
        except PlanError:
            return False
        return True

    def _remaining(self, state: State) -> float:
        """A lower bound for the seconds of any path from a state to the goal."""
        grid = self.route.grid
        goal = self.route.goal
        closer = (
            grid.least_reducing(state, goal)
            if self.moves.complete and state.sums != goal.sums
            else 0.0
        )
        return max(grid.least_seconds(state, goal), closer)

    def _least_peak_bytes(self) -> int:
        """The smallest peak of any path: the limit is lowered until no path is left."""
        least = 0
        path = self._search()
        while path is not None:
            least = path.held * self.route.grid.itemsize
            path = replace(self, memory_limit=least - 1)._search()
        return least
