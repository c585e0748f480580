"""The exchange step in JAX: every device packs a box per round, sends it, and places the boxes it receives.
Boxes are handled as slices if all boxes of a round are slices of one shape, else by tables of rows, padded to
the longest along every dim. Boxes that tile a block are concatenated.
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

from jax_bridge.lower.row_tables import VOID, Table, along, inverse, mine, pick
from jax_bridge.lower.transports import Round, Schedule, Transport, box_shape, rounds, scheduled
from jax_bridge.mesh.axis_types import as_varying, from_bits, long_axes, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.steps import Exchange
from xshard.steps.exchange.messages import Message, rows_at

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}

# First rows of boxes in a receiver's block, sorted, each with the round in which its box arrives.
Tiling = tuple[tuple[tuple[int, ...], int], ...]

MOST_TILES = 32  # in all distinct tilings together: each tiling is compiled as a branch


def exchange(
    step: Exchange, x: jax.Array, before: Sharding, after: Sharding, transport: Transport
) -> jax.Array:
    """A block before the step -> after it; sums in the order of the rounds, after a device's own box."""
    # A box that stays has the type of one that is sent: all branches of a program have one type.
    x, out = (
        as_varying(y, long_axes(after.mesh)) for y in (x, jnp.zeros(after.max_local_shape, x.dtype))
    )
    return _by_rounds(rounds(step, before), step.op(before), x, out, after, transport)


def _by_rounds(
    schedule: Schedule,
    op: str | None,
    x: jax.Array,
    out: jax.Array,
    after: Sharding,
    transport: Transport,
) -> jax.Array:
    """The new block: `out` with the boxes that messages bring. op: how boxes at one place combine."""
    if not schedule.every:  # no rows to send
        return out
    by = _by_slices if op in (None, "sum") and all(map(_are_slices, schedule.every)) else _by_tables
    if op is not None or any(
        message.sign < 0 for messages in schedule.every for message in messages
    ):
        return by(schedule, op, x, out, after, transport)
    return from_bits(by(schedule, op, to_bits(x), to_bits(out), after, transport), x.dtype)


def _by_slices(
    schedule: Schedule,
    op: str | None,
    x: jax.Array,
    out: jax.Array,
    after: Sharding,
    transport: Transport,
) -> jax.Array:
    """Cut boxes out of the block and put or add them in place, without a pass over the whole block."""
    mesh = after.mesh
    axes = long_axes(after.mesh)
    every = schedule.every
    n_local = len(schedule.local)
    starts = _my_starts(every, mesh.n_devices, axes)

    def cut(r: int) -> jax.Array:
        return lax.dynamic_slice(x, starts[r][0], box_shape(every[r]), allow_negative_indices=False)

    def box(r: int) -> jax.Array:
        return _signed(cut(r) if r < n_local else arrived[r - n_local], every[r], mesh)

    arrived = transport.send([cut(r) for r in range(n_local, len(every))], schedule.sent, mesh)
    by_device = tilings(every, after) if op is None and transport.branches else None
    if by_device is not None:
        distinct = list(dict.fromkeys(by_device))
        which = np.array([distinct.index(tiling) for tiling in by_device], np.int32)
        return lax.switch(mine(which, axes), [partial(tiled, tiling, box) for tiling in distinct])
    for r, messages in enumerate(every):
        new = box(r)
        arrives = _receivers(messages, mesh.n_devices)
        if op is not None or not arrives.all():
            there = lax.dynamic_slice(out, starts[r][1], new.shape, allow_negative_indices=False)
            new = new if op is None else there + new
            new = new if arrives.all() else jnp.where(mine(arrives, axes), new, there)
        out = lax.dynamic_update_slice(out, new, starts[r][1], allow_negative_indices=False)
    return out


def _by_tables(
    schedule: Schedule,
    op: str | None,
    x: jax.Array,
    out: jax.Array,
    after: Sharding,
    transport: Transport,
) -> jax.Array:
    """Spread every box over a block of its own, and combine the blocks where they have rows."""
    mesh = after.mesh
    axes = long_axes(after.mesh)
    every = schedule.every
    n_local = len(schedule.local)
    tables = [list(_tables(messages, after)) for messages in every]
    packed = []
    for along_dims in tables:
        box = x
        for dim, (packing, _) in enumerate(along_dims):
            box = pick(box, dim, packing, axes)
        packed.append(box)
    arrived = (*packed[:n_local], *transport.send(packed[n_local:], schedule.sent, mesh))
    written = jnp.zeros(out.shape, bool)
    for messages, box, along_dims in zip(every, arrived, tables, strict=True):
        box = _signed(box, messages, mesh)
        arrives = mine(_receivers(messages, mesh.n_devices), axes)
        for dim, (_, placing) in enumerate(along_dims):
            box = pick(box, dim, placing, axes)
            arrives = arrives & along(mine(placing != VOID, axes), dim, box.ndim)
        if op is not None:
            box = jnp.where(written, COMBINE[op](out, box), box)
        out = jnp.where(arrives, box, out)
        written = written | arrives
    return out


def _receivers(messages: Round, n_devices: int) -> NDArray[np.bool_]:
    """For every device, whether it receives a box."""
    return np.isin(np.arange(n_devices), [m.dst for m in messages])


def _signed(box: jax.Array, messages: Round, mesh: Mesh) -> jax.Array:
    """The box with its message's sign: rows from beyond a pole may be negated."""
    if all(message.sign > 0 for message in messages):
        return box
    signs = np.ones(mesh.n_devices, np.int8)
    signs[[message.dst for message in messages]] = [message.sign for message in messages]
    return jnp.where(mine(signs, long_axes(mesh)) < 0, -box, box)


def _are_slices(messages: Round) -> bool:
    shape = box_shape(messages)
    return all(m.shape == shape and all(len(segments) == 1 for segments in m.box) for m in messages)


def _my_starts(
    schedule: Sequence[Round], n_devices: int, axes: tuple[str, ...]
) -> list[list[list[Any]]]:
    """First row of this device's boxes: by round, box (the sent one, the received one) and dim."""
    starts = np.zeros((n_devices, len(schedule), 2, len(schedule[0][0].box)), np.int32)
    for r, messages in enumerate(schedule):
        starts[:, r] = _first_rows(messages[0])  # devices without a box take any rows
        for message in messages:
            src, dst = _first_rows(message)
            starts[message.src, r, 0], starts[message.dst, r, 1] = src, dst
    # One table per number, a constant if all devices agree: XLA compiles these to the simplest loops.
    own: list[list[list[Any]]] = [[list(rows) for rows in sides] for sides in starts[0]]
    for differing in np.argwhere((starts != starts[0]).any(axis=0)):
        r, side, dim = differing.tolist()
        own[r][side][dim] = mine(starts[:, r, side, dim], axes)
    return own


def _first_rows(message: Message) -> list[list[int]]:
    """The first row of a box along every dim, in the sender's and the receiver's block."""
    return [[segments[0][side] for segments in message.box] for side in (0, 1)]


def _tables(messages: Round, after: Sharding) -> Iterator[tuple[Table, Table]]:
    """A round along each dim, per device: the rows to pack, and the packed row for each result row."""
    n_devices = after.mesh.n_devices
    for dim, (width, length) in enumerate(
        zip(box_shape(messages), after.max_local_shape, strict=True)
    ):
        packing = np.full((n_devices, width), VOID, np.int64)
        placing = np.full((n_devices, length), VOID, np.int64)
        # Rows beyond a message are never read. A device that sends nothing packs another device's rows:
        # a table of equal rows is a constant.
        idle = rows_at(messages[0].box[dim], 0)
        packing[:, : len(idle)] = idle
        for message in messages:
            sent, received = (rows_at(message.box[dim], side) for side in (0, 1))
            packing[message.src, : len(sent)] = sent
            placing[message.dst] = inverse(received, length)
        yield packing, placing


def tilings(schedule: Sequence[Round], after: Sharding) -> tuple[Tiling, ...] | None:
    """Every device's tiling by slices; None if they differ in shape, leave gaps, or make too many tilings."""
    shapes = {box_shape(messages) for messages in schedule}
    if len(shapes) > 1:
        return None
    tiles: list[dict[tuple[int, ...], int]] = [{} for _ in range(after.mesh.n_devices)]
    for r, messages in enumerate(schedule):
        for message in messages:
            tiles[message.dst][tuple(segment.dst for (segment,) in message.box)] = r
    by_device = tuple(tuple(sorted(tiling.items())) for tiling in tiles)
    covered = math.prod(*shapes)
    block = math.prod(after.max_local_shape)
    fills = all(len(tiling) * covered == block for tiling in by_device)
    return by_device if fills and sum(map(len, set(by_device))) <= MOST_TILES else None


def tiled(tiling: Tiling, box: Callable[[int], jax.Array], dim: int = 0) -> jax.Array:
    """The block of one tiling. box: the box that arrives in a round."""
    if len(tiling) == 1:
        return box(tiling[0][1])
    rows = [tuple(along) for _, along in itertools.groupby(tiling, key=lambda tile: tile[0][dim])]
    return lax.concatenate([tiled(row, box, dim + 1) for row in rows], dim)


AXIS = "device"


class SentPart(NamedTuple):
    """The messages of block number `block`, seen as `shape`. op: how boxes at one place combine."""

    block: int
    shape: tuple[int, ...]
    messages: tuple[Message, ...]
    op: str | None


class NewBlock(NamedTuple):
    """A new block: parts of other blocks, put into `shape`, transposed to `order`, and seen as `block`."""

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
    """This device's blocks -> its new ones, in a `shard_map` over the one axis `AXIS`, without types. Devices
    of the two meshes are numbers here. Rows that receive nothing are zero.
    """
    for new in new_blocks:
        dims = tuple(Dim(f"d{i}") for i in range(len(new.shape)))
        after = Sharding(Layout(dims), Mesh({AXIS: n_devices}), new.shape)
        out = jnp.zeros(new.shape, new.dtypes[0])
        for part in new.parts:
            x = blocks[part.block].reshape(part.shape).astype(new.dtypes[0])
            schedule = scheduled(part.messages, adds=part.op is not None)
            out = _by_rounds(schedule, part.op, x, out, after, transport)
        yield out.transpose(new.order).reshape(new.block).astype(new.dtypes[1])
