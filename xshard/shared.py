"""What the blocks of two meshes share, and so the bound on what must move between them.

Decides when devices hold the same blocks, and the fewest elements that must reach the busiest
one. Knows no plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xshard.ownership import common
from xshard.sharding import Sharding
from xshard.steps.base import REDUCERS


def shared_elements(source: Sharding, target: Sharding) -> NDArray[np.int64]:
    """(devices of the source, devices of the target): elements of both blocks. Normal forms."""
    shared = np.ones((source.mesh.n_devices, target.mesh.n_devices), np.int64)
    for d in range(len(source.shape)):
        table = np.array(
            [[sum(s.length for s in common(a, b)) for b in target.holders(d)] for a in source.owners(d)]
        )
        rows, columns = (
            [s.dim_device(d, device) for device in range(s.mesh.n_devices)] for s in (source, target)
        )
        shared *= table[np.ix_(rows, columns)]
    return shared


def have_same_blocks(a: Sharding, b: Sharding, places: Sequence[int] | None = None) -> bool:
    """Whether every device holds the same rows, and is the same addend, under both; meshes may differ.

    places: for every device of `b`, in its order, its place in the mesh of `a`.
    """
    if a.shape != b.shape or a.mesh.n_devices != b.mesh.n_devices or _reduced(a) != _reduced(b):
        return False
    places = range(b.mesh.n_devices) if places is None else places
    return all(_block_of(a, i) == _block_of(b, j) for j, i in enumerate(places))


def received_elements(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> int:
    """Fewest elements that the busiest device must receive, whatever the plan. Normal forms.

    What a device's new block holds beyond its old one; along a new sum, where any device may
    contribute an element, the mean. Of n addends, more than one, no device has the total before
    it receives; an element that ends in m blocks takes n-1 + m-1 messages, one more where the
    devices are disjoint, of which the busiest device receives at least the mean.
    """
    positions = {device: at for at, device in enumerate(src_devices)}
    shared = shared_elements(source, target)
    needed = np.array([math.prod(target.local_shape(d)) for d in range(target.mesh.n_devices)], np.int64)
    held = np.array([shared[positions[d], j] if d in positions else 0 for j, d in enumerate(dst_devices)])
    addends = source.mesh.size(*source.layout.tagged(*REDUCERS))
    sums, disjoint = target.layout.tagged(*REDUCERS), not set(positions) & set(dst_devices)
    if addends > 1 and sums and not disjoint:
        return 0  # an addend may stay where it is and be one of the new sum
    if addends > 1:
        held = np.zeros_like(held)
    groups = np.array(
        [target.mesh.group(d, sums) for d in range(len(needed)) if not target.mesh.index(d, sums)]
    )
    lacking = np.maximum(needed[groups[:, 0]] - held[groups].sum(axis=1), 0)
    bound = -(-int(lacking.max()) // target.mesh.size(*sums))
    if addends > 1:
        cut = [a for dim in target.layout.dims for a in dim.axes]
        copies = target.mesh.n_devices // target.mesh.size(*cut, *sums)
        messages = math.prod(source.shape) * (addends + copies - (1 if disjoint else 2))
        bound = max(bound, -(-messages // len({*src_devices, *dst_devices})))
    return bound


def _block_of(sharding: Sharding, device: int) -> tuple[object, ...]:
    """Which addend a device holds, and which rows of it."""
    sums = sorted(sharding.normal.tagged(*REDUCERS), key=sharding.mesh.position)
    rows = (sharding.held(d, device) for d in range(len(sharding.shape)))
    return sharding.mesh.index(device, sums), *rows


def _reduced(sharding: Sharding) -> tuple[str, ...]:
    """The kinds of addends that it holds."""
    return tuple(kind for kind, _ in sharding.normal.tags if kind != "copy")
