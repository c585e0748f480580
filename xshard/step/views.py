"""The common factors of two shapes of one array, and dims that are one dim of it as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def grouped(names: Sequence[str]) -> str:
    """Dims as one dim of an array: in parentheses if they are several."""
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
