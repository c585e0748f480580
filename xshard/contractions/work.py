"""The work of a local contraction: floating point operations, and how often memory sees its arrays.

A matrix product takes arrays that can be read as matrices, one for each index of the dims that all arrays
have: dims that the same arrays have are side by side, and the dims of all arrays are not the last. Any other
array is copied first or, if it is the result, afterwards. A gradient is a product of arrays with the same
dims, so it copies the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby


def operations(lengths: Iterable[int], n_operands: int, *, has_sum: bool) -> int:
    """Floating point operations on a block: the products of several operands, and the additions of sums."""
    return ((n_operands > 1) + has_sum) * math.prod(lengths)


def accesses(arrays: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The dims of operands and result -> how often each array is read or written; a copy is one of both."""

    def owners(name: str) -> tuple[bool, ...]:
        return tuple(name in dims for dims in arrays)

    counts = []
    for dims in arrays:
        runs = [run for run, _ in groupby(dims, owners)]
        is_matrix = len(set(runs)) == len(runs) and not (len(runs) > 1 and all(runs[-1]))
        counts.append(1 if is_matrix or len(arrays) < 3 else 3)  # a sum of one operand is not a product
    return tuple(counts)
