"""The cheapest assignment of a problem within its limits, and a bound for all others.

Weights turn all parts of the cost into one number for every option and move. The least sum under any weights
is a bound (Lagrange), and a linear program over the assignments found so far has the weights to try next
(Dantzig and Wolfe 1960). Moves begin with bounds, and are planned where an assignment has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from xshard.step.cost import Cost
from xshard.step.eliminate import least_with, minimum
from xshard.step.moves import Floats
from xshard.step.options import Flags
from xshard.step.problem import Problem
from xshard.step.program import Pairs, solve_program

ROUNDS = 100  # of weights
CLOSE = 1e-4  # of the seconds: a bound so near is reached
MOST_NODES = 1000  # of the integer program's search tree
STARTS = 3  # assignments to improve


@dataclass(eq=False)
class Search:
    """The best assignment found for a problem, its seconds, and a lower bound of all that fit the limit.

    allowed: options of nodes, if not all.
    """

    problem: Problem
    limit: float
    allowed: Sequence[Flags] | None = None
    bound: float = 0.0
    seconds: float = np.inf
    best: list[int] | None = None
    found: dict[tuple[int, ...], Floats] = field(default_factory=dict)
    _proof: tuple[Floats, float] | None = None

    @cached_property
    def cost(self) -> Cost:
        """The cost of vectors of parts."""
        return self.problem.cost(self.limit)

    def offer(self, assignment: Sequence[int]) -> float:
        """Plan the moves of an assignment, keep it if it is the best; the seconds that planning added."""
        late = self.problem.plan(assignment)
        vector = self.problem.vector(assignment)
        if np.isfinite(vector).all():
            self.found[tuple(assignment)] = vector
            seconds = float(self.cost.of(vector))
            if seconds < self.seconds and self.cost.used(vector) <= 1:
                self.seconds, self.best = seconds, list(assignment)
        return late * self.problem.training.micro_batches

    def start(self) -> None:
        """Offer the assignment with the fewest seconds if nothing overlaps, whatever it holds."""
        cost = self.cost
        self.offer(self.least(cost.linear + cost.times @ cost.maxima.mean(1) + cost.limited.mean(0))[1])

    def relax(self, cutoff: float = np.inf) -> None:
        """Raise the bound as far as weights can, or above the cutoff."""
        if not self.found:
            self.start()
        for _ in range(ROUNDS if self.found else 0):
            value, weights, spared = self.cost.mixture(np.array(list(self.found.values())))
            late = np.inf
            while late > CLOSE * value and self.bound <= cutoff:
                least, assignment = self.least(weights)
                if least - spared > self.bound:
                    self.bound, self._proof = least - spared, (weights, spared)
                late = self.offer(assignment)
            if self.bound > min(cutoff, (1 - CLOSE) * value):
                return

    def least(self, weights: Floats) -> tuple[float, list[int]]:
        """The least weighted sum, and an assignment that has it."""
        return minimum(*self._weighed(weights))

    def _weighed(self, weights: Floats) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        unary = [node.values @ weights for node in self.problem.nodes]
        if self.allowed is not None:
            unary = [np.where(a, table, np.inf) for a, table in zip(self.allowed, unary, strict=True)]
        pairs = dict[tuple[int, int], Floats]()
        for edge in self.problem.edges:
            pairs[edge.nodes] = pairs.get(edge.nodes, 0.0) + edge.weighed(weights)
        return unary, pairs

    def close(self, gap: float) -> None:
        """Bring the bound to within a share of the best by an integer program of the options that may be better."""
        goal = self.seconds * (1 - gap)
        while self.bound < goal and self._proof is not None:
            weights, spared = self._proof
            tables, nodes, before = self._weighed(weights), self.problem.nodes, self.seconds
            keep = [np.nonzero(least_with(*tables, v) - spared <= goal)[0] for v in range(len(nodes))]
            if not all(map(len, keep)):  # nothing is that good
                self.bound = goal
                return
            pairs = [
                Pairs(
                    e.nodes, (e.index[0][keep[e.nodes[0]]], e.index[1][keep[e.nodes[1]]]), e.tables, e.banned
                )
                for e in self.problem.edges
            ]
            values = [node.values[k] for node, k in zip(nodes, keep, strict=True)]
            found = solve_program(values, pairs, self.cost, self.seconds, MOST_NODES, gap / 2)
            late = 0.0
            if found.assignment is not None:
                late = self.offer([int(k[i]) for k, i in zip(keep, found.assignment, strict=True)])
            self.bound = min(self.seconds, max(self.bound, min(found.bound, goal)))
            goal = self.seconds * (1 - gap)
            if late <= 0 and self.seconds == before:
                return

    def improve(self) -> None:
        """Change the best assignments at one node at a time for the better, as long as that is possible."""
        ranks = {assignment: float(self.cost.rank(v)) for assignment, v in self.found.items()}
        for start in sorted(ranks, key=ranks.__getitem__)[:STARTS]:
            here, unchanged, node = list(start), 0, 0
            while unchanged < len(here):
                rank = float(self.cost.rank(self.problem.vector(here)))
                options = self.cost.rank(self.problem.alternatives(here, node))
                if self.allowed is not None:
                    options = np.where(self.allowed[node], options, np.inf)
                there = [*here[:node], int(options.argmin()), *here[node + 1 :]]
                if options.min() < rank * (1 - CLOSE / 10) and self.offer(there) is not None:
                    options = self.cost.rank(self.problem.vector(there))
                better = bool(options.min() < rank * (1 - CLOSE / 10))
                here, unchanged, node = (
                    there if better else here,
                    0 if better else unchanged + 1,
                    (node + 1) % len(here),
                )
