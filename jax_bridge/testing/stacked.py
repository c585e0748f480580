"""One device's function on all devices of a mesh, by `shard_map`, and the traffic of the program.

Arrays begin with a dim per mesh axis, of length 1 along an axis that the layout does not name:
`shard_map` treats it as invariant. Uneven blocks are padded to the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from xshard import Mesh, Sharding
from xshard.layout.partition import ceil_div
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block, Blocks


class DeviceProgram:
    """One device's function, compiled for all devices of a mesh, with its arguments there.

    Args:
        function: Takes one device's blocks and returns a pytree of blocks.
        mesh: The mesh.
        inputs: The blocks of every array on all devices, and its sharding.
        outputs: The sharding of every result, in a pytree with as many leaves.
        mode: As of `Question`.
        fill: A number for the padding of inputs. Unless it is zero, padding of results has to be
            zero.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        inputs: Sequence[tuple[Blocks, Sharding]],
        outputs: Any,
        mode: str,
        fill: float = 0,
    ) -> None:
        self.mesh = mesh
        self.outputs, self.output_tree = jax.tree.flatten(outputs)
        self.fill = fill
        self.devices = _devices_across_processes(mesh.n_devices)
        on_axes = np.array(self.devices).reshape(mesh.sizes)
        self.jax_mesh = JaxMesh(on_axes, mesh.axes)
        program: Any
        as_array: Any
        if mode == "pmap":
            self.n_leading_dims = 1  # results are [devices, *block]; else [*mesh axes, *block]
            axis = mesh.long_axes[0] if mesh.long_axes else "alone"
            program = jax.pmap(function, axis_name=axis, devices=self.devices)
            as_array = padded
        else:
            self.n_leading_dims = len(mesh.axes)
            on_devices = jax.shard_map(
                _with_leading_dims(function, self.n_leading_dims),
                mesh=self.jax_mesh,
                in_specs=tuple(spec(sharding) for _, sharding in inputs),
                out_specs=list(map(spec, self.outputs)),
                check_vma=mode == "vma",
            )
            program = jax.jit(on_devices)
            as_array = partial(stacked, mesh=self.jax_mesh)
        self.arrays = [as_array(blocks, sharding, fill=fill) for blocks, sharding in inputs]
        self.compiled = program.lower(*self.arrays).compile()

    def __call__(self) -> Any:
        """Run it to the end."""
        return jax.block_until_ready(self.compiled(*self.arrays))

    def blocks(self, results: Any) -> Any:
        """Return every output of a run as a block per device, None on devices of other processes.

        Outputs are in the pytree of their shardings.

        Raises:
            FunctionError: A plan leaves something in the padding of a result.
        """
        blocks_of_outputs = []
        for x, sharding in zip(jax.tree.leaves(results), self.outputs, strict=True):
            padded_shape = x.shape[self.n_leading_dims :]
            blocks = tuple(unstacked(x, padded_shape, sharding, self.devices))
            if self.fill:
                _check_padding_is_zero(x, blocks, sharding)
            blocks_of_outputs.append(blocks)
        return jax.tree.unflatten(self.output_tree, blocks_of_outputs)

    @property
    def received_bytes(self) -> int | None:
        """Bytes that the busiest device receives in a run; None where it cannot be read."""
        if self.devices[0].platform != "cpu":
            return None  # programs of GPUs have collectives in halves
        return received_bytes(self.compiled.as_text(), self.mesh.n_devices)


def _devices_across_processes(n_devices: int) -> list[jax.Device]:
    """Return devices of the processes in turn, so that some mesh axis connects processes."""
    by_process = map(jax.local_devices, range(jax.process_count()))
    in_turn = chain.from_iterable(zip(*by_process, strict=True))
    return list(in_turn)[:n_devices]


def _with_leading_dims(function: Callable[..., Any], n_axes: int) -> Callable[..., Any]:
    """Return a function of blocks as one of blocks that begin with a dim of 1 per mesh axis."""
    leading = (1,) * n_axes

    def one_device(*parts: jax.Array) -> list[jax.Array]:
        blocks = [x.reshape(x.shape[n_axes:]) for x in parts]
        results = jax.tree.leaves(function(*blocks))
        return [y.reshape(leading + y.shape) for y in results]

    return one_device


def _check_padding_is_zero(x: jax.Array, blocks: Sequence[Any], sharding: Sharding) -> None:
    """Raise FunctionError if an array has numbers that are not zero outside of its blocks."""
    in_blocks = sum(np.count_nonzero(block) for block in blocks if block is not None)
    with_padding = sum(np.count_nonzero(shard.data) for shard in x.addressable_shards)
    if in_blocks != with_padding:
        raise FunctionError(f"the padding of a block is not zero under '{sharding.layout}'")


# ---- blocks and arrays


def spec(sharding: Sharding) -> PartitionSpec:
    """Return the spec of `shard_map` for the leading dims of blocks under the layout."""
    entries = [axis if axis in sharding.layout.axes else None for axis in sharding.mesh.axes]
    return PartitionSpec(*entries)


def stacked(blocks: Blocks, sharding: Sharding, mesh: JaxMesh, fill: float = 0) -> jax.Array:
    """Put the block of each device into one array, with a leading dim for each mesh axis.

    8 blocks [3, c] on a mesh of 2 x 4, under a layout that names the second axis only, make an
    array [1, 4, 3, c]: along the first axis blocks are equal.

    Args:
        blocks: The block of every device.
        sharding: Their sharding.
        mesh: JAX's mesh with the same axes.
        fill: The padding of blocks that are smaller than the largest.
    """
    by_device = padded(blocks, sharding, fill)  # [devices, *block]
    by_axis = by_device.reshape(*sharding.mesh.sizes, *by_device.shape[1:])
    # Along an axis that the layout does not name all blocks are equal: the first one is enough.
    slices = [slice(None if axis in sharding.layout.axes else 1) for axis in sharding.mesh.axes]
    distinct_blocks = by_axis[tuple(slices)]
    on_mesh = NamedSharding(mesh, spec(sharding))
    return jax.make_array_from_callback(distinct_blocks.shape, on_mesh, distinct_blocks.__getitem__)


def unstacked(
    array: jax.Array, shape: tuple[int, ...], sharding: Sharding, devices: Sequence[jax.Device]
) -> list[Any]:
    """Split a result into the block of each device, None on devices of other processes.

    Args:
        array: The result.
        shape: The shape of a block as the program returns it, padded to the largest.
        sharding: The sharding that the result should have.
        devices: The devices, in the mesh's order.
    """
    blocks: list[Any] = [None] * len(devices)
    for shard in array.addressable_shards:
        device = devices.index(shard.device)  # in the mesh
        block = np.asarray(shard.data).reshape(shape)
        # Of another shape it is a mistake of the user's function: it is returned with what may be
        # padding, for the caller to complain of.
        if shape == sharding.max_local_shape:
            block = _without_padding(block, sharding, device)
        blocks[device] = block
    return blocks


def padded(blocks: Blocks, sharding: Sharding, fill: float = 0) -> NDArray:
    """Return one array `[device, *largest block]` of all blocks, padded with `fill`."""
    dtype = blocks[0].dtype
    if np.isnan(fill) and not jnp.issubdtype(dtype, jnp.inexact):
        fill = 1  # integers have no NaN
    result = np.full((len(blocks), *sharding.max_local_shape), fill, dtype)
    for device, block in enumerate(blocks):
        result[device, ...][tuple(map(slice, block.shape))] = block
    return result


def unpadded(blocks: Iterable[NDArray], sharding: Sharding) -> list[Block]:
    """Return the blocks of all devices without their padding."""
    return [_without_padding(block, sharding, device) for device, block in enumerate(blocks)]


def _without_padding(block: NDArray, sharding: Sharding, device: int) -> Block:
    """Cut the padding off the end of a device's block."""
    return block[tuple(map(slice, sharding.local_shape(device)))]


# ---- the traffic of a compiled program


_COLLECTIVE = re.compile(
    r"= (?P<result>.+?) (?P<op>all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)"
    r"(?P<half>-start)?\("
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
    """Count the bytes that the busiest device receives in a compiled program.

    Args:
        text: The program, as from `compiled.as_text()`.
        n_devices: The number of its devices.

    Raises:
        ValueError: A collective cannot be read.

    Examples:
        >>> received_bytes(
        ...     "%x = f32[8]{0} all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}", 4
        ... )
        16
    """
    of_devices = np.zeros(n_devices, np.int64)
    for collective in collectives(text, n_devices):
        of_devices += np.array(collective.received)
    return int(of_devices.max())


def collectives(text: str, n_devices: int) -> Iterator[HloCollective]:
    """Read the collectives in the text of a compiled program (HLO).

    A line is an instruction, such as
    `%x = f32[8]{0} all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}`: the type of the
    result, the collective, and the groups of devices within which it runs. Collectives that bring
    nothing to any device, as in groups of one, are left out.

    Args:
        text: The program, as from `compiled.as_text()`.
        n_devices: The number of its devices.

    Yields:
        Each with the bytes that every device receives.

    Raises:
        ValueError: A collective is asynchronous, or names its devices in an unknown way.
    """
    for line in text.splitlines():
        instruction = _COLLECTIVE.search(line)
        if instruction is None:
            continue
        if instruction["half"]:
            # An asynchronous collective (`all-gather-start`), which GPUs have: its result also
            # holds the operand, so that its size is not what is received.
            raise ValueError(f"cannot count half a collective: {line.strip()}")
        result = _size(instruction["result"])
        pairs_match = _PAIRS.search(line)
        groups_match = _GROUPS.search(line)
        received = [0] * n_devices
        if pairs_match:
            for src, dst in re.findall(r"(\d+),(\d+)", pairs_match["pairs"]):
                if src != dst:
                    received[int(dst)] += result.elements * result.itemsize
        elif groups_match:
            elements = _received_elements(
                instruction["op"], result.elements, _group_size(groups_match)
            )
            received = [elements * result.itemsize] * n_devices
        else:
            raise ValueError(f"cannot read this collective: {line.strip()}")
        if any(received):
            yield HloCollective(instruction["op"], tuple(received))


def _received_elements(op: str, result: int, n: int) -> int:
    """Return how many elements each of `n` devices receives, by the ring algorithm of a collective."""
    if op == "all-reduce":
        return ceil_div(2 * result * (n - 1), n)
    if op == "reduce-scatter":
        return result * (n - 1)  # the operand is `n` results
    return result * (n - 1) // n  # all-gather, all-to-all


def _group_size(groups: re.Match[str]) -> int:
    """Return how many devices are in a group of a collective, in any of HLO's three spellings.

    `{{0,1},{2,3}}`, `[2,2]<=[4]` and `mesh['x'=2,'y'=2] {'y'}` are all groups of 2.
    """
    if groups["mesh"] is None:
        if groups["size"]:
            return int(groups["size"])
        return len(groups["first"].split(","))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups["mesh"]))
    size = 1
    for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups["axes"]):
        size *= int(part if part else sizes[axis])
    return size


class _Size(NamedTuple):
    """Elements of arrays of one dtype, and the bytes of an element."""

    elements: int
    itemsize: int


def _size(shapes: str) -> _Size:
    """Read the result of a collective, one or several arrays: `f32[4,2]{1,0}` -> 8 of 4 bytes."""
    elements = 0
    itemsizes = set()
    for array in _ARRAY.finditer(shapes):
        bits = array["bits"]  # `pred` has none: a byte
        itemsizes.add(int(bits) // 8 if bits else 1)
        lengths = [int(length) for length in array["shape"].split(",") if length]
        elements += math.prod(lengths)
    if len(itemsizes) != 1:
        raise ValueError(f"cannot read the result '{shapes}' of a collective")
    return _Size(elements, itemsizes.pop())
