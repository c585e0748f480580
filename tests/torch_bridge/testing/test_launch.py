"""Ranks on one machine: failures that end everything soon."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.runtimes.test_processes import has_ended
from tests.torch_bridge.helpers import SharedRanks, on_ranks, on_threads
from torch_bridge.testing import RankError, run_ranks
from xshard.runtimes.backends import backend_named


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the third block is missing")
    dist.barrier()  # the others wait for it


def _one_is_killed() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def _measured() -> tuple[int, list[float]]:
    seconds = backend_named("torch").ask(
        2, "worker.seconds_of_products", 2, 8, ("float32",), 1, timeout_s=60.0
    )
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()), seconds


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="children are listed in Linux only"
)
def test_ranks_measure_themselves_alone() -> None:
    """Four ranks that each start four more measure a machine with a quarter of the cores."""
    (children, seconds), other = on_ranks(2, _measured)
    assert children == other[0] == 0 and seconds == other[1] and seconds[0] > 0


def test_a_failing_rank_ends_the_others() -> None:
    with pytest.raises(
        RankError, match=r"rank 1 of 3 failed[\s\S]*ValueError: the third block is missing"
    ):
        on_ranks(3, _one_fails)
    with pytest.raises(RankError, match=r"rank 0 of 2 failed[\s\S]*SIGKILL"):
        on_ranks(2, _one_is_killed)


def _largest(numbers: list[int]) -> int:
    return max(numbers)


def _sums_are_small() -> None:
    numbers = [1, 2 + 2 * dist.get_rank()]
    assert _largest(numbers) <= 3


@pytest.mark.parametrize(
    ("launch", "place"), [(on_ranks, "rank 1 of 2 failed"), (on_threads, "on thread 1 of 2")]
)
def test_an_assertion_that_fails_on_a_rank_is_reported_in_full(launch: Any, place: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(2, _sums_are_small)
    report = str(caught.value)
    assert place in report
    line = _sums_are_small.__code__.co_firstlineno + 2
    assert f'test_launch.py", line {line}, in _sums_are_small' in report
    assert "assert _largest(numbers) <= 3" in report
    assert "assert 4 <= 3" in report
    assert "where 4 = _largest([1, 4])" in report


in_one_launch = SharedRanks(2)
log: list[str] = []


@in_one_launch
def shared_first() -> None:
    log.append("first")


@in_one_launch
def shared_second() -> None:
    assert log != ["first"]


@in_one_launch
def shared_third() -> None:
    assert log == []


def test_a_shared_launch_reports_each_of_its_tests_by_itself() -> None:
    shared_first()
    with pytest.raises(RankError, match=r"in shared test shared_second") as caught:
        shared_second()
    assert "assert ['first'] != ['first']" in str(caught.value)
    shared_third()  # on other ranks, which have not run the first one


def test_time_is_limited() -> None:
    with pytest.raises(RankError, match="not all of 2 ranks ended: it stood still for 3 s"):
        on_ranks(2, _one_hangs, timeout_s=3)


def _hangs(folder: Path) -> None:
    file = folder / f"{dist.get_rank()}.part"
    file.write_text(str(os.getpid()))
    file.rename(file.with_suffix(""))
    time.sleep(600)


def _launches(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a job that a shell runs in the background
    run_ranks(2, _hangs, folder)


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    launcher = multiprocessing.get_context("forkserver").Process(target=_launches, args=(tmp_path,))
    launcher.start()
    files = [tmp_path / str(rank) for rank in range(2)]
    while not all(file.exists() for file in files):
        assert launcher.is_alive()
        time.sleep(0.05)
    launcher.kill()
    assert all(map(has_ended, files))
