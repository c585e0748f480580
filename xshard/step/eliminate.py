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
    tables: _Tables = [((v,), table) for v, table in enumerate(unary)] + list(pairs.items())
    left, decided = list(range(len(sizes))), list[tuple[int, list[int], Indices]]()
    while left:
        scopes = {v: {w for scope, _ in tables if v in scope for w in scope} for v in left}
        v = min(left, key=lambda v: math.prod(sizes[w] for w in scopes[v]))
        mine = [(scope, table) for scope, table in tables if v in scope]
        tables = [(scope, table) for scope, table in tables if v not in scope]
        for i, part in enumerate(_parts(mine, sizes)):
            scope = [*sorted({w for s, _ in part for w in s} - {v}), v]
            total = _total(part, scope, sizes)
            if i == 0:
                decided.append((v, scope[:-1], total.argmin(-1)))
            tables.append((tuple(scope[:-1]), total.min(-1)))
        left.remove(v)
    values = [0] * len(sizes)
    for v, others, best in reversed(decided):
        values[v] = int(best[tuple(values[w] for w in others)])
    return sum(float(table) for _, table in tables), values


_Tables = list[tuple[tuple[int, ...], Floats]]


def _parts(tables: _Tables, sizes: Sequence[int]) -> list[_Tables]:
    """The tables in as few parts as have at most `MOST` entries each together."""
    parts = list[_Tables]()
    for table in sorted(tables, key=lambda t: -t[1].size):
        for part in parts:
            scope = {v for s, _ in (*part, table) for v in s}
            if math.prod(sizes[v] for v in scope) <= MOST:
                part.append(table)
                break
        else:
            parts.append([table])
    return parts


def _total(tables: _Tables, scope: Sequence[int], sizes: Sequence[int]) -> Floats:
    total = np.zeros([sizes[v] for v in scope])
    for names, table in tables:
        order = sorted(range(len(names)), key=lambda i: scope.index(names[i]))
        shape = [sizes[v] if v in names else 1 for v in scope]
        total += table.transpose(order).reshape(shape)
    return total
