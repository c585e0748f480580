"""The global shape of an array from the shape of a block: how long its dims are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from xshard.errors import ShapeError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.partition import Ints, rows_in_numbers, shards_with_parts
from xshard.layout.sharding import Sharding
from xshard.notation.overlap import Halo, unfolded
from xshard.notation.parser import SPREAD, Dim, mark_errors

HINT = "pass shape= (the global shape)"
# Lengths of dims by name: a length, several lengths that the dim may have, or None if unknown.
Lengths = Mapping[str, int | Collection[int] | None]


def global_shape(
    layout: Layout,
    mesh: Mesh,
    block_shape: Ints,
    text: str,
    known_lengths: Lengths | None = None,
    hint: str = HINT,
) -> tuple[int, ...]:
    """Find the global shape of an array from the shape of one device's block.

    A block [2, 3] under "s/x c" with x=4 -> [8, 3]. The length of a dim is `known_lengths`, or follows from
    sizes that the layout lists, as in `s/sizes(x,3,1)`, or all blocks are taken as equally long.

    Args:
        layout: The layout of the array.
        mesh: The mesh of devices.
        block_shape: The shape of one device's block.
        text: The user's text, which errors show.
        known_lengths: Lengths of dims by name: one, several that the dim may have, or None.
        hint: How to pass the shape; `{dim}` stands for the dim whose length is unknown.

    Raises:
        ShapeError: The block does not say how long a dim is, or no known length fits it.
    """
    if known_lengths is None:
        known_lengths = {}
    shape = []
    with mark_errors(text):
        dims = layout.resolved(len(block_shape)).dims
        for dim, rows in zip(dims, block_shape, strict=True):
            shape.append(_length(dim, rows, mesh, known_lengths.get(dim.name), hint))
    return tuple(shape)


def sharding_of_block(
    layout: Layout, mesh: Mesh, block_shape: Ints, shape: Sequence[int | None] | None, text: str
) -> Sharding:
    """Find the sharding of an array from the shape of one device's block.

    A block [2, 3] under "s/x c" with x=4 is of an array [8, 3].

    Args:
        layout: The layout of the array.
        mesh: The mesh of devices.
        block_shape: The shape of one device's block.
        shape: The global shape; None, also for one length, if it has to follow from the block.
        text: The user's text, which errors show.

    Raises:
        ShapeError: The block or the shape does not fit the layout.
    """
    known_lengths: dict[str, int | None] = {}
    if shape is not None:
        if len(shape) != len(block_shape):
            raise ShapeError(f"shape {shape} of a block with {len(block_shape)} dims", text=text)
        known_lengths.update(zip(layout.resolved(len(block_shape)).names, shape, strict=True))
    return Sharding(layout, mesh, global_shape(layout, mesh, block_shape, text, known_lengths))


def _length(
    dim: Dim, block_rows: int, mesh: Mesh, known_length: int | Collection[int] | None, hint: str
) -> int:
    """Find the global length of a dim from the rows of one device's block, or from a known length.

    Args:
        dim: The dim.
        block_rows: The rows of one device's block.
        mesh: The mesh.
        known_length: A length, which is taken as it is; several, of which the one that fits the block is
            taken; None or none, if the length has to follow from the block.
        hint: How to pass the shape, for errors.

    Raises:
        ShapeError: No length or several fit, or the block does not say how long the dim is.
    """
    if known_length is not None and not isinstance(known_length, Collection):
        return known_length
    dim_hint = hint.replace("{dim}", repr(dim.name))
    if known_length:
        return _fitting_length(dim, block_rows, mesh, known_length, dim_hint)
    length = _inferred_length(dim, block_rows, mesh.sizes_of(dim.axes))
    if length is None:
        reason = f"{block_rows} rows do not say how long dim {dim.name!r} is"
        raise ShapeError(reason, text=str(dim), hint=dim_hint)
    return length


def _fitting_length(dim: Dim, rows: int, mesh: Mesh, lengths: Collection[int], hint: str) -> int:
    """Choose the one of several lengths of a dim that fits the rows of a block.

    "n/x" with x=4 and a block of 3 rows: of the lengths 8 and 12 it is 12, under which the longest
    block has 3 rows.

    Raises:
        ShapeError: No length fits, or several do. `hint` is shown with it.
    """
    block_rows = {}  # by length, the rows of the longest block
    for length in sorted(lengths):
        block_rows[length] = Sharding(Layout((dim,)), mesh, (length,)).max_local_size
    fitting = [length for length in block_rows if block_rows[length] == rows]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        texts = " or ".join(map(str, fitting))
        reason = f"{rows} rows are a block of dim {dim.name!r} if it is {texts} long"
    else:
        sizes = " or ".join(f"{size} if it is {length} long" for length, size in block_rows.items())
        reason = f"the block has {rows} rows of dim {dim.name!r}, not {sizes}"
    raise ShapeError(reason, text=str(dim), hint=hint)


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
    for shard, n_parts in shards_with_parts(dim, sizes):
        if shard.order == SPREAD and n_parts > 1:
            return None  # devices may share a unit, so that blocks are more than the dim
        rows_in_block = rows_in_numbers(shard)  # of the block that this shard cuts
        if rows_in_block is not None:  # units, in a composed dim
            return None if dim.unit is None else rows_in_block * dim.unit * n_blocks
        n_blocks *= n_parts
    owned_rows = _rows_without_overlap(dim, rows)
    return None if owned_rows is None else owned_rows * n_blocks


def _rows_without_overlap(dim: Dim, rows: int) -> int | None:
    """Return how many rows of a block its device owns: 3 rows with a halo of 1 on both sides -> 1.

    None if that depends on the device, or on the length of the dim.
    """
    if dim.overlap is None:
        return rows
    overlap = unfolded(dim.overlap)
    if not isinstance(overlap, Halo):
        return None
    if any(shard.order not in ("block", "balanced") for shard in dim.shards):
        return None  # a block of several intervals has a halo around each
    if "none" in (overlap.before.kind, overlap.after.kind):
        return None  # blocks at the ends are shorter
    if not isinstance(overlap.lo, int) or not isinstance(overlap.hi, int):
        return None  # a width for each part
    owned_rows = rows - overlap.lo - overlap.hi
    return owned_rows if owned_rows >= 0 else None
