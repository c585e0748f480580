"""The cuts of one dim <-> the split factors of its placements. A `_StridedShard` of factor f gives every
device a share of each of f pieces; a factor may also say only that axes later in the mesh cut first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from xshard import Layout, Mesh, Sharding
from xshard.layout.runs import Run, Runs, interval, interval_pairs, merge_adjacent, n_rows, select
from xshard.notation.parser import INTERVALS, Dim
from xshard.notation.parser import Shard as Cut

Factors = Mapping[str, int]  # an axis that cuts the dim -> its split factor, in the order of the mesh


def cuts_of(factors: Factors, mesh: Mesh, length: int | None) -> tuple[Cut, ...] | None:
    """Split factors -> the cuts of a dim of `length`; None where they are no nesting and no length is given.

    None, too, if torch itself reads them in two ways: as the order of axes that they say, and as pieces of
    an uneven length.

    >>> cuts_of({"a": 2, "b": 1}, Mesh(a=2, b=2), None)
    (Shard(axes=('b',), order='block', numbers=()), Shard(axes=('a',), order='block', numbers=()))
    >>> [str(cut) for cut in cuts_of({"a": 4}, Mesh(a=2), 16)]
    ['cyclic(a,2)']
    """
    order = _nesting(factors, mesh)
    nested = None if order is None else tuple(Cut((axis,)) for axis in order)
    if length is None or order == [*factors]:
        return nested
    strided, left = [], length
    for axis, factor in factors.items():
        n = mesh.size(axis)
        rows, rest = divmod(left, factor * n)
        if rest:
            return _uneven(factors, mesh, length, order)
        strided.append(Cut((axis,), "cyclic", (rows,)) if factor > 1 and rows else Cut((axis,)))
        left //= n
    return nested or tuple(strided)


def factors_of(dim: Dim, mesh: Mesh, length: int | None) -> dict[str, int] | None:
    """The cuts of a dim, in normal form if they are more than nested -> the split factors that make them, or
    None."""
    plain = all(cut.order == "block" and len(cut.axes) == 1 for cut in dim.shards)
    if dim.overlap is not None or (length is None and not plain):
        return None
    factors: dict[str, int] = {}
    left = length
    for cut in dim.shards:
        pieces = 1
        if left is not None and cut.order == "cyclic":
            rows = int(cut.numbers[0]) if cut.numbers else 1  # type: ignore[arg-type]
            pieces = max(left // (rows * mesh.size(*cut.axes)), 1)
        elif cut.order == INTERVALS:
            pieces = len(interval_pairs(cut.numbers[0]))
        for axis in cut.axes:
            # Axes that cut the dim before this one does, though they come later in the mesh.
            earlier = (a for a in factors if mesh.position(a) > mesh.position(axis))
            factors[axis] = pieces * mesh.size(*earlier)
        left = None if left is None else -(-left // mesh.size(*cut.axes))
    if length is None or (plain and not any(factor > 1 for factor in factors.values())):
        return factors
    cuts = cuts_of({axis: factors[axis] for axis in sorted(factors, key=mesh.position)}, mesh, length)

    def sharding(cuts: tuple[Cut, ...]) -> Sharding:
        return Sharding(Layout((Dim(dim.name, cuts),)), mesh, (length,))

    return factors if cuts is not None and sharding(cuts).means_the_same_as(sharding(dim.shards)) else None


def _nesting(factors: Factors, mesh: Mesh) -> list[str] | None:
    """The order of the axes if each factor is the number of parts that later axes of the mesh make first."""
    order: list[str] = []
    for axis, factor in reversed([*factors.items()]):
        positions = [i for i in range(len(order) + 1) if mesh.size(*order[:i]) == factor]
        if not positions:
            return None
        order.insert(positions[0], axis)
    return order


def _uneven(factors: Factors, mesh: Mesh, length: int, order: Sequence[str] | None) -> tuple[Cut, ...] | None:
    """As `cuts_of`, for pieces or shares of different sizes."""
    part = Mesh({axis: mesh.size(axis) for axis in factors})
    held = [_rows(length, factors, part, device) for device in range(part.n_devices)]
    if order is None:
        intervals = [
            tuple(end for run in runs for end in (run.start, run.start + run.length)) for runs in held
        ]
        return (Cut(part.axes, INTERVALS, tuple(numbers or (0, 0) for numbers in intervals)),)
    nested = tuple(Cut((axis,)) for axis in order)
    blocks = Sharding(Layout((Dim("_", nested),)), part, (length,))
    return nested if held == [blocks.owned(0, device) for device in range(part.n_devices)] else None


def _rows(length: int, factors: Factors, mesh: Mesh, device: int) -> Runs:
    """The rows of one device, cut as `_StridedShard` cuts: chunks of chunks, as `torch.chunk` makes them."""
    runs = interval(0, length)
    for (axis, factor), coordinate in zip(factors.items(), mesh.coords(device), strict=True):
        shares = [*_shares(n_rows(runs), mesh.size(axis), factor, coordinate)]
        runs = tuple(itertools.chain.from_iterable(select(runs, share) for share in shares))
    return merge_adjacent(runs)


def _shares(length: int, n: int, factor: int, coordinate: int) -> Iterator[Run]:
    piece = max(-(-length // factor), 1)
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        share = -(-(stop - start) // n)
        yield from interval(
            min(start + coordinate * share, stop), min(start + (coordinate + 1) * share, stop)
        )
