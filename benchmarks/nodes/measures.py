"""Moves that must cross nodes, timed on ranks of two nodes: ours, ours blind to nodes, DTensor, by hand.

All run on the same block, on every rank of two nodes with two ranks; of every turn the slowest rank counts. A
move at which ours seems slower is timed again with five times the turns, which count.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import placement_types

import torch_bridge as xt
import xshard as xs
from benchmarks import by_turns
from benchmarks.cases import Case
from benchmarks.claim import Row
from benchmarks.planner.traffic import plan_flow
from benchmarks.torch_redistribute import by_hand
from benchmarks.torch_redistribute.run_time import all_to_all, dtensor_way, everywhere
from torch_bridge.mesh.process_mesh import process_mesh
from xshard.cost.model import DIRECT
from xshard.layout.layout import parse_expression
from xshard.runtimes.calibrate import Calibration, calibrate
from xshard.runtimes.samples import SIZES

MESH = xs.Mesh(node=2, x=2)
PER_NODE = 2
MOVES = {
    "gather everything": "n/node/x d -> n d",
    "gather across, replicas inside": "n/node d -> n d",
    "rows to columns": "n/node/x d -> n d/node/x",
    "two cuts change places": "n/node d/x -> n/x d/node",
    "the order of a cut": "n/node/x d -> n/x/node d",
    "replicas change places": "n/node d -> n/x d",
    "all-reduce": "n d | sum(node,x) -> n d",
    "reduce-scatter": "n d | sum(node,x) -> n/node/x d",
    "reduce across, cut inside": "n/x d | sum(node) -> n/x d",
}
OURS = "nodes known"
BLIND = "blind to nodes"
DTENSOR = "DTensor"
BY_HAND = "by hand"
CLOSE = 1.05  # ours / the best of the others
MOVE_S = 0.08  # seconds in which a link carries one block, so that launches do not count


def calibrated(bytes_per_s: float, rounds: int) -> Calibration:
    """A profile of the nodes, by blocks no larger than in the moves: a link lets small ones pass at once."""
    sizes = [size for size in SIZES if size <= bytes_per_s * 0.1]
    return calibrate("torch", MESH, "nodes", sizes, rounds)


def rows(bytes_per_s: float, profile: xs.Profile, rounds: int, quick: bool) -> list[Row]:
    """A row per move. On every rank."""
    placement_types.shard_dim_alltoall = (
        all_to_all  # DTensor gathers on CPUs, though gloo has an all-to-all
    )
    moves = list(MOVES.items())[: 2 if quick else None]
    return [_row(name, text, _shape(bytes_per_s), profile, rounds) for name, text in moves]


def _shape(bytes_per_s: float) -> tuple[int, int]:
    return (128 * round((bytes_per_s * MOVE_S / 4) ** 0.5 / 64),) * 2


def _row(name: str, text: str, shape: tuple[int, int], profile: xs.Profile, rounds: int) -> Row:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.axes)
    case = Case(name, MESH, shape, "float32", *parse_expression(text))
    blind = replace(profile, across=None, node_devices=None)
    plans = {
        way: xs.plan(text, MESH, shape, profile=machine)
        for way, machine in ((OURS, profile), (BLIND, blind))
    }
    local = plans[OURS].source.local_shape(rank)
    first = MESH.index(rank, case.src.axes)  # replicas are equal; whole numbers add exactly
    block = (torch.arange(local[0] * local[1]) % 13 + first).float().view(local)
    ways = {
        way: lambda plan=plan: xt.redistribute(block, plan, MESH) for way, plan in plans.items()
    }
    expected = ways[OURS]()
    is_one_call = plans[OURS].steps == plans[BLIND].steps and all(
        s.kind in DIRECT for s in plans[OURS].steps
    )
    if is_one_call:  # no step of it has phases
        del ways[BLIND]
    written = by_hand.sequence(plans[BLIND], process_mesh(MESH))
    others = {
        BY_HAND: written and (lambda: written(block)),
        DTENSOR: dtensor_way(case, mesh, block),
    }
    for way, call in others.items():
        if call is not None and everywhere(torch.equal(call(), expected)):
            ways[way] = call
    seconds = _seconds(ways, rounds)
    if seconds[OURS] > CLOSE * min(seconds.values()):
        seconds = _seconds(ways, 5 * rounds)
    if is_one_call:
        seconds[BLIND] = seconds[OURS]
    crossing = {way: plan_flow(plan, PER_NODE).nodes.max() for way, plan in plans.items()}
    return {
        "case": name,
        "expression": text,
        "shape": shape,
        "steps": {way: [str(step) for step in plan.steps] for way, plan in plans.items()},
        "predicted_s": {way: replace(plan, profile=profile).cost for way, plan in plans.items()},
        "crossing_bytes": {way: 4 * float(elements) for way, elements in crossing.items()},
        "seconds": seconds,
    }


def _seconds(ways: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """The median of every way, of the slowest rank in each turn."""
    return {k: statistics.median(s) for k, s in by_turns.slowest(ways, rounds, warm_up=1).items()}


def xla_rows(bytes_per_s: float, profile: Any, rounds: int, quick: bool) -> list[Row]:
    """A row per move of a global array in JAX, ours beside XLA's own reshard, which knows no sums.

    In every process; in the one that starts them JAX must not be imported.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    import jax_bridge as xj

    # XLA's permutations send before they receive: a device does not have the port to itself, as in torch.
    profile = replace(profile, across=replace(profile.across, topology="switch"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(MESH.sizes), MESH.axes)
    shape = _shape(bytes_per_s)
    rows: list[Row] = []
    texts = [(name, text) for name, text in MOVES.items() if "sum" not in text]
    for name, text in texts[: 2 if quick else None]:
        src, dst = (xj.specs.to_named_sharding(layout, mesh) for layout in parse_expression(text))
        x = jax.jit(lambda: jnp.ones(shape), out_shardings=src)()
        theirs = jax.jit(lambda x: x + 0, out_shardings=dst)
        ways = {
            OURS: lambda: jax.block_until_ready(xj.reshard(x, text, profile=profile)),  # noqa: B023
            "XLA": lambda: jax.block_until_ready(theirs(x)),  # noqa: B023
        }
        meet = lambda: multihost_utils.sync_global_devices("turn")  # noqa: E731
        times = by_turns.seconds(ways, rounds, warm_up=1, before=meet)
        slowest = multihost_utils.process_allgather(np.array(list(times.values()))).max(0)
        seconds = {
            way: statistics.median(turns)
            for way, turns in zip(times, slowest.tolist(), strict=True)
        }
        rows.append({"case": name, "expression": text, "shape": shape, "seconds": seconds})
    return rows
