"""Bytes of a device at every moment of a step at which it may hold the most."""

from __future__ import annotations

import numpy as np

from xshard.step.price.options import Floats, Ints
from xshard.step.price.parts import BlockPart, Parts, StepPart


def bytes_at_moments(parts: Parts, block_times: Ints, micro_batches: int) -> Floats:
    """Return how much of each part a device holds at each moment: [moments, parts].

    There are three moments for the backward pass of each block: its first layer begins, with its
    parameters received; it ends, with gradients whole, sent and received; the last layer ends.
    Another one is at the end of the step, when gradients are summed where they were not.

    block_times: how many layers each block has, whose parts are for one layer.
    """
    in_all_layers = parts.of_blocks * block_times[:, None, None]  # [blocks, block parts, parts]
    saved = in_all_layers[:, BlockPart.SAVED_BYTES]  # [blocks, parts], like those below
    running = in_all_layers[:, BlockPart.RUNNING_BYTES]
    received = in_all_layers[:, BlockPart.RECEIVED_BYTES]
    sent = in_all_layers[:, BlockPart.SENT_BYTES]
    gathered = in_all_layers[:, BlockPart.GATHERED_BYTES]
    gradients = in_all_layers[:, BlockPart.GRADIENT_BYTES]
    sums = in_all_layers[:, BlockPart.SUM_BYTES]
    always = parts.unit[[StepPart.PARAMETER_BYTES, StepPart.STATE_BYTES]].sum(0)
    if micro_batches > 1:
        # Gradients and what is gathered once stay from one micro-batch to the next.
        always = always + gradients.sum(0)
        left_by_block = gathered
    else:
        left_by_block = gradients
    moments = [always + (sums + left_by_block).sum(0)]
    for block, times in enumerate(block_times):
        # Blocks before it wait for their backward pass; blocks after it have had theirs.
        waiting = (saved + gathered)[:block].sum(0)
        done = (sums + left_by_block)[block + 1 :].sum(0)
        around = always + waiting + done
        one_layer = (running[block] + received[block]) / times
        if micro_batches > 1:
            ending = sent[block] / times
            last_layer_leaves = left_by_block[block]
        else:
            # What is gathered once becomes gradients, whole as it is, as soon as the layer ends.
            ending = (sent[block] + 2 * gathered[block]) / times
            last_layer_leaves = left_by_block[block] * (1 - 1 / times)
        moments.append(around + saved[block] + gathered[block] + one_layer)
        moments.append(around + saved[block] * (1 - 1 / times) + gathered[block] + ending)
        moments.append(around + ending + last_layer_leaves)
    return np.asarray(moments)
