"""The processes and devices that torch and JAX share: every device of torch's mesh is a device of JAX."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import torch
import torch.distributed as dist
from jax.sharding import Mesh as JaxMesh
from torch.distributed.device_mesh import DeviceMesh

from jax_bridge.mesh.context import xshard_mesh
from jax_bridge.state.execute import all_devices
from torch_bridge.mesh.process_mesh import mesh_of
from xshard import Mesh
from xshard.errors import MeshError, api_boundary
from xshard.signatures import Count

# JAX's names of platforms -> torch's names of kinds of devices.
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}

TorchMesh = DeviceMesh | Mesh


@dataclass(frozen=True, eq=False)
class MeshPair:
    """JAX's mesh and torch's, both over devices of JAX.

    Attributes:
        jax_mesh: JAX's mesh.
        jax_axes: Its axes.
        jax_devices: Its devices in order.
        torch_axes: The axes of torch's mesh.
        torch_devices: The device of JAX for each device of torch's mesh.
    """

    jax_mesh: JaxMesh
    jax_axes: Mesh
    jax_devices: tuple[jax.Device, ...]
    torch_axes: Mesh
    torch_devices: tuple[jax.Device, ...]

    @cached_property
    def local_positions(self) -> tuple[int, ...]:
        """This process's devices, as positions in torch's mesh."""
        process = jax.process_index()
        devices = enumerate(self.torch_devices)
        return tuple(i for i, device in devices if device.process_index == process)

    @property
    def local_devices(self) -> list[jax.Device]:
        """This process's devices of torch's mesh, in its order."""
        return [self.torch_devices[i] for i in self.local_positions]

    @property
    def local_jax_devices(self) -> list[jax.Device]:
        """This process's devices of JAX's mesh, in its order."""
        process = jax.process_index()
        return [device for device in self.jax_devices if device.process_index == process]

    @cached_property
    def kind(self) -> str:
        """Torch's name for the kind of devices: "cpu" or "cuda". Raises MeshError for others."""
        platform = self.torch_devices[0].platform
        if platform not in KINDS:
            shared = ", ".join(KINDS)
            reason = f"JAX's mesh is of {platform} devices, which torch does not share"
            hint = f"torch shares memory with devices of: {shared}; jax.device_get(array) copies"
            raise MeshError(reason, hint=hint)
        return KINDS[platform]

    @cached_property
    def all_devices(self) -> tuple[jax.Device, ...]:
        """The devices of both meshes, by process and id."""
        used = {*self.torch_devices, *self.jax_devices}
        return tuple(x for x in all_devices(self.jax_devices[0]) if x in used)

    @cached_property
    def has_device_per_process(self) -> bool:
        """True if every process has one device, as torch assumes."""
        processes = {device.process_index for device in self.all_devices}
        return len(processes) == len(self.all_devices)

    @cached_property
    def by_number(self) -> dict[int, jax.Device]:
        """Devices by their numbers in plans: ranks, or positions if a process has several."""
        if self.has_device_per_process:
            # Ranks, so that torch can run the plan, too.
            return {device.process_index: device for device in self.all_devices}
        return dict(enumerate(self.all_devices))

    def numbers(self, devices: Sequence[jax.Device]) -> tuple[int, ...]:
        """Return the numbers of devices in a plan."""
        number_of = {device: number for number, device in self.by_number.items()}
        return tuple(number_of[device] for device in devices)


def mesh_pair(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None = None) -> MeshPair:
    """Find the device of JAX for each device of torch's mesh.

    Args:
        jax_mesh: JAX's mesh.
        torch_mesh: Torch's mesh; None if it equals JAX's.

    Raises:
        MeshError: JAX's mesh is without devices, torch's devices are not JAX's, or this process is
            outside of both.
    """
    if not isinstance(jax_mesh, JaxMesh):
        hint = "pass a jax.sharding.Mesh of devices"
        raise MeshError(f"{type(jax_mesh).__name__} {jax_mesh} is not a mesh of devices", hint=hint)
    check_processes()  # not cached: torch's process group may start later
    return _match_devices(jax_mesh, torch_mesh)


def check_one_block(meshes: MeshPair, what: str) -> None:
    """Raise MeshError if a process has several blocks but `what` one."""
    if not meshes.has_device_per_process:
        reason = f"a process has several devices in JAX's {meshes.jax_axes!r}, {what} one block"
        raise MeshError(reason, hint="one tensor per local device, in a list")


def check_processes() -> None:
    """Raise MeshError if torch and JAX do not run in the same processes."""
    in_jax = f"process {jax.process_index()} of {jax.process_count()}"
    in_torch = in_jax
    if dist.is_initialized():
        in_torch = f"process {dist.get_rank()} of {dist.get_world_size()}"
    if in_torch != in_jax:
        hint = "jax_bridge.torch_interop.initialize() sets both up, before JAX makes its devices"
        raise MeshError(f"for torch this is {in_torch}, for JAX {in_jax}", hint=hint)


@functools.lru_cache(maxsize=256)
def _match_devices(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None) -> MeshPair:
    """Find the device of JAX for each device of torch's mesh: `mesh_pair`, cached.

    Raises MeshError in a process without devices in either mesh.
    """
    jax_axes = xshard_mesh(jax_mesh)
    jax_devices = tuple(jax_mesh.devices.flat)
    torch_axes = jax_axes
    torch_devices = jax_devices
    if torch_mesh is not None:
        # Another mesh: its axes differ, and its devices or their order may.
        torch_axes = mesh_of(torch_mesh)
        torch_devices = _torch_devices(torch_mesh, torch_axes, jax_devices)
    meshes = MeshPair(
        jax_mesh=jax_mesh,
        jax_axes=jax_axes,
        jax_devices=jax_devices,
        torch_axes=torch_axes,
        torch_devices=torch_devices,
    )
    if all(device.process_index != jax.process_index() for device in meshes.all_devices):
        in_jax = f"JAX's mesh {dict(jax_mesh.shape)}"
        in_torch = "" if torch_mesh is None else f" or torch's {meshes.torch_axes!r}"
        reason = f"process {jax.process_index()} is outside of {in_jax}{in_torch}"
        raise MeshError(reason, hint="call this in the processes of the mesh only")
    return meshes


def _torch_devices(
    torch_mesh: TorchMesh, axes: Mesh, jax_devices: tuple[jax.Device, ...]
) -> tuple[jax.Device, ...]:
    """Return the device of JAX for each device of torch's mesh.

    A `DeviceMesh` names ranks, which are numbers of processes: each has one device of JAX. An
    `xshard.Mesh` names no devices, only axes: it takes those of JAX's mesh by process and id if it
    has as many, else the first ones of all.
    """
    available = all_devices(jax_devices[0])
    if isinstance(torch_mesh, DeviceMesh):
        return _devices_of_ranks(torch_mesh.mesh.flatten().tolist(), jax_devices, available)
    if len(jax_devices) == axes.n_devices:
        available = [device for device in available if device in jax_devices]
    if len(available) < axes.n_devices:
        reason = f"torch's {axes!r} has {axes.n_devices} devices, JAX has {len(available)}"
        hint = "every block of torch is on a device of JAX of its own, in JAX's mesh or not"
        raise MeshError(reason, hint=hint)
    return tuple(available[: axes.n_devices])


def _devices_of_ranks(
    ranks: list[int], jax_devices: tuple[jax.Device, ...], available: list[jax.Device]
) -> tuple[jax.Device, ...]:
    """Return the device of JAX for each rank of torch, in order.

    Ranks 1, 0 -> the device of process 1, then that of process 0.

    Args:
        ranks: Torch's ranks, which are numbers of processes.
        jax_devices: The devices of JAX's mesh.
        available: All devices of JAX of this kind.

    Raises:
        MeshError: A rank has no device, or several that could be meant.
    """
    processes = sorted(device.process_index for device in jax_devices)
    # If JAX's mesh is over the same processes, its devices are meant; else any of the kind.
    candidates = jax_devices if sorted(ranks) == processes else available
    device_of_rank = {device.process_index: device for device in candidates}
    has_all = set(ranks) <= device_of_rank.keys()
    has_several = len(device_of_rank) < len(candidates)
    if has_several or not has_all:
        in_torch = f"torch's mesh is of the ranks {sorted(ranks)}"
        reason = f"{in_torch}, JAX's of devices of the processes {processes}"
        hint = "every rank of a DeviceMesh has one device of JAX; an xshard.Mesh counts devices"
        raise MeshError(reason, hint=hint)
    return tuple(device_of_rank[rank] for rank in ranks)


# ---- the start of processes

# XLA:CPU runs a program's devices, collectives and callbacks in one pool of threads, which wait for each
# other: with too few threads it deadlocks.
THREADS_PER_DEVICE = 4
LEAST_THREADS = 16


@api_boundary
def initialize(
    *, local_devices: Count = 1, backend: str | None = None, timeout_s: int = 300
) -> None:
    """Start torch's process group and JAX's distributed runtime in the same processes.

        torch_interop.initialize()     # in every process that torchrun has started; ranks are equal

    Call it once, before JAX's first computation, which makes its devices. An existing process group
    of torch stays. With `JAX_PLATFORMS=cpu` both frameworks use CPUs.

    Args:
        local_devices: Devices of JAX per process, on CPUs. On GPUs both frameworks use the GPU of
            LOCAL_RANK.
        backend: The backend of torch's process group; by default NCCL for GPUs and gloo for CPUs.
            JAX uses gloo for collectives of CPUs, too.
        timeout_s: How long processes wait for each other at the start.

    Raises:
        MeshError: There are no processes to join, JAX has made its devices already, or its
            processes are not torch's.
    """
    on_gpus = _uses_gpus()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            hint = "start the program by torchrun, or call torch.distributed.init_process_group() first"
            raise MeshError("no process group is initialised, and RANK is not set", hint=hint)
        if not backend:
            backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend)
    # torchrun says which GPU of the machine is this process's; without it the rank does.
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    if on_gpus:
        torch.cuda.set_device(local_rank)
    if not jax.distributed.is_initialized():
        local_device_ids = [local_rank] if on_gpus else None
        _start_jax(local_devices, local_device_ids, timeout_s)
    check_processes()


def _uses_gpus() -> bool:
    """Return whether JAX uses GPUs: there are some, and it is not limited to CPUs."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # JAX sets it by name
    limited_to_cpus = platforms is not None and platforms.startswith("cpu")
    return torch.cuda.is_available() and not limited_to_cpus


def _start_jax(local_devices: int, local_device_ids: list[int] | None, timeout_s: int) -> None:
    """Start JAX's distributed runtime with the ranks of torch's process group.

    Args:
        local_devices: Devices of JAX per process, on CPUs.
        local_device_ids: The GPUs of this process; None on CPUs.
        timeout_s: How long processes wait for each other.
    """
    # XLA:CPU makes its pool of threads from this variable.
    n_threads = max(LEAST_THREADS, THREADS_PER_DEVICE * local_devices)
    os.environ.setdefault("PJRT_NPROC", str(n_threads))
    # All ranks need the address of JAX's coordinator, which runs in rank 0: it finds a free port
    # and broadcasts it.
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("", 0))
        _, port = free.getsockname()
        address = [f"{host}:{port}"]
    dist.broadcast_object_list(address, src=0)
    try:
        # Both have to be set before JAX makes its devices; on GPUs they are without effect.
        jax.config.update("jax_num_cpu_devices", local_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address[0],
            num_processes=dist.get_world_size(),
            process_id=dist.get_rank(),
            local_device_ids=local_device_ids,
            initialization_timeout=timeout_s,
        )
    except RuntimeError as error:
        hint = (
            "call initialize() before JAX makes its devices: before its first array or computation"
        )
        raise MeshError(f"JAX cannot join the processes of torch: {error}", hint=hint) from error
