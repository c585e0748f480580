"""Heads of keys that are fewer than the devices of an axis: each is shared by devices with other queries.

2 heads of keys and 8 of queries over tp=4: the first two devices have the first head of keys, and 2
of its 4 queries each. So tp is two axes for a search: along tp_0 heads of keys are sharded, along
tp_1 they are copies, and queries are sharded along both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple

from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import split_by
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY
from xshard.step.record.op import AxisRule, Op
from xshard.step.record.training_step import TrainingStep

ArrayDim = tuple[str, int]  # the name of an array, and the number of one of its dims


class GroupedHeads(NamedTuple):
    """The heads of an attention in which several heads of queries read one of keys.

    Args:
        keys: The dim of key heads, by its name in the result.
        queries: The dim of query heads that read one of them.
        key_placements: For each operand with key heads its number, and the number of the dim.
    """

    keys: str
    queries: str
    key_placements: Sequence[tuple[int, int]]


def grouped_heads(op: Op) -> GroupedHeads | None:
    """Find the heads of an attention `(g r)`: g heads of keys, and r of queries for each of them.

    One axis may shard g everywhere. Another one may shard r in queries and in the result, where it
    is inside g, with copies of the keys. None if there are no such rules.
    """
    if op.kind != "attention":
        return None
    result = len(op.operands)
    names = op.dims[result]
    for outer, inner in product(op.axis_rules, repeat=2):
        if outer[result] < 0 or inner[result] != outer[result] + 1:
            continue
        is_one_dim = _array_dim(op.arrays[result], outer[result]) == _array_dim(
            op.arrays[result], inner[result]
        )
        of_keys = [(i, outer[i]) for i in range(result) if outer[i] >= 0 and inner[i] == COPY]
        if is_one_dim and of_keys:
            return GroupedHeads(names[outer[result]], names[inner[result]], of_keys)
    return None


def mesh_with_shared_heads(step: TrainingStep, mesh: Mesh) -> Mesh:
    """Split the last axis whose devices can share the heads of keys of a step: tp=4 -> tp_0=2,tp_1=2.

    Devices that share a head have as many queries each. The mesh is returned as it is if no axis
    has more devices than there are heads of keys, or if they divide.
    """
    if step.moves_anywhere:  # arrays of JAX cannot be shared so
        return mesh
    for op in step.ops:
        heads = grouped_heads(op)
        if heads is None or heads.keys == step.batch:
            continue
        n_keys = step.lengths[heads.keys]
        n_queries = step.lengths[heads.queries]
        for axis in reversed(mesh.axes):
            n_sharing, remainder = divmod(mesh.size(axis), n_keys)
            if n_keys > 1 and n_sharing > 1 and remainder == n_queries % n_sharing == 0:
                return split_by(mesh, ((axis, (n_keys, n_sharing)),))
    return mesh


def dims_of_key_heads(step: TrainingStep) -> frozenset[ArrayDim]:
    """List the dims of arrays that become heads of keys and values, up to their parameters.

    Of `k_proj.weight -> k_proj -> attention` these are dim 0 of the weight, and dim 2 of `k_proj`.
    """
    found: set[ArrayDim] = set()
    for op in reversed(step.ops):  # users before makers
        heads = grouped_heads(op)
        if heads is not None:
            placed = heads.key_placements
            found.update((op.operands[i], _array_dim(op.arrays[i], dim)) for i, dim in placed)
        result = len(op.operands)
        for rule in op.axis_rules:
            if rule[result] < 0:
                continue
            if (op.name, _array_dim(op.arrays[result], rule[result])) in found:
                for i, name in enumerate(op.operands):
                    if rule[i] >= 0 and i not in op.length_operands:
                        found.add((name, _array_dim(op.arrays[i], rule[i])))
    return frozenset(found)


def with_rules_of_queries(step: TrainingStep, mesh: Mesh) -> TrainingStep:
    """Add rules that shard queries of one head of keys, where an operation has none for lengths it reads.

    `y.view(*x.shape[:2], -1)` of `b s (g r) d` reads the lengths of b and s. An axis may shard r
    there, inside g, as it may shard g.

    step: before operations are fused. Returned as it is if no axis of the mesh needs the rules.
    """
    if mesh_with_shared_heads(step, mesh) == mesh:
        return step
    heads_of: dict[str, GroupedHeads] = {}  # of arrays that have the result's heads
    ops: list[Op] = []
    for op in step.ops:
        heads = grouped_heads(op)
        for name in op.operands:
            heads = heads if heads is not None else heads_of.get(name)
        if heads is not None and {heads.keys, heads.queries} <= set(op.dims[-1]):
            heads_of[op.name] = heads
            if op.rules is not None and heads.queries not in op.whole:
                inner_rules = [_of_queries(op, rule, heads) for rule in op.rules]
                added = tuple(rule for rule in inner_rules if rule is not None)
                op = replace(op, rules=(*op.rules, *added))
        ops.append(op)
    return replace(step, ops=ops)


def _of_queries(op: Op, rule: AxisRule, heads: GroupedHeads) -> AxisRule | None:
    """Turn a rule that shards heads of keys in all arrays into that for their queries, which follow."""
    inner_rule: list[int] = []
    for i, (dims, placement) in enumerate(zip(op.dims, rule, strict=True)):
        if placement >= 0 and i not in op.length_operands:
            if dims[placement : placement + 2] != (heads.keys, heads.queries):
                return None
            placement += 1
        inner_rule.append(placement)
    return tuple(inner_rule)


def _array_dim(array: Layout, single_dim: int) -> int:
    """Return the number of the array's dim that has a single dim: 3, r of `b s (g r d)` -> 2."""
    ends = accumulate(len(names_of_dim(dim)) for dim in array.dims)
    return next(number for number, end in enumerate(ends) if single_dim < end)
