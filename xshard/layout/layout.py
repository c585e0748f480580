"""A layout: where every element of a global array lives on a mesh of named axes, for any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from xshard.arguments import lengths_of
from xshard.caches import layout_cache
from xshard.errors import LinearityError, NotationError, ShapeError, Span, api_boundary
from xshard.formatting import Pictured
from xshard.layout.block_rows import held_rows
from xshard.layout.mesh import Axes, Mesh, check_mesh
from xshard.layout.runs import Runs, count_rows, row_numbers
from xshard.layout.sub_axes import axis_factors, with_cut
from xshard.layout.units import GROUPS_HINT, count_groups, dims_in_rows
from xshard.layout.validation import check_dims, check_fit
from xshard.notation import parser
from xshard.notation.maps import Maps, RowMap, named_maps
from xshard.notation.overlap import Fold, Overlap, Reads, unfolded
from xshard.notation.parser import ELLIPSIS, Dim, Tags
from xshard.notation.row_arrays import Numbers
from xshard.signatures import as_whole_number, short_repr

NONLINEAR = ("max", "min")
_DUAL_TAGS = {"sum": "copy", "mean": "copy", "copy": "sum"}


@api_boundary
@dataclass(frozen=True, init=False, repr=False)
class Layout(Pictured):
    """How an array is sharded over a mesh: its dims with their shards, and the tags of other axes.

    `Layout("n/tp d | sum(dp)")`: rows are cut over `tp`, and the values are sums over `dp`.

    Axes that are not named hold replicas. Equal layouts are equal values: tags are merged and
    sorted (sum, mean, max, min, copy; axes by name).

    Attributes:
        dims: The dims in the order of the array, each with its shards and its overlap.
        tags: Pairs (tag, axes): over `axes` the blocks are addends (`sum`, `mean`), candidates
            (`max`, `min`) or separate copies whose gradients add up (`copy`).

    Raises:
        NotationError: The text is malformed, or names an axis or a dim twice.

    Examples:
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
            reason = f"{short_repr(dims)} is not a tuple of dims"
            raise NotationError(reason, hint="write Layout('b s/cp')")
        check_form(dims, tags)
        # The class is frozen for users; this is how a frozen dataclass sets its own fields.
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "tags", _merge_tags(tags))

    @classmethod
    @api_boundary
    def parse(cls, text: str | Layout, maps: Maps | None = None) -> Layout:
        """Parse a layout in any spelling: `"n/tp d | sum(dp)"` -> `Layout`.

        Args:
            text: The text of a layout. A layout is returned as it is.
            maps: The `Owners` and `Needs` that the text names, by name.

        Returns:
            The layout.

        Raises:
            NotationError: The text is malformed, marked with a caret.
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

    # ---- dims and axes

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the dims."""
        return tuple(dim.name for dim in self.dims)

    def dim(self, name: str) -> Dim:
        """Return the dim with this name."""
        return self.dims[self.names.index(name)]

    @api_boundary
    def dim_index(self, dim: int | str) -> int:
        """Return the index of a dim: `"c"` or `-1` -> 1 for a layout `n c`.

        Raises:
            ShapeError: The layout has no such dim.
        """
        indices = range(len(self.dims))
        if isinstance(dim, str) and dim in self.names:
            return self.names.index(dim)
        index = as_whole_number(dim)
        if index is not None and -len(indices) <= index < len(indices):
            return indices[index]
        raise ShapeError(f"no dim {dim!r} in '{self}'", hint=f"dims are: {', '.join(self.names)}")

    @cached_property
    def axes(self) -> Axes:
        """Every axis that the layout names, shards first."""
        # An axis that spreads units may have a tag too, which is of the devices that share one.
        return tuple(dict.fromkeys(self.sharding_axes + self.tagged(*parser.TAGS)))

    @cached_property
    def spread_axes(self) -> Axes:
        """Every axis along which several devices may share a unit: `(h 64)/spread(tp)` -> tp."""
        return tuple(chain.from_iterable(dim.spread_axes for dim in self.dims))

    @cached_property
    def counts_units(self) -> bool:
        """Whether a shard counts units of several rows, or spreads them: a shape says which rows."""
        return any(dim.unit != 1 or dim.spread_axes for dim in self.dims)

    @cached_property
    def sharding_axes(self) -> Axes:
        """Every axis that shards a dim."""
        return tuple(chain.from_iterable(dim.axes for dim in self.dims))

    def tagged(self, *tags: str) -> Axes:
        """Return the axes under any of these tags: `layout.tagged("sum", "mean")`."""
        return _axes_tagged(self.tags, tags)

    def role(self, axis: str) -> tuple[object, ...]:
        """Return what the layout uses a mesh axis for; two layouts use it alike if these are equal.

        In "n/x/y d | sum(z)" y shards n inside of x, z holds addends, and any other axis replicas.

        Returns:
            `(dim, shards down to the axis, overlap)` for a sharding axis, `(tag,)` for a tagged
            one, and `()` for replicas and copies.
        """
        for dim in self.dims:
            for n_outer, shard in enumerate(dim.shards):
                if axis in shard.axes:
                    return dim.name, dim.shards[: n_outer + 1], dim.overlap
        for tag, axes in self.tags:
            if axis in axes and tag != "copy":
                return (tag,)
        return ()

    @property
    def unsharded(self) -> Layout:
        """The layout of the same array, whole on every device: "h/sp w" -> "h w"."""
        return Layout(tuple(Dim(dim.name) for dim in self.dims))

    @cached_property
    def has_overlap(self) -> bool:
        """Whether a dim has a halo, a window or a fold."""
        return any(dim.overlap is not None for dim in self.dims)

    # ---- gradients

    @property
    def is_linear(self) -> bool:
        """Whether the array depends linearly on the blocks: no axis is under `max` or `min`."""
        return not any(tag in NONLINEAR for tag, _ in self.tags)

    @cached_property
    def dual(self) -> Layout:
        """The layout of the cotangent: sum <-> copy, an overlap <-> its fold, the rest unchanged.

        A constant beyond the ends of the array becomes zero, because it has no cotangent. `mean`
        is a sum with a scale: its dual is `copy`, and the plan carries the scale.

        Raises:
            LinearityError: The layout has `max` or `min`, which have no adjoint.
        """
        if not self.is_linear:
            hint = "their gradient goes to the winners; redistribute of either bridge computes it"
            raise LinearityError(f"'{self}' lacks a dual: max and min are not linear", hint=hint)
        dual_tags = tuple((_DUAL_TAGS[tag], axes) for tag, axes in self.tags)
        return Layout(_with_overlaps(self.dims, _dual_overlap), dual_tags)

    @property
    def tangent(self) -> Layout:
        """The layout of a tangent: constants beyond the ends of the array become zeros."""
        if not self.has_overlap:
            return self  # with its cached properties
        return replace(self, dims=_with_overlaps(self.dims, _linear_overlap))

    # ---- the same layout, written otherwise

    def in_order(self, names: Sequence[str]) -> Layout:
        """Return the layout with the dims of these names, in their order."""
        if names == self.names:
            return self
        return replace(self, dims=tuple(map(self.dim, names)))

    def with_names(self, names: Sequence[str]) -> Layout:
        """Return the layout with these names for its dims."""
        dims_with_names = zip(self.dims, names, strict=True)
        renamed = [
            dim if dim.name == name else _rename_dim(dim, name) for dim, name in dims_with_names
        ]
        return replace(self, dims=tuple(renamed))

    def resolved(self, ndim: int) -> Layout:
        """Write `...` out as unsharded dims `_0`, `_1`, ..., so that the layout has `ndim` dims.

        `b ... c` for 4 dims -> `b _0 _1 c`, for 2 dims -> `b c`.

        Raises:
            ShapeError: An array of `ndim` dims cannot have this layout.
        """
        n_missing = ndim - len(self.dims)  # `...` counts as a dim: -1 if it stands for none
        if ELLIPSIS not in self.names:
            if n_missing:
                reason = f"'{self}' has {len(self.dims)} dims, the array has {ndim}"
                hint = "write one name per dim, or '...' for any number of unsharded dims"
                raise ShapeError(reason, hint=hint)
            return self
        if n_missing < -1:
            min_ndim = len(self.dims) - 1
            reason = f"'{self}' needs at least {min_ndim} dims, the array has {ndim}"
            hint = "'...' fits it; among rules that is one for its name, before this one"
            raise ShapeError(reason, hint=hint)
        ellipsis_index = self.names.index(ELLIPSIS)
        unnamed_dims = tuple(Dim(f"_{i}") for i in range(n_missing + 1))
        dims = self.dims[:ellipsis_index] + unnamed_dims + self.dims[ellipsis_index + 1 :]
        return replace(self, dims=dims)

    # ---- the block of one device

    @api_boundary
    def local_shape(self, mesh: Mesh, shape: Sequence[int], device: int) -> tuple[int, ...]:
        """Return the shape of one device's block of an array of a global shape.

        Args:
            mesh: The mesh of devices.
            shape: The global shape.
            device: The number of the device in the mesh.

        Returns:
            The shape of the block.

        Raises:
            MeshError: The mesh has no such device.
            NotationError: The layout names an axis that the mesh lacks.
            ShapeError: The shape does not fit the layout.

        Examples:
            >>> Layout.parse("s/zigzag(cp) c").local_shape(Mesh(cp=4), (16, 3), 0)
            (4, 3)
        """
        return tuple(count_rows(rows) for rows in self._held(mesh, shape, device))

    @api_boundary
    def positions(self, mesh: Mesh, shape: Sequence[int], dim: int | str, device: int) -> Numbers:
        """List the global row number of every local row of a dim: `[rows of the block]`, int64.

        Rotary embeddings and causal masks need these numbers under every order and overlap. A row
        that an overlap adds, from a neighbour or from beyond an end, has the number of the row
        that it copies; rows filled with a constant have -1. Numbers count from the beginning of
        the array, not of a document.

        Args:
            mesh: The mesh of devices.
            shape: The global shape.
            dim: The name of the dim, or its index.
            device: The number of the device in the mesh.

        Returns:
            The row numbers in local order.

        Raises:
            MeshError: The mesh has no such device.
            NotationError: The layout names an axis that the mesh lacks.
            ShapeError: The shape does not fit the layout, or there is no such dim.

        Examples:
            >>> Layout.parse("b s/zigzag(cp)").positions(Mesh(cp=2), (3, 8), "s", 0).tolist()
            [0, 1, 6, 7]
            >>> Layout.parse("h/sp:halo(1,1)").positions(Mesh(sp=2), (6,), 0, device=1).tolist()
            [2, 3, 4, 5, -1]
        """
        block_rows = self._held(mesh, shape, device)
        index = self.resolved(len(block_rows)).dim_index(dim)
        return row_numbers(block_rows[index])

    def _held(self, mesh: Mesh, shape: Sequence[int], device: int) -> tuple[Runs, ...]:
        """Return, per dim, the global rows of the device's block."""
        check_mesh(mesh)
        shape = lengths_of(shape)
        layout = self.resolved(len(shape))
        check_axes(layout, mesh)
        layout, mesh = in_rows(layout, mesh, shape)
        device_coords = mesh.coords(device)
        check_fit(layout.dims, shape, mesh)
        block_rows = []
        for dim, length in zip(layout.dims, shape, strict=True):
            coords = [device_coords[mesh.position(axis)] for axis in dim.axes]
            block_rows.append(held_rows(dim, length, mesh.sizes_of(dim.axes), coords))
        return tuple(block_rows)


def _merge_tags(tags: Tags) -> Tags:
    """Merge equal tags, and sort them and their axes: copy(c) sum(b) sum(a) -> sum(a,b) copy(c)."""
    merged = []
    for tag in parser.TAGS:
        axes = sorted(_axes_tagged(tags, (tag,)))
        if axes:
            merged.append((tag, tuple(axes)))
    return tuple(merged)


def _axes_tagged(tags: Tags, wanted_tags: Sequence[str]) -> Axes:
    """Return the axes that have one of these tags, in the order of the tags."""
    return tuple(chain.from_iterable(axes for tag, axes in tags if tag in wanted_tags))


def _rename_dim(dim: Dim, name: str) -> Dim:
    """Return the dim under another name; the unit of a composed one stays: `(n 128)` -> `(d0 128)`."""
    part_names = (name, *dim.parts[1:]) if dim.parts else ()
    return replace(dim, name=name, parts=part_names)


def _with_overlaps(dims: tuple[Dim, ...], change: Callable[[Overlap], Overlap]) -> tuple[Dim, ...]:
    """Replace each overlap by what `change` makes of it."""
    changed = []
    for dim in dims:
        if dim.overlap is not None:
            dim = replace(dim, overlap=change(dim.overlap))
        changed.append(dim)
    return tuple(changed)


def _dual_overlap(overlap: Overlap) -> Overlap:
    """Return the overlap of a cotangent: an overlap becomes its fold, and a fold its overlap."""
    linear = _linear_overlap(overlap)
    return linear.overlap if isinstance(linear, Fold) else Fold(linear)


def _linear_overlap(overlap: Overlap) -> Overlap:
    """Return the overlap with zeros for constants beyond the ends of the array."""
    rows = unfolded(overlap)
    if isinstance(rows, Reads):
        return overlap
    rows = replace(rows, before=rows.before.linear, after=rows.after.linear)
    return Fold(rows) if isinstance(overlap, Fold) else rows


# ---- texts of layouts


def parse_expression(text: str) -> tuple[Layout, Layout]:
    """Parse `"layout -> layout"` into (src, dst) over the same dims, in any order.

    Raises:
        NotationError: The text is malformed, or its sides have different dims.
    """
    parser.check_text("an expression", text)
    return _parse_expression(text)


def parse_layouts(text: str, form: str) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Parse the layouts before and behind the arrow of a text of some form: see `parser.parse_sides`.

    Raises:
        NotationError: The text is malformed.
    """
    sources, results, spans = parser.parse_sides(text, form)
    # An empty result, as in "i, i ->", has no span.
    for (dims, tags), span in zip(sources + results, spans.layouts, strict=False):
        check_form(dims, tags, text, slice(*span))
    source_layouts = tuple(Layout(dims, tags) for dims, tags in sources)
    return source_layouts, tuple(Layout(dims, tags) for dims, tags in results)


@layout_cache(maxsize=4096)
def _parse(text: str, maps: tuple[tuple[str, RowMap], ...]) -> Layout:
    """Parse a text once."""
    dims, tags = parser.parse_layout(text, dict(maps))
    check_form(dims, tags, text)
    return Layout(dims, tags)


@layout_cache(maxsize=4096)
def _parse_expression(text: str) -> tuple[Layout, Layout]:
    """Parse an expression once."""
    sources, destinations = parse_layouts(text, "expression")
    src = sources[0]
    dst = destinations[0]
    check_dims(src.dims, dst.dims, text)
    return src, dst


# ---- checks


def check_form(
    dims: tuple[Dim, ...], tags: Tags, text: str | None = None, layout_slice: slice = slice(None)
) -> None:
    """Check that a layout uses each mesh axis and dim name once, and reductions that go together.

    "n/x d/x" uses x twice; "n | sum(x) max(y)" mixes reductions whose order matters. Raises
    NotationError.

    Args:
        dims: The dims of a layout.
        tags: Its tags.
        text: The user's text, which errors show; by default the layout's own.
        layout_slice: Which characters of the text are this layout, in an expression of several.
    """
    # Planning makes layouts by the thousand, so spans of the text are looked up only for an error.
    axes = list(chain.from_iterable(dim.axes for dim in dims))
    for _, tagged_axes in tags:
        axes.extend(tagged_axes)
    if len(set(axes)) != len(axes):
        _check_axes_are_used_once(dims, axes, text or parser.write(dims, tags), layout_slice)
    if len({dim.name for dim in dims}) != len(dims):
        raise NotationError("a dim name is used twice", text=parser.write(dims, tags))
    reductions = sorted({tag for tag, _ in tags} - {"copy"})
    if len(reductions) > 1 and any(tag in NONLINEAR for tag in reductions):
        raise NotationError(
            f"{' and '.join(reductions)} in one layout",
            text=text or parser.write(dims, tags),
            hint="the result depends on their order: reduce one of them first",
        )


def _check_axes_are_used_once(
    dims: tuple[Dim, ...], axes: Sequence[str], text: str, layout_slice: slice
) -> None:
    """Raise NotationError if a layout uses an axis twice; one that spreads units may have a tag."""
    uses = Counter(axes)
    # The tag of (h 64)/spread(tp) | copy(tp) is of the devices that share a unit.
    uses.subtract(axis for dim in dims for axis in dim.spread_axes if uses[axis] > 1)
    n_shards = Counter(chain.from_iterable(dim.axes for dim in dims))
    for axis, count in uses.items():
        if count > 1 or n_shards[axis] > 1:
            second_span = _axis_spans(text, axis, layout_slice)[1]
            hint = "an axis shards one dim or carries one tag"
            raise NotationError(
                f"mesh axis {axis!r} is used twice", text=text, span=second_span, hint=hint
            )


def check_axes(
    layout: Layout,
    mesh: Mesh,
    text: str | None = None,
    mesh_name: str = "the mesh",
    occurrence: int = 0,
) -> None:
    """Check that the mesh has all axes that a layout names; raise NotationError otherwise.

    Args:
        layout: The layout whose axes are checked.
        mesh: The mesh that should have them.
        text: The user's text, which the error shows; by default the layout's own.
        mesh_name: What the error calls the mesh.
        occurrence: Which occurrence of the axis in the text the error marks: 0 for the first, -1 for the
            last, which is in the destination of an expression.
    """
    for axis in layout.axes:
        if axis in mesh.axes:
            continue
        if text is None:
            text = str(layout)
        spans = _axis_spans(text, axis)
        span = spans[occurrence] if spans else None  # none if the layout is not from this text
        hint = f"{mesh_name} has: {mesh.describe()}"
        raise NotationError(f"unknown mesh axis {axis!r}", text=text, span=span, hint=hint)


def _axis_spans(text: str, axis: str, layout_slice: slice = slice(None)) -> list[Span]:
    """List the spans at which an axis stands in a text, or in a slice of it."""
    positions = range(len(text))[layout_slice]
    spans = parser.text_spans(text).axes
    return [span for name, span in spans if name == axis and span[0] in positions]


def in_rows(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> tuple[Layout, Mesh]:
    """Write a layout of a shape with shards that count rows, over axes that no two devices share.

    `(h 4)/spread(tp) | copy(tp)` of 2 units on tp=8 becomes `h_4/tp_0 | copy(tp_1)`, on a mesh with
    tp split into tp_0=2 and tp_1=4. What follows knows neither units nor `spread`: devices that
    share a unit are replicas along an axis, as all others are.

    Raises:
        ShapeError: A dim has no whole number of units, or groups of devices cannot share them.
    """
    if not layout.counts_units:
        return layout, mesh
    layout, mesh = without_spread(layout, shape, mesh)
    return replace(layout, dims=dims_in_rows(layout.dims, shape, mesh)), mesh


def without_spread(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[Layout, Mesh]:
    """Write a layout of a shape over axes that no two devices share: `h/spread(tp)` -> `h/tp_0`.

    Returns the layout, whose shards may still count units, and the mesh with these axes.
    """
    while layout.spread_axes:
        layout, mesh = _without_first_spread(layout, mesh, shape)
    return layout, mesh


def _without_first_spread(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> tuple[Layout, Mesh]:
    """Write the first `spread` of a layout as a plain shard: over all its axes, or the first of them.

    `(h 4)/spread(tp)` of 2 units on tp=8: each unit is shared by 4 devices, so that tp is split into
    tp_0=2, which cuts, and tp_1=4, along which devices hold replicas -> `(h 4)/tp_0`.
    """
    dim_index = next(i for i, dim in enumerate(layout.dims) if dim.spread_axes)
    dim = layout.dims[dim_index]
    spread_index = next(i for i, shard in enumerate(dim.shards) if shard.order == parser.SPREAD)
    n_groups = count_groups(dim, spread_index, shape[dim_index], mesh)
    fine_mesh = with_cut(mesh, dim.shards[spread_index].axes, n_groups)
    if fine_mesh is None:
        n_devices = mesh.size(*dim.shards[spread_index].axes)
        reason = f"no equal groups of {n_devices} devices for {n_groups} units of '{dim.text}'"
        raise ShapeError(reason, text=str(dim), hint=GROUPS_HINT)
    fine_layout = factored(layout, axis_factors(mesh, fine_mesh))
    # The outermost axes of the `spread` that have a device for each group: these cut.
    spread_axes = fine_layout.dims[dim_index].shards[spread_index].axes
    n_cutting = 0
    while fine_mesh.size(*spread_axes[:n_cutting]) < n_groups:
        n_cutting += 1
    cutting_axes = spread_axes[:n_cutting]
    shards = list(fine_layout.dims[dim_index].shards)
    shards[spread_index : spread_index + 1] = [parser.Shard(cutting_axes)] if cutting_axes else []
    dims = list(fine_layout.dims)
    dims[dim_index] = replace(dims[dim_index], shards=tuple(shards))
    # Devices differ along the axes that cut: a tag is of the others, which share a unit.
    tags = without_axes(fine_layout.tags, cutting_axes)
    return Layout(tuple(dims), tags), fine_mesh


def without_axes(tags: Tags, axes: Sequence[str]) -> Tags:
    """Return tags without some axes."""
    return tuple((tag, tuple(axis for axis in tagged if axis not in axes)) for tag, tagged in tags)


def factored(layout: Layout, factors: Mapping[str, Axes]) -> Layout:
    """Rewrite a layout for a mesh whose axes are split: `n/x` -> `n/(x_0,x_1)`.

    `factors` lists the new axes of each old one, the slowest first. An old axis with none, (), as
    one of size 1 has, is left out.
    """
    dims = []
    for dim in layout.dims:
        shards = []
        for shard in dim.shards:
            axes = _factor_axes(shard.axes, factors)
            if axes:
                shards.append(replace(shard, axes=axes))
        dims.append(replace(dim, shards=tuple(shards)))
    tags = tuple((tag, _factor_axes(axes, factors)) for tag, axes in layout.tags)
    return Layout(tuple(dims), tags)


def _factor_axes(axes: Axes, factors: Mapping[str, Axes]) -> Axes:
    """List the factors of all axes in order."""
    return tuple(chain.from_iterable(factors[axis] for axis in axes))
