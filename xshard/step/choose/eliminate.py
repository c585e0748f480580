"""Exact minimum of a sum of tables over pairs of variables, by eliminating them one by one.

To eliminate a variable, all tables that depend on it are added up and minimized over it: the result
is one table over its neighbours. Models are chains with few branches, so tables stay small (bucket
elimination, Dechter 1999).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard.step.price.options import Floats

# A sum may have half of the entries that are left of those of all sums of a minimum, but always this
# many; beyond that the minimum is bounded from below only.
LEAST_LIMIT = 2**14
ENTRIES_AT_A_TIME = 2**17  # of a sum of tables
GIVEN = -1  # in place of the bucket of a table that is no minimum


class Table(NamedTuple):
    """A number for all values of some variables: an axis of `entries` for each variable in `scope`.

    bucket: the number of the bucket whose minimum it is, or GIVEN.
    """

    scope: Sequence[int]
    entries: Floats
    bucket: int = GIVEN

    def over(self, scope: Sequence[int]) -> Table:
        """Return the table with an axis for all of `scope`, of length 1 for other variables."""
        lengths = dict(zip(self.scope, self.entries.shape, strict=True))
        shape = [lengths.get(variable, 1) for variable in scope]
        return self._replace(entries=self.entries.reshape(shape))


class Bucket(NamedTuple):
    """Tables whose sum is minimized over a variable; the sum is made only when it is needed.

    Args:
        variable: The variable.
        scope: All variables of the tables, in order.
        tables: With an axis for all of `scope` (`Table.over`), so that they broadcast.
    """

    variable: int
    scope: list[int]
    tables: list[Table]

    @property
    def axis(self) -> int:
        """The axis of the variable."""
        return self.scope.index(self.variable)

    def minimize(self) -> Floats:
        """Add up the tables of costs, and minimize the sum over the bucket's variable.

        With the tables [a, b] and [a], and a as the variable, the result is a table [b]: for each
        value of b the least sum over all values of a. In general it has an axis for each variable
        in `scope` but this one, in order.
        """
        least = np.array(np.inf)
        for total in self._sums():
            least = np.minimum(least, total.min(self.axis))
        return least

    def least_by_value(self) -> Floats:
        """Return for each value of the bucket's variable the least sum of tables: [values]."""
        other_axes = tuple(axis for axis in range(len(self.scope)) if axis != self.axis)
        return np.concatenate([total.min(other_axes) for total in self._sums()])

    def _sums(self) -> Iterator[Floats]:
        """Yield the sum of tables, for a few values of the variable at a time.

        The sum of large tables would not fit into the processor's caches.
        """
        entries = [table.entries for table in self.tables]
        shape = np.broadcast_shapes(*[table.shape for table in entries])
        axis = self.axis
        n_values = max(1, ENTRIES_AT_A_TIME * shape[axis] // math.prod(shape))
        for start in range(0, shape[axis], n_values):
            rows = (*[slice(None)] * axis, slice(start, start + n_values))
            yield np.asarray(sum(table[rows] for table in entries))

    def best_value(self, values: Sequence[int]) -> int:
        """Choose the variable's value with the least sum of tables, given values of all others.

        With the table [[5, 5], [0, 3]] of variables 0 and 1, and variable 0 to choose: where
        variable 1 is 1, the candidates are 5 and 3, hence the value 1.

        values: one for each variable of the whole problem; only those in `scope`, but not the
        bucket's own, are read.
        """
        index: list[Any] = [values[variable] for variable in self.scope]
        index[self.axis] = slice(None)
        tables = np.broadcast_arrays(*[table.entries for table in self.tables])
        total = sum(entries[tuple(index)] for entries in tables)
        return int(np.argmin(total))


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
    sizes = [len(table) for table in unary]
    buckets: list[Bucket] = []
    constants = _eliminate(_tables_of(unary, pairs), sizes, buckets, most_added_up)
    assignment = [0] * len(sizes)
    # The neighbours of a variable were eliminated after it, and have their values already.
    for bucket in reversed(buckets):
        assignment[bucket.variable] = bucket.best_value(assignment)
    return Minimum(sum(constants), assignment, buckets)


def _eliminate(
    tables: Sequence[Table], sizes: Sequence[int], buckets: list[Bucket], most_added_up: int
) -> list[float]:
    """Eliminate all variables, add a bucket for each to `buckets`, and return the numbers left.

    Tables over (a, b) and (b, c): a is eliminated first, say, which leaves a table over b and the
    one over (b, c); then c, which leaves two tables over b; then b, which leaves a number.

    sizes: the number of values of each variable. most_added_up: entries of all sums together.
    """
    left = _TablesLeft(len(sizes))
    for table in tables:
        left.add(table)
    n_entries: dict[int, int] = {}  # by variable, of the sum of all tables with it
    # Variables whose tables have changed, so that `n_entries` is counted again: at first all with
    # a choice of values.
    changed = [variable for variable, size in enumerate(sizes) if size > 1]
    n_entries_left = most_added_up
    for _ in [*changed]:
        for variable in changed:
            n_entries[variable] = _n_entries_of_sum(left.with_variable(variable), sizes)
        # The variable with the smallest sum first, so that tables stay small.
        eliminated = min(n_entries, key=n_entries.__getitem__)
        del n_entries[eliminated]
        tables_to_add = left.take(eliminated)
        changed = [v for v in _joint_scope(tables_to_add) if v != eliminated]
        # One group with all tables, unless their sum would be too large (mini-buckets).
        most_entries = max(n_entries_left // 2, LEAST_LIMIT)
        groups = [*_groups_that_fit(tables_to_add, sizes, most_entries)]
        for bucket in _agreeing([_bucket_of(eliminated, group) for group in groups]):
            n_entries_left -= _n_entries_of_sum(bucket.tables, sizes)
            other_variables = [v for v in bucket.scope if v != eliminated]
            # The bucket's number tells `excess` which bucket's minimum this table is.
            left.add(Table(other_variables, bucket.minimize(), len(buckets)))
            buckets.append(bucket)
    return [float(table.entries) for table in left.tables.values()]


def _bucket_of(variable: int, tables: Sequence[Table]) -> Bucket:
    scope = _joint_scope(tables)
    # The smallest tables are added up first, so that few sums are over the whole scope.
    return Bucket(variable, scope, [table.over(scope) for table in reversed(tables)])


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
    agreeing = []
    for bucket, shift in zip(buckets, shifts, strict=True):
        table = Table([bucket.variable], shift).over(bucket.scope)
        agreeing.append(bucket._replace(tables=[table, *bucket.tables]))
    return agreeing


class _TablesLeft:
    """The tables that are not added up yet, in the order in which they were added.

    Attributes:
        tables: By number.
    """

    def __init__(self, n_variables: int) -> None:
        self.tables: dict[int, Table] = {}
        self._n_added = 0
        # By variable, of the tables with it; dicts keep the order.
        self._numbers_with = [dict[int, None]() for _ in range(n_variables)]

    def add(self, table: Table) -> None:
        self.tables[self._n_added] = table
        for variable in table.scope:
            self._numbers_with[variable][self._n_added] = None
        self._n_added += 1

    def with_variable(self, variable: int) -> list[Table]:
        """List the tables with a variable."""
        return [self.tables[number] for number in self._numbers_with[variable]]

    def take(self, variable: int) -> list[Table]:
        """Remove the tables with a variable, and return them."""
        taken: list[Table] = []
        for number in [*self._numbers_with[variable]]:
            table = self.tables.pop(number)
            taken.append(table)
            for other_variable in table.scope:
                del self._numbers_with[other_variable][number]
        return taken


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
        # The least total of the whole problem, for given values of the variables in its scope.
        of_tables = sum(table.entries for table in bucket.tables)
        total = np.asarray(of_tables + added_elsewhere.pop(number, 0.0))
        for table in bucket.tables:
            if table.bucket != GIVEN:
                origin = buckets[table.bucket]
                added_elsewhere[table.bucket] = _added_beside(table, total, bucket.scope, origin)
        other_axes = tuple(axis for axis in range(len(bucket.scope)) if axis != bucket.axis)
        above = total.min(other_axes) - total.min()
        # A variable in several buckets has a bound from each of them: the highest counts.
        excess_of[bucket.variable] = np.maximum(excess_of.get(bucket.variable, 0), above)
    return excess_of


def _added_beside(least: Table, total: Floats, scope: Sequence[int], origin: Bucket) -> Floats:
    """Compute what all other tables add to the minimum of an earlier bucket, for its variables.

    Total 9 where the minimum is 4: the others add 5.

    Args:
        least: The minimum of the earlier bucket, with an axis for all of `scope`.
        total: The least total of the problem: [values of each variable in `scope`].
        scope: The variables of the later bucket, which has the minimum as one of its tables.
        origin: The earlier bucket.

    Returns:
        With an axis for all of the earlier bucket's scope, 1 long at its own variable.
    """
    # The earlier bucket does not have these variables: they take their best values.
    unknown = tuple(axis for axis, v in enumerate(scope) if v not in origin.scope)
    with np.errstate(invalid="ignore"):  # inf - inf
        others = total.min(unknown, keepdims=True) - least.entries
    # Where the minimum is infinite, so is the earlier bucket's own sum: nothing need be added.
    others = np.where(np.isfinite(least.entries), others, 0)
    return np.expand_dims(others.squeeze(unknown), origin.axis)


def _tables_of(unary: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> list[Table]:
    """Make a table of every term, with variables in order.

    A table has no axis for a variable with one value: a variable may have more neighbours than an
    array has axes.
    """
    terms: dict[tuple[int, ...], Floats] = {(v,): entries for v, entries in enumerate(unary)}
    for pair, entries in pairs.items():
        terms[pair] = entries
    tables = []
    for variables, entries in terms.items():
        in_order = entries if variables == tuple(sorted(variables)) else entries.T
        scope = [variable for variable in sorted(variables) if len(unary[variable]) > 1]
        tables.append(Table(scope, np.asarray(in_order).squeeze()))
    return tables


def _joint_scope(tables: Sequence[Table]) -> list[int]:
    """List all variables of some tables, in order."""
    scope: set[int] = set()
    for table in tables:
        scope.update(table.scope)
    return sorted(scope)


def _n_entries_of_sum(tables: Sequence[Table], sizes: Sequence[int]) -> int:
    return math.prod(sizes[variable] for variable in _joint_scope(tables))


def _groups_that_fit(
    tables: Sequence[Table], sizes: Sequence[int], most_entries: int
) -> Iterator[list[Table]]:
    """Split tables into few groups, so that the sum of each has at most `most_entries` entries.

    Tables over (a, b) and (b, c) add up to one over (a, b, c): with 100 values for each variable
    that has 10**6 entries. The split is greedy: a group begins with the largest table that is
    left, and takes all others that fit. A table that is too large by itself is a group alone.

    sizes: the number of values of each variable.
    """
    left = sorted(tables, key=lambda table: -table.entries.size)
    while left:
        group = left[:1]
        too_large: list[Table] = []  # together with this group
        for table in left[1:]:
            if _n_entries_of_sum([*group, table], sizes) <= most_entries:
                group.append(table)
            else:
                too_large.append(table)
        yield group
        left = too_large
