"""An exchange: messages of any rows between any devices, in one collective.

Some backends and `torch.compile` have no point-to-point calls, so that it is an all-to-all, in which most
messages may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.executable import Move
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.step_context import StepContext
from torch_bridge.lower.subarray import Fill, Subarray, box_rows
from torch_bridge.mesh.process_mesh import Group
from xshard import steps
from xshard.steps.exchange.messages import Message, boundary_fills, messages_from, messages_to
from xshard.steps.exchange.traffic import moving_axes


class Part(NamedTuple):
    """One message: the rank at its other end, and its rows of this process's block."""

    peer: int
    rows: Subarray


class Assembly(NamedTuple):
    """How a process makes its new block of the rows that it keeps and of the messages of others.

    Attributes:
        kept: For each message of `whole` its rows in the old block, if they are this process's own;
            None for a message of others.
        whole: The new block: all messages, in the order in which they add, and fills.
    """

    kept: tuple[Subarray | None, ...]
    whole: Packing

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        outgoing: Iterable[Part],
        incoming: Sequence[Part],
        me: int,
        op: str | None,
        fills: tuple[Fill, ...] = (),
        *,
        rounds_once: bool = False,
    ) -> Assembly:
        """Make a block of `shape` of all messages, in the order of `incoming`.

        Those of this process to itself, whose rank is `me`, are in one order in both lists.
        """
        own_rows = iter([part.rows for part in outgoing if part.peer == me])
        kept = tuple(next(own_rows) if part.peer == me else None for part in incoming)
        rows = tuple(part.rows for part in incoming)
        return cls(kept, Packing(shape, rows, None, op, fills, rounds_once))

    def place(self, block: Tensor, messages: Iterable[Tensor]) -> Tensor:
        """Return the new block, of the old one and the messages of others, each in its shape."""
        arrived = iter(messages)
        parts = [next(arrived) if rows is None else rows.read(block) for rows in self.kept]
        return self.whole.place(block, parts)


def exchange(step: steps.Exchange, context: StepContext) -> Move:
    """Make the function that runs an exchange, in which each process sends any rows to any others.

    A halo is one: each process sends its edge rows to its neighbours, and keeps the rest. The
    result maps this process's block before the step to the block after it: with one all-to-all over
    the mesh axes along which senders and receivers differ, or without any if no device of the mesh
    receives anything.
    """
    op = step.op(context.before)  # the reduction that combines messages for one row, as "sum"
    axes = _communicating_axes(step, context)
    group = context.group(axes)
    me = group.devices.index(context.device)
    before = context.before
    after = context.after
    sent_messages = messages_from(before, after, context.device, step.node_devices)
    received_messages = messages_to(before, after, context.device, step.node_devices)
    outgoing = _parts(sent_messages, 0, context, group)
    incoming = _parts(received_messages, 1, context, group)

    # Rows of this process's own block do not travel: they are read from it at the end.
    ordered = _in_order_of_addition(incoming, axes, context, me)
    in_order = context.adds_in_order
    assembly = Assembly.of(
        context.shapes.after, outgoing, ordered, me, op, _fills(context), rounds_once=in_order
    )
    traffic = steps.Exchange(after.layout).traffic(before)
    if not traffic.received:  # by any device of the mesh, so that all or none call the collective
        return partial(assembly.place, messages=())
    sent = _packing_of_others(context.shapes.before, outgoing, group, me, op)
    received = _packing_of_others(context.shapes.after, incoming, group, me, op)
    received = replace(received, rounds_once=in_order)
    collective = Collective("all_to_all", group, sent.sizes_by_rank, received.sizes_by_rank)
    if any(assembly.kept) or assembly.whole.fills:
        return _ExchangeOfRows(collective, sent, received, assembly)
    # Only messages of others: they may be the block as it lies in memory, without a copy.
    return PackedCollective(collective, sent, received)


def _communicating_axes(step: steps.Exchange, context: StepContext) -> Sequence[str]:
    """Return the mesh axes along which a message's sender may differ from its receiver."""
    if step.node_devices is None:
        return moving_axes(context.before, context.after)
    # Senders are chosen in the receiver's node: they may differ along any axis.
    return context.after.mesh.axes


def _parts(messages: Iterable[Message], end: int, context: StepContext, group: Group) -> list[Part]:
    """Return the messages that this process sends (end 0) or receives (1), by the other end's rank.

    Those to itself are among them.
    """
    shape = context.shapes[end]
    parts: list[Part] = []
    for message in messages:
        rows = context.subarray(shape, box_rows(message.box, end))
        peer = message.dst
        if end == 1:
            # The receiver multiplies by the sign: some dtypes that travel cannot be negated.
            rows = replace(rows, sign=message.sign)
            peer = message.src
        parts.append(Part(group.devices.index(peer), rows))
    return sorted(parts, key=attrgetter("peer"))


def _in_order_of_addition(
    incoming: list[Part], axes: Sequence[str], context: StepContext, me: int
) -> list[Part]:
    """Return messages in the order of the ranks where that matters, else own rows first.

    Replicas and copies have to add in one order, and all blocks if a plan asks for it.
    """
    layout = context.after.layout
    are_results_unique = set(axes) <= set(layout.axes) - set(layout.tagged("copy"))
    if context.adds_in_order or not are_results_unique:
        return incoming
    # Own rows first: what others add to a fold is small beside them.
    return sorted(incoming, key=lambda part: part.peer != me)


def _fills(context: StepContext) -> tuple[Fill, ...]:
    """Return the constant rows of this process's block, which lie beyond the ends of the array."""
    return tuple(
        context.fill(dim, start, stop, value)
        for dim, start, stop, value in boundary_fills(context.after, context.device)
    )


def _packing_of_others(
    shape: tuple[int, ...], parts: Iterable[Part], group: Group, me: int, op: str | None
) -> Packing:
    """Return the messages to or from other ranks; own rows do not travel."""
    others = [part for part in parts if part.peer != me]
    counts = [0] * len(group.devices)
    for part in others:
        counts[part.peer] += 1
    return Packing(shape, tuple(part.rows for part in others), tuple(counts), op)


@dataclass(frozen=True, eq=False)
class _ExchangeOfRows(PackedCollective):
    """An exchange after which a process has rows of its own, or constant ones, beside those of others."""

    assembly: Assembly

    def unpack(self, block: Tensor, arrived: Tensor) -> Tensor:
        return self.assembly.place(block, self.received.split(arrived))

    def place(self, block: Tensor, parts: Sequence[Tensor]) -> Tensor:
        return self.assembly.place(block, self.received.split_each(parts))
