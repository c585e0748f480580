"""What each way to store an input or a parameter, and to run an operation, costs by itself.

A *node* is one of these three, and its ways are *options*. A cost is a vector of *parts*, seconds
and bytes of several kinds (`parts`). What moves between nodes is priced in `edges`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from xshard.notation.parser import ARROW
from xshard.step.price.options import (
    Flags,
    Floats,
    Ints,
    Placements,
    options_of,
    product_over,
    unevenness,
)
from xshard.step.price.parts import BlockPart, StepPart
from xshard.step.price.step_setup import FULL, StepSetup
from xshard.step.record.arrays import space_of
from xshard.step.record.op import Op

# AdamW in one kernel reads the parameter, its gradient and both moments, and writes all but the gradient.
OPTIMIZER_ACCESSES = 7
# Kernel by kernel it decays the parameter (2 accesses), updates both moments (3 and 5), makes the denominator
# (a root, a quotient and a sum: 6), and adds the quotient to the parameter (4).
EAGER_OPTIMIZER_ACCESSES = 20
# For a parameter it calls about ten kernels, without modules and autograd: the host works as long as for
# two operations of a model.
OPTIMIZER_CALLS = 2


class Gathering(IntEnum):
    """When a parameter becomes what operations use: for each use, or once per step."""

    PER_USE = 0
    PER_STEP = 1


class Node(NamedTuple):
    """An operation, a parameter or an input with its options, and what each of them costs.

    Args:
        name: The name of the array.
        placements: Its options: [options, arrays, axes], operands first, the result last.
        costs: The parts of the cost of each option: [options, parts].
        gathering: For each option of a parameter a `Gathering`; None for inputs and operations.
    """

    name: str
    placements: Placements
    costs: Floats
    gathering: Ints | None = None

    def is_gathered(self, when: int) -> Flags:
        """Tell for each option of a parameter whether it has this `Gathering`: [options]."""
        return np.asarray(np.asarray(self.gathering) == when)


def price_input(setup: StepSetup, name: str) -> Node:
    """List the layouts of an input, which cost nothing."""
    placements = _storage_options(setup, name)
    return Node(name, placements, np.zeros((len(placements), setup.parts.size)))


def price_parameter(setup: StepSetup, name: str) -> Node:
    """Price every way to store a parameter: bytes held by a device, and seconds of the optimizer.

    A parameter that is stored in shards is gathered before each use (as FSDP does), or once per
    step. So a parameter with 5 possible layouts has 10 options: 5 gathered for each use, then the
    same 5 gathered once. A device holds its block of the parameter, of the gradient and of the
    optimizer's state, and updates it.

    Returns a node with costs [10 options, parts of the cost].
    """
    layouts = _storage_options(setup, name)
    placements = np.concatenate([layouts, layouts])  # [options, 1 array, axes]
    gathering = np.repeat((Gathering.PER_USE, Gathering.PER_STEP), len(layouts))
    first_use = setup.step.consumers(name)[0]
    stored = placements[:, -1]  # [options, axes]
    gradient_bytes = setup.block_bytes(name, stored, setup.gradient_bytes)
    # Over several micro-batches, a parameter that is gathered once has its gradient added up in
    # whole, not in shards. Those bytes depend on the layout in use, so that the edges to its uses
    # count them, and nothing is counted here.
    has_sharded_gradient = (gathering == Gathering.PER_USE) | (setup.micro_batches == 1)
    held_gradients = {BlockPart.GRADIENT_BYTES: gradient_bytes * has_sharded_gradient}
    costs = setup.cost_vectors(first_use, len(placements), held_gradients)
    # Parts of the step are for all layers, not for one.
    full_bytes = gradient_bytes * first_use.times  # of the parameter in full precision
    costs[:, StepPart.PARAMETER_BYTES] = full_bytes / setup.gradient_bytes * setup.stored_bytes
    # Adam has two moments, and below 32 bits a copy of the parameter in full precision.
    n_states = 3 if setup.stored_bytes < FULL else 2
    costs[:, StepPart.STATE_BYTES] = n_states * full_bytes
    profile = setup.moves.profile
    accessed_bytes_per_s = 2 * profile.copy_bytes_per_s  # read and written
    n_accesses = EAGER_OPTIMIZER_ACCESSES if profile.calls_each_operation else OPTIMIZER_ACCESSES
    accessing_s = n_accesses * full_bytes / accessed_bytes_per_s
    calling_s = OPTIMIZER_CALLS * first_use.times * profile.call_s
    costs[:, StepPart.OPTIMIZER_S] = accessing_s + calling_s
    return Node(name, placements, costs, gathering)


def _storage_options(setup: StepSetup, name: str) -> Placements:
    """List the layouts in which an input or a parameter may be stored: [options, 1, axes]."""
    dims = setup.dim_names(name)
    lengths = dict(zip(dims, setup.shape(name), strict=True))
    # The options of an operation that makes the array from nothing: one rule for each dim.
    making = Op(name, text=f"{ARROW} {' '.join(dims)}", operands=(), kind="source")
    return options_of(making, lengths, setup.mesh, setup.units[name], setup.shared_dims)


def price_operation(setup: StepSetup, op: Op) -> Node:
    """Price every way to shard one operation: seconds of computing, and bytes of activations.

    Activations are saved from the forward to the backward pass. With `recompute` they are made
    again in the backward pass, which takes the seconds of the forward pass once more, and are held
    only while their layer runs.

    Returns a node with placements [options, arrays, axes] and costs [options, parts of the cost].
    """
    units = _units_of_rules(setup, op)
    placements = options_of(op, setup.lengths, setup.mesh, units, setup.shared_dims)
    block_bytes = _bytes_of_blocks(setup, op, placements)
    forward_s = _seconds_of_computing(setup, op, placements, block_bytes)
    saved_bytes = _bytes_saved_for_gradient(setup, op, placements, block_bytes)
    running_bytes = _bytes_of_gradients_on_the_way(setup, op, block_bytes)
    backward_work = op.work.backward  # for each forward one
    if setup.is_recomputed(op):
        backward_work += 1  # the forward pass once more
        running_bytes = running_bytes + saved_bytes
        # Only the input of each layer is saved. A carry, the operation that hands an array on from
        # one layer to the next, has it as its result.
        is_input = op.kind == "carry"
        saved_bytes = block_bytes[-1] if is_input else np.zeros(len(placements))
    values_by_part = {
        BlockPart.FORWARD_COMPUTING_S: forward_s,
        BlockPart.BACKWARD_COMPUTING_S: forward_s * backward_work,
        BlockPart.RUNNING_BYTES: running_bytes,
        BlockPart.SAVED_BYTES: saved_bytes,
    }
    # Lengths are those in one part of the batch: all parts together take so many times as much.
    costs = setup.batch_parts * setup.cost_vectors(op, len(placements), values_by_part)
    return Node(op.name, placements, costs)


def _units_of_rules(setup: StepSetup, op: Op) -> list[int]:
    """Count for each rule of an operation the units that it may share out; 1: even blocks only."""
    units: list[int] = []
    for dims in op.dims_sharded_together:
        counts = [setup.units[name][dim] for name, dim in dims]
        units.append(min(counts, default=1))
    return units


def _bytes_of_blocks(setup: StepSetup, op: Op, placements: Placements) -> list[Floats]:
    """Return the bytes of a device's block of each operand, then of the result: [options] each.

    0 for operands of which only lengths are read.
    """
    block_bytes: list[Floats] = []
    for i, name in enumerate(op.array_names):
        item_bytes = 0 if i in op.length_operands else setup.item_bytes
        block_bytes.append(setup.block_bytes(name, placements[:, i], item_bytes))
    return block_bytes


def _devices_that_split(setup: StepSetup, op: Op, placements: Placements) -> Floats:
    """Count the devices that divide the work of an operation, in every option; others repeat it.

    Uneven blocks count as fewer, for all await the device with the largest: 4 devices with 2, 2, 1
    and 1 heads take as long as 3 with 2 each.
    """
    is_splitting = np.any(placements >= 0, 1)  # [options, axes]
    ratios: list[Floats] = []  # of the largest block to an even one, for each array
    for i, name in enumerate(op.array_names):
        ratios.append(unevenness(placements[:, i], setup.units[name], setup.mesh))
    highest: Floats = np.max(ratios, 0)
    return product_over(is_splitting, setup.mesh.sizes) / highest


def _seconds_of_computing(
    setup: StepSetup, op: Op, placements: Placements, block_bytes: list[Floats]
) -> Floats:
    """Return the seconds of an operation's forward pass on a device: [options].

    It computes while it accesses memory, so that the longer of both counts. The host's calls are
    added. Without a compiler each operation in it is a kernel of its own, and writes an array that the
    next one reads; these are taken to be as large as the result.
    """
    work = op.work
    profile = setup.moves.profile
    flops_per_s = profile.flops(setup.step.dtype) * profile.layer_efficiency * work.rate
    n_devices = _devices_that_split(setup, op, placements)
    computing_s = work.flops * space_of(op.arrays, setup.lengths) / n_devices / flops_per_s
    # A byte that is copied is accessed twice: it is read and written.
    memory_s = work.accesses * sum(block_bytes) / (2 * profile.copy_bytes_per_s)
    seconds: Floats = np.maximum(computing_s, memory_s)
    if not profile.calls_each_operation:
        return seconds
    # All kernels but the last write an array, and the next one reads it: as one copy of it.
    between_s = max(0, op.kernels - 1) * block_bytes[-1] / profile.copy_bytes_per_s
    return seconds + between_s + op.calls * profile.call_s


def _bytes_saved_for_gradient(
    setup: StepSetup, op: Op, placements: Placements, block_bytes: list[Floats]
) -> Floats:
    """Count the bytes of activations that an operation saves for its backward pass: [options].

    A matrix product saves its operand x, and not the weight, which is there anyway. So are the
    inputs of the step, and results of a `share`, which hands one array on to several operations.

    block_bytes: bytes of each array's block, operands first, the result last: [options] each.
    """
    saved_bytes = np.zeros(len(placements))
    for i in op.saved_operands:
        maker = setup.step.by_name.get(op.array_names[i])
        if maker is None:
            continue  # a parameter, or an input of the step
        is_result = maker is op
        if is_result or maker.kind != "share":
            saved_bytes = saved_bytes + block_bytes[i]
    # Where several operations were fused into this one, arrays between them are saved, too.
    inner_bytes = setup.item_bytes * op.inner * space_of(op.arrays, setup.lengths)
    saved_bytes = saved_bytes + inner_bytes / _devices_that_split(setup, op, placements)
    if op.kind == "loss" and setup.item_bytes < FULL:
        saved_bytes *= 3  # losses keep the logits in float32, too
    return saved_bytes


def _bytes_of_gradients_on_the_way(setup: StepSetup, op: Op, block_bytes: list[Floats]) -> Floats:
    """Count the bytes of activations' gradients that are held while a layer runs backward.

    A layer that takes the residual stream, made outside it, holds two gradients of this size: the
    one that arrives for its own result, and the one that it makes for its input. A loss holds the
    gradient of the logits, its operand 0. Gradients between operations of one layer come and go.

    block_bytes: bytes of each array's block, operands first: [options] each. Returns [options].
    """
    step = setup.step
    gradient_bytes = np.zeros(len(block_bytes[-1]))
    for name, operand_bytes in zip(op.operands, block_bytes, strict=False):
        maker = step.by_name.get(name)
        comes_from_outside = maker is not None and maker.times != op.times
        if comes_from_outside and name in step.differentiable:
            gradient_bytes = gradient_bytes + 2 * operand_bytes
    if op.kind == "loss":
        gradient_bytes = gradient_bytes + block_bytes[0]  # of the logits
    return gradient_bytes
