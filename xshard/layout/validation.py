"""Checks that a layout fits a shape on a mesh, and that two layouts have the same dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from xshard.errors import NotationError, ShapeError
from xshard.layout.block_rows import window_outputs
from xshard.layout.mesh import Mesh
from xshard.layout.partition import block_length, misfit, owned_rows, owner_of_rows
from xshard.notation.overlap import Boundary, Fold, Halo, Reads, Window, ends_of, unfolded
from xshard.notation.parser import ARROW, BY, INTERVALS, ROUTED, SEGMENTS, SIZES, Dim, text_spans

MOST_ELEMENTS = 2**60  # of an array, and of a block: their bytes are counted in 64 bits
# Pieces of a block with an overlap each, and rows from beyond an end that are copied one by one: each takes
# a second or so.
MOST_WIDENED = 2**16
MOST_COPIED = 2**18


def check_fit(dims: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> None:
    """Raise ShapeError or NotationError if a dim of this length cannot have its shards or its overlap."""
    for i, (dim, length) in enumerate(zip(dims, shape, strict=True)):
        if any(shard.order == ROUTED for shard in dim.shards):
            hint = (
                "route(x, to, axis) moves them, and parallelize by a rule for the input of experts"
            )
            raise NotationError(
                "values say where these rows are, no layout does", text=str(dim), hint=hint
            )
        reason = (
            misfit(dim, length, mesh.sizes_of(dim.axes))
            if any(s.numbers for s in dim.shards)
            else None
        )
        if reason is not None:
            hint = f"dim {dim.name!r} has {length} rows, the mesh {mesh.describe()}"
            raise ShapeError(reason[1], text=str(dim), hint=hint)
        if dim.overlap is not None:
            overlap = unfolded(dim.overlap)
            if isinstance(overlap, Reads):
                _check_reads(dim, overlap, length, mesh)
                continue
            if isinstance(overlap, Halo):
                _check_widths(dim, overlap, mesh)
            else:
                _check_outputs(dim, overlap, length, mesh)
            widths = (overlap.lo, overlap.hi) if isinstance(overlap, Halo) else overlap.padding
            for end, width in zip((overlap.before, overlap.after), widths, strict=True):
                reaches_out = any(n > 0 for n in ((width,) if isinstance(width, int) else width))
                if not length and reaches_out and end.fill is None and end.kind != "none":
                    hint = "an empty dim has zero, constant(c) or none beyond its ends"
                    lacking = f"dim {dim.name!r} lacks rows that '{end.kind}' could copy"
                    raise ShapeError(lacking, text=str(dim), hint=hint)
                if end.kind == "pole":
                    rolled_dim(dims, i, end, shape)
    wide = [dim for dim in dims if dim.overlap is not None]
    held = (
        math.prod(_most_held(*pair, mesh) for pair in zip(dims, shape, strict=True)) if wide else 0
    )
    if held > MOST_ELEMENTS:
        raise ShapeError(
            f"a block of up to {held} elements", text=str(wide[0]), hint="at most 2**60"
        )


def rolled_dim(dims: Sequence[Dim], at: int, pole: Boundary, shape: Sequence[int]) -> int | None:
    """Index of the dim that a pole rolls by half its length: the named dim, else the next one, if any."""
    names = [dim.name for dim in dims]
    text = str(dims[at])
    if pole.dim and pole.dim not in names:
        hint = f"dims are: {' '.join(names)}"
        raise NotationError(f"no dim {pole.dim!r} to roll beyond the pole", text=text, hint=hint)
    if not pole.dim and at + 1 == len(names):
        return None
    rolled = names.index(pole.dim) if pole.dim else at + 1
    if rolled == at:
        reason = f"dim {names[at]!r} has the pole and cannot be the dim that is rolled"
        hint = "pole(w) names the longitude; without a name the next dim is rolled"
        raise NotationError(reason, text=text, hint=hint)
    if (n := shape[rolled]) % 2:
        reason = (
            f"dim {names[rolled]!r} is rolled by half its length beyond a pole, but has {n} rows"
        )
        raise ShapeError(reason, text=text, hint="the number of longitudes must be even")
    return rolled


def _most_held(dim: Dim, length: int, mesh: Mesh) -> int:
    """At most how many rows a block holds. Raises ShapeError for more pieces than can be listed."""
    sizes = mesh.sizes_of(dim.axes)
    most, _ = block_length(Dim(dim.name, dim.shards), length, sizes)
    if dim.overlap is None:
        return most
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):
        return most + int(max(overlap.rows.map.sizes))
    first = (0,) * len(sizes)
    pieces = sum(run.repeats for run in owned_rows(dim, length, sizes, first))
    if (
        isinstance(overlap, Window) and pieces <= MOST_WIDENED
    ):  # each run of outputs reads rows of its own
        pieces = max(
            pieces, sum(run.repeats for run in window_outputs(dim, overlap, length, sizes, first))
        )
    if pieces > MOST_WIDENED:
        hint = f"at most {MOST_WIDENED}: deal out more rows together, as in cyclic(x,1024)"
        raise ShapeError(
            f"{pieces} pieces of a block, each with an overlap", text=str(dim), hint=hint
        )
    widths = (overlap.lo, overlap.hi) if isinstance(overlap, Halo) else overlap.padding
    lo, hi = (max(0, w if isinstance(w, int) else max(w)) for w in widths)
    for end, rows in ((overlap.before, lo), (overlap.after, hi)):
        copies = {"periodic": rows // max(length, 1), "zero": 0, "constant": 0, "none": 0}.get(
            end.kind, rows
        )
        if copies > MOST_COPIED:
            hint = f"at most {MOST_COPIED} rows copied one by one, or turns around dim {dim.name!r}"
            raise ShapeError(f"{rows} rows of '{end}' beyond an end", text=str(dim), hint=hint)
    if isinstance(overlap, Halo):
        return most + max(pieces, 1) * (lo + hi)
    read = overlap.d * (overlap.k - 1) + 1, overlap.s, overlap.s
    return most + lo + hi + max(pieces, 1) * sum(min(rows, length + lo + hi) for rows in read)


@lru_cache(maxsize=4096)
def _check_reads(dim: Dim, reads: Reads, length: int, mesh: Mesh) -> None:
    needs = reads.rows.map
    hint = "each part lists rows of other parts"
    parts = math.prod(sizes := mesh.sizes_of(dim.axes))
    if needs.parts != parts:
        raise ShapeError(
            f"'{reads.rows}' is for {needs.parts} parts, not {parts}", text=str(dim), hint=hint
        )
    if len(needs.rows) and (last := int(needs.rows.max())) >= length:
        raise ShapeError(f"'{reads.rows}' reads row {last} of {length}", text=str(dim), hint=hint)
    owner = owner_of_rows(Dim(dim.name, dim.shards), length, sizes)
    own = np.flatnonzero(owner[needs.rows] == needs.part_of_row)
    if len(own):
        part = int(needs.part_of_row[own[0]])
        row = int(needs.rows[own[0]])
        raise ShapeError(f"part {part} reads row {row}, which it owns", text=str(dim), hint=hint)


def _check_widths(dim: Dim, halo: Halo, mesh: Mesh) -> None:
    parts = math.prod(mesh.sizes_of(dim.axes))
    for widths in (halo.lo, halo.hi):
        if isinstance(widths, int):
            continue
        if len(widths) != parts:
            reason = f"{len(widths)} widths for {parts} parts"
            raise ShapeError(reason, text=str(dim), hint="one width, or one per part")
        if any(
            shard.order in ("zigzag", "cyclic", SEGMENTS, INTERVALS, BY) for shard in dim.shards
        ):
            reason = "widths per part need contiguous parts"
            raise NotationError(reason, text=str(dim), hint="one width for all parts")


def _check_outputs(dim: Dim, window: Window, length: int, mesh: Mesh) -> None:
    """Raise ShapeError if outputs should be sharded like the dim, with numbers that fit its rows only."""
    n = window.output_length(length)
    if window.out or any(shard.order == SIZES for shard in dim.shards):
        return
    if misfit(Dim(dim.name, dim.shards), n, mesh.sizes_of(dim.axes)) is not None:
        reason = f"{n} outputs cannot be cut like the {length} rows of dim {dim.name!r}"
        hint = "out=balanced cuts them evenly, out=aligned where the dim is cut"
        raise ShapeError(reason, text=str(dim), hint=hint)


def check_dims(src: Sequence[Dim], dst: Sequence[Dim], text: str) -> None:
    """Raise NotationError unless both sides of `text` have the same dims; their order may differ."""
    left, right = ([dim.name for dim in dims] for dims in (src, dst))
    if left == right:
        return
    spans = text_spans(text)
    fault = partial(NotationError, text=text)
    if sorted(left) != sorted(right):
        arrow = text.index(ARROW)
        odd = [s for name, s in spans.dims if name not in (left if s[0] > arrow else right)]
        hint = f"left: {' '.join(left)}   right: {' '.join(right)}   "
        hint += "(the same names, in any order; einsum sums dims)"
        raise fault("dim names differ across the arrow", span=odd[-1] if odd else None, hint=hint)
    for dim, span in spans.full_dims:
        if any(end.kind == "pole" and not end.dim for end in ends_of(dim.overlap)):
            reason = "a pole rolls the next dim, and the order of dims changes"
            raise fault(reason, span=span, hint="name the dim, as in pole(w)")
    # The constants beyond the ends of every dim; a fold drops these rows.
    wide = (dim for dim in dst if not isinstance(dim.overlap, Fold))
    fills = {dim.name: {end.fill for end in ends_of(dim.overlap)} - {None} for dim in wide}
    turned = [name for name in left if fills.get(name)] != [
        name for name in right if fills.get(name)
    ]
    if turned and len(set().union(*fills.values())) > 1:
        reason = "a corner has the constant of the later dim, and the order of dims changes"
        raise fault(reason, hint="change the order in a redistribution of its own, before")
