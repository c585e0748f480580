"""Exact minimum of a sum of tables over pairs of variables, by eliminating them one by one.

To eliminate a variable, all tables that depend on it are added up and minimized over it: the result
is one table over its neighbours. Models are chains with few branches, so tables stay small (bucket
elimination, Dechter 1999).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.step.price.options import Floats

MOST_ENTRIES = 2**24  # of a table; beyond that the minimum is bounded from below only
ENTRIES_AT_A_TIME = 2**17  # of a sum of tables
GIVEN = -1  # in place of the bucket of a table that is no minimum


class Table(NamedTuple):
    """A number for all values of some variables: an axis of `entries` for each variable in `scope`.

    bucket: the number of the bucket whose minimum it is, or GIVEN.
    """

    scope: Sequence[int]
    entries: Floats
    bucket: int = GIVEN


class Bucket(NamedTuple):
    """Tables whose sum is minimized over a variable; the sum is made only when it is needed.

    Args:
        variable: The variable.
        scope: All variables of the tables, in order.
        tables: Each with an axis for all of `scope`, of length 1 for variables on which it does not
            depend.
        buckets: For each table the bucket whose minimum it is, or GIVEN.
    """

    variable: int
    scope: list[int]
    tables: list[Floats]
    buckets: list[int]

    @property
    def axis(self) -> int:
        """The axis of the variable."""
        return self.scope.index(self.variable)

    def minimize(self) -> Floats:
        """Return the minimum of the sum over the variable, for all values of the others."""
        shape = np.broadcast_shapes(*[table.shape for table in self.tables])
        axis = self.axis
        # A large sum is made a few rows at a time, which fit into caches.
        n_rows = max(1, ENTRIES_AT_A_TIME * shape[axis] // math.prod(shape))
        least = np.array(np.inf)
        for start in range(0, shape[axis], n_rows):
            rows = (*[slice(None)] * axis, slice(start, start + n_rows))
            total = np.asarray(sum(table[rows] for table in self.tables))
            least = np.minimum(least, total.min(axis))
        return least

    def best_value(self, values: Sequence[int]) -> int:
        """Return the value of the variable that is best beside values of the others."""
        total: Floats = np.zeros(())
        for table in self.tables:
            place = list[int | slice]()
            for variable, length in zip(self.scope, table.shape, strict=True):
                if variable == self.variable:
                    place.append(slice(None))
                else:
                    place.append(values[variable] % length)  # 0 where the table has length 1
            total = total + table[tuple(place)]
        return int(total.argmin())


class Minimum(NamedTuple):
    """The least sum, the value of every variable there, and the buckets, for `excess`."""

    value: float
    assignment: list[int]
    buckets: list[Bucket]


def minimum(unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> Minimum:
    """Minimize the sum of an entry of each table.

    A variable with tables that are too large together is minimized over in two parts, each with its
    own value (mini-buckets). Then the sum is a lower bound, and the values need not reach it.

    unary: for each variable a table of its values. pairs: tables by the numbers of two variables.

    >>> minimum([np.array([0.0, 1.0]), np.array([0.0, 2.0])], {(0, 1): np.array([[5, 5], [0, 3]])})[
    ...     :2
    ... ]
    (1.0, [1, 0])
    """
    sizes = [len(table) for table in unary]
    tables = _tables_of(unary, pairs)
    n_entries = dict[int, int]()  # of the sum of all tables with a variable
    changed: Iterable[int] = range(len(sizes))
    buckets = list[Bucket]()
    for _ in sizes:
        for variable in changed:
            scope = _joint_scope([table for table in tables if variable in table.scope])
            n_entries[variable] = _n_entries(scope, sizes)
        eliminated = min(n_entries, key=n_entries.__getitem__)
        del n_entries[eliminated]
        with_variable = [table for table in tables if eliminated in table.scope]
        tables = [table for table in tables if eliminated not in table.scope]
        changed = [w for w in _joint_scope(with_variable) if w != eliminated]
        for group in _groups_that_fit(with_variable, sizes):
            bucket = _bucket_of(eliminated, group, sizes)
            scope = [w for w in bucket.scope if w != eliminated]
            tables.append(Table(scope, bucket.minimize(), len(buckets)))
            buckets.append(bucket)
    assignment = [0] * len(sizes)
    for bucket in reversed(buckets):
        assignment[bucket.variable] = bucket.best_value(assignment)
    # All variables are gone: tables are single numbers now.
    return Minimum(sum(float(table.entries) for table in tables), assignment, buckets)


def excess(buckets: Sequence[Bucket]) -> dict[int, Floats]:
    """Return for each value of every variable how far above the minimum sums with it are at least.

    Buckets are gone through in reversed order, with what all other tables add to each bucket's
    minimum.
    """
    excess_of = dict[int, Floats]()
    added_elsewhere = dict[int, Floats]()  # by bucket, over its scope without its variable
    for number, bucket in reversed(list(enumerate(buckets))):
        total = np.asarray(sum(bucket.tables) + added_elsewhere.pop(number, 0.0))
        for origin, least in zip(bucket.buckets, bucket.tables, strict=True):
            if origin == GIVEN:
                continue
            origin_scope = buckets[origin].scope
            gone = tuple(axis for axis, v in enumerate(bucket.scope) if v not in origin_scope)
            with np.errstate(invalid="ignore"):  # inf - inf
                others = total.min(gone, keepdims=True) - least
            others = np.where(np.isfinite(least), others, 0)
            added_elsewhere[origin] = np.expand_dims(others.squeeze(gone), buckets[origin].axis)
        other_axes = tuple(axis for axis in range(len(bucket.scope)) if axis != bucket.axis)
        above = total.min(other_axes) - total.min()
        # A variable in several buckets has a bound from each of them.
        excess_of[bucket.variable] = np.maximum(excess_of.get(bucket.variable, 0), above)
    return excess_of


def _tables_of(unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> list[Table]:
    """Make a table of every term, with variables in order."""
    tables = [Table((variable,), entries) for variable, entries in enumerate(unary)]
    for (first, second), entries in pairs.items():
        if first < second:
            tables.append(Table((first, second), entries))
        else:
            tables.append(Table((second, first), entries.T))
    return tables


def _joint_scope(tables: Sequence[Table]) -> list[int]:
    """List all variables of some tables, in order."""
    scope = set[int]()
    for table in tables:
        scope.update(table.scope)
    return sorted(scope)


def _n_entries(scope: Sequence[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[variable] for variable in scope)


def _groups_that_fit(tables: Sequence[Table], sizes: Sequence[int]) -> Iterator[list[Table]]:
    """Split tables into as few groups as possible with sums of at most MOST_ENTRIES entries."""
    left = sorted(tables, key=lambda table: -table.entries.size)
    while left:
        group = left[:1]
        others = list[Table]()
        for table in left[1:]:
            if _n_entries(_joint_scope([*group, table]), sizes) <= MOST_ENTRIES:
                group.append(table)
            else:
                others.append(table)
        yield group
        left = others


def _bucket_of(variable: int, tables: Sequence[Table], sizes: Sequence[int]) -> Bucket:
    """Shape tables for a sum over all their variables."""
    scope = _joint_scope(tables)
    shaped = list[Floats]()
    # The smallest tables are added up first, so that few sums are over the whole scope.
    smallest_first = tables[::-1]
    for table in smallest_first:
        shape = [sizes[w] if w in table.scope else 1 for w in scope]
        shaped.append(table.entries.reshape(shape))
    return Bucket(variable, scope, shaped, [table.bucket for table in smallest_first])
