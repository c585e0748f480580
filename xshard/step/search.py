"""The cheapest assignment of a problem within a memory limit, and a bound for all others.

Seconds are sums of maxima and bytes have a limit; weights turn both into one number for every option and move.
The least sum under any weights is a bound (Lagrange), and a linear program over the assignments found so far
has the weights to try next (Dantzig and Wolfe 1960). Moves begin with bounds, and are planned where an
assignment has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xshard.errors import PlanError
from xshard.step.eliminate import minimum
from xshard.step.moves import Floats
from xshard.step.problem import (
    COMPUTED,
    COMPUTED_BACK,
    HELD,
    MEMORY,
    MOVED,
    MOVED_BACK,
    OPTIMIZER,
    PARTS,
    Problem,
)

ROUNDS = 100  # of weights
STARTS = 5  # assignments to improve
CLOSE = 1e-4  # of the seconds: a bound so near is reached


@dataclass(eq=False)
class Search:
    """The best assignment found for a problem, its seconds, and a lower bound of all that fit the limit."""

    problem: Problem
    limit: float
    bound: float = 0.0
    seconds: float = np.inf
    best: list[int] | None = None
    _found: dict[tuple[int, ...], Floats] = field(default_factory=dict)
    rounds: int = 0

    def offer(self, assignment: Sequence[int]) -> float:
        """Plan the moves of an assignment, keep it if it is the best; the seconds that planning added."""
        late = self.problem.plan(assignment)
        vector = self.problem.vector(assignment)
        if np.isfinite(vector).all():
            self._found[tuple(assignment)] = vector
            seconds = float(self.problem.seconds(vector))
            if seconds < self.seconds and self.problem.bytes(vector) <= self.limit:
                self.seconds, self.best = seconds, list(assignment)
        return late

    def relax(self, cutoff: float = np.inf) -> None:
        """Raise the bound as far as weights can, or above the cutoff."""
        problem = self.problem
        if not self._found:
            self.offer(minimum(*self._weighed(np.ones(problem.size) / self.limit))[1])
        for self.rounds in range(ROUNDS):
            value, weights, spared = self._master()
            while True:
                least, assignment = minimum(*self._weighed(weights))
                self.bound = max(self.bound, least - spared)
                late = self.offer(assignment)
                if late * problem.training.micro_batches < CLOSE * value or self.bound > cutoff: 
                    break
            if self.bound > min(cutoff, (1 - CLOSE) * value):
                return

    def improve(self) -> None:
        """Change one node at a time of the best assignments for the better, as long as that is possible."""
        problem = self.problem
        starts = sorted(self._found, key=lambda a: self._rank(self._found[a]))[:STARTS]
        for start in starts:
            here, changed = list(start), True
            while changed:
                changed = False
                for node in range(len(here)):
                    vectors = self._alternatives(here, node)
                    ranks = self._rank(vectors)
                    there = int(ranks.argmin())
                    if ranks[there] < self._rank(vectors[here[node]]) * (1 - 1e-9):
                        moved = [*here[:node], there, *here[node + 1 :]]
                        self.offer(moved)
                        if self._rank(problem.vector(moved)) < self._rank(problem.vector(here)) * (1 - 1e-9):
                            here, changed = moved, True

    def _rank(self, vectors: Floats) -> Floats:
        """Seconds, and many more for each byte above the limit."""
        over = np.maximum(self.problem.bytes(vectors) / self.limit - 1, 0)
        return self.problem.seconds(vectors) * (1 + 10 * over)

    def _alternatives(self, assignment: Sequence[int], node: int) -> Floats:
        """The parts of the cost with every option of one node."""
        problem, every = self.problem, np.arange(len(self.problem.nodes[node].values))
        total = problem.nodes[node].values + sum(
            other.values[i] for n, (other, i) in enumerate(zip(problem.nodes, assignment, strict=True)) if n != node
        )
        for edge in problem.edges:
            ends = [every if n == node else np.array([assignment[n]]) for n in edge.nodes]
            total = total + edge.vectors(*np.broadcast_arrays(*ends), problem.size)
        return total

    def _weighed(self, weights: Floats) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        pairs = dict[tuple[int, int], Floats]()
        for edge in self.problem.edges:
            table = edge.weighed(weights)
            pairs[edge.nodes] = pairs.get(edge.nodes, 0.0) + table
        return [node.values @ weights for node in self.problem.nodes], pairs

    def _master(self) -> tuple[float, Floats, float]:
        """The seconds of the best mixture of what was found, weights that prove it, and what limits spare."""
        from scipy.optimize import linprog
        problem, vectors = self.problem, np.array(list(self._found.values())).T
        n, blocks = vectors.shape[1], len(problem.blocks)
        times = problem.training.micro_batches * np.repeat(problem.blocks, 2)
        hidden = problem.training.overlap
        at = [block * len(PARTS) + part for block in range(blocks) for part in (COMPUTED, COMPUTED_BACK)]
        moved = vectors[[i + MOVED - COMPUTED for i in at]]
        beside = vectors[at] + (1 - hidden) * moved
        held = vectors[HELD : blocks * len(PARTS) : len(PARTS)] + sum(vectors[p] for p in MEMORY.values())
        scale = float(problem.seconds(vectors.T).min())
        cost = np.concatenate([vectors[OPTIMIZER], times, [1e3 * scale]])
        A = np.block([
            [beside, -np.eye(len(at)), np.zeros((len(at), 1))],
            [moved, -np.eye(len(at)), np.zeros((len(at), 1))],
            [held / self.limit, np.zeros((blocks, len(at))), -np.ones((blocks, 1))],
        ])
        b = np.concatenate([np.zeros(2 * len(at)), np.ones(blocks)])
        one = np.concatenate([np.ones(n), np.zeros(len(at) + 1)])[None]
        result = linprog(cost, A, b, one, [1.0])
        duals = -result.ineqlin.marginals
        first, second, limits = np.split(duals, [len(at), 2 * len(at)])
        weights = np.zeros(problem.size)
        weights[at] = first
        weights[[i + MOVED - COMPUTED for i in at]] = (1 - hidden) * first + second
        weights[HELD : blocks * len(PARTS) : len(PARTS)] = limits / self.limit
        weights[list(MEMORY.values())] = limits.sum() / self.limit
        weights[OPTIMIZER] = 1
        return float(result.fun), weights, float(limits.sum())
