"""The plans that people write by hand, for any step: the use of every axis in each class of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xshard.step.op import Op, elements
from xshard.step.options import Flags, shares
from xshard.step.problem import EACH, KEPT, StepProblem
from xshard.step.step import TrainingStep

IDLE, OTHER = 100, 10_000  # ranks of rules, behind all dims that are preferred
SMALL = 0.01  # of the largest parameter: operations with smaller ones do whatever is best
BATCH, SEQUENCE, TENSOR, HEADS = "batch", "sequence", "tensor", "heads"


class HandPlan(NamedTuple):
    """A use of the last axis, all others sharding the batch, and of storage for parameters.

    stored: axes that shard parameters in storage: "all", "last", "others" beside their use, or "none".
    """

    last: str
    stored: str
    mode: int


HAND: Mapping[str, HandPlan] = {
    "data parallel, ZeRO-1": HandPlan(BATCH, "all", KEPT),
    "ZeRO-3": HandPlan(BATCH, "all", EACH),
    "HSDP": HandPlan(BATCH, "last", EACH),
    "tensor + sequence parallel": HandPlan(TENSOR, "last", KEPT),
    "tensor + sequence parallel, ZeRO-1": HandPlan(TENSOR, "all", KEPT),
    "tensor + sequence parallel, ZeRO-3": HandPlan(TENSOR, "all", EACH),
    "context parallel, ZeRO-3": HandPlan(SEQUENCE, "all", EACH),
    "Ulysses, ZeRO-3": HandPlan(HEADS, "all", EACH),
}


def roles(step: TrainingStep) -> Mapping[str, Sequence[str]]:
    """The dims of a step by role: dims of parameters that the residual stream lacks are `TENSOR`."""
    stream = next((op.result for op in step.ops if op.kind == "carry"), step.ops[0].result)
    weights = dict.fromkeys(dim for name in step.parameters for dim in step.dims[name])
    sequence = [dim for dim in stream if dim != step.batch and dim not in weights]
    tensor = [dim for dim in weights if dim not in stream]
    return {BATCH: [step.batch], SEQUENCE: sequence, TENSOR: [*tensor, *sequence], HEADS: sequence}


def allowed(problem: StepProblem, plan: HandPlan) -> list[Flags]:
    """The options of every node that a plan by hand leaves."""
    step, mesh, dims = problem.step, problem.mesh, roles(problem.step)
    flags, largest = [], max(elements(step.dims[name], step.lengths) for name in step.parameters)
    for node in problem.nodes:
        op, options = step.by_name.get(node.name), node.options
        if op is not None:
            last = dims[TENSOR if plan.last == HEADS and op.kind == "attention" else plan.last]
            wanted = [*[dims[BATCH]] * (len(mesh.axes) - 1), last]
            ranks = np.array([_rank(op, prefer)[options.rules[:, a]] for a, prefer in enumerate(wanted)]).sum(
                0
            )
            weight = max(
                (elements(step.dims[o], step.lengths) for o in op.operands if o in step.parameters), default=0
            )
            free = weight < SMALL * largest and op.kind not in ("attention", "loss", "source")
            flags.append((ranks < OTHER) | (op.kind == "share") if free else ranks == ranks.min())
        elif node.kept is not None:
            only = {"all": slice(None), "last": slice(-1, None)}[plan.stored]
            sharded = np.where(
                np.isin(np.arange(len(mesh.axes)), np.arange(len(mesh.axes))[only]), options.ways[:, -1], -1
            )
            share = shares(sharded, mesh)
            same = (sharded == options.ways[:, -1]).all(-1)
            flags.append(same & (node.kept == plan.mode) & (share == share[same].min()))
        else:
            flags.append(np.ones(len(options), bool))
    return flags


def _rank(op: Op, prefer: Sequence[str]) -> np.ndarray:
    """How well each rule of an operation fits: the dims preferred in their order, then idle, then others."""
    ranks = []
    for rule in op.axis_rules:
        parts = zip(op.arrays, (*rule.operands, rule.result), strict=True)
        ranked = [prefer.index(dims[part]) for dims, part in parts if part >= 0 and dims[part] in prefer]
        idle = max((*rule.operands, rule.result), default=-1) == -1 and min(rule.operands, default=-1) == -1
        ranks.append(min(ranked, default=IDLE if idle else OTHER))
    return np.array(ranks)
