"""Chains on numpy, torch and JAX: the blocks that arrive, for `judge`.

Ranks of torch stay alive for a batch of chains, and one program of JAX
holds a batch on one mesh. A framework is imported where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import xshard as xs
from tests.fuzz.contractions import Product
from tests.fuzz.judge import Arrived, Blocks, Trip
from tests.fuzz.trees import Carried
from tests.two_meshes import run_tree
from xshard.dtypes import carrier, numpy_dtype, recast
from xshard.runtimes.backends import BACKENDS, host_devices
from xshard.state import plan_transfer
from xshard.state.files import open_checkpoint, verify
from xshard.state.files.loading import plan_load, read_block
from xshard.state.files.saving import SaveTask, Source, Writers, begin, commit, plan_save, write
from xshard.steps.base import Block

LIMIT_S = 600.0  # without progress


def laid(block: Block, strides: str) -> Block:
    """The same values, laid out otherwise in memory."""
    if strides == "turned":
        return block.T.copy().T
    if strides == "every other":
        return np.stack([block, block], axis=-1)[..., 0]
    return block


def on_numpy(trips: Sequence[Any]) -> list[Any]:
    """The reference, forward and backward."""
    ways: dict[type, Any] = {Product: _contracted, Carried: _carried, Trip: _moved}
    return [ways[type(trip)](trip) for trip in trips]


def on_torch(trips: Sequence[Any]) -> list[Any]:
    """gloo ranks, as many as each trip has devices, forward and backward."""
    process = BACKENDS["torch"].process(host_devices())
    found: dict[int, Any] = {}
    for n in sorted({trip.world for trip in trips}):
        numbers = [i for i, trip in enumerate(trips) if trip.world == n]
        arrived = process.ask(
            "tests.fuzz.in_torch.run", n, [trips[i] for i in numbers], timeout_s=LIMIT_S
        )
        found |= dict(zip(numbers, arrived, strict=True))
    return [found[i] for i in range(len(trips))]


def on_jax(trips: Sequence[Any], mode: str = "vma") -> list[Any]:
    """Host devices: one program of all trips, which have one mesh, forward and backward."""
    process = BACKENDS["jax"].process(host_devices())
    arrived: list[Any] = process.ask("tests.fuzz.in_jax.run", list(trips), mode, timeout_s=LIMIT_S)
    return arrived


def _contracted(trip: Product) -> Arrived:
    result = xs.reference.run(trip.plan, *trip.blocks)
    if trip.cotangents is None:
        return Arrived([result])
    gradients = xs.reference.pullback(trip.plan, trip.blocks, trip.cotangents)
    return Arrived([result], [gradients[i] for i in trip.leaves])


def _carried(trip: Carried) -> dict[str, Blocks]:
    case = trip.chain
    here = trip.chain.leaves(0)
    there = trip.chain.leaves(1)
    if not case.by_files:
        shapes, kinds = ({n: getattr(x, f) for n, x in here.items()} for f in ("shape", "dtype"))
        ends = {"src_mesh": case.mesh, "dst_mesh": case.there}
        ends |= {
            "src_devices": case.devices[0],
            "dst_devices": case.devices[1],
            "bucket_bytes": case.limit,
        }
        rules = case.rules(0), case.rules(1)
        plan = plan_transfer(shapes, rules, names=case.names, dtypes=kinds, **ends)
        assert plan.bytes_received >= plan.bytes_lower_bound, "below the lower bound"
        return run_tree(plan, trip.blocks)

    def block_of(name: str, device: int, dtype: str) -> Block:
        own = here[name].dtype
        return recast(trip.blocks[name][device].view(carrier(own)), own, dtype)

    sources = {
        n: Source(xs.Sharding(x.layout, case.mesh, x.shape), x.dtype, range(case.mesh.n_devices))
        for n, x in here.items()
    }
    names = {case.names_at: case.names}
    saving = plan_save(sources, names.get("save"), shard_bytes=case.limit)
    with TemporaryDirectory() as folder:
        sums: dict[str, list[Any]] = {}
        task = SaveTask(saving, Path(folder), block_of)
        token = begin(saving, task.path)
        processes = range(case.mesh.n_devices)
        for process in processes:
            own = task._replace(writers=Writers(processes, process))
            for name, some in write(own, token).items():
                sums.setdefault(name, []).extend(some)
        commit(task, token, sums)
        with open_checkpoint(folder) as checkpoint:
            verify(checkpoint)
            loads = plan_load(checkpoint, case.rules(1), case.there, names.get("load"))
            before = checkpoint.bytes_read
            found: dict[str, Blocks] = {}
            for name, load in loads.items():
                read = [read_block(checkpoint, load, d) for d in range(case.there.n_devices)]
                before += sum(block.nbytes for block in read)
                assert checkpoint.bytes_read == before, f"{name}: more is read than is needed"
                kind = numpy_dtype(load.stored)
                wanted = numpy_dtype(there[name].dtype)
                found[name] = [block.view(kind).astype(wanted) for block in read]
    return found


def _moved(trip: Trip) -> Arrived:
    here: Any = [laid(block, trip.chain.strides) for block in trip.blocks]
    found: list[Blocks] = []
    for plan in trip.plans:
        found.append(xs.reference.run(plan, here))
        here = found[-1]
    if trip.cotangents is None:
        return Arrived(found)
    gradient = trip.cotangents
    for plan, given in zip(reversed(trip.plans), [*found[-2::-1], trip.blocks], strict=True):
        gradient = xs.reference.pullback(plan, given, gradient)
    return Arrived(found, [gradient])
