"""A node that is killed, and a link that is cut while large messages are on it, for good or for 2 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.torch_bridge.faults.ranks import ALL, ends_of, say, take_part_on_node
from tests.torch_bridge.faults.table import check_column
from xshard.testing.nodes import Cluster, NodesError, NoNodesError, nodes

TIMEOUT_S = 3.0
LONG_S = 120.0
WIDTH = 10_000  # a block is 0.3 MB, which takes a quarter of a second at this rate, alone: all take long
RATE = "10mbit"
STILL = "1mbit"  # and ten times as long: no rank has all that it waits for when its node's link ends for good
LEFT = (2, 3, 6, 7)  # where the first node is killed: half of the world, and the server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        made = nodes(2, ranks=4)
        cluster = made.__enter__()
    except NoNodesError as error:
        pytest.skip(str(error))
    yield cluster
    made.__exit__(None, None, None)


def _interrupted(
    cluster: Cluster,
    folder: Path,
    happens: Callable[[], None],
    survivors: Sequence[int],
    timeout_s: float,
    rate: str = STILL,
) -> None:
    """Call `happens` when all ranks are in the middle of all operations, and wait for the survivors."""
    with ThreadPoolExecutor(1) as thread:
        times = {"timeout_s": LONG_S, "collective_timeout_s": LONG_S}  # until ranks are connected
        running = thread.submit(
            cluster.run_torch, take_part_on_node, folder, WIDTH, timeout_s, **times
        )
        running.add_done_callback(lambda _: (folder / "returned").touch())

        def wait_for_ranks(what: str, ranks: Sequence[int]) -> None:
            while not all((folder / f"{what}{rank}").exists() for rank in ranks):
                assert not (folder / "returned").exists() or what == "ends", running.result()
                time.sleep(0.05)

        wait_for_ranks("ready", ALL)
        cluster.slow(1, rate)
        say(folder, "go")
        wait_for_ranks("begun", ALL)
        time.sleep(0.3)
        happens()
        wait_for_ranks("ends", survivors)
        cluster.restore(1)
        cluster.slow(1, None)
        say(folder, "over")
        assert len(running.result()) == len(
            ALL
        )  # each rank's, although each has made another world


def test_a_link_is_cut_for_2_s(cluster: Cluster, tmp_path: Path) -> None:
    def cut_and_restore() -> None:
        cluster.cut(1)
        time.sleep(2.0)
        cluster.slow(1, None)
        cluster.restore(1)

    _interrupted(cluster, tmp_path, cut_and_restore, ALL, LONG_S, RATE)
    check_column("a link is cut for 2 s", ends_of(tmp_path, ALL), LONG_S)


def test_a_link_is_cut(cluster: Cluster, tmp_path: Path) -> None:
    _interrupted(cluster, tmp_path, lambda: cluster.cut(1), ALL, TIMEOUT_S)
    check_column("a link is cut", ends_of(tmp_path, ALL), TIMEOUT_S)


def test_a_node_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """The one that has the store of all."""
    with pytest.raises(NodesError) as raised:
        _interrupted(cluster, tmp_path, lambda: cluster.kill(0), LEFT, TIMEOUT_S)
    assert "status -9" in raised.value.errors["node 0"], raised.value.errors["node 0"]
    with pytest.raises(NoNodesError, match="this node has been killed"):
        cluster.run_torch(len, "")
    check_column("a node is killed", ends_of(tmp_path, LEFT), TIMEOUT_S)
