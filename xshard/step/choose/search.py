"""The cheapest assignment of a problem within its limits, and a bound for all others.

Weights turn all parts of the cost into one number for every option and move. The least sum under
any weights is a bound (Lagrange), and a linear program over the assignments so far has the weights
to try next (Dantzig and Wolfe 1960). Moves begin with bounds, and are planned as soon as an
assignment has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xshard.step.choose.eliminate import Bucket, excess, minimum
from xshard.step.choose.programs import Pairs, Solution, best_mixture, solve_program
from xshard.step.price.options import Flags, Floats, Ints
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import REPLICAS

ROUNDS = 100  # of weights
ROUNDS_IN_VAIN = 6  # one after another, whose bounds are below the least and raise nothing
# Entries that a bound adds up: few, and after rounds in vain more, which takes longer.
FEW_ADDED_UP = 2**22
MOST_ADDED_UP = 2**26
CLOSE = 2e-5  # of the seconds: a bound so near is reached
MOST_PROGRAMS = 5  # one after another, as moves are planned that the one before has
MOST_NODES = 100  # of the integer program's search tree
MOST_FLOWS = 5_000  # in an integer program: with 16,000 it takes 25 s
STARTS = 3  # assignments to improve
# Times the cost, for a limit that is exceeded once over: changes may mend it.
EXCESS_BEFORE_CHANGES = 10.0
STAY = 0.5  # of the multipliers of the bound stays in those to try next, which jump otherwise
# Of the seconds between bound and mixture: moves are planned to this before other weights.
NEAR = 0.1
CUT = 0.7  # of the seconds between bound and cutoff: then options are left out again


class Bound(NamedTuple):
    """A lower bound of the seconds of all assignments, one that has it, and the proof."""

    seconds: float
    assignment: list[int]
    buckets: list[Bucket]

    @property
    def is_exact(self) -> bool:
        """Whether the assignment has the bound: no variable was minimized over in two parts."""
        return len({bucket.variable for bucket in self.buckets}) == len(self.buckets)


@dataclass(eq=False)
class StepSearch:
    """The best assignment of a problem so far, and a lower bound of all that fit the limit.

    Args:
        problem: The problem.
        limit: Bytes that a device may hold.
        options: The options that each node may take; none given: all of them.
        bound: No assignment takes fewer seconds than this, or than `cutoff`.
        seconds: The seconds of the best assignment.
        best: The best assignment, None if none fits.
        cutoff: Seconds of a plan that is known: what takes longer is not looked at.
        vectors: The parts of the cost of assignments so far.
    """

    problem: StepProblem
    limit: float
    options: Sequence[Ints] = ()
    bound: float = 0.0
    seconds: float = np.inf
    best: list[int] | None = None
    cutoff: float = np.inf
    vectors: dict[tuple[int, ...], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cost = self.problem.cost(self.limit)
        n_maxima, n_rows, _ = self.cost.maxima.shape
        # Seconds have maxima of several rows, such as max(computing, moving). Weights, which bound
        # them from below, begin with an equal share for each row of a maximum, and with memory that
        # is worth nothing.
        row_shares = np.full(n_maxima * n_rows, 1 / n_rows)
        limit_worths = np.zeros(len(self.cost.limit_shares))
        # The shares and worths that gave the best bound so far, in the order of `CostFunction.weights`.
        self.multipliers = np.append(row_shares, limit_worths)
        if not self.options:
            self.options = [np.arange(len(node.placements)) for node in self.problem.nodes]
        # `options`, but for those that no assignment within the cutoff (in seconds) can have.
        self.live_options = self.options
        self._gap_at_cut = np.inf  # seconds between bound and cutoff when options were left out
        # The round that `advance` is in: its number, the seconds of the best mixture of
        # assignments, the weights that it tries.
        self._n_rounds = 0
        self._n_rounds_in_vain = 0
        self._most_added_up = FEW_ADDED_UP
        self._mixture_s = np.inf
        self._tried_multipliers = self.multipliers
        # The best assignment under these weights, which is not offered yet; None before the first
        # round.
        self._found: list[int] | None = None

    def offer(self, assignment: Sequence[int]) -> float:
        """Plan the moves of an assignment, and keep it if it is the best.

        Returns the seconds that planning added to the bounds of its moves.
        """
        added = self.problem.raise_to_prices(assignment)
        vector = self.problem.vector(assignment)
        if np.isfinite(vector).all():
            self.vectors[tuple(assignment)] = vector
            seconds = float(self.cost.total(vector))
            if seconds < self.seconds and self.cost.largest_limit_share(vector) <= 1:
                self.seconds = seconds
                self.best = list(assignment)
        return added * self.problem.micro_batches

    def begin(self) -> list[int]:
        """Bound the seconds from below, with weights as if half of all moves ran beside computing.

        Nothing is planned: the next step offers the assignment that has this bound, and is
        returned.
        """
        n_limits = len(self.cost.limit_shares)
        # In all, the memory is worth one second.
        multipliers = np.append(self.multipliers[:-n_limits], np.full(n_limits, 1 / n_limits))
        bound = self.bound_by(multipliers)
        self.bound = max(self.bound, bound.seconds)  # infinite if all need an impossible move
        self._found = bound.assignment
        return bound.assignment

    def start(self) -> None:
        """Begin, and offer the assignment that is fastest under the first weights."""
        self._offer_or_whole(self.begin())

    def within(self, flags: Sequence[Flags]) -> StepSearch | None:
        """Return a search among some of the options; None if a node has none of them."""
        pairs = zip(self.options, flags, strict=True)
        options = [own_options[allowed[own_options]] for own_options, allowed in pairs]
        if not all(len(own_options) for own_options in options):
            return None
        return StepSearch(self.problem, self.limit, options)

    def plans_within(self, flags: Sequence[Flags]) -> Mapping[tuple[int, ...], Floats]:
        """Return a good plan among some of the options with the parts of its cost; or none."""
        search = self.within(flags)
        if search is None:
            return {}
        search.start()
        return search.vectors

    def run(self, most_steps: int = sys.maxsize, most_s: float = np.inf) -> None:
        """Raise the bound as far as weights can, in a number of steps, or up to some seconds."""
        for _ in range(most_steps):
            if self.bound >= most_s or not self.advance():
                return

    def advance(self) -> bool:
        """Do one step of raising the lower bound of all plans' seconds; False when it is done.

        The cost of a plan has many parts: seconds of computing and moving, and bytes. Weights make
        one number of them, which is never more than the seconds of a plan that fits the memory. So
        the least weighted sum of any assignment (a choice of layouts) is a bound for all plans.

        Each call finds the assignment with the least weighted sum. The next call first offers it:
        the planner prices its moves, which had only lower bounds. If that adds much, the same
        weights are tried again with the better prices. Else a new round begins, with new weights
        from the mixture of all assignments so far (`best_mixture`).

        Returns:
            False if weights can raise the bound no more, or have not lately.
        """
        found = self._found
        if found is None:  # the first step
            if self.vectors:  # the mixture of plans that are known has better weights
                return self._begin_round()
            found = self.begin()
        # Offered only now, for planning takes long: a search is given up before its next step if
        # others find a better plan meanwhile.
        added_s = self._offer_or_whole(found)
        missing_s = self._mixture_s - self.bound
        if added_s > max(CLOSE * self._mixture_s, NEAR * missing_s):
            self._find_under_tried_weights()  # the same weights again, with better prices
            return True
        # No weights give a higher bound than the mixture of the assignments.
        if self.bound >= (1 - CLOSE) * self._mixture_s:
            return False
        return self._begin_round()

    def _offer_or_whole(self, assignment: list[int]) -> float:
        """Offer an assignment, and one of whole arrays if no possible one is known.

        Returns the seconds that planning the first one added (`offer`).
        """
        added_s = self.offer(assignment)
        if not self.vectors:
            # The bound of large tables may be of moves that do not exist; whole arrays never move.
            pairs = zip(self.options, self.problem.nodes, strict=True)
            self.offer([_most_whole(node.placements, options) for options, node in pairs])
        return added_s

    def _begin_round(self) -> bool:
        """Try new weights: between the best so far and those of the best mixture.

        Sets the seconds of the mixture, too, which no bound passes at the prices known so far.
        Returns False after ROUNDS rounds, or ROUNDS_IN_VAIN; or if no assignment is possible, so
        that there is nothing to mix.
        """
        if self._n_rounds_in_vain == ROUNDS_IN_VAIN:
            # A bound of tables that are too large stays below the mixture, whatever the weights.
            if self._most_added_up == MOST_ADDED_UP:
                return False
            self._most_added_up = MOST_ADDED_UP
            self._n_rounds_in_vain = 0
        if self._n_rounds == ROUNDS or not self.vectors:
            return False
        self._n_rounds += 1
        vectors = np.array(list(self.vectors.values()))
        mixture = best_mixture(self.cost, vectors)
        self._mixture_s = mixture.cost
        self._tried_multipliers = STAY * self.multipliers + (1 - STAY) * mixture.multipliers
        self._find_under_tried_weights()
        return True

    def _find_under_tried_weights(self) -> None:
        """Find the best assignment under the weights of this round, and keep a better bound.

        A better bound brings its weights along, and may leave options out. The assignment is set as
        `_found` in any case: worse weights still find one to learn from.
        """
        bound = self.bound_by(self._tried_multipliers)
        if bound.is_exact or bound.seconds > self.bound * (1 + CLOSE):
            self._n_rounds_in_vain = 0
        elif self.bound > 0:  # at first, weights are so far off that they prove nothing
            self._n_rounds_in_vain += 1
        if bound.seconds > self.bound:
            self.bound = bound.seconds
            self.multipliers = self._tried_multipliers
            self._leave_out_options(bound)
        self._found = bound.assignment

    def _leave_out_options(self, bound: Bound) -> None:
        """Shrink `live_options` by options with which all assignments take more than the cutoff."""
        gap = self.cutoff - self.bound
        # It takes about as long as a bound, hence only when the gap is clearly smaller.
        if 0 < gap < CUT * self._gap_at_cut:
            self._gap_at_cut = gap
            options = self._options_within(bound, gap)
            if all(map(len, options)):
                self.live_options = options
            else:  # with any option of some node, an assignment takes more
                self.bound = self.cutoff

    def _options_within(self, bound: Bound, seconds: float) -> list[Ints]:
        """Return for each node the options with which an assignment may be near a bound.

        With all others, every assignment takes more than `seconds` over the bound.
        """
        excess_of = excess(bound.buckets)
        # The only option of a node costs no more than it must.
        only = np.zeros(1)
        return [
            own[excess_of.get(node, only) <= seconds] for node, own in enumerate(self.live_options)
        ]

    def bound_by(self, multipliers: Floats) -> Bound:
        """Minimize the cost under multipliers (`CostFunction.weights`): a lower bound of all seconds.

        The cost is a sum: a number for each option of a node, and one for each pair of options that
        an edge has a move between.
        """
        weights, constant = self.cost.weights(multipliers)
        live = self.live_options
        pairs = zip(self.problem.nodes, live, strict=True)
        node_tables = [node.costs[options] @ weights for node, options in pairs]
        move_tables, fixed_moves = self._weighted_moves(weights)
        least = minimum(node_tables, move_tables, self._most_added_up)
        # The tables have entries for live options only, which these are the numbers of.
        choices = zip(live, least.assignment, strict=True)
        assignment = [int(options[choice]) for options, choice in choices]
        seconds = least.value + fixed_moves - constant
        return Bound(seconds, assignment, least.buckets)

    def _weighted_moves(self, weights: Floats) -> tuple[dict[tuple[int, int], Floats], float]:
        """Return the weighted costs of all moves between live options.

        A table for each pair of nodes, [options of the first, of the second]; and the sum of the
        moves between nodes with one option each, which all assignments have.
        """
        tables: dict[tuple[int, int], Floats] = {}
        fixed_moves = 0.0
        for edge in self.problem.edges:
            source_options = self.live_options[edge.source]
            user_options = self.live_options[edge.user]
            if len(source_options) == len(user_options) == 1:
                options = int(source_options[0]), int(user_options[0])
                fixed_moves += edge.weighted_between(weights, *options)
            else:
                table = edge.weighted(weights, source_options, user_options)
                # Two edges may join the same nodes.
                tables[edge.nodes] = tables.get(edge.nodes, 0.0) + table
        return tables, fixed_moves

    def close(self, gap: float) -> None:
        """Prove that the best plan is within a share `gap` of the optimum, by integer programs.

        With `gap` 0.01 and a best plan of 100 ms the bound is raised to 99 ms, the goal, or a
        faster plan is found on the way. `advance` alone leaves a gap: its bound is that of mixtures
        of plans, and no plan is a mixture. It ends earlier where a program would be too large, or
        brings nothing new.
        """
        bound = self.bound_by(self.multipliers)
        for _ in range(MOST_PROGRAMS):
            goal = self._goal(gap)
            # With any option that is left out, an assignment takes more than the goal.
            options = self._options_within(bound, goal - bound.seconds)
            n_options = [len(own) for own in options]
            if not all(n_options):  # a node has no option left: all assignments take more
                self.bound = max(self.bound, goal)
            if self.bound >= goal:
                return
            if self._n_flows(options) > MOST_FLOWS:
                self._combine(gap)
                self.improve()
                return
            if not self._close_among(options, goal, gap):
                return

    def _goal(self, gap: float) -> float:
        """Return the seconds below which a plan would be news: a share `gap` less than is known."""
        return min(self.seconds, self.cutoff) * (1 - gap)

    def _combine(self, gap: float) -> None:
        """Offer good combinations of the assignments so far: for each node an option of one of them.

        Weights find assignments that are fast, or small, and each alone takes too many bytes or
        seconds. One that is in between has options of several. Other options are not looked at, so
        that no bound is raised.
        """
        by_node = np.array(list(self.vectors)).T  # [nodes, assignments]
        options = list(map(np.unique, by_node))
        if self._n_flows(options) > MOST_FLOWS:
            return
        for _ in range(MOST_PROGRAMS):
            assignment = self._solve_among(options, self._goal(gap), gap / 2).assignment
            if assignment is None or tuple(assignment) in self.vectors:
                return
            # Its moves are planned now: another combination may be better at these prices.
            self.offer(assignment)

    def _n_flows(self, options: Sequence[Ints]) -> int:
        """Count the flows of an integer program among some options of each node: its size."""
        n_flows = 0
        for edge in self.problem.edges:
            rows = np.unique(edge.rows[options[edge.source]])
            columns = np.unique(edge.columns[options[edge.user]])
            n_flows += len(rows) * len(columns)
        return n_flows

    def _close_among(self, options: Sequence[Ints], goal: float, gap: float) -> bool:
        """Offer the fastest plan among some options, and raise the bound by an integer program.

        All plans with other options take at least `goal` seconds. Returns whether there is news,
        so that another program may raise the bound further: moves that were planned, or a better
        assignment.
        """
        seconds_before = self.seconds
        # Half of the gap is left for the program itself.
        solution = self._solve_among(options, goal, gap / 2)
        added_s = 0.0
        if solution.assignment is not None:
            added_s = self.offer(solution.assignment)
        bound_of_all = min(solution.bound, goal)
        # The best plan is a plan, too: no bound is above it.
        self.bound = min(self.seconds, max(self.bound, bound_of_all))
        return added_s > 0 or self.seconds != seconds_before

    def _solve_among(self, options: Sequence[Ints], most_s: float, gap: float) -> Solution:
        """Find the fastest plan among some options of each node, by an integer program.

        Moves have the prices known so far: the planner's, or lower bounds.

        Args:
            options: For each node the numbers of the options that it may take.
            most_s: Plans that take more seconds are not looked for.
            gap: The solver stops within this share of the optimum.

        Returns:
            The number of an option for each node, None if the solver found none; and a lower bound
            of the seconds of all such plans.
        """
        pairs: list[Pairs] = []
        for edge in self.problem.edges:
            row_of_option = edge.rows[options[edge.source]]
            column_of_option = edge.columns[options[edge.user]]
            rows_and_columns = np.indices(edge.banned.shape)  # of all entries: two [rows, columns]
            pairs.append(
                Pairs(
                    edge.nodes,
                    indices=(row_of_option, column_of_option),
                    parts=edge.parts,
                    tables=edge.costs(rows_and_columns[0], rows_and_columns[1]),
                    banned=edge.banned,
                )
            )
        nodes = zip(self.problem.nodes, options, strict=True)
        node_costs = [node.costs[own] for node, own in nodes]
        # Costs are divided by about the total, for the solver's tolerances suit costs near 1.
        scale = self.seconds if self.best else self.bound
        if not scale:
            scale = 1.0
        solution = solve_program(
            node_costs,
            pairs,
            self.cost,
            scale,
            most_cost=most_s,
            most_nodes=MOST_NODES,
            gap=gap,
        )
        if solution.assignment is None:
            return solution
        # The program numbers only the options that it was given.
        choices = zip(options, solution.assignment, strict=True)
        assignment = [int(own[number]) for own, number in choices]
        return solution._replace(assignment=assignment)

    def improve(self) -> None:
        """Improve the best assignments by changes at one node while they save seconds."""

        def rank(assignment: tuple[int, ...]) -> float:
            return float(self.cost.rank(self.vectors[assignment], EXCESS_BEFORE_CHANGES))

        for start in sorted(self.vectors, key=rank)[:STARTS]:
            self._improve_from(list(start))

    def _improve_from(self, assignment: list[int]) -> None:
        """Offer the best change of an assignment, then the best change of that, while it helps.

        A change is another option of one node. What it adds to the cost depends on the neighbours'
        options alone, so that each step computes this again only around the node that changed.
        """
        n_options = [len(options) for options in self.live_options]
        node_of_change = np.repeat(np.arange(len(n_options)), n_options)
        option_of_change = np.concatenate(self.live_options)
        # What each change adds to the parts of the cost: [changes, parts].
        added_costs = np.zeros((len(node_of_change), self.cost.linear.size))
        nodes_to_price = set(range(len(n_options)))
        previous_rank = np.inf
        while True:
            # The change was chosen by lower bounds of its moves. `offer` has replaced them by prices,
            # and with these it may save nothing.
            vector = self.problem.vector(assignment)
            rank = float(self.cost.rank(vector))
            if rank >= (1 - CLOSE) * previous_rank:
                return
            previous_rank = rank
            for node in nodes_to_price:
                options = self.live_options[node]
                vectors = self.problem.vectors_with(assignment, vector, node, options)
                is_at_node = node_of_change == node  # of each change
                added_costs[is_at_node] = vectors - vector
            best_change = int(self.cost.rank(vector + added_costs).argmin())
            changed_node = int(node_of_change[best_change])
            assignment = list(assignment)
            assignment[changed_node] = int(option_of_change[best_change])
            self.offer(assignment)
            nodes_to_price = {changed_node}
            for edge in self.problem.edges_of_node[changed_node]:
                nodes_to_price.update(edge.nodes)


def _most_whole(placements: Ints, options: Ints) -> int:
    """Return the option in which most axes have replicas, in all arrays."""
    n_not_replicated = (placements[options] != REPLICAS).sum((1, 2))
    return int(options[n_not_replicated.argmin()])
