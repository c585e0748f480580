"""Exact minimum of a sum of tables over pairs of variables, by eliminating one variable after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.step.price.options import Floats

MOST = 2**24  # entries of a table; beyond that the minimum is bounded from below only
ROWS = 2**17  # entries of a sum at a time


class Bucket(NamedTuple):
    """Tables, to minimize their sum over a variable; it is made if needed. parts: minima's buckets, or -1."""

    variable: int
    scope: list[int]
    tables: list[Floats]  # with 1 in place of lengths of variables that they do not depend on
    parts: list[int]

    @property
    def axis(self) -> int:
        return self.scope.index(self.variable)

    def least(self) -> Floats:
        """The minimum of the sum, which is made a few rows at a time if it is large: caches hold these."""
        shape = np.broadcast_shapes(*(table.shape for table in self.tables))
        axis = self.axis
        some = max(1, ROWS * shape[axis] // math.prod(shape))
        least = np.array(np.inf)
        for i in range(0, shape[axis], some):
            rows = (*[slice(None)] * axis, slice(i, i + some))
            least = np.minimum(
                least, np.asarray(sum(table[rows] for table in self.tables)).min(axis)
            )
        return least

    def best(self, values: Sequence[int]) -> int:
        """The value of the variable that is best beside values of the others."""
        total: Floats = np.zeros(())
        for table in self.tables:
            pairs = zip(self.scope, table.shape, strict=True)
            place = (slice(None) if w == self.variable else values[w] % n for w, n in pairs)
            total = total + table[tuple(place)]
        return int(total.argmin())


def minimum(
    unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]
) -> tuple[float, list[int], list[Bucket]]:
    """The least sum of an entry of each table, the value of every variable there, and the tables in between.

    A variable with tables that are too large together is minimized over in two parts, each with its own
    value: then the sum is a lower bound, and the values need not reach it.

    >>> minimum([np.array([0.0, 1.0]), np.array([0.0, 2.0])], {(0, 1): np.array([[5, 5], [0, 3]])})[
    ...     :2
    ... ]
    (1.0, [1, 0])
    """
    sizes = [len(table) for table in unary]
    tables: list[_Table] = [((v,), table, -1) for v, table in enumerate(unary)]
    tables += [
        (edge, t, -1) if edge[0] < edge[1] else (edge[::-1], t.T, -1) for edge, t in pairs.items()
    ]
    entries = dict[int, int]()
    changed = list(range(len(sizes)))
    buckets = list[Bucket]()

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
        while (
            mine
        ):  # the smallest tables are added up first, so that few sums are over the whole scope
            part = mine[:1]
            rest = list[_Table]()
            for each in mine[1:]:
                (part if joint([*part, each])[1] <= MOST else rest).append(each)
            scope = joint(part)[0]
            shaped = [
                t.reshape([sizes[w] if w in own else 1 for w in scope]) for own, t, _ in part[::-1]
            ]
            bucket = Bucket(v, scope, shaped, [i for *_, i in part[::-1]])
            tables.append(([w for w in scope if w != v], bucket.least(), len(buckets)))
            mine = rest
            buckets.append(bucket)
    values = [0] * len(sizes)
    for bucket in reversed(buckets):
        values[bucket.variable] = bucket.best(values)
    return sum(float(table) for _, table, _ in tables), values, buckets


def excess(buckets: Sequence[Bucket]) -> dict[int, Floats]:
    """How much more than the minimum any sum is at least, with each value of every variable."""
    more = dict[int, Floats]()
    outside = dict[int, Floats]()  # outside: the rest beside a bucket's minimum
    for number, bucket in reversed(list(enumerate(buckets))):
        total = np.asarray(sum(bucket.tables) + outside.pop(number, 0.0))
        for i, least in zip(bucket.parts, bucket.tables, strict=True):
            if i >= 0:
                gone = tuple(j for j, w in enumerate(bucket.scope) if w not in buckets[i].scope)
                with np.errstate(invalid="ignore"):
                    above = np.where(np.isfinite(least), total.min(gone, keepdims=True) - least, 0)
                outside[i] = np.expand_dims(above.squeeze(gone), buckets[i].axis)
        others = tuple(i for i in range(len(bucket.scope)) if i != bucket.axis)
        own = total.min(others) - total.min()
        more[bucket.variable] = np.maximum(more.get(bucket.variable, 0), own)
    return more


_Table = tuple[Sequence[int], Floats, int]  # scope, entries, the bucket with this minimum or -1
