"""Both ends of a hand-over: which device of JAX's mesh is which device of torch's.

Decides how the processes of the two frameworks go together. A device of torch is the part of the
array that goes with one device of JAX: a rank's block, or one of a process's several. Knows no
layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import torch.distributed as dist
from jax.sharding import Mesh as JaxMesh
from torch.distributed.device_mesh import DeviceMesh

from jax_bridge.planning import xshard_mesh
from torch_bridge.mesh.process_mesh import mesh_of
from xshard import Mesh, MeshError

# What torch calls the devices that JAX calls so.
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}

TorchMesh = DeviceMesh | Mesh


@dataclass(frozen=True, eq=False)
class Ends:
    """JAX's mesh and torch's over the same devices.

    devices: the device of JAX of every device of torch's mesh, `axes`.
    """

    jax_mesh: JaxMesh
    axes: Mesh
    devices: tuple[jax.Device, ...]

    @cached_property
    def jax_axes(self) -> Mesh:
        return xshard_mesh(self.jax_mesh)

    @cached_property
    def jax_devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.jax_mesh.devices.flat)

    @cached_property
    def are_the_same(self) -> bool:
        """Whether the meshes have the same axes, and every device the same number in both."""
        return self.axes == self.jax_axes and self.devices == self.jax_devices

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The devices of torch's mesh that are this process's, in its order."""
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == jax.process_index())

    @cached_property
    def kind(self) -> str:
        """What torch calls the kind of the devices: "cpu" or "cuda". Raises MeshError for others."""
        platform = self.devices[0].platform
        if platform not in KINDS:
            raise MeshError(
                f"JAX's mesh is of {platform} devices, of which torch has no tensors",
                hint=f"torch shares memory with devices of: {', '.join(KINDS)}; jax.device_get(array) copies",
            )
        return KINDS[platform]

    @cached_property
    def is_one_each(self) -> bool:
        """Whether every process has one device, as torch has it."""
        return len({d.process_index for d in self.devices}) == len(self.devices)

    def numbers(self, devices: Sequence[jax.Device]) -> tuple[int, ...]:
        """How a plan numbers devices: by rank or, where processes have several, in turn."""
        if self.is_one_each:
            return tuple(d.process_index for d in devices)
        ordered = _ordered(self.jax_devices)
        return tuple(map(ordered.index, devices))


def ends_of(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None = None) -> Ends:
    """The meshes brought together; torch's is like JAX's where none is given.

    A `DeviceMesh` is of ranks, each with one device of JAX's mesh. Device i of an `xshard.Mesh` is rank
    i, or the i-th device by process and id where processes have several.
    Raises MeshError where the meshes are not of the same devices, the frameworks not of the same
    processes, or this process has no device in JAX's.
    """
    if not isinstance(jax_mesh, JaxMesh):
        raise MeshError(
            f"{type(jax_mesh).__name__} {jax_mesh} has no devices", hint="pass a jax.sharding.Mesh of devices"
        )
    check_processes()
    return _ends(jax_mesh, torch_mesh)


def check_one_block(ends: Ends, what: str) -> None:
    """Raise MeshError where a process has several blocks and `what` has one."""
    if not ends.is_one_each:
        raise MeshError(
            f"a process has several devices in JAX's mesh {dict(ends.jax_mesh.shape)}, {what} one block",
            hint="one tensor per local device, in a list",
        )


def check_processes() -> None:
    """Raise MeshError where torch and JAX do not run in the same processes."""
    if not dist.is_initialized():
        return
    torchs, jaxs = (dist.get_rank(), dist.get_world_size()), (jax.process_index(), jax.process_count())
    if torchs != jaxs:
        raise MeshError(
            f"for torch this is process {torchs[0]} of {torchs[1]}, for JAX process {jaxs[0]} of {jaxs[1]}",
            hint="jax_bridge.torch_interop.initialize() sets both up, before JAX makes its devices",
        )


@functools.lru_cache(maxsize=256)
def _ends(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None) -> Ends:
    mine = tuple(jax_mesh.devices.flat)
    if all(d.process_index != jax.process_index() for d in mine):
        raise MeshError(
            f"process {jax.process_index()} has no device in JAX's mesh {dict(jax_mesh.shape)}",
            hint="call this in the processes of the mesh only",
        )
    if torch_mesh is None:
        return Ends(jax_mesh, xshard_mesh(jax_mesh), mine)
    axes = mesh_of(torch_mesh)
    if axes.n_devices != len(mine):
        raise MeshError(
            f"torch's {axes!r} has {axes.n_devices} devices, JAX's {xshard_mesh(jax_mesh)!r} {len(mine)}",
            hint="both are of the same devices",
        )
    if not isinstance(torch_mesh, DeviceMesh):
        return Ends(jax_mesh, axes, _ordered(mine))
    ranks = torch_mesh.mesh.flatten().tolist()
    processes = sorted(d.process_index for d in mine)
    if sorted(ranks) != processes:
        raise MeshError(
            f"torch's mesh is of the ranks {sorted(ranks)}, JAX's of devices of the processes {processes}",
            hint="every rank of a DeviceMesh has one device in JAX's mesh; an xshard.Mesh counts devices",
        )
    of_process = {d.process_index: d for d in mine}
    return Ends(jax_mesh, axes, tuple(of_process[rank] for rank in ranks))


def _ordered(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(sorted(devices, key=lambda d: (d.process_index, d.id)))
