"""Bytes of a device at every moment of a step at which it may hold the most."""

from __future__ import annotations

import numpy as np

from xshard.step.price.options import Floats, Ints
from xshard.step.price.parts import BlockPart, Parts, StepPart


def bytes_at_moments(parts: Parts, block_times: Ints, micro_batches: int) -> Floats:
    """List the moments of a step when memory may be fullest, each as a row of factors.

    The cost of a plan is a vector v of parts: seconds, and bytes of each kind, such as parameters
    or activations of one layer. `row @ v` is the bytes that a device holds at the row's moment: the
    largest of them is the peak. With 12 layers, all activations of 1 MB saved are 12 * 1 MB.

    A block is some layers that are alike and run one after another, backward from the last to the
    first. It has four moments, all in the backward pass:

    - its first layer to run backward begins: all its activations are there, and the layer's
      parameters are received, as messages and then as parameters, beside the gradient of its result;
    - that layer computes: the messages are gone, and there is the gradient of its input, too;
    - that layer ends: its activations are gone, its gradients are whole and sent;
    - its last layer ends.

    One more moment is the end of the step, when gradients are summed where they were not before.

    Args:
        parts: Where each part is in v. Parts of blocks are for one layer.
        block_times: How many layers each block has: [blocks].
        micro_batches: Parts of the batch that run one after another.

    Returns:
        [moments, parts].
    """
    kinds = _bytes_by_kind(parts, block_times)
    saved, running, received, sent, gathered, gradients, sums = kinds
    on_way = _bytes_on_way(parts, block_times)
    always = parts.unit[[StepPart.PARAMETER_BYTES, StepPart.STATE_BYTES]].sum(0)
    if micro_batches > 1:
        # Gradients and what is gathered once stay from one micro-batch to the next.
        always = always + gradients.sum(0)
        left_by_block = gathered
    else:
        # A block that is done has gradients in place of what it had gathered.
        left_by_block = gradients
    done = sums + left_by_block  # by a block that has had it
    moments = [always + done.sum(0)]  # the end of the step
    for block, times in enumerate(block_times):
        # Blocks run backward: those with lower numbers wait, those with higher ones are done.
        around = always + (saved + gathered)[:block].sum(0)
        around = around + done[block + 1 :].sum(0)
        other_layers = 1 - 1 / times  # as a share of the block
        if micro_batches > 1:
            ending_layer = sent[block] / times
            left_by_layers = left_by_block[block]
        else:
            # What is gathered once becomes gradients, whole as it is, as soon as the layer ends:
            # the parameters' and the gradients' bytes, hence twice.
            ending_layer = (sent[block] + 2 * gathered[block]) / times
            left_by_layers = left_by_block[block] * other_layers
        first_begins = around + saved[block] + gathered[block] + on_way[block, 0]
        moments.append(first_begins + (running[block] / 2 + received[block]) / times)
        moments.append(first_begins + (running[block] + received[block] / 2) / times)  # it computes
        moments.append(first_begins - saved[block] / times + ending_layer)  # it ends
        # The last layer ends.
        moments.append(around + left_by_layers + ending_layer + on_way[block, 1])
    return np.asarray(moments)


def _bytes_by_kind(parts: Parts, block_times: Ints) -> Floats:
    """List the parts of blocks in bytes, from SAVED_BYTES to SUM_BYTES, as factors for all layers.

    A unit vector for each part, times the number of layers: sums of them are rows of the result of
    `bytes_at_moments`. Returns [kinds, blocks, parts], in the order of `BlockPart`.
    """
    factors = parts.of_blocks * block_times[:, None, None]  # [blocks, block parts, parts]
    return factors[:, BlockPart.SAVED_BYTES : BlockPart.AHEAD_BYTES].swapaxes(0, 1)


def _bytes_on_way(parts: Parts, block_times: Ints) -> Floats:
    """Count what travels beside layers: parameters of the next one, gradients of the one before.

    The backward pass goes from the last block to the first. Beside the first layer of a block to run
    travel gradients of the block after it, beside its last layer parameters of the block before it.

    Returns [blocks, first or last layer, parts].
    """
    # After the last block, and before block 0, which is number -1 and the last entry, nothing travels.
    nothing = np.zeros((1, parts.size))
    parameters_of = np.concatenate([parts.of_blocks[:, BlockPart.AHEAD_BYTES], nothing])
    gradients_of = np.concatenate([parts.of_blocks[:, BlockPart.BEHIND_BYTES], nothing])
    on_way: list[list[Floats]] = []
    for block, times in enumerate(block_times):
        block_before = block - 1
        block_after = block + 1
        is_alone = times == 1  # one layer is the first and the last to run
        # Beside the first layer to run. With three layers or more, one in the middle counts for it,
        # which has neighbours of its own block on both sides.
        first_next = block_before if is_alone else block
        first_previous = block_after if times < 3 else block
        # Beside the last one.
        last_previous = block_after if is_alone else block
        on_way.append(
            [
                parameters_of[first_next] + gradients_of[first_previous],
                parameters_of[block_before] + gradients_of[last_previous],
            ]
        )
    return np.array(on_way)
