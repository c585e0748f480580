"""Relations between arrays: which part of a source array becomes which part of a target array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from xshard.errors import ShapeError, XshardError
from xshard.layout.runs import Run, Runs, as_index, interval, n_rows
from xshard.rules import fill_stars, match_stars

Shape = tuple[int, ...]
Joined = Mapping[
    tuple[str, Shape], tuple[int, ...]
]  # a joined array -> the rows of each of its parts


class ArrayPart(NamedTuple):
    """All of an array, or the rows `rows` of dim `dim`. adds: only the part has that dim, with length 1."""

    name: str
    dim: int | None = None
    rows: Runs = ()
    adds: bool = False

    def part_shape(self, shape: Shape) -> Shape:
        """The shape of the array -> the shape of the part."""
        if (d := self.dim) is None:
            return shape
        return (
            (*shape[:d], 1, *shape[d:])
            if self.adds
            else (*shape[:d], n_rows(self.rows), *shape[d + 1 :])
        )

    @property
    def numpy_index(self) -> tuple[Any, ...]:
        """The numpy index of the part in the array."""
        if self.dim is None:
            return ()
        return *(slice(None),) * self.dim, None if self.adds else as_index(self.rows)


class PartMapping(NamedTuple):
    """Elements of one array that become elements of another. Dim i of `dst` is dim `order[i]` of `src`."""

    src: ArrayPart
    dst: ArrayPart
    order: tuple[int, ...]

    @property
    def inverse(self) -> PartMapping:
        order = sorted(range(len(self.order)), key=self.order.__getitem__)
        return PartMapping(self.dst, self.src, tuple(order))


class TargetArray(NamedTuple):
    """An array that names make: its shape, its dtype, and the source of each of its parts."""

    shape: Shape
    dtype: str
    pieces: tuple[PartMapping, ...]


@dataclass(frozen=True)
class Relation:
    """The arrays `parts`, their dims permuted by `order`, make the array `whole` along dim `dim`. rows: for
    the parts in turn, in groups that repeat; None: all of one part, then all of the next. stacks: `dim` is
    new, and the last star of the one part stands for 0, 1, 2, ... splits: the inverse direction. dtype: the
    targets'. optional: accept that no array fits. equal: without `rows`, parts have equally many. joined:
    in JSON, the shape of each array that was joined, and the rows of its parts.
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
    equal: bool = False
    joined: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = field(
        default=(), compare=False
    )

    @property
    def inverse(self) -> Relation:
        """The relation from targets to sources. Raises XshardError for a cast."""
        if self.dtype is not None:
            hint = "cast in a mapping of its own"
            raise XshardError(f"a cast to {self.dtype} cannot be inverted", hint=hint)
        return replace(self, splits=not self.splits)

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of the sources and of the targets."""
        return ((self.whole,), self.parts) if self.splits else (self.parts, (self.whole,))

    def __str__(self) -> str:
        return " -> ".join(map(", ".join, self.sides))


def applications(
    relation: Relation, shapes: Mapping[str, Shape]
) -> Iterator[tuple[list[str], list[str]]]:
    """Each use of a relation for these arrays: the names of its sources and of its targets."""
    src, dst = relation.sides
    matches = [(name, stars) for name in shapes if (stars := match_stars(src[0], name)) is not None]
    for name, _ in matches if relation.splits and (relation.stacks or len(dst) > 1) else ():
        if not 0 <= relation.dim < len(shapes[name]):
            reason = f"{name} of shape {shapes[name]} cannot be split along dim {relation.dim}"
            raise ShapeError(f"{relation}: {reason}")
    if not relation.stacks:
        for _, stars in matches:
            yield [fill_stars(p, stars) for p in src], [fill_stars(p, stars) for p in dst]
    elif relation.splits:
        for name, stars in matches:
            yield (
                [name],
                [fill_stars(dst[0], (*stars, str(i))) for i in range(shapes[name][relation.dim])],
            )
    else:
        members = Counter(tuple(outer) for _, (*outer, _) in matches)
        for stars, n in members.items():
            yield (
                [fill_stars(src[0], (*stars, str(i))) for i in range(n)],
                [fill_stars(dst[0], stars)],
            )


def make_targets(
    relation: Relation, sources: list[str], targets: list[str], shapes: list[Shape], joined: Joined
) -> Iterator[tuple[str, Shape, tuple[PartMapping, ...]]]:
    """The name, shape and parts of each array that one use makes. shapes: the sources'. joined: the rows of
    parts of arrays that were joined before; a split without `rows` follows them.
    """
    d = relation.dim
    new = relation.stacks
    added = new and relation.splits  # the dim of the whole that parts lack
    order = relation.order or tuple(range(len(shapes[0]) - added))
    if any(len(shape) - added != len(order) for shape in shapes):
        raise ShapeError(f"{relation}: shapes {shapes}, an order of {len(order)} dims")
    if relation.splits:
        is_known = new or relation.rows or relation.equal or len(targets) == 1
        lengths = () if is_known else joined.get((sources[0], shapes[0]), ())
        if not is_known and not lengths:
            reason = (
                f"{relation}: {sources[0]} of shape {shapes[0]} does not say the rows of each part"
            )
            hint = (
                "give rows=, write split() for equal parts, or resolve the parts before the inverse"
            )
            raise ShapeError(reason, hint=hint)
        parts = _parts_of_whole(relation, sources[0], shapes[0], len(targets), lengths)
        for name, part in zip(targets, parts, strict=True):
            piece = _mapping(name, part, order, relation).inverse
            shape = [part.part_shape(shapes[0])[i] for i in piece.order]
            yield name, tuple(shape[:d] + shape[d + 1 :] if new else shape), (piece,)
        return
    permuted = [tuple(shape[i] for i in order) for shape in shapes]
    if len(permuted) == 1 and not new:
        yield (
            targets[0],
            permuted[0],
            (PartMapping(ArrayPart(sources[0]), ArrayPart(targets[0]), order),),
        )
        return
    others = {(*shape[:d], *shape[d + (not new) :]) for shape in permuted}
    if len(others) > 1 or not 0 <= d < len(order) + new:
        raise ShapeError(f"{relation}: {permuted} cannot be joined along dim {d}")
    rest = others.pop()
    lengths = tuple(1 if new else shape[d] for shape in permuted)
    whole = (*rest[:d], sum(lengths), *rest[d:])
    parts = _parts_of_whole(relation, targets[0], whole, len(lengths), lengths)
    pieces = (
        _mapping(name, part, order, relation) for name, part in zip(sources, parts, strict=True)
    )
    yield targets[0], whole, tuple(pieces)


def _mapping(name: str, part: ArrayPart, order: tuple[int, ...], relation: Relation) -> PartMapping:
    """The array `name` as a part of the whole. If it is stacked, both have the new dim."""
    if not relation.stacks:
        return PartMapping(ArrayPart(name), part, order)
    d = relation.dim
    shifted = [i + (i >= d) for i in order]
    return PartMapping(ArrayPart(name, d, adds=True), part, (*shifted[:d], d, *shifted[d:]))


def _parts_of_whole(
    relation: Relation, name: str, shape: Shape, n: int, lengths: Sequence[int]
) -> list[ArrayPart]:
    """The n parts of the whole array `name`. lengths: rows of each part; () if the relation knows them."""
    d = relation.dim
    if relation.stacks:
        return [ArrayPart(name, d, interval(i, i + 1)) for i in range(n)]
    if n == 1:
        return [ArrayPart(name)]
    rows = relation.rows or ((shape[d] // n,) * n if relation.equal else lengths)
    group = sum(rows)
    n_groups = shape[d] // group if group else 0
    if n_groups * group != shape[d] or (
        lengths and [n_groups * each for each in rows] != [*lengths]
    ):
        reason = f"dim {d} of {shape[d]} rows is not a whole number of groups of {list(rows)} rows"
        raise ShapeError(
            f"{relation}: {reason}", hint="rows= has the rows of each part that come in turn"
        )
    starts = [sum(rows[:i]) for i in range(n)]
    turns = (n_groups, group) if n_groups > 1 else ()
    runs = [Run(start, each, *turns) for start, each in zip(starts, rows, strict=True)]
    return [ArrayPart(name, d, (run,) if n_groups * run.length else ()) for run in runs]
