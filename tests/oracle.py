"""The meaning of layouts, element by element: a naive twin of `xshard/layout/`.

Simple, so that a reader can check it. `oracle_rows.py` lists the rows of every dim.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tests.oracle_rows import OUTSIDE, Places, owned_rows, places
from xshard import Layout, Mesh, Plan, Sharding, reference
from xshard.notation.overlap import Fold, unfolded
from xshard.steps import Step

Blocks = list[np.ndarray]

REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


class Elements(NamedTuple):
    """What stands in a block: sign * element `number` of an array of `shape`, or `fill` if OUTSIDE."""

    number: np.ndarray
    sign: np.ndarray
    fill: np.ndarray
    shape: tuple[int, ...]


@lru_cache(maxsize=2048)
def elements(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...], device: int, folds: bool
) -> Elements:
    """The rows of a device's block along the dims that are folds, or along all others.

    Along the rest they are rows of an array that is as long there as the block, or as the whole array.
    """
    layout = layout.resolved(len(shape))
    dims = layout.dims
    lengths = list(shape)
    found = []
    for d, dim in enumerate(dims):
        here = places(dim, shape[d], mesh, device)
        if isinstance(dim.overlap, Fold) != folds:
            lengths[d] = shape[d] if folds else len(here.row)
            here = Places.of([(row, 0.0, "") for row in range(lengths[d])])
        found.append(here)

    def along(d: int, column: np.ndarray) -> np.ndarray:
        return column.reshape([-1 if i == d else 1 for i in range(len(dims))])

    rows = [along(d, here.row) for d, here in enumerate(found)]
    sign = np.ones((), int)
    fill = np.zeros(())
    for d, here in enumerate(found):
        for end in ("before", "after"):
            beyond = along(d, here.pole == end)
            if beyond.any():
                pole = getattr(unfolded(dims[d].overlap), end)
                sign = sign * np.where(beyond, pole.sign, 1)
                w = layout.names.index(pole.dim) if pole.dim else d + 1
                if w < len(dims):
                    other = (rows[w] + lengths[w] // 2) % max(lengths[w], 1)
                    rows[w] = np.where(beyond & (rows[w] != OUTSIDE), other, rows[w])
        fill = np.where(
            along(d, here.row) == OUTSIDE, along(d, here.fill), fill
        )  # the later dim's stands
    number = sum(
        (row * math.prod(lengths[d + 1 :]) for d, row in enumerate(rows)), np.zeros((), int)
    )
    for row in rows:
        number = np.where(row == OUTSIDE, OUTSIDE, number)
    whole = np.broadcast_shapes(number.shape, sign.shape, fill.shape)
    return Elements(*(np.broadcast_to(x, whole) for x in (number, sign, fill)), tuple(lengths))


def local_shape(layout: Layout, mesh: Mesh, shape: tuple[int, ...], device: int) -> tuple[int, ...]:
    """The shape of a device's block."""
    dims = zip(layout.dims, shape, strict=True)
    return tuple(len(places(dim, length, mesh, device).row) for dim, length in dims)


def spread(x: np.ndarray, layout: Layout, mesh: Mesh, device: int) -> np.ndarray:
    """A device's block of an array under a layout without tags and folds."""
    return filled(x, elements(layout, mesh, x.shape, device, False))


def filled(x: np.ndarray, there: Elements) -> np.ndarray:
    """The block that has these elements of an array."""
    if not x.size:
        return there.fill.astype(x.dtype)
    return np.where(
        there.number == OUTSIDE, there.fill, x.ravel()[there.number] * there.sign
    ).astype(x.dtype)


def addend_axes(layout: Layout) -> tuple[str, ...]:
    """Axes of addends and contributions, along which the layout lets blocks differ."""
    tagged = (axes for kind, axes in layout.tags if kind != "copy")
    folded = (dim.axes for dim in layout.dims if isinstance(dim.overlap, Fold))
    return tuple(itertools.chain(*tagged, *folded))


def value(
    blocks: Blocks, layout: Layout, mesh: Mesh, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks -> the global array, and which of its elements any block has.

    Copies must agree, rows outside have what fills them; addends and contributions are added up.
    """
    tags = [(kind, axis) for kind, axes in layout.tags if kind != "copy" for axis in axes]
    whole = np.zeros((*(mesh.size(axis) for _, axis in tags), math.prod(shape)), blocks[0].dtype)
    held = np.zeros(whole.shape, bool)
    parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for device, block in enumerate(blocks):
        there = elements(layout, mesh, shape, device, False)
        inside = there.number != OUTSIDE
        values = (block * there.sign).astype(block.dtype)[inside]
        at = there.number[inside]
        size = math.prod(there.shape)
        key = mesh.index(device, addend_axes(layout))
        part, known = parts.setdefault(key, (np.zeros(size, block.dtype), np.zeros(size, bool)))
        assert np.array_equal(part[at][known[at]], values[known[at]]), (
            f"device {device} has another value"
        )
        part[at] = values
        known[at] = True
        assert np.array_equal(part[at], values), f"device {device} has two values of an element"
        assert np.array_equal(block[~inside], there.fill[~inside].astype(block.dtype)), (
            f"{device}: filled"
        )
    for device in range(mesh.n_devices):
        found = parts.pop(mesh.index(device, addend_axes(layout)), None)
        if found is not None:
            into = tuple(mesh.index(device, (axis,)) for _, axis in tags)
            number = elements(layout, mesh, shape, device, True)
            inside = (number.number.ravel() != OUTSIDE) & found[1]
            at = number.number.ravel()[inside]
            np.add.at(
                whole[into], at, found[0][inside] * number.sign.ravel()[inside].astype(whole.dtype)
            )
            held[into][at] = True
    for kind, _ in tags:
        whole = REDUCE[kind](whole, axis=0)
        held = held.any(axis=0)
    return whole.reshape(shape), held.reshape(shape)


def known(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> np.ndarray:
    """The elements that some block has; in a fold all others are zero."""
    found = np.ones(shape, bool)
    for d, dim in enumerate(layout.resolved(len(shape)).dims):
        if not isinstance(dim.overlap, Fold):
            rows = [places(dim, shape[d], mesh, device).row for device in range(mesh.n_devices)]
            has = np.isin(np.arange(shape[d]), np.concatenate(rows))
            found &= has.reshape([-1 if i == d else 1 for i in range(len(shape))])
    return found


def gather(blocks: Blocks, layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks -> the global array; they must have all its elements."""
    whole, held = value(blocks, layout, mesh, shape)
    assert (held | known(layout, mesh, shape)).all(), "an element has no holder"
    return whole


def paired(xs: Blocks, ys: Blocks, layout: Layout, mesh: Mesh) -> float:
    """<x, y> for x under a layout and y under its dual; of replicas, only the first device counts."""
    replicated = [axis for axis in mesh.axes if axis not in layout.axes]
    counted = [device for device in range(mesh.n_devices) if mesh.index(device, replicated) == 0]
    return sum(
        float(np.vdot(xs[device].astype(float), ys[device].astype(float))) for device in counted
    )


def random_blocks(
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    unit: int = 1,
    within: tuple[int, int] = (-9, 10),
) -> Blocks:
    """Whole-number blocks that a layout allows: arbitrary addends and contributions, equal copies.

    within: the least number, and the first one that is too large; unit: a factor of all of them.
    """
    drawn: dict[int, np.ndarray] = {}
    blocks = []
    for device in range(mesh.n_devices):
        there = elements(layout, mesh, shape, device, False)
        key = mesh.index(device, addend_axes(layout))
        if key not in drawn:
            drawn[key] = rng.integers(*within, there.shape).astype(float) * unit
        blocks.append(filled(drawn[key], there))
    return blocks


def assert_right(
    plan: Plan,
    rng: np.random.Generator,
    unit: int = 1,
    ends: tuple[Layout, Mesh, Layout, Mesh] | None = None,
) -> None:
    """Arbitrary addends keep their value, and <A x, y> = <x, A* y>, under the plan's ends or others."""
    src, here, dst, there = ends or (plan.src, plan.src_mesh, plan.dst, plan.dst_mesh)
    x, y = (random_blocks(*end, plan.shape, rng, unit) for end in ((src, here), (dst.dual, there)))
    moved = reference.run(plan, x)
    pulled = reference.pullback(plan, x, y)
    value = gather(x, src, here, plan.shape)
    assert np.array_equal(gather(moved, dst, there, plan.shape), value)
    assert paired(moved, y, dst, there) == paired(x, pulled, src, here)


def block_index(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...], device: int
) -> tuple[np.ndarray, ...]:
    """numpy index of a device's block in the global array."""
    dims = layout.resolved(len(shape)).dims
    rows = [owned_rows(dim, n, mesh, device) for dim, n in zip(dims, shape, strict=True)]
    return np.ix_(*(np.array(r, int) for r in rows))


def foreign_elements(step: Step, before: Sharding) -> list[int]:
    """For every device, the number of other devices' elements in its block after a step.

    Device d starts with the bit 2**d everywhere, so the bits of a result name the devices it came from.
    """
    devices = range(before.mesh.n_devices)
    marked = [np.full(before.local_shape(d), 2**d, np.int64) for d in devices]
    return [
        sum(int(np.count_nonzero(block >> other & 1)) for other in devices if other != device)
        for device, block in enumerate(step.run(marked, before))
    ]
