"""A `DeviceMesh` or an `xshard.Mesh` as processes: devices with global ranks, and groups along the axes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.mesh.process_groups import group_of, rank_in, step_group
from xshard import Layout, Mesh
from xshard.arguments import shown
from xshard.errors import MeshError
from xshard.layout.sub_axes import Split, SubAxisMesh, unfactored
from xshard.notation.maps import Maps


@dataclass(frozen=True, eq=False)
class Group:
    """Processes that communicate: a process group (None for `meta`), and the mesh device of each rank."""

    process_group: Any
    devices: tuple[int, ...]
    graph_name: str | None = None

    @cached_property
    def ranks(self) -> list[int]:
        """The global rank of each of its members, in their order."""
        return dist.get_process_group_ranks(self.process_group)

    @cached_property
    def backends(self) -> str:
        """The backend of each kind of device, as in `cpu:gloo,cuda:nccl`."""
        return dist.get_backend_config(self.process_group)

    def traced(self, place: str, tensor_device: torch.device) -> Group:
        """The same processes for a compiler; errors of gloo name the `place`."""
        group = (
            self.process_group
        )  # NCCL does not raise in the caller; exports run without this package too
        if self.serves(tensor_device, "gloo") and not torch.compiler.is_exporting():
            return replace(self, graph_name=step_group(place, group, tensor_device).graph_name)
        return replace(self, graph_name=group.group_name)

    def serves(self, tensor_device: torch.device, *backends: str) -> bool:
        """Whether one of `backends` sends tensors on such a device."""
        return any(f"{tensor_device.type}:{backend}" in self.backends for backend in backends)


@dataclass(frozen=True, eq=False)
class ProcessMesh:
    """A mesh of processes with global ranks. process_group: axes in mesh order -> the group along them."""

    mesh: Mesh
    ranks: tuple[int, ...]
    device: int
    process_group: Callable[[tuple[str, ...]], dist.ProcessGroup]
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    _parts: dict[tuple[str, ...], ProcessMesh] = field(default_factory=dict)
    _factored: dict[Split, ProcessMesh] = field(default_factory=dict)

    def group(self, axes: Sequence[str]) -> Group:
        """The processes that differ from this one along `axes` only; all of them call this the first time."""
        axes = tuple(sorted(axes, key=self.mesh.position))
        if axes not in self._groups:
            process_group = self.process_group(axes)
            members = dist.get_process_group_ranks(process_group)
            self._groups[axes] = Group(process_group, tuple(self.ranks.index(r) for r in members))
        return self._groups[axes]

    def among(self, devices: tuple[int, ...]) -> Group:
        """The processes of some devices, this one among them; all of them call this the first time."""
        return Group(group_of(tuple(self.ranks[d] for d in devices)), devices)

    def along(self, axes: Sequence[str]) -> ProcessMesh:
        """The part of the mesh that this process reaches along `axes`, as a mesh of those axes alone."""
        axes = tuple(sorted(axes, key=self.mesh.position))
        if axes not in self._parts:
            mesh = Mesh(dict(zip(axes, self.mesh.sizes_of(axes), strict=True)))
            ranks = tuple(self.ranks[d] for d in self.mesh.group(self.device, axes))
            device = self.mesh.index(self.device, axes)
            self._parts[axes] = ProcessMesh(mesh, ranks, device, self.process_group)
        return self._parts[axes]

    def factored(self, split: Split) -> ProcessMesh:
        """The same processes on a mesh with some axes split into sub-axes; itself where none are."""
        if not split:
            return self
        if split not in self._factored:
            sub_axis_mesh = SubAxisMesh(self.mesh, split)

            def process_group(sub_axes: tuple[str, ...]) -> dist.ProcessGroup:
                mesh, axes = unfactored(sub_axis_mesh, sub_axes)
                if mesh is not sub_axis_mesh:
                    return self.process_group(axes)
                devices = sub_axis_mesh.group(self.device, sub_axes)
                return group_of(tuple(sorted(self.ranks[d] for d in devices)))

            self._factored[split] = ProcessMesh(
                sub_axis_mesh, self.ranks, self.device, process_group
            )
        return self._factored[split]


MeshLike = Mesh | DeviceMesh | ProcessMesh
World = tuple[Any, bool]
_ALONE = False  # for all threads, since threads of a backward pass have no context of their own


@contextmanager
def alone() -> Iterator[None]:
    """Inside, each mesh is this process by itself: all axes have size 1, and nothing is sent."""
    global _ALONE
    before = _ALONE
    _ALONE = True
    try:
        yield
    finally:
        _ALONE = before


def world() -> World:
    """The world, and whether `alone` is active, for keys of caches. Raises MeshError without a world."""
    group = c10d._world.default_pg
    if group is None or torch._C._len_torch_dispatch_stack():
        check_world()
    return group, _ALONE


def process_mesh(mesh: MeshLike) -> ProcessMesh:
    """A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world -> its processes. Raises MeshError
    without a world, names or this process, or if an `xshard.Mesh` does not cover the world.
    """
    if isinstance(mesh, ProcessMesh) and not _ALONE:
        return mesh
    return _process_mesh(mesh, world())


def dtensor_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The processes of a DTensor's mesh, unnamed dims called m0, m1, ... Raises as `process_mesh` does."""
    is_named = mesh.mesh_dim_names is not None
    return process_mesh(mesh) if is_named else _process_mesh(mesh, world(), dtensor_axes(mesh))


@functools.lru_cache(maxsize=256)
def dtensor_axes(mesh: DeviceMesh) -> Mesh:
    """The axes and sizes of a DTensor's mesh."""
    names = mesh.mesh_dim_names or tuple(f"m{i}" for i in range(mesh.ndim))
    return Mesh(dict(zip(names, mesh.shape, strict=True)))


def takes_part(mesh: DeviceMesh) -> bool:
    """Whether this process is in a DTensor's mesh; on all others the DTensor is empty and nothing happens."""
    return mesh.get_coordinate() is not None


def callers(mesh: object) -> tuple[int, ...]:
    """The global ranks that call a function on a mesh; for an `xshard.Mesh` all of them."""
    if isinstance(mesh, ProcessMesh):
        return mesh.ranks
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.mesh.flatten().tolist())
    return tuple(range(dist.get_world_size()))


def check_device(device: torch.device) -> None:
    """Raise MeshError unless the processes can send tensors on such a device; of `meta` nothing is sent."""
    backends = dist.get_backend_config()
    if f"{device.type}:" not in backends and device.type != "meta":
        hint = f"their backends are {backends}: move it, or initialise the process group for both"
        raise MeshError(f"the processes cannot send a block that is on '{device}'", hint=hint)


def as_mesh(mesh: MeshLike | None, hint: str = "redistribute(x, layouts, mesh)") -> MeshLike:
    """The mesh. Raises MeshError for None, and for a value that is not a mesh."""
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint=hint)
    if not isinstance(mesh, MeshLike):
        mesh_of(mesh)  # raises
    return mesh


def mesh_of(mesh: MeshLike) -> Mesh:
    """The axes and sizes of any mesh. Raises MeshError for a `DeviceMesh` without names."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, ProcessMesh):
        return mesh.mesh
    if not isinstance(mesh, DeviceMesh):
        hint = "the mesh is a torch DeviceMesh or an xshard.Mesh; the expression comes before it"
        raise MeshError(f"{shown(mesh)} is not a mesh", hint=hint)
    if mesh.mesh_dim_names is None:
        hint = 'as in init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
        raise MeshError(f"{mesh!r} needs names for its dims", hint=hint)
    return dtensor_axes(mesh)


@functools.lru_cache(maxsize=256)
def _process_mesh(mesh: MeshLike, world: World, axes: Mesh | None = None) -> ProcessMesh:
    """Cached by the world too: its groups end with it, and threads may each have their own."""
    axes = mesh_of(mesh) if axes is None else axes
    ranks = callers(mesh)
    size = dist.get_world_size()
    if world[1]:
        return mesh_of_ranks(Mesh(dict.fromkeys(axes.axes, 1)), [dist.get_rank()])
    if isinstance(mesh, Mesh) and axes.n_devices != size:
        hint = "an xshard.Mesh covers the world; for a part of it pass a DeviceMesh"
        raise MeshError(
            f"{axes!r} has {axes.n_devices} devices, the world has {size} processes", hint=hint
        )
    return mesh_of_ranks(axes, ranks, mesh if isinstance(mesh, DeviceMesh) else None)


def mesh_of_ranks(
    mesh: Mesh, ranks: Sequence[int], device_mesh: DeviceMesh | None = None, world: Any = None
) -> ProcessMesh:
    """A mesh of processes: device i has rank `ranks[i]` in `world`. Raises MeshError on other processes."""
    ranks = tuple(ranks)
    rank = rank_in(world) if world else dist.get_rank()
    if rank not in ranks:
        hint = f"only the mesh's ranks call this: {', '.join(map(str, ranks))}"
        raise MeshError(
            f"rank {rank} is not in {mesh if device_mesh is None else device_mesh!r}", hint=hint
        )
    device = ranks.index(rank)  # a group along one axis is the `DeviceMesh`'s own

    @functools.cache
    def process_group(axes: tuple[str, ...]) -> dist.ProcessGroup:
        if device_mesh is not None and len(axes) == 1:
            return device_mesh.get_group(mesh.position(axes[0]))
        return group_of(tuple(sorted(ranks[d] for d in mesh.group(device, axes))), world)

    return ProcessMesh(mesh, ranks, device, process_group)


def group_mesh(group: Any, axis: str) -> Mesh | ProcessMesh:
    """The processes of a `ProcessGroup` along one axis, in order; None: the world. Raises MeshError."""
    check_world()  # which torch.compile can record
    if (
        group == dist.GroupMember.NON_GROUP_MEMBER
    ):  # the result of `dist.new_group` on all other ranks
        raise MeshError(
            f"rank {dist.get_rank()} is not in the group", hint="call this on its members only"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise MeshError(
            f"{group!r} is not a process group", hint='as in mesh.get_group("cp"), or None'
        )
    if group is None:  # a mesh that torch.compile can record too
        return Mesh({axis: dist.get_world_size()})
    return _group_mesh(group, axis)


@functools.lru_cache(maxsize=256)
def _group_mesh(group: dist.ProcessGroup, axis: str) -> ProcessMesh:
    ranks = tuple(dist.get_process_group_ranks(group))
    return ProcessMesh(Mesh({axis: len(ranks)}), ranks, dist.get_rank(group), lambda axes: group)


def check_world() -> None:
    """Raise MeshError unless this process, or this thread, is one rank of an initialised world."""
    local_tensor = sys.modules.get("torch.distributed._local_tensor")  # slow to import
    if local_tensor is not None and local_tensor.local_tensor_mode() is not None:
        hint = (
            "ranks move rows of their own: each is a process (torch_bridge.run_ranks) or a thread"
        )
        raise MeshError("LocalTensorMode runs the program of rank 0 for all ranks", hint=hint)
    if not dist.is_initialized():
        hint = "call torch.distributed.init_process_group() in every process, started by torchrun"
        raise MeshError("no process group is initialised", hint=hint)


def positions(
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int],
    dim: int | str,
    device: torch.device | str | None = None,
    maps: Maps | None = None,
) -> Tensor:
    """The global index of every row that this process's block holds along a dim: `[rows]`, int64.

    -1 stands for a row beyond the ends of the array, which holds a constant. Nothing is sent. Raises as
    `xshard.Layout.positions` and `redistribute` (MeshError) do.
    shape: global. dim: its name or index. device: the result's; default: the `DeviceMesh`'s, else the CPU.
    maps: the `Owners` and `Needs` that the layout names.

    >>> import torch_bridge as xt, xshard as xs
    >>> layout, mesh = "b s/zigzag(cp)", xs.Mesh(cp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.positions(layout, mesh, shape=(3, 8), dim="s").tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if device is None:
        device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    processes = process_mesh(mesh)
    rows = Layout.parse(layout, maps).positions(processes.mesh, shape, dim, processes.device)
    return torch.from_numpy(rows).to(device)
