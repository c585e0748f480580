"""The parts of the cost of a step: what is counted for each block, and for the whole step.

A cost is a vector of parts: seconds of several kinds and bytes of several kinds. Parts of nodes and
of moves add up, and only their sums become seconds of a step and bytes of a device
(`StepProblem.cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from xshard.step.price.options import Floats


class BlockPart(IntEnum):
    """What is counted for a block of operations: for one micro-batch, layer and device."""

    FORWARD_COMPUTING_S = 0
    FORWARD_ACTIVATIONS_S = 1  # moves of activations, like the next two of parameters
    FORWARD_PARAMETERS_S = 2
    BACKWARD_COMPUTING_S = 3
    BACKWARD_ACTIVATIONS_S = 4
    BACKWARD_PARAMETERS_S = 5  # gathered again
    GRADIENTS_S = 6  # of parameters
    SAVED_BYTES = 7  # activations that the backward pass needs
    RUNNING_BYTES = 8  # activations and gradients of them while one layer runs backward
    RECEIVED_BYTES = 9  # parameters that are gathered for each use, beside the messages
    SENT_BYTES = 10  # the same parameters and their gradients, beside the messages
    GATHERED_BYTES = 11  # parameters that are gathered once per step
    GRADIENT_BYTES = 12
    SUM_BYTES = 13  # what sums of gradients at the end of the step need more
    AHEAD_BYTES = 14  # parameters on the way while the module before computes
    BEHIND_BYTES = 15  # gradients on the way while the next module computes


class StepPart(IntEnum):
    """What is counted for the whole step: the last parts of a vector, by numbers from its end."""

    PARAMETER_BYTES = -3  # as they are stored
    STATE_BYTES = -2  # of the optimizer, and parameters in full precision
    OPTIMIZER_S = -1


@dataclass(frozen=True)
class Parts:
    """Where each part is in a vector: block by block, then the parts of the step."""

    n_blocks: int

    @property
    def size(self) -> int:
        return self.n_blocks * len(BlockPart) + len(StepPart)

    @cached_property
    def unit(self) -> Floats:
        """A vector for each part, in which it is 1: [parts, parts]."""
        return np.eye(self.size)

    @cached_property
    def of_blocks(self) -> Floats:
        """The same for the parts of blocks: [blocks, block parts, parts]."""
        of_blocks = self.unit[: -len(StepPart)]
        return of_blocks.reshape(self.n_blocks, len(BlockPart), self.size)
