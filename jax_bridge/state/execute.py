"""A tree plan as JAX executes it: all messages of a bucket are one program on the devices of both meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.stored import remember
from jax_bridge.lower.exchange import AXIS, NewBlock, SentPart, transfer
from jax_bridge.lower.transports import PERMUTE, RAGGED
from jax_bridge.specs import storage_sharding
from xshard import Mesh, Plan
from xshard.layout.runs import Segment, merged_segments, row_numbers
from xshard.plans.plan import Stage
from xshard.plans.transfer import Transfer
from xshard.state.relations import ArrayPart
from xshard.state.tree_plan import ArrayPlan, PartMove, PartSharding, part_of
from xshard.steps import Transpose
from xshard.steps.exchange.messages import Message, rows_at

Devices = Sequence[jax.Device]
Numbered = Devices | Mapping[int, jax.Device]  # devices by their numbers in a plan
Blocks = Mapping[jax.Device, jax.Array]  # on this process's devices


class LocalBlocks(NamedTuple):
    """The local blocks of an array, with their dtype, and their shape in a program."""

    blocks: Blocks
    dtype: Any
    shape: tuple[int, ...] = ()


def execute(
    arrays: Mapping[str, LocalBlocks], plans: Sequence[ArrayPlan], devices: Numbered
) -> list[Blocks]:
    """Source arrays by name -> the local blocks of every array of a bucket."""
    bucket = [
        replace(array, moves=tuple(_runnable(move, array) for move in array.moves))
        for array in plans
    ]
    first = bucket[0].moves[0].plan
    numbers = sorted({*first.src_devices, *first.dst_devices})
    sources: list[LocalBlocks] = []
    wanted: list[NewBlock] = []
    for array in bucket:
        taken = []
        for move in array.moves:
            x = arrays[move.name]
            before = _before_and_after(move)[0]
            shape = (move.transfer.source if before else move.src.whole).local_shape(0)
            blocks = _run_stages(
                x.blocks, move.plan, before, [devices[n] for n in first.src_devices]
            )
            taken.append(
                SentPart(len(sources), _with_added_dim(move.src, shape), *_messages(move, numbers))
            )
            sources.append(LocalBlocks(blocks, jnp.dtype(x.dtype), shape))
        wanted.append(_wanted(array, tuple(taken)))
    program = tuple(devices[n] for n in numbers), [devices[n] for n in first.src_devices]
    arrived = _exchange(sources, tuple(wanted), *program)
    dst_devices = [devices[n] for n in first.dst_devices]
    pairs = zip(arrived, (array.moves[0] for array in bucket), strict=True)
    return [_run_stages(x, move.plan, _before_and_after(move)[1], dst_devices) for x, move in pairs]


def run_on_mesh(blocks: Blocks, plan: Plan, devices: Devices) -> Blocks:
    """Local blocks before a plan on one mesh -> local blocks after it. devices: the devices of the mesh."""
    mesh = plan_mesh(plan, devices)
    sharding = storage_sharding(plan.source.layout, mesh)
    array = remember(assembled(blocks, plan.shape, plan.dtype, sharding), plan.source)
    with jax.set_mesh(mesh):
        return blocks_of(reshard(array, plan, mesh))


def plan_mesh(plan: Plan, devices: Devices) -> JaxMesh:
    """The mesh of a plan, with Explicit axes, as a `jax.Array` of addends or copies needs."""
    grid = np.array(devices).reshape(plan.mesh.sizes)
    return JaxMesh(grid, plan.mesh.axes, axis_types=(AxisType.Explicit,) * grid.ndim)


def assembled(
    blocks: Blocks, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """The array of these local blocks, in the same memory."""
    local = [blocks[device] for device in sharding.mesh.devices.flat if device in blocks]
    return jax.make_array_from_single_device_arrays(shape, sharding, local, dtype=jnp.dtype(dtype))


def blocks_of(array: Any) -> Blocks:
    """The local blocks of an array by device; none of a type."""
    shards = getattr(array, "addressable_shards", ())
    if shards and not array.size:  # JAX may hold all of an empty array on every device
        block = np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
        return {shard.device: jax.device_put(block, shard.device) for shard in shards}
    return {shard.device: shard.data for shard in shards}


def all_devices(like: jax.Device) -> list[jax.Device]:
    """All devices of this kind in the program, in the order of plans: process by process."""
    return sorted(jax.devices(like.platform), key=lambda device: (device.process_index, device.id))


def as_array_plan(plan: Plan) -> ArrayPlan:
    """The plan of one array as part of a tree plan."""
    src = part_of(plan.source, ArrayPart(""))
    dst = part_of(plan.target, ArrayPart(""))
    return ArrayPlan("", plan.target, plan.dtype, (PartMove("", src, dst, plan),))


def _runnable(move: PartMove, array: ArrayPlan) -> PartMove:
    """The move, as messages alone if JAX has no arrays for the results of its steps on one mesh."""
    plan, (before, after) = move.plan, _before_and_after(move)
    is_whole = move.src.part.dim is None and move.dst.part.dim is None and plan.dtype == array.dtype
    if not (before or after) or (
        is_whole and move.transfer.source.is_even and move.transfer.target.is_even
    ):
        return move
    source = plan.source
    target = plan.target.in_order(plan.src.names)
    source = source.with_layout(source.normal)
    target = target.with_layout(target.normal)
    turned = (step for step in plan.steps if isinstance(step, Transpose))
    steps = Transfer(source, target, plan.src_devices, plan.dst_devices, plan.profile), *turned
    return move._replace(plan=replace(plan, steps=steps, split=()))


def _before_and_after(move: PartMove) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The stages before the transfer and after it; none after it if all only transpose."""
    stages = move.plan.stages
    i = move.plan.steps.index(move.transfer)
    after = stages[i + 1 :]
    return stages[:i], () if all(isinstance(stage.step, Transpose) for stage in after) else after


def _run_stages(blocks: Blocks, plan: Plan, stages: tuple[Stage, ...], devices: Devices) -> Blocks:
    """The blocks after these stages on one mesh."""
    if not stages or not any(map(_is_here, devices)):
        return blocks
    part = plan.part(stages)
    mesh = Mesh(dict(zip(part.mesh.axes, part.mesh.sizes, strict=True)))  # sub-axes become axes
    return run_on_mesh(blocks, replace(part, mesh=mesh), devices)


def _wanted(array: ArrayPlan, taken: tuple[SentPart, ...]) -> NewBlock:
    move = array.moves[0]
    names = move.plan.src.names
    block = array.sharding.local_shape(0)
    order = tuple(map(names.index, move.plan.dst.names))
    if _before_and_after(move)[1]:  # which transposes
        order = tuple(range(len(names)))
        block = move.transfer.target.local_shape(0)
    transposed = _with_added_dim(move.dst, block)
    shape = tuple(transposed[order.index(i)] for i in range(len(order)))
    return NewBlock(shape, order, block, (move.plan.dtype, array.dtype), taken)


def _with_added_dim(sharded: PartSharding, block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a block, with the dim that stacking adds."""
    return sharded.part.part_shape(block) if sharded.part.adds else block


def _messages(move: PartMove, numbers: Sequence[int]) -> tuple[tuple[Message, ...], str | None]:
    """The messages between blocks of whole arrays, and the operation that combines them."""
    step = move.transfer
    messages = []
    dst_dims = [move.plan.dst.names.index(name) for name in move.plan.src.names]  # by source dim
    for src, dst, box, _ in _all_in_place(step) if step.is_in_place else step.messages:
        dims = list(box)
        for sharded, device, side in ((move.src, src, 0), (move.dst, dst, 1)):
            dim = sharded.part.dim
            if sharded.rows and dim is not None:
                d = dim if side == 0 else dst_dims.index(dim)
                rows = [rows_at(dims[d], 0), rows_at(dims[d], 1)]
                rows[side] = row_numbers(sharded.rows[sharded.whole.dim_device(dim, device)])[
                    rows[side]
                ]
                dims[d] = merged_segments(np.stack([*rows, np.ones_like(rows[0])], axis=1))
        devices = numbers.index(step.src_devices[src]), numbers.index(step.dst_devices[dst])
        messages.append(Message(*devices, tuple(dims)))
    return tuple(message for message in messages if message.size), step.op


def _all_in_place(step: Transfer) -> Iterator[Message]:
    for dst, device in enumerate(step.dst_devices):
        box = tuple((Segment(0, 0, n),) for n in step.target.local_shape(dst))
        yield Message(step.src_devices.index(device), dst, box)


def _exchange(
    sources: Sequence[LocalBlocks], wanted: tuple[NewBlock, ...], devices: Devices, senders: Devices
) -> list[Blocks]:
    """The local blocks that arrive. devices: all of both meshes; senders: all of the first."""
    if not any(map(_is_here, devices)):
        return [{} for _ in wanted]
    idle = [device for device in devices if device not in senders]
    arrays = []
    for source in sources:
        blocks = source.blocks
        if any(map(_is_here, idle)):
            shape, sharding = _side_by_side(source.shape, idle)
            blocks = {**blocks, **blocks_of(jnp.zeros(shape, source.dtype, device=sharding))}
        shape, sharding = _side_by_side(source.shape, devices)
        arrays.append(assembled(blocks, shape, source.dtype, sharding))
    mesh = JaxMesh(np.array(devices), (AXIS,))
    run = _program(tuple(source.shape for source in sources), wanted, mesh)
    with jax.set_mesh(mesh):  # the caller may have set another
        return [blocks_of(y) for y in run(*arrays)]


@lru_cache(maxsize=1024)
def _program(
    shapes: tuple[tuple[int, ...], ...], wanted: tuple[NewBlock, ...], mesh: JaxMesh
) -> Callable[..., list[jax.Array]]:
    transport = PERMUTE if mesh.devices[0].platform == "cpu" else RAGGED
    specs: Any = {
        "in_specs": tuple(map(_spec, shapes)),
        "out_specs": [_spec(new.block) for new in wanted],
    }

    def run(*blocks: jax.Array) -> list[jax.Array]:
        return list(transfer(blocks, wanted, mesh.size, transport))

    # Without out_shardings XLA would replicate empty arrays.
    out_shardings = [NamedSharding(mesh, spec) for spec in specs["out_specs"]]
    return jax.jit(
        jax.shard_map(run, mesh=mesh, **specs, check_vma=False), out_shardings=out_shardings
    )


def _side_by_side(
    block: tuple[int, ...], devices: Devices
) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape and the sharding of one array with a block of this shape on every device."""
    shape = (len(devices) * block[0], *block[1:]) if block else ()
    return shape, NamedSharding(JaxMesh(np.array(devices), (AXIS,)), _spec(block))


def _spec(block: tuple[int, ...]) -> PartitionSpec:
    return (
        PartitionSpec(AXIS) if block else PartitionSpec()
    )  # scalars differ by device, unknown to JAX


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()
