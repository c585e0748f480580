"""A mesh with some axes split into sub-axes, and the coarsest mesh that refines two others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xshard.errors import MeshError
from xshard.layout.mesh import Axes, Mesh, Sizes

# Axes with the sizes of their sub-axes, the slowest first.
Split = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, init=False, repr=False)
class SubAxisMesh(Mesh):
    """A mesh with some axes split into sub-axes, the slowest first: `x=4` into `x_0=2,x_1=2`.

    Device numbers are those of the mesh that is split.

    Attributes:
        base: The mesh that is split.
        split: Its axes that are split, with the sizes of their sub-axes.

    Raises:
        MeshError: The sizes of sub-axes do not multiply to the size of their axis.

    Examples:
        >>> SubAxisMesh(Mesh(x=4, y=2), (("x", (2, 2)),)).axes
        ('x_0', 'x_1', 'y')
    """

    base: Mesh
    split: Split

    def __init__(self, base: Mesh, split: Split) -> None:
        for axis, sizes in split:
            if len(sizes) < 2 or math.prod(sizes) != base.size(axis):
                reason = f"axis {axis!r} of size {base.size(axis)} does not split into {sizes}"
                hint = "two sub-axes or more, whose sizes multiply to the size of the axis"
                raise MeshError(reason, hint=hint)
        split_sizes = dict(split)
        size_of: dict[str, int] = {}
        for axis, names in _sub_axis_names(base, split).items():
            sizes = split_sizes.get(axis, (base.size(axis),))
            size_of.update(zip(names, sizes, strict=True))
        super().__init__(size_of)
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "split", split)

    @cached_property
    def sub_axes(self) -> Mapping[str, Axes]:
        """Every axis of `base` -> its sub-axes, the slowest first; an axis that is not split -> itself."""
        return _sub_axis_names(self.base, self.split)

    def origin(self, axis: str) -> str:
        """Return the axis of `base` that contains a sub-axis."""
        for whole_axis, names in self.sub_axes.items():
            if axis in names:
                return whole_axis
        raise MeshError(f"no sub-axis {axis!r}", hint=f"the mesh has: {self.describe()}")


def root_of(mesh: Mesh) -> Mesh:
    """Return the mesh of which another has sub-axes; any other mesh is its own."""
    return root_of(mesh.base) if isinstance(mesh, SubAxisMesh) else mesh


def split_of(mesh: Mesh) -> Split:
    """Return the axes that a mesh splits, as `SubAxisMesh` takes them; () for any other mesh."""
    return mesh.split if isinstance(mesh, SubAxisMesh) else ()


def split_by(mesh: Mesh, split: Split) -> Mesh:
    """Split the axes of the mesh without sub-axes: x=8 by (("x", (2, 4)),) -> x_0=2,x_1=4.

    An empty split returns `mesh` as it is.
    """
    return SubAxisMesh(root_of(mesh), split) if split else mesh


def split_as(base: Mesh, sizes: Sequence[int]) -> Mesh:
    """Split axes into sub-axes of these sizes, in order: x=8,y=2 and 2, 4, 2 -> x_0=2,x_1=4,y=2."""
    remaining_sizes = [size for size in sizes if size > 1]
    split = []
    for axis in base.axes:
        sub_sizes: Sizes = ()
        while math.prod(sub_sizes) < base.size(axis):
            sub_sizes += (remaining_sizes.pop(0),)
        if len(sub_sizes) > 1:
            split.append((axis, sub_sizes))
    return split_by(base, tuple(split))


def with_cut(mesh: Mesh, axes: Sequence[str], n_devices: int) -> Mesh | None:
    """Split at most one of `axes`, so that the first of them have `n_devices` devices together.

    x=8 and 2 devices -> x_0=2,x_1=4. A mesh whose axes need no split is returned as it is; None if no
    split gives that number.
    """
    n_remaining = n_devices
    for axis in axes:
        if n_remaining == 1:
            break
        size = mesh.size(axis)
        if n_remaining % size == 0:
            n_remaining //= size
            continue
        if size % n_remaining:
            return None
        axis_index = mesh.position(axis)
        sizes = (
            *mesh.sizes[:axis_index],
            n_remaining,
            size // n_remaining,
            *mesh.sizes[axis_index + 1 :],
        )
        return split_as(root_of(mesh), sizes)
    return mesh


def axis_factors(mesh: Mesh, fine_mesh: Mesh) -> dict[str, Axes]:
    """Find which axes of a finer mesh each axis is split into: x -> x_0, x_1.

    Both split the axes of one mesh; `fine_mesh` splits them as far as `mesh`, or further.

    Raises:
        MeshError: `fine_mesh` does not split them as far.
    """
    if mesh == fine_mesh:
        return {axis: (axis,) for axis in mesh.axes}
    if isinstance(fine_mesh, SubAxisMesh) and fine_mesh.base == mesh:
        return dict(fine_mesh.sub_axes)
    factors: dict[str, Axes] = {}
    remaining_axes = list(fine_mesh.long_axes)  # both meshes have the axes of one in its order
    for axis in mesh.axes:
        sub_axes: Axes = ()
        while remaining_axes and fine_mesh.size(*sub_axes) < mesh.size(axis):
            sub_axes += (remaining_axes.pop(0),)
        if fine_mesh.size(*sub_axes) != mesh.size(axis):
            raise MeshError(f"{fine_mesh!r} does not split the axes of {mesh!r}")
        factors[axis] = sub_axes
    return factors


def common_mesh(first: Mesh, second: Mesh) -> Mesh | None:
    """Return the mesh with the fewest sub-axes that splits the axes of two splits of one mesh.

    x_0=2,x_1=4 and x_0=4,x_1=2 -> x_0=2,x_1=2,x_2=2. None for x_0=2,x_1=3 and x_0=3,x_1=2.
    """
    refinement = refine(first, second)
    return None if refinement is None else split_as(root_of(first), refinement.mesh.sizes)


def unfactored(mesh: Mesh, axes: Sequence[str]) -> tuple[Mesh, Axes]:
    """Replace sub-axes by the axes that they make up, on the base mesh: x_0, x_1 -> x.

    Unless the sub-axes of each axis are complete and in order, `mesh` and `axes` come back as they are.
    """
    if not isinstance(mesh, SubAxisMesh):
        return mesh, tuple(axes)
    whole_axes = tuple(dict.fromkeys(map(mesh.origin, axes)))
    complete = itertools.chain.from_iterable(mesh.sub_axes[axis] for axis in whole_axes)
    if tuple(complete) != tuple(axes):
        return mesh, tuple(axes)
    return mesh.base, whole_axes


def _sub_axis_names(base: Mesh, split: Split) -> dict[str, Axes]:
    """Name the sub-axes of each axis: x -> x_0, x_1; an axis that is not split keeps its name."""
    used_names = set(base.axes)
    sub_axes: dict[str, Axes] = {axis: (axis,) for axis in base.axes}
    for axis, sizes in split:
        names = [f"{axis}_{i}" for i in range(len(sizes))]
        while used_names & set(names):  # the mesh has an axis of that name
            names = [f"{name}_" for name in names]
        used_names |= set(names)
        sub_axes[axis] = tuple(names)
    return sub_axes


# ---- the coarsest mesh that refines two others

# Axes with their factor axes, the slowest first; none for an axis of size 1.
Factors = tuple[tuple[str, Axes], ...]


class Refinement(NamedTuple):
    """A mesh that splits the axes of two others; device numbers are the same on all three.

    Attributes:
        mesh: The mesh that splits the axes of both.
        src: The axes of the first mesh, with their factors in `mesh`.
        dst: The axes of the second mesh, with their factors in `mesh`.
    """

    mesh: Mesh
    src: Factors
    dst: Factors


class _AxisRange(NamedTuple):
    """Where an axis lies in the row-major numbers of devices: [start, stop), both products of sizes."""

    axis: str
    start: int
    stop: int


def refine(src_mesh: Mesh, dst_mesh: Mesh) -> Refinement | None:
    """Find one mesh that splits the axes of two meshes over the same devices, so that it fits both.

    `dp=8` and `dp=2,tp=4` -> `dp=2,dp_tp=4`: dp of the first mesh is the pair (dp, dp_tp), dp of
    the second is dp, and tp is dp_tp. An axis that is a part of two axes with different names is
    named after both. It is the mesh with the fewest such axes.

    Returns:
        The mesh, and which of its axes each axis of the two meshes is. None if there is no such
        mesh, as for 2 x 3 and 3 x 2 devices.
    """
    if src_mesh == dst_mesh:
        identity = tuple((axis, (axis,)) for axis in src_mesh.axes)
        return Refinement(src_mesh, identity, identity)
    if src_mesh.n_devices != dst_mesh.n_devices:
        return None
    src_ranges = _axis_ranges(src_mesh)
    dst_ranges = _axis_ranges(dst_mesh)
    # Describe an axis by the product of the sizes up to it, without and with its own: in `dp=2,tp=4`
    # dp is [1, 2) and tp is [2, 8); in `dp=8` dp is [1, 8). The common mesh has an axis between each
    # two neighbouring bounds of either mesh: 1, 2, 8 -> axes of sizes 2 and 4.
    bounds = sorted({axis_range.stop for axis_range in src_ranges + dst_ranges} | {1})
    sizes: dict[str, int] = {}
    src_factors: dict[str, Axes] = dict.fromkeys(src_mesh.axes, ())
    dst_factors: dict[str, Axes] = dict.fromkeys(dst_mesh.axes, ())
    for start, stop in itertools.pairwise(bounds):
        if stop % start:
            return None  # bounds 1, 2, 3, 6 of 2 x 3 and 3 x 2: no axis leads from 2 to 3
        src_axis = _axis_at(src_ranges, start, stop)
        dst_axis = _axis_at(dst_ranges, start, stop)
        name = src_axis if src_axis == dst_axis else f"{src_axis}_{dst_axis}"
        while name in sizes:  # (`a_b`, `c`) and (`a`, `b_c`) both give a_b_c
            name += "_"
        sizes[name] = stop // start
        src_factors[src_axis] += (name,)
        dst_factors[dst_axis] += (name,)
    return Refinement(Mesh(sizes), tuple(src_factors.items()), tuple(dst_factors.items()))


def _axis_ranges(mesh: Mesh) -> list[_AxisRange]:
    """List the ranges of all axes longer than 1: dp=2,tp=4 -> dp [1, 2), tp [2, 8)."""
    ranges = []
    start = 1
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size > 1:
            ranges.append(_AxisRange(axis, start, start * size))
        start *= size
    return ranges


def _axis_at(ranges: list[_AxisRange], start: int, stop: int) -> str:
    """Return the axis whose range contains [start, stop); the ranges leave no gap."""
    for axis_range in ranges:
        if axis_range.start <= start and stop <= axis_range.stop:
            return axis_range.axis
    raise AssertionError(f"no axis covers [{start}, {stop})")
