"""Redistributions between nodes: their values, and the bytes that arrive over each node's link.

`python -m tests.testing.test_across_nodes 500` runs as many random ones on both clusters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xshard as xs
from benchmarks.planner.traffic import plan_flow
from tests.cases import CASES
from xshard import dtypes, reference
from xshard.runtimes.samples import held_out_plans
from xshard.steps import Scale
from xshard.testing.nodes import Cluster, NoNodesError, nodes

SIZES = 1 << 15, 1 << 18  # bytes of a block: headers are the rest of what is counted
CLUSTERS = {2: ("a=2,b=2", "a=4"), 3: ("a=3,b=2", "a=6")}  # nodes of two ranks -> meshes
PROFILE = "gloo:2"
# Of one plan on one rank: the block after it, and the gradient of the block before it where it has one.
Results = tuple[np.ndarray, np.ndarray | None]
LONGER = {"a=4": "a=6", "a=2,b=2": "a=3,b=2"}


def blocks_of(plan: xs.Plan, seed: int) -> list[np.ndarray]:
    """Any numbers before a plan, equal in replicas, which no mean has to round: `test_no_row_rounds`."""
    layout = plan.src
    mesh = plan.mesh
    own = [
        *layout.tagged("sum", "mean", "max", "min", "copy"),
        *(a for dim in layout.dims for a in dim.axes),
    ]
    unit = mesh.n_devices if any(isinstance(step, Scale) for step in plan.steps) else 1
    seeds = ([mesh.index(device, own), seed] for device in range(mesh.n_devices))
    shapes = map(plan.source.local_shape, range(mesh.n_devices))
    return [
        np.asarray(unit * np.random.default_rng(each).integers(-9, 10, shape), np.float64)
        for each, shape in zip(seeds, shapes, strict=True)
    ]


def is_linear(plan: xs.Plan) -> bool:
    return plan.src.is_linear and plan.dst.is_linear


def received() -> int:
    """Bytes that this node has received over its link so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(
        int(line.partition(":")[2].split()[0]) for line in lines if line.strip().startswith("eth0")
    )


def moved(table: Sequence[xs.Plan], plans: Sequence[xs.Plan]) -> tuple[list[str], int]:
    """On a rank: which of all plans have wrong results, and bytes received by its node for `plans`.

    The first rank names what is wrong on any rank, forward or backward, the others nothing.
    """
    import torch
    import torch.distributed as dist

    import torch_bridge as xt

    rank = dist.get_rank()
    results: list[Results] = []
    ready = []
    for number, plan in enumerate([*table, *plans]):
        dtype = getattr(torch, plan.dtype)
        x = torch.from_numpy(blocks_of(plan, number)[rank]).to(dtype)
        x.requires_grad_(dtype.is_floating_point)
        y = xt.redistribute(x, plan, plan.mesh)
        gradient = None
        if is_linear(plan) and y.requires_grad:
            cotangents = blocks_of(plan.backward, number)
            y.backward(torch.from_numpy(cotangents[rank]).to(dtype))
            gradient = x.grad.double().numpy()
        results.append((y.detach().double().numpy(), gradient))
        ready.append((x.detach(), plan))
    of_ranks: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(results, of_ranks)
    dist.barrier()
    before = received()
    for x, plan in ready[len(table) :]:  # again, when all groups have met
        xt.redistribute(x, plan, plan.mesh)
    dist.barrier()
    n_bytes = received() - before
    wrong = wrong_plans([*table, *plans], of_ranks) if of_ranks else []
    return wrong, n_bytes


def wrong_plans(plans: Sequence[xs.Plan], of_ranks: Sequence[Sequence[Results]]) -> list[str]:
    """The plans with a wrong block on any rank; the reference has the blocks of all ranks at once.

    of_ranks: by rank, the results of every plan.
    """
    wrong = []
    for number, plan in enumerate(plans):
        exact = replace(plan, dtype="float64")
        found, gradients = zip(*(results[number] for results in of_ranks), strict=True)
        is_right = all_equal(found, reference.run(exact, blocks_of(plan, number)))
        if gradients[0] is not None:
            cotangents = blocks_of(plan.backward, number)
            is_right &= all_equal(gradients, reference.run(exact.backward, cotangents))
        if not is_right:
            wrong.append(f"{plan.src} -> {plan.dst} of {plan.shape} on {plan.mesh}")
    return wrong


def all_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return all(map(np.array_equal, found, expected))


def resharded(plans: Sequence[xs.Plan]) -> tuple[list[str], int]:
    """In a process of JAX with the devices of its node: as `moved`, of global arrays, in one program."""
    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    import jax_bridge as xj

    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(plans[0].mesh.sizes), plans[0].mesh.axes
    )
    wholes = [
        np.arange(np.prod(plan.shape), dtype="float32").reshape(plan.shape) % 257 for plan in plans
    ]
    arrays = [
        jax.make_array_from_callback(
            whole.shape,
            jax.NamedSharding(mesh, xj.specs.to_partition_spec(plan.src)),
            whole.__getitem__,
        )
        for whole, plan in zip(wholes, plans, strict=True)
    ]
    results = jax.block_until_ready(xj.reshard(arrays, list(plans)))
    wrong = [
        f"{plan.src} -> {plan.dst}"
        for y, whole, plan in zip(results, wholes, plans, strict=True)
        if not all(np.array_equal(shard.data, whole[shard.index]) for shard in y.addressable_shards)
    ]
    sync_global_devices("before")
    before = received()
    jax.block_until_ready(xj.reshard(arrays, list(plans)))
    sync_global_devices("after")
    return wrong, received() - before


def compared(plans: Sequence[xs.Plan], found: Sequence[tuple[list[str], int]]) -> str:
    """The bytes that arrived at each node, beside those that plans say. found: by rank, or by node."""
    said = sum(plan_flow(plan, 2).nodes * dtypes.itemsize(plan.dtype) for plan in plans)
    counted = np.array([n for _, n in found])[:: len(found) // len(said)]
    assert all(wrong == [] for wrong, _ in found), [wrong for wrong, _ in found]
    assert (np.abs(counted / said - 1) < 0.05).all(), (said, counted)
    return f"{len(plans)} random: {counted / said} of {said / 2**20} MiB"


def random_plans(n_nodes: int, count: int) -> list[xs.Plan]:
    """As many on each mesh of a cluster."""
    meshes = [xs.Mesh.parse(text) for text in CLUSTERS[n_nodes]]
    each = count // len(meshes)
    return [p for mesh in meshes for p in held_out_plans(mesh, SIZES, each, n_nodes, PROFILE)]


@lru_cache
def rows_of_the_table(n_devices: int) -> list[xs.Plan]:
    """Those for as many devices; for six, those for four with an axis and its dims made longer by a half."""
    if n_devices == 4:
        return [case.plan(profile=PROFILE) for case in CASES if case.mesh.n_devices == 4]
    found = []
    for case in CASES:
        if case.mesh_text in LONGER and not re.search(r"\d", case.expression):
            shape = tuple(n * 3 // 2 if n % 4 == 0 else n for n in case.shape)
            found.append(
                replace(case, mesh_text=LONGER[case.mesh_text], shape=shape).plan(profile=PROFILE)
            )
    return found


@pytest.mark.parametrize("n_nodes", CLUSTERS)
def test_no_row_rounds(n_nodes: int) -> None:
    """Ranks add in orders of their own: where float32 rounds, one is wrong, and another is not."""
    for number, plan in enumerate(rows_of_the_table(2 * n_nodes)):
        for each in [plan, plan.backward] if is_linear(plan) else [plan]:
            blocks = blocks_of(each, number)
            runs = (
                reference.run(replace(each, dtype=dtype), blocks)
                for dtype in ("float64", "float32")
            )
            assert all(map(np.array_equal, *runs)), (
                f"{each.src} -> {each.dst} of {each.shape} on {each.mesh}"
            )


def check(cluster: Cluster, n_nodes: int, count: int) -> str:
    """Rows of the case table, then random redistributions. Raises AssertionError."""
    table = rows_of_the_table(2 * n_nodes)
    plans = random_plans(n_nodes, count)
    return f"{len(table)} rows, {compared(plans, cluster.run_torch(moved, table, plans))}"


def check_jax(cluster: Cluster, count: int) -> str:
    """Random reshards of global arrays, which have no addends. Raises AssertionError."""
    mesh = xs.Mesh(a=2, b=2)
    drawn = held_out_plans(mesh, SIZES, 2 * count, 7, "host:2")
    plans = [plan for plan in drawn if not plan.src.tags and not plan.dst.tags][:count]
    return f"JAX, {compared(plans, cluster.run_jax(resharded, plans))}"


def test_random_redistributions_between_three() -> None:
    """Between two: `test_nodes.py`, which has some."""
    try:
        with nodes(3, ranks=2) as cluster:
            check(cluster, 3, 40)
    except NoNodesError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    for n_nodes in CLUSTERS:
        with nodes(n_nodes, ranks=2) as cluster:
            print(check(cluster, n_nodes, int(sys.argv[1])), flush=True)
            if n_nodes == 2:
                print(check_jax(cluster, int(sys.argv[1])), flush=True)
