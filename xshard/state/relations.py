"""Relations between arrays: which part of which array becomes which part of another.

Decides what a relation makes of given names, the shapes of that, and the pieces. Knows no layout and no tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xshard.errors import ShapeError, XshardError
from xshard.layout.runs import Run, Runs, as_index, interval, n_rows
from xshard.rules import fill_stars, match_stars

Shape = tuple[int, ...]


class Side(NamedTuple):
    """A part of the array `name`: all of it, or the rows `rows` of dim `dim`.

    adds: the array lacks dim `dim`, and is seen with that dim of length 1.
    """

    name: str
    dim: int | None = None
    rows: Runs = ()
    adds: bool = False

    def seen(self, shape: Shape) -> Shape:
        """The shape of the array -> that of the part."""
        if self.dim is None:
            return shape
        if self.adds:
            return (*shape[: self.dim], 1, *shape[self.dim :])
        return (*shape[: self.dim], n_rows(self.rows), *shape[self.dim + 1 :])

    @property
    def at(self) -> tuple[Any, ...]:
        """The numpy index of the part in the array."""
        if self.dim is None:
            return ()
        return *(slice(None),) * self.dim, None if self.adds else as_index(self.rows)


class Piece(NamedTuple):
    """Elements of one array that become elements of another. Dim i of `dst` is dim `order[i]` of `src`."""

    src: Side
    dst: Side
    order: tuple[int, ...]

    @property
    def inverse(self) -> Piece:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return Piece(self.dst, self.src, tuple(back))


class Made(NamedTuple):
    """An array that a mapping makes: its shape, its dtype, and where each part comes from."""

    shape: Shape
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Relation:
    """Arrays `parts`, each with its dims permuted by `order`, are `whole`, side by side along `dim`.

    rows: of every part in turn, group after group; None: all of one part, then all of the next.
    stacks: along a new dim, one array for every number in the place of the last star of the one part.
    splits: read from right to left: `whole` is what there is, `parts` are made. dtype: of what is made.
    optional: whether it may fit no name.
    """

    parts: tuple[str, ...]
    whole: str
    order: tuple[int, ...] | None = None
    dim: int = 0
    rows: tuple[int, ...] | None = None
    stacks: bool = False
    splits: bool = False
    dtype: str | None = None
    optional: bool = False

    @property
    def inverse(self) -> Relation:
        """What makes the sources of the targets. Raises XshardError for a cast: of what, it does not know."""
        if self.dtype is not None:
            raise XshardError(f"a cast to {self.dtype} has no inverse", hint="cast in a mapping of its own")
        return replace(self, splits=not self.splits)

    def __str__(self) -> str:
        here, there = ", ".join(self.parts), self.whole
        return f"{there} -> {here}" if self.splits else f"{here} -> {there}"


def uses(relation: Relation, names: Mapping[str, Shape]) -> Iterator[tuple[list[str], list[str]]]:
    """What a relation makes of these names, and of which of them."""
    here = (relation.whole,) if relation.splits else relation.parts
    there = relation.parts if relation.splits else (relation.whole,)
    found = [(name, stars) for name in names if (stars := match_stars(here[0], name)) is not None]
    if not relation.stacks:
        for _, stars in found:
            yield [fill_stars(each, stars) for each in there], [fill_stars(each, stars) for each in here]
        return
    if relation.splits:
        for name, stars in found:
            yield [fill_stars(there[0], (*stars, str(i))) for i in range(names[name][relation.dim])], [name]
        return
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (*outer, _) in found:
        groups.setdefault(tuple(outer), []).append(name)
    for outer_stars, members in groups.items():
        numbered = [fill_stars(here[0], (*outer_stars, str(i))) for i in range(len(members))]
        yield [fill_stars(there[0], outer_stars)], numbered


def made_by(
    relation: Relation, targets: list[str], sources: list[str], given: list[Shape]
) -> Iterator[tuple[str, Shape, tuple[Piece, ...]]]:
    """Every array that a use of a relation makes: its name, its shape and its pieces."""
    d, new = relation.dim, relation.stacks
    if relation.splits:
        n = len(targets)
        order = relation.order or tuple(range(len(given[0]) - new))
        for part, side in zip(targets, _sides(relation, sources[0], given[0], [None] * n), strict=True):
            piece = _piece(part, side, order, relation).inverse
            seen = [side.seen(given[0])[i] for i in piece.order]
            yield part, tuple(seen[:d] + seen[d + 1 :] if new else seen), (piece,)
        return
    order = relation.order or tuple(range(len(given[0])))
    if any(len(shape) != len(order) for shape in given):
        raise ShapeError(f"{relation}: shapes {given}, an order of {len(order)} dims")
    turned = [tuple(shape[i] for i in order) for shape in given]
    others = {(*shape[:d], *shape[d + (not new) :]) for shape in turned}
    if len(turned) == 1 and not new:
        yield targets[0], turned[0], (Piece(Side(sources[0]), Side(targets[0]), order),)
        return
    if len(others) > 1 or not 0 <= d < len(order) + new:
        raise ShapeError(f"{relation}: {turned} do not lie side by side along dim {d}")
    rest = others.pop()
    whole = (*rest[:d], len(turned) if new else sum(shape[d] for shape in turned), *rest[d:])
    sides = _sides(relation, targets[0], whole, [1 if new else shape[d] for shape in turned])
    pieces = (_piece(name, side, order, relation) for name, side in zip(sources, sides, strict=True))
    yield targets[0], whole, tuple(pieces)


def _piece(part: str, side: Side, order: tuple[int, ...], relation: Relation) -> Piece:
    """A part, as a piece of the whole; where it is stacked both are seen to have the new dim."""
    if not relation.stacks:
        return Piece(Side(part), side, order)
    d = relation.dim
    moved = [i + (i >= d) for i in order]
    return Piece(Side(part, d, adds=True), side, (*moved[:d], d, *moved[d:]))


def _sides(relation: Relation, whole: str, shape: Shape, lengths: Sequence[int | None]) -> list[Side]:
    """The rows of each part in the whole. lengths: of the parts; None: as the whole and `rows` say."""
    d, n = relation.dim, len(lengths)
    if len(lengths) == 1 and not relation.stacks:
        return [Side(whole)]
    if relation.stacks:
        return [Side(whole, d, interval(i, i + 1)) for i in range(n)]
    rows = relation.rows or [length if length is not None else shape[d] // n for length in lengths]
    together = sum(rows)
    groups = shape[d] // together if together else 0
    wrong = [
        length for length, each in zip(lengths, rows, strict=True) if length not in (None, groups * each)
    ]
    if wrong or groups * together != shape[d]:
        raise ShapeError(
            f"{relation}: dim {d} of {shape[d]} rows is no whole number of groups of {list(rows)} rows",
            hint="rows= says how many rows of each part come in turn",
        )
    starts = [sum(rows[:i]) for i in range(n)]
    return [
        Side(whole, d, (Run(start, each, groups, together) if groups > 1 else Run(start, each),))
        for start, each in zip(starts, rows, strict=True)
    ]
