"""A mesh of devices: ordered named axes with sizes; device numbers run row-major over them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import parse_number, shown, whole_number
from xshard.errors import MeshError
from xshard.formatting import Pictured

MOST_AXES = 64
MOST_DEVICES = 2**18  # numpy has no more dims; there are no larger machines
AXIS_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, init=False)
class Mesh(Pictured):
    """Ordered named axes with sizes; device numbers run row-major over them.

    Raises MeshError for malformed axis names and for sizes other than whole numbers >= 1.

    >>> mesh = Mesh(dp=2, cp=4)
    >>> mesh.n_devices, mesh.coords(5), mesh.groups(("dp",))[1]
    (8, (1, 1), (1, 5))
    >>> Mesh.parse("dp=2,cp=4") == mesh
    True
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        if axes is not None and not isinstance(axes, Mapping):
            raise _no_mesh(axes)
        pairs = {**(axes or {}), **named}
        for name, value in pairs.items():
            if not isinstance(name, str) or not AXIS_NAME.fullmatch(name):
                raise MeshError(
                    f"axis name {name!r}", hint="letters, digits and '_', without a digit first"
                )
            size = whole_number(value)
            if size is None or size < 1:
                raise MeshError(
                    f"axis {name!r} has size {value!r}", hint="a size is a whole number >= 1"
                )
            pairs[name] = size
        if len(pairs) > MOST_AXES or math.prod(tuple(pairs.values())) > MOST_DEVICES:
            why = f"a mesh of {len(pairs)} axes and {shown(math.prod(pairs.values()))} devices"
            raise MeshError(why, hint=f"at most {MOST_AXES} axes and {MOST_DEVICES} devices")
        object.__setattr__(self, "axes", tuple(pairs))
        object.__setattr__(self, "sizes", tuple(pairs.values()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """`"dp=2,cp=4"` -> `Mesh(dp=2, cp=4)`."""
        if not isinstance(text, str):
            raise _no_mesh(text)
        pairs: dict[str, int] = {}
        parts = [part for p in text.split(",") if (part := p.strip())]
        if len(parts) > MOST_AXES:
            raise MeshError(f"a mesh of {len(parts)} axes", hint=f"at most {MOST_AXES} axes")
        for part in parts:
            name, _, number = (p.strip() for p in part.partition("="))
            start = text.index(part)
            size = parse_number(number)
            span = start, start + len(part)
            if size is None:
                raise MeshError(
                    "an axis reads NAME=SIZE", text=text, span=span, hint="as in dp=2,cp=4"
                )
            if name in pairs:
                raise MeshError(f"axis {name!r} is named twice", text=text, span=span)
            pairs[name] = size
        return cls(pairs)

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.sizes, strict=True))})"

    @property
    def n_devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of devices along the axes together."""
        return math.prod(self.sizes[self.position(a)] for a in axes)

    def sizes_of(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The size of each of the axes."""
        return tuple(self.sizes[self.position(a)] for a in axes)

    def position(self, axis: str) -> int:
        """Index of an axis in the mesh's order."""
        if (index := self._positions.get(axis)) is None:
            raise MeshError(f"unknown mesh axis {axis!r}", hint=f"the mesh has: {self.describe()}")
        return index

    @cached_property
    def long_axes(self) -> tuple[str, ...]:
        """The axes of more than one device."""
        return tuple(axis for axis, n in zip(self.axes, self.sizes, strict=True) if n > 1)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {axis: i for i, axis in enumerate(self.axes)}

    def origin(self, axis: str) -> str:
        """The axis that contains a sub-axis (`SubAxisMesh`); any other axis is its own origin."""
        return axis

    def describe(self) -> str:
        return (
            ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True)) or "no axes"
        )

    def coords(self, device: int) -> tuple[int, ...]:
        """Device number -> its coordinate along every axis."""
        if not 0 <= device < self.n_devices:
            raise MeshError(
                f"no device {device} in {self!r}", hint=f"devices are 0..{self.n_devices - 1}"
            )
        return _all_coords(self.sizes)[device]

    def place(self, device: int) -> str:
        """The coordinates of a device as text."""
        return ",".join(
            f"{axis}={i}" for axis, i in zip(self.axes, self.coords(device), strict=True)
        )

    def device(self, coords: Sequence[int]) -> int:
        """Coordinates, one per axis -> device number."""
        return row_major(self.sizes, coords)

    def index(self, device: int, axes: Sequence[str]) -> int:
        """Position of a device within its group along `axes`, the first axis slowest."""
        coords = self.coords(device)
        number = 0
        for axis in axes:
            position = self.position(axis)
            number = number * self.sizes[position] + coords[position]
        return number

    def group(self, device: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The devices that differ from `device` only along `axes`, itself included, ordered by `index`."""
        return self.groups(axes)[self.index(device, [a for a in self.axes if a not in axes])]

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Every group along `axes`, ordered by its first device."""
        return _all_groups(self.sizes, tuple(map(self.position, axes)))

    def indices(self, axes: Sequence[str]) -> NDArray[np.int64]:
        """`index` of every device, in order."""
        return _all_indices(self.sizes, tuple(map(self.position, axes)))


def row_major(sizes: Sequence[int], coords: Sequence[int]) -> int:
    """The number of the place at some coordinates, the first coordinate slowest."""
    number = 0
    for size, c in zip(sizes, coords, strict=True):
        number = number * size + c
    return number


def check_mesh(mesh: object) -> None:
    """Raise MeshError unless it is a Mesh."""
    if not isinstance(mesh, Mesh):
        raise _no_mesh(mesh)


def _no_mesh(value: object) -> MeshError:
    example = "Mesh(dp=2, cp=4)"
    if isinstance(value, str) and "=" in value:
        example = f"Mesh.parse({value!r})"
    elif isinstance(value, Mapping):
        example = f"Mesh({value!r})"
    return MeshError(f"{shown(value)} is not a mesh", hint=f"write {example}")


@lru_cache(maxsize=64)
def _all_coords(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.product(*(range(n) for n in sizes)))


@lru_cache(maxsize=1024)
def _all_groups(sizes: tuple[int, ...], positions: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    others = [i for i in range(len(sizes)) if i not in positions]
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(*others, *positions)
    return tuple(map(tuple, numbers.reshape(-1, math.prod(sizes[i] for i in positions)).tolist()))


@lru_cache(maxsize=1024)
def _all_indices(sizes: tuple[int, ...], positions: tuple[int, ...]) -> NDArray[np.int64]:
    numbers = np.zeros(math.prod(sizes), np.int64)
    for i in positions:
        numbers = numbers * sizes[i] + np.indices(sizes)[i].ravel()
    return numbers
