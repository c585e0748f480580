"""A sharding: one layout applied to one array shape on one mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import lengths_of, shown
from xshard.errors import ShapeError
from xshard.formatting import Pictured
from xshard.layout.block_rows import all_held_rows, meaning
from xshard.layout.layout import Layout, check_axes
from xshard.layout.mesh import Mesh, check_mesh
from xshard.layout.partition import all_owned_rows, block_length, cut
from xshard.layout.runs import Runs, are_equal, n_rows
from xshard.layout.validation import MOST_ELEMENTS, check_fit
from xshard.notation.overlap import Fold, Halo, Overlap, Reads, Window, unfolded
from xshard.notation.parser import SEGMENTS, SIZES, Dim, Shard

EvenCuts = tuple[
    tuple[tuple[str, int], ...], ...
]  # per dim, its axes (name, size), outermost first


@dataclass(frozen=True, repr=False)
class Sharding(Pictured):
    """A layout applied to a shape on a mesh.

    Raises ShapeError if the rank or the shape does not fit, NotationError for unknown axes.

    >>> s = Sharding(Layout.parse("s/zigzag(cp) c"), Mesh(cp=2), (8, 3))
    >>> s.local_shape(0), s.owned(0, 0)
    ((4, 3), (Run(start=0, length=2, repeats=1, stride=0), Run(start=6, length=2, repeats=1, stride=0)))
    """

    layout: Layout
    mesh: Mesh
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        object.__setattr__(self, "shape", lengths_of(self.shape))
        object.__setattr__(self, "layout", Layout.parse(self.layout).resolved(len(self.shape)))
        check_axes(self.layout, self.mesh)
        if all(isinstance(n, int) for n in self.shape) and math.prod(self.shape) > MOST_ELEMENTS:
            raise ShapeError(
                f"an array of shape {shown(self.shape)}", hint="at most 2**60 elements"
            )
        for n in self.shape:
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise ShapeError(f"shape {self.shape} has {n!r}, not a length >= 0")
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

    def with_layout(self, layout: Layout) -> Sharding:
        return Sharding(layout, self.mesh, self.shape)

    @property
    def dual(self) -> Sharding:
        """The sharding of cotangents."""
        return self.with_layout(self.layout.dual)

    def in_order(self, names: Sequence[str]) -> Sharding:
        """The sharding of the array with its dims in the order of `names`."""
        if tuple(names) == self.layout.names:
            return self
        lengths = dict(zip(self.layout.names, self.shape, strict=True))
        return Sharding(
            self.layout.in_order(names), self.mesh, tuple(lengths[name] for name in names)
        )

    def dim_index(self, name: str) -> int:
        return self.layout.names.index(name)

    def dim_device(self, dim: int, device: int) -> int:
        """Position of a device along the axes that shard a dim, row-major."""
        return self.mesh.index(device, self.layout.dims[dim].axes)

    def owned(self, dim: int, device: int) -> Runs:
        """Global rows of a dim that the device owns, in local order."""
        return self.owners(dim)[self.dim_device(dim, device)]

    def held(self, dim: int, device: int) -> Runs:
        """Global rows of the device's block, with overlaps and fill."""
        return self.holders(dim)[self.dim_device(dim, device)]

    def owners(self, dim: int) -> tuple[Runs, ...]:
        """`owned` for every index along the axes that shard the dim, row-major."""
        d = self.layout.dims[dim]
        return all_owned_rows(d, self.shape[dim], self.mesh.sizes_of(d.axes))

    def holders(self, dim: int) -> tuple[Runs, ...]:
        """`held` for every index along the axes that shard the dim, row-major."""
        d = self.layout.dims[dim]
        return all_held_rows(d, self.shape[dim], self.mesh.sizes_of(d.axes))

    def local_shape(self, device: int) -> tuple[int, ...]:
        """Shape of the block of one device."""
        return tuple(n_rows(self.held(d, device)) for d in range(len(self.shape)))

    @cached_property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Per dim, the length of the block at every index along the dim's axes."""
        return tuple(tuple(map(n_rows, self.holders(d))) for d in range(len(self.shape)))

    @cached_property
    def block_sizes(self) -> NDArray[np.int64]:
        """Elements of the block of every device."""
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
        return all(even for _, even in self._lengths)

    @cached_property
    def _lengths(self) -> tuple[tuple[int, bool], ...]:
        return tuple(
            (max(held := self.local_sizes[d]), len(set(held)) == 1)
            if dim.overlap
            else block_length(dim, n, self.mesh.sizes_of(dim.axes))
            for d, (dim, n) in enumerate(zip(self.layout.dims, self.shape, strict=True))
        )

    @cached_property
    def even_cuts(self) -> EvenCuts | None:
        """Per dim, the axes (name, size) that shard it; None unless all shards are contiguous and even."""
        plain = all(
            s.order == "block" and len(s.axes) == 1 for d in self.layout.dims for s in d.shards
        )
        if not plain or not self.is_even or self.layout.overlaps:
            return None
        return tuple(tuple((a, self.mesh.size(a)) for a in d.axes) for d in self.layout.dims)

    @cached_property
    def normal(self) -> Layout:
        """The simplest layout with the same blocks: without axes of size 1 and orders that change nothing,
        even groups as nested shards, `mean` as `sum` (see `scale`).

        >>> str(Sharding(Layout.parse("n/(a,b) d/zigzag(c)"), Mesh(a=2, b=2, c=1), (8, 4)).normal)
        'n/a/b d'
        """
        dims = tuple(
            normal_dim(d, n, self.mesh) for d, n in zip(self.layout.dims, self.shape, strict=True)
        )
        kept = (
            (kind, tuple(a for a in axes if self.mesh.size(a) > 1))
            for kind, axes in self.layout.tags
        )
        return Layout(dims, tuple(("sum" if kind == "mean" else kind, axes) for kind, axes in kept))

    @property
    def scale(self) -> Fraction:
        """Value of the layout = scale * value of its normal layout: 1/n for a mean over n."""
        return Fraction(1, self.mesh.size(*self.layout.tagged("mean")))

    def means_the_same_as(self, other: Sharding) -> bool:
        """True if all devices have the same blocks and the tags agree, with `mean` taken as `sum`."""
        if self.normal == other.normal:
            return True
        if (
            self.mesh != other.mesh
            or self.shape != other.shape
            or self.normal.tags != other.normal.tags
        ):
            return False
        mine, theirs = (sharding.with_layout(sharding.normal) for sharding in (self, other))
        return all(mine.agrees_with(theirs, d) for d in range(len(self.shape)))

    def agrees_with(self, other: Sharding, dim: int) -> bool:
        """True if a dim means the same under both, which have one mesh and one shape."""
        dims = self.layout.dims[dim], other.layout.dims[dim]
        if dims[0] == dims[1]:
            return True
        if isinstance(dims[0].overlap, Fold) != isinstance(dims[1].overlap, Fold):
            return False
        axes = tuple(dict.fromkeys((*dims[0].axes, *dims[1].axes)))
        for coords in itertools.product(*map(range, self.mesh.sizes_of(axes))):
            i = dict(zip(axes, coords, strict=True))
            (mine, beyond), (theirs, theirs_beyond) = (
                meaning(d, self.shape[dim], self.mesh.sizes_of(d.axes), [i[a] for a in d.axes])
                for d in dims
            )
            if beyond != theirs_beyond or not are_equal(mine, theirs):
                return False
        return True

    def parts(self, dim: int, shards: Sequence[Shard], device: int) -> tuple[Runs, ...]:
        """Per index, local positions in the block (without these innermost shards) that `shards` give."""
        d = self.layout.dims[dim]
        if shards and d.shards[-len(shards) :] == tuple(shards):
            d = replace(d, shards=d.shards[: -len(shards)])
        owned = all_owned_rows(d, self.shape[dim], self.mesh.sizes_of(d.axes))
        length = n_rows(owned[self.mesh.index(device, d.axes)])
        axes = tuple(a for shard in shards for a in shard.axes)
        return all_owned_rows(Dim("", tuple(shards)), length, self.mesh.sizes_of(axes))


@lru_cache(maxsize=65536)
def normal_dim(dim: Dim, length: int, mesh: Mesh) -> Dim:
    overlap = _normal_overlap(dim)
    # The outputs of a window are sharded like the dim, but need not be divisible when its rows are.
    regroups = overlap is None or isinstance(unfolded(overlap), Halo | Reads)
    shards: list[Shard] = []
    left: int | None = length  # rows of every block so far; None if blocks differ
    for shard in dim.shards:
        axes = tuple(a for a in shard.axes if mesh.size(a) > 1)
        if not axes:
            continue
        n = mesh.size(*axes)
        if not regroups:
            shards.append(replace(shard, axes=axes))
            continue
        divides = left is not None and left % n == 0
        order = "block" if _is_plain(shard, left, n) else shard.order
        if order == "block" and divides:
            shards.extend(Shard((a,)) for a in axes)
        else:
            shards.append(Shard(axes, order, shard.numbers if order == shard.order else ()))
        if order == "zigzag":
            divides = left is not None and left % (2 * n) == 0
        left = (
            left // n
            if divides and left is not None and (order == "block" or not shard.numbers)
            else None
        )
    return Dim(dim.name, tuple(shards), overlap)


def _is_plain(shard: Shard, length: int | None, n: int) -> bool:
    """True if this shard of `length` rows into `n` parts equals the plain contiguous one."""
    if shard.order == SEGMENTS and len(shard.numbers) == 1:
        return True
    if length is None or shard.order not in ("balanced", SIZES):
        return shard.order == "block"
    both = (shard, Shard(shard.axes))
    return all(
        n_rows(a) == n_rows(b) for a, b in ([cut(length, s, n, i) for s in both] for i in range(n))
    )


def _normal_overlap(dim: Dim) -> Overlap | None:
    overlap = dim.overlap
    if overlap is None:
        return None
    rows = unfolded(overlap)
    if (
        isinstance(rows, Window)
        and not rows.out
        and any(shard.order == SIZES for shard in dim.shards)
    ):
        aligned = replace(
            rows, out="aligned"
        )  # also where all that is left of the shard is its axes
        return Fold(aligned) if isinstance(overlap, Fold) else aligned
    widths = (rows.lo, rows.hi) if isinstance(rows, Halo) else (1,)
    widths = (rows.rows.map.sizes,) if isinstance(rows, Reads) else widths
    return None if all(not any(w) if isinstance(w, tuple) else w == 0 for w in widths) else overlap
