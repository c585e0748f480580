"""A mesh some of whose axes are divided into parts: the same devices, in the same order, under finer names.

Decides how parts are named and what a layout becomes on them. Which axes are worth dividing is the
business of `aligned`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from xshard.errors import MeshError
from xshard.layout import divided
from xshard.mesh import Mesh
from xshard.sharding import Sharding

Split = tuple[tuple[str, tuple[int, ...]], ...]  # an axis -> the sizes of its parts, the slowest first


@dataclass(frozen=True, init=False)
class FineMesh(Mesh):
    """`whole` with some axes divided: `x` of 4 into `x_0` and `x_1` of 2, the slowest first.

    Raises MeshError for an axis that `whole` has not, or parts that do not make it up.

    >>> from xshard import Layout
    >>> fine = FineMesh(Mesh(x=4, y=2), (("x", (2, 2)),))
    >>> fine.axes, fine.origin("x_1"), fine.coords(5)
    (('x_0', 'x_1', 'y'), 'x', (1, 0, 1))
    >>> str(fine.divided(Sharding(Layout.parse("n/x/y"), Mesh(x=4, y=2), (8,))).layout)
    'n/(x_0,x_1)/y'
    """

    whole: Mesh
    split: Split

    def __init__(self, whole: Mesh, split: Split) -> None:
        for axis, sizes in split:
            if len(sizes) < 2 or math.prod(sizes) != whole.size(axis):
                raise MeshError(
                    f"axis {axis!r} of size {whole.size(axis)} does not consist of parts {sizes}",
                    hint="two parts or more, whose sizes multiply to that of the axis",
                )
        sizes_of = dict(split)
        super().__init__(
            {
                name: size
                for axis, names in _names(whole, split).items()
                for name, size in zip(names, sizes_of.get(axis, (whole.size(axis),)), strict=True)
            }
        )
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "split", split)

    @cached_property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Every axis of `whole` with its parts, the slowest first; itself where it is not divided."""
        return _names(self.whole, self.split)

    def origin(self, axis: str) -> str:
        return self._origins[axis]

    @cached_property
    def _origins(self) -> dict[str, str]:
        return {name: axis for axis, names in self.parts.items() for name in names}

    def divided(self, sharding: Sharding) -> Sharding:
        """A sharding on `whole` -> the same sharding here."""
        return Sharding(divided(sharding.layout, self.parts), self, sharding.shape)


def undivided(mesh: Mesh, axes: Sequence[str]) -> tuple[Mesh, tuple[str, ...]]:
    """Axes and their mesh: on the whole mesh where all parts of each stand in order, else as given.

    >>> fine = FineMesh(Mesh(x=4, y=2), (("x", (2, 2)),))
    >>> [undivided(fine, axes)[1] for axes in (("y", "x_0", "x_1"), ("x_1", "y"))]
    [('y', 'x'), ('x_1', 'y')]
    """
    if not isinstance(mesh, FineMesh):
        return mesh, tuple(axes)
    whole = tuple(dict.fromkeys(map(mesh.origin, axes)))
    complete = tuple(part for axis in whole for part in mesh.parts[axis]) == tuple(axes)
    return (mesh.whole, whole) if complete else (mesh, tuple(axes))


def _names(whole: Mesh, split: Split) -> dict[str, tuple[str, ...]]:
    taken = set(whole.axes)
    found: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in whole.axes}
    for axis, sizes in split:
        names = [f"{axis}_{i}" for i in range(len(sizes))]
        while taken & set(names):  # beside an axis of that name
            names = [f"{name}_" for name in names]
        taken |= set(names)
        found[axis] = tuple(names)
    return found
