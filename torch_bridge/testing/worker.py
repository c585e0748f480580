"""`python -m torch_bridge.testing.worker TASKS OUTCOMES`: the torch side of `xshard.verify`.

Reads pickled tasks, runs each on as many gloo ranks as its mesh has devices, forward and
backward, and writes pickled outcomes.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from torch_bridge.redistribution import redistribute
from torch_bridge.testing.arrays import block_of, tensor_of
from torch_bridge.testing.byte_counter import Meter
from torch_bridge.testing.launch import run_ranks
from xshard import Plan
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps.base import Block


class Share(NamedTuple):
    """What one rank saw of a task; bytes are listed collective by collective."""

    output: Block
    gradient: Block
    forward_bytes: list[int]
    backward_bytes: list[int]
    seconds: float


def main(tasks_path: str, outcomes_path: str) -> None:
    """Run the tasks of one file and write their outcomes to the other."""
    tasks: list[Task] = pickle.loads(Path(tasks_path).read_bytes())
    outcomes: dict[int, Outcome] = {}
    for n in sorted({task.plan.mesh.n_devices for task in tasks}):
        numbers = [i for i, task in enumerate(tasks) if task.plan.mesh.n_devices == n]
        by_rank = run_ranks(n, run_tasks, [tasks[i] for i in numbers])
        for i, *shares in zip(numbers, *by_rank, strict=True):
            outcomes[i] = _outcome(shares)
    Path(outcomes_path).write_bytes(pickle.dumps([outcomes[i] for i in range(len(tasks))]))


def run_tasks(tasks: Sequence[Task]) -> list[Share]:
    """This rank's share of every task."""
    return [_run(task) for task in tasks]


def _run(task: Task) -> Share:
    rank, dtype = dist.get_rank(), task.inputs[0].dtype
    x, cotangent = (tensor_of(blocks[rank]) for blocks in (task.inputs, task.cotangents))
    with Meter() as forward:
        output, pull = _forward(task.plan, x)
    with Meter() as backward:
        gradient = pull(cotangent)
    dist.barrier()
    start = time.perf_counter()
    _forward(task.plan, x)[1](cotangent)
    seconds = time.perf_counter() - start
    blocks = block_of(output, dtype), block_of(gradient, dtype)
    return Share(*blocks, forward.received, backward.received, seconds)


def _forward(plan: Plan, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The output, and what takes its cotangent back: autograd, or the plan where a dtype has none."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        leaf = x.clone().requires_grad_()
        y = redistribute(leaf, plan, plan.mesh)
        return y.detach(), lambda cotangent: torch.autograd.grad(y, leaf, cotangent)[0]
    return redistribute(x, plan, plan.mesh), lower(plan.backward, process_mesh(plan.mesh), x.device)


def _outcome(shares: Sequence[Share]) -> Outcome:
    """The shares of all ranks; of every collective the busiest rank counts, as in a plan."""
    forward, backward = (
        sum(map(max, zip(*counts, strict=True)))
        for counts in ([s.forward_bytes for s in shares], [s.backward_bytes for s in shares])
    )
    return Outcome(
        tuple(s.output for s in shares),
        tuple(s.gradient for s in shares),
        forward,
        backward,
        max(s.seconds for s in shares),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
