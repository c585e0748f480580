"""Checks that a layout fits a shape on a mesh, and that two layouts have the same dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError, Span
from xshard.layout.block_rows import window_outputs
from xshard.layout.mesh import Mesh
from xshard.layout.partition import Sizes, block_length, find_misfit, owned_rows, owner_of_rows
from xshard.notation.overlap import (
    Boundary,
    Fold,
    Halo,
    Reads,
    Window,
    ends_of,
    unfolded,
)
from xshard.notation.parser import (
    ARROW,
    BY,
    INTERVALS,
    ROUTED,
    SEGMENTS,
    SIZES,
    Dim,
    TextSpans,
    text_spans,
)

MAX_ELEMENTS = 2**60  # of an array, and of a block: their bytes are counted in 64 bits
# Limits on pieces of a block with an overlap each, and on rows from beyond an end that are copied
# one by one: at either limit a plan takes a second or so.
MAX_WIDENED = 2**16
MAX_COPIED = 2**18
_SCATTERED_ORDERS = ("zigzag", "cyclic", SEGMENTS, INTERVALS, BY)  # parts need not be contiguous


# ---- one layout


def check_fit(dims: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> None:
    """Check that dims of these lengths can be sharded, and can have halos or windows, as written.

    `n/sizes(x,3,1)` needs 4 rows, for example. Raises ShapeError or NotationError.

    Args:
        dims: The dims of a layout.
        shape: The length of each dim.
        mesh: The mesh.
    """
    for index, (dim, length) in enumerate(zip(dims, shape, strict=True)):
        # First, since the checks below list rows of a dim whose numbers fit.
        _check_shards(dim, length, mesh)
        if dim.overlap is None:
            continue
        overlap = unfolded(dim.overlap)
        if isinstance(overlap, Reads):
            _check_reads(dim, overlap, length, mesh)
            continue  # a map of rows has no widths and no boundaries
        if isinstance(overlap, Halo):
            _check_widths(dim, overlap, mesh)
        else:
            _check_outputs(dim, overlap, length, mesh)
        _check_boundaries(dims, index, overlap, shape)
    _check_block_size(dims, shape, mesh)


def _check_shards(dim: Dim, length: int, mesh: Mesh) -> None:
    """Raise an error if the rows of a dim cannot have its shards."""
    if any(shard.order == ROUTED for shard in dim.shards):
        reason = "values say where these rows are, no layout does"
        hint = "route(x, to, axis) moves them, and parallelize by a rule for the input of experts"
        raise NotationError(reason, text=str(dim), hint=hint)
    if not any(shard.numbers for shard in dim.shards):
        return  # without numbers a shard cuts any number of rows
    misfit = find_misfit(dim, length, mesh.sizes_of(dim.axes))
    if misfit is not None:
        hint = f"dim {dim.name!r} has {length} rows, the mesh {mesh.describe()}"
        raise ShapeError(misfit, text=str(dim), hint=hint)


@layout_cache(maxsize=4096)
def _check_reads(dim: Dim, reads: Reads, length: int, mesh: Mesh) -> None:
    """Check a map that lists, for each part of a dim, the rows that it reads from other parts.

    Part 0 owns rows 0-3 of 8 and part 1 rows 4-7: a map may list row 4 for part 0, but neither row
    3, which it owns, nor row 8.

    Args:
        dim: The dim.
        reads: Its overlap, with the map.
        length: The rows of the dim.
        mesh: The mesh; the dim has a part for each device along its axes.

    Raises:
        ShapeError: The map is for another number of parts, reads a row that does not exist, or
            lists a row for the part that owns it.
    """
    needs = reads.rows.map
    sizes = mesh.sizes_of(dim.axes)
    n_parts = math.prod(sizes)
    hint = "each part lists rows of other parts"
    if needs.parts != n_parts:
        reason = f"'{reads.rows}' is for {needs.parts} parts, not {n_parts}"
        raise ShapeError(reason, text=str(dim), hint=hint)
    last_row = int(needs.rows.max(initial=-1))
    if last_row >= length:
        reason = f"'{reads.rows}' reads row {last_row} of {length}"
        raise ShapeError(reason, text=str(dim), hint=hint)
    # Entry i of the map: part `needs.part_of_row[i]` reads row `needs.rows[i]`.
    owner_of_row = owner_of_rows(dim, length, sizes)  # [length]: the part of each row
    owned_reads = np.flatnonzero(owner_of_row[needs.rows] == needs.part_of_row)
    if len(owned_reads):
        part_index = int(needs.part_of_row[owned_reads[0]])
        row = int(needs.rows[owned_reads[0]])
        raise ShapeError(
            f"part {part_index} reads row {row}, which it owns", text=str(dim), hint=hint
        )


def _check_widths(dim: Dim, halo: Halo, mesh: Mesh) -> None:
    """Raise an error unless the widths of a halo are one, or one per contiguous part."""
    n_parts = math.prod(mesh.sizes_of(dim.axes))
    for widths in (halo.lo, halo.hi):
        if isinstance(widths, int):
            continue
        if len(widths) != n_parts:
            reason = f"{len(widths)} widths for {n_parts} parts"
            raise ShapeError(reason, text=str(dim), hint="one width, or one per part")
        if any(shard.order in _SCATTERED_ORDERS for shard in dim.shards):
            reason = "widths per part need contiguous parts"
            raise NotationError(reason, text=str(dim), hint="one width for all parts")


def _check_outputs(dim: Dim, window: Window, length: int, mesh: Mesh) -> None:
    """Raise ShapeError if outputs are sharded by numbers that fit the rows of the dim alone."""
    if window.out or any(shard.order == SIZES for shard in dim.shards):
        return
    n_outputs = window.output_length(length)
    if find_misfit(dim, n_outputs, mesh.sizes_of(dim.axes)) is not None:
        reason = f"{n_outputs} outputs cannot be cut like the {length} rows of dim {dim.name!r}"
        hint = "out=balanced cuts them evenly, out=aligned where the dim is cut"
        raise ShapeError(reason, text=str(dim), hint=hint)


def _check_boundaries(
    dims: Sequence[Dim], index: int, overlap: Halo | Window, shape: Sequence[int]
) -> None:
    """Check what a dim needs beyond its ends: rows to copy, or a dim that a pole rolls."""
    dim = dims[index]
    for end, rows in _boundaries_with_rows(overlap):
        copies_rows = end.fill is None and end.kind != "none"
        if shape[index] == 0 and copies_rows and rows > 0:
            reason = f"dim {dim.name!r} lacks rows that '{end.kind}' could copy"
            hint = "an empty dim has zero, constant(c) or none beyond its ends"
            raise ShapeError(reason, text=str(dim), hint=hint)
        if end.kind == "pole":
            rolled_dim(dims, index, end, shape)


def _boundaries_with_rows(overlap: Halo | Window) -> list[tuple[Boundary, int]]:
    """Pair the boundary at each end of the array with the most rows that a block has beyond it.

    `halo(1,[0,2],edge)` -> 1 row before the array, 2 after it.
    """
    widths = (overlap.lo, overlap.hi) if isinstance(overlap, Halo) else overlap.padding
    max_rows = [width if isinstance(width, int) else max(width) for width in widths]
    return list(zip((overlap.before, overlap.after), max_rows, strict=True))


def rolled_dim(
    dims: Sequence[Dim], pole_index: int, pole: Boundary, shape: Sequence[int]
) -> int | None:
    """Find the dim of longitudes that belongs to a pole at the end of a dim of latitudes.

    Beyond the pole of a sphere the latitudes come again, on the opposite meridian: with longitudes
    rolled by half their number. For `h/sp:halo(1,1,pole(w))` it is the dim w, and for
    `h/sp:halo(1,1,pole)` the dim after h.

    Args:
        dims: All dims of the layout.
        pole_index: The index of the dim with the pole.
        pole: The boundary that is the pole.
        shape: The lengths of the dims.

    Returns:
        The index of the dim. None if no dim is named and the one with the pole is the last.

    Raises:
        NotationError: There is no such dim, or it is the dim that has the pole.
        ShapeError: Its length is odd.
    """
    dim_names = [dim.name for dim in dims]
    text = str(dims[pole_index])
    if not pole.dim:
        rolled_index = pole_index + 1
        if rolled_index == len(dim_names):
            return None  # a pole of the last dim rolls nothing
    elif pole.dim in dim_names:
        rolled_index = dim_names.index(pole.dim)
    else:
        reason = f"no dim {pole.dim!r} to roll beyond the pole"
        raise NotationError(reason, text=text, hint=f"dims are: {' '.join(dim_names)}")
    if rolled_index == pole_index:
        reason = f"dim {dim_names[pole_index]!r} has the pole and cannot be the dim that is rolled"
        hint = "pole(w) names the longitude; without a name the next dim is rolled"
        raise NotationError(reason, text=text, hint=hint)
    length = shape[rolled_index]
    if length % 2:
        name = dim_names[rolled_index]
        reason = f"dim {name!r} is rolled by half its length beyond a pole, but has {length} rows"
        raise ShapeError(reason, text=text, hint="the number of longitudes must be even")
    return rolled_index


# ---- the size of a block with overlaps


def _check_block_size(dims: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> None:
    """Raise ShapeError for a block with overlaps of more elements than 64 bits count."""
    widened_dims = [dim for dim in dims if dim.overlap is not None]
    if not widened_dims:
        return  # no larger than the array, which is checked
    dim_lengths = zip(dims, shape, strict=True)
    elements = math.prod(_max_held(dim, length, mesh) for dim, length in dim_lengths)
    if elements > MAX_ELEMENTS:
        reason = f"a block of up to {elements} elements"
        raise ShapeError(reason, text=str(widened_dims[0]), hint="at most 2**60")


def _max_held(dim: Dim, length: int, mesh: Mesh) -> int:
    """Bound from above the rows of a dim that any block holds with its halo or window.

    10 rows per device and a halo of 1 on both sides -> 12. The bound is checked before rows are
    listed, since a layout that a user writes may ask for 10^12 of them.

    Raises:
        ShapeError: The block has more pieces, or more copied rows, than can be listed.
    """
    sizes = mesh.sizes_of(dim.axes)
    max_owned = block_length(dim, length, sizes).longest
    if dim.overlap is None:
        return max_owned
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):  # a list of the rows that each block has beyond its own
        return max_owned + int(max(overlap.rows.map.sizes))

    # A halo is around each contiguous piece of a block, of which cyclic shards have many.
    n_pieces = max(_count_pieces(dim, overlap, length, sizes), 1)
    rows_beyond = 0  # rows before the first one of the array, and after the last
    for boundary, width in _boundaries_with_rows(overlap):
        rows = max(0, width)  # a negative width drops rows
        _check_copies(dim, boundary, rows, length)
        rows_beyond += rows
    if isinstance(overlap, Halo):
        # Its widths are the same inside the array, around each piece.
        return max_owned + n_pieces * rows_beyond
    # A window has `rows_beyond` as padding, once, and reads rows of neighbours around each piece.
    return max_owned + rows_beyond + n_pieces * _max_around(overlap, length + rows_beyond)


def _max_around(window: Window, padded_length: int) -> int:
    """Bound the rows that a contiguous run of outputs reads beyond those that its device owns.

    They are a kernel's width, and up to a stride at both ends. None of these is more than the whole
    array with its padding.
    """
    stride_rows = min(window.s, padded_length)
    return min(window.span, padded_length) + 2 * stride_rows


def _count_pieces(dim: Dim, overlap: Halo | Window, length: int, sizes: Sizes) -> int:
    """Count the contiguous pieces of the first block, each of which the overlap widens.

    Raises ShapeError if they are too many to be listed.
    """
    first_coords = (0,) * len(sizes)
    owned = owned_rows(dim, length, sizes, first_coords)
    n_pieces = sum(run.repeats for run in owned)
    if isinstance(overlap, Window) and n_pieces <= MAX_WIDENED:
        # Each run of outputs reads rows of its own.
        outputs = window_outputs(dim, overlap, length, sizes, first_coords)
        n_pieces = max(n_pieces, sum(run.repeats for run in outputs))
    if n_pieces > MAX_WIDENED:
        reason = f"{n_pieces} pieces of a block, each with an overlap"
        hint = f"at most {MAX_WIDENED}: deal out more rows together, as in cyclic(x,1024)"
        raise ShapeError(reason, text=str(dim), hint=hint)
    return n_pieces


def _check_copies(dim: Dim, end: Boundary, rows: int, length: int) -> None:
    """Raise ShapeError if a boundary copies too many of its rows one by one."""
    if end.kind in ("zero", "constant", "none"):
        return
    # Turns around the array are one run each.
    copies = rows // max(length, 1) if end.kind == "periodic" else rows
    if copies > MAX_COPIED:
        reason = f"{rows} rows of '{end}' beyond an end"
        hint = f"at most {MAX_COPIED} rows copied one by one, or turns around dim {dim.name!r}"
        raise ShapeError(reason, text=str(dim), hint=hint)


# ---- both sides of an expression


def check_dims(src: Sequence[Dim], dst: Sequence[Dim], text: str) -> None:
    """Check that both sides of a redistribution have the same dims, in any order.

    "b s -> s b" is fine, "b s -> b c" is not: NotationError marks `c` in the user's `text`. Where
    the order changes, boundaries whose meaning depends on the order are refused too.
    """
    src_names = [dim.name for dim in src]
    dst_names = [dim.name for dim in dst]
    if src_names == dst_names:
        return
    spans = text_spans(text)
    if sorted(src_names) != sorted(dst_names):
        raise NotationError(
            "dim names differ across the arrow",
            text=text,
            span=_last_odd_name(src_names, dst_names, text, spans),
            hint=f"left: {' '.join(src_names)}   right: {' '.join(dst_names)}   "
            "(the same names, in any order; einsum sums dims)",
        )
    _check_poles_are_named(text, spans)
    _check_corners(dst, src_names, dst_names, text)


def _check_poles_are_named(text: str, spans: TextSpans) -> None:
    """Refuse a pole without a named dim: it rolls the next dim, which the new order changes."""
    for dim, span in spans.full_dims:
        if any(end.kind == "pole" and not end.dim for end in ends_of(dim.overlap)):
            reason = "a pole rolls the next dim, and the order of dims changes"
            raise NotationError(reason, text=text, span=span, hint="name the dim, as in pole(w)")


def _check_corners(
    dst: Sequence[Dim], src_names: list[str], dst_names: list[str], text: str
) -> None:
    """Refuse different constants beyond the ends of two dims if these change their order.

    In a corner both constants meet, and the later dim writes over the earlier one. "h w" with
    halos that hold 0 beyond the ends of h and 1 beyond those of w has 1 in a corner; moved to
    "w h", the same corner would have 0. With one constant, or the same order, nothing changes.

    Args:
        dst: The dims of the destination.
        src_names: The names of the source's dims.
        dst_names: The same names, in the order of the destination.
        text: The user's text, for errors.
    """
    fills = _fills_of(dst)  # by name, the constants at both ends of each dim that has some
    filled_src = [name for name in src_names if name in fills]
    filled_dst = [name for name in dst_names if name in fills]
    constants = set().union(*fills.values())
    if filled_src != filled_dst and len(constants) > 1:
        reason = "a corner has the constant of the later dim, and the order of dims changes"
        hint = "change the order in a redistribution of its own, before"
        raise NotationError(reason, text=text, hint=hint)


def _last_odd_name(
    src_names: list[str], dst_names: list[str], text: str, spans: TextSpans
) -> Span | None:
    """Return where the last name stands that the other side of the arrow lacks."""
    arrow = text.index(ARROW)
    odd_span = None
    for name, span in spans.dims:
        if span[0] < arrow:
            is_odd = name in src_names and name not in dst_names
        else:
            is_odd = name in dst_names and name not in src_names
        # The names inside a composed dim are in neither list: they are no dims of their own.
        if is_odd:
            odd_span = span
    return odd_span


def _fills_of(dims: Sequence[Dim]) -> dict[str, set[float]]:
    """Return the constants beyond the ends of each dim that has any."""
    fills = {}
    for dim in dims:
        if isinstance(dim.overlap, Fold):
            continue  # a fold drops the rows beyond the ends
        constants = {end.fill for end in ends_of(dim.overlap) if end.fill is not None}
        if constants:
            fills[dim.name] = constants
    return fills
