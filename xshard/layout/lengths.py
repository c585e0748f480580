"""The global shape of an array from the shape of a block: how long its dims are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from xshard.errors import ShapeError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.partition import Ints, rows_in_numbers
from xshard.layout.sharding import Sharding
from xshard.notation.overlap import Halo, unfolded
from xshard.notation.parser import Dim, mark_errors

HINT = "pass shape= (the global shape)"
# Lengths of dims by name: a length, several lengths that the dim may have, or None for an unknown one.
Lengths = Mapping[str, int | Collection[int] | None]


def global_shape(
    layout: Layout,
    mesh: Mesh,
    block: Ints,
    text: str,
    known: Lengths | None = None,
    hint: str = HINT,
) -> tuple[int, ...]:
    """Shape of a block -> global shape, by known lengths, shards' numbers or equal blocks; or ShapeError."""
    with mark_errors(text):
        known = known or {}
        pairs = zip(layout.resolved(len(block)).dims, block, strict=True)
        return tuple(_length(dim, rows, mesh, known.get(dim.name), hint) for dim, rows in pairs)


def _length(dim: Dim, rows: int, mesh: Mesh, known: int | Collection[int] | None, hint: str) -> int:
    if known is not None and not isinstance(known, Collection):
        return known
    if not known:
        if (length := _inferred_length(dim, rows, mesh.sizes_of(dim.axes))) is not None:
            return length
        reason = f"{rows} rows do not say how long dim {dim.name!r} is"
    else:
        blocks = {n: Sharding(Layout((dim,)), mesh, (n,)).max_local_size for n in sorted(known)}
        fitting = [n for n, size in blocks.items() if size == rows]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            lengths = " or ".join(map(str, fitting))
            reason = f"{rows} rows are a block of dim {dim.name!r} if it is {lengths} long"
        else:
            others = " or ".join(f"{size} if it is {n} long" for n, size in blocks.items())
            reason = f"the block has {rows} rows of dim {dim.name!r}, not {others}"
    raise ShapeError(reason, text=str(dim), hint=hint.replace("{dim}", repr(dim.name)))


def _inferred_length(dim: Dim, rows: int, sizes: tuple[int, ...]) -> int | None:
    """The length from the numbers of the shards, else from equal blocks of `rows` rows; None if unknown."""
    outer = 1
    for shard in dim.shards:
        if (total := rows_in_numbers(shard)) is not None:
            return total * outer
        outer = outer * math.prod(sizes[: len(shard.axes)])
        sizes = sizes[len(shard.axes) :]
    if dim.overlap is None:
        return rows * outer
    overlap = unfolded(dim.overlap)
    contiguous = all(shard.order in ("block", "balanced") for shard in dim.shards)
    if (
        not isinstance(overlap, Halo)
        or not contiguous
        or "none" in (overlap.before.kind, overlap.after.kind)
    ):
        return None
    uniform = [w for w in (overlap.lo, overlap.hi) if isinstance(w, int)]
    return (rows - sum(uniform)) * outer if len(uniform) == 2 and rows >= sum(uniform) else None
