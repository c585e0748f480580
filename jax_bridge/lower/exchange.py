"""The exchange step in JAX: devices send boxes to each other, and place what they receive.

A box is a sub-array of a block. Boxes are handled as slices if all boxes of a round are slices of
one shape, else by tables of rows, padded to the longest along every dim. Boxes that tile a block
are concatenated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import (
    VOID,
    Table,
    along_dim,
    inverse,
    pick_rows,
    row_of_this_device,
)
from jax_bridge.lower.transports import Round, Schedule, Transport, box_shape, rounds, scheduled
from jax_bridge.mesh.axis_types import as_varying, from_bits, long_axes, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.steps import Exchange
from xshard.steps.exchange.messages import Message, rows_at

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}

# How boxes tile a device's block: the first row of each box along every dim, sorted, and the number
# of the round in which it arrives.
Tiling = tuple[tuple[tuple[int, ...], int], ...]

MOST_TILES = 32  # in all distinct tilings together: each tiling is compiled as a branch


class _Delivery(NamedTuple):
    """Boxes to deliver: in which rounds, into which block, and by what means."""

    schedule: Schedule
    op: str | None  # a key of COMBINE; None if no two boxes meet
    after: Sharding
    transport: Transport


def exchange(
    step: Exchange, x: jax.Array, before: Sharding, after: Sharding, transport: Transport
) -> jax.Array:
    """Send boxes of this device's block, and build the new block of the arriving boxes.

    Sums are made in the order of the rounds, after a device's own box.

    Args:
        step: The step.
        x: The block before it.
        before: The sharding before it.
        after: The sharding after it.
        transport: How boxes travel.
    """
    out = jnp.zeros(after.max_local_shape, x.dtype)  # rows that nobody sends stay zero
    # A box that stays has the type of one that is sent: all branches of a program have one type.
    axes = long_axes(after.mesh)
    delivery = _Delivery(rounds(step, before), step.op(before), after, transport)
    return _delivered(delivery, as_varying(x, axes), as_varying(out, axes))


def _delivered(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Return the new block: `out` with the boxes that messages bring from blocks `x`."""
    all_rounds = delivery.schedule.all_rounds
    if not all_rounds:  # no rows to send
        return out
    can_slice = delivery.op in (None, "sum") and all(map(_are_slices, all_rounds))
    deliver = _by_slices if can_slice else _by_tables

    messages = itertools.chain.from_iterable(all_rounds)
    has_negative = any(message.sign < 0 for message in messages)
    if has_negative or delivery.op is not None:
        return deliver(delivery, x, out)
    # Without arithmetic short floats travel as integers.
    return from_bits(deliver(delivery, to_bits(x), to_bits(out)), x.dtype)


def _by_slices(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Cut boxes out of the block, and write or add them in place: other rows are not touched."""
    schedule = delivery.schedule
    all_rounds = schedule.all_rounds
    n_local = len(schedule.local)
    mesh = delivery.after.mesh
    axes = long_axes(mesh)
    starts = _box_starts(all_rounds, mesh.n_devices, axes)

    def cut(r: int) -> jax.Array:
        """Cut out the box that this device sends or keeps in a round."""
        shape = box_shape(all_rounds[r])
        return lax.dynamic_slice(x, starts[r].sent, shape, allow_negative_indices=False)

    boxes = [cut(r) for r in range(n_local, len(all_rounds))]
    arrived = delivery.transport.send(boxes, schedule.sent, mesh)

    def box(r: int) -> jax.Array:
        """Return the box that arrives in a round.

        Called late, so that a branch cuts only its own boxes.
        """
        if r < n_local:
            return _signed(cut(r), all_rounds[r], mesh)
        return _signed(arrived[r - n_local], all_rounds[r], mesh)

    if delivery.op is None and delivery.transport.branches:
        tiling_of_device = tilings(all_rounds, delivery.after)
        if tiling_of_device is not None:
            return _tiled_by_device(tiling_of_device, box, axes)
    for r, messages in enumerate(all_rounds):
        receives = _receivers(messages, mesh.n_devices)
        out = _with_box(out, box(r), starts[r].received, receives, delivery.op, axes)
    return out


def _with_box(
    out: jax.Array,
    box: jax.Array,
    start: list[Any],
    receives: NDArray[np.bool_],
    op: str | None,
    axes: tuple[str, ...],
) -> jax.Array:
    """Write a box into a block, or add it, on the devices that receive one.

    Args:
        out: The block.
        box: The box; on other devices anything.
        start: The first row of its place along every dim.
        receives: For every device, whether it receives a box.
        op: "sum" to add the box; None to overwrite what is there.
        axes: The axes that number the devices.
    """
    if op is not None or not receives.all():
        present = lax.dynamic_slice(out, start, box.shape, allow_negative_indices=False)
        if op is not None:
            box = present + box
        if not receives.all():
            box = jnp.where(row_of_this_device(receives, axes), box, present)
    return lax.dynamic_update_slice(out, box, start, allow_negative_indices=False)


def _by_tables(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Spread every box over a block of its own, and combine the blocks where they have rows."""
    schedule = delivery.schedule
    all_rounds = schedule.all_rounds
    n_local = len(schedule.local)
    mesh = delivery.after.mesh
    axes = long_axes(mesh)
    tables = [_round_tables(messages, delivery.after) for messages in all_rounds]

    packed = []
    for dims in tables:
        box = x
        for dim, positions in enumerate(dims):
            box = pick_rows(box, dim, positions.packing, axes)
        packed.append(box)
    received = delivery.transport.send(packed[n_local:], schedule.sent, mesh)
    arrived = packed[:n_local] + received  # in the order of all rounds

    is_written = jnp.zeros(out.shape, bool)
    for messages, box, dims in zip(all_rounds, arrived, tables, strict=True):
        box = _signed(box, messages, mesh)
        has_element = row_of_this_device(_receivers(messages, mesh.n_devices), axes)
        for dim, positions in enumerate(dims):
            box = pick_rows(box, dim, positions.placing, axes)
            has_row = row_of_this_device(positions.placing != VOID, axes)
            has_element = has_element & along_dim(has_row, dim, box.ndim)
        if delivery.op is not None:
            # The first box at a place is written, not combined with the zero that is there.
            box = jnp.where(is_written, COMBINE[delivery.op](out, box), box)
        out = jnp.where(has_element, box, out)
        is_written = is_written | has_element
    return out


def _receivers(messages: Round, n_devices: int) -> NDArray[np.bool_]:
    """Tell for every device whether it receives a box."""
    return np.isin(np.arange(n_devices), [message.dst for message in messages])


def _signed(box: jax.Array, messages: Round, mesh: Mesh) -> jax.Array:
    """Negate the box if its message says so: rows from beyond a pole may change their sign."""
    if all(message.sign > 0 for message in messages):
        return box
    signs = np.ones(mesh.n_devices, np.int8)
    signs[[message.dst for message in messages]] = [message.sign for message in messages]
    return jnp.where(row_of_this_device(signs, long_axes(mesh)) < 0, -box, box)


def _are_slices(messages: Round) -> bool:
    """Return whether all boxes of a round are slices, and of one shape."""
    shape = box_shape(messages)
    for message in messages:
        if message.shape != shape or any(len(segments) != 1 for segments in message.box):
            return False
    return True


class BoxStarts(NamedTuple):
    """The first rows, by dim, of the box that a device sends and of the one it receives."""

    sent: list[Any]
    received: list[Any]


def _box_starts(
    all_rounds: Sequence[Round], n_devices: int, axes: tuple[str, ...]
) -> list[BoxStarts]:
    """Look up where this device's boxes begin, round by round."""
    ndim = len(all_rounds[0][0].box)
    # [devices, rounds, sent or received, dims]
    starts = np.zeros((n_devices, len(all_rounds), 2, ndim), np.int32)
    for r, messages in enumerate(all_rounds):
        starts[:, r] = _first_rows(messages[0])  # devices without a box take any rows
        for message in messages:
            first_rows = _first_rows(message)
            starts[message.src, r, 0] = first_rows.sent
            starts[message.dst, r, 1] = first_rows.received

    # One table per number, a constant if all devices agree: XLA compiles it to simple loops.
    result = [BoxStarts(list(sent), list(received)) for sent, received in starts[0]]
    for r, side, dim in np.argwhere((starts != starts[0]).any(axis=0)).tolist():
        result[r][side][dim] = row_of_this_device(starts[:, r, side, dim], axes)
    return result


def _first_rows(message: Message) -> BoxStarts:
    """Return where a box of slices begins in the sender's block, and in the receiver's."""
    return BoxStarts(
        sent=[segments[0].src for segments in message.box],
        received=[segments[0].dst for segments in message.box],
    )


class DimTables(NamedTuple):
    """One round along one dim: the rows to pack, and the packed row for each row of the result."""

    packing: Table
    placing: Table


def _round_tables(messages: Round, after: Sharding) -> list[DimTables]:
    """Tabulate by dim and device the rows to pack into a box, and where a box's rows go."""
    n_devices = after.mesh.n_devices
    tables = []
    for dim, box_length in enumerate(box_shape(messages)):
        block_length = after.max_local_shape[dim]
        # The row of x for each row of the box, and the row of the box for each row of the result.
        packing = np.full((n_devices, box_length), VOID, np.int64)
        placing = np.full((n_devices, block_length), VOID, np.int64)
        # Rows beyond a message are never read. A device that sends nothing packs another device's
        # rows: a table of equal rows is a constant.
        any_rows = rows_at(messages[0].box[dim], 0)
        packing[:, : len(any_rows)] = any_rows
        for message in messages:
            sent_rows = rows_at(message.box[dim], 0)
            packing[message.src, : len(sent_rows)] = sent_rows
            received_rows = rows_at(message.box[dim], 1)
            placing[message.dst] = inverse(received_rows, block_length)
        tables.append(DimTables(packing, placing))
    return tables


def tilings(schedule: Sequence[Round], after: Sharding) -> tuple[Tiling, ...] | None:
    """Return how boxes tile the block of each device.

    Args:
        schedule: The rounds; all boxes are slices.
        after: The sharding of the new blocks.

    Returns:
        A tiling per device; None if boxes differ in shape, leave gaps, or tile in too many ways.
    """
    shapes = {box_shape(messages) for messages in schedule}
    if len(shapes) > 1:
        return None
    # By device: the place of each box, and the round in which it arrives.
    rounds_of_places: list[dict[tuple[int, ...], int]] = [{} for _ in range(after.mesh.n_devices)]
    for r, messages in enumerate(schedule):
        for message in messages:
            place = tuple(_first_rows(message).received)
            rounds_of_places[message.dst][place] = r

    tiling_of_device = tuple(tuple(sorted(places.items())) for places in rounds_of_places)
    # All boxes have one size, so as many elements as the block has cannot leave a gap.
    box_size = math.prod(shapes.pop())
    block_size = math.prod(after.max_local_shape)
    if any(len(tiling) * box_size != block_size for tiling in tiling_of_device):
        return None
    n_compiled = sum(len(tiling) for tiling in set(tiling_of_device))
    if n_compiled > MOST_TILES:
        return None
    return tiling_of_device


def _tiled_by_device(
    tiling_of_device: Sequence[Tiling], box: Callable[[int], jax.Array], axes: tuple[str, ...]
) -> jax.Array:
    """Concatenate boxes as this device's tiling says: a branch for each distinct tiling."""
    distinct = list(dict.fromkeys(tiling_of_device))
    branch_of_device = [distinct.index(tiling) for tiling in tiling_of_device]
    branches = [partial(tiled, tiling, box) for tiling in distinct]
    return lax.switch(row_of_this_device(np.array(branch_of_device, np.int32), axes), branches)


def tiled(tiling: Tiling, box: Callable[[int], jax.Array], dim: int = 0) -> jax.Array:
    """Concatenate boxes along `dim` and the dims after it.

    Args:
        tiling: The boxes' places, which differ along these dims only.
        box: The number of a round -> the box that arrives in it.
        dim: The first dim to concatenate along.
    """
    if len(tiling) == 1:
        return box(tiling[0][1])
    slabs = []
    for _, tiles in itertools.groupby(tiling, key=lambda tile: tile[0][dim]):
        slabs.append(tiled(tuple(tiles), box, dim + 1))
    return lax.concatenate(slabs, dim)


# Exchanges between two meshes, in one program on the devices of both.

AXIS = "device"


class SentPart(NamedTuple):
    """The messages that take parts of a block to a new block.

    `block` is the block's number; its elements are seen as an array of `shape`. `op` says how boxes
    at one place combine.
    """

    block: int
    shape: tuple[int, ...]
    messages: tuple[Message, ...]
    op: str | None


class NewBlock(NamedTuple):
    """A new block: parts of other blocks in `shape`, transposed to `order`, seen as `block`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block: tuple[int, ...]
    dtypes: tuple[str, str]  # the one that travels, and the new block's
    parts: tuple[SentPart, ...]


def transfer(
    blocks: Sequence[jax.Array],
    new_blocks: Sequence[NewBlock],
    n_devices: int,
    transport: Transport,
) -> Iterator[jax.Array]:
    """Build this device's new blocks from the blocks of all devices.

    It runs in a `shard_map` over the one axis `AXIS`, without types. Devices of the two meshes are
    numbers here. Rows that receive nothing are zero.

    Args:
        blocks: This device's blocks.
        new_blocks: How each new block is put together.
        n_devices: The number of devices of both meshes.
        transport: How boxes travel.
    """
    for new in new_blocks:
        travel_dtype, dtype = new.dtypes
        dims = tuple(Dim(f"d{i}") for i in range(len(new.shape)))
        after = Sharding(Layout(dims), Mesh({AXIS: n_devices}), new.shape)
        out = jnp.zeros(new.shape, travel_dtype)
        for part in new.parts:
            x = blocks[part.block].reshape(part.shape).astype(travel_dtype)
            schedule = scheduled(part.messages, adds=part.op is not None)
            out = _delivered(_Delivery(schedule, part.op, after, transport), x, out)
        yield out.transpose(new.order).reshape(new.block).astype(dtype)
