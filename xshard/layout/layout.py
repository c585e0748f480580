"""A layout: where every element of a global array lives on a mesh of named axes, for any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import lengths_of, shown, whole_number
from xshard.errors import LinearityError, NotationError, ShapeError
from xshard.formatting import Pictured
from xshard.layout.block_rows import held_rows
from xshard.layout.mesh import Mesh, check_mesh
from xshard.layout.runs import Runs, n_rows, row_numbers
from xshard.layout.validation import check_dims, check_fit
from xshard.notation import parser
from xshard.notation.maps import Maps, RowMap, named_maps
from xshard.notation.overlap import Fold, Reads, unfolded
from xshard.notation.parser import ELLIPSIS, Dim, Tags

NONLINEAR = ("max", "min")


@dataclass(frozen=True, init=False, repr=False)
class Layout(Pictured):
    """The dims of an array with their shards, and the tags of other mesh axes; `Layout(text)` parses.

    Axes that are not named hold replicas. Tags are merged and sorted (sum, mean, max, min, copy; axes by
    name), so that equal layouts are equal values. Raises NotationError if an axis or a dim is named twice.

    >>> layout = Layout("n/tp d | sum(dp)")
    >>> layout, str(layout.dual)
    (Layout('n/tp d | sum(dp)'), 'n/tp d | copy(dp)')
    """

    dims: tuple[Dim, ...]
    tags: Tags = ()

    def __init__(self, dims: tuple[Dim, ...] | str, tags: Tags = ()) -> None:
        if isinstance(dims, str) and not tags:
            parsed = Layout.parse(dims)
            dims = parsed.dims
            tags = parsed.tags
        if not isinstance(dims, tuple) or not all(isinstance(dim, Dim) for dim in dims):
            raise NotationError(
                f"{shown(dims)} is not a tuple of dims", hint="write Layout('b s/cp')"
            )
        check_form(dims, tags)
        merged = {
            kind: sorted(a for k, axes in tags if k == kind for a in axes) for kind in parser.TAGS
        }
        object.__setattr__(self, "dims", dims)
        object.__setattr__(
            self, "tags", tuple((kind, tuple(axes)) for kind, axes in merged.items() if axes)
        )

    @classmethod
    def parse(cls, text: str | Layout, maps: Maps | None = None) -> Layout:
        """Text in any spelling -> layout; a layout is returned as is. Raises NotationError with a caret.

        maps: the `Owners` and `Needs` that the text names.
        """
        if isinstance(text, Layout):
            return text
        parser.check_text("a layout", text)
        return _parse(text, named_maps(maps))

    def __str__(self) -> str:
        return parser.write(self.dims, self.tags)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached: layouts are keys of all caches of the planner
        return hash((self.dims, self.tags))

    def __reduce__(self) -> tuple[object, ...]:  # a hash is valid in its own process only
        return Layout, (self.dims, self.tags)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the layout names, shards first."""
        return self.cut_axes + self.tagged(*parser.TAGS)

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        """Every axis that shards a dim."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def tagged(self, *kinds: str) -> tuple[str, ...]:
        """Axes under any of the tags."""
        return tuple(a for kind, axes in self.tags if kind in kinds for a in axes)

    def role(self, axis: str) -> tuple[object, ...]:
        """Use of an axis: `(dim, shards down to it, overlap)`, `(tag,)`, or `()` for replicas and copies."""
        for dim in self.dims:
            for i, shard in enumerate(dim.shards):
                if axis in shard.axes:
                    return dim.name, dim.shards[: i + 1], dim.overlap
        return next(((kind,) for kind, axes in self.tags if axis in axes and kind != "copy"), ())

    def dim(self, name: str) -> Dim:
        return self.dims[self.names.index(name)]

    @cached_property
    def overlaps(self) -> bool:
        """Whether a dim has a halo, a window or a fold."""
        return any(dim.overlap is not None for dim in self.dims)

    @property
    def is_linear(self) -> bool:
        return not self.tagged(*NONLINEAR)

    @cached_property
    def dual(self) -> Layout:
        """Layout of the cotangent: sum <-> copy, an overlap <-> its fold, the rest unchanged.

        A constant beyond the ends of the array becomes zero, because it has no cotangent. `mean` is a
        sum with a scale: its dual is `copy`, and the plan carries the scale.
        Raises LinearityError for `max` and `min`, which have no adjoint.
        """
        if not self.is_linear:
            hint = "their gradient goes to the winners; redistribute of either bridge computes it"
            raise LinearityError(f"'{self}' lacks a dual: max and min are not linear", hint=hint)
        swapped = {"sum": "copy", "mean": "copy", "copy": "sum"}
        tags = tuple((swapped[kind], axes) for kind, axes in self.tags)
        return Layout(_linear(self.dims, turned=True), tags)

    @property
    def tangent(self) -> Layout:
        """Layout of a tangent: constants beyond the ends of the array become zeros, the rest is unchanged."""
        return replace(self, dims=_linear(self.dims, turned=False)) if self.overlaps else self

    def in_order(self, names: Sequence[str]) -> Layout:
        """The layout of the array with its dims in the order of `names`."""
        return self if names == self.names else replace(self, dims=tuple(map(self.dim, names)))

    def named(self, names: Sequence[str]) -> Layout:
        """The layout with these names for its dims."""
        dims = zip(self.dims, names, strict=True)
        return replace(self, dims=tuple(replace(dim, name=name) for dim, name in dims))

    def resolved(self, ndim: int) -> Layout:
        """The layout with `...` replaced by dims `_0`, `_1`, ... for an array of `ndim` dims."""
        missing = ndim - len(self.dims)
        if ELLIPSIS not in self.names:
            if missing:
                hint = "write one name per dim, or '...' for any number of unsharded dims"
                raise ShapeError(
                    f"'{self}' has {len(self.dims)} dims, the array has {ndim}", hint=hint
                )
            return self
        if missing < -1:
            raise ShapeError(
                f"'{self}' needs at least {len(self.dims) - 1} dims, the array has {ndim}"
            )
        position = self.names.index(ELLIPSIS)
        anonymous = tuple(Dim(f"_{i}") for i in range(missing + 1))
        return replace(self, dims=self.dims[:position] + anonymous + self.dims[position + 1 :])

    def local_shape(self, mesh: Mesh, shape: Sequence[int], device: int) -> tuple[int, ...]:
        """Global shape -> shape of the block of one device.

        >>> Layout.parse("s/zigzag(cp) c").local_shape(Mesh(cp=4), (16, 3), 0)
        (4, 3)
        """
        return tuple(n_rows(runs) for runs in self._held(mesh, shape, device))

    def positions(
        self, mesh: Mesh, shape: Sequence[int], dim: int | str, device: int
    ) -> NDArray[np.int64]:
        """Global row number of every local row of a dim: `[rows of the device's block]`, int64.

        Rotary embeddings and causal masks need these numbers under every order and overlap. A row that
        an overlap adds, from a neighbour or from beyond an end, has the number of the row that it copies;
        rows filled with a constant have -1. Numbers count from the beginning of the array, not of a document.
        shape: global. dim: its name or its index. Raises as `local_shape` does, and ShapeError for an
        unknown dim.

        >>> Layout.parse("b s/zigzag(cp)").positions(Mesh(cp=2), (3, 8), "s", 0).tolist()
        [0, 1, 6, 7]
        >>> Layout.parse("h/sp:halo(1,1)").positions(Mesh(sp=2), (6,), 0, device=1).tolist()
        [2, 3, 4, 5, -1]
        """
        shape = lengths_of(shape)
        return row_numbers(
            self._held(mesh, shape, device)[self.resolved(len(shape)).dim_index(dim)]
        )

    def dim_index(self, dim: int | str) -> int:
        """Name or index, which may count from the end -> index of the dim. Raises ShapeError."""
        indices = range(len(self.dims))
        if isinstance(dim, str) and dim in self.names:
            return self.names.index(dim)
        number = whole_number(dim)
        if number is not None and -len(indices) <= number < len(indices):
            return indices[number]
        raise ShapeError(f"no dim {dim!r} in '{self}'", hint=f"dims are: {', '.join(self.names)}")

    def _held(self, mesh: Mesh, shape: Sequence[int], device: int) -> tuple[Runs, ...]:
        """Per dim, the global rows of the device's block."""
        check_mesh(mesh)
        shape = lengths_of(shape)
        layout = self.resolved(len(shape))
        coords = mesh.coords(device)
        check_axes(layout, mesh)
        check_fit(layout.dims, shape, mesh)
        return tuple(
            held_rows(dim, n, mesh.sizes_of(dim.axes), [coords[mesh.position(a)] for a in dim.axes])
            for dim, n in zip(layout.dims, shape, strict=True)
        )


def parse_expression(text: str) -> tuple[Layout, Layout]:
    """`"layout -> layout"` -> (src, dst) over the same dims, in any order. Raises NotationError."""
    parser.check_text("an expression", text)
    return _parse_expression(text)


def parse_layouts(text: str, kind: str) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts on both sides of a text of some kind (`parser.parse_sides`). Raises NotationError."""
    left, right, spans = parser.parse_sides(text, kind)
    for parsed, span in zip(
        (*left, *right), spans.layouts, strict=False
    ):  # an empty side has no span
        check_form(*parsed, text, slice(*span))
    return tuple(Layout(*parsed) for parsed in left), tuple(Layout(*parsed) for parsed in right)


def check_form(
    dims: tuple[Dim, ...], tags: Tags, text: str | None = None, side: slice = slice(None)
) -> None:
    """Raise NotationError for an axis or a dim used twice, or max or min beside another reduction."""
    axes = [a for dim in dims for a in dim.axes] + [a for _, tagged in tags for a in tagged]
    if len(set(axes)) != len(axes):
        axis = Counter(axes).most_common(1)[0][0]
        text = parser.write(dims, tags) if text is None else text
        where = range(len(text))[side]
        spans = [
            span for name, span in parser.text_spans(text).axes if name == axis and span[0] in where
        ]
        hint = "an axis shards one dim or carries one tag"
        raise NotationError(
            f"mesh axis {axis!r} is used twice", text=text, span=spans[1], hint=hint
        )
    if len({dim.name for dim in dims}) != len(dims):
        raise NotationError("a dim name is used twice", text=parser.write(dims, tags))
    kinds = {kind for kind, _ in tags if kind != "copy"}
    if len(kinds) > 1 and kinds & set(NONLINEAR):
        hint = "the result depends on their order: reduce one of them first"
        text = text or parser.write(dims, tags)
        raise NotationError(f"{' and '.join(sorted(kinds))} in one layout", text=text, hint=hint)


def check_axes(
    layout: Layout, mesh: Mesh, text: str | None = None, where: str = "the mesh", at: int = 0
) -> None:
    """Raise NotationError for an axis that the mesh lacks; it marks the axis' occurrence `at` in the text."""
    for axis in layout.axes:
        if axis not in mesh.axes:
            text = str(layout) if text is None else text
            spans = [span for name, span in parser.text_spans(text).axes if name == axis]
            span = spans[at] if spans else None
            hint = f"{where} has: {mesh.describe()}"
            raise NotationError(f"unknown mesh axis {axis!r}", text=text, span=span, hint=hint)


def factored(layout: Layout, factors: Mapping[str, tuple[str, ...]]) -> Layout:
    """The layout with every axis replaced by its factors, the slowest first; an axis without factors goes."""

    def over(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(factor for axis in axes for factor in factors[axis])

    shards = (
        tuple(replace(s, axes=over(s.axes)) for s in d.shards if over(s.axes)) for d in layout.dims
    )
    dims = tuple(replace(dim, shards=own) for dim, own in zip(layout.dims, shards, strict=True))
    return Layout(dims, tuple((kind, over(axes)) for kind, axes in layout.tags))


@lru_cache(maxsize=4096)
def _parse(text: str, maps: tuple[tuple[str, RowMap], ...]) -> Layout:
    dims, tags = parser.parse_layout(text, dict(maps))
    check_form(dims, tags, text)
    return Layout(dims, tags)


@lru_cache(maxsize=4096)
def _parse_expression(text: str) -> tuple[Layout, Layout]:
    (src,), (dst,) = parse_layouts(text, "expression")
    check_dims(src.dims, dst.dims, text)
    return src, dst


def _linear(dims: tuple[Dim, ...], *, turned: bool) -> tuple[Dim, ...]:
    """The dims with zeros for constants; turned: an overlap becomes its fold, and a fold its overlap."""
    linear = []
    for dim in dims:
        if dim.overlap is not None:
            overlap = unfolded(dim.overlap)
            if not isinstance(overlap, Reads):
                overlap = replace(overlap, before=overlap.before.linear, after=overlap.after.linear)
            dim = replace(
                dim, overlap=Fold(overlap) if isinstance(dim.overlap, Fold) != turned else overlap
            )
        linear.append(dim)
    return tuple(linear)
