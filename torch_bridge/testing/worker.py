"""The torch side of `xshard selfcheck`: tasks on gloo ranks.

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

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.contractions.einsum import einsum
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from torch_bridge.redistribution import redistribute
from torch_bridge.testing.arrays import array_of, tensor_of
from torch_bridge.testing.byte_counter import Meter
from torch_bridge.testing.launch import run_ranks
from xshard import ContractionPlan, Plan
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps.base import Block


class RankOutcome(NamedTuple):
    """The outcome of a task on one rank, with bytes per collective."""

    output: Block
    gradients: list[Block]
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
    cotangent, *given = (tensor_of(blocks[rank]) for blocks in (task.cotangents, *task.operands))
    with Meter() as forward:
        output, pull = _forward(task.plan, given)
    with Meter() as backward:
        gradients = pull(cotangent)
    dist.barrier()
    start = time.perf_counter()
    _forward(task.plan, given)[1](cotangent)
    seconds = time.perf_counter() - start
    blocks = array_of(output), [array_of(gradient) for gradient in gradients]
    return RankOutcome(*blocks, forward.received, backward.received, seconds)


def _forward(
    plan: Plan | ContractionPlan, given: list[Tensor]
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """The output, and its pullback: autograd, or the backward plan for dtypes without autograd."""

    def run(*blocks: Tensor) -> Tensor:
        if isinstance(plan, ContractionPlan):
            return as_tensor(einsum(plan, *blocks, mesh=plan.mesh))
        return redistribute(blocks[0], plan, plan.mesh)

    if isinstance(plan, Plan) and not (given[0].dtype.is_floating_point or given[0].dtype.is_complex):
        pull = lower(plan.backward, process_mesh(plan.mesh), given[0].device)
        return run(*given), lambda cotangent: [pull(cotangent)]
    leaves = [x.clone().requires_grad_() for x in given]
    y = run(*leaves)
    return y.detach(), lambda cotangent: torch.autograd.grad(y, leaves, cotangent)


def _outcome(parts: Sequence[RankOutcome]) -> Outcome:
    """All ranks together; of every collective the busiest rank counts, as in a plan."""
    forward, backward = (
        sum(map(max, zip(*counts, strict=True)))
        for counts in ([p.forward_bytes for p in parts], [p.backward_bytes for p in parts])
    )
    return Outcome(
        tuple(p.output for p in parts),
        tuple(gradient for each in zip(*(p.gradients for p in parts), strict=True) for gradient in each),
        forward,
        backward,
        max(p.seconds for p in parts),
    )
