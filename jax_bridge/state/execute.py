"""A tree plan as JAX executes it: a bucket's messages are one program on the devices of both meshes.

A plan numbers devices. The program runs on those that send or receive, its participants, and calls them 0,
1, ... in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.stored import record_order
from jax_bridge.lower.exchange import (
    AXIS,
    RECEIVER,
    SENDER,
    BlockMessages,
    NewBlock,
    transfer,
)
from jax_bridge.lower.transports import PERMUTE, RAGGED
from jax_bridge.specs import storage_sharding
from xshard import Layout, Mesh, Plan
from xshard.layout.runs import Segment, merge_segments, row_numbers
from xshard.plans.plan import Stage
from xshard.plans.transfer import Transfer
from xshard.state.parts import NEW, ArrayPart
from xshard.state.tree_plan import ArrayPlan, PartMove, PartSharding, part_of
from xshard.steps import Transpose
from xshard.steps.exchange.messages import Message, rows_at

Devices = Sequence[jax.Device]
DevicesByNumber = Devices | Mapping[int, jax.Device]  # by their numbers in a plan
Blocks = Mapping[jax.Device, jax.Array]  # on this process's devices
Shape = tuple[int, ...]


class LocalBlocks(NamedTuple):
    """The local blocks of an array, with their dtype, and their shape in a program."""

    blocks: Blocks
    dtype: Any
    shape: Shape = ()


def execute(
    arrays: Mapping[str, LocalBlocks], plans: Sequence[ArrayPlan], devices: DevicesByNumber
) -> list[Blocks]:
    """Move several arrays from one mesh to another, together in one compiled program.

    A plan has up to three phases: steps on the source mesh, the transfer between the meshes, steps
    on the target mesh. The transfers of all arrays are one program on the devices of both meshes.
    A new array may be made of several old ones, as a fused `qkv` of q, k and v: there is a move for
    each of them.

    Args:
        arrays: This process's blocks of the source arrays, by name.
        plans: The plans of the new arrays, all between the same devices.
        devices: Devices by their numbers in the plans.

    Returns:
        This process's blocks of each new array.
    """
    # Steps that JAX cannot run are left out: their transfer does all of the move.
    runnable = [_runnable(array) for array in plans]
    any_plan = runnable[0].moves[0].plan  # all are between the same devices
    senders = [devices[number] for number in any_plan.src_devices]
    receivers = [devices[number] for number in any_plan.dst_devices]
    # For moves from devices 4, 5 to 5, 6 the program calls devices 4, 5, 6 its devices 0, 1, 2.
    participants = sorted({*any_plan.src_devices, *any_plan.dst_devices})

    # The steps on the source mesh.
    sent: list[LocalBlocks] = []  # by all moves of all arrays
    new_blocks = []
    for array in runnable:
        sent_for_array = [
            _run_source_stages(move, arrays[move.name], senders) for move in array.moves
        ]
        new_blocks.append(_new_block(array, sent_for_array, len(sent), participants))
        sent += sent_for_array

    # The transfer.
    participating_devices = [devices[number] for number in participants]
    arrived = _exchange(sent, tuple(new_blocks), participating_devices, senders)

    # The steps on the target mesh.
    results = []
    for blocks, array in zip(arrived, runnable, strict=True):
        # All moves of an array lead to one layout: the stages after the transfer are those of any.
        move = array.moves[0]
        results.append(_run_stages(blocks, move.plan, _stages_of(move).on_target, receivers))
    return results


def run_on_mesh(blocks: Blocks, plan: Plan, devices: Devices) -> Blocks:
    """Run a plan on one mesh: local blocks before it -> local blocks after it.

    Args:
        blocks: The local blocks.
        plan: The plan.
        devices: The devices of the mesh, in its order.
    """
    mesh = plan_mesh(plan, devices)
    sharding = storage_sharding(plan.source.layout, mesh)
    array = record_order(assembled(blocks, plan.shape, plan.dtype, sharding), plan.source)
    with jax.set_mesh(mesh):
        return blocks_of(reshard(array, plan, mesh))


def plan_mesh(plan: Plan, devices: Devices) -> JaxMesh:
    """Return the mesh of a plan, with Explicit axes, as an array of addends or copies needs."""
    grid = np.array(devices).reshape(plan.mesh.sizes)
    return JaxMesh(grid, plan.mesh.axes, axis_types=(AxisType.Explicit,) * grid.ndim)


# ---- arrays and their blocks


def assembled(blocks: Blocks, shape: Shape, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return the array of these local blocks, in the same memory."""
    local = [blocks[device] for device in sharding.mesh.devices.flat if device in blocks]
    return jax.make_array_from_single_device_arrays(shape, sharding, local, dtype=jnp.dtype(dtype))


def blocks_of(array: Any) -> Blocks:
    """Return this process's blocks of an array, by device.

    There are none of a `jax.ShapeDtypeStruct`, which a process without the array passes.
    """
    shards = getattr(array, "addressable_shards", ())
    if not shards or array.size:
        return {shard.device: shard.data for shard in shards}
    # JAX may hold all of an empty array on every device, so that its shards have other shapes.
    block = np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
    return {shard.device: jax.device_put(block, shard.device) for shard in shards}


def all_devices(like: jax.Device) -> list[jax.Device]:
    """Return all devices of this kind in the program, in the order of plans: process by process."""
    return sorted(jax.devices(like.platform), key=lambda device: (device.process_index, device.id))


def as_array_plan(plan: Plan) -> ArrayPlan:
    """Return the plan of one array as part of a tree plan."""
    whole = ArrayPart.whole("", len(plan.shape))
    src = part_of(plan.source, whole)
    dst = part_of(plan.target, whole)
    return ArrayPlan("", plan.target, plan.dtype, (PartMove("", src, dst, plan),))


# ---- stages on one mesh


class _Stages(NamedTuple):
    """The stages of a plan before its transfer, on the source mesh, and after it, on the target mesh."""

    on_source: tuple[Stage, ...]
    on_target: tuple[Stage, ...]


def _stages_of(move: PartMove) -> _Stages:
    """Split the stages of a move into those before and those after its transfer."""
    stages = move.plan.stages
    transfer_index = move.plan.steps.index(move.transfer)
    on_target = stages[transfer_index + 1 :]
    if all(isinstance(stage.step, Transpose) for stage in on_target):
        # The program of the transfer transposes its result itself.
        on_target = ()
    return _Stages(stages[:transfer_index], on_target)


def _runnable(array: ArrayPlan) -> ArrayPlan:
    """Replace the moves with steps that JAX cannot run by moves that only send messages."""
    moves = list(array.moves)
    for i, move in enumerate(moves):
        if not _can_run_steps(move, array.dtype):
            moves[i] = move._replace(plan=_transfer_alone(move.plan))
    return replace(array, moves=tuple(moves))


def _can_run_steps(move: PartMove, new_dtype: str) -> bool:
    """Return whether JAX can run the steps of a move before and after its transfer.

    They run on a `jax.Array`, which has equal blocks. A move of a part of an array (as q of a fused
    qkv), of uneven blocks, or with a change of dtype has no such array between its steps.
    """
    stages = _stages_of(move)
    if not stages.on_source and not stages.on_target:
        return True  # the transfer is the only step
    moves_whole_arrays = move.src.part.is_whole and move.dst.part.is_whole
    is_even = move.transfer.source.is_even and move.transfer.target.is_even
    return moves_whole_arrays and is_even and move.plan.dtype == new_dtype


def _transfer_alone(plan: Plan) -> Plan:
    """Return a plan in which each device sends its rows straight to the devices that need them."""
    source = plan.source
    # A transfer keeps the order of dims; transposes follow.
    target = plan.target.in_order(plan.src.names)
    transfer_step = Transfer(
        source=source.with_layout(source.normal_layout),
        target=target.with_layout(target.normal_layout),
        src_devices=plan.src_devices,
        dst_devices=plan.dst_devices,
        profile=plan.profile,
    )
    transposes = [step for step in plan.steps if isinstance(step, Transpose)]
    return replace(plan, steps=(transfer_step, *transposes), split=())


def _run_stages(blocks: Blocks, plan: Plan, stages: tuple[Stage, ...], devices: Devices) -> Blocks:
    """Run some stages of a plan on one mesh, and return the blocks after them.

    Without stages, or in a process without devices of the mesh, blocks are returned as they are.
    """
    if not stages or not any(map(is_here, devices)):
        return blocks
    sub_plan = plan.sub_plan(stages)
    # A plan may split axes into sub-axes; JAX knows them as axes of a mesh.
    mesh = Mesh(dict(zip(sub_plan.mesh.axes, sub_plan.mesh.sizes, strict=True)))
    return run_on_mesh(blocks, replace(sub_plan, mesh=mesh), devices)


def _run_source_stages(move: PartMove, array: LocalBlocks, senders: Devices) -> LocalBlocks:
    """Run the stages of a move before its transfer, and return the blocks that it sends."""
    stages = _stages_of(move).on_source
    # Without such stages the transfer itself takes its part out of whole blocks.
    sent = move.transfer.source if stages else move.src.whole
    blocks = _run_stages(array.blocks, move.plan, stages, senders)
    return LocalBlocks(blocks, jnp.dtype(array.dtype), sent.local_shape(0))


# ---- messages


def _new_block(
    array: ArrayPlan, sent: Sequence[LocalBlocks], first_source: int, participants: Sequence[int]
) -> NewBlock:
    """Describe a new block, and the messages that fill it.

    A fused `qkv` has three moves, which send blocks of q, k and v: if two arrays are sent before
    these, they are the program's sources 2, 3 and 4.

    Args:
        array: The plan of the new array.
        sent: What each of its moves sends.
        first_source: The number of the first of them among all that the program sends.
        participants: The numbers in the plan of the program's devices.
    """
    new_shape = _new_shape(array)
    messages = []
    for number, (move, source) in enumerate(zip(array.moves, sent, strict=True), first_source):
        messages.append(_messages_of_move(move, number, source.shape, new_shape, participants))
    dtypes = (array.moves[0].plan.dtype, array.dtype)
    return NewBlock(new_shape, dtypes, tuple(messages))


def _new_shape(array: ArrayPlan) -> Shape:
    """Return the shape of a block of an array as the transfer leaves it, before other steps."""
    move = array.moves[0]  # all moves of an array lead to one layout
    if _stages_of(move).on_target:
        return move.transfer.target.local_shape(0)
    return array.sharding.local_shape(0)


def _messages_of_move(
    move: PartMove, block: int, shape: Shape, new_shape: Shape, participants: Sequence[int]
) -> BlockMessages:
    """Describe how the program of the transfer brings boxes of an old block to a new block.

    Boxes arrive with their dims in the order of the source; then the block is transposed to the
    order of the destination, unless later steps of the plan do that. For "a b -> b a" and a new
    block [2, 3] boxes are put together as [3, 2], and the dims are transposed to (1, 0).

    Args:
        move: The move.
        block: The number of the old block among all that the program sends.
        shape: Its shape.
        new_shape: The shape of the new block.
        participants: The numbers in the plan of the program's devices.
    """
    source_names = move.plan.src.names
    # Steps after the transfer transpose: until then dims stay in the order of the source.
    block_names = source_names if _stages_of(move).on_target else move.plan.dst.names
    lengths = _with_added_dims(move.dst, new_shape)
    length_of = dict(zip(block_names, lengths, strict=True))
    return BlockMessages(
        block=block,
        shape=_with_added_dims(move.src, shape),
        new_shape=tuple(length_of[name] for name in source_names),
        order=tuple(map(source_names.index, block_names)),
        messages=tuple(_messages(move, participants)),
        op=move.transfer.op,
        sender_order=move.plan.profile.adds_in_order,
    )


def _with_added_dims(sharded: PartSharding, block_shape: Shape) -> Shape:
    """Return a block's shape with a dim of length 1 where arrays are stacked: [3, 2] -> [1, 3, 2]."""
    return tuple(1 if dim == NEW else block_shape[dim] for dim, _ in sharded.part.dims)


def _messages(move: PartMove, participants: Sequence[int]) -> Iterator[Message]:
    """Iterate over the messages of a move, with rows counted in the blocks of whole arrays.

    Where only a part of an array moves, as rows 4-7 of a block, the plan counts its rows from 0;
    the program works on whole blocks, and needs 4-7. Empty messages are left out.

    Args:
        move: The move.
        participants: The numbers in the plan of the program's devices. Yielded messages name a
            device by its index in this list: with [4, 5, 6], 0 for device 4.
    """
    transfer_step = move.transfer
    # For each dim of the part that is cut from the array, its dim of a box. A box has its dims in the
    # order of the source, on its way to the destination, too.
    src = move.plan.src
    src_dims = _dims_of_part(move.src, src, src)
    dst_dims = _dims_of_part(move.dst, move.plan.dst, src)
    messages: Iterable[Message] = transfer_step.messages
    if transfer_step.is_in_place:
        # Every device keeps its rows. The program builds new blocks of messages only, so that
        # each device sends its block to itself.
        messages = _messages_in_place(transfer_step)
    for message in messages:
        box = list(message.box)
        for part_dim, d in src_dims.items():
            box[d] = _rows_of_block(box[d], move.src, part_dim, message.src, end=SENDER)
        for part_dim, d in dst_dims.items():
            box[d] = _rows_of_block(box[d], move.dst, part_dim, message.dst, end=RECEIVER)
        sender = participants.index(transfer_step.src_devices[message.src])
        receiver = participants.index(transfer_step.dst_devices[message.dst])
        message_of_program = Message(sender, receiver, tuple(box))
        if message_of_program.size:
            yield message_of_program


def _messages_in_place(step: Transfer) -> Iterator[Message]:
    """Iterate over messages that bring every device its own whole block."""
    for dst, device in enumerate(step.dst_devices):
        box = tuple((Segment(0, 0, length),) for length in step.target.local_shape(dst))
        yield Message(step.src_devices.index(device), dst, box)


def _dims_of_part(sharded: PartSharding, layout: Layout, box: Layout) -> dict[int, int]:
    """Map each dim along which only some rows of an array move to its dim of a box.

    With `layout` "a b" and `box` "b a" dim 0 of the part is dim 1 of the box: {0: 1}.
    """
    cut_dims = [d for d, rows in enumerate(sharded.rows) if rows is not None]
    return {d: box.names.index(layout.names[d]) for d in cut_dims}


def _rows_of_block(
    segments: tuple[Segment, ...], sharded: PartSharding, part_dim: int, device: int, end: int
) -> tuple[Segment, ...]:
    """Renumber rows of a part of an array as rows of a device's block of the whole array.

    If the part is rows 4-7 of the block, its rows 0, 1 become 4, 5.

    Args:
        segments: The rows of a message along the dim of the part: of each segment the first row at
            the sender and at the receiver, and the number of rows.
        sharded: The part.
        part_dim: The dim of the part.
        device: The sender or receiver.
        end: Whose rows are renumbered: SENDER or RECEIVER.
    """
    rows = [rows_at(segments, end=SENDER), rows_at(segments, end=RECEIVER)]
    block_rows = row_numbers(sharded.rows_on(device, part_dim))  # by row of the part
    rows[end] = block_rows[rows[end]]
    # Segments of one row each, merged where rows follow each other at both ends.
    lengths = np.ones_like(rows[0])
    return merge_segments(np.stack([*rows, lengths], axis=1))


# ---- program


def _exchange(
    sources: Sequence[LocalBlocks],
    new_blocks: tuple[NewBlock, ...],
    devices: Devices,
    senders: Devices,
) -> list[Blocks]:
    """Run the program that moves all arrays of a bucket, and return the blocks that arrive here.

    Args:
        sources: The blocks that are sent.
        new_blocks: What is built of them.
        devices: All devices of both meshes.
        senders: All devices of the source mesh.

    Returns:
        For each new block the arrays by device of this process; empty in a process without any.
    """
    if not any(map(is_here, devices)):
        return [{} for _ in new_blocks]
    receivers_only = [device for device in devices if device not in senders]
    arrays = []
    for source in sources:
        blocks = source.blocks
        if any(map(is_here, receivers_only)):
            # One program runs on all devices: those that send nothing need a block, too.
            shape, sharding = _side_by_side(source.shape, receivers_only)
            zeros = jnp.zeros(shape, source.dtype, device=sharding)
            blocks = {**blocks, **blocks_of(zeros)}
        shape, sharding = _side_by_side(source.shape, devices)
        arrays.append(assembled(blocks, shape, source.dtype, sharding))
    mesh = JaxMesh(np.array(devices), (AXIS,))
    run = _program(tuple(source.shape for source in sources), new_blocks, mesh)
    with jax.set_mesh(mesh):  # the caller may have set another
        return [blocks_of(y) for y in run(*arrays)]


@lru_cache(maxsize=1024)
def _program(
    shapes: tuple[Shape, ...], new_blocks: tuple[NewBlock, ...], mesh: JaxMesh
) -> Callable[..., list[jax.Array]]:
    """Compile the program that moves all arrays of a bucket.

    Args:
        shapes: The shape of a device's block of each source.
        new_blocks: What is built of them.
        mesh: One axis with the devices of both meshes.

    Returns:
        A function: one array per source, with a block on every device -> one per new block.
    """
    transport = PERMUTE if mesh.devices[0].platform == "cpu" else RAGGED
    out_specs = [_spec(new.shape) for new in new_blocks]

    def run(*blocks: jax.Array) -> list[jax.Array]:
        return list(transfer(blocks, new_blocks, mesh.size, transport))

    on_devices = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(map(_spec, shapes)),
        out_specs=out_specs,
        check_vma=False,
    )
    # Without out_shardings XLA would replicate empty arrays.
    return jax.jit(on_devices, out_shardings=[NamedSharding(mesh, spec) for spec in out_specs])


def _side_by_side(block: Shape, devices: Devices) -> tuple[Shape, NamedSharding]:
    """Return the shape and sharding of the array with such a block on every device: [2, 3] on 4 -> [8, 3]."""
    shape = (len(devices) * block[0], *block[1:]) if block else ()
    return shape, NamedSharding(JaxMesh(np.array(devices), (AXIS,)), _spec(block))


def _spec(block: Shape) -> PartitionSpec:
    """Return the spec of an array that has a block of this shape on every device."""
    if not block:
        # A scalar per device, which may differ: JAX has no spec that says so, and takes it for one.
        return PartitionSpec()
    return PartitionSpec(AXIS)


def is_here(device: jax.Device) -> bool:
    """Return whether a device is one of this process's."""
    return device.process_index == jax.process_index()
