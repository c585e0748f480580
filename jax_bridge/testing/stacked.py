"""The blocks of all devices as one array of JAX, for `shard_map` to hand out: a leading dim per mesh axis.

Decides the array's specs. Along an axis that the layout does not name all blocks are equal: `shard_map` gets
one, without a spec, and treats it as invariant, also on the way out. Uneven blocks are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from xshard import Mesh, Sharding
from xshard.steps.base import Block, Blocks


def spec(sharding: Sharding) -> PartitionSpec:
    """The leading dims of blocks under the layout, as specs of `shard_map`."""
    return PartitionSpec(*(a if a in sharding.layout.axes else None for a in sharding.mesh.axes))


def stacked(blocks: Blocks, sharding: Sharding, mesh: JaxMesh) -> jax.Array:
    """One block per device -> one array on the devices of `mesh`."""
    rows = padded(blocks, sharding)
    rows = rows.reshape(*sharding.mesh.sizes, *rows.shape[1:])
    named = (a in sharding.layout.axes for a in sharding.mesh.axes)
    rows = rows[tuple(np.s_[:] if varies else np.s_[:1] for varies in named)]
    return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, spec(sharding)), rows.__getitem__)


def local(block: jax.Array, mesh: Mesh) -> jax.Array:
    """The part that `shard_map` gives to one device -> its block."""
    return block.reshape(block.shape[len(mesh.axes) :])


def lead(block: jax.Array, mesh: Mesh) -> jax.Array:
    """A device's block -> the part that it returns to `shard_map`."""
    return block.reshape(*[1] * len(mesh.axes), *block.shape)


def unstacked(
    array: jax.Array, shape: Sequence[int], sharding: Sharding, devices: Sequence[jax.Device]
) -> list[Any]:
    """The result, a block of `shape` per device -> the blocks, None on devices of other processes.

    Blocks of another shape than the layout's largest are not cut to size.
    """
    held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    empty = np.zeros(shape, array.dtype)
    blocks = [held.get(device, empty).reshape(empty.shape) for device in devices]
    if empty.shape == sharding.max_local_shape:
        blocks = unpadded(blocks, sharding)
    return [block if d in held else None for block, d in zip(blocks, devices, strict=True)]


def padded(blocks: Blocks, sharding: Sharding, fill: float = 0) -> NDArray:
    """One block per device -> one array [device, *largest block], padded with `fill`."""
    result = np.full((len(blocks), *sharding.max_local_shape), fill, blocks[0].dtype)
    for device, block in enumerate(blocks):
        result[device, ...][tuple(map(slice, block.shape))] = block
    return result


def unpadded(blocks: Iterable[NDArray], sharding: Sharding) -> list[Block]:
    """One padded block per device -> the blocks."""
    return [block[tuple(map(slice, sharding.local_shape(device)))] for device, block in enumerate(blocks)]
