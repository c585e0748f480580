"""A move in which messages travel, taken apart: what is sent, the collective, what becomes of it.

Decides how the messages of several moves share one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torch_bridge.lower.collectives import Collective, Pending
from torch_bridge.lower.packing import Packing


@dataclass(frozen=True, eq=False)
class PackedCollective:
    """A move whose messages travel in one collective.

    sent: the block as messages. arriving: the shape in which to receive everything at once.
    unpack: the block, and all that arrived in that shape -> the result. place: the block, and what arrived
    as one flat tensor per message of the collective -> the same.
    """

    collective: Collective
    sent: Packing
    arriving: tuple[int, ...]
    unpack: Callable[[Tensor, Tensor], Tensor]
    place: Callable[[Tensor, Sequence[Tensor]], Tensor]

    def __call__(self, block: Tensor) -> Tensor:
        return self.unpack(block, self.collective.run(self.sent.pack(block), self.arriving))

    def begin(self, block: Tensor) -> Pending:
        """The move begun -> what ends it and returns the result."""
        arrive = self.collective.begin(self.sent.pack(block), self.arriving)
        return lambda: self.unpack(block, arrive())


def run_together(relays: Sequence[PackedCollective], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Several moves of equal collectives as one: every block's result.

    What goes to one rank lies together, the first block's messages first.
    """
    collectives = [relay.collective for relay in relays]
    sent, received = [c.sent for c in collectives], [c.received for c in collectives]
    joint = replace(collectives[0], sent=_totals(sent), received=_totals(received))
    messages = blocks[0].new_empty(sum(joint.sent))
    for relay, block, parts in zip(relays, blocks, _dealt(messages, sent), strict=True):
        relay.sent.write(block, parts)
    arrived = joint.run(messages, (sum(joint.received),))
    shares = _dealt(arrived, received)
    return [relay.place(block, parts) for relay, block, parts in zip(relays, blocks, shares, strict=True)]


Sizes = Sequence[Sequence[int]]  # of every move's messages


def _totals(sizes: Sizes) -> list[int]:
    return [sum(each) for each in zip(*sizes, strict=True)]


def _dealt(joint: Tensor, sizes: Sizes) -> list[Sequence[Tensor]]:
    """One tensor of the messages of several moves, rank by rank -> the messages of every move."""
    parts = joint.split([n for each in zip(*sizes, strict=True) for n in each])
    return [parts[i :: len(sizes)] for i in range(len(sizes))]
