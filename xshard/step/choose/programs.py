"""The linear and the integer program of a cost, for scipy's HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xshard.errors import PlanError
from xshard.step.price.cost import EXCESS, Cost
from xshard.step.price.options import Flags, Floats, Ints

INFEASIBLE = 2  # scipy's status


def best_mixture(cost: Cost, vectors: Floats) -> tuple[float, Floats]:
    """Return the cost of the best mixture of vectors, and the multipliers that prove it.

    A mixture may cost less than each vector, for it may use a limit up. Variables of the program: a
    share of each vector, the maxima, and by how much a limit is exceeded. vectors: [vectors,
    parts]. The multipliers are as in `Cost.weights`.
    """
    n_vectors = len(vectors)
    n_maxima = len(cost.times)
    n_limits = len(cost.limited)
    least = float(cost.of(vectors).min())
    scale = least if least else 1.0  # tolerances are for costs of about 1
    # rows @ shares - maxima <= 0
    rows = (cost.scaled_maxima(scale) @ vectors.T).reshape(-1, n_vectors)
    minus_maxima = np.tile(-np.eye(n_maxima, n_maxima + 1), (len(rows) // n_maxima, 1))
    # limited @ shares - exceeded <= 1
    minus_exceeded = np.append(np.zeros((n_limits, n_maxima)), -np.ones((n_limits, 1)), 1)
    table = np.block([[rows, minus_maxima], [cost.limited @ vectors.T, minus_exceeded]])
    most = np.repeat([0.0, 1.0], [len(rows), n_limits])
    is_share = np.arange(n_vectors + n_maxima + 1) < n_vectors
    objective = np.concatenate([vectors @ cost.linear / scale, np.ones(n_maxima), [EXCESS]])
    solved = optimizer().linprog(objective, table, most, is_share[None], [1.0])
    of_rows, of_limits = np.split(-solved.ineqlin.marginals, [-n_limits])
    return scale * float(solved.fun), np.append(of_rows, scale * of_limits)


class Pairs(NamedTuple):
    """Parts of what two nodes cost together.

    Args:
        nodes: The numbers of both nodes.
        indices: For each option of the nodes its row, and its column.
        parts: The numbers of parts that are not 0.
        tables: Their values: [parts, rows, columns].
        banned: Rows and columns that cannot be together.
    """

    nodes: tuple[int, int]
    indices: tuple[Ints, Ints]
    parts: Sequence[int] | Ints
    tables: Floats
    banned: Flags


def solve_program(
    values: Sequence[Floats],
    pairs: Iterable[Pairs],
    cost: Cost,
    scale: float,
    most_nodes: int,
    gap: float,
) -> tuple[list[int] | None, float]:
    """Find the cheapest assignment within all limits by an integer program.

    Variables: a share of each option, flows between the rows and the columns of pairs, and the
    maxima.

    Args:
        values: For each node the parts of every option: [options, parts].
        pairs: What nodes cost together.
        cost: The cost of a vector of parts.
        scale: About the cost; tolerances are for costs of about 1.
        most_nodes: Nodes of the search tree after which it ends.
        gap: The share of the cost that it may leave.

    Returns:
        The assignment, None if none is found, and a lower bound of the cost of all.
    """
    from scipy import sparse

    variables = _Variables(values)
    for pair in pairs:
        variables.add_flows(pair, len(cost.linear))
    parts = sparse.hstack(variables.parts).tocsr()  # [parts, shares and flows]
    n_maxima = len(cost.times)
    n_variables = parts.shape[1] + n_maxima
    above = list[Any]()  # rows @ parts - maxima <= 0
    for rows in cost.scaled_maxima(scale):
        above.append(sparse.hstack([rows @ parts, -sparse.eye_array(n_maxima)]))
    no_maxima = sparse.csr_array((len(cost.limited), n_maxima))
    limited = sparse.hstack([cost.limited @ parts, no_maxima])
    equal = variables.equalities(n_variables)
    # Shares of each node are 1 in all; flows are as much as the shares of their options.
    right_sides = np.arange(equal.shape[0]) < len(values)
    solved = optimizer().milp(
        np.append(cost.linear @ parts / scale, np.ones(n_maxima)),
        integrality=np.arange(n_variables) < variables.n_options,  # flows follow: whole, too
        constraints=[
            (sparse.vstack(above), -np.inf, 0),
            (limited, -np.inf, 1),
            (equal, right_sides, right_sides),
        ],
        options={"node_limit": most_nodes, "mip_rel_gap": gap},
    )
    bound = np.inf
    if solved.status != INFEASIBLE:
        bound = scale * (solved.mip_dual_bound if solved.mip_dual_bound is not None else 0.0)
    if solved.x is None:
        return None, bound
    ends = pairwise(variables.starts)
    return [int(np.argmax(solved.x[start:end])) for start, end in ends], bound


class _Variables:
    """The shares of options and the flows of an integer program, and their equalities."""

    def __init__(self, values: Sequence[Floats]) -> None:
        from scipy import sparse

        self.starts = np.cumsum([0, *map(len, values)])  # the first share of each node
        self.n_options = int(self.starts[-1])
        self.n_variables = self.n_options
        self.parts = [sparse.csc_array(np.concatenate(values).T)]  # of one column a variable
        self.n_equalities = len(values)
        nodes = np.repeat(np.arange(len(values)), np.diff(self.starts))
        # Entries of the table of equalities: their rows, their columns, and 1 or -1.
        self.entries = [(nodes, np.arange(self.n_options), np.ones(self.n_options))]

    def add_flows(self, pair: Pairs, n_parts: int) -> None:
        """Add a flow for each row and column of a pair that can be together."""
        from scipy import sparse

        n_rows, n_columns = pair.banned.shape
        option_rows, option_columns = pair.indices
        has_row = np.isin(np.arange(n_rows), option_rows)
        has_column = np.isin(np.arange(n_columns), option_columns)
        rows, columns = np.nonzero(~pair.banned & has_row[:, None] & has_column)
        parts = np.zeros((n_parts, len(rows)))
        parts[pair.parts] = pair.tables[:, rows, columns]
        self.parts.append(sparse.csc_array(parts))
        first_node, second_node = pair.nodes
        self._add_equalities(first_node, n_rows, rows, option_rows)
        self._add_equalities(second_node, n_columns, columns, option_columns)
        self.n_variables += len(rows)

    def _add_equalities(self, node: int, size: int, flows: Ints, options: Ints) -> None:
        """Require that the flows of each row are as much as the shares of the options in it.

        flows, options: the row of each flow and of each option.
        """
        flow_variables = self.n_variables + np.arange(len(flows))
        share_variables = self.starts[node] + np.arange(len(options))
        self.entries.append((self.n_equalities + flows, flow_variables, np.ones(len(flows))))
        self.entries.append((self.n_equalities + options, share_variables, -np.ones(len(options))))
        self.n_equalities += size

    def equalities(self, n_variables: int) -> Any:
        """Return the table of equalities; other variables follow shares and flows."""
        from scipy import sparse

        rows, columns, signs = map(np.concatenate, zip(*self.entries, strict=True))
        return sparse.csr_array((signs, (rows, columns)), shape=(self.n_equalities, n_variables))


def optimizer() -> Any:
    """Return scipy's optimizers; raise PlanError without scipy."""
    try:
        from scipy import optimize
    except ImportError:
        hint = "pip install scipy, or xshard[suggest]"
        raise PlanError("a search needs scipy", hint=hint) from None
    return optimize
