"""A request: the arguments of a plan as one value, by which plans are cached."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

from xshard.cost.machine import profile_of_devices, profile_of_factors
from xshard.cost.model import Profile
from xshard.errors import MeshError, PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored
from xshard.layout.sub_axes import common_mesh, refine
from xshard.notation.parser import Dim

Devices = tuple[int, ...] | range
NEST_HINT = "move it first, to a layout without spread"
FORWARD = "forward"
BOTH = "forward+backward"
Objective = Literal["forward", "forward+backward"]
OBJECTIVES = get_args(Objective)  # the passes that a plan is cheapest for


@dataclass(frozen=True)
class Request:
    """An array of `shape` under `src` on one mesh is to be under `dst` on another, or on the same.

    src_devices, dst_devices: the number of each device, in the order of its mesh, often a range.
    scale: a constant to multiply by. None: by the layouts, 1/n for a mean over n that ends.
    memory_limit: bytes that no device may exceed.
    relabel: whether devices may change places in `dst_mesh`.
    """

    src: Layout
    dst: Layout
    src_mesh: Mesh
    dst_mesh: Mesh
    src_devices: Devices
    dst_devices: Devices
    shape: tuple[int, ...]
    dtype: str
    profile: Profile
    scale: Fraction | None = None
    memory_limit: int | None = None
    relabel: bool = False

    def __post_init__(self) -> None:
        src_devices = device_numbers("source", self.src_mesh, self.src_devices)
        dst_devices = device_numbers("destination", self.dst_mesh, self.dst_devices)
        object.__setattr__(self, "src_devices", src_devices)
        object.__setattr__(self, "dst_devices", dst_devices)

    @classmethod
    def on_mesh(
        cls,
        mesh: Mesh,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        dtype: str,
        profile: Profile,
        scale: Fraction | None = None,
        devices: Devices = (),
    ) -> Request:
        """Make the request of a move on one mesh; without `devices`, they are 0, 1, 2, ..."""
        mesh_devices = devices if devices else range(mesh.n_devices)
        return cls(
            src,
            dst,
            src_mesh=mesh,
            dst_mesh=mesh,
            src_devices=mesh_devices,
            dst_devices=mesh_devices,
            shape=shape,
            dtype=dtype,
            profile=profile,
            scale=scale,
        )

    @cached_property
    def source(self) -> Sharding:
        """The sharding at the source."""
        return Sharding(self.src, self.src_mesh, self.shape)

    @cached_property
    def target(self) -> Sharding:
        """The sharding at the destination; its dims may be in another order."""
        return target_sharding(self.source, self.dst, self.dst_mesh)

    @property
    def factor(self) -> Fraction:
        """The constant to multiply by."""
        return self.source.scale / self.target.scale if self.scale is None else self.scale

    @property
    def machine(self) -> Profile:
        """The profile for the devices of the source's mesh."""
        return profile_of_devices(self.profile, self.src_mesh, self.src_devices)

    @property
    def adjoint(self) -> Request:
        """The request that redistributes gradients: backwards, between the dual layouts.

        The dual of a layout says how the gradient of an array with this layout is laid out. The
        adjoint of "s/x" -> "s | copy(x)", a gather to replicas whose gradients differ, is
        "s | sum(x)" -> "s/x", a reduce-scatter. Meshes and devices swap sides too.

        Raises LinearityError for a max or min.
        """
        return replace(
            self,
            src=self.dst.dual,
            dst=self.src.dual,
            src_mesh=self.dst_mesh,
            dst_mesh=self.src_mesh,
            src_devices=self.dst_devices,
            dst_devices=self.src_devices,
            shape=self.target.shape,
        )

    @property
    def in_order(self) -> Request:
        """The same request, with the dims of the destination in the order of the source."""
        return replace(self, dst=self.dst.in_order(self.src.names))

    @property
    def tangent(self) -> Request:
        """The move of tangents: where a boundary fills with a constant they have zeros."""
        return replace(self, src=self.src.tangent, dst=self.dst.tangent)

    def batched(self, n: int) -> Request:
        """Return the request for an array with one more dim, whole and leading, of length `n`.

        It has no memory limit.
        """
        # No two dims have this name: nested batches have more dims.
        dim = Dim(f"_batch{len(self.shape)}")
        src = Layout((dim, *self.src.dims), self.src.tags)
        dst = Layout((dim, *self.dst.dims), self.dst.tags)
        return replace(self, src=src, dst=dst, shape=(n, *self.shape), memory_limit=None)

    def for_part(
        self, start: Sharding, end: Sharding, devices: Devices, scale: Fraction
    ) -> Request:
        """Return the request for a part of the way, on one mesh; it has no memory limit."""
        return Request.on_mesh(
            start.mesh,
            start.layout,
            end.layout,
            self.shape,
            self.dtype,
            self.profile,
            scale,
            devices,
        )

    @property
    def on_one_mesh(self) -> Request | None:
        """The same request with both layouts written on one mesh, so that one search can plan it.

        The mesh is the coarsest that splits the axes of both. From dp=8 to dp=2,tp=4 it has axes of
        2 and of 4 devices: the first layout uses both in place of dp=8, the second one each.
        None if the devices or their order differ, or if no mesh splits the axes of both, as for 2 x
        3 and 3 x 2 devices.
        """
        if self.src_devices != self.dst_devices:
            return None
        if self.src_mesh == self.dst_mesh:
            return self
        common = refine(self.src_mesh, self.dst_mesh)
        if common is None:
            return None
        return replace(
            self,
            src=factored(self.src, dict(common.src)),
            dst=factored(self.dst, dict(common.dst)),
            src_mesh=common.mesh,
            dst_mesh=common.mesh,
            profile=profile_of_factors(self.profile, common),
        )

    @property
    def on_sub_axes(self) -> Request:
        """The same request without `spread`: on the sub-axes for which it stands on either side."""
        source, target = on_common_mesh(self.source, self.target)
        mesh = source.mesh
        if mesh == self.src_mesh:
            return self
        return replace(self, src=source.layout, dst=target.layout, src_mesh=mesh, dst_mesh=mesh)


def on_common_mesh(source: Sharding, target: Sharding) -> tuple[Sharding, Sharding]:
    """Write two shardings, either of which may be on sub-axes of a mesh, on one mesh.

    Raises PlanError if the groups of one are no parts of those of the other.
    """
    if source.mesh == target.mesh:
        return source, target
    mesh = common_mesh(source.mesh, target.mesh)
    if mesh is None:
        reason = f"'{source.written}' and '{target.written}' share units in groups that do not nest"
        raise PlanError(reason, hint=NEST_HINT)
    return source.on_sub_axes(mesh), target.on_sub_axes(mesh)


def target_sharding(source: Sharding, dst: Layout, mesh: Mesh) -> Sharding:
    """Return the sharding of an array that moves from `source` to another layout and mesh.

    Its dims may be in another order.
    """
    dst = dst.resolved(len(source.shape))
    lengths = dict(zip(source.layout.names, source.shape, strict=True))
    return Sharding(dst, mesh, tuple(lengths[name] for name in dst.names))


def device_numbers(end: str, mesh: Mesh, devices: Sequence[int] | None) -> Devices:
    """Check the device numbers that a user gives for a mesh: one per device, all different.

    None stands for 0, 1, 2, ...; (4, 5) places the 2 devices of a mesh on devices 4 and 5.

    Args:
        end: "source" or "destination", for errors.
        mesh: The mesh.
        devices: The number of each device, in the order of the mesh.

    Returns:
        The numbers as a tuple; for 0, 1, 2, ..., as a range.

    Raises:
        MeshError: They are below 0, too few, too many, or not all different.
    """
    # Most meshes have 0, 1, 2, ... A range of these is quick to compare and to hash, as the key of
    # a cache, and equal requests must not differ in form.
    all_devices = range(mesh.n_devices)
    if devices is None or (isinstance(devices, range) and devices == all_devices):
        return all_devices
    devices_listed = list(map(operator.index, devices))
    for device in devices_listed:
        if device < 0:
            hint = "devices are whole numbers >= 0"
            raise MeshError(f"device {device} of the {end}", hint=hint)
    if len(devices_listed) != mesh.n_devices:
        reason = (
            f"{len(devices_listed)} devices for the {end}, whose mesh {mesh!r} has {mesh.n_devices}"
        )
        raise MeshError(reason, hint="one number per device, in the order of the mesh")
    if len(set(devices_listed)) != len(devices_listed):
        repeated = [device for device in devices_listed if devices_listed.count(device) > 1]
        hint = "a device has one place in a mesh"
        raise MeshError(f"device {repeated[0]} twice in the {end}", hint=hint)
    return all_devices if devices_listed == list(all_devices) else tuple(devices_listed)
