"""A mesh with some axes split into sub-axes, and the coarsest mesh that refines two others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xshard.errors import MeshError
from xshard.layout.layout import factored
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding

Split = tuple[
    tuple[str, tuple[int, ...]], ...
]  # an axis -> the sizes of its sub-axes, the slowest first


@dataclass(frozen=True, init=False)
class SubAxisMesh(Mesh):
    """`base` with some axes split into sub-axes, the slowest first: `x=4` into `x_0=2,x_1=2`."""

    base: Mesh
    split: Split

    def __init__(self, base: Mesh, split: Split) -> None:
        for axis, sizes in split:
            if len(sizes) < 2 or math.prod(sizes) != base.size(axis):
                reason = f"axis {axis!r} of size {base.size(axis)} does not split into {sizes}"
                hint = "two sub-axes or more, whose sizes multiply to the size of the axis"
                raise MeshError(reason, hint=hint)
        sizes_of = dict(split)
        parts = dict[str, int]()
        for axis, names in _sub_axis_names(base, split).items():
            parts.update(zip(names, sizes_of.get(axis, (base.size(axis),)), strict=True))
        super().__init__(parts)
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "split", split)

    @cached_property
    def sub_axes(self) -> Mapping[str, tuple[str, ...]]:
        """Every axis of `base` -> its sub-axes, the slowest first; an axis that is not split -> itself."""
        return _sub_axis_names(self.base, self.split)

    def origin(self, axis: str) -> str:
        return next(whole for whole, parts in self.sub_axes.items() if axis in parts)

    def factored(self, sharding: Sharding) -> Sharding:
        """A sharding on `base` -> the same sharding on this mesh."""
        return Sharding(factored(sharding.layout, self.sub_axes), self, sharding.shape)


def unfactored(mesh: Mesh, axes: Sequence[str]) -> tuple[Mesh, tuple[str, ...]]:
    """The base mesh and its axes if the sub-axes of each are complete and in order, else both as given."""
    if not isinstance(mesh, SubAxisMesh):
        return mesh, tuple(axes)
    whole = tuple(dict.fromkeys(map(mesh.origin, axes)))
    complete = tuple(part for axis in whole for part in mesh.sub_axes[axis]) == tuple(axes)
    return (mesh.base, whole) if complete else (mesh, tuple(axes))


def _sub_axis_names(base: Mesh, split: Split) -> dict[str, tuple[str, ...]]:
    taken = set(base.axes)
    sub_axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in base.axes}
    for axis, sizes in split:
        names = [f"{axis}_{i}" for i in range(len(sizes))]
        while taken & set(names):  # the mesh has an axis of that name
            names = [f"{name}_" for name in names]
        taken |= set(names)
        sub_axes[axis] = tuple(names)
    return sub_axes


# Axis -> its factor axes, the slowest first; none for an axis of size 1.
Factors = tuple[tuple[str, tuple[str, ...]], ...]


class Refinement(NamedTuple):
    """A mesh that splits the axes of two others; device numbers are the same on all three."""

    mesh: Mesh
    src: Factors
    dst: Factors


def refine(src_mesh: Mesh, dst_mesh: Mesh) -> Refinement | None:
    """The coarsest mesh that splits the axes of both (`dp=8`, `dp=2,tp=4` -> `dp=2,dp_tp=4`), or None."""
    if src_mesh == dst_mesh:
        same = tuple((axis, (axis,)) for axis in src_mesh.axes)
        return Refinement(src_mesh, same, same)
    if src_mesh.n_devices != dst_mesh.n_devices:
        return None
    sides = _axis_ranges(src_mesh), _axis_ranges(dst_mesh)
    bounds = sorted({end for spans in sides for _, _, end in spans} | {1})
    if any(later % earlier for earlier, later in itertools.pairwise(bounds)):
        return None
    sizes: dict[str, int] = {}
    factors: tuple[dict[str, tuple[str, ...]], ...] = ({}, {})
    for start, end in itertools.pairwise(bounds):
        owners = [
            next(a for a, first, last in spans if first <= start and end <= last) for spans in sides
        ]
        name = "_".join(dict.fromkeys(owners))
        while name in sizes:  # `a_b` and `c` meet `a` and `b_c`
            name += "_"
        sizes[name] = end // start
        for axis, factor_names in zip(owners, factors, strict=True):
            factor_names[axis] = (*factor_names.get(axis, ()), name)
    meshes = zip((src_mesh, dst_mesh), factors, strict=True)
    return Refinement(
        Mesh(sizes), *(tuple((a, of.get(a, ())) for a in mesh.axes) for mesh, of in meshes)
    )


def _axis_ranges(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Every axis longer than 1, with the product of the sizes before it, and of those up to it."""
    parts = 1
    ranges = []
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size > 1:
            ranges.append((axis, parts, parts * size))
        parts *= size
    return ranges
