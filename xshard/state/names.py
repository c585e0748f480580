"""Names of arrays here -> names there: renamed, transposed, fused and split, each element with one origin.

Decides how relations are written, and that together they make every array of all arrays, once. Knows no tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import did_you_mean, shown
from xshard.errors import ShapeError, XshardError
from xshard.layout.layout import parse_expression
from xshard.rules import match_stars, spellings, stars_in
from xshard.state.relations import Made, Relation, made_by, uses

_KEEP = Relation(("**",), "**")


def rename(
    src: str, dst: str, order: str | None = None, *, dtype: str | None = None, optional: bool = False
) -> Iterator[Relation]:
    """Arrays get other names, and their dims another order.

    src, dst: patterns as in `xshard.Rules`, with the same stars in the same order: each stands for the same
    text on both sides. Braces pair up: `{a,b}` with `{c,d}` renames a to c, and b to d.
    order: the order of the dims, as in "o i -> i o". dtype: the dtype that the values are cast to.
    optional: accept that no array has such a name.
    Raises XshardError if the two sides differ in their stars or in their number of alternatives.

    >>> made = Names(rename("*.{q,k}", "*.{query,key}", "o i -> i o")).resolve({"a.q": (4, 2), "a.k": (1, 2)})
    >>> {name: array.shape for name, array in made.items()}
    {'a.query': (2, 4), 'a.key': (2, 1)}
    """
    for one, other in _pairs(src, dst):
        yield Relation((one,), other, _permutation(order), dtype=dtype, optional=optional)


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
            _check_patterns(relation)

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
            found = list(uses(relation, left))
            if not (found or relation.optional or replace(relation, splits=False) == _KEEP):
                idle.append(str(relation))
            for targets, sources in found:
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
                for target, shape, pieces in made_by(relation, targets, sources, given):
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


def _check_patterns(relation: Relation) -> None:
    patterns = (*relation.parts, relation.whole)
    for pattern in patterns:
        if spellings(pattern) != [pattern]:
            raise XshardError(
                f"'{pattern}' in '{relation}' stands for several names",
                hint="braces and bars are for rename; write a relation for each name",
            )
        match_stars(pattern, "")  # refuses a malformed pattern
    stars = [stars_in(pattern) for pattern in patterns]
    if relation.stacks and "*" not in stars[0][-1:]:
        raise XshardError(f"'{relation}' has no star for a number", hint="stack('e.*', 'e')")
    if relation.stacks:
        stars[0].pop()
    if any(each != stars[-1] for each in stars):
        raise XshardError(
            f"'{relation}' has the stars {' and '.join(' '.join(each) or 'none' for each in stars)}",
            hint="each star stands for the same text on both sides: as many on each side, in the same order",
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


SAME = Names(_KEEP)  # every array is as it is, under its own name
