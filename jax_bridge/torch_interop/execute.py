"""Carrying out the plan of a hand-over, on the side that the route names.

Decides on what mesh JAX moves blocks that stand on torch's, and how its arrays get another sharding
without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from torch import Tensor

from jax_bridge.arrays.order import remember
from jax_bridge.arrays.partition_spec import storage_layout, to_named_sharding
from jax_bridge.arrays.reshard import reshard
from torch_bridge.between import redistribute_between
from xshard import Plan


def by_torch(block: Tensor, made: Plan) -> Tensor:
    """A block before the plan -> the block after it; the plan's devices are ranks."""
    moved = redistribute_between(block.detach(), made)
    assert moved is not None  # routes through torch are of the whole world
    return moved


def by_jax(blocks: Sequence[jax.Array], made: Plan, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """This process's blocks before the plan -> its blocks after it. devices: all of the plan's mesh."""
    assert made.transfer is None  # a route between meshes that do not fit each other is torch's
    mesh = plan_mesh(made, devices)
    start = to_named_sharding(storage_layout(made.source.layout), mesh)
    array = remember(assembled(blocks, made.shape, start), made.source)
    return blocks_of(reshard(array, made, mesh), devices)


def plan_mesh(made: Plan, devices: Sequence[jax.Device]) -> JaxMesh:
    """The mesh of a plan, of Explicit axes: on those a `jax.Array` can be addends or copies."""
    grid = np.array(devices).reshape(made.mesh.sizes)
    return JaxMesh(grid, made.mesh.axes, axis_types=(AxisType.Explicit,) * grid.ndim)


def assembled(blocks: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """This process's blocks -> the array, over the same memory."""
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


def blocks_of(array: jax.Array, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """The blocks of an array on those of the devices that are this process's, in their order."""
    held = {shard.device: shard.data for shard in array.addressable_shards}
    return [held[device] for device in devices if device in held]
