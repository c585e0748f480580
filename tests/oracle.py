"""What a layout means, as lists of single rows: the naive twin of `xshard.ownership`.

Slow and plain, so that it can be read and believed. None stands for a row outside the array.
"""

from __future__ import annotations

import numpy as np

from xshard.layout import Layout
from xshard.mesh import Mesh
from xshard.notation import Dim, Shard
from xshard.overlap import Halo, Window
from xshard.sharding import Sharding
from xshard.steps import Step

Rows = list[int | None]

REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
PAD_MODES = {"periodic": "wrap", "reflect": "reflect", "edge": "edge", "pole": "symmetric"}


def cut(rows: Rows, shard: Shard, n: int, index: int) -> Rows:
    """Part `index` of `n` of some rows."""
    order = shard.order
    if order == "sizes":
        return np.split(np.array(rows, int), np.cumsum(shard.sizes)[:-1])[index].tolist()
    if order == "cyclic":
        return rows[index::n]
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
    """Global rows that a device's block of a contiguous cut spans, its overlap included."""
    overlap = dim.overlap
    if isinstance(overlap, Halo):
        mine = owned_rows(dim, length, mesh, device)
        reach = range(mine[0] - overlap.lo, mine[-1] + overlap.hi + 1) if mine else range(0)
        return [row for i in reach for row in bounded(i, length, overlap)]
    if isinstance(overlap, Window):
        span = overlap.d * (overlap.k - 1) + 1
        outputs = output_rows(dim, length, mesh, device)
        if not outputs:
            return []
        first = outputs[0] * overlap.s - overlap.padding[0]
        reach = range(first, outputs[-1] * overlap.s - overlap.padding[0] + span)
        return [row for i in reach for row in bounded(i, length, overlap)]
    return owned_rows(dim, length, mesh, device)


def output_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> Rows:
    """Which outputs of a window op a device computes."""
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
    """Which row stands at a position that may lie outside the array, by numpy's own padding."""
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


def gather(blocks: list[np.ndarray], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks -> the global array; devices that hold the same element must agree."""
    tags = [(kind, axis) for kind, axes in layout.tags if kind != "copy" for axis in axes]
    addends = np.full((*(mesh.size(axis) for _, axis in tags), *shape), np.nan)
    for device, block in enumerate(blocks):
        coords = tuple(mesh.index(device, (axis,)) for _, axis in tags)
        index = (*coords, *block_index(layout, mesh, shape, device))
        known = addends[index]
        assert np.array_equal(np.where(np.isnan(known), block, known), block), f"device {device} disagrees"
        addends[index] = block
    assert not np.isnan(addends).any(), "an element has no holder"
    for kind, _ in tags:
        addends = REDUCE[kind](addends, axis=0)
    return addends


def paired(xs: list[np.ndarray], ys: list[np.ndarray], layout: Layout, mesh: Mesh) -> float:
    """<x, y> for x under a layout and y under its dual: along a replicated axis one device counts."""
    replicated = [axis for axis in mesh.axes if axis not in layout.axes]
    counted = [device for device in range(mesh.n_devices) if mesh.index(device, replicated) == 0]
    return sum(float(np.vdot(xs[device].astype(float), ys[device].astype(float))) for device in counted)


def random_blocks(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...], rng: np.random.Generator, unit: int = 1
) -> list[np.ndarray]:
    """Whole-number blocks that are legal under a layout: addends arbitrary, replicas and copies equal."""
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
    """For every device, the elements of other devices that are in its block after a step.

    Device d starts with the bit 2**d everywhere; the bits of a result tell whose values were added.
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
