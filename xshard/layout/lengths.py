"""The global shape of an array from the shape of a block: how long its dims are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from xshard.errors import ShapeError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.partition import Ints, rows_in_numbers
from xshard.layout.sharding import Sharding
from xshard.notation.overlap import Halo, unfolded
from xshard.notation.parser import Dim, mark_errors

HINT = "pass shape= (the global shape)"
# Lengths of dims by name: a length, several lengths that the dim may have, or None if unknown.
Lengths = Mapping[str, int | Collection[int] | None]


def global_shape(
    layout: Layout,
    mesh: Mesh,
    block: Ints,
    text: str,
    known: Lengths | None = None,
    hint: str = HINT,
) -> tuple[int, ...]:
    """Find the global shape of an array from the shape of one device's block.

    A block [2, 3] under "s/x c" with x=4 -> [8, 3]. The length of a dim is `known`, or follows from
    sizes that the layout lists, as in `s/sizes(x,3,1)`, or all blocks are taken as equally long.

    Args:
        layout: The layout of the array.
        mesh: The mesh of devices.
        block: The shape of one device's block.
        text: The user's text, which errors show.
        known: Lengths of dims by name: one, several that the dim may have, or None.
        hint: How to pass the shape; `{dim}` stands for the dim whose length is unknown.

    Raises:
        ShapeError: The block does not say how long a dim is, or no known length fits it.
    """
    if known is None:
        known = {}
    shape = []
    with mark_errors(text):
        dims = layout.resolved(len(block)).dims
        for dim, rows in zip(dims, block, strict=True):
            shape.append(_length(dim, rows, mesh, known.get(dim.name), hint))
    return tuple(shape)


def _length(dim: Dim, rows: int, mesh: Mesh, known: int | Collection[int] | None, hint: str) -> int:
    """Find the global length of a dim from the rows of one device's block, or from a known length.

    Args:
        dim: The dim.
        rows: The rows of one device's block.
        mesh: The mesh.
        known: A length, which is taken as it is; several, of which the one that fits the block is
            taken; None or none, if the length has to follow from the block.
        hint: How to pass the shape, for errors.

    Raises:
        ShapeError: No length or several fit, or the block does not say how long the dim is.
    """
    if known is not None and not isinstance(known, Collection):
        return known
    if known:
        # The rows of a block if the dim had this length: those of the longest block.
        blocks = {
            length: Sharding(Layout((dim,)), mesh, (length,)).max_local_size
            for length in sorted(known)
        }
        fitting = [length for length, block_rows in blocks.items() if block_rows == rows]
        if len(fitting) == 1:
            return fitting[0]
        reason = _ambiguity(dim, rows, blocks, fitting)
    else:
        length = _inferred_length(dim, rows, mesh.sizes_of(dim.axes))
        if length is not None:
            return length
        reason = f"{rows} rows do not say how long dim {dim.name!r} is"
    raise ShapeError(reason, text=str(dim), hint=hint.replace("{dim}", repr(dim.name)))


def _ambiguity(dim: Dim, rows: int, blocks: Mapping[int, int], fitting: Sequence[int]) -> str:
    """Say which lengths fit a block of `rows` rows; blocks: its rows by the length of the dim."""
    if fitting:
        lengths = " or ".join(map(str, fitting))
        return f"{rows} rows are a block of dim {dim.name!r} if it is {lengths} long"
    sizes = " or ".join(f"{size} if it is {length} long" for length, size in blocks.items())
    return f"the block has {rows} rows of dim {dim.name!r}, not {sizes}"


def _inferred_length(dim: Dim, rows: int, sizes: tuple[int, ...]) -> int | None:
    """Infer the global length of a dim from the rows of one block; None if they do not say it.

    A block of 3 rows under "n/x" with x=4 -> 12, as all blocks are taken as equally long. With a
    halo of 1 on both sides 3 rows -> 4, since two belong to neighbours. Where the layout lists
    sizes, as in `n/sizes(x,3,1)`, their sum is the length.

    Args:
        dim: The dim.
        rows: The rows of one device's block, with overlaps.
        sizes: The size of each axis of the dim.
    """
    n_blocks = 1  # number of blocks into which the shards so far cut the dim
    first_axis = 0
    for shard in dim.shards:
        rows_in_block = rows_in_numbers(shard)  # of the block that this shard cuts
        if rows_in_block is not None:
            return rows_in_block * n_blocks
        last_axis = first_axis + len(shard.axes)
        n_blocks *= math.prod(sizes[first_axis:last_axis])
        first_axis = last_axis
    if dim.overlap is None:
        return rows * n_blocks

    overlap = unfolded(dim.overlap)
    if not isinstance(overlap, Halo):
        return None  # a window or a map adds rows that depend on the length, or on the device
    if any(shard.order not in ("block", "balanced") for shard in dim.shards):
        return None  # a block of several intervals has a halo around each
    if "none" in (overlap.before.kind, overlap.after.kind):
        return None  # blocks at the ends are shorter
    if not isinstance(overlap.lo, int) or not isinstance(overlap.hi, int):
        return None  # a width for each part
    owned_rows = rows - overlap.lo - overlap.hi
    return owned_rows * n_blocks if owned_rows >= 0 else None
