"""The torch side of `xshard calibrate`: seconds of plans on gloo ranks, forward only."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_bridge.contractions.einsum import einsum
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from torch_bridge.testing.worker import by_rank, on_ranks
from xshard import ContractionPlan, Plan
from xshard.testing.plans import sources_of

TARGET_S = 0.01  # seconds of calls between two looks at the clock, about
MOST_CALLS = 20


def seconds_of_plans(plans: Sequence[Plan | ContractionPlan], rounds: int, timeout_s: float) -> list[float]:
    """The median time of every plan over some rounds. timeout_s: see `run_ranks`. Raises RankError."""
    return list(map(_median, by_rank(plans, _time_all, rounds, timeout_s=timeout_s)))


def seconds_of_products(
    n_devices: int, rows: int, dtypes: Sequence[str], rounds: int, timeout_s: float
) -> list[float]:
    """The median time per dtype of a product of square matrices, on all devices at once."""
    ranks = on_ranks(n_devices, _multiply_all, rows, dtypes, rounds, timeout_s=timeout_s)
    return list(map(_median, zip(*ranks, strict=True)))


def _median(by_rank: Sequence[Sequence[float]]) -> float:
    """Seconds by rank, round by round -> their median; of a round the busiest rank counts, as in a plan."""
    return statistics.median(map(max, zip(*by_rank, strict=True)))


def _multiply_all(rows: int, dtypes: Sequence[str], rounds: int) -> list[list[float]]:
    """This rank's seconds per dtype, round by round."""
    seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for _ in range(1 + rounds):
        for dtype in dtypes:
            x = torch.ones(rows, rows, dtype=getattr(torch, dtype))
            dist.barrier()
            start = time.perf_counter()
            torch.mm(x, x)
            seconds[dtype].append(time.perf_counter() - start)
    return [times[1:] for times in seconds.values()]  # the first round warms up


def _time_all(plans: Sequence[Plan | ContractionPlan], rounds: int) -> list[list[float]]:
    """This rank's seconds per call of every plan, round by round.

    All plans are measured once before any is measured again, so that a slow spell of the machine
    falls on all of them.
    """
    timers = [_PlanTimer(plan) for plan in plans]
    by_round = [[timer.seconds() for timer in timers] for _ in range(rounds)]
    return [list(times) for times in zip(*by_round, strict=True)]


class _PlanTimer:
    """A plan, lowered and warmed up, and how often to call it between two looks at the clock."""

    def __init__(self, plan: Plan | ContractionPlan) -> None:
        processes, dtype = process_mesh(plan.mesh), getattr(torch, plan.dtype)
        shapes = [source.local_shape(processes.device) for source in sources_of(plan)]
        self.blocks = [torch.ones(shape, dtype=dtype) for shape in shapes]
        self.run: Callable[..., Any] = (
            functools.partial(einsum, plan, mesh=plan.mesh)
            if isinstance(plan, ContractionPlan)
            else lower(plan, processes, torch.device("cpu"))
        )
        self.calls = 2
        self.seconds()  # the first calls make connections
        slowest = torch.tensor(self.seconds())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks call equally often
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / slowest.item())))

    def seconds(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.run(*self.blocks)
        return (time.perf_counter() - start) / self.calls
