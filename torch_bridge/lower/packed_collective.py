"""A move with communication in three parts: pack the messages, run the collective, unpack the result.

Ranks compare a plan before its first use by a small reduction in its groups: all would ask a store at once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.errors import DesyncError
from torch_bridge.lower.collectives import Collective, Pending
from torch_bridge.lower.packing import COMBINE, Packing
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import Group
from torch_bridge.versions.kernels import copy_all
from torch_bridge.versions.modes import without_modes

MessageSizes = Sequence[Sequence[int]]  # elements of the message for each rank, for each move


@dataclass(frozen=True, eq=False)
class PackedCollective:
    """A move by one collective: it packs the block into messages, and unpacks those that arrive."""

    collective: Collective
    sent: Packing
    received: Packing
    # Whether rows of the block before the move are in the block after it, beside what arrives.
    keeps_rows: ClassVar[bool] = False

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """The shape of the tensor that receives all messages."""
        return self.received.arriving

    @cached_property
    def only_receiver(self) -> int | None:
        """The index of the rank that gets the block as it lies in memory, if no other gets any; else None."""
        sizes_by_rank = self.collective.sent
        receivers = [rank for rank, size in enumerate(sizes_by_rank) if size]
        return receivers[0] if len(receivers) == 1 and self.sent.is_flat else None

    # Hot: called for every cached collective.
    def __call__(self, block: Tensor) -> Tensor:
        return self.unpack(block, self.collective.run(self.sent.pack(block), self.arriving))

    def begin(self, block: Tensor) -> Pending:
        """Begin the move -> a function that ends it and returns the result."""
        arrive = self.collective.begin(self.sent.pack(block), self.arriving)
        needed = self.needed_at_end(block)
        return lambda: self.unpack(needed, arrive())

    def needed_at_end(self, block: Tensor) -> Tensor:
        """Return what the end needs of a block whose messages are on the way.

        It is an empty tensor like the block, whose memory is free then, or the block if its rows stay.
        """
        return block if self.keeps_rows else block.new_empty(0)

    def unpack(self, block: Tensor, arrived: Tensor) -> Tensor:
        """Return the block after the move, of one tensor of the shape `arriving`."""
        return self.received.unpack(arrived)

    def place(self, block: Tensor, buffers: Sequence[Tensor]) -> Tensor:
        """Return the block after the move, of one flat tensor per rank."""
        return self.received.place(block, self.received.split_each(buffers))


@dataclass(frozen=True, eq=False)
class _LocalReduction(PackedCollective):
    """An all-to-all whose messages each rank reduces to the one message of `received`."""

    op: str

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        return (len(self.collective.received), *self.received.shape)

    def unpack(self, block: Tensor, arrived: Tensor) -> Tensor:
        """Reduce the messages of all ranks, stacked on a leading dim, rounding once."""
        if self.op == "sum":
            # With a dtype, torch does not widen small integers to int64.
            return arrived.sum(0, dtype=arrived.dtype)
        return arrived.amax(0) if self.op == "max" else arrived.amin(0)

    def place(self, block: Tensor, buffers: Sequence[Tensor]) -> Tensor:
        messages = [buffer.view(self.received.shape) for buffer in buffers]
        if len(messages) == 2:  # without the copy that `stack` makes
            return COMBINE[self.op](*messages)
        return self.unpack(block, torch.stack(messages))


def reduce_scattered(
    group: Group, sent: Packing, received: Packing, op: str, tensor_device: torch.device
) -> PackedCollective:
    """Make a reduce-scatter: each rank gets the reduction of all ranks' messages for it.

    On gloo it is an all-to-all with a local reduction, which is faster.

    Args:
        group: The ranks that take part.
        sent: How a block is cut into one message per rank, all of the size of `received`.
        received: How the result is made of the one reduced message.
        op: The reduction, as "sum" or "max".
        tensor_device: The device of blocks, which decides on the backend.
    """
    if not group.serves(tensor_device, "gloo", "threaded"):
        collective = Collective("reduce_scatter", group, sent.sizes_by_rank, received.sizes, op)
        return PackedCollective(collective, sent, received)
    # Send each rank its messages, then reduce locally. That is 1.7 to 2.8 times as fast as gloo's
    # reduce_scatter (4 and 8 ranks, 16 MiB). Ranks that are threads have a reduce_scatter for sums
    # only.
    received_sizes = received.sizes * len(group.devices)
    collective = Collective("all_to_all", group, sent.sizes_by_rank, received_sizes, is_even=True)
    return _LocalReduction(collective, sent, received, op)


def run_together(
    moves: Sequence[PackedCollective], blocks: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Run several moves by one collective, and return the resulting block of each.

    All messages for one rank lie side by side: moves a and b on 2 ranks send
    [a for rank 0, b for rank 0, a for rank 1, b for rank 1].

    Args:
        moves: The moves, each by a collective of the same kind on the same group.
        blocks: This process's block for each move.
        dtype: That in which they travel and arrive: blocks of another one are cast.
    """
    joint = _joint_collective(moves)
    messages, blocks = _joint_messages(moves, blocks, dtype)
    return _unpack_each(moves, blocks, joint.run(messages, (sum(joint.received),)))


def begin_together(
    moves: Sequence[PackedCollective], blocks: Sequence[Tensor], dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """Begin what `run_together` runs; return the function that ends it."""
    joint = _joint_collective(moves)
    messages, blocks = _joint_messages(moves, blocks, dtype)
    arrive = joint.begin(messages, (sum(joint.received),))
    needed = [move.needed_at_end(block) for move, block in zip(moves, blocks, strict=True)]
    return lambda: _unpack_each(moves, needed, arrive())


def _joint_collective(moves: Sequence[PackedCollective]) -> Collective:
    """Return one collective for several of one kind: ranks are equal, sizes add up."""
    return replace(
        moves[0].collective,
        sent=_sums_by_rank([move.collective.sent for move in moves]),
        received=_sums_by_rank([move.collective.received for move in moves]),
        is_even=all(move.collective.is_even for move in moves),
    )


def _unpack_each(
    moves: Sequence[PackedCollective], blocks: Sequence[Tensor], arrived: Tensor
) -> list[Tensor]:
    """Split what arrived for all moves, and return the resulting block of each."""
    # `unpack` needs all messages of a move in one flat tensor; here those of other moves lie in
    # between, so that `place` gets one tensor per rank.
    buffers_by_move = _split_by_move(arrived, [move.collective.received for move in moves])
    return [
        move.place(block, buffers)
        for move, block, buffers in zip(moves, blocks, buffers_by_move, strict=True)
    ]


def _sums_by_rank(sizes: MessageSizes) -> list[int]:
    return [sum(sizes_of_moves) for sizes_of_moves in zip(*sizes, strict=True)]


def _joint_messages(
    moves: Sequence[PackedCollective], blocks: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Sequence[Tensor]]:
    """Write the messages of several moves into one tensor, rank by rank; return it, and the cast blocks."""
    is_cast = any(block.dtype != dtype for block in blocks)
    receivers = {move.only_receiver for move in moves}
    if len(receivers) == 1 and None not in receivers:
        # Each move sends its whole block to one rank, or one message to all: one copy of all blocks.
        messages, copies = _copy_into_one_buffer(blocks, dtype)
        return messages, copies if is_cast else blocks
    if is_cast:
        _, blocks = _copy_into_one_buffer(blocks, dtype)
    sent = [move.collective.sent for move in moves]
    messages = blocks[0].new_empty(sum(map(sum, sent)))
    buffers_by_move = _split_by_move(messages, sent)
    for move, block, buffers in zip(moves, blocks, buffers_by_move, strict=True):
        move.sent.write(block, move.sent.split_each(buffers))
    return messages, blocks


def _copy_into_one_buffer(
    blocks: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Copy blocks into one flat tensor of a dtype; return it, and views of it in the shapes of the blocks."""
    lengths = [block.numel() for block in blocks]
    buffer = blocks[0].new_empty(sum(lengths), dtype=dtype)
    flat_copies = buffer.split_with_sizes(lengths)
    copies = [
        flat_copy.view(block.shape) for flat_copy, block in zip(flat_copies, blocks, strict=True)
    ]
    copy_all(copies, list(blocks))
    return buffer, copies


def _split_by_move(joint: Tensor, sizes: MessageSizes) -> list[Sequence[Tensor]]:
    """Split a joint buffer -> for each move one flat tensor per rank.

    Moves a and b on 2 ranks: [a0, b0, a1, b1] -> [a0, a1], [b0, b1].
    """
    move_count = len(sizes)
    # Rank by rank, and for each rank move by move: the order of an all-to-all.
    rank_major_sizes: list[int] = []
    for sizes_of_moves in zip(*sizes, strict=True):
        rank_major_sizes.extend(sizes_of_moves)
    messages = joint.split_with_sizes(rank_major_sizes)
    return [messages[i::move_count] for i in range(move_count)]


@functools.cache
def _compared_plans(world: object) -> set[int]:
    """Return hashes of the plans that ranks of a world have compared: executables may be made again."""
    return set()


def compare_new(executables: Sequence[Any], device: torch.device) -> None:
    """Check, before their first use, that all ranks are about to run the same plans.

    Ranks with different plans would hang in a collective or mix up data. Sets `is_new` of the
    executables to False, so that each plan is compared once. Raises DesyncError on all ranks to
    which these executables send.
    """
    compared = _compared_plans(dist.group.WORLD)
    new: dict[int, Any] = {}  # by hash: one of each plan that ranks have not compared yet
    for executable in executables:
        # The kind of device counts, too: CPU and GPU have process groups of their own.
        processes = executable.processes
        key = hash((executable.plan, processes.ranks, processes.device, device.type))
        if key not in compared:
            new[key] = executable
    moves: list[PackedCollective] = []
    for executable in new.values():
        moves += executable.collectives
    groups = list(dict.fromkeys(move.collective.group for move in moves))
    # Shapes alone (meta) and compilers (a graph name) send nothing now.
    if groups and device.type != "meta" and not groups[0].graph_name:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # the comparison reads a number back, which a capture forbids
        first, *_ = new.values()
        plans = [executable.plan for executable in new.values()]
        first.with_step_in_errors(moves[0], _compare, plans, groups, device)
    # Noted last: a plan that differed has raised above, and is compared again by the next call.
    compared.update(new)
    for executable in executables:
        executable.__dict__["is_new"] = False  # it is frozen, and this is a cache


def _compare(plans: Sequence[Any], groups: Sequence[Group], device: torch.device) -> None:
    """Raise DesyncError unless all ranks of the groups run these plans.

    Ranks compare one number, a hash of the layouts, shapes, dtypes and steps. Only if it differs do
    they exchange the texts, for an error that says what differs.
    """
    moves_text = ", ".join(f"{plan.src} -> {plan.dst}" for plan in plans)
    all_steps = itertools.chain.from_iterable(plan.steps for plan in plans)
    facts = {
        "shape": ", ".join(str(plan.shape) for plan in plans),
        "dtype": ", ".join(str(plan.dtype) for plan in plans),
        "plan": "; ".join(map(str, all_steps)),
    }
    digest = hashlib.sha1(f"{moves_text} {facts}".encode(), usedforsecurity=False).digest()
    fingerprint = int.from_bytes(digest[:7], "little")  # 56 bits: its negative fits int64 too
    if _is_equal_on_all_ranks(fingerprint, groups, device):
        return
    for group in groups:
        # Raises with what differs, if it can tell.
        compare_ranks(
            group.ranks, moves_text, functools.partial(CallFacts, facts, peers=group.ranks)
        )
    raise DesyncError(
        f"other ranks run another plan than '{moves_text}'", hint="all make the same calls"
    )


def _is_equal_on_all_ranks(value: int, groups: Sequence[Group], device: torch.device) -> bool:
    """Return whether all ranks of the groups have the same value: its maximum is then its minimum."""
    # Fake tensors and other modes would take this for a part of the model.
    with without_modes(), torch.no_grad():
        maxima = torch.tensor([value, -value], device=device)
        for group in groups:
            maxima = Collective("all_reduce", group, (2,), (2,), "max").run(maxima, (2,))
        largest, largest_negative = maxima.tolist()
    return bool(largest == -largest_negative)
