"""Names of arrays here -> names there: renamed, transposed, fused and split, each element with one origin.

Decides which part of which array becomes which part of another. Knows no layout, no tree and no framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import did_you_mean, shown
from xshard.errors import ShapeError, XshardError
from xshard.layout.layout import parse_expression
from xshard.layout.runs import Run, Runs, as_index, interval, n_rows
from xshard.rules import spellings

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
    """

    parts: tuple[str, ...]
    whole: str
    order: tuple[int, ...] | None = None
    dim: int = 0
    rows: tuple[int, ...] | None = None
    stacks: bool = False
    splits: bool = False
    dtype: str | None = None

    @property
    def inverse(self) -> Relation:
        """What makes the sources of the targets. Raises XshardError for a cast: of what, it does not know."""
        if self.dtype is not None:
            raise XshardError(f"a cast to {self.dtype} has no inverse", hint="cast in a mapping of its own")
        return replace(self, splits=not self.splits)

    def __str__(self) -> str:
        here, there = ", ".join(self.parts), self.whole
        return f"{there} -> {here}" if self.splits else f"{here} -> {there}"


def rename(src: str, dst: str, order: str | None = None, *, dtype: str | None = None) -> Iterator[Relation]:
    """Arrays get other names, and their dims another order.

    src, dst: patterns; the stars of `dst` stand for those of `src`, one after the other, and `{a,b}` on both
    sides for one pair after the other. order: as in "o i -> i o". dtype: what the values are cast to.
    Raises XshardError where the two sides do not have as many stars, or as many alternatives.

    >>> made = Names(rename("*.{q,k}", "*.{query,key}", "o i -> i o")).resolve({"a.q": (4, 2), "a.k": (1, 2)})
    >>> {name: array.shape for name, array in made.items()}
    {'a.query': (2, 4), 'a.key': (2, 1)}
    """
    for one, other in _pairs(src, dst):
        yield Relation((one,), other, _permutation(order), dtype=dtype)


def concat(
    srcs: Sequence[str],
    dst: str,
    dim: int = 0,
    *,
    rows: Sequence[int] | None = None,
    order: str | None = None,
) -> Iterator[Relation]:
    """Arrays become one, side by side along `dim`: q, k and v in one weight, or gate and up.

    srcs: patterns with the same stars. rows: how many rows of each come in turn, as (4 * 128, 128, 128)
    for the groups of heads of grouped queries, or (1, 1) for alternation; by default all rows of each.
    order: of the dims of every part first, as in "o i -> i o"; `dim` counts after that.

    >>> made = Names(concat(["*.gate", "*.up"], "*.gate_up")).resolve({"a.gate": (4, 2), "a.up": (4, 2)})
    >>> made["a.gate_up"].shape, made["a.gate_up"].pieces[1].dst.rows
    ((8, 2), (Run(start=4, length=4, repeats=1, stride=0),))
    """
    if rows is not None and (len(rows) != len(srcs) or min(rows, default=1) < 1):
        raise XshardError(f"rows {list(rows)} for {len(srcs)} arrays", hint="a number >= 1 for each of them")
    counts = None if rows is None else tuple(rows)
    yield Relation(tuple(srcs), dst, _permutation(order), dim, counts)


def split(
    src: str,
    dsts: Sequence[str],
    dim: int = 0,
    *,
    rows: Sequence[int] | None = None,
    order: str | None = None,
) -> Iterator[Relation]:
    """One array becomes several: the inverse of `concat(dsts, src, ...)`. Parts without `rows` are equal."""
    for relation in concat(dsts, src, dim, rows=rows, order=order):
        yield relation.inverse


def stack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """Arrays with numbers in their names become one, along a new dim: experts, or layers for a scan.

    src: a pattern whose last star stands for 0, 1, 2, ...; dst has one star less.
    """
    yield Relation((src,), dst, None, dim, stacks=True)


def unstack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """One array becomes several with numbers in their names: the inverse of `stack(dst, src, dim)`."""
    for relation in stack(dst, src, dim):
        yield relation.inverse


class Names:
    """Relations between the names of arrays here and there; of those that fit a name, the first decides.

    >>> to_flax = Names(
    ...     rename("layers.*.out.weight", "layers_*.out.kernel", "o i -> i o"),
    ...     concat(["layers.*.q", "layers.*.k"], "layers_*.qk"),
    ...     rename("**", "**"),
    ... )
    >>> here = {"layers.0.out.weight": (4, 2), "layers.0.q": (8,), "layers.0.k": (2,), "norm": (4,)}
    >>> there = to_flax.resolve(here)
    >>> {name: made.shape for name, made in there.items()}
    {'layers_0.out.kernel': (2, 4), 'layers_0.qk': (10,), 'norm': (4,)}
    """

    def __init__(self, *relations: Iterable[Relation] | Relation) -> None:
        self.relations: tuple[Relation, ...] = tuple(
            relation for each in relations for relation in ((each,) if isinstance(each, Relation) else each)
        )
        for relation in self.relations:
            _check_stars(relation)

    @cached_property
    def inverse(self) -> Names:
        """From the names there to those here."""
        return Names(*(relation.inverse for relation in self.relations))

    def resolve(
        self, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str] | None = None
    ) -> dict[str, Made]:
        """Shapes by name, here -> what is made there, each element with exactly one origin.

        dtypes: by name; float32 by default.
        Raises XshardError for names without a relation, relations without a name, and names with two origins;
        ShapeError where shapes do not fit together.
        """
        left = {name: tuple(shape) for name, shape in shapes.items()}
        made: dict[str, Made] = {}
        makers: dict[str, Relation] = {}
        idle = []
        for relation in self.relations:
            uses = list(_uses(relation, left))
            if not uses and relation != _KEEP:
                idle.append(str(relation))
            for targets, sources in uses:
                given = []
                for name in sources:
                    if name not in left:
                        used = " any more" if name in shapes else ""
                        hint = did_you_mean(name, list(left)) or "every array is used once"
                        raise XshardError(f"{relation}: there is no {name}{used}", hint=hint)
                    given.append(left.pop(name))
                kinds = sorted({dtypes[name] if dtypes else "float32" for name in sources})
                if len(kinds) > 1:
                    raise ShapeError(f"{relation}: {' and '.join(sources)} are {' and '.join(kinds)}")
                for target, shape, pieces in _made(relation, targets, sources, given):
                    if target in made:
                        origins = f"{makers[target]}; {relation}"
                        raise XshardError(f"{target} would have two origins", hint=origins)
                    makers[target] = relation
                    made[target] = Made(shape, relation.dtype or kinds[0], pieces)
        if left or idle:
            reasons = [f"no relation for {len(left)} names: {', '.join(list(left)[:8])}"] if left else []
            reasons += [f"'{text}' fits no name" for text in idle]
            raise XshardError("; ".join(reasons), hint="rename('**', '**') keeps all others as they are")
        return made

    def apply(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Whole numpy arrays by name, here -> those there, which are new.

        >>> Names(rename("w", "kernel", "o i -> i o")).apply({"w": np.arange(6).reshape(2, 3)})[
        ...     "kernel"
        ... ].shape
        (3, 2)
        """
        shapes = {name: array.shape for name, array in arrays.items()}
        results = {}
        for target, made in self.resolve(shapes, {name: str(x.dtype) for name, x in arrays.items()}).items():
            out = results[target] = np.empty(made.shape, arrays[made.pieces[0].src.name].dtype)
            for src, dst, order in made.pieces:
                out[dst.at] = np.transpose(arrays[src.name][src.at], order)
            results[target] = out.astype(made.dtype)
        return results


_KEEP = Relation(("**",), "**")


def _uses(relation: Relation, names: Mapping[str, Shape]) -> Iterator[tuple[list[str], list[str]]]:
    """What a relation makes of these names, and of which of them."""
    here = (relation.whole,) if relation.splits else relation.parts
    there = relation.parts if relation.splits else (relation.whole,)
    found = [(name, stars) for name in names if (stars := _stars(here[0], name)) is not None]
    if not relation.stacks:
        for _, stars in found:
            yield [_filled(each, stars) for each in there], [_filled(each, stars) for each in here]
        return
    if relation.splits:
        for name, stars in found:
            yield [_filled(there[0], (*stars, str(i))) for i in range(names[name][relation.dim])], [name]
        return
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (*outer, _) in found:
        groups.setdefault(tuple(outer), []).append(name)
    for outer_stars, members in groups.items():
        numbered = [_filled(here[0], (*outer_stars, str(i))) for i in range(len(members))]
        yield [_filled(there[0], outer_stars)], numbered


def _made(
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


def _stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern stand for in a name; None if it does not fit."""
    text = re.escape(pattern).replace(r"\*\*", "(.*)").replace(r"\*", "([^.]+?)")
    found = re.fullmatch(text, name)
    return None if found is None else found.groups()


def _filled(pattern: str, stars: Sequence[str]) -> str:
    """A pattern with its stars replaced."""
    left = list(stars)
    return re.sub(r"\*\*?", lambda _: left.pop(0), pattern)


def _check_stars(relation: Relation) -> None:
    counts = [len(re.findall(r"\*\*?", pattern)) for pattern in (*relation.parts, relation.whole)]
    if relation.stacks:
        counts[0] -= 1
    if len(set(counts)) > 1:
        raise XshardError(
            f"'{relation}' has {counts[:-1]} stars for {counts[-1]}",
            hint="every star stands for the same on both sides",
        )


def _pairs(src: str, dst: str) -> list[tuple[str, str]]:
    left, right = spellings(src), spellings(dst)
    if len(left) != len(right):
        raise XshardError(
            f"'{src}' stands for {len(left)} names, '{dst}' for {len(right)}",
            hint="as many in the braces of both",
        )
    return list(zip(left, right, strict=True))


def _permutation(order: str | None) -> tuple[int, ...] | None:
    if order is None:
        return None
    src, dst = parse_expression(order)
    if src.axes or dst.axes:
        raise XshardError(f"'{shown(order)}' cuts dims", hint="an order of dims alone, as in 'o i -> i o'")
    return tuple(src.names.index(name) for name in dst.names)
