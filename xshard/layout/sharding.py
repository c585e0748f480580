"""A sharding: one layout applied to one array shape on one mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from xshard.arguments import lengths_of
from xshard.caches import layout_cache
from xshard.errors import ShapeError, api_boundary
from xshard.formatting import Pictured
from xshard.layout.block_rows import BlockContents, all_held_rows, block_contents
from xshard.layout.layout import Layout, check_axes, factored, in_rows
from xshard.layout.mesh import Mesh, all_coords, check_mesh
from xshard.layout.partition import BlockLength, all_owned_rows, block_length, cut_by_shard
from xshard.layout.runs import Runs, are_equal, count_rows
from xshard.layout.sub_axes import axis_factors
from xshard.layout.validation import MAX_ELEMENTS, check_fit
from xshard.notation.overlap import Fold, Overlap, Reads, Window, unfolded
from xshard.notation.parser import SEGMENTS, SIZES, Dim, Shard, Tags
from xshard.notation.row_arrays import Numbers
from xshard.signatures import short_repr


@api_boundary
@dataclass(frozen=True, repr=False)
class Sharding(Pictured):
    """A layout applied to a shape on a mesh: the block of every device.

    `Sharding("n/tp d", Mesh(tp=2), (8, 3))`: device 0 has rows 0-3, device 1 rows 4-7.

    Attributes:
        layout: Which mesh axes shard which dims; `...` is replaced by dims `_0`, `_1`, ..., and
            shards that count units by shards that count rows: `(n 128)/tp` -> `n_128/tp`.
        mesh: The mesh of devices.
        shape: The global shape of the array.

    Raises:
        ShapeError: The rank or the shape does not fit.
        NotationError: The layout names an axis that the mesh lacks.

    Examples:
        >>> s = Sharding(Layout.parse("s/zigzag(cp) c"), Mesh(cp=2), (8, 3))
        >>> s.local_shape(0)
        (4, 3)
        >>> s.owned(0, 0)
        (Run(start=0, length=2, repeats=1, stride=0), Run(start=6, length=2, repeats=1, stride=0))
    """

    layout: Layout
    mesh: Mesh
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        # Text, lists and `...` are taken, and kept in one form: equal shardings are equal values.
        object.__setattr__(self, "shape", lengths_of(self.shape))
        object.__setattr__(self, "layout", Layout.parse(self.layout).resolved(len(self.shape)))
        check_axes(self.layout, self.mesh)
        _check_shape(self.shape)
        if self.layout.counts_units:
            object.__setattr__(self, "_written", self.layout)
            layout, mesh = in_rows(self.layout, self.mesh, self.shape)
            object.__setattr__(self, "layout", layout)
            object.__setattr__(self, "mesh", mesh)
        check_fit(self.layout.dims, self.shape, self.mesh)

    def __repr__(self) -> str:
        return f"Sharding({str(self.layout)!r}, {self.mesh!r}, {self.shape})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.mesh.sizes, self.shape))

    def __reduce__(self) -> tuple[object, ...]:  # a hash is valid in its own process only
        return Sharding, (self.layout, self.mesh, self.shape)

    @property
    def written(self) -> Layout:
        """The layout for errors, with units and `spread` where it was made of one with these."""
        return getattr(self, "_written", self.layout)

    # ---- related shardings

    def with_layout(self, layout: Layout) -> Sharding:
        """Return the sharding of the same shape on the same mesh under another layout."""
        return Sharding(layout, self.mesh, self.shape)

    @property
    def dual(self) -> Sharding:
        """The sharding of cotangents."""
        return self.with_layout(self.layout.dual)

    def on_sub_axes(self, mesh: Mesh) -> Sharding:
        """Return the same blocks on a mesh that splits axes of this one: `n/x` -> `n/(x_0,x_1)`."""
        if mesh == self.mesh:
            return self
        return Sharding(factored(self.layout, axis_factors(self.mesh, mesh)), mesh, self.shape)

    def in_order(self, names: Sequence[str]) -> Sharding:
        """Return the sharding of an array with the dims of these names, in their order."""
        if tuple(names) == self.layout.names:
            return self
        lengths = dict(zip(self.layout.names, self.shape, strict=True))
        shape = tuple(lengths[name] for name in names)
        return Sharding(self.layout.in_order(names), self.mesh, shape)

    # ---- the rows of a block

    def dim_index(self, name: str) -> int:
        """Return the index of the dim with this name."""
        return self.layout.names.index(name)

    def dim_device(self, dim: int, device: int) -> int:
        """Return the position of a device along the axes that shard a dim, row-major."""
        return self.mesh.index(device, self.layout.dims[dim].axes)

    def owned(self, dim: int, device: int) -> Runs:
        """Return the global rows of a dim that the device owns, in local order."""
        return self.owned_by_position(dim)[self.dim_device(dim, device)]

    def held(self, dim: int, device: int) -> Runs:
        """Return the global rows of the device's block, with overlaps and fill."""
        return self.held_by_position(dim)[self.dim_device(dim, device)]

    def owned_by_position(self, dim: int) -> tuple[Runs, ...]:
        """Return `owned` for every position along the axes that shard the dim, row-major."""
        sharded_dim = self.layout.dims[dim]
        return all_owned_rows(sharded_dim, self.shape[dim], self.mesh.sizes_of(sharded_dim.axes))

    def held_by_position(self, dim: int) -> tuple[Runs, ...]:
        """Return `held` for every position along the axes that shard the dim, row-major."""
        sharded_dim = self.layout.dims[dim]
        return all_held_rows(sharded_dim, self.shape[dim], self.mesh.sizes_of(sharded_dim.axes))

    def cut_block(self, dim: int, shards: Sequence[Shard], device: int) -> tuple[Runs, ...]:
        """Cut a device's block of a dim further: list the local positions of each part, row-major.

        8 rows under "n/x" with x=2, cut by `Shard(("y",))` with y=2: each block of 4 rows has the
        parts 0-1 and 2-3. If the dim ends with these shards already, as "n/x/y" does, the block
        before they were applied is cut.

        Args:
            dim: The index of the dim.
            shards: What cuts the block, such as `Shard(("tp",))`.
            device: Whose block is cut.

        Returns:
            For each part the runs of its rows, in positions of the block.
        """
        outer_dim = self.layout.dims[dim]
        if shards and outer_dim.shards[-len(shards) :] == tuple(shards):
            outer_dim = replace(outer_dim, shards=outer_dim.shards[: -len(shards)])
        blocks = all_owned_rows(outer_dim, self.shape[dim], self.mesh.sizes_of(outer_dim.axes))
        length = count_rows(blocks[self.mesh.index(device, outer_dim.axes)])
        inner_dim = Dim("", tuple(shards))
        return all_owned_rows(inner_dim, length, self.mesh.sizes_of(inner_dim.axes))

    # ---- the sizes of blocks

    def local_shape(self, device: int) -> tuple[int, ...]:
        """Return the shape of the block of one device."""
        return tuple(count_rows(self.held(dim, device)) for dim in range(len(self.shape)))

    @cached_property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Per dim, the length of the block at every position along the dim's axes."""
        blocks_by_dim = map(self.held_by_position, range(len(self.shape)))
        return tuple(tuple(map(count_rows, blocks)) for blocks in blocks_by_dim)

    @cached_property
    def block_sizes(self) -> Numbers:
        """Elements of the block of every device, `[devices]`."""
        sizes = np.ones(self.mesh.n_devices, np.int64)
        for dim, lengths in zip(self.layout.dims, self.local_sizes, strict=True):
            sizes *= np.array(lengths, np.int64)[self.mesh.indices(dim.axes)]
        return sizes

    @cached_property
    def max_local_shape(self) -> tuple[int, ...]:
        """The longest block along every dim: the block shape of a padded (SPMD) runtime."""
        return tuple(longest for longest, _ in self._lengths)

    @property
    def max_local_size(self) -> int:
        """Elements of the largest block."""
        return math.prod(self.max_local_shape)

    @cached_property
    def is_even(self) -> bool:
        """True if the blocks of all devices have one shape."""
        return all(length.is_even for length in self._lengths)

    @cached_property
    def _lengths(self) -> tuple[BlockLength, ...]:
        """For each dim the rows that blocks hold. Hot in planning: without an overlap none are listed."""
        lengths = []
        for dim_index, dim in enumerate(self.layout.dims):
            if dim.overlap:
                held = self.local_sizes[dim_index]
                lengths.append(BlockLength(max(held), is_even=len(set(held)) == 1))
            else:
                sizes = self.mesh.sizes_of(dim.axes)
                lengths.append(block_length(dim, self.shape[dim_index], sizes))
        return tuple(lengths)

    @cached_property
    def has_even_cuts(self) -> bool:
        """True if all shards are contiguous and of one size, each over one axis, without overlaps."""
        for dim in self.layout.dims:
            for shard in dim.shards:
                if shard.order != "block" or len(shard.axes) != 1:
                    return False
        return self.is_even and not self.layout.has_overlap

    # ---- equal meaning

    @cached_property
    def normal_layout(self) -> Layout:
        """The simplest layout under which every device has the same block.

        Axes of size 1 are left out, and orders that change nothing are plain. A group of axes
        `n/(a,b)` is nested, `n/a/b`, if it divides evenly. `mean` becomes `sum`, and the property
        `scale` has the factor between both.

        Examples:
            >>> str(
            ...     Sharding(
            ...         Layout.parse("n/(a,b) d/zigzag(c)"), Mesh(a=2, b=2, c=1), (8, 4)
            ...     ).normal_layout
            ... )
            'n/a/b d'
        """
        dims = []
        for dim, length in zip(self.layout.dims, self.shape, strict=True):
            dims.append(normal_dim(dim, length, self.mesh))
        return Layout(tuple(dims), _normal_tags(self.layout.tags, self.mesh))

    @property
    def scale(self) -> Fraction:
        """Value of the layout = scale * value of its normal layout: 1/n for a mean over n."""
        mean_axes = self.layout.tagged("mean")
        return Fraction(1, math.prod(self.mesh.sizes_of(mean_axes)))

    def means_the_same_as(self, other: Sharding) -> bool:
        """Return whether all devices have the same blocks and tags, with `mean` taken as `sum`."""
        if self.normal_layout == other.normal_layout:
            return True  # without rows, which take longer
        if self.mesh != other.mesh or self.shape != other.shape:
            return False
        if self.normal_layout.tags != other.normal_layout.tags:
            return False
        normal = self.with_layout(self.normal_layout)
        other_normal = other.with_layout(other.normal_layout)
        return all(normal.agrees_with(other_normal, dim) for dim in range(len(self.shape)))

    def agrees_with(self, other: Sharding, dim: int) -> bool:
        """Compare one dim of two shardings: whether all devices have the same rows of it.

        What boundaries do to rows beyond the ends of the array (fill or negate) must agree too.
        Both shardings have one mesh and one shape. `n/zigzag(x)` agrees with `n` if x has size 1.

        Args:
            other: The other sharding.
            dim: The index of the dim.
        """
        own_dim = self.layout.dims[dim]
        other_dim = other.layout.dims[dim]
        if own_dim == other_dim:
            return True
        # A fold holds rows to be added up: it is another value, even if the rows are the same.
        if isinstance(own_dim.overlap, Fold) != isinstance(other_dim.overlap, Fold):
            return False
        # Compare on one device for each coordinate along the axes of this dim in either layout: along
        # other axes its blocks are equal.
        axes = tuple(dict.fromkeys(own_dim.axes + other_dim.axes))
        for coords in all_coords(self.mesh.sizes_of(axes)):
            coord_of = dict(zip(axes, coords, strict=True))
            contents = self._block_contents(own_dim, dim, coord_of)
            other_contents = self._block_contents(other_dim, dim, coord_of)
            if contents.changed_rows != other_contents.changed_rows:
                return False
            if not are_equal(contents.rows, other_contents.rows):
                return False
        return True

    def _block_contents(self, dim: Dim, index: int, coord_of: dict[str, int]) -> BlockContents:
        """Describe the block of a dim on a device. `coord_of`: the device's coordinate by axis."""
        coords = [coord_of[axis] for axis in dim.axes]
        return block_contents(dim, self.shape[index], self.mesh.sizes_of(dim.axes), coords)


def _check_shape(shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless a shape has lengths >= 0, and few enough elements for 64 bits."""
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ShapeError(f"shape {shape} has {length!r}, not a length >= 0")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ShapeError(f"an array of shape {short_repr(shape)}", hint="at most 2**60 elements")


# ---- normal forms


@layout_cache(maxsize=65536)
def normal_dim(dim: Dim, length: int, mesh: Mesh) -> Dim:
    """Write the sharding of one dim in the simplest way that gives every device the same block.

    On a=2, b=2, c=1 and 8 rows: `n/(a,b)` (sharded over a and b taken as one axis of 4) ->
    `n/a/b` (over a, then over b), `n/zigzag(c)` -> `n`, `n/sizes(a,4,4)` -> `n/a`. Layouts that mean
    the same become equal, so that a plan has no steps for them.
    """
    overlap = _normal_overlap(dim)
    long_shards = _without_short_axes(dim.shards, mesh)
    if overlap is not None and isinstance(unfolded(overlap), Window):
        # The outputs of a convolution are sharded like the dim, but there are fewer of them: what
        # is the same for the rows may differ for them, so shards keep their orders and groups.
        return Dim(dim.name, long_shards, overlap)
    shards: list[Shard] = []
    block_rows: int | None = length  # of every block so far; None once blocks differ
    for written_shard in long_shards:
        n_parts = math.prod(mesh.sizes_of(written_shard.axes))
        is_plain = _is_plain(written_shard, block_rows, n_parts)
        shard = Shard(written_shard.axes) if is_plain else written_shard
        is_divisible = block_rows is not None and block_rows % n_parts == 0
        # Uneven groups are not nested shards: 10 rows over 4 -> 3 3 3 1, over 2 and 2 -> 3 2 3 2.
        if shard.order == "block" and is_divisible:
            shards.extend(Shard((axis,)) for axis in shard.axes)
        else:
            shards.append(shard)
        block_rows = _even_block_rows(shard, block_rows, n_parts)
    return Dim(dim.name, tuple(shards), overlap)


def _without_short_axes(shards: Sequence[Shard], mesh: Mesh) -> tuple[Shard, ...]:
    """Return the shards without axes of one device, and without shards over such axes alone."""
    long_shards = []
    for shard in shards:
        axes = tuple(axis for axis in shard.axes if mesh.size(axis) > 1)
        if axes:
            long_shards.append(replace(shard, axes=axes))
    return tuple(long_shards)


def _even_block_rows(shard: Shard, block_rows: int | None, n_parts: int) -> int | None:
    """Return the rows of every part of blocks of `block_rows` rows; None if parts may differ."""
    if block_rows is None or shard.numbers:
        return None
    n_chunks = 2 * n_parts if shard.order == "zigzag" else n_parts
    return block_rows // n_parts if block_rows % n_chunks == 0 else None


def _is_plain(shard: Shard, length: int | None, n_parts: int) -> bool:
    """Return whether a shard cuts `length` rows just as the default order does, `n/x`.

    The default order, "block", gives equal contiguous parts. 8 rows in 2 parts: `n/sizes(x,4,4)` is
    plain, `n/sizes(x,3,5)` and `n/zigzag(x)` are not.

    length: The rows that it cuts. None if it cuts several blocks of different lengths; then it is
        plain if it is written in the default order.
    """
    if shard.order == SEGMENTS and len(shard.numbers) == 1:
        return True  # one segment is all rows, cut in the default order
    # Only balanced parts and listed sizes may be the same by chance: that depends on the length.
    if length is None or shard.order not in ("balanced", SIZES):
        return shard.order == "block"
    plain = Shard(shard.axes)
    # All these orders give contiguous parts, one after the other: to compare lengths is enough.
    for index in range(n_parts):
        rows = count_rows(cut_by_shard(length, shard, n_parts, index))
        if rows != count_rows(cut_by_shard(length, plain, n_parts, index)):
            return False
    return True


def _normal_overlap(dim: Dim) -> Overlap | None:
    """Write the overlap of a dim (halo, window, ...) in the simplest way; None if it adds no rows.

    `halo(0,0)` -> None, `halo(1,0)` stays. A window, what a convolution reads, stays even if it
    adds no rows, since it also says where outputs are computed.
    """
    if dim.overlap is None:
        return None
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Window):
        if overlap.out or all(shard.order != SIZES for shard in dim.shards):
            return dim.overlap
        # With listed sizes, outputs are "aligned" with rows. That is written out here, because the
        # normal form may replace the sizes by the plain order, which does not imply it.
        aligned = replace(overlap, out="aligned")
        return Fold(aligned) if isinstance(dim.overlap, Fold) else aligned
    if isinstance(overlap, Reads):
        adds_rows = any(overlap.rows.map.sizes)
    else:
        adds_rows = bool(np.any(overlap.lo) or np.any(overlap.hi))  # numbers, or lists of them
    return dim.overlap if adds_rows else None


def _normal_tags(tags: Tags, mesh: Mesh) -> Tags:
    """Return the tags without axes of one device, and with `sum` for `mean`."""
    normal = []
    for kind, axes in tags:
        long_axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
        normal.append(("sum" if kind == "mean" else kind, long_axes))
    return tuple(normal)
