"""How source arrays become target arrays: renamed, transposed, fused and split.

Each element of a target has one origin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError, XshardError, located
from xshard.layout import layout, runs
from xshard.plans.serialize import fields_from_plain, fields_to_plain
from xshard.rules import match_stars, nearest_hint, spellings, stars_in
from xshard.signatures import did_you_mean, short_repr
from xshard.state.parts import PartMapping, Shape, TargetArray
from xshard.state.relations import JoinedArray, Relation, applications, make_targets

_KEEP = Relation(("**",), "**")
MAX_NAMES_IN_ERROR = 8
Counts = Sequence[int] | None


def rename(
    src: str,
    dst: str,
    order: str | None = None,
    *,
    dtype: str | None = None,
    optional: bool = False,
) -> Iterator[Relation]:
    """Say that arrays of one program have other names in another, and perhaps permuted dims.

        rename("*.q", "*.query", "o i -> i o")     # a.q [4, 2] -> a.query [2, 4]

    Args:
        src: A pattern as in `xshard.Rules`. Braces pair up: `{a,b}` with `{c,d}` renames a to c, and b to d.
        dst: A pattern with the same stars in the same order. Each star stands for the same text on both
            sides.
        order: The order of the dims, such as "o i -> i o".
        dtype: The dtype that the values are cast to.
        optional: Accept that no array has such a name.

    Yields:
        A relation for each alternative, for `Names`.

    Raises:
        XshardError: The two sides differ in their stars or in their number of alternatives.

    Examples:
        >>> names = Names(rename("*.{q,k}", "*.{query,key}", "o i -> i o"))
        >>> shapes = {"a.q": (4, 2), "a.k": (1, 2)}
        >>> {name: array.shape for name, array in names.resolve(shapes).items()}
        {'a.query': (2, 4), 'a.key': (2, 1)}
    """
    src_names = spellings(src)
    dst_names = spellings(dst)
    if len(src_names) != len(dst_names):
        reason = f"'{src}' stands for {len(src_names)} names, '{dst}' for {len(dst_names)}"
        raise XshardError(reason, hint="as many alternatives in both")
    for src_name, dst_name in zip(src_names, dst_names, strict=True):
        yield Relation((src_name,), dst_name, _permutation(order), dtype=dtype, optional=optional)


def concat(
    srcs: Sequence[str], dst: str, dim: int = 0, *, rows: Counts = None, order: str | None = None
) -> Iterator[Relation]:
    """Say that several arrays of one program are one array in another, joined along a dim.

    As q, k and v in one weight, or gate and up.

        concat(["*.gate", "*.up"], "*.gate_up")    # a.gate [4, 2], a.up [4, 2] -> a.gate_up [8, 2]

    Args:
        srcs: Patterns with the same stars.
        dst: A pattern with the same stars.
        dim: The dim along which arrays are joined, counted after `order`.
        rows: Rows of each array in turn, such as (4 * 128, 128, 128) for the groups of heads of grouped
            queries, or (1, 1) for alternation. Default: all rows of each.
        order: Permutes the dims of every part first, such as "o i -> i o".

    Yields:
        The relation, for `Names`.

    Raises:
        XshardError: `rows` has not a number for each array.

    Examples:
        >>> shapes = {"a.gate": (4, 2), "a.up": (4, 2)}
        >>> arrays = Names(concat(["*.gate", "*.up"], "*.gate_up")).resolve(shapes)
        >>> arrays["a.gate_up"].shape, arrays["a.gate_up"].pieces[1].dst.dims[0].rows
        ((8, 2), (Run(start=4, length=4, repeats=1, stride=0),))
    """
    if rows is not None:
        if len(rows) != len(srcs) or min(rows, default=1) < 1:
            reason = f"rows {list(rows)} for {len(srcs)} arrays"
            raise XshardError(reason, hint="a number >= 1 for each of them")
        rows = tuple(rows)
    yield Relation(tuple(srcs), dst, _permutation(order), dim, rows)


def split(
    src: str, dsts: Sequence[str], dim: int = 0, *, rows: Counts = None, order: str | None = None
) -> Iterator[Relation]:
    """Say that one array is several in another program: the inverse of `concat(dsts, src, ...)`.

        split("*.gate_up", ["*.gate", "*.up"])     # a.gate_up [8, 2] -> a.gate [4, 2], a.up [4, 2]

    Args:
        src: A pattern.
        dsts: Patterns with the same stars.
        dim: The dim that is split, counted after `order`.
        rows: Rows of each part in turn, as in `concat`. Default: the parts are equal.
        order: The order that `concat` would apply to every part.

    Yields:
        The relation, for `Names`.
    """
    for relation in concat(dsts, src, dim, rows=rows, order=order):
        yield replace(relation.inverse, equal=rows is None)


def stack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """Stack arrays with numbers in their names along a new dim: experts, or layers for a scan.

        stack("experts.*.up", "experts.up")        # experts.0.up [4, 2], experts.1.up -> [2, 4, 2]

    Args:
        src: A pattern. Its last star stands for 0, 1, 2, ...
        dst: A pattern with one star less.
        dim: The place of the new dim.

    Yields:
        The relation, for `Names`.
    """
    yield Relation(parts=(src,), whole=dst, dim=dim, stacks=True)


def unstack(src: str, dst: str, dim: int = 0) -> Iterator[Relation]:
    """Split an array into arrays with numbers in their names: the inverse of `stack(dst, src, dim)`.

    Args:
        src: A pattern.
        dst: A pattern with one star more, the last, which stands for 0, 1, 2, ...
        dim: The dim that the parts lose.

    Yields:
        The relation, for `Names`.
    """
    for relation in stack(dst, src, dim):
        yield relation.inverse


class Names:
    """Relations between source and target names; the first one that fits a name applies.

    Args:
        *relations: What `rename`, `concat`, `split`, `stack` and `unstack` return.

    Examples:
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
        # `rename`, `concat` and others yield relations, for one pattern may stand for several
        # names.
        flat: list[Relation] = []
        for item in relations:
            flat += [item] if isinstance(item, Relation) else item
        self.relations = tuple(flat)
        self.links: tuple[Names, ...] = ()  # of a chain, in turn: see `then`
        # How many rows each part of a joined array had, by its name and shape. A split without
        # `rows=` divides the array so. () if arrays of one name and shape had different parts.
        self._joined: dict[tuple[str, Shape], tuple[int, ...]] = {}
        for relation in self.relations:
            _check_patterns(relation)
            for name, shape, lengths in relation.joined:
                self._joined[name, shape] = lengths

    @functools.cached_property
    def inverse(self) -> Names:
        """The names from targets to sources. A `concat` without `rows=` is split as `resolve` has joined it.

        Raises XshardError for a cast. The inverse raises ShapeError for a `concat` without `rows=` that these
        names did not resolve before, or resolved with two divisions of the same rows.

        >>> names = Names(concat(["*.q", "*.k"], "*.qk"))
        >>> there = names.resolve({"a.q": (8,), "a.k": (2,)})
        >>> {name: array.shape for name, array in names.inverse.resolve({"a.qk": (10,)}).items()}
        {'a.q': (8,), 'a.k': (2,)}
        """
        if self.links:
            return functools.reduce(Names.then, [link.inverse for link in reversed(self.links)])
        inverse = Names(*(relation.inverse for relation in self.relations))
        inverse._joined = self._joined  # shared: what is resolved later counts, too
        return inverse

    def then(self, names: Names) -> Names:
        """Apply other names to the arrays that these make, as one mapping from the first to the last.

        A chain is used wherever names are: nothing between its ends is moved or stored.

        Args:
            names: Names from the targets of these to others.

        Returns:
            The chain.

        Raises:
            XshardError: These names cast: only the last link of a chain may.

        Examples:
            >>> experts = Names(unstack("experts", "experts.*"))
            >>> names = experts.then(Names(split("experts.*", ["experts.*.gate", "experts.*.up"])))
            >>> {name: array.shape for name, array in names.resolve({"experts": (1, 8, 2)}).items()}
            {'experts.0.gate': (4, 2), 'experts.0.up': (4, 2)}
        """
        for relation in self.relations:
            if relation.dtype is not None:
                reason = f"'{relation}' casts to {relation.dtype}, and other names follow"
                raise XshardError(reason, hint="cast in the last link of a chain")
        chain = Names(*self.relations, *names.relations)
        for link in (self, names):
            chain.links += link.links if link.links else (link,)
        return chain

    def resolve(
        self, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str] | None = None
    ) -> dict[str, TargetArray]:
        """Find which arrays these source arrays become, with the origin of each of their parts.

        `rename("w", "kernel", "o i -> i o")` makes of w [4, 2] an array kernel [2, 4]. No data is
        needed.

        Args:
            shapes: The shapes of the source arrays by name.
            dtypes: Their dtypes by name. Default: float32.

        Returns:
            The target arrays by name: shape, dtype, and where each part comes from.

        Raises:
            XshardError: A name has no relation, a relation no name, or a name two origins.
            ShapeError: Shapes do not fit together.
        """
        if self.links:
            return _resolve_chain(self.links, shapes, dtypes)
        # The sources that no relation has used yet: `_take_shapes` removes those that one uses.
        remaining = {name: tuple(shape) for name, shape in shapes.items()}
        targets = {}
        maker_of: dict[str, Relation] = {}  # the relation that made each target
        unused = []
        for relation in self.relations:
            uses = list(applications(relation, remaining))
            # `rename("**", "**")` keeps all other names. That none remain for it is no mistake.
            keeps_others = replace(relation, splits=False) == _KEEP
            if not (uses or relation.optional or keeps_others):
                unused.append(relation)
            for use in uses:
                source_shapes = _take_shapes(use.sources, relation, remaining, shapes)
                dtype = relation.dtype or _common_dtype(use.sources, relation, dtypes)
                for made in make_targets(relation, use, source_shapes, self._joined):
                    name = made.name
                    if name in targets:
                        origins = f"{maker_of[name]}; {relation}"
                        raise XshardError(f"{name} would have two origins", hint=origins)
                    maker_of[name] = relation
                    targets[name] = TargetArray(made.shape, dtype, made.pieces)
        if remaining or unused:
            raise _unmatched(list(remaining), unused, shapes)
        self._remember_joined(targets)  # for `inverse`, which splits joined arrays as they were
        return targets

    def _joined_by(self, relation: Relation) -> tuple[JoinedArray, ...]:
        """List the arrays that a relation has joined: name, shape, and the rows of each part."""
        return tuple(
            (name, shape, lengths)
            for (name, shape), lengths in self._joined.items()
            if match_stars(relation.whole, name) is not None
        )

    def _remember_joined(self, targets: Mapping[str, TargetArray]) -> None:
        """Note the rows of the parts of joined arrays, for the inverse."""
        for name, array in targets.items():
            if len(array.pieces) == 1:
                continue
            rows_of_parts = []  # a part is some rows of one dim
            for mapping in array.pieces:
                rows_of_parts += [rows for _, rows in mapping.dst.dims if rows is not None]
            lengths = tuple(map(runs.count_rows, rows_of_parts))
            is_same = self._joined.setdefault((name, array.shape), lengths) == lengths
            self._joined[name, array.shape] = lengths if is_same else ()

    def apply(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Rename, permute, join and split whole arrays in numpy, as the relations say.

        Args:
            arrays: The source arrays by name, each with its global shape.

        Returns:
            New arrays by target name.

        Raises:
            XshardError: As `resolve` does.

        Examples:
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
            # In the dtype of the sources, which is one, as `resolve` has checked; cast at the end.
            source_dtype = arrays[target.pieces[0].src.name].dtype
            out = np.empty(target.shape, source_dtype)
            for src, dst, order in target.pieces:
                source_part = arrays[src.name][src.numpy_index(shapes[src.name])]
                out[dst.numpy_index(target.shape)] = np.transpose(source_part, order)
            results[name] = out.astype(target.dtype)
        return results


def _resolve_chain(
    links: Iterable[Names],
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, str] | None,
) -> dict[str, TargetArray]:
    """Resolve names that apply one after the other, as if they were one mapping.

    If the first link makes qkv of q, k and v, and the second w of qkv, the result has w alone, whose
    pieces come from q, k and v: the arrays in between do not appear.
    """
    targets = SAME.resolve(shapes, dtypes)  # before any link, each array is made of itself
    for link_index, link in enumerate(links, 1):
        with located(f"link {link_index} of the names"):
            link_targets = link.resolve(
                {name: array.shape for name, array in targets.items()},
                {name: array.dtype for name, array in targets.items()},
            )
        for name, array in link_targets.items():
            link_targets[name] = array._replace(pieces=_trace_to_first_sources(array, targets))
        targets = link_targets
    return targets


def _trace_to_first_sources(
    array: TargetArray, middle_arrays: Mapping[str, TargetArray]
) -> tuple[PartMapping, ...]:
    """Return the pieces of an array, each with the part of a first source that it comes from.

    `array` is made of pieces of middle arrays, and these are made of pieces of the first sources. For
    example, the middle array qkv is q, k and v one after the other, and the array w is qkv renamed.
    The one piece of w, `qkv -> w`, becomes three: `q -> w`, `k -> w` and `v -> w`.
    """
    pieces = []
    for from_middle in array.pieces:  # qkv -> w
        middle_array = middle_arrays[from_middle.src.name]
        for to_middle in middle_array.pieces:  # q -> qkv
            from_first = to_middle.then(from_middle, middle_array.shape)  # q -> w
            if from_first is not None:  # some elements of this source arrive in the array
                pieces.append(from_first)
    return tuple(pieces)


def _take_shapes(
    names: Sequence[str],
    relation: Relation,
    remaining: dict[str, Shape],
    shapes: Mapping[str, Sequence[int]],
) -> list[Shape]:
    """Remove the arrays that one relation uses from `remaining`, and return their shapes.

    A relation maps some source arrays to target arrays, as q, k and v to a fused qkv. Each source
    is used once: XshardError is raised for a name that an earlier relation has used, or that is not
    in `shapes`, which holds all sources.
    """
    taken_shapes = []
    for name in names:
        if name not in remaining:
            already_used = " any more" if name in shapes else ""
            hint = did_you_mean(name, list(remaining)) or "every array is used once"
            raise XshardError(f"{relation}: there is no {name}{already_used}", hint=hint)
        taken_shapes.append(remaining.pop(name))
    return taken_shapes


def _common_dtype(
    names: Sequence[str], relation: Relation, dtypes: Mapping[str, str] | None
) -> str:
    """Return the one dtype of the sources. Raises ShapeError if they have several."""
    if not dtypes:
        return "float32"
    distinct_dtypes = sorted({dtypes[name] for name in names})
    if len(distinct_dtypes) > 1:
        raise ShapeError(f"{relation}: {' and '.join(names)} are {' and '.join(distinct_dtypes)}")
    return distinct_dtypes[0]


def _unmatched(
    remaining: Sequence[str], unused: Sequence[Relation], shapes: Mapping[str, Any]
) -> XshardError:
    """Return the error for names without a relation, and for relations without a name."""
    reasons = []
    if remaining:
        first_names = ", ".join(remaining[:MAX_NAMES_IN_ERROR])
        reasons.append(f"no relation for {len(remaining)} names: {first_names}")
    reasons += [f"'{relation}' fits no name" for relation in unused]
    similar = [nearest_hint(relation.sides.sources[0], shapes) for relation in unused]
    hints = [hint for hint in similar if hint]
    hints.append("rename('**', '**') keeps all others as they are")
    return XshardError("; ".join(reasons), hint="\n  ".join(hints))


def names_to_json(names: Names) -> list[Any]:
    """Convert a mapping of names to JSON, for files and the command line.

    Returns a list with a dict for each relation, of the fields that differ from their default:
    `Names(rename("q", "query"))` -> `[{"parts": ["q"], "whole": "query"}]`. For a chain, a list
    with such a list for each link.
    """
    if names.links:
        return list(map(names_to_json, names.links))
    # `parts` and `whole` have no default. Empty ones stand in for it, so that both are always written.
    defaults = fields_to_plain(Relation(parts=(), whole=""))
    data: list[Any] = []
    for relation in names.relations:
        values = fields_to_plain(_with_lengths_of_joined(relation, names))
        data.append({key: value for key, value in values.items() if value != defaults[key]})
    return data


def _with_lengths_of_joined(relation: Relation, names: Names) -> Relation:
    """Note in a relation how long the parts of the arrays were that it has joined so far.

    `concat(["q", "k"], "qk")` does not say how many rows of qk are q. `names` remember it from the
    arrays that they were applied to in this process. Whoever reads the JSON needs it to split qk
    again. A relation that says the lengths itself, or has one part, is returned as it is.
    """
    if len(relation.parts) <= 1 or relation.rows or relation.equal:
        return relation
    return replace(relation, joined=names._joined_by(relation))


def names_from_json(data: Any) -> Names:
    """Read what `names_to_json` wrote.

    Raises:
        XshardError: A relation is malformed.
    """
    items = data if isinstance(data, list) else [data]
    links = [items]
    if items and all(isinstance(item, list) for item in items):  # a chain
        links = items
    return functools.reduce(Names.then, [Names(*map(_relation_from_json, link)) for link in links])


def _relation_from_json(item: Any) -> Relation:
    try:
        fields = fields_from_plain(Relation, item)
        if not {"parts", "whole"} <= fields.keys() or () in fields.values():
            raise XshardError("it needs parts and a whole")
    except XshardError as error:
        hint = 'as {"parts": ["*.gate", "*.up"], "whole": "*.gate_up"}; its other fields are '
        hint += "order, dim, rows, stacks, splits, dtype, optional, equal and joined"
        reason = f"{short_repr(item)} is not a relation: {error.reason}"
        raise XshardError(reason, hint=hint) from None
    return Relation(**fields)


def _check_patterns(relation: Relation) -> None:
    """Check that a relation's patterns of names have the same stars on both sides.

    `concat(["*.q", "*.k"], "*.qk")` is right: the star stands for one text on both sides.
    `concat(["*.q", "k"], "*.qk")` is refused, and so are braces, as in "{q,k}", which stand for
    several names. A relation that stacks "e.*" into "e" has one star more in its parts, for the
    member's number.
    """
    for pattern in (*relation.parts, relation.whole):
        if spellings(pattern) != (pattern,):
            hint = "braces and bars are for rename; write a relation for each name"
            raise XshardError(f"'{pattern}' in '{relation}' stands for several names", hint=hint)
        match_stars(pattern, "")  # refuses a malformed pattern
    # The stars of each pattern, from left to right: those of "a.*.**" are ["*", "**"].
    stars_of_parts = [stars_in(part_pattern) for part_pattern in relation.parts]
    stars_of_whole = stars_in(relation.whole)
    if relation.stacks:  # has one pattern of parts, whose last star is the member's number
        if "*" not in stars_of_parts[0][-1:]:
            raise XshardError(f"'{relation}' needs a star for a number", hint="stack('e.*', 'e')")
        stars_of_parts = [stars_of_parts[0][:-1]]  # the whole has no star for the number
    if any(stars != stars_of_whole for stars in stars_of_parts):
        texts = [" ".join(stars) or "none" for stars in (*stars_of_parts, stars_of_whole)]
        hint = "each star stands for the same text on both sides: as many on each side, in the same order"
        raise XshardError(f"'{relation}' has the stars {' and '.join(texts)}", hint=hint)


def _permutation(order: str | None) -> tuple[int, ...] | None:
    """Read an order of dims: "o i -> i o" -> (1, 0)."""
    if order is None:
        return None
    src, dst = layout.parse_expression(order)
    if src.axes or dst.axes:
        hint = "an order of dims alone, as in 'o i -> i o'"
        raise XshardError(f"'{short_repr(order)}' has mesh axes", hint=hint)
    return tuple(map(src.names.index, dst.names))


SAME = Names(_KEEP)  # every array under its own name
