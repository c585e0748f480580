"""The general step in JAX: rounds of permutations, each device packing and placing by its own tables.

Decides how boxes of different shapes travel in one program: padded to the longest of their round
along every dim. Who sends what is in the messages (`xshard.steps.exchange`), when in `rounds`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.axes import send
from jax_bridge.blocks import VOID, Table, inverse, mine, pick
from jax_bridge.rounds import Round, rounds
from xshard.sharding import Sharding
from xshard.steps import Exchange
from xshard.steps.exchange import filled, rows_at

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def exchange(step: Exchange, x: jax.Array, before: Sharding, after: Sharding) -> jax.Array:
    """Sums that end are added in the order of the rounds, a device's own box first."""
    op, mesh = step.op(before), before.mesh
    axes = tuple(a for a in mesh.axes if mesh.size(a) > 1)
    out = _filled(after, x.dtype, axes)
    written = jnp.zeros(out.shape, bool)
    for messages in rounds(before, after, step.node_devices):
        box = x
        arrived = mine(np.isin(np.arange(mesh.n_devices), [m.dst for m in messages]), axes)
        tables = [_tables(messages, dim, after.max_local_shape[dim], mesh.n_devices) for dim in range(x.ndim)]
        for dim, (packing, _) in enumerate(tables):
            box = pick(box, dim, packing, axes)
        if messages[0].src != messages[0].dst:
            box = send(box, mesh, [(m.src, m.dst) for m in messages])
        for dim, (_, placing) in enumerate(tables):
            box = pick(box, dim, placing, axes)
            along = [1] * x.ndim
            along[dim] = -1
            arrived = arrived & mine(placing != VOID, axes).reshape(along)
        if any(m.sign < 0 for m in messages):
            signs = np.ones(mesh.n_devices, np.int8)
            signs[[m.dst for m in messages]] = [m.sign for m in messages]
            box = jnp.where(mine(signs, axes) < 0, -box, box)
        if op is not None:
            box = jnp.where(written, COMBINE[op](out, box), box)
        out, written = jnp.where(arrived, box, out), written | arrived
    return out


def _filled(after: Sharding, dtype: jnp.dtype, axes: tuple[str, ...]) -> jax.Array:
    """A block of what stands outside the array, and zeros."""
    out = jnp.zeros(after.max_local_shape, dtype)
    for dim, length in enumerate(after.max_local_shape):
        values = np.full((after.mesh.n_devices, length), np.nan)  # no value: a row of the array
        for device in range(after.mesh.n_devices):
            for d, start, stop, value in filled(after, device):
                values[device, start:stop] = value if d == dim else values[device, start:stop]
        if not np.isnan(values).all():
            along = [1] * out.ndim
            along[dim] = -1
            inside = mine(np.isnan(values), axes).reshape(along)
            constants = mine(np.nan_to_num(values, posinf=np.inf, neginf=-np.inf), axes).astype(dtype)
            out = jnp.where(inside, out, constants.reshape(along))
    return out


class _Tables(NamedTuple):
    """One round along one dim, per device: the rows to pack, and which packed row goes to every row."""

    packing: Table
    placing: Table


def _tables(messages: Round, dim: int, length: int, n_devices: int) -> _Tables:
    width = max(m.shape[dim] for m in messages)
    packing = np.full((n_devices, width), VOID, np.int64)
    placing = np.full((n_devices, length), VOID, np.int64)
    # What lies beyond a message is never read. Where no rows are to be packed, those of another
    # device do: a table of equal rows is a constant.
    idle = rows_at(messages[0].box[dim], 0)
    packing[:, : len(idle)] = idle
    for message in messages:
        taken, given = (rows_at(message.box[dim], end) for end in (0, 1))
        packing[message.src, : len(taken)] = taken
        placing[message.dst] = inverse(given, length)
    return _Tables(packing, placing)
