"""Cheap lower bounds of a sum of tables with each value of each variable, by moving cost between tables.

Sweeps collect what each table must cost at least into its variables and hand it on to the next ones
(sequential reweighting, Kolmogorov 2006). The sum of all tables stays the same, and the sum of their least
entries rises. A value of a variable costs at least as much more as it does in the tables of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from xshard.step.options import Floats

SWEEPS = 10


def bounds_with(
    unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats], most: float, sweeps: int = SWEEPS
) -> tuple[float, list[Floats]]:
    """A lower bound of the sum, and how much more it is at least with each value of every variable.

    most: stands for infinite entries; more than any sum of interest.
    """
    left = [np.minimum(table, most) for table in unary]
    tables = {edge: np.minimum(table, most) for edge, table in pairs.items()}
    edges_of = [[(edge, edge.index(v)) for edge in tables if v in edge] for v in range(len(unary))]
    for sweep in range(2 * sweeps):
        order = range(len(unary)) if sweep % 2 == 0 else reversed(range(len(unary)))
        for v in order:
            for edge, side in edges_of[v]:
                least = tables[edge].min(1 - side)
                tables[edge] -= _along(least, side)
                left[v] = left[v] + least
            later = [(e, side) for e, side in edges_of[v] if (e[1 - side] > v) == (sweep % 2 == 0)]
            each = left[v] / max(len(later), len(edges_of[v]) - len(later), 1)
            for edge, side in later:
                tables[edge] += _along(each, side)
                left[v] = left[v] - each
    bound = sum(float(t.min()) for t in (*left, *tables.values()))
    more = [table - table.min() for table in left]
    for edge, table in tables.items():
        for side in (0, 1):
            more[edge[side]] = more[edge[side]] + table.min(1 - side) - table.min()
    return bound, more


def _along(values: Floats, side: int) -> Floats:
    return values[:, None] if side == 0 else values[None]
