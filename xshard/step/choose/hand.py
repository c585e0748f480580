"""The plans that people write by hand, for any step: what every axis does in each operation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from xshard.notation.parser import names_of_dim
from xshard.step.price.nodes import Gathering, Node
from xshard.step.price.options import Flags, Ints, Placements, product_over
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import REPLICAS, TAGS, dims_of, shape_of
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep

# Ranks of what an axis does, behind all dims that are preferred (0, 1, 2, ...).
IDLE = 100
OTHER = 10_000  # so large that a sum over several axes tells whether any of them has it
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


def options_by_hand(problem: StepProblem, plan: HandPlan) -> list[Flags]:
    """Mark the shardings that a plan as people write it, such as ZeRO-3, would allow.

    A node is a parameter, an input or an operation; its options are the ways to shard it. Returns
    a list with an array of booleans [options] for each node.

    Parameters are stored as the plan says. Large operations shard what it prefers over each axis,
    where that is possible; small ones may shard any dim that it names, or nothing. Inputs are free.
    """
    step = problem.step
    preferred = _preferred_dims(step)
    sizes = {name: math.prod(shape_of(step.arrays[name], step.lengths)) for name in step.parameters}
    smallest_that_counts = SMALL * max(sizes.values(), default=0)
    flags: list[Flags] = []
    for node in problem.nodes:
        op = step.by_name.get(node.name)
        if node.gathering is not None:  # a parameter
            flags.append(_allowed_storage(problem, node, plan))
        elif op is None:
            flags.append(np.ones(len(node.placements), bool))  # an input
        else:
            ranks = _ranks_of_options(problem, node, op, plan, preferred)
            largest = max([sizes.get(name, 0) for name in op.operands], default=0)
            if largest >= smallest_that_counts or op.kind in ("attention", "loss"):
                flags.append(ranks == ranks.min())
            else:
                # A small operation may shard any preferred dim, or idle: ranks below OTHER. Two
                # kinds may do whatever the operations around them need: a `share`, which hands
                # one array on to several users, and a `source`, which makes an array of nothing.
                flags.append((ranks < OTHER) | (op.kind in ("share", "source")))
    return flags


def _ranks_of_options(
    problem: StepProblem,
    node: Node,
    op: Op,
    plan: HandPlan,
    preferred: Mapping[str, Sequence[str]],
) -> Ints:
    """Rank the ways to shard an operation by how near they are to a plan by hand.

    In such a plan all mesh axes but the last should shard the batch, and the last one what
    `HandPlan.last` says, such as "tensor" or "sequence".

    preferred: for each value of `HandPlan.last` the dims to shard, best first. Returns [options]
    of numbers from 0, which is best: sums of the ranks of all axes.
    """
    last = plan.last
    if last == "heads" and op.kind == "attention":
        last = "tensor"
    n_first = len(problem.whole_mesh.axes) - 1
    first_axes = node.placements[..., :n_first]  # [options, arrays, axes]
    # If it is split, the outer sub-axis shards what the axis does.
    last_axis = node.placements[..., n_first : n_first + 1]
    batch_ranks = _ranks(op, first_axes, [problem.step.batch])
    return batch_ranks + _ranks(op, last_axis, preferred[last])


def _preferred_dims(step: TrainingStep) -> dict[str, list[str]]:
    """List the dims that the last mesh axis should shard, best first, for each `HandPlan.last`.

    Returns dims by "batch", "sequence", "tensor" and "heads". Names of dims mean nothing, so that
    dims are recognized by the arrays which have them. In a model with the residual
    stream `b s c` and the weight `f c`: the sequence is s, a dim of the stream that no parameter
    has; tensor parallel is f, a dim of a parameter that the stream lacks.
    """
    stream_dims = _dims_of_stream(step)
    parameter_dims = _dims_of_arrays(step, step.parameters)
    sequence = [dim for dim in stream_dims if dim != step.batch and dim not in parameter_dims]
    not_tensor = {*stream_dims, *_dims_of_arrays(step, step.inputs)}
    tensor = [dim for dim in parameter_dims if dim not in not_tensor]
    tensor = _with_other_names(step, tensor, not_tensor)
    return {
        "batch": [step.batch],
        "sequence": sequence,
        "tensor": [*tensor, *sequence],
        "heads": sequence,
    }


def _dims_of_stream(step: TrainingStep) -> Sequence[str]:
    """List the dims of the residual stream, which one of several equal layers hands on to the next.

    A carry has it as its result. In a step without such layers the first result stands for it.
    """
    carries = [op for op in step.ops if op.kind == "carry"]
    first, *_ = [*carries, *step.ops]
    return first.dims[-1]


def _with_other_names(
    step: TrainingStep, dims: Sequence[str], excluded: Collection[str]
) -> list[str]:
    """Add the other names of dims, but for those excluded.

    One dim may be f in the operation that makes an array, and g in the one that uses it: a rule that
    shards both over one axis shows that. Operations come in the order of the step, so that names that
    are handed on are found by going through them once.
    """
    names = list(dims)
    for op in step.ops:
        # A rule has for each array the number of the dim that it shards, or a tag, below 0.
        for rule in op.axis_rules:
            arrays = zip(op.dims, rule, strict=False)
            sharded = [dims_of_array[number] for dims_of_array, number in arrays if number >= 0]
            if set(sharded).isdisjoint(names):
                continue
            for dim in sharded:
                if dim not in names and dim not in excluded:
                    names.append(dim)
    return names


def _dims_of_arrays(step: TrainingStep, names: Iterable[str]) -> list[str]:
    """List the dims of some arrays, one array after another."""
    return [*chain.from_iterable(dims_of(step.arrays[name]) for name in names)]


def _allowed_storage(problem: StepProblem, node: Node, plan: HandPlan) -> Flags:
    """Return the options of a parameter with most shards, gathered as the plan says."""
    is_sharding = node.placements[:, -1] >= 0  # [options, axes]
    n_shards = product_over(is_sharding, problem.mesh.sizes)
    if plan.stored == "last":
        n_first = len(problem.whole_mesh.axes) - 1
        n_shards[is_sharding[:, :n_first].any(-1)] = 0  # sharded by another axis
    has_most_shards = n_shards == n_shards.max()
    return np.asarray(node.is_gathered(plan.gathering) & has_most_shards)


def _ranks(op: Op, placements: Placements, preferred: Sequence[str]) -> Ints:
    """Rank what some mesh axes do in each option: preferred dims first, then idle, then others.

    With `preferred` = [f, s], an axis that shards f in some array has rank 0; one that shards s in
    some array, and f in none, has rank 1; one that replicates all arrays has IDLE, any other OTHER.

    placements: [options, arrays, axes], the number of the dim that an axis shards in an array, or a
    negative tag (replicas, sums, copies). Returns the sum over axes: [options].
    """
    is_idle = (placements == REPLICAS).all(1)  # [options, axes]
    ranks = np.where(is_idle, IDLE, OTHER)
    for i, array in enumerate(op.arrays):
        # Placements are indices of this list: dims first; tags, which are negative, from the end.
        rank_of_placement: list[int] = []
        for dim in array.dims:
            names = [name for name in names_of_dim(dim) if name in preferred]  # several in `(g d)`
            rank_of_placement.append(min(map(preferred.index, names), default=OTHER))
        rank_of_placement *= 2  # each dim by rows, then by whole units
        rank_of_placement += [OTHER] * (1 + len(TAGS))
        ranks_in_array = np.array(rank_of_placement)[placements[:, i]]
        ranks = np.minimum(ranks, ranks_in_array)
    return np.asarray(ranks.sum(-1))
