"""A request: the arguments of a plan as one value, by which plans are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from xshard.arguments import shown, whole_numbers
from xshard.cost.machine import located, refined
from xshard.cost.model import Profile
from xshard.errors import MeshError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored
from xshard.layout.sub_axes import refine
from xshard.notation.parser import Dim

Devices = tuple[int, ...] | range
FORWARD = "forward"
BOTH = "forward+backward"
OBJECTIVES = (FORWARD, BOTH)  # the passes that a plan is cheapest for


@dataclass(frozen=True)
class Request:
    """An array of `shape` under `src` on one mesh is to be under `dst` on another, or on the same."""

    src: Layout
    dst: Layout
    src_mesh: Mesh
    dst_mesh: Mesh
    src_devices: (
        Devices  # the number of every device, in the order of its mesh; a range for 0, 1, 2, ...
    )
    dst_devices: Devices
    shape: tuple[int, ...]
    dtype: str
    profile: Profile
    scale: Fraction | None = (
        None  # to multiply by; None: by the layouts, 1/n for a mean over n that ends
    )
    memory_limit: int | None = None  # bytes that no device may exceed
    relabel: bool = False  # devices may change places in `dst_mesh`

    def __post_init__(self) -> None:
        for end, name in (("src", "source"), ("dst", "destination")):
            mesh = getattr(self, f"{end}_mesh")
            devices = getattr(self, f"{end}_devices")
            object.__setattr__(self, f"{end}_devices", device_numbers(name, mesh, devices))

    @classmethod
    def on(
        cls, mesh: Mesh, src: Layout, dst: Layout, *array: Any, devices: Devices = ()
    ) -> Request:
        """On one mesh. array: its shape, dtype and profile, and more."""
        numbers = devices or range(mesh.n_devices)
        return cls(src, dst, mesh, mesh, numbers, numbers, *array)

    @cached_property
    def source(self) -> Sharding:
        """The sharding at the source."""
        return Sharding(self.src, self.src_mesh, self.shape)

    @cached_property
    def target(self) -> Sharding:
        """The sharding at the destination; its dims may be in another order."""
        return target_of(self.source, self.dst, self.dst_mesh)

    @property
    def factor(self) -> Fraction:
        """The constant to multiply by."""
        return self.source.scale / self.target.scale if self.scale is None else self.scale

    @property
    def machine(self) -> Profile:
        """The profile for the devices of the source's mesh."""
        return located(self.profile, self.src_mesh, self.src_devices)

    @property
    def adjoint(self) -> Request:
        """Between the dual layouts, from the destination back. Raises LinearityError for a max or min."""
        back = (
            self.dst.dual,
            self.src.dual,
            self.dst_mesh,
            self.src_mesh,
            self.dst_devices,
            self.src_devices,
        )
        left = self.dtype, self.profile, self.scale, self.memory_limit, self.relabel
        return Request(*back, self.target.shape, *left)

    @property
    def in_order(self) -> Request:
        """The same, with the dims of the destination in the order of the source."""
        return replace(self, dst=self.dst.in_order(self.src.names))

    @property
    def tangent(self) -> Request:
        """For tangents: where a boundary fills with a constant they have zeros."""
        return replace(self, src=self.src.tangent, dst=self.dst.tangent)

    def batched(self, n: int) -> Request:
        """For an array with one more dim, whole and leading, of length `n`; it has no memory limit."""
        dim = Dim(
            f"_batch{len(self.shape)}"
        )  # no two dims have this name: nested batches have more dims
        src, dst = (Layout((dim, *layout.dims), layout.tags) for layout in (self.src, self.dst))
        return replace(self, src=src, dst=dst, shape=(n, *self.shape), memory_limit=None)

    def between(self, start: Sharding, end: Sharding, devices: Devices, scale: Fraction) -> Request:
        """A part of it, on one mesh: from `start` to `end`, with no memory limit of its own."""
        array = self.shape, self.dtype, self.profile, scale
        return Request.on(start.mesh, start.layout, end.layout, *array, devices=devices)

    @property
    def on_one_mesh(self) -> Request | None:
        """The same on the coarsest mesh that refines both; None if the devices differ or no mesh does."""
        if self.src_devices != self.dst_devices:
            return None
        if self.src_mesh == self.dst_mesh:
            return self
        common = refine(self.src_mesh, self.dst_mesh)
        if common is None:
            return None
        src = factored(self.src, dict(common.src))
        dst = factored(self.dst, dict(common.dst))
        mesh = common.mesh
        machine = refined(self.profile, common)
        return replace(self, src=src, dst=dst, src_mesh=mesh, dst_mesh=mesh, profile=machine)


def target_of(source: Sharding, dst: Layout, mesh: Mesh) -> Sharding:
    """The destination of an array that is at `source`."""
    dst = dst.resolved(len(source.shape))
    lengths = dict(zip(source.layout.names, source.shape, strict=True))
    return Sharding(dst, mesh, tuple(lengths[name] for name in dst.names))


def device_numbers(end: str, mesh: Mesh, devices: Sequence[int] | None) -> Devices:
    """One number of its own for every device of a mesh; None stands for 0, 1, 2, ... Raises MeshError."""
    whole = range(mesh.n_devices)
    if devices is None or (isinstance(devices, range) and devices == whole):
        return whole
    if (numbers := whole_numbers(devices)) is None:
        reason = f"the devices of the {end} are {shown(devices)}"
        raise MeshError(reason, hint="one number per device, as in (0, 1)")
    if wrong := [n for n in numbers if type(n) is not int or n < 0]:
        raise MeshError(f"device {wrong[0]!r} of the {end}", hint="devices are whole numbers >= 0")
    if len(numbers) != mesh.n_devices:
        reason = f"{len(numbers)} devices for the {end}, whose mesh {mesh!r} has {mesh.n_devices}"
        raise MeshError(reason, hint="one number per device, in the order of the mesh")
    if len(set(numbers)) != len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        raise MeshError(
            f"device {twice} twice in the {end}", hint="a device has one place in a mesh"
        )
    return whole if numbers == tuple(whole) else numbers
