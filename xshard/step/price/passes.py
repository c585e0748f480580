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

AWAITED_IN_PARTS = 0.5  # of activations: `benchmarks.time` measures 0.3 to 1.3 on gloo
NO_BLOCK = -1  # before the first turn, and after the last


class Exposed(NamedTuple):
    """The shares of seconds of moves in which a device waits.

    Args:
        activations: Of those of activations; the rest of them travels ahead as parameters do.
        ahead: Of those of all that travels ahead, or beside the next module.
    """

    activations: float
    ahead: float


def exposed_shares(setup: StepSetup) -> Exposed:
    """Return what a step exposes: by the schedule of `parallelize`, by XLA's, or by a given overlap."""
    overlap = setup.overlap
    if overlap is None and setup.step.moves_anywhere:
        overlap = setup.moves.profile.compiled_overlap
    if overlap is not None:
        return Exposed(0.0, 1 - overlap)
    activations = AWAITED_IN_PARTS if setup.batch_parts > 1 else 1.0
    return Exposed(activations, float(setup.prefetch == 0))


def closed_form(setup: StepSetup, limit_shares: Floats) -> CostFunction:
    """Return the seconds of a step as a function of the parts of its cost.

    Of modules 0, 1, 2 the forward pass takes

        parameters 0 + max(computing 0, parameters 1) + max(computing 1, parameters 2) + computing 2

    and the backward pass the same, with gradients of the module before beside parameters of the next
    one, and gradients of the last one at its end. Activations that are awaited are in both rows.
    """
    share = exposed_shares(setup).ahead
    of_turns = _parts_of_turns(setup)
    computing, awaited, ahead = _seconds_of_passes(setup, of_turns)
    gradients = of_turns[:, BlockPart.GRADIENTS_S]
    order = [block for block, _ in _turns(setup)]
    first = order[0]
    last = order[-1]
    # How often each turn occurs: its pass, the block before, its own, the next one.
    turns = Counter(zip(repeat(0), repeat(NO_BLOCK), order, [*order[1:], NO_BLOCK], strict=False))
    order.reverse()
    followers = [*order[1:], NO_BLOCK]
    turns.update(zip(repeat(1), [NO_BLOCK, *order], order, followers, strict=False))
    rows: list[list[Floats]] = []
    for number, before, block, following in turns:
        beside = ahead[following, number] + gradients[before]
        waits = awaited[block, number]
        rows.append([waits + computing[block, number] + share * beside, waits + beside])
    ends = ahead[first, 0] + ahead[last, 1] + gradients[first]
    return CostFunction(
        linear=setup.micro_batches * ends + setup.parts.unit[StepPart.OPTIMIZER_S],
        times=setup.micro_batches * np.array([*turns.values()]),
        maxima=np.array(rows),
        limit_shares=limit_shares,
    )


def schedule_of(setup: StepSetup, vector: Floats) -> Schedule:
    """Return the schedule of both passes of a micro-batch, with the seconds of a plan's parts.

    Bytes are those that count in memory: of parameters that are gathered for each use, and of gradients.
    """
    of_turns = _parts_of_turns(setup)
    amounts = of_turns @ vector  # [blocks + 1, block parts]
    computing_s, awaited_s, ahead_s = np.array(_seconds_of_passes(setup, of_turns)) @ vector
    exposed = exposed_shares(setup)
    kind = "parameters" if exposed.activations == 1 else "parameters+activations"

    def turn(block: int, name: str, number: int) -> Turn:
        *_, ahead_bytes, behind_bytes = amounts[block]
        gradients_s = amounts[block, BlockPart.GRADIENTS_S]
        return Turn(
            name,
            float(computing_s[block, number]),
            parameters=_move(f"{name} {kind}", ahead_s[block, number], ahead_bytes),
            gradients=_move(f"{name} gradients", gradients_s, behind_bytes),
            activations=_move(f"{name} activations", awaited_s[block, number]),
        )

    turns = _turns(setup)
    forward = [turn(block, name, 0) for block, name in turns]
    backward = [turn(block, f"{name}, backward", 1) for block, name in reversed(turns)]
    return training_step(forward, backward, 0 if exposed.ahead == 1 else setup.prefetch)


def _move(name: str, seconds: float, n_bytes: float = 0) -> Start | None:
    return Start(name, int(n_bytes), seconds=float(seconds)) if seconds else None


def _turns(setup: StepSetup) -> list[tuple[int, str]]:
    """List the modules that compute in a forward pass, with their blocks: [(1, "layers.0"), ...]."""
    first_names = {setup.block_of[op.name]: op.name for op in reversed(setup.step.ops)}
    turns: list[tuple[int, str]] = []
    for block, n_turns in enumerate(setup.n_turns):
        names = [first_names[block]]
        if n_turns > 1:
            layer = first_names[block].partition("*")[0]
            names = [f"{layer}{i}" for i in range(n_turns)]
        turns += [(block, name) for name in names]
    return turns


def _parts_of_turns(setup: StepSetup) -> Floats:
    """Return the parts of a turn in each block, and zeros for no block: [blocks + 1, block parts, parts]."""
    layers_in_turn = setup.block_times / setup.n_turns
    of_turns = setup.parts.of_blocks * layers_in_turn[:, None, None]
    return np.concatenate([of_turns, np.zeros_like(of_turns[:1])])


def _seconds_of_passes(setup: StepSetup, of_turns: Floats) -> list[Floats]:
    """Take the seconds of computing, awaited activations, and what travels ahead.

    Returns for each [blocks + 1, 2 passes, parts].
    """
    of_passes = of_turns[:, : BlockPart.GRADIENTS_S].reshape(len(of_turns), 2, 3, -1)
    computing, activations, parameters = np.moveaxis(of_passes, 2, 0)
    awaited = exposed_shares(setup).activations * activations
    return [computing, awaited, parameters + activations - awaited]
