"""An exchange: messages of any rows between any devices, in one collective.

Some backends and `torch.compile` have no point-to-point calls, so that it is an all-to-all, in which most
messages may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import ClassVar, NamedTuple

from torch import Tensor

from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.executable import Move
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.step_context import StepContext
from torch_bridge.lower.subarray import AFTER, BEFORE, Fill, Subarray, box_rows
from torch_bridge.mesh.process_mesh import Group
from xshard import steps
from xshard.steps.exchange.messages import Message, boundary_fills, messages_from, messages_to
from xshard.steps.exchange.traffic import moving_axes


class PeerMessage(NamedTuple):
    """One message as this process sees it: the rank at its other end, and rows of this process's block."""

    peer: int
    rows: Subarray


class Assembly(NamedTuple):
    """How a process makes its new block: of messages from other ranks, and of rows of its old block.

    Rows that stay on this rank count as a message from it to itself, which does not travel.

    Attributes:
        kept: For each message of `new_block`, the rows to read from the old block if they stay on
            this rank; None for a message from another rank.
        new_block: All messages, in the order in which they add, and fills.
    """

    kept: tuple[Subarray | None, ...]
    new_block: Packing

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        outgoing: Iterable[PeerMessage],
        incoming: Sequence[PeerMessage],
        rank: int,
        op: str | None,
        fills: tuple[Fill, ...] = (),
        *,
        rounds_once: bool = False,
    ) -> Assembly:
        """Make a block of `shape` of all messages, in the order of `incoming`.

        Those of this process to itself, whose rank is `rank`, are in one order in both lists.
        """
        rows_that_stay = iter([message.rows for message in outgoing if message.peer == rank])
        kept = tuple(next(rows_that_stay) if message.peer == rank else None for message in incoming)
        rows = tuple(message.rows for message in incoming)
        return cls(kept, Packing(shape, rows, op=op, fills=fills, rounds_once=rounds_once))

    def place(self, block: Tensor, arrived: Iterable[Tensor]) -> Tensor:
        """Return the new block, of the old one and of what arrived from other ranks."""
        remaining = iter(arrived)
        tensors = [next(remaining) if rows is None else rows.read(block) for rows in self.kept]
        return self.new_block.place(block, tensors)


def exchange(step: steps.Exchange, context: StepContext) -> Move:
    """Make the function that runs an exchange, in which each process sends any rows to any others.

    A halo is one: each process sends its edge rows to its neighbours, and keeps the rest. The
    result maps this process's block before the step to the block after it: with one all-to-all over
    the mesh axes along which senders and receivers differ, or without any if no device of the mesh
    receives anything.
    """
    reduction = step.op(context.before)  # how messages for one row combine, as "sum"
    axes = _communicating_axes(step, context)
    group = context.group(axes)
    rank = group.devices.index(context.device)
    before = context.before
    after = context.after
    sent_messages = messages_from(before, after, context.device, step.node_devices)
    received_messages = messages_to(before, after, context.device, step.node_devices)
    outgoing = _messages_by_peer(sent_messages, BEFORE, context, group)
    incoming = _messages_by_peer(received_messages, AFTER, context, group)

    # Rows of this process's own block do not travel: they are read from it at the end.
    in_addition_order = _in_order_of_addition(incoming, axes, context, rank)
    adds_in_order = context.adds_in_order
    assembly = Assembly.of(
        context.shapes.after,
        outgoing,
        in_addition_order,
        rank,
        reduction,
        _fills(context),
        rounds_once=adds_in_order,
    )
    traffic = steps.Exchange(after.layout).traffic(before)
    if not traffic.received:  # by any device of the mesh, so that all or none call the collective
        return partial(assembly.place, arrived=())
    sent = _packing_for_peers(context.shapes.before, outgoing, group, rank, reduction)
    received = _packing_for_peers(context.shapes.after, incoming, group, rank, reduction)
    received = replace(received, rounds_once=adds_in_order)
    collective = Collective("all_to_all", group, sent.sizes_by_rank, received.sizes_by_rank)
    if any(assembly.kept) or assembly.new_block.fills:
        return _ExchangeOfRows(collective, sent, received, assembly)
    # Only messages of others: they may be the block as it lies in memory, without a copy.
    return PackedCollective(collective, sent, received)


def _communicating_axes(step: steps.Exchange, context: StepContext) -> Sequence[str]:
    """Return the mesh axes along which a message's sender may differ from its receiver."""
    if step.node_devices is None:
        return moving_axes(context.before, context.after)
    # Senders are chosen in the receiver's node: they may differ along any axis.
    return context.after.mesh.axes


def _messages_by_peer(
    messages: Iterable[Message], end: int, context: StepContext, group: Group
) -> list[PeerMessage]:
    """Return the messages that this process sends or receives, in the order of peers.

    Rows that stay are among them, as a message to itself.

    Args:
        messages: The messages.
        end: Which end of them this process is: BEFORE, the sender, or AFTER, the receiver.
        context: The step, and this process's place in it.
        group: The processes that exchange, of which a peer is a rank.
    """
    shape = context.shapes[end]
    by_peer: list[PeerMessage] = []
    for message in messages:
        rows = context.subarray(shape, box_rows(message.box, end))
        peer = message.dst
        if end == AFTER:
            # The receiver multiplies by the sign: some dtypes that travel cannot be negated.
            rows = replace(rows, sign=message.sign)
            peer = message.src
        by_peer.append(PeerMessage(group.devices.index(peer), rows))
    return sorted(by_peer, key=attrgetter("peer"))


def _in_order_of_addition(
    incoming: list[PeerMessage], axes: Sequence[str], context: StepContext, rank: int
) -> list[PeerMessage]:
    """Return messages in the order of the ranks where that matters, else this rank's rows first.

    Replicas and copies have to add in one order, and all blocks if a plan asks for it.
    """
    layout = context.after.layout
    are_results_unique = set(axes) <= set(layout.axes) - set(layout.tagged("copy"))
    if context.adds_in_order or not are_results_unique:
        return incoming
    # This rank's rows first: what other ranks add to a fold is small beside them.
    return sorted(incoming, key=lambda message: message.peer != rank)


def _fills(context: StepContext) -> tuple[Fill, ...]:
    """Return the constant rows of this process's block, which lie beyond the ends of the array."""
    return tuple(
        context.fill(dim, start, stop, value)
        for dim, start, stop, value in boundary_fills(context.after, context.device)
    )


def _packing_for_peers(
    shape: tuple[int, ...], messages: Iterable[PeerMessage], group: Group, rank: int, op: str | None
) -> Packing:
    """Return the packing of messages to or from other ranks, without rows that stay on this one."""
    remote = [message for message in messages if message.peer != rank]
    counts = [0] * len(group.devices)
    for message in remote:
        counts[message.peer] += 1
    rows = tuple(message.rows for message in remote)
    return Packing(shape, rows, counts=tuple(counts), op=op)


@dataclass(frozen=True, eq=False)
class _ExchangeOfRows(PackedCollective):
    """An exchange after which a process has rows of its own, or constant ones, beside those of others."""

    assembly: Assembly
    keeps_rows: ClassVar[bool] = True

    def unpack(self, block: Tensor, arrived: Tensor) -> Tensor:
        return self.assembly.place(block, self.received.split(arrived))

    def place(self, block: Tensor, buffers: Sequence[Tensor]) -> Tensor:
        return self.assembly.place(block, self.received.split_each(buffers))
