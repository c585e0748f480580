"""Operations in letters, by shapes alone, as torch and JAX have in common."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

from xshard.notation.parser import ARROW

FREE: Mapping[str, Any] = {"accesses": 0.0}  # compilers make it part of what is before or after it
Shape = Sequence[int]
Shapes = Sequence[Shape]
Factors = list[tuple[str, int]]
Places = Sequence[Sequence[int | None]]  # of dims of arrays in the result


class Written(NamedTuple):
    """An operation as for `Trace.add`, on as many first operands as it has arrays, the result's beside.

    arrays: their dims, operands first. work: as in `Op`. lengths: dims in parentheses, by name. links: how
    many operands, the last ones, are there for their lengths alone.
    """

    arrays: Sequence[Sequence[str]]
    kind: str = "pointwise"
    whole: Collection[str] = ()
    work: Mapping[str, Any] = {}
    lengths: Mapping[str, int] = {}
    links: int = 0

    @property
    def text(self) -> str:
        """The dims of operands and result as text."""
        *sides, result = (" ".join(dims) for dims in self.arrays)
        return f"{', '.join(side or '()' for side in sides)} {ARROW} {result}".strip()


def common_factors(before: Shape, after: Shape) -> tuple[list[Factors], list[Factors]]:
    """Two shapes of one array -> the factors of each dim of both, by name, and their lengths.

    A dim that ends inside a dim of the other shape is a factor of its own, as is a dim of length 1.
    """
    places = [[*accumulate(shape, mul, initial=1)] for shape in (before, after)]
    sides = list[Factors](), list[Factors]()
    for which, (products, factors) in enumerate(zip(places, sides, strict=True)):
        for d, (low, high) in enumerate(pairwise(products)):
            cuts = sorted({n for n in (*places[0], *places[1]) if low <= n <= high})
            parts = [(f"r{start}", end // start) for start, end in pairwise(cuts)]
            nests = parts and all(end % start == 0 for start, end in pairwise(cuts))
            factors.append(parts if nests else [(f"u{which}_{d}", high // low)])
    return sides


def words(text: str) -> frozenset[str]:
    """The names of some operations."""
    return frozenset(text.split())


def grouped(names: Sequence[str]) -> str:
    """Dims as one dim of an array: in parentheses if they are several."""
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def letters(n: int, prefix: str = "r") -> list[str]:
    """Names for the dims of an array."""
    return [f"{prefix}{i}" for i in range(n)]


def placed(
    shapes: Shapes,
    out: Shape,
    places: Places,
    kind: str = "linear",
    whole: Collection[str] = (),
    **work: Any,
) -> Written:
    """Dims at places of the result, or None; dims of other lengths are broadcast, or whole."""
    arrays = list[list[str]]()
    odd = {*whole}
    for k, shape in enumerate(shapes):
        arrays.append([])
        for d, (n, j) in enumerate(zip(shape, places[k], strict=True)):
            is_same = j is not None and n == out[j]
            arrays[k].append(f"r{j}" if is_same else f"u{k}_{d}")
            odd |= {f"r{j}", f"u{k}_{d}"} if j is not None and 1 < n != out[j] else set()
    arrays.append(letters(len(out)))
    return Written(arrays, kind, odd & {d for dims in arrays for d in dims}, work)


def aligned(
    shapes: Shapes, out: Shape, kind: str = "linear", whole: Collection[str] = (), **work: Any
) -> Written:
    """The last dims are the result's."""
    return placed(
        shapes, out, [range(len(out) - len(s), len(out)) for s in shapes], kind, whole, **work
    )


def along(
    shapes: Shapes,
    out: Shape,
    dims: int | Shape,
    kind: str = "pointwise",
    *,
    sums: bool = False,
    **work: Any,
) -> Written:
    """Some dims of the first operand are whole, or sums; all others are the result's, in their order."""
    ndim = len(shapes[0])
    left = iter(range(len(out)))
    named = {d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)}
    places = [next(left) if len(out) == ndim or d not in named else None for d in range(ndim)]
    each = [places if len(s) == ndim else [None] * len(s) for s in shapes]
    row = placed(shapes, out, each, kind, {f"r{places[d]}" for d in named}, **work)
    own = {dim for dims in row.arrays for dim in dims if dim[0] == "u"}
    return row._replace(whole=set() if sums else {*row.whole, *own})


def view(before: Shape, after: Shape) -> Written:
    """A reshape; dims that no axis can shard are whole.

    >>> view((64, 4096), (8, 8, 32, 128)).text
    '(r1 r8) (r64 r2048) -> r1 r8 r64 r2048'
    >>> view((4, 6, 5), (4, 10, 3)).text, sorted(view((4, 6, 5), (4, 10, 3)).whole)
    ('r1 r4 u0_2 -> r1 u1_1 r40', ['r4', 'r40', 'u0_2', 'u1_1'])
    """
    sides = common_factors(before, after)
    arrays = [[grouped([name for name, _ in dim]) for dim in side] for side in sides]
    lengths, there = (dict(factor for dim in side for factor in dim) for side in sides)
    whole = lengths.keys() ^ there.keys()
    return Written(arrays, "linear", whole, FREE, lengths | there)


def convolution(
    shapes: Shapes, out: Shape, groups: int, orders: Sequence[Sequence[int]] = ()
) -> Written:
    """Windows are whole, and channels, if they are in groups of several.

    orders: the numbers of batch, channels (a kernel's: result's, operand's) and windows in every array.
    """
    n = len(out) - 2
    orders = orders or [range(n + 2)] * 3
    in_groups = [shapes[0][orders[0][1]], out[orders[2][1]]] != [groups, groups] and groups > 1
    inner, outer, taken = "coi" if in_groups else "coc" if groups == 1 else "ccd"
    windows = [letters(n, letter) for letter in "lkm"]
    dims = [["b", inner, *windows[0]], [outer, taken, *windows[1]], ["b", outer, *windows[2]]]
    arrays = [[d[[*o].index(i)] for i in range(n + 2)] for o, d in zip(orders, dims, strict=True)]
    whole = {name for each in windows for name in each} | ({"c", "o", "i"} if in_groups else set())
    again = math.prod(shapes[0][d] for d in orders[0][1 if in_groups else 2 :])
    return Written(arrays, "contraction", whole, {"flops": 2.0 / again})
