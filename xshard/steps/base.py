"""Step, the base class of all steps, and the changes of layouts and blocks that several share.

A step is frozen data. It knows its effect on a sharding, its traffic, and its meaning in numpy; it
knows nothing of seconds, of plans, or of the framework that executes it. Shardings are in normal
form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.layout.mesh import Axes
from xshard.layout.partition import block_length
from xshard.layout.runs import Runs, as_index
from xshard.notation.parser import Shard
from xshard.steps.traffic import LinkSpans, PairTraffic, Traffic

Block = NDArray[Any]
Blocks = Sequence[Block]  # one block per device, in the order of the mesh
DimCut = tuple[str, tuple[Shard, ...]]  # a dim and some of its shards, outermost first

VIEW_KINDS = ("retag", "transpose")  # kinds of local steps that return a view
REDUCERS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Step(ABC):
    """One collective or local change of all blocks.

    Subclasses are frozen dataclasses of plain values.

    `AllGather("n", (Shard(("x",)),)).after` of the sharding "n/x d" is the sharding "n d".
    """

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Step]]] = {}  # by kind; plans are read from JSON by it

    def __init_subclass__(cls) -> None:
        """Register the step under its kind."""
        Step.registry[cls.kind] = cls

    @abstractmethod
    def after(self, source: Sharding) -> Sharding:
        """Return the sharding that the step leads to.

        Raises PlanError if the step does not apply.
        """

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        """Count the elements that the busiest device receives and copies.

        This default is right for local steps: a view is free, another block is copied.

        Args:
            source: The sharding that the step starts from.
            spans: The links along the axes of the mesh; without them all links are equally fast.
        """
        if self.kind in VIEW_KINDS:
            return Traffic()
        return Traffic(copied=self.after(source).max_local_size)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        """List how many elements each device sends to each other; a local step sends none."""
        return ()

    @abstractmethod
    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Define the step in numpy: one block per device -> one block per device."""

    @abstractmethod
    def __str__(self) -> str: ...


def axes_of(shards: Sequence[Shard]) -> Axes:
    """Return the mesh axes of some shards, outermost first."""
    return tuple(chain.from_iterable(shard.axes for shard in shards))


def axes_with_new_role(source: Sharding, target_layout: Layout) -> list[str]:
    """List the mesh axes that `target_layout` uses otherwise: from "n/x/y" to "n/y/x" x and y, not z."""
    roles = source.layout.role
    return [axis for axis in source.mesh.axes if roles(axis) != target_layout.role(axis)]


def shards_text(shards: Sequence[Shard]) -> str:
    """Write shards as they follow the name of a dim in a layout: "x/zigzag(y)"."""
    return "/".join(map(str, shards))


def without_inner(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    """Remove the innermost shards of a dim: "n/x/y" without y -> "n/x".

    Raises:
        PlanError: `shards` are not the innermost shards of the dim.
    """
    old_dim = layout.dim(dim) if dim in layout.names else None
    if old_dim is None or not shards or old_dim.shards[-len(shards) :] != shards:
        raise PlanError(
            f"'{shards_text(shards)}' is not the innermost cut of dim {dim!r} in '{layout}'"
        )
    return _with_shards(layout, dim, old_dim.shards[: -len(shards)])


def with_inner(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    """Add innermost shards to a dim: "n/x" with y -> "n/x/y".

    Raises PlanError for an unknown dim.
    """
    if dim not in layout.names:
        raise PlanError(f"no dim {dim!r} in '{layout}'")
    return _with_shards(layout, dim, layout.dim(dim).shards + shards)


def _with_shards(layout: Layout, dim: str, shards: tuple[Shard, ...]) -> Layout:
    """Replace all shards of one dim."""
    dims = list(layout.dims)
    dim_index = layout.dim_index(dim)
    dims[dim_index] = replace(dims[dim_index], shards=shards)
    return replace(layout, dims=tuple(dims))


def with_tag(layout: Layout, tag: str, axes: Sequence[str]) -> Layout:
    """Tag axes, if there are any, as holding a "sum", "max", "min" or "copy"."""
    if not axes:
        return layout
    return replace(layout, tags=(*layout.tags, (tag, tuple(axes))))


def without_tags(layout: Layout, axes: Sequence[str]) -> Layout:
    """Remove all tags of these axes, which then hold replicas."""
    tags = []
    for tag, tagged in layout.tags:
        tags.append((tag, tuple(axis for axis in tagged if axis not in axes)))
    return replace(layout, tags=tuple(tags))


def with_replicas_and_copies(layout: Layout, axes: Sequence[str], copies: Sequence[str]) -> Layout:
    """Return the layout after a gather or reduction over `axes`.

    The axes in `copies` hold copies from then on, the others replicas. Raises PlanError if a copy
    is not among the axes.
    """
    if not set(copies) <= set(axes):
        raise PlanError(f"copies {tuple(copies)} are not among the axes {tuple(axes)}")
    return with_tag(layout, "copy", copies)


def take_free(layout: Layout, axes: Sequence[str]) -> Layout:
    """Take axes out of replicas or copies, so that a shard or a sum may use them.

    Raises:
        PlanError: One of the axes shards a dim or holds addends.
    """
    busy = set(layout.axes) - set(layout.tagged("copy"))
    for axis in axes:
        if axis in busy:
            raise PlanError(f"axis {axis!r} is not replicated in '{layout}'")
    return without_tags(layout, axes)


def end_reduction(layout: Layout, axes: Axes, op: str) -> Layout:
    """End a "sum", "max" or "min" over `axes`.

    Raises PlanError if the axes do not all hold its addends.
    """
    if not axes or not set(axes) <= set(layout.tagged(op)):
        raise PlanError(f"no {op}({','.join(axes)}) to reduce in '{layout}'")
    return without_tags(layout, axes)


def check_even(sharding: Sharding, dim: str, shards: tuple[Shard, ...]) -> None:
    """Check that `shards` cut a dim into parts of one size on all devices, as collectives need.

    8 rows over 4 devices pass; 10 rows give parts of 3 3 3 1 and raise PlanError. The shards may be
    the innermost of the dim already (a gather removes them) or about to be added (a scatter).
    """
    index = sharding.dim_index(dim)
    sharded_dim = sharding.layout.dims[index]
    outer_shards = sharded_dim.shards
    if outer_shards[-len(shards) :] == shards:
        outer_shards = outer_shards[: -len(shards)]
    # The blocks outside of these shards must be equally long too: equal parts of unequal blocks
    # would differ between devices.
    for prefix in (outer_shards, outer_shards + shards):
        cut_dim = replace(sharded_dim, shards=prefix)
        sizes = sharding.mesh.sizes_of(cut_dim.axes)
        if not block_length(cut_dim, sharding.shape[index], sizes).is_even:
            raise PlanError(
                f"'{shards_text(shards)}' cuts dim {dim!r} of '{sharding.layout}' unevenly"
            )


def even_parts(sharding: Sharding, dim: str, shards: tuple[Shard, ...]) -> tuple[Runs, ...]:
    """Return the local positions of each part of a dim under `shards`, the same on all devices.

    A block of 8 rows, cut by an axis of size 2 -> rows 0 to 3, and rows 4 to 7. Raises PlanError
    if parts differ in size.
    """
    check_even(sharding, dim, shards)
    return sharding.cut_block(sharding.dim_index(dim), shards, 0)


def rows_of_own_part(sharding: Sharding, dim: str, shards: tuple[Shard, ...], device: int) -> Runs:
    """Return the local positions of a device's own part of a dim under `shards`."""
    positions_of_parts = sharding.cut_block(sharding.dim_index(dim), shards, device)
    return positions_of_parts[sharding.mesh.index(device, axes_of(shards))]


def lands_in_place(sharding: Sharding, dim: str, shards: Sequence[Shard]) -> bool:
    """Check that pieces one after the other in memory are the block: no unpacking is needed.

    They are for contiguous shards of the leading dim.
    """
    return dim == sharding.layout.names[0] and all(shard.order == "block" for shard in shards)


def take_rows(block: Block, dim: int, runs: Runs) -> Block:
    """Return the rows of a block at local positions `runs` of a dim."""
    index = (slice(None),) * dim + (as_index(runs),)
    return block[index]


def put_rows(out: Block, dim: int, runs: Runs, block: Block) -> None:
    """Write a block to local positions `runs` of a dim of `out`."""
    index = (slice(None),) * dim + (as_index(runs),)
    out[index] = block


def reduction_dtype(op: str | None, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are reduced: sums of short floats are rounded once."""
    is_short_float = dtype.kind == "V" or dtype == np.float16  # bfloat16 and others of ml_dtypes: V
    return np.dtype(np.float32) if op == "sum" and is_short_float else dtype


def reduce_blocks(op: str, blocks: Sequence[Block]) -> Block:
    """Combine blocks of one shape by a "sum", "max" or "min", in the order given."""
    dtype = blocks[0].dtype
    reduced_block = blocks[0].astype(reduction_dtype(op, dtype))
    for block in blocks[1:]:
        reduced_block = REDUCERS[op](reduced_block, block)
    return reduced_block.astype(dtype)


def write_or_reduce(
    out: Block, is_written: NDArray[np.bool_], index: Any, values: Block, op: str | None
) -> None:
    """Write values into `out[index]`, reduced by `op` with those that were written there before.

    The first addend of an element is not reduced with the zero in `out`, which a max would show.
    `is_written` has the shape of `out`, and is updated.
    """
    if op is not None:
        reduced = REDUCERS[op](out[index], values)
        values = np.where(is_written[index], reduced, values)
    out[index] = values
    is_written[index] = True
