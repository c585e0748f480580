"""Heads of keys that are fewer than the devices of an axis: devices with other queries share one.

2 heads of keys and 8 of queries over tp=4: the first two devices have the first head of keys, and 2
of its 4 queries each. So tp is two axes for a search: along tp_0 heads of keys are sharded, along
tp_1 they are copies, and queries are sharded along both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from xshard.layout import Mesh
from xshard.layout.sub_axes import split_by
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep


def mesh_with_shared_heads(step: TrainingStep, mesh: Mesh) -> Mesh:
    """Split the last axis of a mesh if its devices can share heads: tp=4 of 2 heads -> tp_0=2,tp_1=2.

    Devices that share a head of keys have as many of its queries each. The mesh is returned as it
    is where heads are as many as devices, or more, and where groups would not be equal. Arrays of
    JAX cannot be shared so.
    """
    axis = mesh.axes[-1]  # others are for the batch, as in plans by hand
    for op in step.ops:
        if op.kind != "attention" or step.moves_anywhere:
            continue
        for keys, queries in _grouped_heads(op):
            n_keys = step.lengths[keys]
            n_sharing, n_left = divmod(mesh.size(axis), n_keys)
            is_shared = n_keys > 1 and n_sharing > 1 and keys != step.batch
            if is_shared and n_left == step.lengths[queries] % n_sharing == 0:
                return split_by(mesh, ((axis, (n_keys, n_sharing)),))
    return mesh


def _grouped_heads(op: Op) -> Iterator[tuple[str, str]]:
    """Find heads `(g r)` in the result of an attention: g of keys, and r of queries for each of them.

    One axis may shard g in keys, too. Another one may shard r, with copies of the keys.
    """
    result = len(op.operands)
    first = 0  # the number of a dim's first part
    for dim in op.arrays[result].dims:
        parts = names_of_dim(dim)
        for outer, inner in product(op.axis_rules, repeat=2):
            number = outer[result] - first
            if not 0 <= number < len(parts) - 1 or inner[result] != outer[result] + 1:
                continue
            in_operands = zip(outer[:result], inner[:result], strict=True)
            if any(shard >= 0 and tag == COPY for shard, tag in in_operands):
                yield parts[number], parts[number + 1]
        first += len(parts)
