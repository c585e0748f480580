"""Chains on numpy, torch and JAX: what arrives, for `judge`.

Decides how many travel together: ranks of torch stay alive for a batch of chains, and one program of JAX
holds a batch on one mesh. A framework is imported where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import xshard as xs
from tests.fuzz.judge import Arrived, Blocks, Trip
from xshard.runtimes.backends import BACKENDS, host_devices
from xshard.steps.base import Block

LIMIT_S = 600.0  # without progress


def laid(block: Block, strides: str) -> Block:
    """The same values, laid out otherwise in memory."""
    if strides == "turned":
        return block.T.copy().T
    if strides == "every other":
        return np.stack([block, block], axis=-1)[..., 0]
    return block


def on_numpy(trips: Sequence[Trip]) -> list[Arrived]:
    """The reference, move after move, and back."""
    return [_on_numpy(trip) for trip in trips]


def on_torch(trips: Sequence[Trip]) -> list[Arrived]:
    """gloo ranks, as many as each mesh has devices: `xt.redistribute` of tensors, and its backward pass."""
    process = BACKENDS["torch"].process(host_devices())
    found: dict[int, Arrived] = {}
    for n in sorted({trip.chain.mesh.n_devices for trip in trips}):
        numbers = [i for i, trip in enumerate(trips) if trip.chain.mesh.n_devices == n]
        arrived = process.ask("tests.fuzz.in_torch.run", n, [trips[i] for i in numbers], timeout_s=LIMIT_S)
        found |= dict(zip(numbers, arrived, strict=True))
    return [found[i] for i in range(len(trips))]


def on_jax(trips: Sequence[Trip], mode: str = "vma") -> list[Arrived]:
    """Host devices: one program with the moves of all chains, which have one mesh, and their pullbacks."""
    process = BACKENDS["jax"].process(host_devices())
    arrived: list[Arrived] = process.ask("tests.fuzz.in_jax.run", list(trips), mode, timeout_s=LIMIT_S)
    return arrived


def _on_numpy(trip: Trip) -> Arrived:
    here: Any = [laid(block, trip.chain.strides) for block in trip.blocks]
    found: list[Blocks] = []
    for plan in trip.plans:
        found.append(xs.reference.run(plan, here))
        here = found[-1]
    if trip.cotangents is None:
        return Arrived(found, None)
    gradient = trip.cotangents
    for plan, given in zip(reversed(trip.plans), [*found[-2::-1], trip.blocks], strict=True):
        gradient = xs.reference.pullback(plan, given, gradient)
    return Arrived(found, gradient)
