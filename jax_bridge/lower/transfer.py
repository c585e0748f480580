"""Blocks of many arrays, sent between devices of two meshes by one program.

A device is a number here, and every device has a block of each array before, and of each after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.lower.exchange import by_rounds
from jax_bridge.lower.schedule import scheduled
from jax_bridge.lower.transports import Transport
from jax_bridge.mesh.axis_types import from_bits, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.steps.exchange.messages import Message

AXIS = "device"


class SentPart(NamedTuple):
    """The messages of block number `block`, seen as `shape`. op: how boxes at one place combine."""

    block: int
    shape: tuple[int, ...]
    messages: tuple[Message, ...]
    op: str | None


class NewBlock(NamedTuple):
    """A new block: parts of other blocks, put into `shape`, transposed to `order`, and seen as `block`.

    dtypes: the dtype that travels, and the dtype of the new block.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block: tuple[int, ...]
    dtypes: tuple[str, str]
    parts: tuple[SentPart, ...]


def transfer(
    blocks: Sequence[jax.Array], new_blocks: Sequence[NewBlock], n_devices: int, transport: Transport
) -> Iterator[jax.Array]:
    """This device's blocks -> its new ones, in a `shard_map` over the one axis `AXIS`, without types.

    Messages are between devices by number. Rows that receive nothing are zero.
    """
    for new in new_blocks:
        dims = tuple(Dim(f"d{i}") for i in range(len(new.shape)))
        after, out = (
            Sharding(Layout(dims), Mesh({AXIS: n_devices}), new.shape),
            jnp.zeros(new.shape, new.dtypes[0]),
        )
        for part in new.parts:
            x = blocks[part.block].reshape(part.shape).astype(new.dtypes[0])
            schedule = scheduled(part.messages, adds=part.op is not None)
            if part.op:
                out = by_rounds(schedule, part.op, x, out, after, transport)
            else:
                bits = by_rounds(schedule, None, to_bits(x), to_bits(out), after, transport)
                out = from_bits(bits, out.dtype)
        yield out.transpose(new.order).reshape(new.block).astype(new.dtypes[1])
