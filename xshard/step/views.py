"""A reshape in the notation of operations: shapes before -> after as `"(a b) c -> a b c"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_lowercase
from typing import NamedTuple


class Factors(NamedTuple):
    """The factors of two shapes: the lengths of all, and the numbers of the factors of every dim."""

    lengths: list[int]
    before: list[list[int]]
    after: list[list[int]]


def common_factors(before: Sequence[int], after: Sequence[int]) -> Factors:
    """Two shapes of one array -> factors, outermost first, as many as possible in both shapes."""
    factors = Factors([], [[] for _ in before], [[] for _ in after])
    rest, index, sides = (list(before), list(after)), [0, 0], (factors.before, factors.after)

    def add(n: int, *which: int) -> None:
        for side in which:
            sides[side][index[side]].append(len(factors.lengths))
            rest[side][index[side]] //= n
        factors.lengths.append(n)

    while left := [side for side in (0, 1) if index[side] < len(rest[side])]:
        if done := [side for side in left if rest[side][index[side]] == 1]:
            if not sides[done[0]][index[done[0]]]:
                add(1, done[0])
            index[done[0]] += 1
        elif (n := math.gcd(*(rest[side][index[side]] for side in left))) > 1:
            add(n, *left)
        else:  # the dims from here to where both shapes have as many elements again have no common factor
            products = [1, 1]
            while products[0] != products[1] or products[0] == 1:
                side = int(products[1] < products[0])
                index[side] += products[side] > 1
                products[side] *= (n := rest[side][index[side]])
                add(n, side)
    return factors


def view(before: Sequence[int], after: Sequence[int]) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """The text of a reshape, the lengths of its dims, and those that are whole: no axis can shard them.

    >>> view((64, 4096), (8, 8, 32, 128))
    ('(a b) (c d) -> a b c d', {'a': 8, 'b': 8, 'c': 32, 'd': 128}, ())
    >>> view((4, 6, 5), (4, 10, 3))
    ('a (b c) e -> a (b d) f', {'a': 4, 'b': 2, 'c': 3, 'd': 5, 'e': 5, 'f': 3}, ('c', 'd', 'e', 'f'))
    """
    factors = common_factors(before, after)
    names = [ascii_lowercase[i] if i < 26 else f"d{i}" for i in range(len(factors.lengths))]
    sides = [" ".join(grouped([names[i] for i in dim]) for dim in side) for side in factors[1:]]
    shared = {i for dim in factors.before for i in dim} & {i for dim in factors.after for i in dim}
    whole = tuple(n for i, n in enumerate(names) if i not in shared and factors.lengths[i] > 1)
    return " -> ".join(sides), dict(zip(names, factors.lengths, strict=True)), whole


def grouped(names: Sequence[str]) -> str:
    """Dims as one dim of an array: in parentheses if they are several."""
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
