"""The JAX side of the chains: a batch of them on one mesh is one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_bridge as xj
from jax_bridge.testing.worker import DeviceProgram
from tests.fuzz.judge import Arrived, Trip


def run(trips: Sequence[Trip], mode: str, _timeout_s: float) -> list[Arrived]:
    """All chains forward and backward. mode: "vma" or "novma", with types and without."""
    inputs, outputs, blocks = [], [], []
    for trip in trips:
        ends = [plan.target for plan in trip.plans]
        inputs.append(trip.plans[0].source)
        blocks.append(trip.blocks)
        outputs += ends
        if trip.cotangents is not None:
            inputs.append(ends[-1])
            blocks.append(trip.cotangents)
            outputs.append(trip.plans[0].source)

    def local(*given: jax.Array) -> tuple[jax.Array, ...]:
        left, made = iter(given), list[jax.Array]()
        for trip in trips:
            made += _moved(trip, next(left), None if trip.cotangents is None else next(left))
        return tuple(made)

    with jax.enable_x64(True):
        found = iter(DeviceProgram(local, tuple(inputs), tuple(outputs), mode).run(*blocks).blocks)
    n, arrived = trips[0].chain.mesh.n_devices, []
    for trip in trips:
        each = [[next(found) for _ in range(n)] for _ in trip.plans]
        arrived.append(Arrived(each, None if trip.cotangents is None else [next(found) for _ in range(n)]))
    return arrived


def _moved(trip: Trip, block: jax.Array, cotangent: jax.Array | None) -> list[jax.Array]:
    """One device's blocks after every move, and the gradient of the first one."""

    def moves(here: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        found = []
        for i in range(trip.chain.moves):
            options: Any = {"shape": trip.chain.shape_at(i), "profile": trip.chain.profile}
            here = xj.redistribute(here, trip.chain.layouts[i : i + 2], **options)
            found.append(here)
        return here, found

    if cotangent is None:
        return moves(block)[1]
    if jnp.issubdtype(block.dtype, jnp.inexact):
        _, pull, found = jax.vjp(moves, block, has_aux=True)
        return [*found, *pull(cotangent)]
    for plan in reversed(trip.plans):
        cotangent = xj.redistribute(cotangent, plan.backward)
    return [*moves(block)[1], cotangent]
