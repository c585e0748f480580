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
    rounds,
    scheduled,
)
from jax_bridge.mesh.axis_types import as_varying, from_bits, long_axes, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.steps import Exchange
from xshard.steps.base import reduction_dtype
from xshard.steps.exchange.messages import Message, rows_at

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}

# How boxes tile a device's block: the first row of each box along every dim, sorted, and the number
# of the round in which it arrives.
Tiling = tuple[tuple[Shape, int], ...]

MOST_TILES = 32  # in all distinct tilings together: each tiling is compiled as a branch


class _Delivery(NamedTuple):
    """Boxes to deliver: in which rounds, into which block, and by what means."""

    schedule: Schedule
    op: str | None  # a key of COMBINE; None if no two boxes meet
    after: Sharding
    transport: Transport
    in_order: bool  # boxes that meet are added in the order of their senders

    @property
    def adds_in_order(self) -> bool:
        """Whether the order of boxes matters: a max or min has none."""
        return self.in_order and self.op == "sum"


def exchange(
    step: Exchange,
    x: jax.Array,
    before: Sharding,
    after: Sharding,
    transport: Transport,
    *,
    in_order: bool = False,
) -> jax.Array:
    """Send sub-arrays of this device's block to other devices, and build the new block from theirs.

    This is the general step, for what no collective of JAX does: halos, zigzag order, uneven
    blocks. The messages, each a sub-array (a box) with its sender and receiver, follow from the two
    shardings. They go in rounds: in a round a device sends and receives at most one box.
    Boxes that meet are added in the order of the rounds, after a device's own box, or `in_order`.

    Args:
        step: The step.
        x: The block before it.
        before: The sharding before it.
        after: The sharding after it.
        transport: How boxes travel.
        in_order: Whether boxes that meet are added in the order of their senders.

    Returns:
        The block after it, of the shape of the largest; elements that nobody sends are zero.
    """
    out = jnp.zeros(after.max_local_shape, x.dtype)  # rows that nobody sends stay zero
    # JAX types a received box as varying (different on each device). One that stays on its device
    # gets this type, too, since both may be results of the branches of one `switch`.
    axes = long_axes(after.mesh)
    delivery = _Delivery(rounds(step, before), step.op(before), after, transport, in_order)
    return _delivered(delivery, as_varying(x, axes), as_varying(out, axes))


def _delivered(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
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
        wide = out.astype(reduction_dtype(delivery.op, out.dtype))
        if deliver is _by_slices and tilings(all_rounds, delivery.after) is not None:
            # Slices are added to what is there. Zeros would turn -0.0 into 0.0.
            wide = jnp.full_like(wide, -0.0)
        else:
            deliver = _by_tables
        return deliver(delivery, x, wide).astype(out.dtype)

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
    schedule = delivery.schedule
    all_rounds = schedule.all_rounds  # first those in which devices keep boxes, then the others
    n_local = len(schedule.local)
    mesh = delivery.after.mesh
    axes = long_axes(mesh)
    starts = _box_starts(all_rounds, mesh.n_devices, axes)

    def cut_out(r: int) -> jax.Array:
        """Cut out the box that this device sends or keeps in round r."""
        shape = box_shape(all_rounds[r])
        return lax.dynamic_slice(x, starts[r].sent, shape, allow_negative_indices=False)

    boxes_to_send = [cut_out(r) for r in range(n_local, len(all_rounds))]
    received = delivery.transport.send(boxes_to_send, schedule.sent, mesh)

    def arrived(r: int) -> jax.Array:
        """Return the box that this device receives or keeps in round r."""
        # Boxes to keep are cut out here, so that a branch of a `switch` cuts only its own.
        box = cut_out(r) if r < n_local else received[r - n_local]
        return _signed(box, all_rounds[r], mesh)

    # Boxes that fill the new block exactly are concatenated: one copy instead of one per box.
    if delivery.op is None and delivery.transport.branches:
        tiling_of_device = tilings(all_rounds, delivery.after)
        if tiling_of_device is not None:
            return _tiled_by_device(tiling_of_device, arrived, axes)
    arrivals = [_Arrival(messages, arrived(r)) for r, messages in enumerate(all_rounds)]
    if delivery.adds_in_order:
        arrivals = _by_sender(arrivals, mesh)
        starts = _box_starts([arrival.messages for arrival in arrivals], mesh.n_devices, axes)
    for arrival, start in zip(arrivals, starts, strict=True):
        receives = _receivers(arrival.messages, mesh.n_devices)
        out = _with_box(out, arrival.box, start.received, receives, delivery.op, axes)
    return out


class _Arrival(NamedTuple):
    """The box that a device receives or keeps in a round, and the messages of all devices in it."""

    messages: Round
    box: jax.Array


def _by_sender(arrivals: Sequence[_Arrival], mesh: Mesh) -> list[_Arrival]:
    """Sort the boxes that each device receives by their senders.

    On 3 devices a round may bring device 0 the box of device 1, and device 1 that of device 2. Of
    the results, the first has the box of device 0 on every device, the second that of device 1.
    """
    n_devices = mesh.n_devices
    senders = np.full((n_devices, len(arrivals)), n_devices)  # so many where nothing arrives
    for r, arrival in enumerate(arrivals):
        for message in arrival.messages:
            senders[message.dst, r] = message.src
    order = np.argsort(senders, axis=1, kind="stable")  # [devices, rounds]

    boxes = _stacked([arrival.box for arrival in arrivals])
    # Else XLA may fuse a box that stays on its device with the product that made it, unrounded.
    boxes = lax.optimization_barrier(boxes)
    boxes = boxes[row_of_this_device(order, long_axes(mesh))]
    results = []
    for k in range(len(arrivals)):
        messages: list[Message] = []
        for r, arrival in enumerate(arrivals):
            messages += [message for message in arrival.messages if order[message.dst, k] == r]
        if messages:
            results.append(_Arrival(tuple(messages), boxes[k]))
    return results


def _stacked(boxes: Sequence[jax.Array]) -> jax.Array:
    """Stack boxes, padded to the longest along every dim."""
    longest = np.max([box.shape for box in boxes], axis=0)
    padded = []
    for box in boxes:
        missing = [(0, length) for length in longest - box.shape]
        padded.append(jnp.pad(box, missing))
    return jnp.stack(padded)


def _with_box(
    out: jax.Array,
    box: jax.Array,
    start: list[Any],
    receives: NDArray[np.bool_],
    op: str | None,
    axes: Sequence[str],
) -> jax.Array:
    """Write a box into a block, or add it, on the devices that receive one.

    All devices run the same code: where nothing arrives, the elements that are there are rewritten.

    Args:
        out: The block.
        box: The box that arrived; on devices that receive none, anything.
        start: The first row of its place along every dim.
        receives: For every device, whether it receives a box.
        op: "sum" to add the box; None to overwrite what is there.
        axes: The axes that number the devices.
    """
    write = partial(lax.dynamic_update_slice, allow_negative_indices=False)
    if op is None and receives.all():
        return write(out, box, start)
    present = lax.dynamic_slice(out, start, box.shape, allow_negative_indices=False)
    if op is not None:
        box = present + box
    if not receives.all():
        box = jnp.where(row_of_this_device(receives, axes), box, present)
    return write(out, box, start)


def _by_tables(delivery: _Delivery, x: jax.Array, out: jax.Array) -> jax.Array:
    """Send boxes of any rows: pack each into a compact box, and spread it over the new block.

    A box with the rows 0, 2 of `x` may arrive at the rows 3, 1 of `out`. Every box is spread to the
    shape of `out` by a table of positions, and written, or combined by the delivery's op, where it
    has elements.
    """
    schedule = delivery.schedule
    all_rounds = schedule.all_rounds  # first those in which devices keep boxes, then the others
    n_local = len(schedule.local)
    mesh = delivery.after.mesh
    axes = long_axes(mesh)
    tables_of_rounds = [_round_tables(messages, delivery.after) for messages in all_rounds]

    packed = []
    for tables in tables_of_rounds:
        box = x
        for dim, table in enumerate(tables):
            box = pick_rows(box, dim, table.packing, axes)
        packed.append(box)
    received = delivery.transport.send(packed[n_local:], schedule.sent, mesh)

    arrivals = list(map(_Arrival, all_rounds, packed[:n_local] + received))
    if delivery.adds_in_order:
        arrivals = _by_sender(arrivals, mesh)
        tables_of_rounds = [_round_tables(arrival.messages, delivery.after) for arrival in arrivals]
    is_written = jnp.zeros(out.shape, bool)
    for (messages, box), tables in zip(arrivals, tables_of_rounds, strict=True):
        box = _signed(box, messages, mesh)
        for dim, table in enumerate(tables):
            box = pick_rows(box, dim, table.placing, axes)
        if delivery.op is not None:
            # The first box at a place is written, not combined with the zero that is there.
            box = jnp.where(is_written, COMBINE[delivery.op](out, box), box)
        has_element = _elements_of_box(messages, tables, mesh)
        out = jnp.where(has_element, box, out)
        is_written = is_written | has_element
    return out


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
    """Where the box that a device sends in a round begins, and the one that it receives: a row per dim.

    Rows are counted in the device's own block, before and after the exchange.
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
    for r, end, dim in np.argwhere(differs).tolist():  # end: 0 is sent, 1 is received
        starts[r][end][dim] = row_of_this_device(table[:, r, end, dim], axes)
    return starts


def _table_of_starts(all_rounds: Sequence[Round], n_devices: int) -> NDArray[np.int32]:
    """Tabulate where the boxes of all devices begin: [devices, rounds, sent or received, dims]."""
    ndim = len(all_rounds[0][0].box)
    table = np.zeros((n_devices, len(all_rounds), 2, ndim), np.int32)
    for r, messages in enumerate(all_rounds):
        # A device without a box cuts out another's rows, which nobody reads: the more starts are
        # equal, the more of them are constants.
        table[:, r] = _first_rows(messages[0])
        for message in messages:
            first_rows = _first_rows(message)
            table[message.src, r, 0] = first_rows.sent
            table[message.dst, r, 1] = first_rows.received
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
        first_rows = rows_at(messages[0].box[dim], end=0)  # in the sender's block
        packing = padded_table([first_rows] * n_devices, box_length)
        placing = np.full((n_devices, after.max_local_shape[dim]), VOID, np.int64)
        for message in messages:
            sent_rows = rows_at(message.box[dim], end=0)
            received_rows = rows_at(message.box[dim], end=1)  # in the receiver's block
            packing[message.src, : len(sent_rows)] = sent_rows
            placing[message.dst] = inverse(received_rows, placing.shape[1])
        tables.append(DimTables(packing, placing))
    return tables


def tilings(schedule: Sequence[Round], after: Sharding) -> tuple[Tiling, ...] | None:
    """Return how equal boxes fill the block of each device without gaps, if they do.

    A block of 4 rows whose rows 0-1 arrive in round 3 and rows 2-3 in round 0 has the tiling
    (((0,), 3), ((2,), 0)): for each box its first row along every dim, and its round.

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
    # For each device a dict: where a box begins -> the round in which it arrives.
    round_at: list[dict[Shape, int]] = [{} for _ in range(after.mesh.n_devices)]
    for r, messages in enumerate(schedule):
        for message in messages:
            start = tuple(_first_rows(message).received)
            round_at[message.dst][start] = r

    tiling_of_device = tuple(tuple(sorted(of_device.items())) for of_device in round_at)
    # Boxes of one shape at different places do not overlap here. If they have as many elements as
    # the block, there is no gap.
    box_size = math.prod(shapes.pop())
    block_size = math.prod(after.max_local_shape)
    if any(len(tiling) * box_size != block_size for tiling in tiling_of_device):
        return None
    # Devices with equal tilings share one branch of the program.
    n_compiled = sum(map(len, set(tiling_of_device)))
    return tiling_of_device if n_compiled <= MOST_TILES else None


def _tiled_by_device(
    tiling_of_device: Sequence[Tiling], box: Callable[[int], jax.Array], axes: Sequence[str]
) -> jax.Array:
    """Concatenate boxes as this device's tiling says: a branch for each distinct tiling."""
    distinct = list(dict.fromkeys(tiling_of_device))
    branch_of_device = [distinct.index(tiling) for tiling in tiling_of_device]
    branches = [partial(tiled, tiling, box) for tiling in distinct]
    return lax.switch(row_of_this_device(np.array(branch_of_device, np.int32), axes), branches)


def tiled(tiling: Tiling, box: Callable[[int], jax.Array], dim: int = 0) -> jax.Array:
    """Concatenate the boxes of a tiling into a block.

    Boxes with the same first row along `dim` are joined into a slab along the dims after it
    (by recursion), then the slabs along `dim`: 2 x 2 boxes become 2 rows of boxes, then the block.

    Args:
        tiling: For each box its first row along every dim, and its round; sorted by first rows.
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

    `block` is the block's number; its elements are seen as an array of `shape`. The new block is
    `new_shape`, whose dims are in the order of the sender's, transposed to `order`: [3, 2] transposed
    to (1, 0) is [2, 3]. `op` says how boxes at one place combine, `in_order` whether in the order of
    their senders.
    """

    block: int
    shape: Shape
    new_shape: Shape
    order: Shape
    messages: tuple[Message, ...]
    op: str | None
    in_order: bool


class NewBlock(NamedTuple):
    """A new block of `shape`, of parts of other blocks. It lacks the dims of length 1 that stacking adds."""

    shape: Shape
    dtypes: tuple[str, str]  # the one that travels, and the new block's
    parts: tuple[SentPart, ...]


def transfer(
    blocks: Sequence[jax.Array],
    new_blocks: Sequence[NewBlock],
    n_devices: int,
    transport: Transport,
) -> Iterator[jax.Array]:
    """Move arrays from one mesh to another: build each new block from parts that devices send.

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
        for part in new.parts:
            # For the program every new block is whole: which rows it receives is in the messages.
            after = Sharding(Layout.parse("..."), Mesh({AXIS: n_devices}), part.new_shape)
            x = blocks[part.block].reshape(part.shape).astype(travel_dtype)
            schedule = scheduled(part.messages, adds=part.op is not None)
            delivery = _Delivery(schedule, part.op, after, transport, part.in_order)
            # Messages keep the order of a source's dims, in which others of the block may differ.
            transposed = out.reshape([part.new_shape[i] for i in part.order])
            received = _delivered(delivery, x, transposed.transpose(np.argsort(part.order)))
            out = received.transpose(part.order).reshape(new.shape)
        yield out.astype(dtype)
