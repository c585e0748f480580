"""Two meshes over the same devices as one: their axes divided into the factors that they share.

Decides the factor axes, their names, and what layouts and links become on them. What is planned
on the refined mesh is the planner's business.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from xshard.cost import Link, Profile
from xshard.layout import Layout, divided
from xshard.mesh import Mesh

# Axis -> the factor axes it consists of, the slowest first; none for an axis of size 1.
Factors = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Refinement:
    """A mesh whose axes are factors of the axes of two others; device numbers are the same on all three."""

    mesh: Mesh
    src: Factors
    dst: Factors

    def source(self, layout: Layout) -> Layout:
        """A layout on the source's mesh -> the same layout on the refined one."""
        return divided(layout, dict(self.src))

    def target(self, layout: Layout) -> Layout:
        """A layout on the destination's mesh -> the same layout on the refined one."""
        return divided(layout, dict(self.dst))

    def profile(self, profile: Profile) -> Profile:
        """A profile with links named by the factors of the axes it names; of two, the slower counts."""
        links: dict[str, Link] = {}
        for axis, link in profile.axes:
            for factor in (*dict(self.src).get(axis, ()), *dict(self.dst).get(axis, ())):
                links[factor] = min(links.get(factor, link), link, key=lambda x: x.bytes_per_s)
        return replace(profile, axes=tuple(sorted(links.items())), inside=()) if links else profile


def refine(src_mesh: Mesh, dst_mesh: Mesh) -> Refinement | None:
    """The coarsest mesh whose axes make up both, if sizes allow: `dp=8` and `dp=2,tp=4` -> `dp=2,dp_tp=4`.

    A factor is named after the axes it is a part of, once where these have one name. None where
    the axes do not divide each other (3x2 and 2x3), or the meshes differ in size.

    >>> refine(Mesh(dp=4, tp=2), Mesh(dp=2, tp=4)).mesh
    Mesh(dp=2, dp_tp=2, tp=2)
    >>> refine(Mesh(x=3, y=2), Mesh(x=2, y=3)) is None
    True
    """
    if src_mesh == dst_mesh:
        same = tuple((axis, (axis,)) for axis in src_mesh.axes)
        return Refinement(src_mesh, same, same)
    if src_mesh.n_devices != dst_mesh.n_devices:
        return None
    sides = _spans(src_mesh), _spans(dst_mesh)
    ends = sorted({end for spans in sides for _, _, end in spans} | {1})
    if any(later % earlier for earlier, later in itertools.pairwise(ends)):
        return None
    sizes: dict[str, int] = {}
    factors: tuple[dict[str, tuple[str, ...]], ...] = ({}, {})
    for start, end in itertools.pairwise(ends):
        owners = [next(a for a, first, last in spans if first <= start and end <= last) for spans in sides]
        name = "_".join(dict.fromkeys(owners))
        while name in sizes:  # axes `a_b` and `c` beside `a` and `b_c`
            name += "_"
        sizes[name] = end // start
        for axis, found in zip(owners, factors, strict=True):
            found[axis] = (*found.get(axis, ()), name)
    return Refinement(
        Mesh(sizes),
        tuple((axis, factors[0].get(axis, ())) for axis in src_mesh.axes),
        tuple((axis, factors[1].get(axis, ())) for axis in dst_mesh.axes),
    )


def _spans(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Every axis longer than 1 with the number of parts before it and after it."""
    parts, found = 1, []
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size > 1:
            found.append((axis, parts, parts * size))
        parts *= size
    return found
