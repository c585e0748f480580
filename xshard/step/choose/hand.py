"""The plans that people write by hand, for any step: the use of every axis in each class of operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.notation.parser import parts_of
from xshard.step.price.options import Flags, Ints, product_over
from xshard.step.price.problem import EACH, KEPT, StepProblem
from xshard.step.record.arrays import REPLICAS, dims_of, shape_of
from xshard.step.record.op import Op

IDLE = 100
OTHER = 10_000  # ranks of what an axis does, behind all dims that are preferred
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
    flags = list[Flags]()
    stream = next((op.dims[-1] for op in step.ops if op.kind == "carry"), step.ops[0].dims[-1])
    weights = [dim for name in step.parameters for dim in dims_of(step.arrays[name])]
    sequence = [dim for dim in stream if dim != step.batch and dim not in weights]
    others = {*stream, *(dim for name in step.inputs for dim in dims_of(step.arrays[name]))}
    tensor = [dim for dim in weights if dim not in others]
    for rule, dims in (
        (rule, op.dims) for op in step.ops for rule in op.axis_rules
    ):  # other names of these
        same = [names[way] for names, way in zip(dims, rule, strict=False) if way >= 0]
        if {*same} & {*tensor}:
            tensor += [dim for dim in same if dim not in (*tensor, *others)]
    lasts = {
        "batch": [step.batch],
        "sequence": sequence,
        "tensor": [*tensor, *sequence],
        "heads": sequence,
    }
    sizes = {name: math.prod(shape_of(step.arrays[name], step.lengths)) for name in step.parameters}
    for node in problem.nodes:
        ways = node.ways
        op = step.by_name.get(node.name)
        if node.kept is not None:
            shards = product_over(ways[:, -1] >= 0, problem.mesh.sizes)
            shards[(ways[:, -1, :-1] >= 0).any(-1) & (plan.stored == "last")] = 0
            flags.append((node.kept == plan.mode) & (shards == shards.max()))
        elif op is None:
            flags.append(np.ones(len(ways), bool))
        else:
            last = (
                lasts["tensor"]
                if (plan.last, op.kind) == ("heads", "attention")
                else lasts[plan.last]
            )
            ranks = _ranks(op, ways[..., :-1], [step.batch]) + _ranks(op, ways[..., -1:], last)
            weight = max((sizes[name] for name in op.operands if name in sizes), default=0)
            is_free = weight < SMALL * max(sizes.values()) and op.kind not in ("attention", "loss")
            some = (ranks < OTHER) | (op.kind in ("share", "source"))
            flags.append(some if is_free else ranks == ranks.min())
    return flags


def _ranks(op: Op, ways: Ints, prefer: Sequence[str]) -> Ints:
    """How well axes fit in each option, in all: the dims preferred in their order, then idle, then others."""
    ranks = np.where((ways == REPLICAS).all(1), IDLE, OTHER)
    for j, array in enumerate(op.arrays):
        named = (
            [prefer.index(name) for name in parts_of(dim) if name in prefer] for dim in array.dims
        )
        of_dims = [min(each, default=OTHER) for each in named]
        ranks = np.minimum(
            ranks, np.array([*of_dims, OTHER, OTHER, OTHER])[ways[:, j]]
        )  # tags are negative
    return np.asarray(ranks.sum(-1))
