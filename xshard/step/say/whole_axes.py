"""Layouts over the axes of the user's mesh, where a search may have split the last one.

Devices share heads of keys along it (`mesh_with_shared_heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xshard.layout import Layout, Mesh
from xshard.layout.layout import without_axes
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import SPREAD, Dim
from xshard.step.record.arrays import (
    COPY,
    REPLICAS,
    as_even_blocks,
    layout_of,
    placements_of,
    with_unit,
)


def whole_layout(
    placements: Sequence[int], names: Sequence[str], shape: Sequence[int], mesh: Mesh
) -> Layout:
    """Write placements as a layout, where an axis spreads what its outer sub-axis alone shards.

    With tp=4 split into two axes of 2 devices, (0, 0) of 128 rows is `o/tp i`, and (0, COPY) is
    `(o 64)/spread(tp) i | copy(tp)`.
    """
    if not isinstance(mesh, SubAxisMesh):
        return layout_of(placements, names, mesh.axes)
    *whole, inner = placements
    layout = layout_of(whole, names, mesh.base.axes)
    number = whole[-1]
    if inner == number:
        return layout
    dims = list(layout.dims)
    dims[number] = _spread(dims[number], shape[number], mesh)
    tags = [*layout.tags, ("copy", dims[number].axes)] if inner == COPY else layout.tags
    return Layout(tuple(dims), tuple(tags))


def _spread(dim: Dim, length: int, mesh: Mesh) -> Dim:
    """Let devices of the axis that is split share units: `o/tp` of 128 rows -> `(o 64)/spread(tp)`."""
    shards = tuple(replace(shard, order=SPREAD) for shard in dim.shards)
    return with_unit(replace(dim, shards=shards), length // mesh.sizes[-2])


def placements_on(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> list[int]:
    """Convert a layout over the axes of the user's mesh into placements on the mesh that is searched.

    Raises NotationError for what is not searched.
    """
    if not isinstance(mesh, SubAxisMesh):
        return placements_of(layout, mesh.axes)
    split_axis = mesh.base.axes[-1:]
    inner: int | None = None  # what the inner sub-axis does, if not the same as the outer one
    for number, dim in enumerate(layout.dims):
        plain = as_even_blocks(dim)
        if dim.spread_axes == split_axis and _spread(plain, shape[number], mesh) == dim:
            inner = COPY if split_axis[0] in layout.tagged("copy") else REPLICAS
            dims = (*layout.dims[:number], plain, *layout.dims[number + 1 :])
            layout = Layout(dims, without_axes(layout.tags, split_axis))
    placements = placements_of(layout, mesh.base.axes)
    return [*placements, placements[-1] if inner is None else inner]
