"""Gathers and reductions over links of several speeds: one collective per speed, as `Phases` says.

Between phases a process holds a stack of blocks, a tensor `[blocks, *block]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.executable import Move
from torch_bridge.lower.packed_collective import PackedCollective, reduce_scattered
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.step_context import StepContext
from torch_bridge.lower.subarray import AFTER, BEFORE, subarray, without_base
from torch_bridge.mesh.process_mesh import Group
from xshard.layout.partition import ceil_div
from xshard.layout.runs import Run
from xshard.notation.parser import Shard
from xshard.steps.traffic import Phases


def all_gather(
    phases: Phases, context: StepContext, dim: str, shards: tuple[Shard, ...]
) -> list[Move]:
    """Split an all-gather into one collective per kind of link, the slowest link first.

    In this order the slow link carries the least: blocks grow with each phase. 2 nodes of 4
    processes, 8 blocks: each process first gathers 2 blocks with its partner in the other node,
    then 4 times 2 from the processes of its own node. Returns one function from block to block for
    each phase.

    Args:
        phases: The devices that meet over links of each speed.
        context: The step, and this process's place in it.
        dim: The name of the dim along which blocks are put together.
        shards: Its shards that are gathered.
    """
    groups = _groups(phases, context)
    groups.reverse()  # the slowest first
    fastest_group = groups[-1]
    block_shape = context.shapes.before
    moves: list[Move] = []
    block_count = 1  # gathered so far, by each process
    for group in groups:
        rank_count = len(group.devices)
        # The first phase sends this process's block; later ones the stack that has arrived.
        if moves:
            sent = _stacked_blocks(
                context, message_count=1, block_count=block_count, block_shape=block_shape
            )
        else:
            sent = context.whole_block(BEFORE)
        # Until the last phase, blocks are stacked in the order in which they arrive. The last one
        # brings all of them, and writes each to its rows of the result.
        if group is fastest_group:
            received = _parts_by_rank(phases, context, AFTER, dim, shards)
        else:
            received = _stacked_blocks(
                context, message_count=rank_count, block_count=block_count, block_shape=block_shape
            )
        collective = Collective("all_gather", group, sent.sizes, received.sizes_by_rank)
        moves.append(PackedCollective(collective, sent, received))
        block_count *= rank_count
    return moves


def reduce_scatter(
    phases: Phases, context: StepContext, dim: str, shards: tuple[Shard, ...], op: str
) -> list[Move]:
    """Split a reduce-scatter into one collective per kind of link, the slowest link last.

    In this order the slow link carries the least: pieces get fewer with each phase. 2 nodes of 4
    processes, 8 pieces: each process first sums 2 of the pieces with the others of its node, then 1
    of these 2 with its partner in the other node. Returns one function from block to block for each
    phase.

    Args:
        phases: The devices that meet over links of each speed.
        context: The step, and this process's place in it.
        dim: The name of the dim that is scattered.
        shards: The shards that it gets.
        op: The reduction, as "sum" or "max".
    """
    piece_shape = context.shapes.after
    moves: list[Move] = []
    groups = _groups(phases, context)
    # How many pieces this process still has a share of.
    piece_count = math.prod(len(group.devices) for group in groups)
    for group in groups:
        rank_count = len(group.devices)
        piece_count //= rank_count
        # The first phase sends parts of the block; later ones send the sums of the phase before.
        if moves:
            sent = _stacked_blocks(
                context, message_count=rank_count, block_count=piece_count, block_shape=piece_shape
            )
        else:
            sent = _parts_by_rank(phases, context, BEFORE, dim, shards)
        if piece_count > 1:
            received = _stacked_blocks(
                context, message_count=1, block_count=piece_count, block_shape=piece_shape
            )
        else:
            received = context.whole_block(AFTER)
        moves.append(reduce_scattered(group, sent, received, op, context.tensor_device))
    return moves


def all_reduce(phases: Phases, context: StepContext, op: str) -> list[Move]:
    """Split an all-reduce so that over the slowest link each process sends one piece of its block.

    The block is flattened and cut into as many pieces as a node has devices. A node of 4 and a
    block of 10 elements: 4 pieces of 3, the last one filled up with zeros. The devices of a node
    reduce-scatter the pieces over fast links, all-reduce one piece each over the slowest link, and
    all-gather the pieces back. Returns functions from block to block, to be called one after the
    other.
    """
    *fast_groups, slow_group = _groups(phases, context)
    piece_count = math.prod(len(group.devices) for group in fast_groups)
    # Rounded up: the last piece is filled up with zeros.
    piece_size = ceil_div(math.prod(context.shapes.before), piece_count)
    reductions: list[Move] = []  # the fastest first
    gathers: list[Move] = []  # each undoes the reduction with its index
    n_held = piece_count  # pieces that a device still holds
    for group in fast_groups:
        n_held //= len(group.devices)
        # n_held pieces for each device of the group -> those of this one.
        unscattered = _pieces_of_group(context, group, n_held, piece_size)
        scattered = _stacked_blocks(
            context, message_count=1, block_count=n_held, block_shape=(piece_size,)
        )
        reductions.append(
            reduce_scattered(group, unscattered, scattered, op, context.tensor_device)
        )
        gather = Collective("all_gather", group, scattered.sizes, unscattered.sizes)
        gathers.append(PackedCollective(gather, scattered, unscattered))
    one_piece = _stacked_blocks(context, message_count=1, block_count=1, block_shape=(piece_size,))
    over_slow_link = Collective("all_reduce", slow_group, one_piece.sizes, one_piece.sizes, op)
    reduce_piece = PackedCollective(over_slow_link, one_piece, one_piece)
    flatten, unflatten = _flattening(context, piece_count, piece_size)
    return [flatten, *reductions, reduce_piece, *reversed(gathers), unflatten]


def _pieces_of_group(context: StepContext, group: Group, n_held: int, piece_size: int) -> Packing:
    """Describe the pieces of an all-reduce that the ranks of a group share out, `n_held` for each.

    Devices that meet over the slow link must hold the same piece, and the ranks of a group may be
    in any order: a device gets the pieces by its index among the sorted devices. Devices (5, 4):
    rank 0 gets the second `n_held` pieces, rank 1 the first.
    """
    sorted_devices = sorted(group.devices)
    positions = [sorted_devices.index(device) for device in group.devices]
    return _stacked_blocks(
        context,
        message_count=len(group.devices),
        block_count=n_held,
        block_shape=(piece_size,),
        positions=positions,
    )


def _flattening(context: StepContext, piece_count: int, piece_size: int) -> tuple[Move, Move]:
    """Return a function that reshapes a block to `[piece_count, piece_size]`, and the one back.

    [2, 5] as 4 pieces of 3: its 10 elements, then 2 zeros, viewed as [4, 3]. The way back drops the
    zeros.
    """
    shape = context.shapes.before
    size = math.prod(shape)
    filling = piece_count * piece_size - size

    def flatten(block: Tensor) -> Tensor:
        flat = block.reshape(-1)
        if filling:
            flat = torch.nn.functional.pad(flat, (0, filling))
        return flat.view(piece_count, piece_size)

    def unflatten(pieces: Tensor) -> Tensor:
        if filling or context.lengths is not None:
            return pieces.view(-1)[:size].view(shape).clone()
        return without_base(pieces.view(shape))

    return flatten, unflatten


def _groups(phases: Phases, context: StepContext) -> list[Group]:
    """Return the processes that this one meets in the phase of each level, the fastest first."""
    return [
        context.group_of_devices(phases.members(context.device, level))
        for level in range(len(phases.levels))
    ]


def _stacked_blocks(
    context: StepContext,
    message_count: int,
    block_count: int,
    block_shape: tuple[int, ...],
    positions: Sequence[int] = (),
) -> Packing:
    """Describe a stack of blocks, cut along its new leading dim into equal messages.

    2 messages of 3 blocks [4, 5] -> a tensor [6, 4, 5], whose messages are rows 0:3 and 3:6; with
    positions [1, 0], rows 3:6 and 0:3.

    Args:
        context: The step, for the device of lists of rows.
        message_count: The number of messages.
        block_count: The number of blocks in each.
        block_shape: The shape of a block.
        positions: Where each message lies in the stack, in messages; empty for 0, 1, 2, ...
    """
    shape = (message_count * block_count, *block_shape)
    if not positions:
        positions = range(message_count)
    messages = [
        subarray(shape, {0: (Run(position * block_count, block_count),)}, context.tensor_device)
        for position in positions
    ]
    return Packing(shape, tuple(messages))


def _parts_by_rank(
    phases: Phases, context: StepContext, end: int, dim: str, shards: tuple[Shard, ...]
) -> Packing:
    """Cut a block along a dim into the messages to, or from, each rank of the fastest phase.

    A rank also stands for the devices that it meets in the phases over slower links: in 2 nodes of
    4 processes (devices 0-3 and 4-7), rank 1 of a node has the parts of devices 1 and 5.

    Args:
        phases: The devices that meet over links of each speed.
        context: The step, and this process's place in it.
        end: Which block: the one BEFORE the step, or the one AFTER it.
        dim: The name of the dim that has the parts.
        shards: Its shards, one part per device along their axes.
    """
    # `devices_reached` goes through the ranks of the phase, and for each through what it reaches.
    devices = phases.devices_reached(context.device)
    packing = context.parts_of_devices(end, dim, shards, devices)
    rank_count = len(phases.members(context.device, 0))
    messages_per_rank = len(packing.messages) // rank_count
    return replace(packing, counts=(messages_per_rank,) * rank_count)
