"""Layouts over the sub-axes that a search may have, as rules say them: over the axes of the user's mesh.

Only an axis along which devices share heads of keys is split (`mesh_with_shared_heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import SPREAD, Dim, Shard
from xshard.step.record.arrays import with_unit


def in_whole_axes(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Replace sub-axes by the axis that is split, which spreads what the outer one alone shards.

    With tp=4 split into tp_0=2 and tp_1=2, `o/tp_0/tp_1 i` of 128 rows is `o/tp i`, and
    `o/tp_0 i | copy(tp_1)` is `(o 64)/spread(tp) i | copy(tp)`.
    """
    if not isinstance(mesh, SubAxisMesh):
        return layout
    dims = [
        _in_whole_axes(dim, length, mesh) for dim, length in zip(layout.dims, shape, strict=True)
    ]
    tags = [(tag, tuple(dict.fromkeys(map(mesh.origin, axes)))) for tag, axes in layout.tags]
    return Layout(tuple(dims), tuple(tags))


def _in_whole_axes(dim: Dim, length: int, mesh: SubAxisMesh) -> Dim:
    ((axis, _),) = mesh.split
    sub_axes = mesh.sub_axes[axis]
    shards = dict.fromkeys(Shard((mesh.origin(sub_axis),)) for sub_axis in dim.axes)
    if len({*sub_axes} & {*dim.axes}) != 1:
        return replace(dim, shards=tuple(shards))
    spread = [replace(shard, order=SPREAD) if shard.axes == (axis,) else shard for shard in shards]
    return with_unit(replace(dim, shards=tuple(spread)), length // mesh.size(*dim.axes))


def in_sub_axes(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Do the reverse of `in_whole_axes`; a layout that it does not write keeps the whole axis."""
    if not isinstance(mesh, SubAxisMesh):
        return layout
    ((axis, _),) = mesh.split
    outer, inner = mesh.sub_axes[axis]
    dims: list[Dim] = []
    tagged = (outer, inner)  # the sub-axes that may have a tag
    for dim, length in zip(layout.dims, shape, strict=True):
        shards: list[Shard] = []
        for shard in dim.shards:
            if shard == Shard((axis,)):
                shards += [Shard((outer,)), Shard((inner,))]
            elif shard == Shard((axis,), SPREAD):
                shards.append(Shard((outer,)))
            else:
                shards.append(shard)
        finer = replace(dim, shards=tuple(shards))
        if dim.spread_axes == (axis,):
            plain = Dim(dim.parts[0] if dim.parts else dim.name, finer.shards)
            if _in_whole_axes(plain, length, mesh) == dim:
                finer = plain
                tagged = (inner,)
        dims.append(finer)
    tags: list[tuple[str, tuple[str, ...]]] = []
    for tag, axes in layout.tags:
        for tagged_axis in axes:
            tags.append((tag, tagged if tagged_axis == axis else (tagged_axis,)))
    return Layout(tuple(dims), tuple(tags))
