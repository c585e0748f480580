"""A `DeviceMesh` or an `xshard.Mesh` as processes: their ranks, and groups along axes.

Meshes and groups are cached: making a group is a collective call.
"""

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

from torch_bridge.mesh.process_groups import process_group_of, rank_in, step_group
from torch_bridge.versions.modes import dispatch_mode_count
from xshard import Layout, Mesh, errors
from xshard.errors import MeshError, api_boundary
from xshard.layout.sub_axes import Split, SubAxisMesh, split_of, unfactored
from xshard.notation.maps import Maps
from xshard.signatures import short_repr

errors.is_recording = torch.compiler.is_compiling


@dataclass(frozen=True, eq=False)
class Group:
    """Processes that communicate.

    Attributes:
        process_group: None for `meta` tensors, of which nothing is sent.
        devices: The mesh device of each rank of the group.
        graph_name: The name by which a compiled graph finds the group.
    """

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

    @property
    def beside(self) -> Group:
        """The same processes as a group of its own, for what goes on beside the caller.

        All of them ask for it the first time.
        """
        return replace(self, process_group=process_group_of(tuple(self.ranks), use="beside"))

    def traced(self, place: str, tensor_device: torch.device) -> Group:
        """Return the same processes for a compiler; errors of gloo name the `place`."""
        graph_name = self.process_group.group_name
        # NCCL does not raise in the caller; exports run without this package too.
        if self.serves(tensor_device, "gloo") and not torch.compiler.is_exporting():
            graph_name = step_group(place, self.process_group, tensor_device).graph_name
        return replace(self, graph_name=graph_name)

    def serves(self, tensor_device: torch.device, *backends: str) -> bool:
        """Return whether one of `backends` sends tensors on such a device."""
        return any(f"{tensor_device.type}:{backend}" in self.backends for backend in backends)


@dataclass(frozen=True, eq=False)
class ProcessMesh:
    """A mesh of processes, seen by one of them.

    Attributes:
        mesh: The axes and their sizes.
        ranks: The global rank of each device.
        device: The device that is this process.
        process_group: Axes in mesh order -> the group along them that this process is in.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    device: int
    process_group: Callable[[tuple[str, ...]], dist.ProcessGroup]
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    _submeshes: dict[tuple[str, ...], ProcessMesh] = field(default_factory=dict)
    _factored: dict[Split, ProcessMesh] = field(default_factory=dict)
    _whole: ProcessMesh | None = None  # the mesh whose axes this one splits

    def group(self, axes: Sequence[str]) -> Group:
        """Return the processes that differ from this one along `axes` only.

        All of them call this the first time.
        """
        axes = tuple(sorted(axes, key=self.mesh.position))
        if axes not in self._groups:
            process_group = self.process_group(axes)
            members = dist.get_process_group_ranks(process_group)
            devices = tuple(self.ranks.index(rank) for rank in members)
            self._groups[axes] = Group(process_group, devices)
        return self._groups[axes]

    def group_of_devices(self, devices: tuple[int, ...]) -> Group:
        """Return the processes of some devices, this one among them.

        All of them call this the first time.
        """
        return Group(process_group_of(tuple(self.ranks[d] for d in devices)), devices)

    def submesh(self, axes: Sequence[str]) -> ProcessMesh:
        """Return the part of the mesh that this process reaches along `axes`, as a mesh."""
        axes = tuple(sorted(axes, key=self.mesh.position))
        if axes not in self._submeshes:
            mesh = Mesh(dict(zip(axes, self.mesh.sizes_of(axes), strict=True)))
            devices = self.mesh.group(self.device, axes)
            ranks = tuple(self.ranks[d] for d in devices)
            device = self.mesh.index(self.device, axes)
            self._submeshes[axes] = ProcessMesh(mesh, ranks, device, self.process_group)
        return self._submeshes[axes]

    def factored(self, split: Split) -> ProcessMesh:
        """Return the same processes on a mesh with some axes split into sub-axes.

        An axis of 4 devices becomes two of 2: plans use it for collectives over a part of an axis.
        The result is cached, as process groups are costly to make.

        Args:
            split: The sizes of sub-axes by axis; empty: this mesh itself is returned.
        """
        if not split:
            return self
        if split not in self._factored:
            sub_axis_mesh = SubAxisMesh(self.mesh, split)

            def process_group(sub_axes: tuple[str, ...]) -> dist.ProcessGroup:
                mesh, axes = unfactored(sub_axis_mesh, sub_axes)
                if mesh is not sub_axis_mesh:
                    return self.process_group(axes)  # all parts of whole axes: the group exists
                devices = sub_axis_mesh.group(self.device, sub_axes)
                return process_group_of(tuple(sorted(self.ranks[d] for d in devices)))

            self._factored[split] = ProcessMesh(
                sub_axis_mesh, self.ranks, self.device, process_group, _whole=self
            )
        return self._factored[split]

    def on(self, mesh: Mesh) -> ProcessMesh:
        """Return the same processes on a mesh that splits axes, as that of a sharding may."""
        if mesh == self.mesh:
            return self
        whole = self if self._whole is None else self._whole
        return whole.factored(split_of(mesh))


DeviceLike = torch.device | str
MeshLike = Mesh | DeviceMesh | ProcessMesh
WorldKey = tuple[Any, bool]  # the group of the world, and whether `on_this_process_alone` is active
# Whether `on_this_process_alone` is active, for all threads: threads of a backward pass have no
# context of their own.
_ALONE = False


@contextmanager
def on_this_process_alone() -> Iterator[None]:
    """Run a part of a program on this process by itself: all axes have size 1."""
    global _ALONE
    was_alone = _ALONE
    _ALONE = True
    try:
        yield
    finally:
        _ALONE = was_alone


def world_key() -> WorldKey:
    """Return the world, and whether `on_this_process_alone` is active, for keys of caches.

    Hot: every call asks for it. Raises MeshError without a world.
    """
    # The public name, `dist.group.WORLD`, is a property of a metaclass, which takes longer. `_world`
    # is private, and asked for at each call: ranks as threads put another in its place.
    group = c10d._world.default_pg
    # `check_world` refuses `LocalTensorMode`, one of the dispatch modes.
    if group is None or dispatch_mode_count():
        check_world()
    return group, _ALONE


def process_mesh(mesh: MeshLike) -> ProcessMesh:
    """Return the processes of a named `DeviceMesh`, or of an `xshard.Mesh` over the world.

    Raises MeshError without a world, names or this process, or if an `xshard.Mesh` does not cover
    the world.
    """
    if isinstance(mesh, ProcessMesh) and not _ALONE:
        return mesh
    return _process_mesh(mesh, world_key(), mesh_of(mesh))


def dtensor_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """Return the processes of a DTensor's mesh, unnamed dims called m0, m1, ...

    Raises as `process_mesh` does.
    """
    return _process_mesh(mesh, world_key(), dtensor_axes(mesh))


@functools.lru_cache(maxsize=256)
def dtensor_axes(mesh: DeviceMesh) -> Mesh:
    """Return the axes and sizes of a DTensor's mesh, which may lack names: (2, 4) -> m0=2, m1=4."""
    names = mesh.mesh_dim_names
    if names is None:
        names = tuple(f"m{i}" for i in range(mesh.ndim))
    return Mesh(dict(zip(names, mesh.shape, strict=True)))


def is_in_mesh(mesh: DeviceMesh) -> bool:
    """Return whether this process is in a DTensor's mesh.

    On all others the DTensor is empty and nothing happens.
    """
    return mesh.get_coordinate() is not None


def calling_ranks(mesh: object) -> tuple[int, ...]:
    """Return the global ranks that call a function on a mesh; for an `xshard.Mesh` all of them."""
    if isinstance(mesh, ProcessMesh):
        return mesh.ranks
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.mesh.flatten().tolist())
    return tuple(range(dist.get_world_size()))


def check_device(device: torch.device) -> None:
    """Raise MeshError unless the processes can send tensors on such a device."""
    backends = dist.get_backend_config()  # as in `cpu:gloo,cuda:nccl`
    # Of `meta` tensors nothing is sent.
    if f"{device.type}:" not in backends and device.type != "meta":
        hint = f"their backends are {backends}: move it, or initialise the process group for both"
        raise MeshError(f"the processes cannot send a block that is on '{device}'", hint=hint)


def checked_mesh(mesh: MeshLike | None, hint: str = "redistribute(x, layouts, mesh)") -> MeshLike:
    """Return the mesh. Raises MeshError for None, and for a value that is not a mesh."""
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint=hint)
    if not isinstance(mesh, MeshLike):
        mesh_of(mesh)  # raises
    return mesh


def mesh_of(mesh: MeshLike) -> Mesh:
    """Return the axes and sizes of any mesh. Raises MeshError for a `DeviceMesh` without names."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, ProcessMesh):
        return mesh.mesh
    if not isinstance(mesh, DeviceMesh):
        hint = "the mesh is a torch DeviceMesh or an xshard.Mesh; the expression comes before it"
        raise MeshError(f"{short_repr(mesh)} is not a mesh", hint=hint)
    if mesh.mesh_dim_names is None:
        hint = 'as in init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
        raise MeshError(f"{mesh!r} needs names for its dims", hint=hint)
    return dtensor_axes(mesh)


# Cached by the world too: its groups end with it, and threads may each have their own.
@functools.lru_cache(maxsize=256)
def _process_mesh(mesh: MeshLike, world: WorldKey, axes: Mesh) -> ProcessMesh:
    """Return the processes of a mesh.

    Args:
        mesh: The mesh.
        world: The key of the world, for the cache.
        axes: Its axes and sizes, as `DeviceMesh` may lack names.
    """
    _, is_alone = world
    if is_alone:
        return mesh_of_ranks(Mesh(dict.fromkeys(axes.axes, 1)), [dist.get_rank()])
    size = dist.get_world_size()
    if isinstance(mesh, Mesh) and axes.n_devices != size:
        hint = "an xshard.Mesh covers the world; for a part of it pass a DeviceMesh"
        reason = f"{axes!r} has {axes.n_devices} devices, the world has {size} processes"
        raise MeshError(reason, hint=hint)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    return mesh_of_ranks(axes, calling_ranks(mesh), device_mesh)


def mesh_of_ranks(
    mesh: Mesh, ranks: Sequence[int], device_mesh: DeviceMesh | None = None, world: Any = None
) -> ProcessMesh:
    """Bind a mesh to processes: its device i is rank `ranks[i]`.

    Raises MeshError on a process whose rank is not among `ranks`.

    Args:
        mesh: The mesh.
        ranks: The rank of each device.
        device_mesh: torch's mesh, whose process groups are used where it has one.
        world: The process group in which ranks are counted; None: the default one. Process groups
            are made when first used.
    """
    ranks = tuple(ranks)
    rank = rank_in(world) if world else dist.get_rank()
    if rank not in ranks:
        shown_mesh = f"{mesh}" if device_mesh is None else f"{device_mesh!r}"
        hint = f"only the mesh's ranks call this: {', '.join(map(str, ranks))}"
        raise MeshError(f"rank {rank} is not in {shown_mesh}", hint=hint)
    device = ranks.index(rank)

    @functools.cache
    def process_group(axes: tuple[str, ...]) -> dist.ProcessGroup:
        if device_mesh is not None and len(axes) == 1:
            return device_mesh.get_group(mesh.position(axes[0]))  # it has been made already
        members = [ranks[d] for d in mesh.group(device, axes)]
        return process_group_of(tuple(sorted(members)), world)

    return ProcessMesh(mesh, ranks, device, process_group)


def group_mesh(group: Any, axis: str) -> Mesh | ProcessMesh:
    """Make a mesh with a single axis from a `ProcessGroup`.

    A group of ranks 4 and 5 with axis "cp" -> a mesh cp=2. Raises MeshError for a value that is not
    a group, and on processes outside of it.

    Args:
        group: The group; None: all processes.
        axis: The name of the axis.
    """
    check_world()  # which torch.compile can record
    # On all other ranks `dist.new_group` returns this value.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        reason = f"rank {dist.get_rank()} is not in the group"
        raise MeshError(reason, hint="call this on its members only")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        reason = f"{group!r} is not a process group"
        raise MeshError(reason, hint='as in mesh.get_group("cp"), or None')
    if group is None:  # a mesh that torch.compile can record too
        return Mesh({axis: dist.get_world_size()})
    return _group_mesh(group, axis)


@functools.lru_cache(maxsize=256)
def _group_mesh(group: dist.ProcessGroup, axis: str) -> ProcessMesh:
    ranks = tuple(dist.get_process_group_ranks(group))
    mesh = Mesh({axis: len(ranks)})
    return ProcessMesh(mesh, ranks, dist.get_rank(group), lambda axes: group)


def check_world() -> None:
    """Raise MeshError unless this process, or this thread, is one rank of an initialised world."""
    # A private module, slow to import: if nobody has imported it, its mode is not active. Without
    # this check one process that plays all ranks would move rank 0's rows for all.
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    if local_tensor is not None and local_tensor.local_tensor_mode() is not None:
        hint = (
            "ranks move rows of their own: each is a process (torch_bridge.run_ranks) or a thread"
        )
        raise MeshError("LocalTensorMode runs the program of rank 0 for all ranks", hint=hint)
    if not dist.is_initialized():
        hint = "call torch.distributed.init_process_group() in every process, started by torchrun"
        raise MeshError("no process group is initialised", hint=hint)


@api_boundary
def positions(
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int],
    dim: int | str,
    device: DeviceLike | None = None,
    maps: Maps | None = None,
) -> Tensor:
    """Return the global index of every row that this process's block holds along a dim.

    Position ids of a sharded sequence, for example. "s/zigzag(cp)" of 8 rows on cp=2, on the first
    process -> [0, 1, 6, 7]. Nothing is sent.

    Args:
        layout: The layout of the array, or its text.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world.
        shape: The global shape.
        dim: The name or the index of the dim.
        device: The result's. Default: the `DeviceMesh`'s, else the CPU.
        maps: The `Owners` and `Needs` that the layout names.

    Returns:
        A tensor `[rows]`, int64. -1 stands for a row beyond the ends of the array, which holds a
        constant.

    Raises:
        MeshError: As for `redistribute`.
        XshardError: As for `xshard.Layout.positions`.

    Examples:
        >>> import torch_bridge as xt, xshard as xs
        >>> mesh = xs.Mesh(cp=2)
        >>> def rows():
        ...     return xt.positions("b s/zigzag(cp)", mesh, shape=(3, 8), dim="s").tolist()
        >>> xt.testing.run_ranks(2, rows)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if device is None:
        device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    mesh_of_processes = process_mesh(mesh)
    this_process = mesh_of_processes.device  # its number in the mesh
    layout = Layout.parse(layout, maps)
    rows = layout.positions(mesh_of_processes.mesh, shape, dim, device=this_process)
    return torch.from_numpy(rows).to(device)
