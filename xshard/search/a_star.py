"""A* search for the cheapest path of moves: fewest seconds, then least memory, then the plainest.

On a mesh dp=2, cp=4 the plan of "b s/cp c" -> "b s c/cp" is a path from the state with the cuts
((), (1,), ()) to the state with the cuts ((), (), (1,)): axis cp, number 1, leaves dim 1 for dim 2.
Three of the paths, as (kind, data, cuts afterwards); see `State` and `Move`:

    ("all_to_all", (1, (1,), 2, (1,)), ((), (), (1,)))     one message of a quarter to each other
    ("all_gather", (1, (1,)), ((), (), ()))                all of the array to every device,
    ("slice", ((), (), (1,)), ((), (), (1,)))              which then keeps a quarter
    ("exchange", (), ((), (), (1,)))                       the general step, which costs no less

States are settled in the order of their seconds so far and a lower bound for the rest (`Grid`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from xshard.cost.model import LOCAL, too_large
from xshard.errors import PlanError
from xshard.search.grid import Grid
from xshard.search.moves import Move, Moves, SearchRoute, move_cost
from xshard.search.states import State
from xshard.search.successors import Successors
from xshard.steps import Permute

# How many states of a directed space are settled before the best path so far is taken: once by
# nearness to the goal, once by cost. Complete spaces are searched to the end.
MAX_SETTLED = 32
DIGITS = 15  # of seconds that are compared: sums in another order are equal


class Rank(NamedTuple):
    """How good a path is: paths are compared by their ranks, the lowest is best."""

    seconds: float
    held_elements: float  # elements
    plainness: int


WORST = Rank(seconds=math.inf, held_elements=0, plainness=0)


class Path(NamedTuple):
    """Moves made so far and what they cost."""

    seconds: float
    plainness: int
    held_elements: int  # elements that a device holds at the worst moment so far
    held_elements_floor: float  # elements held that count: to hold less is no gain
    moves: Moves

    def rank(self, remaining_s: float = 0.0, remaining_plainness: int = 0) -> Rank:
        """Return the rank of the path, with a bound for the seconds and moves that still follow."""
        total_s = round(self.seconds + remaining_s, DIGITS)
        counted_elements = max(self.held_elements, self.held_elements_floor)
        return Rank(total_s, counted_elements, self.plainness + remaining_plainness)


@dataclass(frozen=True)
class Search:
    """Cheapest-first search of a route.

    route: the start and the goal.
    memory_limit: bytes that no device may exceed; None for any.
    exchanges: whether the general step is tried, beside collectives.
    scaled: elements held by the step that multiplies by a scale, outside of the path.
    """

    route: SearchRoute
    memory_limit: int | None
    exchanges: bool = True
    scaled: int = 0

    @cached_property
    def successors(self) -> Successors:
        """The moves worth trying."""
        return Successors(self.route)

    @cached_property
    def grid(self) -> Grid:
        """The grid of the route: looked up once, since hot methods ask for it."""
        return self.route.grid

    def path(self) -> Path:
        """Find the cheapest path within the memory limit. Raises PlanError if none fits."""
        path = self._search()
        if path is not None:
            return path
        if not self.exchanges:
            raise PlanError("no path of collectives leads there")
        # The error says which limit would do.
        needed_bytes = replace(self, memory_limit=None)._min_peak_bytes()
        raise too_large(self.memory_limit, needed_bytes, "any plan needs")

    def _search(self) -> Path | None:
        """Find the cheapest path; None if none fits."""
        best = None
        if not self.successors.complete:
            # A path that comes nearer to the goal with every step is found soon, and bounds others.
            best = self._explore(None, nearest=True)
        return self._explore(best, nearest=False)

    def _explore(self, best: Path | None, *, nearest: bool) -> Path | None:
        """Run the A* search once, and return the best path that it finds.

        A path is a sequence of moves (all-gather, slice, ...) from the start layout to the goal.
        The result is `best` itself if the run finds no better one; None if there is no `best` and
        no path fits the memory limit.

        Args:
            best: The best path of an earlier run, which bounds this one; None if there is none.
            nearest: Take the state with the least left to do first, to find some path soon; False:
                take the cheapest path first, which finds the best one.
        """
        start = self.route.start
        goal = self.route.goal
        # A mean multiplies the block by a factor in a step of its own, added after the search. What
        # that step holds, `scaled` elements, counts from the start, wherever the step comes.
        held_elements = max(self.grid.block_elements(start), self.scaled)
        if self.exceeds_limit(held_elements):
            return None
        # Of equally fast paths the one that holds least wins. Every path holds the blocks of both
        # ends, so to hold less than these is no gain. If a sum ends, memory does not count at all.
        held_floor: float = self.grid.block_elements(start) + self.grid.block_elements(goal)
        if self.grid.ended(start, goal):
            held_floor = math.inf
        path = Path(
            seconds=0.0,
            plainness=0,
            held_elements=held_elements,
            held_elements_floor=held_floor,
            moves=(),
        )
        if start == goal:
            return path
        exploration = Exploration(self, best, nearest)
        exploration.push(path.rank(), start, path)
        exploration.run()
        return exploration.best

    def exceeds_limit(self, elements: int) -> bool:
        """Check whether a device may not hold so many elements."""
        return self.memory_limit is not None and elements * self.grid.itemsize > self.memory_limit

    def move_lower_bound_s(self, state: State, move: Move) -> float:
        """Bound the seconds of a move from below, without its traffic."""
        if move.kind == "exchange":
            return self.grid.exchange_lower_bound_s(state, move.next_state)
        if move.kind in LOCAL:
            return 0.0
        return self.grid.fabric.least_step_s

    def remaining_lower_bound_s(self, state: State) -> float:
        """Bound the seconds of any path from a state to the goal from below."""
        goal = self.route.goal
        lower_bound_s = self.grid.lower_bound_s(state, goal)
        if self.successors.complete and state.sums != goal.sums:
            lower_bound_s = max(lower_bound_s, self.grid.reducing_lower_bound_s(state, goal))
        return lower_bound_s

    def expected_s(self, state: State) -> float:
        """Estimate the seconds of collectives to the goal, one for each axis that must change.

        An axis changes if its partial sum ends, or if it shards another dim or another place of it.
        This is no bound, since one collective may change several axes: it only orders states.
        """
        goal = self.route.goal
        goal_roles = self.grid.roles(goal)
        n_axes = len(self.grid.ended(state, goal))
        for axis, role in self.grid.roles(state).items():
            if role != goal_roles.get(axis):
                n_axes += 1
        return max(self.remaining_lower_bound_s(state), n_axes * self.grid.fabric.least_step_s)

    def extend(self, path: Path, state: State, move: Move) -> Path | None:
        """Return `path`, which ends at `state`, with one more move, and add the move's price.

        The result has the seconds of both and the larger of their memory peaks. None if a device
        would hold more than the memory limit, or if the move permutes whole blocks, and the blocks
        before and after are not the same.
        """
        if move.kind == "permute" and not self._has_same_blocks(state, move.next_state):
            return None
        price = move_cost(self.grid, move, state)
        if self.exceeds_limit(price.held_elements):
            return None
        # Paths of equal seconds and memory are ranked by the sum of these numbers, lowest first:
        # local moves are plainer than collectives, and those than exchanges.
        if move.kind == "exchange":
            plainness = 3
        elif price.received:
            plainness = 2
        else:
            plainness = 1
        return Path(
            seconds=path.seconds + price.seconds,
            plainness=path.plainness + plainness,
            held_elements=max(path.held_elements, price.held_elements),
            held_elements_floor=path.held_elements_floor,
            moves=(*path.moves, (state, move)),
        )

    def _has_same_blocks(self, state: State, next_state: State) -> bool:
        """Check that both states have the same blocks.

        Even shards of equal length do; other blocks are compared.
        """
        if self.grid.is_regular(state) and self.grid.is_regular(next_state):
            return True
        try:
            Permute(self.grid.sharding(next_state).layout).after(self.grid.sharding(state))
        except PlanError:
            return False
        return True

    def _min_peak_bytes(self) -> int:
        """Find the smallest peak of any path: lower the limit until no path is left."""
        peak_bytes = 0
        path = self._search()
        while path is not None:
            peak_bytes = path.held_elements * self.grid.itemsize
            path = replace(self, memory_limit=peak_bytes - 1)._search()
        return peak_bytes


class Exploration:
    """One run of a search from the start, cheapest states first.

    search: what is searched.
    best: the best path so far; it has to be met or beaten.
    nearest: the state with least left to do comes first, and only collectives are tried beside the
        direct exchange. The first paths are found sooner, but need not be the cheapest.
    """

    def __init__(self, search: Search, best: Path | None, nearest: bool) -> None:
        self.search = search
        self.best = best
        self.nearest = nearest
        self.best_rank = WORST if best is None else best.rank()
        self.settled: set[State] = set()
        self.reached: dict[State, Rank] = {}  # the rank of the best path to each state
        self.queue: list[tuple[Rank, int, State, Path]] = []
        self.n_pushed = 0
        # No block in between is larger than both ends.
        route = search.route
        self.max_elements = max(
            route.grid.block_elements(route.start), route.grid.block_elements(route.goal)
        )

    def push(self, bound: Rank, state: State, path: Path) -> None:
        """Queue a state; of equal bounds, the state that was queued first comes first."""
        heapq.heappush(self.queue, (bound, self.n_pushed, state, path))
        self.n_pushed += 1

    def run(self) -> None:
        """Run the main loop of A*: take the next layout off the queue, and try all steps from it.

        Ends when nothing in the queue can lead to a path better than `best`, which is the result
        (None if no path was found), or after `MAX_SETTLED` states, unless it has to go on. A state
        is a layout; it is settled once all moves from it have been tried.
        """
        search = self.search
        block_elements = search.grid.block_elements
        while self.queue:
            bound, _, state, path = heapq.heappop(self.queue)
            # The queue is ordered by a lower bound on the whole path, so nothing left in it can
            # beat `best`. In a run for the nearest state the order is an estimate, and says no such
            # thing.
            if not self.nearest and bound >= self.best_rank:
                return
            # A state is queued again when a better path reaches it; this is the older, worse entry.
            if state in self.settled:
                continue
            self.settled.add(state)
            if len(self.settled) > MAX_SETTLED and self._may_stop():
                return
            # `best` may have become better since this state was queued. Where the order is a bound,
            # that was looked at above.
            if self.nearest and self._is_too_late(path.seconds, state):
                continue
            # Hot: most moves lead to states that are settled. A state is skipped if its blocks are
            # larger than `max_elements`, that of the two ends: no path is worth them.
            for move in self._moves_from(state, path):
                if (
                    move.next_state not in self.settled
                    and block_elements(move.next_state) <= self.max_elements
                ):
                    self._try(path, state, move)

    def _moves_from(self, state: State, path: Path) -> Iterator[Move]:
        """Yield the steps to try next, after the layout `state` is reached by `path`.

        An exchange is a general step: each device takes from any others what it lacks. The exchange
        straight to the goal comes first, since its price bounds all that follow. Then come the
        collectives, then exchanges to other layouts. These last are many: they come only if they
        may lead to a path that is cheaper than the best so far, and never if `nearest`, where the
        search only wants some path soon.
        """
        search = self.search
        goal = search.route.goal
        best = self.best  # when the state is settled: the moves that follow may find a better one
        if search.exchanges:
            yield Move("exchange", data=(), next_state=goal)
        yield from search.successors.collectives(state)
        if self.nearest or not search.exchanges:
            return
        # After an exchange to another layout at least one more step must communicate: were all that
        # follow local, the exchange straight to the goal would have included them. So the path
        # takes at least one launch and one message, and the bound for what remains. That bound is
        # left out if a sum begins, since it may begin locally after the exchange.
        launch_s = search.grid.profile.launch("exchange")
        lower_bound_s = path.seconds + launch_s + search.grid.fabric.least_latency_s
        if not search.grid.ended(goal, state):
            lower_bound_s += search.remaining_lower_bound_s(state)
        if best is None or lower_bound_s < best.seconds:
            yield from search.successors.exchanges(state)

    def _may_stop(self) -> bool:
        """Check that a directed space has been searched enough: for a path, or to improve one."""
        return not self.search.successors.complete and (self.nearest or self.best is not None)

    def _try(self, path: Path, state: State, move: Move) -> None:
        """Extend a path by one move, and queue the layout that it reaches.

        If the layout is the goal, the path is kept as `best` when it is the best so far. Nothing
        happens if a path at least as good is known, to that layout or to the goal.
        """
        search = self.search
        best_known_rank = self.reached.get(move.next_state, WORST)
        # First a lower bound that is quick to compute, since the traffic of a move is slow to
        # count.
        earliest_s = round(path.seconds + search.move_lower_bound_s(state, move), DIGITS)
        if earliest_s > best_known_rank.seconds or self._is_too_late(earliest_s, move.next_state):
            return
        extended_path = search.extend(path, state, move)
        if extended_path is None:
            return
        rank = extended_path.rank()
        if rank >= best_known_rank:
            return
        self.reached[move.next_state] = rank
        if move.next_state != search.route.goal:
            self._push_if_promising(extended_path, move.next_state)
        elif rank < self.best_rank:
            self.best = extended_path
            self.best_rank = rank

    def _push_if_promising(self, path: Path, state: State) -> None:
        """Queue a state short of the goal, unless no path through it beats the best."""
        # At least one more move follows, and the plainest counts 1.
        if self.nearest:
            self.push(path.rank(self.search.expected_s(state), 1), state, path)
            return
        bound = path.rank(self.search.remaining_lower_bound_s(state), 1)
        if bound < self.best_rank:
            self.push(bound, state, path)

    def _is_too_late(self, seconds: float, state: State) -> bool:
        """Check that a path that is at a state after so many seconds is slower than the best."""
        return (
            round(seconds + self.search.remaining_lower_bound_s(state), DIGITS)
            > self.best_rank.seconds
        )
