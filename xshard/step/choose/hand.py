"""The plans that people write by hand, for any step: what every axis does in each operation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from xshard.notation.parser import parts_of
from xshard.step.price.nodes import Gathering, Node
from xshard.step.price.options import Flags, Ints, Placements, product_over
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import REPLICAS, TAGS, dims_of, shape_of
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep

# Ranks of what an axis does, behind all dims that are preferred.
IDLE = 100
OTHER = 10_000
SMALL = 0.01  # of the largest parameter: operations with smaller ones do whatever is best


class HandPlan(NamedTuple):
    """A use of the last mesh axis, where all others shard the batch, and of storage for parameters.

    Args:
        last: What the last axis shards. "batch" or "sequence"; "tensor": the dims that parameters
            have beside the residual stream's; "heads": the sequence, and "tensor" in attention.
        stored: The axes that shard parameters in storage: "all", or the "last" one.
        gathering: When parameters are gathered.
    """

    last: str
    stored: str
    gathering: Gathering


HAND: Mapping[str, HandPlan] = {
    "data parallel, ZeRO-1": HandPlan("batch", "all", Gathering.PER_STEP),
    "ZeRO-3": HandPlan("batch", "all", Gathering.PER_USE),
    "HSDP": HandPlan("batch", "last", Gathering.PER_USE),
    "tensor + sequence parallel": HandPlan("tensor", "last", Gathering.PER_STEP),
    "tensor + sequence parallel, ZeRO-1": HandPlan("tensor", "all", Gathering.PER_STEP),
    "tensor + sequence parallel, ZeRO-3": HandPlan("tensor", "all", Gathering.PER_USE),
    "context parallel, ZeRO-3": HandPlan("sequence", "all", Gathering.PER_USE),
    "Ulysses, ZeRO-3": HandPlan("heads", "all", Gathering.PER_USE),
}


def allowed(problem: StepProblem, plan: HandPlan) -> list[Flags]:
    """Return the options of every node that a plan by hand leaves: for each node [options]."""
    step = problem.step
    preferred = _preferred_dims(step)
    sizes = {name: math.prod(shape_of(step.arrays[name], step.lengths)) for name in step.parameters}
    small = SMALL * max(sizes.values())
    flags = list[Flags]()
    for node in problem.nodes:
        op = step.by_name.get(node.name)
        if node.gathering is not None:
            flags.append(_allowed_storage(problem, node, plan))
        elif op is None:
            flags.append(np.ones(len(node.placements), bool))  # an input
        else:
            is_attention_by_heads = plan.last == "heads" and op.kind == "attention"
            last_dims = preferred["tensor" if is_attention_by_heads else plan.last]
            batch_ranks = _ranks(op, node.placements[..., :-1], [step.batch])
            ranks = batch_ranks + _ranks(op, node.placements[..., -1:], last_dims)
            largest = max((sizes[name] for name in op.operands if name in sizes), default=0)
            if largest >= small or op.kind in ("attention", "loss"):
                flags.append(ranks == ranks.min())
            else:
                flags.append((ranks < OTHER) | (op.kind in ("share", "source")))
    return flags


def _preferred_dims(step: TrainingStep) -> dict[str, list[str]]:
    """List the dims that an axis shards, best first, by `HandPlan.last`."""
    carries = [op for op in step.ops if op.kind == "carry"]
    stream = (carries[0] if carries else step.ops[0]).dims[-1]  # the residual stream's
    parameter_dims = _dims_of_arrays(step, step.parameters)
    sequence = [dim for dim in stream if dim != step.batch and dim not in parameter_dims]
    others = {*stream, *_dims_of_arrays(step, step.inputs)}
    tensor = [dim for dim in parameter_dims if dim not in others]
    for op in step.ops:  # other names of the same dims: an axis shards them in one rule
        for rule in op.axis_rules:
            pairs = zip(op.dims, rule, strict=False)
            sharded = [dims[placement] for dims, placement in pairs if placement >= 0]
            if not set(sharded).isdisjoint(tensor):
                tensor += [dim for dim in sharded if dim not in tensor and dim not in others]
    return {
        "batch": [step.batch],
        "sequence": sequence,
        "tensor": [*tensor, *sequence],
        "heads": sequence,
    }


def _dims_of_arrays(step: TrainingStep, names: Iterable[str]) -> list[str]:
    """List the dims of some arrays, one array after another."""
    return [*chain.from_iterable(dims_of(step.arrays[name]) for name in names)]


def _allowed_storage(problem: StepProblem, node: Node, plan: HandPlan) -> Flags:
    """Return the options of a parameter with most shards, gathered as the plan says."""
    is_sharding = node.placements[:, -1] >= 0  # [options, axes]
    n_shards = product_over(is_sharding, problem.mesh.sizes)
    if plan.stored == "last":
        n_shards[is_sharding[:, :-1].any(-1)] = 0  # sharded by another axis
    has_most_shards = n_shards == n_shards.max()
    return np.asarray(node.is_gathered(plan.gathering) & has_most_shards)


def _ranks(op: Op, placements: Placements, preferred: Sequence[str]) -> Ints:
    """Rank what some axes do in each option: preferred dims in their order, then idle, then others.

    placements: [options, arrays, axes]. Returns the sum over axes: [options].
    """
    ranks = np.where((placements == REPLICAS).all(1), IDLE, OTHER)
    for i, array in enumerate(op.arrays):
        rank_of = list[int]()
        for dim in array.dims:
            parts = [name for name in parts_of(dim) if name in preferred]
            rank_of.append(min(map(preferred.index, parts), default=OTHER))
        rank_of += [OTHER] * (1 + len(TAGS))  # tags are negative: they count from the end
        ranks = np.minimum(ranks, np.array(rank_of)[placements[:, i]])
    return np.asarray(ranks.sum(-1))
