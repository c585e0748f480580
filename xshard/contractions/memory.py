"""How often memory sees the arrays of a local contraction, by the order of their dims.

Decides which arrays a matrix product takes as they are: as matrices, one for each index of the dims that all
arrays have. Dims that the same arrays have are side by side there, and those of all arrays are not the last.
Another array is copied first, or afterwards if it is the result. A gradient is a product of arrays with the
same dims, so it copies the same ones. Knows no lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def accesses(arrays: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The dims of operands and result -> how often each array is read or written; a copy is one of both.

    >>> accesses(["bhst", "bthk", "bshk"])
    (1, 3, 3)
    """

    def owners(name: str) -> tuple[bool, ...]:
        return tuple(name in dims for dims in arrays)

    found = []
    for dims in arrays:
        runs = [who for who, _ in groupby(dims, owners)]
        is_matrix = len(set(runs)) == len(runs) and not (len(runs) > 1 and all(runs[-1]))
        found.append(1 if is_matrix or len(arrays) < 3 else 3)  # a sum of one operand is no product
    return tuple(found)
