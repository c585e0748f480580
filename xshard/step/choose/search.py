"""The cheapest assignment of a problem within its limits, and a bound for all others.

Weights turn all parts of the cost into one number for every option and move. The least sum under any weights
is a bound (Lagrange), and a linear program over the assignments so far has the weights to try next (Dantzig
and Wolfe 1960). Moves begin with bounds, and are planned as soon as an assignment has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from xshard.step.choose.eliminate import Bucket, excess, minimum
from xshard.step.price.cost import Pairs, solve_program
from xshard.step.price.options import Flags, Floats, Ints
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import REPLICAS

ROUNDS = 100  # of weights
CLOSE = 2e-5  # of the seconds: a bound so near is reached
MOST_PROGRAMS = 5  # one after another, as moves are planned that the one before has
MOST_NODES = 100  # of the integer program's search tree
MOST_OPTIONS = 2500  # in an integer program
STARTS = 3  # assignments to improve
OVER = 10.0  # times the cost, for a limit that is exceeded once over, before changes mend that
STAY = 0.5  # of the shares of the bound stays in those to try next, which jump otherwise
NEAR = 0.1  # of the seconds between the bound and a mixture: moves are planned to this before other shares
CUT = 0.7  # of the seconds between bound and cutoff: then options are left out again


@dataclass(eq=False)
class StepSearch:
    """The best assignment of a problem so far, its seconds, and a lower bound of all that fit the limit.

    left: the options of every node that it may take. vectors: the parts of the cost of assignments so far.
    cutoff: seconds of a plan that is known: the bound is of all that take less.
    """

    problem: StepProblem
    limit: float
    left: Sequence[Ints] = ()
    bound: float = 0.0
    seconds: float = np.inf
    best: list[int] | None = None
    cutoff: float = np.inf
    vectors: dict[tuple[int, ...], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cost = self.problem.cost(self.limit)
        n_maxima, n_rows = self.cost.maxima.shape[:2]
        rows = np.full(n_maxima * n_rows, 1 / n_rows)
        limits = np.zeros(len(self.cost.limited))
        self.proof = np.append(rows, limits)  # the shares of the bound
        self.left = self.left or [np.arange(len(node.ways)) for node in self.problem.nodes]
        self.live = (
            self.left
        )  # without options with which every assignment takes more than the cutoff

    def offer(self, assignment: Sequence[int]) -> float:
        """Plan the moves of an assignment, keep it if it is the best; the seconds that planning added."""
        late = self.problem.plan(assignment)
        vector = self.problem.vectors(assignment)[0]
        if np.isfinite(vector).all():
            self.vectors[tuple(assignment)] = vector
            seconds = float(self.cost.of(vector))
            if seconds < self.seconds and self.cost.used(vector) <= 1:
                self.seconds, self.best = seconds, list(assignment)
        return late * self.problem.micro_batches

    def start(self) -> None:
        """Offer the assignment with the fewest seconds if half of all moves overlaps, whatever it holds."""
        n = len(self.cost.limited)
        self.offer(self.least(np.append(self.proof[:-n], np.full(n, 1 / n)))[1])
        if (
            not self.vectors
        ):  # the bound of large tables may be of moves that do not exist; whole arrays stay
            nodes = zip(self.left, self.problem.nodes, strict=True)
            self.offer([int(o[(n.ways[o] != REPLICAS).sum((1, 2)).argmin()]) for o, n in nodes])

    def within(self, flags: Sequence[Flags]) -> StepSearch:
        """A search among some of the options, with the assignment to start with if there is one."""
        left = [
            options[allowed[options]] for options, allowed in zip(self.left, flags, strict=True)
        ]
        search = StepSearch(self.problem, self.limit, left)
        if all(map(len, left)):
            search.start()
        return search

    def rounds(self) -> Iterator[None]:
        """Raise the bound as far as weights can, with a pause after each of them."""
        if not self.vectors:
            self.start()
        narrow = (
            np.inf
        )  # the seconds between the bound and the cutoff when options were left out last
        for _ in range(ROUNDS if self.vectors else 0):
            value, shares = self.cost.mixture(np.array(list(self.vectors.values())))
            shares = STAY * self.proof + (1 - STAY) * shares
            late = np.inf
            while late > max(CLOSE * value, NEAR * (value - self.bound)):
                least, assignment, buckets = self.least(shares)
                if least > self.bound:
                    self.bound = least
                    self.proof = shares
                    if 0 < self.cutoff - self.bound < CUT * narrow:
                        narrow = self.cutoff - self.bound
                        more = excess(buckets)
                        self.live = [own[more[v] <= narrow] for v, own in enumerate(self.live)]
                del buckets  # the search pauses here, beside others
                yield
                late = self.offer(assignment)
            if self.bound >= (1 - CLOSE) * value:
                return

    def least(self, shares: Floats) -> tuple[float, list[int], list[Bucket]]:
        """A bound by shares, an assignment that has it, and the tables in between."""
        weights, spared = self.cost.weights(shares)
        unary = [
            node.values[own] @ weights
            for node, own in zip(self.problem.nodes, self.live, strict=True)
        ]
        pairs = dict[tuple[int, int], Floats]()
        for edge in self.problem.edges:
            table = edge.weighed(weights, *(self.live[node] for node in edge.nodes))
            pairs[edge.nodes] = pairs.get(edge.nodes, 0.0) + table
        value, chosen, buckets = minimum(unary, pairs)
        return (
            value - spared,
            [int(own[i]) for own, i in zip(self.live, chosen, strict=True)],
            buckets,
        )

    def close(self, gap: float) -> None:
        """Bring the bound to within a share of the best by an integer program of what may be better."""
        value, _, buckets = self.least(self.proof)
        more = excess(buckets)
        for _ in range(MOST_PROGRAMS):
            goal = self.seconds * (1 - gap)
            spare = goal - value
            left = [own[more[v] <= spare] for v, own in enumerate(self.live)]
            if not all(map(len, left)):
                self.bound = max(self.bound, goal)
            if self.bound >= goal or sum(map(len, left)) > MOST_OPTIONS:
                return
            before = self.seconds
            late = 0.0
            pairs = list[Pairs]()
            for edge in self.problem.edges:
                rows, columns = (i[left[n]] for i, n in zip(edge.indices, edge.nodes, strict=True))
                tables = edge.of(*np.indices(edge.banned.shape))
                pairs.append(Pairs(edge.nodes, (rows, columns), edge.parts, tables, edge.banned))
            values = [node.values[own] for node, own in zip(self.problem.nodes, left, strict=True)]
            about = self.seconds if self.best else self.bound or 1.0
            chosen, bound = solve_program(values, pairs, self.cost, about, MOST_NODES, gap / 2)
            if chosen is not None:
                late = self.offer([int(own[i]) for own, i in zip(left, chosen, strict=True)])
            self.bound = min(self.seconds, max(self.bound, min(bound, goal)))
            if late <= 0 and self.seconds == before:
                return

    def improve(self) -> None:
        """Make the best assignments better by the best change at one node, as long as one saves something."""
        ranks = {each: float(self.cost.rank(vector, OVER)) for each, vector in self.vectors.items()}
        for start in sorted(ranks, key=ranks.__getitem__)[:STARTS]:
            here = list(start)
            rank = np.inf
            change = list(start)
            while (now := float(self.cost.rank(self.problem.vectors(change)[0]))) < (
                1 - CLOSE
            ) * rank:
                here = change
                rank = now
                least = np.inf
                for node, own in enumerate(self.live):
                    each = self.cost.rank(self.problem.vectors(here, node))[own]
                    if each.min() < least:
                        least = each.min()
                        change = [*here[:node], int(own[each.argmin()]), *here[node + 1 :]]
                self.offer(change)
