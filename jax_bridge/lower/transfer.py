"""Blocks of many arrays, sent from the devices that have them to those that want them: one program for all.

Decides which boxes travel as one: those of one dtype with the same senders and receivers. Knows no mesh of
arrays: a device is a number, and every device has a block of each array before, and of each after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.lower.exchange import begin
from jax_bridge.lower.schedule import Round, scheduled
from jax_bridge.lower.transports import Transport
from jax_bridge.mesh.axis_types import from_bits, to_bits
from xshard import Layout, Mesh, Sharding
from xshard.layout.runs import Segment
from xshard.notation.parser import Dim
from xshard.steps.exchange.messages import Message

AXIS = "device"


class Taken(NamedTuple):
    """What is sent of block number `block`, seen as `shape`. op: how boxes that meet at one place combine."""

    block: int
    shape: tuple[int, ...]
    messages: tuple[Message, ...]
    op: str | None


class Wanted(NamedTuple):
    """A new block: parts of others, put into `shape`, with its dims then in `order`, and seen as `block`.

    dtypes: of what travels, and of the new block.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block: tuple[int, ...]
    dtypes: tuple[str, str]
    parts: tuple[Taken, ...]


def transfer(
    blocks: Sequence[jax.Array], wanted: Sequence[Wanted], n_devices: int, transport: Transport
) -> list[jax.Array]:
    """This device's blocks -> its new ones, in a `shard_map` over the one axis `AXIS`, without types.

    Messages are between devices by number. A new block that no message reaches is zeros.
    """
    mesh, begun = Mesh({AXIS: n_devices}), []
    boxes: list[jax.Array] = []
    rounds: list[Round] = []
    for new in wanted:
        after = Sharding(Layout(tuple(Dim(f"d{i}") for i in range(len(new.shape)))), mesh, new.shape)
        for part in new.parts:
            schedule = scheduled(part.messages, adds=part.op is not None)
            x = blocks[part.block].reshape(part.shape).astype(new.dtypes[0])
            begun.append(begin(schedule, part.op, x if part.op else to_bits(x), after, transport))
            boxes += begun[-1].boxes
            rounds += schedule.sent
    arrived, ready = iter(_sent(boxes, rounds, mesh, transport)), iter(begun)
    made = []
    for new in wanted:
        out = None
        for part in new.parts:
            first = next(ready)
            there = out if out is None or part.op else to_bits(out)
            y = first.finish([next(arrived) for _ in first.boxes], there)
            out = y if part.op else from_bits(y, jnp.dtype(new.dtypes[0]))
        out = jnp.zeros(new.shape, new.dtypes[0]) if out is None else out
        made.append(out.transpose(new.order).reshape(new.block).astype(new.dtypes[1]))
    return made


def _sent(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh, transport: Transport
) -> list[jax.Array]:
    """The boxes that arrive for those that are sent."""
    together: dict[jnp.dtype, dict[tuple[tuple[int, int], ...], list[int]]] = {}
    for i, (box, messages) in enumerate(zip(boxes, rounds, strict=True)):
        pairs = tuple(sorted((m.src, m.dst) for m in messages))
        together.setdefault(box.dtype, {}).setdefault(pairs, []).append(i)
    result = list(boxes)
    for groups in together.values():
        buffers = [jnp.concatenate([boxes[i].reshape(-1) for i in members]) for members in groups.values()]
        packed = [
            tuple(Message(*pair, ((Segment(0, 0, len(buffer)),),)) for pair in pairs)
            for pairs, buffer in zip(groups, buffers, strict=True)
        ]
        for members, buffer in zip(groups.values(), transport.send(buffers, packed, mesh), strict=True):
            start = 0
            for i in members:
                result[i] = buffer[start : start + boxes[i].size].reshape(boxes[i].shape)
                start += boxes[i].size
    return result
