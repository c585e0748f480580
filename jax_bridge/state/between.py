"""Arrays carried to another mesh, as a tree's plan says: the devices of both meshes run one program.

Decides what is compiled for a bucket of arrays: the steps on either mesh as `reshard` runs them, and all
messages between the meshes as one program of the devices that are in either. Knows no tree and no rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.order import remember
from jax_bridge.arrays.partition_spec import storage_layout, to_named_sharding
from jax_bridge.arrays.reshard import reshard
from jax_bridge.lower.transfer import AXIS, Taken, Wanted, transfer
from jax_bridge.lower.transports import PERMUTE, RAGGED
from xshard import Mesh, Plan, Stage
from xshard.layout.runs import Segment, merged_segments, row_numbers
from xshard.plans.transfer import Transfer
from xshard.state import ArrayPlan, Side
from xshard.state.parts import CutPart, part_of
from xshard.state.tree_plan import PartMove
from xshard.steps import Scale, Transpose
from xshard.steps.exchange.messages import Message, rows_at

Numbered = Sequence[jax.Device] | Mapping[int, jax.Device]  # devices by their numbers in a plan
Blocks = Mapping[jax.Device, jax.Array]  # those of this process's devices


class Held(NamedTuple):
    """This process's blocks of an array, and the dtype of all."""

    blocks: Blocks
    dtype: Any


class Given(NamedTuple):
    """The blocks of one array that go into a program, and what each of them is."""

    blocks: Blocks
    shape: tuple[int, ...]
    dtype: Any


def carried(arrays: Mapping[str, Held], bucket: Sequence[ArrayPlan], devices: Numbered) -> list[Blocks]:
    """Arrays by name -> this process's blocks of every array of a bucket.

    All processes with a device in either mesh call it.
    """
    bucket = [replace(new, moves=tuple(_runnable(move, new) for move in new.moves)) for new in bucket]
    ends = [move.plan for new in bucket for move in new.moves]
    numbers = sorted({n for plan in ends for n in (*plan.src_devices, *plan.dst_devices)})
    given: dict[tuple[str, Plan | None], Given] = {}
    wanted = []
    for new in bucket:
        if not stays(new):
            keys = [_given(move, arrays, given, devices) for move in new.moves]
            taken = (
                _taken(move, [*given].index(key), numbers) for move, key in zip(new.moves, keys, strict=True)
            )
            wanted.append(_wanted(new, tuple(taken)))
    givers = [devices[n] for n in ends[0].src_devices]
    program = tuple(wanted), tuple(devices[n] for n in numbers), givers
    arrived = iter(_transferred(tuple(given.values()), *program) if wanted else ())
    made = []
    for new in bucket:
        move = new.moves[0]
        blocks = arrays[move.name].blocks if stays(new) else next(arrived)
        made.append(_stepped(blocks, move.plan, _ends(move)[1], move.plan.dst_devices, devices))
    return made


def all_devices(like: jax.Device) -> list[jax.Device]:
    """All devices of the program of one kind, as plans number them: process by process."""
    return sorted(jax.devices(like.platform), key=lambda device: (device.process_index, device.id))


def on_mesh(blocks: Blocks, made: Plan, devices: Sequence[jax.Device]) -> Blocks:
    """This process's blocks before a plan on one mesh -> its blocks after it. devices: of that mesh."""
    mesh = plan_mesh(made, devices)
    start = to_named_sharding(storage_layout(made.source.layout), mesh)
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
    return {shard.device: shard.data for shard in getattr(array, "addressable_shards", ())}


def alone(made: Plan) -> ArrayPlan:
    """The plan of one array as that of a tree."""
    src, dst = part_of(made.source, Side("")), part_of(made.target, Side(""))
    return ArrayPlan("", made.target, made.dtype, (PartMove("", src, dst, made),))


def _runnable(move: PartMove, array: ArrayPlan) -> PartMove:
    """The move, without the steps on either mesh where JAX has no arrays for their results."""
    plan = move.plan
    ends = move.transfer.source, move.transfer.target
    whole = move.src.side.dim is None and move.dst.side.dim is None
    if not any(_ends(move)) or (whole and plan.dtype == array.dtype and all(end.is_even for end in ends)):
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


def stays(array: ArrayPlan) -> bool:
    """Whether every device has its block already: the array there has the same memory."""
    first = array.moves[0]
    return (
        first.transfer.is_in_place
        and (first.src.side.dim, first.dst.side.dim) == (None, None)
        and first.plan.steps == (first.transfer,)
        and first.plan.dtype == array.dtype
    )


def _stepped(
    blocks: Blocks, plan: Plan, stages: tuple[Stage, ...], numbers: Sequence[int], devices: Numbered
) -> Blocks:
    """The blocks after steps on one mesh."""
    there = [devices[n] for n in numbers]
    if not stages or not any(map(_is_here, there)):
        return blocks
    first, steps = stages[0].before, tuple(stage.step for stage in stages)
    mesh = Mesh(dict(zip(first.mesh.axes, first.mesh.sizes, strict=True)))  # its axes may be parts of others
    scale = math.prod((step.factor for step in steps if isinstance(step, Scale)), start=Fraction(1))
    ends = first.layout, stages[-1].after.layout
    return on_mesh(blocks, Plan(*ends, mesh, first.shape, plan.dtype, steps, scale, plan.profile), there)


def _wanted(array: ArrayPlan, taken: tuple[Taken, ...]) -> Wanted:
    move = array.moves[0]
    if _ends(move)[1]:  # dims change places later
        order, landing = tuple(range(len(move.transfer.target.shape))), move.transfer.target.local_shape(0)
        block = landing
    else:
        names = move.plan.src.names
        order, block = tuple(map(names.index, move.plan.dst.names)), array.sharding.local_shape(0)
        seen = move.dst.side.seen(block) if move.dst.side.adds else block
        landing = tuple(seen[order.index(i)] for i in range(len(order)))
    return Wanted(landing, order, block, (move.plan.dtype, array.dtype), taken)


def _given(
    move: PartMove, arrays: Mapping[str, Held], given: dict[tuple[str, Plan | None], Given], devices: Numbered
) -> tuple[str, Plan | None]:
    """Put what a move takes into `given`, once for all moves of an array that has no steps -> its key."""
    x, before = arrays[move.name], _ends(move)[0]
    key = move.name, move.plan if before else None
    if key not in given:
        whole = move.transfer.source if before else move.src.whole
        blocks = _stepped(x.blocks, move.plan, before, move.plan.src_devices, devices)
        given[key] = Given(blocks, whole.local_shape(0), x.dtype)
    return key


def _taken(move: PartMove, block: int, numbers: Sequence[int]) -> Taken:
    """What a move takes of a block. numbers: of all devices of the program, in its order."""
    step = move.transfer
    shape = step.source.local_shape(0) if _ends(move)[0] else move.src.whole.local_shape(0)
    shape = move.src.side.seen(shape) if move.src.side.adds else shape
    boxes = step.messages
    if step.is_in_place:
        pairs = ((step.src_devices.index(device), at) for at, device in enumerate(step.dst_devices))
        boxes = tuple(
            Message(src, dst, tuple((Segment(0, 0, n),) for n in step.target.local_shape(dst)))
            for src, dst in pairs
        )
    turned = tuple(map(move.plan.dst.names.index, move.plan.src.names))  # of every dim, the one there
    messages = []
    for message in boxes:
        box = list(message.box)
        for part, device, end in ((move.src, message.src, 0), (move.dst, message.dst, 1)):
            if part.rows:
                assert part.side.dim is not None
                dim = part.side.dim if end == 0 else turned.index(part.side.dim)
                box[dim] = _in_whole(box[dim], part, device, end)
        src, dst = step.src_devices[message.src], step.dst_devices[message.dst]
        messages.append(Message(numbers.index(src), numbers.index(dst), tuple(box)))
    return Taken(block, shape, tuple(m for m in messages if m.size), step.op)


def _in_whole(segments: tuple[Segment, ...], part: CutPart, device: int, end: int) -> tuple[Segment, ...]:
    """Rows of a part as rows of the whole block that has them, at the one end."""
    assert part.side.dim is not None
    rows = [rows_at(segments, 0), rows_at(segments, 1)]
    rows[end] = row_numbers(part.rows[part.whole.dim_device(part.side.dim, device)])[rows[end]]
    return merged_segments(np.stack([*rows, np.ones_like(rows[0])], axis=1))


def _transferred(
    given: tuple[Given, ...],
    wanted: tuple[Wanted, ...],
    devices: tuple[jax.Device, ...],
    givers: Sequence[jax.Device],
) -> list[Blocks]:
    """This process's new blocks. devices: of either mesh; givers: of the first."""
    types = tuple((each.shape, jnp.dtype(each.dtype)) for each in given)
    idle = tuple(device for device in devices if device not in givers)
    if not any(map(_is_here, devices)):
        return [{} for _ in wanted]
    mesh, empty = JaxMesh(np.array(devices), (AXIS,)), JaxMesh(np.array(idle), (AXIS,))
    fill, run = _program(types, wanted, mesh, empty)
    fillers: Sequence[Any] = [None] * len(given)
    if any(map(_is_here, idle)):
        with jax.set_mesh(empty):
            fillers = fill()
    arrays = []
    for each, filler in zip(given, fillers, strict=True):
        whole = (len(devices) * each.shape[0], *each.shape[1:]) if each.shape else ()
        sharding = NamedSharding(mesh, _spec(each.shape))
        arrays.append(assembled({**each.blocks, **blocks_of(filler)}, whole, each.dtype, sharding))
    with jax.set_mesh(mesh):  # whatever mesh the caller's context has
        return [blocks_of(y) for y in run(*arrays)]


@lru_cache(maxsize=1024)
def _program(
    types: tuple[tuple[tuple[int, ...], np.dtype], ...],
    wanted: tuple[Wanted, ...],
    mesh: JaxMesh,
    empty: JaxMesh,
) -> tuple[Callable[[], list[jax.Array]], Callable[..., list[jax.Array]]]:
    """What makes zeros for devices that have no blocks, and what transfers the blocks of all."""
    transport = PERMUTE if mesh.devices[0].platform == "cpu" else RAGGED
    given = [_spec(shape) for shape, _ in types]

    def fill() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype in types]

    def run(*blocks: jax.Array) -> list[jax.Array]:
        return transfer(blocks, wanted, mesh.size, transport)

    made = [_spec(new.block) for new in wanted]
    shared: Any = {
        "check_vma": False
    }  # blocks of no dims have no dim to be cut along: each device has its own
    filled = jax.shard_map(fill, mesh=empty, in_specs=(), out_specs=given, **shared)
    moved = jax.shard_map(run, mesh=mesh, in_specs=tuple(given), out_specs=made, **shared)
    return jax.jit(filled), jax.jit(moved)


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Blocks of all devices as one array: side by side along the first dim."""
    return PartitionSpec(AXIS) if shape else PartitionSpec()


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()
