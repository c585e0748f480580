"""The linear and the integer program of a cost, for scipy's HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xshard.errors import PlanError
from xshard.step.price.cost import EXCESS, CostFunction
from xshard.step.price.options import Flags, Floats, Ints

INFEASIBLE = 2  # scipy's status


class Mixture(NamedTuple):
    """The least cost of a mixture of plans, and its multipliers as `CostFunction.weights` takes them."""

    cost: float
    multipliers: Floats


def best_mixture(cost: CostFunction, vectors: Floats) -> Mixture:
    """Find the cheapest mixture of some plans' costs, by a linear program.

    An assignment, one choice for each array and operation, has a vector of parts: seconds and bytes
    of each kind. A mixture of two vectors is 0.3 of one and 0.7 of the other, say. It may cost less
    than each, for it may use a limit up: one that is fast and takes 12 GB, and one that is slow and
    takes 8 GB, mix to 10 GB. No step can be a mixture. But its cost is the highest bound that
    weights can prove if there are no other assignments, and its multipliers are these weights
    (duality of linear programs).

    Args:
        cost: The cost of a vector of parts.
        vectors: The parts of the cost of some assignments: [vectors, parts].
    """
    n_vectors = len(vectors)
    n_maxima = len(cost.times)
    n_limits = len(cost.limit_shares)
    least = float(cost.total(vectors).min())
    scale = least if least else 1.0  # the solver's tolerances are for costs of about 1
    # Variables: a share of each vector, the maxima, and by how much a limit is exceeded. A high
    # price, EXCESS, keeps that at 0 where it can be; without it a program in which nothing fits
    # would have no solution.
    objective = np.concatenate([vectors @ cost.linear / scale, np.ones(n_maxima), [EXCESS]])
    rows = (cost.scaled_maxima(scale) @ vectors.T).reshape(-1, n_vectors)
    maximum_of_row = np.tile(np.eye(n_maxima), (len(rows) // n_maxima, 1))
    limit_shares = cost.limit_shares @ vectors.T
    inequalities = np.block(
        [
            # No row of a maximum is more than the maximum: rows @ shares - maxima <= 0.
            [rows, -maximum_of_row, np.zeros((len(rows), 1))],
            # No limit is used more than once, but for the excess: limits @ shares - excess <= 1.
            [limit_shares, np.zeros((n_limits, n_maxima)), -np.ones((n_limits, 1))],
        ]
    )
    right_sides = np.repeat([0.0, 1.0], [len(rows), n_limits])
    is_share = np.arange(len(objective)) < n_vectors  # all shares are 1 together
    solved = optimizer().linprog(objective, inequalities, right_sides, is_share[None], [1.0])
    # The multipliers are scipy's marginals, which are <= 0 for a minimum: hence the minus. Rows
    # were divided by `scale` above, limits were not, so that only theirs are multiplied again.
    row_shares, limit_worths = np.split(-solved.ineqlin.marginals, [-n_limits])
    multipliers = np.append(row_shares, scale * limit_worths)
    return Mixture(scale * float(solved.fun), multipliers)


class Pairs(NamedTuple):
    """Parts of what two nodes cost together: the moves of an edge, as tables.

    Args:
        nodes: The numbers of both nodes.
        indices: For each option of the first node its row, and of the second its column.
        parts: The numbers of parts that are not 0.
        tables: Their values: [parts, rows, columns].
        banned: Rows and columns that cannot be together: [rows, columns].
    """

    nodes: tuple[int, int]
    indices: tuple[Ints, Ints]
    parts: Sequence[int] | Ints
    tables: Floats
    banned: Flags


class Solution(NamedTuple):
    """The best assignment that an integer program has found, None for none, and a bound for all.

    bound: of the cost, from below; infinite if no assignment is within the limits.
    """

    assignment: list[int] | None
    bound: float


def solve_program(
    values: Sequence[Floats],
    pairs: Iterable[Pairs],
    cost: CostFunction,
    scale: float,
    most_cost: float,
    most_nodes: int,
    gap: float,
) -> Solution:
    """Find the cheapest assignment within all limits by an integer program.

    Its variables, in this order:

    - for each option of each node a share, 0 or 1: whether the node has it;
    - for each pair of nodes, and each row and column of their table, a flow: 1 where the options of
      both nodes meet, else 0;
    - the maxima in the cost.

    Args:
        values: For each node the parts of every option: [options, parts].
        pairs: What nodes cost together.
        cost: The cost of a vector of parts.
        scale: About the cost; tolerances are for costs of about 1.
        most_cost: Assignments that cost more are not looked for.
        most_nodes: Nodes of the search tree after which it ends.
        gap: The share of the cost that it may leave.
    """
    from scipy import sparse

    variables = _Variables(values)
    for pair in pairs:
        variables.add_flows(pair, len(cost.linear))
    # What each share and flow costs. The parts of an assignment are this table times its variables.
    parts = sparse.hstack(variables.parts).tocsr()  # [parts, shares and flows]
    n_maxima = len(cost.times)
    n_variables = parts.shape[1] + n_maxima
    # rows @ parts - maxima <= 0, so that a maximum is no less than any of its rows.
    below_maxima: list[Any] = []
    for rows in cost.scaled_maxima(scale):
        below_maxima.append(sparse.hstack([rows @ parts, -sparse.eye_array(n_maxima)]))
    no_maxima = np.zeros((len(cost.limit_shares), n_maxima))
    within_limits = np.hstack([cost.limit_shares @ parts, no_maxima])
    equalities = variables.equalities(n_variables)
    # The first ones say that the shares of each node are 1 in all. All others are flows minus
    # shares, which are 0.
    right_sides = np.arange(equalities.shape[0]) < len(values)
    objective = np.append(cost.linear @ parts / scale, np.ones(n_maxima))
    solved = optimizer().milp(
        objective,
        # Whole numbers are asked of shares only: flows follow, and are whole, too.
        integrality=np.arange(n_variables) < variables.n_options,
        constraints=[
            (sparse.vstack(below_maxima), -np.inf, 0),
            (within_limits, -np.inf, 1),
            (equalities, right_sides, right_sides),
            (objective, -np.inf, most_cost / scale),
        ],
        options={"node_limit": most_nodes, "mip_rel_gap": gap},
    )
    if solved.status == INFEASIBLE:
        return Solution(None, bound=np.inf)
    # None if the solver ended before it had a bound.
    bound = 0.0 if solved.mip_dual_bound is None else scale * solved.mip_dual_bound
    return Solution(variables.assignment(solved.x), bound)


class _Variables:
    """The shares of options and the flows of an integer program, and their equalities.

    Variables have numbers: first the shares of all options, node by node, then the flows of each
    pair of nodes as it is added. Equalities have numbers, too: first one for each node, its shares
    are 1 in all; then for each pair one for each row and one for each column.
    """

    def __init__(self, values: Sequence[Floats]) -> None:
        from scipy import sparse

        self.starts = np.cumsum([0, *map(len, values)])  # the first share of each node
        self.n_options = int(self.starts[-1])
        self.n_variables = self.n_options
        self.parts = [sparse.csc_array(np.concatenate(values).T)]  # of one column a variable
        self.n_equalities = len(values)
        nodes = np.repeat(np.arange(len(values)), np.diff(self.starts))
        # Entries of the sparse table of equalities: numbers of equalities, numbers of variables,
        # and factors, 1 or -1.
        self.entries = [(nodes, np.arange(self.n_options), np.ones(self.n_options))]

    def add_flows(self, pair: Pairs, n_parts: int) -> None:
        """Add the variables that charge moves between two nodes, flows, and their equalities.

        A flow is 1 where both nodes have their chosen options: for node 0 in row 2 and node 1 in
        column 0, the flow of (2, 0) is 1 and all others are 0. Then the move costs what the tables
        have there. Two kinds of equalities say so: the flows of a row add up to the shares of the
        first node's options in that row, and the flows of a column to the second node's. Banned
        pairs have no flow, so that they cannot be chosen together.

        Args:
            pair: Two nodes, rows and columns of their options, and the tables of costs.
            n_parts: The length of a vector of parts of the cost.
        """
        from scipy import sparse

        n_rows, n_columns = pair.banned.shape
        row_of_option, column_of_option = pair.indices
        # Layouts of options that are left out need no flow.
        has_option = np.zeros((n_rows, n_columns), bool)
        has_option[np.ix_(row_of_option, column_of_option)] = True
        row_of_flow, column_of_flow = np.nonzero(has_option & ~pair.banned)
        parts = np.zeros((n_parts, len(row_of_flow)))  # what each flow costs
        parts[pair.parts] = pair.tables[:, row_of_flow, column_of_flow]
        self.parts.append(sparse.csc_array(parts))
        first_node, second_node = pair.nodes
        self._add_equalities(first_node, n_rows, row_of_flow, row_of_option)
        self._add_equalities(second_node, n_columns, column_of_flow, column_of_option)
        # Only now: the equalities number the new flows from here on.
        self.n_variables += len(row_of_flow)

    def _add_equalities(
        self, node: int, n_rows: int, row_of_flow: Ints, row_of_option: Ints
    ) -> None:
        """Require that the flows of each row are as much as the shares of the options in it.

        Flows minus shares are 0. For the second node of a pair, rows are its columns.
        """
        flow_variables = self.n_variables + np.arange(len(row_of_flow))
        share_variables = self.starts[node] + np.arange(len(row_of_option))
        plus = np.ones(len(row_of_flow))
        minus = -np.ones(len(row_of_option))
        self.entries.append((self.n_equalities + row_of_flow, flow_variables, plus))
        self.entries.append((self.n_equalities + row_of_option, share_variables, minus))
        self.n_equalities += n_rows

    def equalities(self, n_variables: int) -> Any:
        """Return the table of equalities; other variables follow shares and flows."""
        from scipy import sparse

        rows, columns, signs = map(np.concatenate, zip(*self.entries, strict=True))
        return sparse.csr_array((signs, (rows, columns)), shape=(self.n_equalities, n_variables))

    def assignment(self, solution: Floats | None) -> list[int] | None:
        """Return the option of every node that the values of all variables say; None for None."""
        if solution is None:
            return None
        # The largest share, for 1 may be 0.999999.
        ends = pairwise(self.starts)
        return [int(np.argmax(solution[start:end])) for start, end in ends]


def optimizer() -> Any:
    """Return scipy's optimizers; raise PlanError without scipy."""
    try:
        from scipy import optimize
    except ImportError:
        hint = "pip install scipy, or xshard[suggest]"
        raise PlanError("a search needs scipy", hint=hint) from None
    return optimize
