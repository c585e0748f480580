"""A mesh of devices: ordered named axes with sizes; device numbers run row-major over them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from xshard.arguments import parse_number
from xshard.errors import MeshError, Span, api_boundary
from xshard.formatting import Pictured
from xshard.notation.row_arrays import Numbers
from xshard.signatures import as_whole_number, short_repr

Axes = tuple[str, ...]
Sizes = tuple[int, ...]  # of axes
Coords = tuple[int, ...]  # of a device, one for each axis
Devices = tuple[int, ...]

MAX_AXES = 64  # numpy has no more dims
MAX_DEVICES = 2**18  # there are no larger machines
AXIS_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@api_boundary
@dataclass(frozen=True, init=False)
class Mesh(Pictured):
    """Devices in a grid of named axes; device numbers run row-major over them.

    `Mesh(dp=2, tp=4)`: devices 0-3 have dp=0, devices 4-7 have dp=1; `tp` runs fastest.

    Args:
        axes: The size of each axis by name, where names are data: `Mesh({"dp": 2, "tp": 4})`.
        **named: The size of each axis, as in `Mesh(dp=2, tp=4)`; these follow the axes of `axes`.

    Attributes:
        axes: The names of the axes, the slowest first.
        sizes: The number of devices along each axis.

    Raises:
        MeshError: A name of an axis is malformed, or a size is no whole number >= 1.

    Examples:
        >>> mesh = Mesh(dp=2, cp=4)
        >>> mesh.n_devices, mesh.coords(5), mesh.groups(("dp",))[1]
        (8, (1, 1), (1, 5))
        >>> Mesh.parse("dp=2,cp=4") == mesh
        True
    """

    axes: Axes
    sizes: Sizes

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        if axes is None:
            axes = {}
        if not isinstance(axes, Mapping):
            raise _no_mesh(axes)
        size_of = {}
        for name, value in {**axes, **named}.items():
            if not isinstance(name, str) or not AXIS_NAME.fullmatch(name):
                hint = "letters, digits and '_', without a digit first"
                raise MeshError(f"axis name {name!r}", hint=hint)
            size = as_whole_number(value)
            if size is None or size < 1:
                hint = "a size is a whole number >= 1"
                raise MeshError(f"axis {name!r} has size {value!r}", hint=hint)
            size_of[name] = size
        sizes = tuple(size_of.values())
        if len(sizes) > MAX_AXES or math.prod(sizes) > MAX_DEVICES:
            reason = f"a mesh of {len(sizes)} axes and {short_repr(math.prod(sizes))} devices"
            raise MeshError(reason, hint=f"at most {MAX_AXES} axes and {MAX_DEVICES} devices")
        # The class is frozen for users; this is how a frozen dataclass sets its own fields.
        object.__setattr__(self, "axes", tuple(size_of))
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    @api_boundary
    def parse(cls, text: str) -> Mesh:
        """Parse the text of a mesh: `"dp=2,cp=4"` -> `Mesh(dp=2, cp=4)`.

        Args:
            text: Axes as NAME=SIZE, the slowest first.

        Returns:
            The mesh.

        Raises:
            MeshError: The text is malformed, marked with a caret.
        """
        stripped_parts = [axis_text.strip() for axis_text in text.split(",")]
        axis_texts = [axis_text for axis_text in stripped_parts if axis_text]
        if len(axis_texts) > MAX_AXES:
            raise MeshError(f"a mesh of {len(axis_texts)} axes", hint=f"at most {MAX_AXES} axes")
        size_of = {}
        for axis_text in axis_texts:
            name, _, size_text = axis_text.partition("=")
            name = name.strip()
            size = parse_number(size_text.strip())  # None for anything but digits
            start = text.index(axis_text)
            span: Span = (start, start + len(axis_text))
            if size is None:
                reason = "an axis reads NAME=SIZE"
                raise MeshError(reason, text=text, span=span, hint="as in dp=2,cp=4")
            if name in size_of:
                raise MeshError(f"axis {name!r} is named twice", text=text, span=span)
            size_of[name] = size
        return cls(size_of)

    def __str__(self) -> str:
        return ",".join(self._items())

    def __repr__(self) -> str:
        return f"Mesh({', '.join(self._items())})"

    def describe(self) -> str:
        """Return the axes and sizes as an error shows them: `dp=2, cp=4`."""
        return ", ".join(self._items()) if self.axes else "no axes"

    def _items(self) -> list[str]:
        return [f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)]

    # ---- axes

    @property
    def n_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Return the number of devices along the axes together."""
        return math.prod(self.sizes_of(axes))

    def sizes_of(self, axes: Sequence[str]) -> Sizes:
        """Return the size of each of the axes."""
        return tuple(self.sizes[self.position(axis)] for axis in axes)

    def position(self, axis: str) -> int:
        """Return the index of an axis in the mesh's order.

        Raises:
            MeshError: The mesh has no such axis.
        """
        index = self._positions.get(axis)
        if index is None:
            raise MeshError(f"unknown mesh axis {axis!r}", hint=f"the mesh has: {self.describe()}")
        return index

    @cached_property
    def long_axes(self) -> Axes:
        """The axes of more than one device."""
        return tuple(axis for axis in self.axes if self.size(axis) > 1)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {axis: i for i, axis in enumerate(self.axes)}

    def origin(self, axis: str) -> str:
        """Return the axis that contains a sub-axis (`SubAxisMesh`); any other axis is its own."""
        return axis

    # ---- devices

    @api_boundary
    def coords(self, device: int) -> Coords:
        """Return the coordinate of a device along every axis.

        Raises:
            MeshError: The mesh has no such device.
        """
        return self._coords(device)

    def _coords(self, device: int) -> Coords:
        # Without the checks of a public call: a plan asks for every device.
        if not 0 <= device < self.n_devices:
            hint = f"devices are 0..{self.n_devices - 1}"
            raise MeshError(f"no device {device} in {self!r}", hint=hint)
        return all_coords(self.sizes)[device]

    def place(self, device: int) -> str:
        """Return the coordinates of a device as text: `dp=1,cp=0`."""
        axis_coords = zip(self.axes, self.coords(device), strict=True)
        return ",".join(f"{axis}={coord}" for axis, coord in axis_coords)

    def device(self, coords: Sequence[int]) -> int:
        """Return the number of the device at coordinates, one per axis."""
        return row_major(self.sizes, coords)

    def index(self, device: int, axes: Sequence[str]) -> int:
        """Return the position of a device within its group along `axes`, the first axis slowest."""
        coords = self._coords(device)
        group_index = 0  # as `row_major`, without lists: this is called for every device of a plan
        for axis in axes:
            position = self.position(axis)
            group_index = group_index * self.sizes[position] + coords[position]
        return group_index

    def group(self, device: int, axes: Sequence[str]) -> Devices:
        """Return the devices that differ from `device` along `axes` alone, in the order of `index`.

        The device itself is among them.
        """
        other_axes = [axis for axis in self.axes if axis not in axes]
        return self.groups(axes)[self.index(device, other_axes)]

    def groups(self, axes: Sequence[str]) -> tuple[Devices, ...]:
        """Return every group of devices along `axes`, ordered by its first device."""
        return _all_groups(self.sizes, tuple(map(self.position, axes)))

    def indices(self, axes: Sequence[str]) -> Numbers:
        """Return the `index` of every device, `[devices]`."""
        return _all_indices(self.sizes, tuple(map(self.position, axes)))


def row_major(sizes: Sequence[int], coords: Sequence[int]) -> int:
    """Return the number of a place in a grid, the first coordinate slowest: (1, 2) of 2x4 -> 6."""
    index = 0
    for size, coord in zip(sizes, coords, strict=True):
        index = index * size + coord
    return index


def check_mesh(mesh: object) -> None:
    """Raise MeshError unless it is a Mesh."""
    if not isinstance(mesh, Mesh):
        raise _no_mesh(mesh)


def _no_mesh(value: object) -> MeshError:
    """Return the error for a value in place of a mesh, with the mesh that may be meant."""
    example = "Mesh(dp=2, cp=4)"
    if isinstance(value, str) and "=" in value:
        example = f"Mesh.parse({value!r})"
    elif isinstance(value, Mapping):
        example = f"Mesh({value!r})"
    return MeshError(f"{short_repr(value)} is not a mesh", hint=f"write {example}")


# ---- all devices at once; cached, because every step of a plan asks


@lru_cache(maxsize=256)
def all_coords(sizes: Sizes) -> tuple[Coords, ...]:
    """List the coordinates of every device."""
    return tuple(itertools.product(*map(range, sizes)))


@lru_cache(maxsize=1024)
def _all_groups(sizes: Sizes, positions: tuple[int, ...]) -> tuple[Devices, ...]:
    """List the groups of devices along the axes at `positions`."""
    other_axes = tuple(i for i in range(len(sizes)) if i not in positions)
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(other_axes + positions)
    group_size = math.prod(sizes[i] for i in positions)
    return tuple(map(tuple, grid.reshape(-1, group_size).tolist()))


@lru_cache(maxsize=1024)
def _all_indices(sizes: Sizes, positions: tuple[int, ...]) -> Numbers:
    """Return the number of every device within its group along the axes at `positions`."""
    group_indices = np.zeros(math.prod(sizes), np.int64)
    for position in positions:
        group_indices = group_indices * sizes[position] + np.indices(sizes)[position].ravel()
    return group_indices
