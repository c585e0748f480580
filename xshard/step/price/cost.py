"""A cost as a function of parts: a sum, maxima of sums, limited sums; linear and integer programs of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xshard.errors import PlanError
from xshard.step.price.options import Flags, Floats, Ints

TOO_MUCH = 1e3  # times the cost, for a limit that is exceeded once over


@dataclass(frozen=True, eq=False)
class Cost:
    """`linear @ v + sum(times * max over rows of (maxima @ v))` of parts v, where `limited @ v <= 1`.

    linear: [parts]; times: [maxima]; maxima: [maxima, rows, parts]; limited: [limits, parts]; all >= 0.
    """

    linear: Floats
    times: Floats
    maxima: Floats
    limited: Floats

    def of(self, vectors: Floats) -> Floats:
        """The cost of each vector."""
        highest = (vectors @ self.maxima.swapaxes(1, 2)).max(-1)
        return np.asarray(vectors @ self.linear + highest.T @ self.times)

    def used(self, vectors: Floats) -> Floats:
        """The largest share of a limit that each vector uses."""
        return np.asarray((vectors @ self.limited.T).max(-1, initial=0.0))

    def rank(self, vectors: Floats, times: float = TOO_MUCH) -> Floats:
        """The cost, and more for what exceeds a limit: so many times the cost for each time over."""
        with np.errstate(invalid="ignore"):  # infinite parts
            rank = self.of(vectors) * (1 + times * np.maximum(self.used(vectors) - 1, 0))
        return np.nan_to_num(rank, nan=np.inf)

    def mixture(self, vectors: Floats) -> tuple[float, Floats]:
        """The cost of the best mixture of vectors, and the shares that prove it.

        Variables of its program: a share of each vector, the maxima, and by how much a limit is exceeded.
        """
        n, t, limits = map(len, (vectors, self.times, self.limited))
        scale = float(self.of(vectors).min()) or 1.0
        above = (self.weighed(scale) @ vectors.T).reshape(-1, n)
        under = np.tile(-np.eye(t, t + 1), (len(above) // t, 1))
        exceeded = np.append(np.zeros((limits, t)), -np.ones((limits, 1)), 1)
        table = np.block([[above, under], [self.limited @ vectors.T, exceeded]])
        most = np.repeat([0.0, 1.0], [len(above), limits])
        all_shares = np.arange(n + t + 1)[None] < n
        seconds = np.concatenate([vectors @ self.linear / scale, np.ones(t), [TOO_MUCH]])
        solved = optimizer().linprog(seconds, table, most, all_shares, [1.0])
        shares, worth = np.split(-solved.ineqlin.marginals, [-limits])
        return scale * float(solved.fun), np.append(shares, scale * worth)

    def weighed(self, scale: float) -> Floats:
        """The rows of all maxima, times how often they count, over the scale: [rows, maxima, parts]."""
        return np.asarray((self.maxima * self.times[:, None, None] / scale).swapaxes(0, 1))

    def weights(self, shares: Floats) -> tuple[Floats, float]:
        """Weights of parts and a constant: `weights @ v - constant` is at most the cost within the limits.

        shares: for each maximum 1 in all of its rows, then the worth of each limit.
        """
        of_rows, worth = np.split(shares, [-len(self.limited)])
        weights = np.einsum(
            "rt, t, trp -> p", of_rows.reshape(-1, len(self.times)), self.times, self.maxima
        )
        return weights + self.linear + worth @ self.limited, float(worth.sum())


class Pairs(NamedTuple):
    """Parts of what two nodes cost together, in tables [parts, rows, columns].

    indices: for each option of the nodes its row, or its column. banned: no such pair.
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
    """The cheapest assignment within all limits, None if none is found, and a lower bound of the cost of all.

    values: for each node the parts of every option. scale: about the cost. most_nodes: nodes of the search
    tree after which it ends; gap: the share of the cost that it may leave. Tolerances are for costs of
    about 1. Variables: a share of each option, flows between the rows and the columns of pairs, and maxima.
    """
    from scipy import sparse

    scipy = optimizer()
    starts = np.cumsum([0, *map(len, values)])
    n_nodes = len(values)
    n = int(starts[-1])
    rows = n_nodes
    parts = [sparse.csc_array(np.concatenate(values).T)]
    same = [
        (np.repeat(np.arange(n_nodes), np.diff(starts)), np.arange(n), np.ones(n))
    ]  # shares: 1 in all
    for nodes, indices, which, tables, banned in pairs:
        used = [np.isin(np.arange(size), i) for size, i in zip(banned.shape, indices, strict=True)]
        row, column = np.nonzero(~banned & used[0][:, None] & used[1])
        terms = np.zeros((len(cost.linear), len(row)))
        terms[which] = tables[:, row, column]
        parts.append(sparse.csc_array(terms))
        for node, size, flow, i in zip(nodes, banned.shape, (row, column), indices, strict=True):
            same.append((rows + flow, n + np.arange(len(flow)), np.ones(len(flow))))
            same.append((rows + i, starts[node] + np.arange(len(i)), -np.ones(len(i))))
            rows += size
        n += len(row)
    row, column, sign = map(np.concatenate, zip(*same, strict=True))
    table = sparse.hstack(parts).tocsr()
    t = len(cost.times)
    above = [sparse.hstack([each @ table, -sparse.eye_array(t)]) for each in cost.weighed(scale)]
    limited = sparse.hstack([cost.limited @ table, sparse.csr_array((len(cost.limited), t))])
    equal = sparse.csr_array((sign, (row, column)), shape=(rows, n + t))
    ones = np.arange(rows) < n_nodes
    solved = scipy.milp(
        np.append(cost.linear @ table / scale, np.ones(t)),
        integrality=np.arange(n + t) < starts[-1],  # flows are whole where options are
        constraints=[
            (sparse.vstack(above), -np.inf, 0),
            (limited, -np.inf, 1),
            (equal, ones, ones),
        ],
        options={"node_limit": most_nodes, "mip_rel_gap": gap},
    )
    bound = np.inf if solved.status == 2 else scale * (solved.mip_dual_bound or 0.0)
    if solved.x is None:
        return None, bound
    return [int(np.argmax(solved.x[a:b])) for a, b in pairwise(starts)], bound


def optimizer() -> Any:
    """Scipy's optimizers. Raises PlanError without scipy."""
    try:
        from scipy import optimize
    except ImportError:
        raise PlanError(
            "a search needs scipy", hint="pip install scipy, or xshard[suggest]"
        ) from None
    return optimize
