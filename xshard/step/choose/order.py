"""Which tables are added up to eliminate one variable after another: a plan for `eliminate`.

It depends on the variables of tables and on how many values these have, not on entries. So it is
made once for all minima of problems that are alike, whatever the costs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

# A sum may have half of the entries that are left of those of all sums of a minimum, but always this
# many; beyond that the minimum is bounded from below only.
LEAST_LIMIT = 2**14
MOST_PLANS = 64  # that are remembered: 190 KiB for 368 variables and 532 pairs

Scope = tuple[int, ...]  # numbers of variables
Shape = tuple[int, ...]


class Group(NamedTuple):
    """Tables that are to be added up, and minimized over the first variable of their scope.

    Args:
        scope: All variables of the tables, in the order of elimination.
        sizes: How many values each of them has.
        tables: The numbers of the tables: first the given ones, then the minima of groups, as they
            are made.
        shapes: For each table its shape with an axis for all of `scope`, 1 long for variables that
            it lacks, so that tables broadcast.
    """

    scope: Scope
    sizes: Shape
    tables: tuple[int, ...]
    shapes: tuple[Shape, ...]


class Elimination(NamedTuple):
    """A plan of which tables are added up, to eliminate one variable after another.

    Args:
        scopes: The variables of each given table, in the order of elimination.
        groups: For each variable, in that order, its tables: one group, or several whose sums are
            minimized apart because all together would be too large.
        left: The numbers of the tables that no variable is left in.
    """

    scopes: list[Scope]
    groups: list[list[Group]]
    left: list[int]


@lru_cache(maxsize=MOST_PLANS)
def plan_elimination(scopes: tuple[Scope, ...], sizes: Shape, most_added_up: int) -> Elimination:
    """Choose in which order variables are eliminated, and which tables are added up for each.

    Tables over (a, b) and (b, c): a is eliminated first, say, which leaves a table over b and the
    one over (b, c); then c, which leaves two tables over b; then b, which leaves a number.

    Args:
        scopes: The variables of each given table; none of those with a single value.
        sizes: The number of values of each variable.
        most_added_up: About the number of entries of all sums together.
    """
    left = _ScopesLeft(len(sizes))
    for scope in scopes:
        left.add(frozenset(scope))
    with_a_choice = [variable for variable, size in enumerate(sizes) if size > 1]
    n_entries: dict[int, int] = {}  # by variable, of the sum of all tables with it
    changed: Collection[int] = with_a_choice  # variables for which `n_entries` is counted again
    n_entries_left = most_added_up
    numbers_by_group: dict[int, list[list[int]]] = {}  # of tables, by variable in order
    for _ in with_a_choice:
        for variable in changed:
            n_entries[variable] = _n_entries(left.joint(left.with_variable(variable)), sizes)
        # The variable with the smallest sum first, so that tables stay small.
        eliminated = min(n_entries, key=n_entries.__getitem__)
        del n_entries[eliminated]
        to_add_up = left.take(eliminated)
        changed = left.joint(to_add_up) - {eliminated}
        # One group with all tables, unless their sum would be too large (mini-buckets).
        most_entries = max(n_entries_left // 2, LEAST_LIMIT)
        groups = [*_groups_that_fit(to_add_up, left.scopes, sizes, most_entries)]
        numbers_by_group[eliminated] = groups
        for numbers in groups:
            scope_of_sum = left.joint(numbers)
            n_entries_left -= _n_entries(scope_of_sum, sizes)
            left.add(scope_of_sum - {eliminated})
    return _in_order(numbers_by_group, left.scopes, len(scopes), sizes)


def _in_order(
    numbers_by_group: Mapping[int, list[list[int]]],
    scopes: Sequence[frozenset[int]],
    n_given: int,
    sizes: Shape,
) -> Elimination:
    """Describe an elimination whose order is known, with all scopes in that order.

    Args:
        numbers_by_group: For each variable, in the order of elimination, its groups: the numbers of
            the tables that are added up.
        scopes: Of all tables, the given ones first.
        n_given: How many are given.
        sizes: The number of values of each variable.
    """
    places = {variable: place for place, variable in enumerate(numbers_by_group)}
    in_order = [tuple(sorted(scope, key=places.__getitem__)) for scope in scopes]
    return Elimination(
        scopes=in_order[:n_given],
        groups=[
            [_group_of(numbers, in_order, places, sizes) for numbers in groups]
            for groups in numbers_by_group.values()
        ],
        left=[number for number, scope in enumerate(in_order) if not scope],
    )


def _group_of(
    numbers: Sequence[int], scopes: Sequence[Scope], places: Mapping[int, int], sizes: Shape
) -> Group:
    """Describe tables that are added up, the largest first in `numbers`.

    scopes: of all tables, in the order of elimination. places: of the variables in that order.
    """
    variables = frozenset[int]().union(*[scopes[number] for number in numbers])
    scope = tuple(sorted(variables, key=places.__getitem__))
    # The smallest tables are added up first, so that few sums are over the whole scope.
    tables = tuple(reversed(numbers))
    shapes: list[Shape] = []
    for number in tables:
        shapes.append(tuple([sizes[v] if v in scopes[number] else 1 for v in scope]))
    return Group(scope, tuple([sizes[v] for v in scope]), tables, tuple(shapes))


class _ScopesLeft:
    """The variables of all tables, and which of these are not added up yet.

    Attributes:
        scopes: The variables of each table by its number, in the order in which they were added.
    """

    def __init__(self, n_variables: int) -> None:
        self.scopes: list[frozenset[int]] = []
        # By variable, of the tables that are left with it; dicts keep the order.
        self._numbers_with = [dict[int, None]() for _ in range(n_variables)]

    def add(self, scope: frozenset[int]) -> None:
        for variable in scope:
            self._numbers_with[variable][len(self.scopes)] = None
        self.scopes.append(scope)

    def with_variable(self, variable: int) -> list[int]:
        """List the numbers of the tables that are left with a variable."""
        return [*self._numbers_with[variable]]

    def take(self, variable: int) -> list[int]:
        """Leave the tables with a variable no more, and return their numbers."""
        taken = self.with_variable(variable)
        for number in taken:
            for other_variable in self.scopes[number]:
                del self._numbers_with[other_variable][number]
        return taken

    def joint(self, numbers: Sequence[int]) -> frozenset[int]:
        """Return all variables of some tables."""
        return frozenset[int]().union(*[self.scopes[number] for number in numbers])


def _n_entries(scope: Collection[int], sizes: Shape) -> int:
    return math.prod([sizes[variable] for variable in scope])


def _groups_that_fit(
    numbers: Sequence[int], scopes: Sequence[frozenset[int]], sizes: Shape, most_entries: int
) -> Iterator[list[int]]:
    """Split tables into few groups, so that the sum of each has at most `most_entries` entries.

    Tables over (a, b) and (b, c) add up to one over (a, b, c): with 100 values for each variable
    that has 10**6 entries. The split is greedy: a group begins with the largest table that is
    left, and takes all others that fit. A table that is too large by itself is a group alone.

    Args:
        numbers: Of the tables.
        scopes: The variables of all tables, by number.
        sizes: The number of values of each variable.
        most_entries: Of the sum of a group.
    """
    left = sorted(numbers, key=lambda number: -_n_entries(scopes[number], sizes))
    while left:
        group: list[int] = []
        scope_of_sum = frozenset[int]()
        too_large: list[int] = []  # together with this group
        for number in left:
            joint = scope_of_sum | scopes[number]
            if not group or _n_entries(joint, sizes) <= most_entries:
                group.append(number)
                scope_of_sum = joint
            else:
                too_large.append(number)
        yield group
        left = too_large
