"""A move with communication in three parts: pack the messages, run the collective, unpack the result.

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

    sent: the block as messages. arriving: the shape of the tensor that receives all messages.
    unpack: the block and that tensor -> the result. place: the block and one flat tensor per message of
    the collective -> the same result.
    """

    collective: Collective
    sent: Packing
    arriving: tuple[int, ...]
    unpack: Callable[[Tensor, Tensor], Tensor]
    place: Callable[[Tensor, Sequence[Tensor]], Tensor]

    def __call__(self, block: Tensor) -> Tensor:
        return self.unpack(block, self.collective.run(self.sent.pack(block), self.arriving))

    def begin(self, block: Tensor) -> Pending:
        """Begin the move -> a function that ends it and returns the result."""
        arrive = self.collective.begin(self.sent.pack(block), self.arriving)
        return lambda: self.unpack(block, arrive())


def run_together(packed: Sequence[PackedCollective], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Several moves with equal collectives, in one collective -> the result for every block.

    Messages for one rank lie side by side, in the order of the blocks.
    """
    collectives = [move.collective for move in packed]
    sent, received = [c.sent for c in collectives], [c.received for c in collectives]
    is_even = all(c.is_even for c in collectives)
    joint = replace(collectives[0], sent=_totals(sent), received=_totals(received), is_even=is_even)
    messages = blocks[0].new_empty(sum(joint.sent))
    for move, block, parts in zip(packed, blocks, _dealt(messages, sent), strict=True):
        move.sent.write(block, parts)
    arrived = joint.run(messages, (sum(joint.received),))
    shares = _dealt(arrived, received)
    return [move.place(block, parts) for move, block, parts in zip(packed, blocks, shares, strict=True)]


Sizes = Sequence[Sequence[int]]  # elements per message, for every move


def _totals(sizes: Sizes) -> list[int]:
    return [sum(each) for each in zip(*sizes, strict=True)]


def _dealt(joint: Tensor, sizes: Sizes) -> list[Sequence[Tensor]]:
    """One tensor with the messages of several moves, rank by rank -> the messages of every move."""
    parts = joint.split([n for each in zip(*sizes, strict=True) for n in each])
    return [parts[i :: len(sizes)] for i in range(len(sizes))]
