"""One device's function on all devices of a mesh, by `shard_map`, and the traffic of the compiled program.
Arrays begin with a dim per mesh axis, of length 1 along an axis that the layout does not name: `shard_map`
treats it as invariant. Uneven blocks are padded to the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from xshard import Mesh, Sharding
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block, Blocks


class DeviceProgram:
    """One device's function, compiled for all devices of a mesh, and its arguments there: the blocks of every
    array, and their sharding. mode: see `Question`. fill: a number for the padding of inputs; unless it is
    zero, padding of results has to be zero.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[jax.Array]],
        mesh: Mesh,
        inputs: Sequence[tuple[Blocks, Sharding]],
        outputs: Sequence[Sharding],
        mode: str,
        fill: float = 0,
    ) -> None:
        self.mesh = mesh
        self.outputs = outputs
        self.fill = fill
        self.lead = 1 if mode == "pmap" else len(mesh.axes)
        # Devices of the processes in turn, so that some axis connects processes.
        by_process = (jax.local_devices(process) for process in range(jax.process_count()))
        self.devices = [d for turn in zip(*by_process, strict=True) for d in turn][: mesh.n_devices]
        self.jax_mesh = JaxMesh(np.array(self.devices).reshape(mesh.sizes), mesh.axes)

        def one_device(*parts: jax.Array) -> list[jax.Array]:  # of `shard_map`, with leading dims
            ys = function(*(x.reshape(x.shape[len(mesh.axes) :]) for x in parts))
            return [y.reshape(*[1] * len(mesh.axes), *y.shape) for y in ys]

        program: Any
        if mode == "pmap":
            program = jax.pmap(
                function, axis_name=(*mesh.long_axes, "alone")[0], devices=self.devices
            )
            self.arrays: list[Any] = [padded(*each, fill) for each in inputs]
        else:
            in_specs = tuple(spec(sharding) for _, sharding in inputs)
            out_specs = list(map(spec, outputs))
            specs: dict[str, Any] = {
                "in_specs": in_specs,
                "out_specs": out_specs,
                "check_vma": mode == "vma",
            }
            program = jax.jit(jax.shard_map(one_device, mesh=self.jax_mesh, **specs))
            self.arrays = [stacked(*each, self.jax_mesh, fill) for each in inputs]
        self.compiled = program.lower(*self.arrays).compile()

    def __call__(self) -> Sequence[jax.Array]:
        """Run it to the end."""
        return jax.block_until_ready(self.compiled(*self.arrays))

    def blocks(self, results: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        """Results of a run -> a block per device of every output, None on devices of other processes. Raises
        FunctionError if a plan leaves something in the padding of a result.
        """
        every = []
        for x, sharding in zip(results, self.outputs, strict=True):
            blocks = tuple(unstacked(x, x.shape[self.lead :], sharding, self.devices))
            own = sum(np.count_nonzero(block) for block in blocks if block is not None)
            if self.fill and own != sum(
                np.count_nonzero(shard.data) for shard in x.addressable_shards
            ):
                raise FunctionError(f"the padding of a block is not zero under '{sharding.layout}'")
            every.append(blocks)
        return every

    @property
    def received_bytes(self) -> int | None:
        """Bytes that the busiest device receives in a run; None where programs have collectives in halves."""
        if self.devices[0].platform != "cpu":
            return None
        return received_bytes(self.compiled.as_text(), self.mesh.n_devices)


def spec(sharding: Sharding) -> PartitionSpec:
    """The leading dims of blocks under the layout, as specs of `shard_map`."""
    return PartitionSpec(*(a if a in sharding.layout.axes else None for a in sharding.mesh.axes))


def stacked(blocks: Blocks, sharding: Sharding, mesh: JaxMesh, fill: float = 0) -> jax.Array:
    """One block per device -> one array on the devices of `mesh`."""
    rows = padded(blocks, sharding, fill)
    rows = rows.reshape(*sharding.mesh.sizes, *rows.shape[1:])
    named = (a in sharding.layout.axes for a in sharding.mesh.axes)
    rows = rows[tuple(np.s_[:] if varies else np.s_[:1] for varies in named)]
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, spec(sharding)), rows.__getitem__
    )


def unstacked(
    array: jax.Array, shape: Sequence[int], sharding: Sharding, devices: Sequence[jax.Device]
) -> list[Any]:
    """The result, a block of `shape` per device -> the blocks, None on devices of other processes."""
    held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    empty = np.zeros(shape, array.dtype)
    blocks = [held.get(device, empty).reshape(empty.shape) for device in devices]
    if empty.shape == sharding.max_local_shape:
        blocks = unpadded(blocks, sharding)
    return [block if d in held else None for block, d in zip(blocks, devices, strict=True)]


def padded(blocks: Blocks, sharding: Sharding, fill: float = 0) -> NDArray:
    """One block per device -> one array [device, *largest block], padded with `fill`, integers with 1."""
    if np.isnan(fill) and not jnp.issubdtype(blocks[0].dtype, jnp.inexact):
        fill = 1
    result = np.full((len(blocks), *sharding.max_local_shape), fill, blocks[0].dtype)
    for device, block in enumerate(blocks):
        result[device, ...][tuple(map(slice, block.shape))] = block
    return result


def unpadded(blocks: Iterable[NDArray], sharding: Sharding) -> list[Block]:
    """One padded block per device -> the blocks."""
    return [
        block[tuple(map(slice, sharding.local_shape(device)))]
        for device, block in enumerate(blocks)
    ]


# (elements of the result, group size n) -> elements that a device receives.
_RECEIVED: dict[str, Callable[[int, int], int]] = {
    "all-gather": lambda result, n: result * (n - 1) // n,
    "all-reduce": lambda result, n: -(-2 * result * (n - 1) // n),
    "all-to-all": lambda result, n: result * (n - 1) // n,
    "reduce-scatter": lambda result, n: result * (n - 1),
}
_COLLECTIVE = re.compile(
    rf"= (?P<result>.+?) (?P<op>{'|'.join(_RECEIVED)}|collective-permute)(?P<half>-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
# Three spellings: all groups, their shape, or axes (whole or parts, `'x':(2)4`) of a mesh that HLO made.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\]<="
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\(\S*\))? ?\{(?P<axes>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")


class HloCollective(NamedTuple):
    """One collective of a program: HLO's name, and the bytes that every device receives."""

    op: str
    received: tuple[int, ...]


def received_bytes(text: str, n_devices: int) -> int:
    """Bytes that the busiest device receives; text: as from `compiled.as_text()`. Raises ValueError.

    >>> received_bytes(
    ...     "%x = f32[8]{0} all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}", 4
    ... )
    16
    """
    received = [collective.received for collective in collectives(text, n_devices)]
    return max(map(sum, zip(*received, strict=True)), default=0)


def collectives(text: str, n_devices: int) -> Iterator[HloCollective]:
    """Every collective that brings something to a device. Raises as `received_bytes` does."""
    for line in text.splitlines():
        if (match := _COLLECTIVE.search(line)) is None:
            continue
        if match["half"]:  # its result is not what it receives; XLA:CPU has none
            raise ValueError(f"cannot count half a collective: {line.strip()}")
        elements, itemsize = _size(match["result"])
        received = [0] * n_devices
        if pairs := _PAIRS.search(line):
            for src, dst in re.findall(r"(\d+),(\d+)", pairs["pairs"]):
                received[int(dst)] += elements * itemsize * (src != dst)
        elif groups := _GROUPS.search(line):
            received = [
                _RECEIVED[match["op"]](elements, _group_size(groups)) * itemsize
            ] * n_devices
        else:
            raise ValueError(f"cannot read this collective: {line.strip()}")
        if any(received):
            yield HloCollective(match["op"], tuple(received))


def _group_size(groups: re.Match[str]) -> int:
    if groups["mesh"] is None:
        return int(groups["size"] or len(groups["first"].split(",")))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups["mesh"]))
    along = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups["axes"])
    return math.prod(int(part or sizes[axis]) for axis, part in along)


def _size(shapes: str) -> tuple[int, int]:
    """Elements of one or several arrays of one dtype, and the bytes of each."""
    arrays = list(_ARRAY.finditer(shapes))
    itemsizes = {int(array["bits"] or 8) // 8 for array in arrays}
    if len(itemsizes) != 1:
        raise ValueError(f"cannot read the result '{shapes}' of a collective")
    return sum(
        math.prod(map(int, filter(None, a["shape"].split(",")))) for a in arrays
    ), itemsizes.pop()
