"""One device's function on all devices of a mesh, by `shard_map`: arrays begin with a dim per mesh axis.

Along an axis that the layout does not name all blocks are equal: `shard_map` gets one, without a spec, and
treats it as invariant, also on the way out. Uneven blocks are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jax_bridge.testing.hlo import received_bytes
from xshard import Mesh, Sharding
from xshard.steps.base import Block, Blocks


class DeviceProgram:
    """One device's function, compiled for all devices of a mesh, and its arguments there.

    function: one device's blocks -> its blocks of the outputs. inputs: the blocks of every array, one per
    device, and their sharding. outputs: the shardings of the results. mode: see `Question`.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[jax.Array]],
        mesh: Mesh,
        inputs: Sequence[tuple[Blocks, Sharding]],
        outputs: Sequence[Sharding],
        mode: str,
    ) -> None:
        self.mesh, self.outputs = mesh, outputs
        self.lead = 1 if mode == "pmap" else len(mesh.axes)
        # Devices of the processes in turn, so that some axis connects processes.
        by_process = (jax.local_devices(process) for process in range(jax.process_count()))
        self.devices = [d for turn in zip(*by_process, strict=True) for d in turn][: mesh.n_devices]
        self.jax_mesh = JaxMesh(np.array(self.devices).reshape(mesh.sizes), mesh.axes)

        def one_device(*blocks: jax.Array) -> list[jax.Array]:
            return [lead(y, mesh) for y in function(*(local(block, mesh) for block in blocks))]

        program: Any
        if mode == "pmap":
            long = [a for a, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1]
            program = jax.pmap(function, axis_name=(*long, "alone")[0], devices=self.devices)
            self.arrays: list[Any] = [padded(blocks, sharding) for blocks, sharding in inputs]
        else:
            in_specs, out_specs = tuple(spec(sharding) for _, sharding in inputs), list(map(spec, outputs))
            specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": mode == "vma"}
            program = jax.jit(jax.shard_map(one_device, mesh=self.jax_mesh, **specs))
            self.arrays = [stacked(blocks, sharding, self.jax_mesh) for blocks, sharding in inputs]
        self.compiled = program.lower(*self.arrays).compile()

    def __call__(self) -> Sequence[jax.Array]:
        """Run it to the end."""
        return jax.block_until_ready(self.compiled(*self.arrays))

    def blocks(self, results: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        """Results of a run -> a block per device of every output, None on devices of other processes."""
        return [
            tuple(unstacked(x, x.shape[self.lead :], sharding, self.devices))
            for x, sharding in zip(results, self.outputs, strict=True)
        ]

    @property
    def received_bytes(self) -> int | None:
        """Bytes that the busiest device receives in a run; None where programs have collectives in halves."""
        if self.devices[0].platform != "cpu":
            return None
        return received_bytes(self.compiled.as_text(), self.mesh.n_devices)


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
