"""How the turns of modules follow each other in a step: as a closed form, and as a schedule.

In a *pass*, forward or backward, modules take *turns* to compute. While one computes, the parameters
of the next one travel *ahead*, and in the backward pass the gradients of the one before travel, too.
Activations are *awaited*; if parts of the batch take turns, most of one part's travel *beside* the
module while it computes another part. Seconds in which a device only waits are *exposed*. Both forms
agree: a module's turn ends when it has computed, and when the links have carried what travels meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from xshard.schedule import Schedule, Start, Turn, training_step
from xshard.step.price.cost import CostFunction
from xshard.step.price.options import Floats
from xshard.step.price.parts import BlockPart, StepPart
from xshard.step.price.step_setup import StepSetup

# Of activations, if parts of the batch take turns: what travels between two products, and what is
# computed meanwhile, are not of equal length. Fitted to the halves of `benchmarks.time` on gloo.
AWAITED_IN_PARTS = 0.25
NO_BLOCK = -1  # before the first turn, and after the last
FORWARD = 0
BACKWARD = 1  # the passes, as numbers in arrays


class Exposed(NamedTuple):
    """The shares of the seconds of moves in which a device waits.

    Args:
        activations: Of moves of activations; the rest of them travels beside their module.
        beside: Of activations that travel beside their module.
        ahead: Of parameters, and of gradients, that travel while another module computes.
    """

    activations: float
    beside: float
    ahead: float


class PassSeconds(NamedTuple):
    """Seconds of a turn in each block and pass: [blocks + 1, passes], with zeros for NO_BLOCK.

    As long as the parts of a cost are not known, each is weights of them: [blocks + 1, passes, parts].

    Args:
        computing: Of computing.
        awaited: Of activations that are awaited.
        beside: Of activations that travel while the module computes.
        ahead: Of parameters, which travel while the module before computes.
    """

    computing: Floats
    awaited: Floats
    beside: Floats
    ahead: Floats


class TurnKind(NamedTuple):
    """What the seconds of a turn depend on.

    Args:
        pass_number: FORWARD or BACKWARD.
        before: The block of the module before, whose gradients travel meanwhile.
        block: The block of the module that computes.
        following: The block of the next module, whose parameters travel meanwhile.
    """

    pass_number: int
    before: int
    block: int
    following: int


def exposed_shares(setup: StepSetup) -> Exposed:
    """Return what a step exposes: by the schedule of `parallelize`, by XLA's, or by a given overlap."""
    overlap = setup.overlap
    if overlap is None and setup.step.moves_anywhere:
        overlap = setup.moves.profile.compiled_overlap
    if overlap is not None:
        # A share of all moves, those of activations as well.
        return Exposed(activations=0.0, beside=1 - overlap, ahead=1 - overlap)
    activations = AWAITED_IN_PARTS if setup.batch_parts > 1 else 1.0
    waiting = 1 - setup.moves.profile.eager_overlap
    ahead = waiting if setup.prefetch else 1.0
    return Exposed(activations, beside=waiting, ahead=ahead)


def closed_form(setup: StepSetup, limit_shares: Floats) -> CostFunction:
    """Return the seconds of a step as a function of the parts of its cost.

    Of modules 0, 1, 2 the forward pass takes

        parameters 0 + max(computing 0, parameters 1) + max(computing 1, parameters 2) + computing 2

    and the backward pass the same, with gradients of the module before beside parameters of the next
    one, and gradients of the last one at its end. Activations that are awaited count on both sides
    of each maximum, those that travel beside their module with the parameters of the next one.

    limit_shares: what a unit of each part uses of each limit of memory: [limits, parts].
    """
    # A sum of parts is written as the weights of all parts, [parts], as the parts are not known yet.
    of_turns = _parts_of_turns(setup)
    seconds = _seconds_of_passes(setup, of_turns)
    gradients = of_turns[:, BlockPart.GRADIENTS_S]
    exposed = exposed_shares(setup)
    blocks = [block for block, _ in _turns(setup)]
    # Equal turns are counted, so that each kind has one maximum.
    turn_counts = Counter(chain(*_turn_kinds(blocks)))
    maxima = [_ends_of_turn(kind, seconds, gradients, exposed) for kind in turn_counts]
    # Nothing computes while the first parameters of each pass and the last gradients travel.
    first = blocks[0]
    last_ahead = seconds.ahead[blocks[-1], BACKWARD]
    ends = seconds.ahead[first, FORWARD] + last_ahead + gradients[first]
    return CostFunction(
        linear=setup.micro_batches * ends + setup.parts.unit[StepPart.OPTIMIZER_S],
        times=setup.micro_batches * np.array([*turn_counts.values()]),
        maxima=np.array(maxima),
        limit_shares=limit_shares,
    )


def _ends_of_turn(
    kind: TurnKind, seconds: PassSeconds, gradients: Floats, exposed: Exposed
) -> list[Floats]:
    """Return the seconds until a module has computed, and until the links have carried all.

    The later of both ends the turn. Each is weights of the parts of a cost: [parts].

    gradients: seconds of a turn in each block, [blocks + 1, parts].
    """
    awaited_s = seconds.awaited[kind.block, kind.pass_number]
    computing_s = seconds.computing[kind.block, kind.pass_number]
    parameters_s = seconds.ahead[kind.following, kind.pass_number]
    others_s = parameters_s + gradients[kind.before]
    beside_s = seconds.beside[kind.block, kind.pass_number]
    # Of what travels meanwhile, the device waits for the exposed shares.
    waiting_s = exposed.ahead * others_s + exposed.beside * beside_s
    until_computed = awaited_s + computing_s + waiting_s
    until_carried = awaited_s + others_s + beside_s
    return [until_computed, until_carried]


def _turn_kinds(blocks: Sequence[int]) -> tuple[list[TurnKind], list[TurnKind]]:
    """Say what the seconds of each turn depend on, in the forward and in the backward pass.

    blocks: of the modules that take turns in the forward pass, in order.
    """
    neighbours = zip(blocks, [*blocks[1:], NO_BLOCK], strict=True)
    forward = [TurnKind(FORWARD, NO_BLOCK, block, following) for block, following in neighbours]
    order = blocks[::-1]
    both_neighbours = zip([NO_BLOCK, *order[:-1]], order, [*order[1:], NO_BLOCK], strict=True)
    return forward, [TurnKind(BACKWARD, *blocks_of_turn) for blocks_of_turn in both_neighbours]


def schedule_of(setup: StepSetup, vector: Floats) -> Schedule:
    """Return the schedule of both passes of a micro-batch.

    Bytes are those that count in memory: of parameters that are gathered for each use, and of gradients.

    vector: the parts of a plan's cost, seconds and bytes.
    """
    of_turns = _parts_of_turns(setup)
    weights = _seconds_of_passes(setup, of_turns)
    seconds = PassSeconds(*(np.array(weights) @ vector))  # [blocks + 1, passes] each
    maker = _TurnMaker(seconds, of_turns @ vector, exposed_shares(setup))
    blocks, names = zip(*_turns(setup), strict=True)
    forward_kinds, backward_kinds = _turn_kinds(blocks)
    forward = list(map(maker.make_turn, forward_kinds, names))
    backward_names = [f"{name}, backward" for name in reversed(names)]
    backward = list(map(maker.make_turn, backward_kinds, backward_names))
    return training_step(forward, backward, 0 if maker.awaits_all else setup.prefetch)


class _TurnMaker(NamedTuple):
    """Makes the turns of a schedule.

    Args:
        seconds: Of turns by block and pass.
        amounts: Seconds and bytes of a turn in each block: [blocks + 1, block parts].
        exposed: What the step exposes.
    """

    seconds: PassSeconds
    amounts: Floats
    exposed: Exposed

    @property
    def awaits_all(self) -> bool:
        """Whether parameters and gradients only travel while no module computes."""
        return self.exposed.ahead == 1

    def make_turn(self, kind: TurnKind, name: str) -> Turn:
        """Make a turn: what its module computes, and what has to arrive before it or leaves after it.

        name: of the turn in the schedule.
        """
        key = kind.block, kind.pass_number
        own = self.amounts[kind.block]
        parameters_s = self.seconds.ahead[key]
        gradients_s = own[BlockPart.GRADIENTS_S]
        return Turn(
            name,
            float(self.seconds.computing[key] + self._moving_s(kind)),
            parameters=_move(f"{name} parameters", parameters_s, own[BlockPart.AHEAD_BYTES]),
            gradients=_move(f"{name} gradients", gradients_s, own[BlockPart.BEHIND_BYTES]),
            activations=_move(f"{name} activations", self.seconds.awaited[key]),
            beside=_move(f"{name} hidden activations", self.seconds.beside[key]),
        )

    def _moving_s(self, kind: TurnKind) -> float:
        """Return the seconds for which a device moves instead of computing, in a turn.

        During a turn travel activations of its own module, the parameters of the next one, and the
        gradients of the one before.
        """
        moving_s = self.exposed.beside * self.seconds.beside[kind.block, kind.pass_number]
        if not self.awaits_all:
            parameters_s = self.seconds.ahead[kind.following, kind.pass_number]
            gradients_s = self.amounts[kind.before, BlockPart.GRADIENTS_S]
            moving_s += self.exposed.ahead * (parameters_s + gradients_s)
        return float(moving_s)


def _move(name: str, seconds: float, n_bytes: float = 0) -> Start | None:
    """Make the start of a move in a schedule; None for one that takes no time."""
    return Start(name, int(n_bytes), seconds=float(seconds)) if seconds else None


def _turns(setup: StepSetup) -> list[tuple[int, str]]:
    """List the modules that compute in a forward pass, with their blocks: [(1, "layers.0"), ...].

    A block with one turn has the name of its first operation.
    """
    # In reverse, the first operation of a block replaces all others.
    first_op_of_block = {setup.block_of[op.name]: op.name for op in reversed(setup.step.ops)}
    turns: list[tuple[int, str]] = []
    for block, n_turns in enumerate(setup.n_turns):
        names = [first_op_of_block[block]]
        if n_turns > 1:
            prefix = names[0].partition("*")[0]  # `layers.*.norm` -> `layers.`
            names = [f"{prefix}{i}" for i in range(n_turns)]
        turns += [(block, name) for name in names]
    return turns


def _parts_of_turns(setup: StepSetup) -> Floats:
    """Select the parts of a turn in each block from a vector of all parts.

    A turn of block 1 has the amounts `_parts_of_turns(setup)[1] @ vector`: [block parts].

    Returns [blocks + 1, block parts, parts], with zeros for NO_BLOCK at the end.
    """
    layers_in_turn = setup.block_times / setup.n_turns
    of_turns = setup.parts.of_blocks * layers_in_turn[:, None, None]
    return np.concatenate([of_turns, np.zeros_like(of_turns[:1])])


def _seconds_of_passes(setup: StepSetup, of_turns: Floats) -> PassSeconds:
    """Select the seconds of turns, each [blocks + 1, passes, parts], from `_parts_of_turns`."""
    # BlockPart begins with computing, activations and parameters forward, then the same backward.
    of_passes = of_turns[:, : BlockPart.GRADIENTS_S].reshape(len(of_turns), 2, 3, -1)
    computing, activations, parameters = np.moveaxis(of_passes, 2, 0)
    awaited = exposed_shares(setup).activations * activations
    return PassSeconds(computing, awaited, beside=activations - awaited, ahead=parameters)
