"""Source names -> target names: arrays renamed, transposed, fused and split, each element with one origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import did_you_mean, shown
from xshard.errors import ShapeError, XshardError
from xshard.layout import layout, runs
from xshard.plans.serialize import fields_from_plain, fields_to_plain
from xshard.rules import match_stars, nearest, spellings, stars_in
from xshard.state.relations import Relation, Shape, TargetArray, applications, make_targets

_KEEP = Relation(("**",), "**")
Counts = Sequence[int] | None


def rename(
    src: str,
    dst: str,
    order: str | None = None,
    *,
    dtype: str | None = None,
    optional: bool = False,
) -> Iterator[Relation]:
    """Rename arrays, and permute their dims.

    src, dst: patterns as in `xshard.Rules`, with the same stars in the same order: each stands for the same
    text on both sides. Braces pair up: `{a,b}` with `{c,d}` renames a to c, and b to d.
    order: the order of the dims, as in "o i -> i o". dtype: the dtype that the values are cast to.
    optional: accept that no array has such a name.
    Raises XshardError if the two sides differ in their stars or in their number of alternatives.

    >>> names = Names(rename("*.{q,k}", "*.{query,key}", "o i -> i o"))
    >>> {name: array.shape for name, array in names.resolve({"a.q": (4, 2), "a.k": (1, 2)}).items()}
    {'a.query': (2, 4), 'a.key': (2, 1)}
    """
    left = spellings(src)
    right = spellings(dst)
    if len(left) != len(right):
        reason = f"'{src}' stands for {len(left)} names, '{dst}' for {len(right)}"
        raise XshardError(reason, hint="as many alternatives in both")
    for one, other in zip(left, right, strict=True):
        yield Relation((one,), other, _permutation(order), dtype=dtype, optional=optional)


def concat(
    srcs: Sequence[str], dst: str, dim: int = 0, *, rows: Counts = None, order: str | None = None
) -> Iterator[Relation]:
    """Join arrays along `dim`: q, k and v in one weight, or gate and up.

    srcs: patterns with the same stars. rows: rows of each array in turn, as (4 * 128, 128, 128) for the
    groups of heads of grouped queries, or (1, 1) for alternation; by default all rows of each. order:
    permutes the dims of every part first, as in "o i -> i o"; `dim` counts after that.

    >>> arrays = Names(concat(["*.gate", "*.up"], "*.gate_up")).resolve(
    ...     {"a.gate": (4, 2), "a.up": (4, 2)}
    ... )
    >>> arrays["a.gate_up"].shape, arrays["a.gate_up"].pieces[1].dst.rows
    ((8, 2), (Run(start=4, length=4, repeats=1, stride=0),))
    """
    if rows is not None and (len(rows) != len(srcs) or min(rows, default=1) < 1):
        raise XshardError(
            f"rows {list(rows)} for {len(srcs)} arrays", hint="a number >= 1 for each of them"
        )
    yield Relation(
        tuple(srcs), dst, _permutation(order), dim, None if rows is None else tuple(rows)
    )


def split(
    src: str, dsts: Sequence[str], dim: int = 0, *, rows: Counts = None, order: str | None = None
) -> Iterator[Relation]:
    """Split an array: the inverse of `concat(dsts, src, ...)`. Without `rows` the parts are equal."""
    for relation in concat(dsts, src, dim, rows=rows, order=order):
        yield replace(relation.inverse, equal=rows is None)


def stack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """Stack arrays with numbers in their names along a new dim: experts, or layers for a scan.

    src: a pattern; its last star stands for 0, 1, 2, ...; dst has one star less.
    """
    yield Relation((src,), dst, None, dim, stacks=True)


def unstack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """Split an array into arrays with numbers in their names: the inverse of `stack(dst, src, dim)`."""
    for relation in stack(dst, src, dim):
        yield relation.inverse


class Names:
    """Relations between source and target names; the first one that fits a name applies.

    >>> to_flax = Names(
    ...     rename("layers.*.out.weight", "layers_*.out.kernel", "o i -> i o"),
    ...     concat(["layers.*.q", "layers.*.k"], "layers_*.qk"),
    ...     rename("**", "**"),
    ... )
    >>> shapes = {
    ...     "layers.0.out.weight": (4, 2),
    ...     "layers.0.q": (8,),
    ...     "layers.0.k": (2,),
    ...     "norm": (4,),
    ... }
    >>> {name: array.shape for name, array in to_flax.resolve(shapes).items()}
    {'layers_0.out.kernel': (2, 4), 'layers_0.qk': (10,), 'norm': (4,)}
    """

    def __init__(self, *relations: Iterable[Relation] | Relation) -> None:
        self.relations: tuple[Relation, ...] = tuple(
            relation
            for some in relations
            for relation in ((some,) if isinstance(some, Relation) else some)
        )
        self._joined: dict[tuple[str, Shape], tuple[int, ...]] = {}
        for relation in self.relations:
            _check_patterns(relation)
            self._joined |= {(name, shape): lengths for name, shape, lengths in relation.joined}

    @cached_property
    def inverse(self) -> Names:
        """The names from targets to sources. A `concat` without `rows=` is split as `resolve` has joined it.

        Raises XshardError for a cast. The inverse raises ShapeError for a `concat` without `rows=` that these
        names did not resolve before, or resolved with two divisions of the same rows.

        >>> names = Names(concat(["*.q", "*.k"], "*.qk"))
        >>> there = names.resolve({"a.q": (8,), "a.k": (2,)})
        >>> {name: array.shape for name, array in names.inverse.resolve({"a.qk": (10,)}).items()}
        {'a.q': (8,), 'a.k': (2,)}
        """
        inverse = Names(*(relation.inverse for relation in self.relations))
        inverse._joined = self._joined
        return inverse

    def resolve(
        self, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str] | None = None
    ) -> dict[str, TargetArray]:
        """The target arrays for these source arrays; each element has exactly one origin.

        dtypes: by name; float32 by default.
        Raises XshardError for names without a relation, relations without a name, and names with two origins;
        ShapeError if shapes do not fit together.
        """
        left = {name: tuple(shape) for name, shape in shapes.items()}
        targets: dict[str, TargetArray] = {}
        makers: dict[str, Relation] = {}
        unused = []
        for relation in self.relations:
            uses = list(applications(relation, left))
            if not (uses or relation.optional or replace(relation, splits=False) == _KEEP):
                unused.append(relation)
            for sources, names in uses:
                source_shapes = []
                for name in sources:
                    if name not in left:
                        again = " any more" if name in shapes else ""
                        hint = did_you_mean(name, list(left)) or "every array is used once"
                        raise XshardError(f"{relation}: there is no {name}{again}", hint=hint)
                    source_shapes.append(left.pop(name))
                kinds = sorted({dtypes[name] if dtypes else "float32" for name in sources})
                if len(kinds) > 1:
                    raise ShapeError(
                        f"{relation}: {' and '.join(sources)} are {' and '.join(kinds)}"
                    )
                new = make_targets(relation, sources, names, source_shapes, self._joined)
                for name, shape, pieces in new:
                    if name in targets:
                        origins = f"{makers[name]}; {relation}"
                        raise XshardError(f"{name} would have two origins", hint=origins)
                    makers[name] = relation
                    targets[name] = TargetArray(shape, relation.dtype or kinds[0], pieces)
        if left or unused:
            reasons = (
                [f"no relation for {len(left)} names: {', '.join(list(left)[:8])}"] if left else []
            )
            reasons += [f"'{relation}' fits no name" for relation in unused]
            hints = [nearest(relation.sides[0][0], shapes) for relation in unused]
            hints.append("rename('**', '**') keeps all others as they are")
            raise XshardError("; ".join(reasons), hint="\n  ".join(filter(None, hints)))
        for name, array in targets.items():
            if len(array.pieces) > 1:
                lengths = tuple(runs.n_rows(piece.dst.rows) for piece in array.pieces)
                same = self._joined.setdefault((name, array.shape), lengths) == lengths
                self._joined[name, array.shape] = lengths if same else ()
        return targets

    def apply(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """New numpy arrays by target name, from global source arrays.

        >>> kernels = Names(rename("w", "kernel", "o i -> i o")).apply(
        ...     {"w": np.arange(6).reshape(2, 3)}
        ... )
        >>> kernels["kernel"].shape
        (3, 2)
        """
        shapes = {name: array.shape for name, array in arrays.items()}
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        results = {}
        for name, target in self.resolve(shapes, dtypes).items():
            out = np.empty(target.shape, arrays[target.pieces[0].src.name].dtype)
            for src, dst, order in target.pieces:
                out[dst.numpy_index] = np.transpose(arrays[src.name][src.numpy_index], order)
            results[name] = out.astype(target.dtype)
        return results


def names_to_json(names: Names) -> list[dict[str, Any]]:
    """Names as JSON, for files and the command line: the fields of each relation that are not the default."""
    defaults = fields_to_plain(Relation((), ""))
    relations = []
    for relation in names.relations:
        if len(relation.parts) > 1 and not (relation.rows or relation.equal):
            known = names._joined.items()
            whole = relation.whole
            joined = ((*array, n) for array, n in known if match_stars(whole, array[0]) is not None)
            relation = replace(relation, joined=tuple(joined))
        relations.append(fields_to_plain(relation))
    return [{field: x for field, x in each.items() if x != defaults[field]} for each in relations]


def names_from_json(data: Any) -> Names:
    """The inverse. Raises XshardError for malformed relations."""
    relations = []
    for each in data if isinstance(data, list) else [data]:
        try:
            fields = fields_from_plain(Relation, each)
            if not {"parts", "whole"} <= fields.keys() or () in fields.values():
                raise XshardError("it needs parts and a whole")
        except XshardError as error:
            hint = 'as {"parts": ["*.gate", "*.up"], "whole": "*.gate_up"}; its other fields are '
            hint += "order, dim, rows, stacks, splits, dtype, optional, equal and joined"
            raise XshardError(
                f"{shown(each)} is not a relation: {error.reason}", hint=hint
            ) from None
        relations.append(Relation(**fields))
    return Names(*relations)


def _check_patterns(relation: Relation) -> None:
    patterns = (*relation.parts, relation.whole)
    for pattern in patterns:
        if spellings(pattern) != (pattern,):
            hint = "braces and bars are for rename; write a relation for each name"
            raise XshardError(f"'{pattern}' in '{relation}' stands for several names", hint=hint)
        match_stars(pattern, "")  # refuses a malformed pattern
    stars = [stars_in(pattern) for pattern in patterns]
    if relation.stacks and "*" not in stars[0][-1:]:
        raise XshardError(f"'{relation}' needs a star for a number", hint="stack('e.*', 'e')")
    if relation.stacks:
        stars[0].pop()
    if any(each != stars[-1] for each in stars):
        reason = (
            f"'{relation}' has the stars {' and '.join(' '.join(each) or 'none' for each in stars)}"
        )
        hint = "each star stands for the same text on both sides: as many on each side, in the same order"
        raise XshardError(reason, hint=hint)


def _permutation(order: str | None) -> tuple[int, ...] | None:
    if order is None:
        return None
    src, dst = layout.parse_expression(order)
    if src.axes or dst.axes:
        hint = "an order of dims alone, as in 'o i -> i o'"
        raise XshardError(f"'{shown(order)}' has mesh axes", hint=hint)
    return tuple(map(src.names.index, dst.names))


SAME = Names(_KEEP)  # every array under its own name
