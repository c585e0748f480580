"""The integer program of a problem, exactly: which option each node takes, and flows between layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xshard.step.cost import Cost, optimizer
from xshard.step.moves import Floats
from xshard.step.options import Flags, Indices


class Pairs(NamedTuple):
    """Parts of what two nodes cost together, in tables; indices: for each option its row, or its column."""

    nodes: tuple[int, int]
    indices: tuple[Indices, Indices]
    parts: Mapping[int, Floats]
    banned: Flags


class Solution(NamedTuple):
    """An assignment, None if there is none, and a lower bound of the cost of all."""

    assignment: list[int] | None
    bound: float


def solve_program(
    values: Sequence[Floats],
    pairs: Iterable[Pairs],
    cost: Cost,
    scale: float,
    most_nodes: int,
    gap: float = 0.0,
) -> Solution:
    """The cheapest assignment within all limits. values: for each node the parts of every option.

    Flows are real numbers: where options are chosen, so are they. scale: about what it costs. most_nodes:
    nodes of the search tree after which it ends with what it has; gap: the share of the cost it may leave.
    """
    from scipy import sparse

    starts = np.cumsum([0, *(len(v) for v in values)])
    n, parts = int(starts[-1]), [sparse.csc_array(np.concatenate(values).T)]
    one = np.repeat(np.arange(len(values)), [len(v) for v in values])
    equal = [sparse.csr_array((np.ones(n), (one, np.arange(n))), shape=(len(values), n))]
    flows, width = list[Any](), n
    for (a, b), index, seconds, banned in pairs:
        used = [np.isin(np.arange(size), i) for size, i in zip(banned.shape, index, strict=True)]
        row, column = np.nonzero(~banned & used[0][:, None] & used[1])
        terms = np.zeros((len(cost.linear), len(row)))
        for part, table in seconds.items():
            terms[part] = np.broadcast_to(table, banned.shape)[row, column]
        parts.append(sparse.csc_array(terms))
        for node, lines, i in ((a, row, index[0]), (b, column, index[1])):
            flows.append((lines, width + np.arange(len(lines)), i, starts[node] + np.arange(len(i))))
        width += len(row)
    for lines, columns, i, options in flows:
        lines = np.concatenate([lines, i])
        signs = np.concatenate([np.ones(len(columns)), -np.ones(len(options))])
        columns = np.concatenate([columns, options])
        equal.append(sparse.csr_array((signs, (lines, columns)), shape=(int(lines.max()) + 1, width)))
    equal[0].resize((len(values), width))
    table, t = sparse.hstack(parts).tocsr(), len(cost.times)
    scale = scale or 1.0  # costs are near 1 then, which the solver's tolerances are made for
    weighed = cost.maxima * cost.times[:, None, None] / scale
    above = [sparse.csr_array(weighed[:, r]) @ table for r in range(weighed.shape[1])]
    least, limited = [sparse.hstack([each, -sparse.eye_array(t)]) for each in above], cost.limited @ table
    objective = np.concatenate([cost.linear @ table / scale, np.ones(t)])
    same = sparse.vstack(equal)
    same.resize((same.shape[0], width + t))
    limit = sparse.csr_array(limited)
    limit.resize((limit.shape[0], width + t))
    right = np.concatenate([np.ones(len(values)), np.zeros(same.shape[0] - len(values))])
    scipy = optimizer()
    rows = [scipy.LinearConstraint(same, right, right)]
    rows += [scipy.LinearConstraint(each, -np.inf, 0) for each in least if t]
    rows += [scipy.LinearConstraint(limit, -np.inf, 1)] if limit.shape[0] else []
    upper = np.concatenate([np.ones(n), np.full(width - n + t, np.inf)])
    solved = scipy.milp(
        objective,
        integrality=np.arange(width + t) < n,
        bounds=scipy.Bounds(0, upper),
        constraints=rows,
        options={"node_limit": most_nodes, "mip_rel_gap": gap},
    )
    bound = solved.mip_dual_bound
    bound = np.inf if solved.status == 2 else 0.0 if bound is None else bound * scale
    if solved.x is None:
        return Solution(None, bound)
    chosen = [int(np.argmax(solved.x[a:b])) for a, b in pairwise(starts)]
    return Solution(chosen, bound)
