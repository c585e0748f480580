"""The meaning of layouts as lists of single rows: a naive twin of `xshard/layout/`.

Slow and simple, so that a reader can check it. None stands for a row outside the array.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from xshard import Layout, Mesh, Sharding
from xshard.notation.overlap import Boundary, Fold, Halo, Window
from xshard.notation.parser import Dim, Shard
from xshard.steps import Step

Rows = list[int | None]

REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
PAD_MODES = {"periodic": "wrap", "reflect": "reflect", "edge": "edge", "pole": "symmetric"}


def cut(rows: Rows, shard: Shard, n: int, index: int) -> Rows:
    """Part `index` of `n` of a list of rows."""
    order = shard.order
    if order == "sizes":
        return np.split(np.array(rows, int), np.cumsum(shard.numbers)[:-1])[index].tolist()
    if order == "intervals":
        part = shard.numbers[index]
        return [row for a, b in zip(part[::2], part[1::2], strict=True) for row in rows[a:b]]
    if order == "cyclic":
        together = shard.numbers[0] if shard.numbers else 1
        return [row for i, row in enumerate(rows) if i // together % n == index]
    if order in ("zigzag", "segments") and shard.numbers:
        pieces = np.split(np.array(rows, int), np.cumsum(shard.numbers)[:-1])
        alone = Shard(shard.axes, "zigzag" if order == "zigzag" else "block")
        return [row for piece in pieces for row in cut(piece.tolist(), alone, n, index)]
    if order == "balanced":
        return np.array_split(np.array(rows, int), n)[index].tolist()
    if order == "zigzag":
        chunk = -(-len(rows) // (2 * n))
        last = 2 * n - 1 - index
        return rows[index * chunk :][:chunk] + rows[last * chunk :][:chunk]
    chunk = -(-len(rows) // n)
    return rows[index * chunk :][:chunk]


def owned_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> Rows:
    """Global rows of a dim that a device owns, in local order."""
    rows: Rows = list(range(length))
    for shard in dim.shards:
        rows = cut(rows, shard, mesh.size(*shard.axes), mesh.index(device, shard.axes))
    return rows


def held_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> Rows:
    """Global rows of a device's block, with its overlap; for contiguous cuts."""
    overlap = dim.overlap
    if isinstance(overlap, Halo):
        mine = owned_rows(dim, length, mesh, device)
        positions = range(mine[0] - overlap.lo, mine[-1] + overlap.hi + 1) if mine else range(0)
        return [row for i in positions for row in bounded(i, length, overlap)]
    if isinstance(overlap, Window):
        span = overlap.d * (overlap.k - 1) + 1
        outputs = output_rows(dim, length, mesh, device)
        if not outputs:
            return []
        first = outputs[0] * overlap.s - overlap.padding[0]
        positions = range(first, outputs[-1] * overlap.s - overlap.padding[0] + span)
        return [row for i in positions for row in bounded(i, length, overlap)]
    return owned_rows(dim, length, mesh, device)


def output_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> Rows:
    """The outputs of a window op that a device computes."""
    window = dim.overlap
    n = max(0, (length + sum(window.padding) - window.d * (window.k - 1) - 1) // window.s + 1)
    if window.out == "balanced":
        whole = Shard(dim.axes, "balanced")
        return cut(list(range(n)), whole, mesh.size(*dim.axes), mesh.index(device, dim.axes))
    if window.out == "aligned":
        mine = owned_rows(dim, length, mesh, device)
        return [o for o in range(n) if min(o * window.s, length - 1) in mine]
    return owned_rows(dim, n, mesh, device)


def bounded(row: int, length: int, overlap: Halo | Window) -> Rows:
    """The row at a position that may lie outside the array, by numpy's own padding."""
    if 0 <= row < length:
        return [row]
    boundary = (overlap.before if row < 0 else overlap.after).kind
    if boundary == "none":
        return []
    if boundary in ("zero", "constant"):
        return [None]
    padded = np.pad(np.arange(length), (max(-row, 0), max(row - length + 1, 0)), PAD_MODES[boundary])
    return [int(padded[0 if row < 0 else -1])]


def block_index(layout: Layout, mesh: Mesh, shape: tuple[int, ...], device: int) -> tuple[np.ndarray, ...]:
    """numpy index of a device's block in the global array."""
    dims = layout.resolved(len(shape)).dims
    rows = [owned_rows(dim, n, mesh, device) for dim, n in zip(dims, shape, strict=True)]
    return np.ix_(*(np.array(r, int) for r in rows))


def spread(x: np.ndarray, layout: Layout, mesh: Mesh, device: int) -> np.ndarray:
    """A device's block of an array, with its overlaps: cut from the padded array, one dim after another."""
    layout = layout.resolved(x.ndim)
    for d, dim in enumerate(layout.dims):
        overlap = dim.overlap.of if isinstance(dim.overlap, Fold) else dim.overlap
        length = x.shape[d]
        pieces = pieces_of(owned_rows(dim, length, mesh, device), chunk_of(dim, length, mesh))
        if isinstance(overlap, Halo):
            lo, hi = overlap.widths(mesh.index(device, dim.axes))
            spans = [(piece[0] - lo, piece[-1] + 1 + hi) for piece in pieces]
        elif isinstance(overlap, Window):
            last = overlap.d * (overlap.k - 1) + 1 - overlap.padding[0]
            made = overlap.output_length(length)
            outputs = pieces_of(output_rows(dim, length, mesh, device), chunk_of(dim, made, mesh))
            spans = [(o[0] * overlap.s - overlap.padding[0], o[-1] * overlap.s + last) for o in outputs]
        else:
            spans = [(piece[0], piece[-1] + 1) for piece in pieces]
        ends = (overlap.before, overlap.after) if overlap else (None, None)
        wide = max([0, *(max(-a, b - length) for a, b in spans)])
        rolled = [rolled_dim(layout, d, end) for end in ends]
        before = np.flip(beyond(np.flip(x, d), d, wide, ends[0], rolled[0]), d)
        whole = np.concatenate([before, x, beyond(x, d, wide, ends[1], rolled[1])], axis=d)
        none = [end is None or end.kind == "none" for end in ends]
        rows = [
            i + wide
            for a, b in spans
            for i in range(a, b)
            if not (i < 0 and none[0]) and not (i >= length and none[1])
        ]
        x = np.take(whole, rows, axis=d)
    return x


def rolled_dim(layout: Layout, d: int, end: Boundary | None) -> int | None:
    """The dim of the longitudes, if the end is a pole."""
    if end is None or end.kind != "pole":
        return None
    if end.dim:
        return layout.names.index(end.dim)
    return d + 1 if d + 1 < len(layout.dims) else None


def chunk_of(dim: Dim, length: int, mesh: Mesh) -> int:
    """Rows of a chunk: each chunk of a zigzag has a halo of its own; in other orders none are adjacent."""
    parts = [mesh.size(*shard.axes) for shard in dim.shards if shard.order == "zigzag"]
    if dim.overlap is None or not parts or parts == [1]:
        return length + 1
    assert len(dim.shards) == 1
    return max(1, -(-length // (2 * parts[0])))


def pieces_of(rows: Rows, chunk: int) -> list[Rows]:
    """Rows split into lists of consecutive rows."""
    cuts = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1 or rows[i] % chunk == 0]
    return [rows[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])] if rows else []


def beyond(x: np.ndarray, d: int, n: int, end: Boundary | None, rolled: int | None) -> np.ndarray:
    """The `n` rows after the end of a dim, by numpy's own padding."""
    kind = end.kind if end else "none"
    if kind == "pole":
        back = np.flip(x if rolled is None else np.roll(x, x.shape[rolled] // 2, rolled), d) * end.sign
        return np.take(np.concatenate([back, x] * max(n, 1), d), range(n), d)
    widths = [(0, n) if i == d else (0, 0) for i in range(x.ndim)]
    if kind in PAD_MODES:
        padded = np.pad(x, widths, mode=PAD_MODES[kind])
    else:
        padded = np.pad(x, widths, constant_values=end.value if end else 0)
    return np.take(padded, range(x.shape[d], x.shape[d] + n), d)


def gather(blocks: list[np.ndarray], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks -> the global array; devices with the same element must agree, and contributions are added.

    An array of element numbers, spread like the blocks, says where each value belongs.
    """
    tags = [(kind, axis) for kind, axes in layout.tags if kind != "copy" for axis in axes]
    numbered = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    replicas = [a for a in mesh.axes if a not in layout.axes or a in layout.tagged("copy")]
    folds = any(isinstance(dim.overlap, Fold) for dim in layout.dims)
    assert not (folds and any(d.overlap and not isinstance(d.overlap, Fold) for d in layout.dims))
    addends = np.full((*(mesh.size(axis) for _, axis in tags), math.prod(shape)), 0 if folds else np.nan)
    for device, block in enumerate(blocks):
        number = spread(numbered, layout.tangent, mesh, device)
        inside = number != 0  # rows outside the array are copies of no element
        values = (block * np.sign(number))[inside]
        mine = addends[tuple(mesh.index(device, (axis,)) for _, axis in tags)]
        at = np.abs(number[inside]).astype(int) - 1
        if folds:
            if mesh.index(device, replicas) == 0:
                np.add.at(mine, at, values)
            continue
        assert np.array_equal(np.where(np.isnan(mine[at]), values, mine[at]), values), f"{device} disagrees"
        mine[at] = values
    assert not np.isnan(addends).any(), "an element has no holder"
    for kind, _ in tags:
        addends = REDUCE[kind](addends, axis=0)
    return addends.reshape(shape)


def paired(xs: list[np.ndarray], ys: list[np.ndarray], layout: Layout, mesh: Mesh) -> float:
    """<x, y> for x under a layout and y under its dual; of replicas, only the first device counts."""
    replicated = [axis for axis in mesh.axes if axis not in layout.axes]
    counted = [device for device in range(mesh.n_devices) if mesh.index(device, replicated) == 0]
    return sum(float(np.vdot(xs[device].astype(float), ys[device].astype(float))) for device in counted)


def random_blocks(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...], rng: np.random.Generator, unit: int = 1
) -> list[np.ndarray]:
    """Whole-number blocks that a layout allows: arbitrary addends, equal replicas and copies."""
    own = [axis for dim in layout.dims for axis in dim.axes] + [
        axis for kind, axes in layout.tags if kind != "copy" for axis in axes
    ]
    equal = [axis for axis in mesh.axes if axis not in own]
    blocks: list[np.ndarray] = []
    for device in range(mesh.n_devices):
        first = mesh.group(device, equal)[0]
        lengths = np.broadcast_shapes(*(i.shape for i in block_index(layout, mesh, shape, device)))
        fresh = rng.integers(-9, 10, lengths).astype(float) * unit
        blocks.append(blocks[first].copy() if first < device else fresh)
    return blocks


def foreign_elements(step: Step, before: Sharding, slow: tuple[str, ...] = ()) -> list[int]:
    """For every device, the number of other devices' elements in its block after a step.

    Device d starts with the bit 2**d everywhere, so the bits of a result name the devices it came from.
    slow: count only devices that differ along these axes.
    """
    mesh = before.mesh
    marked = [np.full(before.local_shape(d), 2**d, np.int64) for d in range(mesh.n_devices)]
    return [
        sum(
            int(np.count_nonzero(block >> other & 1))
            for other in range(mesh.n_devices)
            if other != device and (not slow or mesh.index(other, slow) != mesh.index(device, slow))
        )
        for device, block in enumerate(step.run(marked, before))
    ]
