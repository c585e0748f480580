"""Arrays carried to another mesh, as a tree's plan says: the devices of both meshes run one program.

Decides what is compiled for a bucket of arrays: the steps on either mesh as `reshard` runs them, and all
messages between the meshes as one program of the devices that are in either. Knows no tree and no rules.
"""

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

from jax_bridge.arrays.order import remember
from jax_bridge.arrays.reshard import reshard
from jax_bridge.lower.transfer import AXIS, Taken, Wanted, transfer
from jax_bridge.lower.transports import PERMUTE, RAGGED
from jax_bridge.specs import storage_sharding
from xshard import Mesh, Plan
from xshard.layout.runs import Segment, merged_segments, row_numbers
from xshard.plans.plan import Stage
from xshard.plans.transfer import Transfer
from xshard.state import ArrayPlan, Side
from xshard.state.parts import CutPart, part_of
from xshard.state.tree_plan import PartMove
from xshard.steps import Transpose
from xshard.steps.exchange.messages import Message, rows_at

Numbered = Sequence[jax.Device] | Mapping[int, jax.Device]  # devices by their numbers in a plan
Blocks = Mapping[jax.Device, jax.Array]  # those of this process's devices


class Held(NamedTuple):
    """This process's blocks of an array, the dtype of all, and their shape in a program."""

    blocks: Blocks
    dtype: Any
    shape: tuple[int, ...] = ()


def carried(arrays: Mapping[str, Held], bucket: Sequence[ArrayPlan], devices: Numbered) -> list[Blocks]:
    """Arrays by name -> this process's blocks of every array of a bucket.

    All processes with a device in either mesh call it.
    """
    bucket = [replace(new, moves=tuple(_runnable(move, new) for move in new.moves)) for new in bucket]
    first = bucket[0].moves[0].plan
    numbers = sorted({*first.src_devices, *first.dst_devices})
    given: list[Held] = []
    wanted: list[Wanted] = []
    for new in bucket:
        taken = []
        for move in new.moves:
            x, stages = arrays[move.name], _ends(move)[0]
            at = move.transfer.source if stages else move.src.whole
            blocks = _stepped(x.blocks, move.plan, stages, [devices[n] for n in first.src_devices])
            taken.append(Taken(len(given), _seen(move.src, at.local_shape(0)), *_messages(move, numbers)))
            given.append(Held(blocks, jnp.dtype(x.dtype), at.local_shape(0)))
        wanted.append(_wanted(new, tuple(taken)))
    program = tuple(devices[n] for n in numbers), [devices[n] for n in first.src_devices]
    arrived = _transferred(given, tuple(wanted), *program)
    there = [devices[n] for n in first.dst_devices]
    moves = [new.moves[0] for new in bucket]
    return [_stepped(x, m.plan, _ends(m)[1], there) for x, m in zip(arrived, moves, strict=True)]


def on_mesh(blocks: Blocks, made: Plan, devices: Sequence[jax.Device]) -> Blocks:
    """This process's blocks before a plan on one mesh -> its blocks after it. devices: of that mesh."""
    mesh = plan_mesh(made, devices)
    start = storage_sharding(made.source.layout, mesh)
    array = remember(assembled(blocks, made.shape, made.dtype, start), made.source)
    with jax.set_mesh(mesh):
        return blocks_of(reshard(array, made, mesh))


def plan_mesh(made: Plan, devices: Sequence[jax.Device]) -> JaxMesh:
    """The mesh of a plan, of Explicit axes: on those a `jax.Array` can be addends or copies."""
    grid = np.array(devices).reshape(made.mesh.sizes)
    return JaxMesh(grid, made.mesh.axes, axis_types=(AxisType.Explicit,) * grid.ndim)


def assembled(blocks: Blocks, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """This process's blocks -> the array, over the same memory."""
    mine = [blocks[device] for device in sharding.mesh.devices.flat if device in blocks]
    return jax.make_array_from_single_device_arrays(shape, sharding, mine, dtype=jnp.dtype(dtype))


def blocks_of(array: Any) -> Blocks:
    """The blocks of an array by their device; of a type there are none."""
    shards = getattr(array, "addressable_shards", ())
    if shards and not array.size:  # whatever its sharding says, JAX may hold all of it on every device
        block = np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
        return {shard.device: jax.device_put(block, shard.device) for shard in shards}
    return {shard.device: shard.data for shard in shards}


def all_devices(like: jax.Device) -> list[jax.Device]:
    """All devices of the program of one kind, as plans number them: process by process."""
    return sorted(jax.devices(like.platform), key=lambda device: (device.process_index, device.id))


def alone(made: Plan) -> ArrayPlan:
    """The plan of one array as that of a tree."""
    src, dst = part_of(made.source, Side("")), part_of(made.target, Side(""))
    return ArrayPlan("", made.target, made.dtype, (PartMove("", src, dst, made),))


def _runnable(move: PartMove, array: ArrayPlan) -> PartMove:
    """The move, without the steps on either mesh where JAX has no arrays for their results."""
    plan, (before, after) = move.plan, _ends(move)
    is_whole = move.src.side.dim is None and move.dst.side.dim is None and plan.dtype == array.dtype
    if not (before or after) or (is_whole and move.transfer.source.is_even and move.transfer.target.is_even):
        return move
    source, target = plan.source, plan.target.in_order(plan.src.names)
    source, target = source.with_layout(source.normal), target.with_layout(target.normal)
    turned = (step for step in plan.steps if isinstance(step, Transpose))
    steps = Transfer(source, target, plan.src_devices, plan.dst_devices, plan.profile), *turned
    return move._replace(plan=replace(plan, steps=steps, split=()))


def _ends(move: PartMove) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The stages before the transfer and behind it; none if only dims change places there."""
    stages, at = move.plan.stages, move.plan.steps.index(move.transfer)
    after = stages[at + 1 :]
    return stages[:at], () if all(isinstance(stage.step, Transpose) for stage in after) else after


def _stepped(blocks: Blocks, plan: Plan, stages: tuple[Stage, ...], devices: Sequence[jax.Device]) -> Blocks:
    """The blocks after steps on one mesh."""
    if not stages or not any(map(_is_here, devices)):
        return blocks
    part = plan.part(stages)
    mesh = Mesh(dict(zip(part.mesh.axes, part.mesh.sizes, strict=True)))  # its axes may be parts of others
    return on_mesh(blocks, replace(part, mesh=mesh), devices)


def _wanted(array: ArrayPlan, taken: tuple[Taken, ...]) -> Wanted:
    move = array.moves[0]
    names, block = move.plan.src.names, array.sharding.local_shape(0)
    order = tuple(map(names.index, move.plan.dst.names))
    if _ends(move)[1]:  # dims change places later
        order, block = tuple(range(len(names))), move.transfer.target.local_shape(0)
    seen = _seen(move.dst, block)
    shape = tuple(seen[order.index(i)] for i in range(len(order)))
    return Wanted(shape, order, block, (move.plan.dtype, array.dtype), taken)


def _seen(part: CutPart, block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a block, with the dim that its array lacks."""
    return part.side.seen(block) if part.side.adds else block


def _messages(move: PartMove, numbers: Sequence[int]) -> tuple[tuple[Message, ...], str | None]:
    """What is sent, between whole blocks, and how it combines. numbers: of the program's devices, in turn."""
    step, found = move.transfer, []
    turned = [move.plan.dst.names.index(name) for name in move.plan.src.names]  # of every dim, the one there
    for src, dst, box, _ in _all_in_place(step) if step.is_in_place else step.messages:
        dims = list(box)
        for part, device, end in ((move.src, src, 0), (move.dst, dst, 1)):
            if part.rows and part.side.dim is not None:
                at = part.side.dim if end == 0 else turned.index(part.side.dim)
                own = row_numbers(part.rows[part.whole.dim_device(part.side.dim, device)])
                rows = [rows_at(dims[at], 0), rows_at(dims[at], 1)]
                rows[end] = own[rows[end]]
                dims[at] = merged_segments(np.stack([*rows, np.ones_like(rows[0])], axis=1))
        ends = numbers.index(step.src_devices[src]), numbers.index(step.dst_devices[dst])
        found.append(Message(*ends, tuple(dims)))
    return tuple(message for message in found if message.size), step.op


def _all_in_place(step: Transfer) -> Iterator[Message]:
    for dst, device in enumerate(step.dst_devices):
        box = tuple((Segment(0, 0, n),) for n in step.target.local_shape(dst))
        yield Message(step.src_devices.index(device), dst, box)


def _transferred(
    given: Sequence[Held],
    wanted: tuple[Wanted, ...],
    devices: tuple[jax.Device, ...],
    givers: Sequence[jax.Device],
) -> list[Blocks]:
    """This process's new blocks. devices: of either mesh; givers: of the first."""
    if not any(map(_is_here, devices)):
        return [{} for _ in wanted]
    idle = [device for device in devices if device not in givers]
    arrays = []
    for each in given:
        blocks = each.blocks
        if any(map(_is_here, idle)):
            there = _side_by_side(each.shape, idle)
            blocks = {**blocks, **blocks_of(jnp.zeros(there[0], each.dtype, device=there[1]))}
        whole, sharding = _side_by_side(each.shape, devices)
        arrays.append(assembled(blocks, whole, each.dtype, sharding))
    mesh = JaxMesh(np.array(devices), (AXIS,))
    run = _program(tuple(each.shape for each in given), wanted, mesh)
    with jax.set_mesh(mesh):  # whatever mesh the caller's context has
        return [blocks_of(y) for y in run(*arrays)]


@lru_cache(maxsize=1024)
def _program(
    shapes: tuple[tuple[int, ...], ...], wanted: tuple[Wanted, ...], mesh: JaxMesh
) -> Callable[..., list[jax.Array]]:
    transport = PERMUTE if mesh.devices[0].platform == "cpu" else RAGGED
    specs: Any = {"in_specs": tuple(map(_spec, shapes)), "out_specs": [_spec(new.block) for new in wanted]}

    def run(*blocks: jax.Array) -> list[jax.Array]:
        return list(transfer(blocks, wanted, mesh.size, transport))

    # Of empty arrays XLA would say that they are not cut.
    there = [NamedSharding(mesh, spec) for spec in specs["out_specs"]]
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=False), out_shardings=there)


def _side_by_side(
    block: tuple[int, ...], devices: Sequence[jax.Device]
) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape and the sharding of one array with a block of this shape on every device."""
    whole = (len(devices) * block[0], *block[1:]) if block else ()
    return whole, NamedSharding(JaxMesh(np.array(devices), (AXIS,)), _spec(block))


def _spec(block: tuple[int, ...]) -> PartitionSpec:
    return (
        PartitionSpec(AXIS) if block else PartitionSpec()
    )  # without dims: each device has a value of its own


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()
