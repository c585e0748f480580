"""An exchange: messages of any rows between any devices, in one collective.

Some backends and `torch.compile` have no point-to-point calls, so that it is an all-to-all, in which most
messages may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    outgoing = _outgoing(step, context, group)
    incoming = _incoming(step, context, group)

    # How the new block is put together: of all messages, in the order in which they add. Rows of
    # this process's own block do not travel: they are read from it then.
    ordered = _in_order_of_addition(incoming, axes, context, me)
    messages = tuple(part.rows for part in ordered)
    whole = Packing(context.shapes.after, messages, None, op, _fills(context))
    own_rows = iter([part.rows for part in outgoing if part.peer == me])
    kept = tuple(next(own_rows) if part.peer == me else None for part in ordered)
    received = _packing_of_others(context.shapes.after, incoming, group, me, op)
    assembly = _Assembly(kept, received, whole)

    traffic = steps.Exchange(context.after.layout).traffic(context.before)
    if not traffic.received:  # by any device of the mesh, so that all or none call the collective
        return partial(assembly.assembled, messages=())
    sent = _packing_of_others(context.shapes.before, outgoing, group, me, op)
    collective = Collective("all_to_all", group, sent.sizes_by_rank, received.sizes_by_rank)
    return PackedCollective(collective, sent, received.arriving, assembly.unpack, assembly.place)


def _communicating_axes(step: steps.Exchange, context: StepContext) -> Sequence[str]:
    """Return the mesh axes along which a message's sender may differ from its receiver."""
    if step.node_devices is None:
        return moving_axes(context.before, context.after)
    # Senders are chosen in the receiver's node: they may differ along any axis.
    return context.after.mesh.axes


def _outgoing(step: steps.Exchange, context: StepContext, group: Group) -> list[Part]:
    """Return the messages of this process, to itself too, by their receivers' ranks."""
    messages = messages_from(context.before, context.after, context.device, step.node_devices)
    parts = [
        Part(group.devices.index(message.dst), _rows(context, message, 0)) for message in messages
    ]
    return sorted(parts, key=_rank)


def _incoming(step: steps.Exchange, context: StepContext, group: Group) -> list[Part]:
    """Return the messages for this process, from itself too, by their senders' ranks."""
    messages = messages_to(context.before, context.after, context.device, step.node_devices)
    parts = [
        # The receiver multiplies by the sign: some dtypes that travel cannot be negated.
        Part(
            group.devices.index(message.src),
            replace(_rows(context, message, 1), sign=message.sign),
        )
        for message in messages
    ]
    return sorted(parts, key=_rank)


def _in_order_of_addition(
    incoming: list[Part], axes: Sequence[str], context: StepContext, me: int
) -> list[Part]:
    """Return messages in the order of the ranks, so that replicas and copies add in one order."""
    layout = context.after.layout
    are_results_unique = set(axes) <= set(layout.axes) - set(layout.tagged("copy"))
    if not are_results_unique:
        return incoming
    # No replicas or copies, which would have to add in one order: own rows come first.
    return sorted(incoming, key=lambda part: part.peer != me)


def _fills(context: StepContext) -> tuple[Fill, ...]:
    """Return the constant rows of this process's block, which lie beyond the ends of the array."""
    return tuple(
        context.fill(dim, start, stop, value)
        for dim, start, stop, value in boundary_fills(context.after, context.device)
    )


def _rank(part: Part) -> int:
    return part.peer


def _rows(context: StepContext, message: Message, end: int) -> Subarray:
    """Return the rows of a message in this process's block before (0) or after (1) the step."""
    return context.subarray(context.shapes[end], box_rows(message.box, end))


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
class _Assembly:
    """How a process makes its new block of the rows that it keeps and of the messages of others.

    Attributes:
        kept: For each message of `whole` its rows in the old block, if they are this process's own;
            None for a message of others.
        received: The messages of others.
        whole: All of them, in the order in which they add, and fills.
    """

    kept: tuple[Subarray | None, ...]
    received: Packing
    whole: Packing

    def unpack(self, block: Tensor, arrived: Tensor) -> Tensor:
        """Assemble the block of one tensor with all messages."""
        if not any(self.kept) and not self.whole.fills:
            # Only messages of others: they may be the block as it lies in memory, without a copy.
            return self.received.unpack(arrived)
        return self.assembled(block, self.received.split(arrived))

    def place(self, block: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Assemble the block of one tensor per rank."""
        return self.assembled(block, self.received.split_each(parts))

    def assembled(self, block: Tensor, messages: Sequence[Tensor]) -> Tensor:
        """Assemble the block of the messages of others, each in its shape."""
        arrived = iter(messages)
        parts = [next(arrived) if rows is None else rows.read(block) for rows in self.kept]
        return self.whole.place(block, parts)
