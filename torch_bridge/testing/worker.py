"""The torch side of `xshard verify`: tasks on gloo ranks.

Decides what is measured: each task runs on as many ranks as its mesh has devices, forward and
backward. Knows no other runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from torch_bridge.redistribution import redistribute
from torch_bridge.testing.arrays import array_of, tensor_of
from torch_bridge.testing.byte_counter import Meter
from torch_bridge.testing.launch import run_ranks
from xshard import Plan
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps.base import Block


class RankOutcome(NamedTuple):
    """The outcome of a task on one rank, with bytes per collective."""

    output: Block
    gradient: Block
    forward_bytes: list[int]
    backward_bytes: list[int]
    seconds: float


def run_tasks(tasks: Sequence[Task], timeout_s: float) -> list[Outcome]:
    """The outcome of every task. timeout_s: see `run_ranks`. Raises RankError."""
    outcomes: dict[int, Outcome] = {}
    for n in sorted({task.plan.mesh.n_devices for task in tasks}):
        numbers = [i for i, task in enumerate(tasks) if task.plan.mesh.n_devices == n]
        by_rank = run_ranks(n, _run_all, [tasks[i] for i in numbers], timeout_s=timeout_s)
        for i, *parts in zip(numbers, *by_rank, strict=True):
            outcomes[i] = _outcome(parts)
    return [outcomes[i] for i in range(len(tasks))]


def _run_all(tasks: Sequence[Task]) -> list[RankOutcome]:
    return [_run(task) for task in tasks]


def _run(task: Task) -> RankOutcome:
    rank = dist.get_rank()
    x, cotangent = (tensor_of(blocks[rank]) for blocks in (task.inputs, task.cotangents))
    with Meter() as forward:
        output, pull = _forward(task.plan, x)
    with Meter() as backward:
        gradient = pull(cotangent)
    dist.barrier()
    start = time.perf_counter()
    _forward(task.plan, x)[1](cotangent)
    seconds = time.perf_counter() - start
    blocks = array_of(output), array_of(gradient)
    return RankOutcome(*blocks, forward.received, backward.received, seconds)


def _forward(plan: Plan, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The output, and its pullback: autograd, or the backward plan for dtypes without autograd."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        leaf = x.clone().requires_grad_()
        y = redistribute(leaf, plan, plan.mesh)
        return y.detach(), lambda cotangent: torch.autograd.grad(y, leaf, cotangent)[0]
    return redistribute(x, plan, plan.mesh), lower(plan.backward, process_mesh(plan.mesh), x.device)


def _outcome(parts: Sequence[RankOutcome]) -> Outcome:
    """All ranks together; of every collective the busiest rank counts, as in a plan."""
    forward, backward = (
        sum(map(max, zip(*counts, strict=True)))
        for counts in ([p.forward_bytes for p in parts], [p.backward_bytes for p in parts])
    )
    return Outcome(
        tuple(p.output for p in parts),
        tuple(p.gradient for p in parts),
        forward,
        backward,
        max(p.seconds for p in parts),
    )
