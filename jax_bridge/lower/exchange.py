"""The exchange step in JAX: devices send boxes to each other, and place what they receive.

A box is a sub-array of a block: the elements at given rows along each dim. A message is a box with its sender
and receiver. In a round each device sends at most one box, and receives at most one; the first rounds are
those of boxes that stay on their device. Every device runs the code of all rounds, and looks up in tables, by
its number, which rows of its block they concern.

There are three ways to place boxes, the cheapest first: boxes that tile a block are concatenated; boxes that
are slices of one shape are written as slices; others go through tables of rows, padded to the longest.
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
    padded_table,
    pick_rows,
    row_of_this_device,
)
from jax_bridge.lower.transports import (
    Round,
    Schedule,
    Shape,
    Transport,
    box_shape,
    make_schedule,
    rounds,
)
from jax_bridge.mesh.axis_types import as_varying, from_bits, long_axes, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.steps import Exchange
from xshard.steps.base import reduction_dtype
from xshard.steps.exchange.messages import Message, rows_at

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}

# The ends of a message: rows of its box are counted in the sender's block, or in the receiver's.
SENDER = 0
RECEIVER = 1


class Tile(NamedTuple):
    """A box that fills a part of a device's block."""

    start: Shape  # its first row along every dim
    round_index: int  # in which it arrives


Tiling = tuple[Tile, ...]  # the boxes that fill a device's block, sorted by `start`

MAX_COMPILED_TILES = 32  # in all distinct tilings together: each tiling is compiled as a branch


class _Delivery(NamedTuple):
    """Boxes to deliver: in which rounds, into which block, and by what means."""

    schedule: Schedule
    op: str | None  # a key of COMBINE; None if no two boxes meet
    after: Sharding
    transport: Transport
    sender_order: bool  # boxes that meet are added in the order of their senders

    @property
    def adds_in_order(self) -> bool:
        """Whether boxes have to be sorted by their senders: a maximum is the same in any order."""
        return self.sender_order and self.op == "sum"


def exchange(
    step: Exchange,
    x: jax.Array,
    before: Sharding,
    after: Sharding,
    transport: Transport,
    *,
    sender_order: bool = False,
) -> jax.Array:
    """Send sub-arrays of this device's block to other devices, and build the new block from theirs.

    This is the general step, for what no collective of JAX does: halos, zigzag order, uneven
    blocks. The messages, each a sub-array (a box) with its sender and receiver, follow from the two
    shardings. They go in rounds: in a round a device sends and receives at most one box.
    Boxes that meet are added in the order of the rounds, after a device's own box, or by `sender_order`.

    Args:
        step: The step.
        x: The block before it.
        before: The sharding before it.
        after: The sharding after it.
        transport: How boxes travel.
        sender_order: Whether boxes that meet are added in the order of their senders.

    Returns:
        The block after it, of the shape of the largest; elements that nobody sends are zero.
    """
    out = jnp.zeros(after.max_local_shape, x.dtype)  # rows that nobody sends stay zero
    # JAX types a received box as varying (different on each device). One that stays on its device
    # gets this type, too, since both may be results of the branches of one `switch`.
    axes = long_axes(after.mesh)
    delivery = _Delivery(
        schedule=rounds(step, before),
        op=step.op(before),
        after=after,
        transport=transport,
        sender_order=sender_order,
    )
    return _deliver(delivery, as_varying(x, axes), as_varying(out, axes))


def _deliver(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Send boxes of this device's block `x` to others, and put those that arrive into `out`.

    Boxes are cut as slices where possible, else gathered by tables of row positions.
    """
    all_rounds = delivery.schedule.all_rounds
    if not all_rounds:  # no rows to send
        return out
    deliver = _by_tables
    # Slices are written or added; for max and min there are tables alone.
    if delivery.op in (None, "sum") and all(map(_are_slices, all_rounds)):
        deliver = _by_slices
    if delivery.adds_in_order:
        # Rounded once, as XLA may leave out to round in between.
        wide_out = out.astype(reduction_dtype(delivery.op, out.dtype))
        if deliver is _by_slices and tilings(all_rounds, delivery.after) is not None:
            # Slices are added to the elements of `out`. Zeros would turn -0.0 into 0.0.
            wide_out = jnp.full_like(wide_out, -0.0)
        else:
            deliver = _by_tables
        return deliver(delivery, x, wide_out).astype(out.dtype)

    messages = itertools.chain.from_iterable(all_rounds)
    has_negative = any(message.sign < 0 for message in messages)
    if has_negative or delivery.op is not None:
        return deliver(delivery, x, out)
    # Nothing is computed: 16-bit and 8-bit floats travel as integers of the same bits, since XLA
    # may widen floats to 32 bits.
    return from_bits(deliver(delivery, to_bits(x), to_bits(out)), x.dtype)


def _by_slices(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Send boxes that are slices: cut each out of `x`, and write or add it at its place in `out`.

    Of a block of 4 rows a device may send rows 2-3, which arrive at rows 0-1 of the receiver.
    """
    all_rounds = delivery.schedule.all_rounds
    mesh = delivery.after.mesh
    axes = long_axes(mesh)
    starts = _box_starts(all_rounds, mesh.n_devices, axes)
    box_of_round = _send_slices(delivery, x, starts)
    # Boxes that fill the new block exactly are concatenated: one copy instead of one per box.
    if delivery.op is None and delivery.transport.branches:
        tiling_of_device = tilings(all_rounds, delivery.after)
        if tiling_of_device is not None:
            return _tile_by_device(tiling_of_device, box_of_round, axes)
    arrivals = [_Arrival(messages, box_of_round(i)) for i, messages in enumerate(all_rounds)]
    if delivery.adds_in_order:
        arrivals = _by_sender(arrivals, mesh)
        starts = _box_starts([arrival.messages for arrival in arrivals], mesh.n_devices, axes)
    for arrival, start in zip(arrivals, starts, strict=True):
        is_receiver = _receivers(arrival.messages, mesh.n_devices)
        out = _with_box(out, arrival.box, start.received, is_receiver, delivery.op, axes)
    return out


def _send_slices(
    delivery: _Delivery, x: jax.Array, starts: Sequence[BoxStarts]
) -> Callable[[int], jax.Array]:
    """Send boxes that are slices; return a function: index of a round -> the box that arrives in it.

    Args:
        delivery: The boxes.
        x: This device's block.
        starts: For each round, where the box that this device sends begins in `x`.
    """
    schedule = delivery.schedule
    all_rounds = schedule.all_rounds
    n_local = len(schedule.local)
    mesh = delivery.after.mesh

    def cut_out(round_index: int) -> jax.Array:
        shape = box_shape(all_rounds[round_index])
        start = starts[round_index].sent
        return lax.dynamic_slice(x, start, shape, allow_negative_indices=False)

    boxes_to_send = [cut_out(i) for i in range(n_local, len(all_rounds))]
    received = delivery.transport.send(boxes_to_send, schedule.sent, mesh)

    def box_of_round(round_index: int) -> jax.Array:
        if round_index < n_local:
            # A box that stays is cut out only here: each branch of a `switch` cuts only its own.
            box = cut_out(round_index)
        else:
            box = received[round_index - n_local]
        return _apply_signs(box, all_rounds[round_index], mesh)

    return box_of_round


class _Arrival(NamedTuple):
    """The box that a device receives or keeps in a round, and the messages of all devices in it."""

    messages: Round
    box: jax.Array


def _by_sender(arrivals: Sequence[_Arrival], mesh: Mesh) -> list[_Arrival]:
    """Sort the boxes that each device receives by their senders.

    On 3 devices a round may bring device 0 the box of device 1, and device 1 that of device 2. Of
    the results, the first has the box of device 0 on every device, the second that of device 1.
    """
    nobody = mesh.n_devices  # sorted last
    senders = np.full((mesh.n_devices, len(arrivals)), nobody)
    for round_index, arrival in enumerate(arrivals):
        for message in arrival.messages:
            senders[message.dst, round_index] = message.src
    # For each device the rounds in the order of senders: [devices, positions in the order].
    round_at = np.argsort(senders, axis=1, kind="stable")

    boxes = _stack_boxes([arrival.box for arrival in arrivals])
    # Else XLA may fuse a box that stays on its device with the product that made it, unrounded.
    boxes = lax.optimization_barrier(boxes)
    sorted_boxes = boxes[row_of_this_device(round_at, long_axes(mesh))]
    sorted_arrivals = []
    for position in range(len(arrivals)):
        messages: list[Message] = []
        for round_index, arrival in enumerate(arrivals):
            messages += [
                message
                for message in arrival.messages
                if round_at[message.dst, position] == round_index
            ]
        if messages:
            sorted_arrivals.append(_Arrival(tuple(messages), sorted_boxes[position]))
    return sorted_arrivals


def _stack_boxes(boxes: Sequence[jax.Array]) -> jax.Array:
    """Stack boxes, padded to the longest along every dim."""
    max_shape = np.max([box.shape for box in boxes], axis=0)
    padded = []
    for box in boxes:
        padding = [(0, length) for length in max_shape - box.shape]
        padded.append(jnp.pad(box, padding))
    return jnp.stack(padded)


def _with_box(
    out: jax.Array,
    box: jax.Array,
    start: list[Any],
    is_receiver: NDArray[np.bool_],
    op: str | None,
    axes: Sequence[str],
) -> jax.Array:
    """Write a box into a block, or add it, on the devices that receive one.

    All devices run the same code: one that receives nothing writes the present elements again.

    Args:
        out: The block.
        box: The box that arrived; on devices that receive none, anything.
        start: The first row of its place along every dim.
        is_receiver: For every device, whether it receives a box.
        op: "sum" to add the box; None to overwrite elements.
        axes: The axes that number the devices.
    """
    write = partial(lax.dynamic_update_slice, allow_negative_indices=False)
    if op is None and is_receiver.all():
        return write(out, box, start)
    present = lax.dynamic_slice(out, start, box.shape, allow_negative_indices=False)
    if op is not None:
        box = present + box
    if not is_receiver.all():
        box = jnp.where(row_of_this_device(is_receiver, axes), box, present)
    return write(out, box, start)


def _by_tables(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Send boxes of any rows: pack each into a compact box, and spread it over the new block.

    A box with the rows 0, 2 of `x` may arrive at the rows 3, 1 of `out`.
    """
    after = delivery.after
    tables = [_round_tables(messages, after) for messages in delivery.schedule.all_rounds]
    arrivals = _send_packed(delivery, x, tables)
    if delivery.adds_in_order:
        arrivals = _by_sender(arrivals, after.mesh)
        tables = [_round_tables(arrival.messages, after) for arrival in arrivals]
    is_written = jnp.zeros(out.shape, bool)
    for arrival, tables_of_round in zip(arrivals, tables, strict=True):
        values = _spread(arrival, tables_of_round, after.mesh)
        if delivery.op is not None:
            # The first box for an element is written, not combined with the zero in `out`.
            combined = COMBINE[delivery.op](out, values)
            values = jnp.where(is_written, combined, values)
        has_value = _elements_of_box(arrival.messages, tables_of_round, after.mesh)
        out = jnp.where(has_value, values, out)
        is_written = is_written | has_value
    return out


def _send_packed(
    delivery: _Delivery, x: jax.Array, tables: Sequence[Sequence[DimTables]]
) -> list[_Arrival]:
    """Pack the box of each round into a compact array, and send it.

    Args:
        delivery: The boxes.
        x: This device's block.
        tables: Which rows go into the boxes: [rounds][dims].
    """
    schedule = delivery.schedule
    mesh = delivery.after.mesh
    packed_boxes = []
    for tables_of_round in tables:
        packing = [table.packing for table in tables_of_round]
        packed_boxes.append(_pick_along_dims(x, packing, long_axes(mesh)))
    n_local = len(schedule.local)  # rounds of boxes that stay on their device come first
    received = delivery.transport.send(packed_boxes[n_local:], schedule.sent, mesh)
    return list(map(_Arrival, schedule.all_rounds, packed_boxes[:n_local] + received))


def _spread(arrival: _Arrival, tables: Sequence[DimTables], mesh: Mesh) -> jax.Array:
    """Spread a packed box to the shape of the new block, with zeros between.

    A box of two rows for the rows 3, 1 of a block of 4 -> nothing, its second row, nothing, its
    first row.
    """
    box = _apply_signs(arrival.box, arrival.messages, mesh)
    placing = [table.placing for table in tables]
    return _pick_along_dims(box, placing, long_axes(mesh))


def _pick_along_dims(x: jax.Array, tables: Sequence[Table], axes: Sequence[str]) -> jax.Array:
    """Pick rows along every dim, by a table for each."""
    for dim, table in enumerate(tables):
        x = pick_rows(x, dim, table, axes)
    return x


def _elements_of_box(messages: Round, tables: Sequence[DimTables], mesh: Mesh) -> jax.Array:
    """Return a mask of this device's new block: True where a round brings an element."""
    axes = long_axes(mesh)
    mask = row_of_this_device(_receivers(messages, mesh.n_devices), axes)
    for dim, table in enumerate(tables):
        has_row = row_of_this_device(table.placing != VOID, axes)
        mask = mask & along_dim(has_row, dim, len(tables))
    return mask


def _receivers(messages: Round, n_devices: int) -> NDArray[np.bool_]:
    """Tell for every device whether it receives a box."""
    return np.isin(np.arange(n_devices), [message.dst for message in messages])


def _apply_signs(box: jax.Array, messages: Round, mesh: Mesh) -> jax.Array:
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
    """Where the box that a device sends in a round begins, and where the one that it receives.

    Attributes:
        sent: The first row along each dim, in the device's block before the exchange.
        received: Likewise in its block after the exchange.
    """

    sent: list[Any]
    received: list[Any]


def _box_starts(
    all_rounds: Sequence[Round], n_devices: int, axes: Sequence[str]
) -> list[BoxStarts]:
    """Look up where this device's boxes begin: one `BoxStarts` per round.

    A start has a row number for each dim. It is a constant if all devices have the same: XLA
    compiles slices at constant places to simple loops. Else it is a traced scalar, which the device
    looks up in a table: [2, 0] on two devices, if the first sends rows 2-3 and the second 0-1.

    Args:
        all_rounds: The rounds; all boxes are slices.
        n_devices: The number of devices.
        axes: The mesh axes that number them.
    """
    table = _table_of_starts(all_rounds, n_devices)
    # Device 0's, as constants; those that differ on another device are overwritten below.
    starts = [BoxStarts(list(sent), list(received)) for sent, received in table[0]]
    differs = (table != table[0]).any(axis=0)  # [rounds, ends, dims]
    for round_index, end, dim in np.argwhere(differs).tolist():  # end: SENDER or RECEIVER
        starts_of_devices = table[:, round_index, end, dim]
        starts[round_index][end][dim] = row_of_this_device(starts_of_devices, axes)
    return starts


def _table_of_starts(all_rounds: Sequence[Round], n_devices: int) -> NDArray[np.int32]:
    """Tabulate where the boxes of all devices begin: [devices, rounds, SENDER or RECEIVER, dims]."""
    ndim = len(all_rounds[0][0].box)
    table = np.zeros((n_devices, len(all_rounds), 2, ndim), np.int32)
    for round_index, messages in enumerate(all_rounds):
        # A device without a box cuts out another's rows, which nobody reads: the more starts are
        # equal, the more of them are constants.
        table[:, round_index] = _first_rows(messages[0])
        for message in messages:
            first_rows = _first_rows(message)
            table[message.src, round_index, SENDER] = first_rows.sent
            table[message.dst, round_index, RECEIVER] = first_rows.received
    return table


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
    """Tabulate for one round which rows each device packs into its box, and where they go.

    In a round a device sends and receives at most one box. A box of the rows 0, 2 of the
    sender's block that become rows 3, 1 of a receiver's block of 4: the sender's line of `packing`
    is [0, 2], the receiver's line of `placing` is [-1, 1, -1, 0], where -1 (VOID) says that nothing
    of the box goes there.

    Returns:
        The two tables of every dim, each with a line per device.
    """
    n_devices = after.mesh.n_devices
    tables = []
    for dim, box_length in enumerate(box_shape(messages)):
        # A device that sends nothing packs the rows of the first message, and nobody reads them:
        # a table whose lines are all equal is compiled as a constant.
        first_rows = rows_at(messages[0].box[dim], end=SENDER)
        packing = padded_table([first_rows] * n_devices, box_length)
        placing = np.full((n_devices, after.max_local_shape[dim]), VOID, np.int64)
        for message in messages:
            sent_rows = rows_at(message.box[dim], end=SENDER)
            received_rows = rows_at(message.box[dim], end=RECEIVER)
            packing[message.src, : len(sent_rows)] = sent_rows
            placing[message.dst] = inverse(received_rows, placing.shape[1])
        tables.append(DimTables(packing, placing))
    return tables


def tilings(schedule: Sequence[Round], after: Sharding) -> tuple[Tiling, ...] | None:
    """Return how equal boxes fill the block of each device without gaps, if they do.

    A block of 4 rows whose rows 0-1 arrive in round 3 and rows 2-3 in round 0 has the tiling
    (Tile((0,), 3), Tile((2,), 0)).

    Args:
        schedule: The rounds; all boxes are slices.
        after: The sharding of the new blocks.

    Returns:
        A tiling per device; None if boxes differ in shape, leave gaps, or if devices have so many
        different tilings that a program with a branch for each would be too large.
    """
    shapes = {box_shape(messages) for messages in schedule}
    if len(shapes) > 1:
        return None
    tiling_of_device = _tiles_of_devices(schedule, after.mesh.n_devices)
    # Boxes of one shape that begin at different rows do not overlap here. If they have as many
    # elements as the block, there is no gap.
    box_size = math.prod(shapes.pop())
    block_size = math.prod(after.max_local_shape)
    if any(len(tiling) * box_size != block_size for tiling in tiling_of_device):
        return None
    # Devices with equal tilings share one branch of the program.
    distinct_tilings = set(tiling_of_device)
    n_compiled = sum(len(tiling) for tiling in distinct_tilings)
    return tiling_of_device if n_compiled <= MAX_COMPILED_TILES else None


def _tiles_of_devices(schedule: Sequence[Round], n_devices: int) -> tuple[Tiling, ...]:
    """List the boxes that each device receives, by where they begin in its new block.

    Of several boxes that begin at one place the last one counts.
    """
    tile_at: list[dict[Shape, Tile]] = [{} for _ in range(n_devices)]  # by device, by first rows
    for round_index, messages in enumerate(schedule):
        for message in messages:
            start = tuple(_first_rows(message).received)
            tile_at[message.dst][start] = Tile(start, round_index)
    return tuple(tuple(sorted(tiles.values())) for tiles in tile_at)


def _tile_by_device(
    tiling_of_device: Sequence[Tiling],
    box_of_round: Callable[[int], jax.Array],
    axes: Sequence[str],
) -> jax.Array:
    """Concatenate boxes as this device's tiling says: a branch for each distinct tiling."""
    distinct = list(dict.fromkeys(tiling_of_device))
    branch_of_device = [distinct.index(tiling) for tiling in tiling_of_device]
    branches = [partial(tiled, tiling, box_of_round) for tiling in distinct]
    return lax.switch(row_of_this_device(np.array(branch_of_device, np.int32), axes), branches)


def tiled(tiling: Tiling, box_of_round: Callable[[int], jax.Array], dim: int = 0) -> jax.Array:
    """Concatenate the boxes of a tiling into a block.

    Boxes with the same first row along `dim` are joined into a slab along the dims after it
    (by recursion), then the slabs along `dim`: 2 x 2 boxes become 2 rows of boxes, then the block.

    Args:
        tiling: The boxes, sorted by first rows.
        box_of_round: Index of a round -> the box that arrives in it.
        dim: The first dim to concatenate along.
    """
    if len(tiling) == 1:
        return box_of_round(tiling[0].round_index)
    slabs = []
    for _, tiles in itertools.groupby(tiling, key=lambda tile: tile.start[dim]):
        slabs.append(tiled(tuple(tiles), box_of_round, dim + 1))
    return lax.concatenate(slabs, dim)


# Exchanges between two meshes, in one program on the devices of both.

AXIS = "device"


class BlockMessages(NamedTuple):
    """The messages that take boxes of one old block to a new block.

    Attributes:
        block: The index of the old block.
        shape: The shape as which its elements are seen.
        new_shape: The shape of the new block with the dims in the sender's order.
        order: How it is transposed then: [3, 2] transposed to (1, 0) is [2, 3].
        messages: The messages.
        op: How boxes that meet combine, as "sum".
        sender_order: Whether boxes that meet are added in the order of their senders.
    """

    block: int
    shape: Shape
    new_shape: Shape
    order: Shape
    messages: tuple[Message, ...]
    op: str | None
    sender_order: bool


class NewBlock(NamedTuple):
    """A new block of boxes of old ones.

    Attributes:
        shape: Without the dims of length 1 that stacking adds.
        dtypes: The one that travels, and the new block's.
        sources: The messages from each old block.
    """

    shape: Shape
    dtypes: tuple[str, str]
    sources: tuple[BlockMessages, ...]


def transfer(
    blocks: Sequence[jax.Array],
    new_blocks: Sequence[NewBlock],
    n_devices: int,
    transport: Transport,
) -> Iterator[jax.Array]:
    """Move arrays from one mesh to another: build each new block from boxes that devices send.

    One program runs on the devices of both meshes, numbered 0, 1, ...: in a `shard_map` with
    check_vma=False over one axis, `AXIS`. A device that is in one mesh only sends nothing, or
    receives nothing.

    Args:
        blocks: This device's blocks of the old arrays.
        new_blocks: How each new block is put together.
        n_devices: The number of devices of both meshes.
        transport: How boxes travel.

    Yields:
        This device's new blocks, one for each of `new_blocks`; rows that receive nothing are zero.
    """
    for new in new_blocks:
        travel_dtype, dtype = new.dtypes
        out = jnp.zeros(new.shape, travel_dtype)
        for source in new.sources:
            # For the program every new block is whole: which rows it receives is in the messages.
            after = Sharding(Layout.parse("..."), Mesh({AXIS: n_devices}), source.new_shape)
            x = blocks[source.block].reshape(source.shape).astype(travel_dtype)
            schedule = make_schedule(source.messages, adds=source.op is not None)
            delivery = _Delivery(
                schedule=schedule,
                op=source.op,
                after=after,
                transport=transport,
                sender_order=source.sender_order,
            )
            # Messages have the dims in the order of their source, which may differ between sources.
            transposed = out.reshape([source.new_shape[i] for i in source.order])
            received = _deliver(delivery, x, transposed.transpose(np.argsort(source.order)))
            out = received.transpose(source.order).reshape(new.shape)
        yield out.astype(dtype)
