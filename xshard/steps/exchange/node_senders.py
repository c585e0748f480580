"""Node-local senders: of replicas, one in the receiver's node sends, if nodes end inside of groups."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.layout import Mesh, Sharding
from xshard.layout.partition import all_owned_rows
from xshard.notation.parser import Dim
from xshard.steps.exchange.traffic import rows_in_common
from xshard.steps.traffic import Hop, Traffic

# Largest mesh for which node-local senders are considered: the choice compares all pairs of devices.
MAX_PAIRED = 512


class BlockHolders(NamedTuple):
    """The distinct blocks of a sharding and the devices that hold them.

    keys: (blocks, dims + 1), the position of every block along every dim, and its addend number.
    block_of: per device the number of its block. addends: per device its addend number.
    near: (blocks, devices), True if a device of the same node holds the block.
    """

    keys: NDArray[np.int64]
    block_of: NDArray[np.int64]
    addends: NDArray[np.int64]
    near: NDArray[np.bool_]


@lru_cache(maxsize=1024)
def block_holders(sharding: Sharding, node_devices: int) -> BlockHolders:
    """The holders of all blocks; blocks with equal shards and addend numbers are one."""
    mesh, layout = sharding.mesh, sharding.layout
    addends = _positions_along(mesh, layout.tagged("sum", "max", "min"))
    places = np.stack([*(_positions_along(mesh, dim.axes) for dim in layout.dims), addends], axis=1)
    keys, block_of = np.unique(places, axis=0, return_inverse=True)
    block_of = block_of.reshape(-1)
    nodes = np.arange(mesh.n_devices) // node_devices
    held = np.zeros((len(keys), nodes[-1] + 1), bool)
    held[block_of, nodes] = True
    return BlockHolders(keys, block_of, addends, held[:, nodes])


def needed_elements(before: Sharding, after: Sharding, node_devices: int) -> NDArray[np.int64]:
    """(blocks, devices): number of elements of each block of `before` that each device needs for `after`."""
    have = block_holders(before, node_devices)
    elements: NDArray[np.int64] = (have.keys[:, -1:] == have.addends[None]).astype(np.int64)
    for d, dim in enumerate(after.layout.dims):
        shared = _rows_in_common(before.layout.dims[d], dim, before.shape[d], before.mesh)
        elements *= shared[:, _positions_along(after.mesh, dim.axes)][have.keys[:, d]]
    return elements


@lru_cache(maxsize=4096)
def _rows_in_common(src: Dim, dst: Dim, length: int, mesh: Mesh) -> NDArray[np.int64]:
    """Number of rows of a dim that each block before (first index) shares with each block after."""
    blocks = all_owned_rows(src, length, mesh.sizes_of(src.axes))
    return rows_in_common(blocks, all_owned_rows(dst, length, mesh.sizes_of(dst.axes))).T


@lru_cache(maxsize=1024)
def _positions_along(mesh: Mesh, axes: tuple[str, ...]) -> NDArray[np.int64]:
    """Per device, its position along the axes, the first axis slowest."""
    numbers = np.arange(mesh.n_devices).reshape(mesh.sizes)
    places = np.zeros_like(numbers)
    for axis in axes:
        coords = np.arange(mesh.size(axis)).reshape([-1 if a == axis else 1 for a in mesh.axes])
        places = places * mesh.size(axis) + coords
    return places.reshape(-1)


def node_local_traffic(before: Sharding, after: Sharding, node_devices: int) -> Traffic:
    """Traffic of an exchange with node-local senders: level 0 between nodes, level 1 inside them."""
    elements, have = needed_elements(before, after, node_devices), block_holders(before, node_devices)
    wanted = elements.sum(axis=0)
    elements[have.block_of, np.arange(before.mesh.n_devices)] = 0
    arrives, hops = elements.sum(axis=0), []
    for level, table in enumerate((np.where(have.near, 0, elements), np.where(have.near, elements, 0))):
        by_device = table.sum(axis=0)
        if received := int(by_device.max()):
            nodes = np.arange(len(by_device)) // node_devices
            slack = received - int(np.bincount(nodes, by_device).max() / node_devices)
            hops.append(Hop(before.mesh.axes[0], received, int((table > 0).sum(axis=0).max()), level, slack))
    copied = 2 * int(wanted.max())
    return Traffic(int(arrives.max()), copied, tuple(hops), copied - int((wanted + arrives).max()))


@lru_cache(maxsize=1024)
def node_local_senders(before: Sharding, after: Sharding, node_devices: int) -> dict[tuple[int, int], int]:
    """(block, receiver) -> the holder in the receiver's node with the least to send, if there is one."""
    elements, have = needed_elements(before, after, node_devices), block_holders(before, node_devices)
    at_home: dict[tuple[int, int], list[int]] = {}
    for device, block in enumerate(have.block_of.tolist()):
        at_home.setdefault((block, device // node_devices), []).append(device)
    load: Counter[int] = Counter()
    chosen: dict[tuple[int, int], int] = {}
    for receiver in range(before.mesh.n_devices):
        for block in np.flatnonzero(elements[:, receiver]).tolist():
            near = at_home.get((block, receiver // node_devices), [])
            if receiver in near or not near:
                continue
            sender = min(near, key=lambda device: (load[device], device))
            load[sender] += int(elements[block, receiver])
            chosen[block, receiver] = sender
    return chosen
