"""Exact minimum of a sum of tables over pairs of variables, by eliminating them one by one.

To eliminate a variable, all tables that depend on it are added up and minimized over it: the result
is one table over its neighbours. Models are chains with few branches, so tables stay small (bucket
elimination, Dechter 1999). `order` plans which tables are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from xshard.step.choose.order import Group, Scope, Shape, plan_elimination
from xshard.step.price.options import Floats

ENTRIES_AT_A_TIME = 2**17  # of a sum of tables
GIVEN = -1  # in place of the bucket of a table that is no minimum


class Table(NamedTuple):
    """A number for all values of some variables: an axis of `entries` for each variable in `scope`.

    bucket: the number of the bucket whose minimum it is, or GIVEN.
    """

    scope: Scope
    entries: Floats
    bucket: int = GIVEN


class Bucket(NamedTuple):
    """A group with its tables, whose sum is made only when it is needed.

    scope, sizes, shapes: as those of `Group`.
    """

    scope: Scope
    sizes: Shape
    tables: list[Table]
    shapes: tuple[Shape, ...]

    @property
    def variable(self) -> int:
        """The variable that is minimized over, which has axis 0 of the sum."""
        return self.scope[0]

    @property
    def other_axes(self) -> tuple[int, ...]:
        """The axes of all other variables."""
        return tuple(range(1, len(self.scope)))

    def minimize(self) -> Floats:
        """Add up the tables of costs, and minimize the sum over the bucket's variable.

        With the tables [a, b] and [a], and a as the variable, the result is a table [b]: for each
        value of b the least sum over all values of a. In general it has an axis for each variable
        in `scope` but this one, in order.
        """
        return reduce(np.minimum, (total.min(0) for total in self._sums()))

    def least_by_value(self) -> Floats:
        """Return for each value of the bucket's variable the least sum of tables: [values]."""
        return np.concatenate([total.min(self.other_axes) for total in self._sums()])

    def _sums(self) -> Iterator[Floats]:
        """Yield the sum of tables, for a few values of the variable at a time.

        The sum of large tables would not fit into the processor's caches.
        """
        entries = self.entries()
        n_values = max(1, ENTRIES_AT_A_TIME * self.sizes[0] // math.prod(self.sizes))
        for start in range(0, self.sizes[0], n_values):
            yield reduce(np.add, [table[start : start + n_values] for table in entries])

    def entries(self) -> list[Floats]:
        """List the entries of all tables, with an axis for all of `scope`."""
        pairs = zip(self.tables, self.shapes, strict=True)
        return [table.entries.reshape(shape) for table, shape in pairs]

    def shifted(self, shift: Floats) -> Bucket:
        """Add a table of the bucket's variable alone: [values]."""
        table = Table((self.variable,), shift)
        shape = (self.sizes[0], *[1] * len(self.other_axes))
        return self._replace(tables=[table, *self.tables], shapes=(shape, *self.shapes))

    def best_value(self, values: Sequence[int]) -> int:
        """Choose the variable's value with the least sum of tables, given values of all others.

        With the table [[5, 5], [0, 3]] of variables 0 and 1, and variable 0 to choose: where
        variable 1 is 1, the candidates are 5 and 3, hence the value 1.

        values: one for each variable of the whole problem; only those in `scope`, but not the
        bucket's own, are read.
        """
        candidates: list[Floats] = []  # for each table [values of the variable]
        for table in self.tables:
            # The bucket's own variable is the first one of all its tables.
            others = [values[variable] for variable in table.scope[1:]]
            index: tuple[Any, ...] = (slice(None), *others)
            candidates.append(table.entries[index])
        return int(reduce(np.add, candidates).argmin())


class Minimum(NamedTuple):
    """The least sum, the value of every variable there, and the buckets, for `excess`."""

    value: float
    assignment: list[int]
    buckets: list[Bucket]


def minimum(
    unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats], most_added_up: int
) -> Minimum:
    """Find a value for each variable, so that the sum of the tables' entries there is least.

    Variables are eliminated one by one: all tables with the variable are added up (a bucket), and
    the minimum over it is a new table over its neighbours. Backwards, each variable takes its best
    value beside those of its neighbours.

    A variable with tables that are too large together is minimized over in two parts, each with its
    own value (mini-buckets). Then the sum is a lower bound, and the values need not reach it.

    Args:
        unary: For each variable a table of its values.
        pairs: Tables by the numbers of two variables: [values of the first, of the second].
        most_added_up: About the number of entries of all sums together.

    >>> unary = [np.array([0.0, 1.0]), np.array([0.0, 2.0])]
    >>> minimum(unary, {(0, 1): np.array([[5, 5], [0, 3]])}, most_added_up=2**22)[:2]
    (1.0, [1, 0])
    """
    sizes = tuple(map(len, unary))
    own_scopes = _scopes_of(sizes, pairs)
    elimination = plan_elimination(own_scopes, sizes, most_added_up)
    tables: list[Table] = []  # those given, then a minimum for each bucket
    given = zip([*unary, *pairs.values()], own_scopes, elimination.scopes, strict=True)
    for entries, own_scope, scope in given:
        tables.append(_table_of(entries, own_scope, scope))
    buckets: list[Bucket] = []
    for groups in elimination.groups:
        # Several buckets of one variable: costs are shifted between them first, for a higher bound.
        for bucket in _agreeing([_bucket_of(group, tables) for group in groups]):
            # The bucket's number tells `excess` which bucket's minimum this table is.
            tables.append(Table(bucket.scope[1:], bucket.minimize(), len(buckets)))
            buckets.append(bucket)
    assignment = [0] * len(sizes)
    # The neighbours of a variable were eliminated after it, and have their values already.
    for bucket in reversed(buckets):
        assignment[bucket.variable] = bucket.best_value(assignment)
    value = sum(float(tables[number].entries) for number in elimination.left)
    return Minimum(value, assignment, buckets)


def _scopes_of(sizes: Shape, pairs: Mapping[tuple[int, int], Floats]) -> tuple[Scope, ...]:
    """List the variables of the tables of one variable each, then those of all pairs.

    A table has no axis for a variable with one value: a variable may have more neighbours than an
    array has axes.
    """
    scopes: list[Scope] = [(variable,) for variable in range(len(sizes))]
    scopes += pairs
    return tuple([tuple([v for v in scope if sizes[v] > 1]) for scope in scopes])


def _table_of(entries: Floats, own_scope: Scope, scope: Scope) -> Table:
    """Make a given table of one or two variables, with its axes in the order of `scope`.

    entries: with the axes of `own_scope`, and one of length 1 for each variable with one value.
    """
    long_axes = np.asarray(entries).squeeze()
    # At most two axes are left: in another order they are swapped.
    return Table(scope, long_axes if scope == own_scope else long_axes.T)


def _bucket_of(group: Group, tables: Sequence[Table]) -> Bucket:
    return Bucket(group.scope, group.sizes, [tables[n] for n in group.tables], group.shapes)


def _agreeing(buckets: list[Bucket]) -> list[Bucket]:
    """Shift costs between buckets of one variable, so that each prefers the same values.

    Each bucket is minimized by itself, and may choose another value of the variable: with [0, 9] in
    one and [9, 0] in another the bound is 0, though every value costs 9. What a value costs in all
    buckets together is divided equally: [4.5, 4.5] in both has the bound 9 (moment matching, Ihler
    et al. 2012). The sum of all is what it was.
    """
    if len(buckets) == 1:
        return buckets
    least_by_bucket = np.array([bucket.least_by_value() for bucket in buckets])
    # A value that is impossible in one bucket is so in all: inf - inf, which is no number, is replaced.
    is_impossible = np.isinf(least_by_bucket).any(0)
    with np.errstate(invalid="ignore"):
        shifts = least_by_bucket.mean(0) - least_by_bucket  # [buckets, values]
    shifts[:, is_impossible] = np.inf
    return [bucket.shifted(shift) for bucket, shift in zip(buckets, shifts, strict=True)]


def excess(buckets: Sequence[Bucket]) -> dict[int, Floats]:
    """Compute, for each value of each variable, how much fixing it raises the least total.

    A search leaves out values that raise the total by more than it accepts. In the example of
    `minimum` the least total is 1. With variable 0 fixed to 0 totals are 5 or 7, so that the
    excess of that value is 5 - 1 = 4.

    A bucket is one eliminated variable, and the tables that were added up for it. They count only
    what was eliminated before. So buckets are gone through from the last, which counts everything,
    to the first: each tells the earlier ones, whose minima it has as tables, what all other
    tables add.

    Args:
        buckets: Those of `minimum`, in the order of elimination.

    Returns:
        For each variable with several values, [values], at least 0. After mini-buckets they are lower bounds.
    """
    excess_of: dict[int, Floats] = {}
    # By number of a bucket: what other tables add, with its scope's axes, 1 long at its variable.
    added_elsewhere: dict[int, Floats] = {}
    for number, bucket in reversed(list(enumerate(buckets))):
        entries = bucket.entries()
        # The least total of the whole problem, for given values of the variables in its scope.
        total = reduce(np.add, entries) + added_elsewhere.pop(number, 0.0)
        for table, minima in zip(bucket.tables, entries, strict=True):
            if table.bucket != GIVEN:
                origin = buckets[table.bucket]
                added_elsewhere[table.bucket] = _added_beside(minima, total, bucket.scope, origin)
        above = total.min(bucket.other_axes) - total.min()
        # A variable in several buckets has a bound from each of them: the highest counts.
        excess_of[bucket.variable] = np.maximum(excess_of.get(bucket.variable, 0), above)
    return excess_of


def _added_beside(minima: Floats, total: Floats, scope: Scope, origin: Bucket) -> Floats:
    """Compute what all other tables add to the minimum of an earlier bucket, for its variables.

    Total 9 where the minimum is 4: the others add 5.

    Args:
        minima: The minima of the earlier bucket, with an axis for all of `scope`.
        total: The least total of the problem: [values of each variable in `scope`].
        scope: The variables of the later bucket, which has the minima as one of its tables.
        origin: The earlier bucket.

    Returns:
        With an axis for all of the earlier bucket's scope, 1 long at its own variable.
    """
    # The earlier bucket does not have these variables: they take their best values.
    unknown = tuple(axis for axis, v in enumerate(scope) if v not in origin.scope)
    with np.errstate(invalid="ignore"):  # inf - inf
        others = total.min(unknown, keepdims=True) - minima
    # Where the minimum is infinite, so is the earlier bucket's own sum: nothing need be added.
    others = np.where(np.isfinite(minima), others, 0)
    return np.expand_dims(others.squeeze(unknown), 0)
