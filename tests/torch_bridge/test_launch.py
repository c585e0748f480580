"""Ranks on one machine: results by rank, and failures that end everything soon."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.torch_bridge.helpers import on_ranks
from torch_bridge import RankError


def _own(factor: int) -> tuple[int, torch.Tensor]:
    return dist.get_rank() * factor, torch.full((2,), dist.get_world_size())


def test_results_come_back_by_rank() -> None:
    results = on_ranks(3, _own, 10)
    assert [number for number, _ in results] == [0, 10, 20]
    assert all(sizes.tolist() == [3, 3] for _, sizes in results)


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


def test_a_failing_rank_ends_the_others() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed[\s\S]*ValueError: the third block is missing"):
        on_ranks(3, _one_fails)
    with pytest.raises(RankError, match=r"rank 0 of 2 failed[\s\S]*SIGKILL"):
        on_ranks(2, _one_is_killed)


def test_time_is_limited() -> None:
    with pytest.raises(RankError, match="not all of 2 ranks ended: it stood still for 3 s"):
        on_ranks(2, _one_hangs, timeout_s=3)
