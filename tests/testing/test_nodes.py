"""Several nodes: values, bytes and rates on their links, and what becomes of those that are left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import xshard as xs
from tests.documents.test_documents import python_blocks
from tests.testing import test_across_nodes
from xshard.cost.machine import load_profile
from xshard.cost.model import Link
from xshard.testing.nodes import Cluster, NodesError, NoNodesError, nodes

BITS_PER_S = 40_000_000
SHAPE = (1024, 2048)
MUST_CROSS = 1024 * 2048 * 4 // 4  # bytes to each node: the half of its columns that the other has
OVERHEAD = 200_000  # bytes: a world begins and ends
TIMEOUT_S = 3.0  # of a collective that is to fail


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        made = nodes(2, ranks=2)
        cluster = made.__enter__()
    except NoNodesError as error:
        pytest.skip(str(error))
    yield cluster
    made.__exit__(None, None, None)


def test_random_redistributions_are_right(cluster: Cluster) -> None:
    test_across_nodes.check(cluster, 2, 16)
    test_across_nodes.check_jax(cluster, 6)


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> xs.Plan:
    """Rows to columns, planned for nodes of two devices, between which links are slow from now on."""
    for node in range(2):
        cluster.slow(node, f"{BITS_PER_S}bit")
    gloo = load_profile("gloo")
    across = replace(gloo, across=Link(0.001, BITS_PER_S / 8), node_devices=2)
    return xs.plan(
        "n/x/y d -> n d/x/y", xs.Mesh(x=2, y=2), shape=SHAPE, dtype="float32", profile=across
    )


def turned(
    plan: xs.Plan, folder: Path | None = None, timeout_s: float | None = None
) -> tuple[object, bool, float]:
    """Which rank this is, whether its columns have come, and the seconds that they took.

    folder, timeout_s: see `in_the_middle`.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import torch_bridge as xt

    rank = dist.get_rank()
    n = SHAPE[0] // 4
    total = torch.tensor([rank])
    dist.all_reduce(total)
    place = rank, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), total.item()
    if timeout_s is not None:
        c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    if folder is not None:
        (folder / f"ready{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        start = (folder / "go").stat().st_mtime  # however late this rank sees it
    else:
        dist.barrier()
        start = time.time()
    x = torch.arange(rank * n, (rank + 1) * n, dtype=torch.float32)[:, None].repeat(1, SHAPE[1])
    y = xt.redistribute(x, plan, plan.mesh)
    seconds = time.time() - start
    return place, torch.equal(y, torch.arange(4.0 * n)[:, None].repeat(1, SHAPE[1] // 4)), seconds


def in_the_middle(
    cluster: Cluster,
    plan: xs.Plan,
    folder: Path,
    happens: Callable[[], None],
    timeout_s: float | None = None,
) -> list[Any]:
    """What all ranks return of `turned` when something happens after they have met.

    timeout_s: the limit of collectives from then on.
    """
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(cluster.run_torch, turned, plan, folder, timeout_s, timeout_s=60.0)
        while not running.done() and not all(
            (folder / f"ready{rank}").exists() for rank in range(4)
        ):
            time.sleep(0.05)
        happens()
        return running.result()


PLACES = [(0, 0, 2, 6), (1, 1, 2, 6), (2, 0, 2, 6), (3, 1, 2, 6)]


def test_a_plan_sends_over_the_link_what_must_cross_at_its_rate(
    cluster: Cluster, plan: xs.Plan
) -> None:
    before = [cluster.bytes(node) for node in range(2)]
    places, right, seconds = zip(*cluster.run_torch(turned, plan, timeout_s=60.0), strict=True)
    assert list(places) == PLACES and all(right)
    for node in range(2):
        for was, now in zip(before[node], cluster.bytes(node), strict=True):
            assert MUST_CROSS < now - was < 1.05 * MUST_CROSS + OVERHEAD
    assert max(seconds) > 0.8 * MUST_CROSS * 8 / BITS_PER_S


def test_a_link_restored_in_time_loses_nothing(
    cluster: Cluster, plan: xs.Plan, tmp_path: Path
) -> None:
    def cut_and_restore() -> None:
        cluster.slow(1, f"{BITS_PER_S // 2}bit")  # 0.8 s for what crosses
        (tmp_path / "go").touch()
        time.sleep(0.3)
        cluster.cut(1)
        time.sleep(0.7)
        cluster.restore(1)

    places, right, seconds = zip(
        *in_the_middle(cluster, plan, tmp_path, cut_and_restore), strict=True
    )
    assert list(places) == PLACES and all(right)
    assert max(seconds) > 1.2


def test_jax_processes_share_their_devices(cluster: Cluster) -> None:
    def total(factor: int) -> tuple[int, int, int, float]:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), "x")
        rows = np.arange(4.0) * factor
        x = jax.make_array_from_callback(
            (4,), NamedSharding(mesh, PartitionSpec("x")), lambda index: rows[index]
        )
        summed = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
        return jax.process_index(), jax.local_device_count(), jax.device_count(), float(summed)

    for factor in (1, 2):
        assert cluster.run_jax(total, factor, timeout_s=60.0) == [
            (0, 2, 4, 6.0 * factor),
            (1, 2, 4, 6.0 * factor),
        ]


def ran(code: str) -> str:
    """A block of a document, and the machine that it finds."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names["found"]


def test_what_clusters_md_shows_runs_on_two_nodes(cluster: Cluster) -> None:
    blocks = [block for block in python_blocks("docs/clusters.md") if block.special]
    in_torch, in_jax = (block.code for block in blocks)
    assert cluster.run_torch(ran, in_torch, timeout_s=60.0) == ["gloo:2"] * 4
    assert cluster.run_jax(ran, in_jax, timeout_s=60.0) == ["host:2"] * 2


def test_every_rank_hears_of_a_cut_link(cluster: Cluster, plan: xs.Plan, tmp_path: Path) -> None:
    def cut() -> None:
        cluster.cut(0)
        (tmp_path / "go").touch()

    with pytest.raises(NodesError) as raised:
        in_the_middle(cluster, plan, tmp_path, cut, TIMEOUT_S)
    assert sorted(raised.value.errors) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "RuntimeError" in raised.value.errors["rank 0"]
    cluster.restore(0)


HOLDS_NODES = """
import subprocess, time
from xshard.testing.nodes import nodes
with nodes(3) as cluster:
    for node in cluster._network.nodes:
        subprocess.Popen([*node.prefix, "sh", "-c", "echo up; exec sleep 600"])
    time.sleep(600)
"""


def test_nothing_is_left_of_nodes_whose_test_was_killed(cluster: Cluster) -> None:
    test = subprocess.Popen([sys.executable, "-c", HOLDS_NODES], stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    for _ in range(3):
        assert test.stdout.readline() == "up\n"
    networks = {network_of(pid) for pid in descendants(test.pid)} - {network_of(os.getpid())}
    assert len(networks) == 4  # the switch has one too
    test.send_signal(signal.SIGKILL)
    test.wait()
    for _ in range(6000):  # a slow machine is no reason to fail
        if not networks & {
            network_of(int(pid)) for pid in filter(str.isdecimal, os.listdir("/proc"))
        }:
            return
        time.sleep(0.1)
    raise AssertionError(f"some of {networks} are still there")


def network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # which grows as it goes
        children = Path(f"/proc/{parent}/task/{parent}/children")
        found += map(int, children.read_text().split())
    return found


def test_what_is_no_rate_is_refused(cluster: Cluster) -> None:
    with pytest.raises(xs.XshardError, match="a link cannot have the rate 'fast'"):
        cluster.slow(0, "fast")


def test_a_machine_without_namespaces_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        with pytest.raises(NoNodesError) as raised, nodes(2):
            pass
        return str(raised.value)

    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "tc not installed" in reason()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert reason() == "no namespaces here: they need Linux"
