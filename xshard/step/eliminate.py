"""Exact minimum of a sum of tables over pairs of variables, by eliminating one variable after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.step.op import Floats

MOST = 2**24  # entries of a table; beyond that the minimum is bounded from below only


class Bucket(NamedTuple):
    """A sum of tables over a scope, to eliminate a variable; parts: buckets with minima among the tables."""

    variable: int
    scope: list[int]
    total: Floats
    parts: list[int]

    @property
    def axis(self) -> int:
        return self.scope.index(self.variable)


def minimum(
    unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]
) -> tuple[float, list[int], list[Bucket]]:
    """The least sum of an entry of each table, the value of every variable there, and the tables in between.

    A variable with tables that are too large together is minimized over in two parts, each with its own
    value: then the sum is a lower bound, and the values need not reach it.

    >>> minimum([np.array([0.0, 1.0]), np.array([0.0, 2.0])], {(0, 1): np.array([[5, 5], [0, 3]])})[:2]
    (1.0, [1, 0])
    """
    sizes = [len(table) for table in unary]
    tables: list[_Table] = [((v,), table, -1) for v, table in enumerate(unary)]
    tables += [(edge, t, -1) if edge[0] < edge[1] else (edge[::-1], t.T, -1) for edge, t in pairs.items()]
    entries, changed, buckets = dict[int, int](), list(range(len(sizes))), list[Bucket]()

    def joint(tables: Sequence[_Table]) -> tuple[list[int], int]:
        scope = sorted({v for each, *_ in tables for v in each})
        return scope, math.prod(sizes[v] for v in scope)

    for _ in sizes:  # the variable with the fewest entries in a sum of all its tables is next
        entries |= {v: joint([each for each in tables if v in each[0]])[1] for v in changed}
        v = min(entries, key=entries.__getitem__)
        mine = sorted((each for each in tables if v in each[0]), key=lambda each: -each[1].size)
        tables = [each for each in tables if v not in each[0]]
        del entries[v]
        changed = [w for w in joint(mine)[0] if w != v]
        while mine:  # the smallest tables are added up first, so that few sums are over the whole scope
            part, rest = mine[:1], list[_Table]()
            for each in mine[1:]:
                (part if joint([*part, each])[1] <= MOST else rest).append(each)
            scope = joint(part)[0]
            shaped = (t.reshape([sizes[w] if w in own else 1 for w in scope]) for own, t, _ in part[::-1])
            bucket = Bucket(v, scope, np.asarray(sum(shaped)), [i for *_, i in part if i >= 0])
            tables.append(([w for w in scope if w != v], bucket.total.min(bucket.axis), len(buckets)))
            mine = rest
            buckets.append(bucket)
    values = [0] * len(sizes)
    for bucket in reversed(buckets):
        others = tuple(slice(None) if w == bucket.variable else values[w] for w in bucket.scope)
        values[bucket.variable] = int(bucket.total[others].argmin())
    return sum(float(table) for _, table, _ in tables), values, buckets


def excess(buckets: Sequence[Bucket]) -> dict[int, Floats]:
    """How much more than the minimum any sum is at least, with each value of every variable."""
    more = dict[int, Floats]()
    for bucket in reversed(buckets):
        for part in (buckets[i] for i in bucket.parts):
            gone = tuple(i for i, w in enumerate(bucket.scope) if w not in part.scope)
            least = part.total.min(part.axis)
            with np.errstate(invalid="ignore"):
                outside = np.where(np.isfinite(least), bucket.total.min(gone) - least, 0)
            np.add(part.total, np.expand_dims(outside, part.axis), out=part.total)
        others = tuple(i for i in range(len(bucket.scope)) if i != bucket.axis)
        own = bucket.total.min(others) - bucket.total.min()
        more[bucket.variable] = np.maximum(more.get(bucket.variable, 0), own)
    return more


_Table = tuple[Sequence[int], Floats, int]  # scope, entries, the bucket with this minimum or -1
