"""Relations between arrays: which arrays, found by their names, become which others, in whole or in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xshard.errors import ShapeError, XshardError
from xshard.layout.runs import Run, interval
from xshard.rules import fill_stars, match_stars
from xshard.state.parts import NEW, ArrayPart, Link, PartDim, PartMapping, Shape

# A joined array, by name and shape -> the rows of each of its parts.
Joined = Mapping[tuple[str, Shape], tuple[int, ...]]
JoinedArray = tuple[str, Shape, tuple[int, ...]]  # the same, as one entry of a list


def _with_length(shape: Shape, dim_index: int, length: int) -> Shape:
    """Replace the length of one dim: (4, 2) with 8 for dim 0 -> (8, 2)."""
    return (*shape[:dim_index], length, *shape[dim_index + 1 :])


def _with_new_dim(shape: Shape, dim_index: int) -> Shape:
    """Insert a dim of length 1: (4, 2) at dim 1 -> (4, 1, 2)."""
    return (*shape[:dim_index], 1, *shape[dim_index:])


class MadeArray(NamedTuple):
    """A target array without its dtype."""

    name: str
    shape: Shape
    pieces: tuple[PartMapping, ...]


class Use(NamedTuple):
    """The names of arrays to which a relation applies together."""

    sources: list[str]
    targets: list[str]


class Sides(NamedTuple):
    """The patterns of the arrays that a relation takes, and of those that it makes."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Relation:
    """The arrays `parts` make the array `whole` along dim `dim`; or the other way round.

    Attributes:
        parts: Patterns of the parts.
        whole: The pattern of the whole.
        order: A permutation of the parts' dims, which comes first.
        dim: The dim along which parts are joined.
        rows: Rows of the parts in turn, in groups that repeat. None: all of one part, then all of the next.
        stacks: `dim` is new, and the last star of the one part stands for 0, 1, 2, ...
        splits: The inverse direction: the whole is the source.
        dtype: The targets' dtype, if values are cast.
        optional: Accept that no array fits.
        equal: Without `rows`, parts have equally many.
        joined: In JSON, the name and shape of each array that was joined, and the rows of its parts.
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
    joined: tuple[JoinedArray, ...] = field(default=(), compare=False)

    @property
    def inverse(self) -> Relation:
        """The relation from targets to sources. Raises XshardError for a cast."""
        if self.dtype is not None:
            hint = "cast in a mapping of its own"
            raise XshardError(f"a cast to {self.dtype} cannot be inverted", hint=hint)
        return replace(self, splits=not self.splits)

    @property
    def sides(self) -> Sides:
        """The patterns of the sources and of the targets."""
        if self.splits:
            return Sides(sources=(self.whole,), targets=self.parts)
        return Sides(sources=self.parts, targets=(self.whole,))

    def __str__(self) -> str:
        return " -> ".join(map(", ".join, self.sides))


def applications(relation: Relation, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """Match a relation's patterns against names, and yield each match's source and target names.

    For arrays a.q, a.k, b.q and b.k, `concat(["*.q", "*.k"], "*.qk")` yields
    `Use(["a.q", "a.k"], ["a.qk"])` and `Use(["b.q", "b.k"], ["b.qk"])`.

    Args:
        relation: Patterns of names, and how arrays with such names become one, or one becomes many.
        shapes: The shapes of all source arrays by name. They say how many members a stack has that
            is split.
    """
    src_patterns, dst_patterns = relation.sides
    first_pattern = src_patterns[0]
    # By each name that fits the first pattern, the texts of its stars: "a.q" -> ["a"]. The names
    # that fit the other patterns follow from these texts.
    stars_of = {}
    for name in shapes:
        star_texts = match_stars(first_pattern, name)
        if star_texts is not None:
            stars_of[name] = star_texts
    if relation.splits and (relation.stacks or len(dst_patterns) > 1):
        _check_dim(relation, stars_of, shapes)
    if not relation.stacks:
        for stars in stars_of.values():
            yield Use(_fill_patterns(src_patterns, stars), _fill_patterns(dst_patterns, stars))
    elif relation.splits:  # a stacked array "e" of 3 members -> e.0, e.1, e.2
        for name, stars in stars_of.items():
            yield Use([name], _fill_numbers(dst_patterns[0], stars, shapes[name][relation.dim]))
    else:
        # Members are stacked, and their last star is a number: a.e.0 and a.e.1 become a.e, and b.e.0
        # becomes b.e.
        n_members = Counter(tuple(stars[:-1]) for stars in stars_of.values())
        for outer_stars, n_stacked in n_members.items():
            members = _fill_numbers(first_pattern, outer_stars, n_stacked)
            yield Use(members, _fill_patterns(dst_patterns, outer_stars))


def _fill_patterns(patterns: Iterable[str], stars: Sequence[str]) -> list[str]:
    """Fill the stars of all patterns: "*.q" and "*.k" with "a" -> a.q, a.k."""
    return [fill_stars(pattern, stars) for pattern in patterns]


def _fill_numbers(pattern: str, stars: Sequence[str], n: int) -> list[str]:
    """Fill the last star of a pattern with 0, 1, ..., n - 1."""
    return [fill_stars(pattern, (*stars, str(i))) for i in range(n)]


def _check_dim(relation: Relation, names: Iterable[str], shapes: Mapping[str, Shape]) -> None:
    """Raise ShapeError for an array that lacks the dim along which it is to be split."""
    for name in names:
        if not 0 <= relation.dim < len(shapes[name]):
            reason = f"{name} of shape {shapes[name]} cannot be split along dim {relation.dim}"
            raise ShapeError(f"{relation}: {reason}")


def make_targets(
    relation: Relation, use: Use, shapes: Sequence[Shape], joined: Joined
) -> list[MadeArray]:
    """Return each array that a relation makes of some source arrays: its name, shape and origins.

    A concat of q [4, 2] and k [4, 2] makes one array [8, 2], whose rows 0-3 are q and 4-7 are k. A
    split makes one array for each part.

    Args:
        relation: What is renamed, joined, stacked or split.
        use: The names of the sources and of the targets.
        shapes: The sources' shapes.
        joined: The rows of parts of arrays that were joined before. A split without `rows` follows them.

    Raises:
        ShapeError: The shapes do not fit the relation.
    """
    # The order is of the dims of a stack's members; a stack that is split has one dim more.
    n_new_dims = 1 if relation.stacks and relation.splits else 0
    ndims = [len(shape) - n_new_dims for shape in shapes]
    order = relation.order or tuple(range(ndims[0]))
    if any(ndim != len(order) for ndim in ndims):
        raise ShapeError(f"{relation}: shapes {shapes}, an order of {len(order)} dims")
    if relation.splits:
        return _split(relation, use, shapes[0], order, joined)
    permuted = [tuple(shape[i] for i in order) for shape in shapes]
    if len(permuted) > 1 or relation.stacks:
        return [_join(relation, use, permuted, order)]
    [source] = use.sources
    [target] = use.targets
    ndim = len(order)
    mapping = PartMapping(ArrayPart.whole(source, ndim), ArrayPart.whole(target, ndim), order)
    return [MadeArray(target, permuted[0], (mapping,))]


def _split(
    relation: Relation, use: Use, shape: Shape, order: tuple[int, ...], joined: Joined
) -> list[MadeArray]:
    """Return the arrays into which one array of `shape` is split: name, shape, and origin.

    [8, 2] into two equal parts along dim 0 -> two arrays [4, 2]. The relation's `order` permutes
    the dims of the parts before they are joined; here it is undone. If the relation does not say
    how long the parts are, they are as long as when they were joined before: `joined` has the rows
    of each part, by the name and shape of the whole.
    """
    [source_name] = use.sources
    lengths: tuple[int, ...] = ()  # empty if the relation itself says how long the parts are
    if not (relation.stacks or relation.rows or relation.equal or len(use.targets) == 1):
        lengths = joined.get((source_name, shape), ())
        if not lengths:
            reason = (
                f"{relation}: {source_name} of shape {shape} does not say the rows of each part"
            )
            hint = (
                "give rows=, write split() for equal parts, or resolve the parts before the inverse"
            )
            raise ShapeError(reason, hint=hint)
    parts_of_whole = _parts_of_whole(relation, source_name, shape, len(use.targets), lengths)
    made_arrays = []
    for name, whole_part in zip(use.targets, parts_of_whole, strict=True):
        # From the whole to the part.
        mapping = _map_to_part(name, whole_part, order, relation).inverse
        shape_in_whole = whole_part.part_shape(shape)  # with the dims in the order of the whole
        part_shape = [shape_in_whole[i] for i in mapping.order]
        if relation.stacks:
            del part_shape[relation.dim]  # length 1: a member lacks the dim of the stack
        made_arrays.append(MadeArray(name, tuple(part_shape), (mapping,)))
    return made_arrays


def _join(
    relation: Relation, use: Use, shapes: Sequence[Shape], order: tuple[int, ...]
) -> MadeArray:
    """Join or stack arrays along the relation's dim: the name, shape and origins of the result.

    [4, 2] and [4, 2] along dim 0 are joined to [8, 2], or stacked to [2, 4, 2]. `shapes` are those
    after the dims were permuted by `order`.
    """
    join_dim = relation.dim
    shapes_in_whole = list(shapes)  # each as a part of the whole
    if relation.stacks:
        shapes_in_whole = [_with_new_dim(shape, join_dim) for shape in shapes]
    other_lengths = {_with_length(shape, join_dim, 0) for shape in shapes_in_whole}
    if len(other_lengths) > 1 or not 0 <= join_dim < len(shapes_in_whole[0]):
        raise ShapeError(f"{relation}: {list(shapes)} cannot be joined along dim {join_dim}")
    lengths = tuple(shape[join_dim] for shape in shapes_in_whole)
    whole_shape = _with_length(shapes_in_whole[0], join_dim, sum(lengths))
    [target] = use.targets
    parts_of_whole = _parts_of_whole(relation, target, whole_shape, len(lengths), lengths)
    mappings = []
    for name, whole_part in zip(use.sources, parts_of_whole, strict=True):
        mappings.append(_map_to_part(name, whole_part, order, relation))
    return MadeArray(target, whole_shape, tuple(mappings))


def _map_to_part(
    name: str, part: ArrayPart, order: tuple[int, ...], relation: Relation
) -> PartMapping:
    """Map the array `name` to a part of the whole. If it is stacked, it lacks one of its dims."""
    dims = list(map(PartDim, order))
    if relation.stacks:
        dims.insert(relation.dim, PartDim(NEW))
    return PartMapping.of_links(name, part.name, list(map(Link, dims, part.dims)))


def _parts_of_whole(
    relation: Relation, name: str, shape: Shape, n_parts: int, lengths: Sequence[int]
) -> list[ArrayPart]:
    """Find which rows of a joined array belong to each of its parts.

    12 rows of two parts with rows=(2, 1) are 4 groups of 2 rows of the first part and 1 of the
    second: the first part has rows 0-1, 3-4, 6-7 and 9-10, the second rows 2, 5, 8 and 11. Without
    `rows` there is one group: all rows of the first part, then all of the second. In a stack, part
    i is row i.

    Args:
        relation: The relation, whose `rows` may say how many rows of each part a group has.
        name: The joined array.
        shape: Its shape.
        n_parts: The number of parts.
        lengths: How many rows each part has in all groups together. Empty if that is not known: then
            the relation says it, by `rows` or `equal`.
    """
    join_dim = relation.dim
    whole = ArrayPart.whole(name, len(shape))
    if relation.stacks:
        return [whole.with_rows(join_dim, interval(i, i + 1)) for i in range(n_parts)]
    if n_parts == 1:
        return [whole]
    rows_in_group = _rows_in_group(relation, shape[join_dim], n_parts, lengths)
    group_rows = sum(rows_in_group)
    n_groups = shape[join_dim] // max(group_rows, 1)  # 0 without rows
    array_parts = []
    start = 0
    for part_rows in rows_in_group:
        runs: tuple[Run, ...] = ()
        if n_groups > 1 and part_rows:
            runs = (Run(start, part_rows, n_groups, group_rows),)
        elif n_groups == 1:
            runs = interval(start, start + part_rows)
        array_parts.append(whole.with_rows(join_dim, runs))
        start += part_rows
    return array_parts


def _rows_in_group(
    relation: Relation, n_rows: int, n_parts: int, lengths: Sequence[int]
) -> tuple[int, ...]:
    """Return how many rows of each part a group has, checked against the `n_rows` of the joined dim."""
    if relation.rows:
        rows_in_group = relation.rows
    elif relation.equal:
        rows_in_group = (n_rows // n_parts,) * n_parts
    else:
        rows_in_group = tuple(lengths)
    group_rows = sum(rows_in_group)
    n_groups = n_rows // max(group_rows, 1)
    is_divided = n_groups * group_rows == n_rows
    fits_lengths = not lengths or [n_groups * n for n in rows_in_group] == list(lengths)
    if not (is_divided and fits_lengths):
        rows = list(rows_in_group)
        reason = (
            f"dim {relation.dim} of {n_rows} rows is not a whole number of groups of {rows} rows"
        )
        hint = "rows= has the rows of each part that come in turn"
        raise ShapeError(f"{relation}: {reason}", hint=hint)
    return rows_in_group
