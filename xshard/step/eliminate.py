"""Exact minimum of a sum of tables over pairs of variables, by eliminating one variable after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from xshard.step.options import Floats, Indices

MOST = 2**24  # entries of a table; beyond that the minimum is bounded from below only


def minimum(unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> tuple[float, list[int]]:
    """The least sum of an entry of each table, and the value of every variable there.

    A variable with tables that are too large together is minimized over in two parts, each with its own
    value: then the sum is a lower bound, and the values need not reach it.

    >>> minimum([np.array([0.0, 1.0]), np.array([0.0, 2.0])], {(0, 1): np.array([[5.0, 5.0], [0.0, 3.0]])})
    (1.0, [1, 0])
    """
    sizes = [len(table) for table in unary]
    tables: list[tuple[Sequence[int], Floats]] = [((v,), table) for v, table in enumerate(unary)]
    tables += [(edge, t) if edge[0] < edge[1] else (edge[::-1], t.T) for edge, t in pairs.items()]
    left, decided = set(range(len(sizes))), list[tuple[int, list[int], Indices]]()

    def joint(tables: Sequence[tuple[Sequence[int], Floats]]) -> tuple[list[int], int]:
        scope = sorted({v for each, _ in tables for v in each})
        return scope, math.prod(sizes[v] for v in scope)

    while left:
        v = min(left, key=lambda v: joint([each for each in tables if v in each[0]])[1])
        mine = sorted((each for each in tables if v in each[0]), key=lambda each: -each[1].size)
        tables = [each for each in tables if v not in each[0]]
        left.remove(v)
        while mine:
            part, rest = mine[:1], list[tuple[Sequence[int], Floats]]()
            for each in mine[1:]:
                (part if joint([*part, each])[1] <= MOST else rest).append(each)
            scope = joint(part)[0]
            total = np.asarray(
                sum(t.reshape([sizes[w] if w in own else 1 for w in scope]) for own, t in part)
            )
            others, axis, mine = [w for w in scope if w != v], scope.index(v), rest
            decided.append((v, others, total.argmin(axis)))
            tables.append((others, total.min(axis)))
    values = [0] * len(sizes)
    for v, others, best in reversed(decided):
        values[v] = int(best[tuple(values[w] for w in others)])
    return sum(float(table) for _, table in tables), values
