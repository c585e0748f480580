"""The JAX side of the chains: a batch of them on one mesh is one program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import DeviceProgram
from tests.fuzz.contractions import Product
from tests.fuzz.judge import Arrived, Blocks, Trip
from tests.fuzz.trees import Carried


def run(trips: Sequence[Any], mode: str, _timeout_s: float) -> list[Any]:
    """All trips forward and backward. mode: "vma" or "novma", with types and without."""
    if isinstance(trips[0], Carried):
        with jax.enable_x64(True):
            return list(map(_carried, trips))
    ways = [_contracted(trip) if isinstance(trip, Product) else _traveller(trip) for trip in trips]

    def local(*given: jax.Array) -> tuple[jax.Array, ...]:
        left = iter(given)
        return tuple(y for way in ways for y in way.run(*itertools.islice(left, len(way.inputs))))

    def all_of(name: str) -> list[Any]:
        return [each for way in ways for each in getattr(way, name)]

    with jax.enable_x64(True):
        inputs = list(zip(all_of("blocks"), all_of("inputs"), strict=True))
        program = DeviceProgram(local, trips[0].chain.mesh, inputs, all_of("outputs"), mode, np.nan)
        results = iter(program.blocks(program()))
    made = ([list(next(results)) for _ in way.outputs] for way in ways)
    return [
        Arrived(each[: trip.moves], each[trip.moves :])
        for trip, each in zip(trips, made, strict=True)
    ]


def _carried(trip: Carried) -> dict[str, Blocks]:
    """The blocks on the other mesh."""
    case = trip.chain
    told = {trip.chain.names_at: trip.chain.names}
    here, there = (
        jax.sharding.Mesh(np.array(jax.devices())[list(numbers)].reshape(mesh.sizes), mesh.axes)
        for mesh, numbers in zip((case.mesh, case.there), case.devices, strict=True)
    )
    tree = xj.place(trip.whole, case.rules(0), here)
    if case.by_files:
        with TemporaryDirectory() as folder:
            xj.save(tree, folder, names=told.get("save"), shard_bytes=case.limit)
            found = xj.load(folder, case.rules(1), there, names=told.get("load"))
    else:
        found = xj.transfer(tree, case.rules(1), there, names=case.names, bucket_bytes=case.limit)
    held = {
        n: {s.device: np.asarray(s.data) for s in x.addressable_shards} for n, x in found.items()
    }
    return {n: [blocks[d] for d in there.devices.flat] for n, blocks in held.items()}


class _Way(NamedTuple):
    """What one device does for a trip, with the blocks that it takes, and where these and the results are."""

    run: Callable[..., Sequence[jax.Array]]
    inputs: list[xs.Sharding]
    blocks: list[Blocks]
    outputs: list[xs.Sharding]


def _traveller(trip: Trip) -> _Way:
    ends = [plan.target for plan in trip.plans]
    first = trip.plans[0].source
    run = partial(_moved, trip)
    if trip.cotangents is None:
        return _Way(run, [first], [trip.blocks], ends)
    return _Way(run, [first, ends[-1]], [trip.blocks, trip.cotangents], [*ends, first])


def _contracted(product: Product) -> _Way:
    case, (*sources, target) = product.chain, product.plan.arrays
    options: Any = {"sizes": case.sizes, "profile": case.profile, "overlap": case.overlap}

    def run(*blocks: jax.Array) -> list[jax.Array]:
        operands = blocks[: len(sources)]

        def contracted(*leaves: jax.Array) -> jax.Array:
            given = dict(zip(product.leaves, leaves, strict=True))
            return xj.einsum(
                case.text, *(given.get(i, x) for i, x in enumerate(operands)), **options
            )

        y, pull = jax.vjp(contracted, *(operands[i] for i in product.leaves))
        return [y, *(pull(blocks[-1]) if product.leaves else ())]

    if not product.leaves:
        return _Way(run, sources, product.blocks, [target])
    assert product.cotangents is not None
    leaves = [sources[i] for i in product.leaves]
    return _Way(run, [*sources, target], [*product.blocks, product.cotangents], [target, *leaves])


def _moved(trip: Trip, block: jax.Array, cotangent: jax.Array | None = None) -> list[jax.Array]:
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
