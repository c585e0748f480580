"""How the turns of modules follow each other in a step: as a closed form, and as a schedule.

While a module computes, the parameters of the next one travel, and in the backward pass the gradients of
the one before. Activations are awaited, unless parts of the batch take turns. Both forms agree: a
module's turn ends when it has computed, and when the links have carried what travels meanwhile.
"""

from __future__ import annotations

from collections import Counter
from itertools import repeat
from typing import NamedTuple

import numpy as np

from xshard.schedule import Schedule, Start, Turn, training_step
from xshard.step.price.cost import CostFunction
from xshard.step.price.options import Floats
from xshard.step.price.parts import BlockPart, StepPart
from xshard.step.price.step_setup import StepSetup

EXPOSED_IN_PARTS = 0.2  # of activations: what `benchmarks.time` measures of batches in halves
NO_BLOCK = -1  # before the first turn, and after the last


class Exposed(NamedTuple):
    """The shares of the seconds of moves that nothing hides."""

    activations: float
    parameters: float  # and their gradients


def exposed_shares(setup: StepSetup) -> Exposed:
    """Return what a step exposes: by the schedule of `parallelize`, by XLA's, or by a given overlap."""
    overlap = setup.overlap
    if overlap is None and setup.step.moves_anywhere:
        overlap = setup.moves.profile.compiled_overlap
    if overlap is not None:
        return Exposed(1 - overlap, 1 - overlap)
    activations = EXPOSED_IN_PARTS if setup.batch_parts > 1 else 1.0
    return Exposed(activations, float(setup.prefetch == 0))


def closed_form(setup: StepSetup, limit_shares: Floats) -> CostFunction:
    """Return the seconds of a step as a function of the parts of its cost.

    Of modules 0, 1, 2 the forward pass takes

        parameters 0 + max(computing 0, parameters 1) + max(computing 1, parameters 2) + computing 2

    and the backward pass the same, with gradients of the module before beside parameters of the next
    one, and gradients of the last one at its end. Activations are in the row of computing as far as
    they are exposed, and in that of the links.
    """
    exposed = exposed_shares(setup)
    of_turns = _parts_of_turns(setup)
    seconds = _by_pass(of_turns)
    gradients = of_turns[:, BlockPart.GRADIENTS_S]
    order = [block for block, _ in setup.turns]
    # How often each turn occurs: its pass, the block before, its own, the next one.
    turns = Counter(zip(repeat(0), repeat(NO_BLOCK), order, [*order[1:], NO_BLOCK], strict=False))
    first = order[0]
    order.reverse()
    followers = [*order[1:], NO_BLOCK]
    turns.update(zip(repeat(1), [NO_BLOCK, *order], order, followers, strict=False))
    rows: list[list[Floats]] = []
    for number, before, block, following in turns:
        computing, activations, _ = seconds[block, number]
        beside = seconds[following, number, -1] + gradients[before]
        device = computing + exposed.activations * activations + exposed.parameters * beside
        rows.append([device, activations + beside])
    ends = seconds[first, 0, -1] + seconds[order[0], 1, -1] + gradients[first]
    return CostFunction(
        linear=setup.micro_batches * ends + setup.parts.unit[StepPart.OPTIMIZER_S],
        times=setup.micro_batches * np.array([*turns.values()]),
        maxima=np.array(rows),
        limit_shares=limit_shares,
    )


def schedule_of(setup: StepSetup, vector: Floats) -> Schedule:
    """Return the schedule of both passes of a micro-batch, with the seconds of a plan's parts."""
    amounts = _parts_of_turns(setup) @ vector  # [blocks + 1, block parts]
    seconds = _by_pass(amounts)
    exposed = exposed_shares(setup)

    def turn(block: int, name: str, number: int) -> Turn:
        computing_s, activations_s, parameters_s = map(float, seconds[block, number])
        exposed_s = exposed.activations * activations_s
        *_, gradients_s = amounts[block, : BlockPart.SAVED_BYTES]
        *_, ahead, behind = amounts[block]
        return Turn(
            name,
            computing_s,
            parameters=_move(f"{name} parameters", parameters_s, ahead),
            gradients=_move(f"{name} gradients", gradients_s, behind),
            activations=_move(f"{name} activations", exposed_s),
            beside=_move(f"{name} other activations", activations_s - exposed_s),
        )

    forward = [turn(block, name, 0) for block, name in setup.turns]
    backward = [turn(block, f"{name}, backward", 1) for block, name in reversed(setup.turns)]
    return training_step(forward, backward, 0 if exposed.parameters == 1 else setup.prefetch)


def _move(name: str, seconds: float, n_bytes: float = 0) -> Start | None:
    return Start(name, int(n_bytes), seconds=float(seconds)) if seconds else None


def _parts_of_turns(setup: StepSetup) -> Floats:
    """Return the parts of a turn in each block, and zeros for no block: [blocks + 1, block parts, parts]."""
    n_turns = Counter(block for block, _ in setup.turns)
    layers_in_turn = setup.block_times / np.array([*n_turns.values()])
    of_turns = setup.parts.of_blocks * layers_in_turn[:, None, None]
    return np.concatenate([of_turns, np.zeros_like(of_turns[:1])])


def _by_pass(of_turns: Floats) -> Floats:
    """Take the seconds of computing, activations and parameters: [blocks, 2 passes, 3 kinds, ...]."""
    of_passes = of_turns[:, : BlockPart.GRADIENTS_S]
    return of_passes.reshape(len(of_turns), 2, 3, *of_turns.shape[2:])
