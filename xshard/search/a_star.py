"""A* search for the cheapest path of moves: fewest seconds, then least memory, then the plainest."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from xshard.cost.model import LOCAL
from xshard.errors import PlanError
from xshard.formatting import format_bytes
from xshard.search.move_costs import move_cost, step_of
from xshard.search.states import Cut, Move, Space, State
from xshard.search.successors import Moves
from xshard.steps import Step

# How many states of a directed space are settled before the best path so far is taken: once by nearness to
# the goal, once by cost. Complete spaces are searched to the end.
MAX_SETTLED = 32

Rank = tuple[float, float, int]  # seconds, elements held, plainness; paths are compared by their ranks
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
    """Cheapest-first search over a space; scaled: elements held by the step that multiplies by the scale."""

    space: Space
    memory_limit: int | None
    exchanges: bool = True
    scaled: int = 0

    def best_path(self) -> tuple[Step, ...]:
        """The steps of the cheapest path. Raises PlanError where none stays within the memory limit."""
        return self.steps(self.path())

    def steps(self, path: Path) -> tuple[Step, ...]:
        """The moves of a path as steps."""
        return tuple(step_of(self.space, move, state) for state, move in path.moves)

    def path(self) -> Path:
        """The cheapest path within the memory limit. Raises PlanError if none fits."""
        path = self._search()
        if path is None and not self.exchanges:
            raise PlanError("no path of collectives leads there")
        if path is None:
            least = replace(self, memory_limit=None)._least_peak_bytes()
            reason = f"no plan stays within {format_bytes(self.memory_limit or 0)} per device"
            raise PlanError(reason, hint=f"the least any plan needs is {format_bytes(least)} ({least} bytes)")
        return path

    @cached_property
    def _largest(self) -> int:
        """Elements of the larger side: no block in between is larger."""
        return max(self.space.start.max_local_size, self.space.goal.max_local_size)

    @cached_property
    def _least_held(self) -> float:
        """Elements that a path may hold at no cost: both blocks; any number if a sum ends."""
        space = self.space
        ended = set(space.start_state.sums) - set(space.goal_state.sums)
        return math.inf if ended else space.start.max_local_size + space.goal.max_local_size

    @cached_property
    def _least_step(self) -> float:
        """Seconds that any step with communication takes, at least."""
        return self._least_launch + self._least_latency

    @cached_property
    def _least_launch(self) -> float:
        return min((s for _, s in self.space.profile.launch_s), default=0.0)

    @cached_property
    def _fastest(self) -> float:
        """Bytes per second of the fastest link."""
        return max((link.bytes_per_s for link in self.space.fabric.links), default=1.0)

    def _search(self) -> Path | None:
        moves = Moves(self.space)
        # A path that comes nearer to the goal with every step is found soon, and bounds the others.
        near = None if moves.complete else self._explored(moves, None, nearest=True)
        return self._explored(moves, near)

    def _explored(self, moves: Moves, best: Path | None, *, nearest: bool = False) -> Path | None:
        """The best path, `best` or better; nearest: collectives alone, the state with least to do first."""
        space = self.space
        start, goal = space.start_state, moves.goal
        settled: set[State] = set()
        reached: dict[State, Rank] = {}
        tie = itertools.count()
        held = max(space.block(start), self.scaled)
        if self.memory_limit is not None and held * space.itemsize > self.memory_limit:
            return None
        path = Path(0.0, 0, held, self._least_held, ())
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
            if (nearest or best is not None) and not moves.complete and len(settled) > MAX_SETTLED:
                break
            for move in self._moves(moves, state, path, best, nearest):
                longer = self._extended(path, state, move, best)
                if longer is None or move.after in settled:
                    continue
                rank = longer.rank()
                if rank >= reached.get(move.after, _WORST):
                    continue
                reached[move.after] = rank
                if move.after == goal:
                    best, least = (longer, rank) if rank < least else (best, least)
                    continue
                bound = longer.rank(self._expected(move.after) if nearest else self._remaining(move.after), 1)
                if nearest or bound < least:
                    heapq.heappush(queue, (bound, next(tie), move.after, longer))
        return best

    def _expected(self, state: State) -> float:
        """Seconds that collectives take from a state, if each axis that is to be changed takes one."""
        wanted, goal = self._goal_roles, self.space.goal_state
        ending = sum(a not in goal.sums for a in state.sums)
        moving = sum(role != wanted.get(axis) for axis, role in self.space.roles(state).items())
        return max(self._remaining(state), (ending + moving) * self._least_step)

    @cached_property
    def _goal_roles(self) -> dict[int, tuple[int, Cut]]:
        return self.space.roles(self.space.goal_state)

    def _moves(
        self, moves: Moves, state: State, path: Path, best: Path | None, nearest: bool
    ) -> Iterator[Move]:
        """The moves from a state, the direct exchange first: it bounds all others."""
        if self.exchanges:
            yield Move("exchange", (), moves.goal)
        yield from moves.collectives(state)
        if nearest or not self.exchanges:
            return
        # After any other exchange at least one more step communicates: the direct exchange includes all
        # local changes. Only a sum may begin better locally.
        begins = set(moves.goal.sums) - set(state.sums)
        least = path.seconds + self._least_exchange + (0.0 if begins else self._remaining(state))
        if best is None or least < best.seconds:
            yield from moves.exchanges(state)

    @cached_property
    def _least_latency(self) -> float:
        return min((link.latency_s for link in self.space.fabric.links), default=0.0)

    @cached_property
    def _least_exchange(self) -> float:
        """Seconds that an exchange takes before the first byte has come."""
        return self.space.profile.launch("exchange") + self._least_latency

    def _extended(self, path: Path, state: State, move: Move, best: Path | None) -> Path | None:
        """The path with a move added, unless it holds too much or cannot beat the best."""
        if self.space.block(move.after) > self._largest:
            return None
        if best is not None:
            step_s = self._least_exchange if move.kind == "exchange" else self._least_step
            least = path.seconds + (0.0 if move.kind in LOCAL else step_s)
            if least > best.seconds or least + self._remaining(move.after) > best.seconds:
                return None
        if move.kind == "permute" and not self._permutes(state, move.after):
            return None
        price = move_cost(self.space, move, state)
        if self.memory_limit is not None and price.held * self.space.itemsize > self.memory_limit:
            return None
        # Among paths that hold the same, the plainest wins: local moves, then collectives, then exchanges.
        plainness = 3 if move.kind == "exchange" else 2 if price.received else 1
        seconds, held = path.seconds + price.seconds, max(path.held, price.held)
        return Path(seconds, path.plainness + plainness, held, path.least, (*path.moves, (state, move)))

    def _permutes(self, state: State, after: State) -> bool:
        """Whether both states have the same blocks: known for even shards, looked up for others."""
        space = self.space
        if space.is_regular(state) and space.is_regular(after):
            return True
        here = space.start.with_layout(space.layout(state))
        try:
            step_of(space, Move("permute", (), after), state).after(here)
        except PlanError:
            return False
        return True

    def _remaining(self, state: State) -> float:
        """A lower bound for the seconds of any path from a state to the goal."""
        if (known := self._known_remaining.get(state)) is None:
            known = self._known_remaining[state] = self._least_seconds(state)
        return known

    def _least_seconds(self, state: State) -> float:
        space, links = self.space, self.space.fabric.links
        received, crossing = space.least_received(state), space.least_crossing(state)
        if not received:
            return 0.0
        # The slowest links may be busiest at another device than the others: steps wait for both.
        waits = links[0].latency_s if crossing else self._least_latency
        far, near = crossing / links[0].bytes_per_s, max(0.0, received - crossing) / self._fastest
        if links[0].topology == "port":  # it may carry less than the busiest device receives over it
            near = max(0.0, received / self._fastest - far)
        return self._least_launch + waits + (far + near) * space.itemsize

    @cached_property
    def _known_remaining(self) -> dict[State, float]:
        return self.space.tables.remaining.setdefault(self.space.goal_state, {})

    def _least_peak_bytes(self) -> int:
        """The smallest peak of any path: the limit is lowered until no path is left."""
        least, path = 0, self._search()
        while path is not None:
            least = path.held * self.space.itemsize
            path = replace(self, memory_limit=least - 1)._search()
        return least
