"""The plans that people write by hand, for any step: the use of every axis in each class of operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.notation.parser import parts_of
from xshard.step.op import Op, dims_of
from xshard.step.options import Flags, product
from xshard.step.problem import EACH, KEPT, Node, StepProblem
from xshard.step.step import shape_of

IDLE, OTHER = 100, 10_000  # ranks of what an axis does, behind all dims that are preferred
SMALL = 0.01  # of the largest parameter: operations with smaller ones do whatever is best


class HandPlan(NamedTuple):
    """A use of the last axis, all others sharding the batch, and of storage for parameters.

    last: the batch, the sequence, the dims that parameters have beside the residual stream's ("tensor"), or
    the sequence with "tensor" in attention ("heads"). stored: on all axes, or on the last one.
    """

    last: str
    stored: str
    mode: int


HAND: Mapping[str, HandPlan] = {
    "data parallel, ZeRO-1": HandPlan("batch", "all", KEPT),
    "ZeRO-3": HandPlan("batch", "all", EACH),
    "HSDP": HandPlan("batch", "last", EACH),
    "tensor + sequence parallel": HandPlan("tensor", "last", KEPT),
    "tensor + sequence parallel, ZeRO-1": HandPlan("tensor", "all", KEPT),
    "tensor + sequence parallel, ZeRO-3": HandPlan("tensor", "all", EACH),
    "context parallel, ZeRO-3": HandPlan("sequence", "all", EACH),
    "Ulysses, ZeRO-3": HandPlan("heads", "all", EACH),
}


def allowed(problem: StepProblem, plan: HandPlan) -> list[Flags]:
    """The options of every node that a plan by hand leaves."""
    step = problem.step
    stream = dims_of(next((op.result for op in step.ops if op.kind == "carry"), step.ops[0].result))
    weights = [dim for name in step.parameters for dim in dims_of(step.arrays[name])]
    sequence = [dim for dim in stream if dim != step.batch and dim not in weights]
    tensor = [*(dim for dim in weights if dim not in stream), *sequence]
    lasts = {"batch": [step.batch], "sequence": sequence, "tensor": tensor, "heads": sequence}
    sizes = {name: math.prod(shape_of(step.arrays[name], step.lengths)) for name in step.parameters}
    flags = []
    for node in problem.nodes:
        if node.kept is not None:
            flags.append((node.kept == plan.mode) & _most_sharded(node, problem, plan.stored == "last"))
        elif node.name in step.inputs:
            flags.append(np.ones(len(node.ways), bool))
        else:
            op = step.by_name[node.name]
            last = tensor if (plan.last, op.kind) == ("heads", "attention") else lasts[plan.last]
            ranks = sum(
                _ranks(op, node, axis, last if axis == len(problem.mesh.axes) - 1 else [step.batch])
                for axis in range(len(problem.mesh.axes))
            )
            weight = max((sizes[name] for name in op.operands if name in sizes), default=0)
            if weight < SMALL * max(sizes.values()) and op.kind not in ("attention", "loss", "source"):
                flags.append((ranks < OTHER) | (op.kind == "share"))
            else:
                flags.append(ranks == np.min(ranks))
    return flags


def _most_sharded(node: Node, problem: StepProblem, last: bool) -> Flags:
    """The ways to store a parameter on as many devices as possible. last: by the last axis alone."""
    ways, sizes = node.ways[:, -1], problem.mesh.sizes
    shards = product(ways >= 0, sizes) * ~(last & (ways[:, :-1] >= 0).any(-1))
    most: Flags = shards == shards.max()
    return most


def _ranks(op: Op, node: Node, axis: int, prefer: Sequence[str]) -> np.ndarray:
    """How well an axis fits in each option: the dims preferred in their order, then idle, then others."""
    ways = node.ways[:, :, axis]
    ranks = np.where((ways == -1).all(-1), IDLE, OTHER)
    for j, array in enumerate(op.arrays):
        for d, dim in enumerate(array.dims):
            rank = min((prefer.index(name) for name in parts_of(dim) if name in prefer), default=OTHER)
            ranks = np.where(ways[:, j] == d, np.minimum(ranks, rank), ranks)
    return ranks
