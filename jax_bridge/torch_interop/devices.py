"""The processes and devices that torch and JAX share: every device of torch's mesh is a device of JAX."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import torch
import torch.distributed as dist
from jax.sharding import Mesh as JaxMesh
from torch.distributed.device_mesh import DeviceMesh

from jax_bridge.mesh.context import xshard_mesh
from jax_bridge.state.execute import all_devices
from torch_bridge.mesh.process_mesh import mesh_of
from xshard import Mesh
from xshard.errors import MeshError

# JAX's names of platforms -> torch's names of kinds of devices.
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}

TorchMesh = DeviceMesh | Mesh


@dataclass(frozen=True, eq=False)
class MeshPair:
    """JAX's mesh and torch's `axes`; devices: the device of JAX for each device of torch's mesh."""

    jax_mesh: JaxMesh
    jax_axes: Mesh
    jax_devices: tuple[jax.Device, ...]
    axes: Mesh
    devices: tuple[jax.Device, ...]

    @cached_property
    def local(self) -> tuple[int, ...]:
        """This process's devices in torch's mesh, in its order."""
        return tuple(
            i for i, d in enumerate(self.devices) if d.process_index == jax.process_index()
        )

    @cached_property
    def kind(self) -> str:
        """Torch's name for the kind of devices: "cpu" or "cuda". Raises MeshError for others."""
        platform = self.devices[0].platform
        if platform not in KINDS:
            hint = f"torch shares memory with devices of: {', '.join(KINDS)}; jax.device_get(array) copies"
            raise MeshError(
                f"JAX's mesh is of {platform} devices, which torch does not share", hint=hint
            )
        return KINDS[platform]

    @cached_property
    def every(self) -> tuple[jax.Device, ...]:
        """The devices of both meshes, by process and id."""
        return _ordered({*self.devices, *self.jax_devices})

    @cached_property
    def is_one_each(self) -> bool:
        """True if every process has one device, as torch assumes."""
        return len({d.process_index for d in self.every}) == len(self.every)

    @cached_property
    def by_number(self) -> dict[int, jax.Device]:
        """Devices by a plan's numbers: ranks, or positions by process and id if processes have several."""
        numbers = (d.process_index if self.is_one_each else i for i, d in enumerate(self.every))
        return dict(zip(numbers, self.every, strict=True))

    def numbers(self, devices: Sequence[jax.Device]) -> tuple[int, ...]:
        """The numbers of devices in a plan."""
        number_of = {device: number for number, device in self.by_number.items()}
        return tuple(number_of[device] for device in devices)


def mesh_pair(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None = None) -> MeshPair:
    """Match the two meshes; without torch_mesh, torch's mesh equals JAX's."""
    if not isinstance(jax_mesh, JaxMesh):
        hint = "pass a jax.sharding.Mesh of devices"
        raise MeshError(f"{type(jax_mesh).__name__} {jax_mesh} is not a mesh of devices", hint=hint)
    check_processes()
    return _matched(jax_mesh, torch_mesh)


def check_one_block(meshes: MeshPair, what: str) -> None:
    """Raise MeshError if a process has several blocks but `what` one."""
    if not meshes.is_one_each:
        reason = f"a process has several devices in JAX's {meshes.jax_axes!r}, {what} one block"
        raise MeshError(reason, hint="one tensor per local device, in a list")


def check_processes() -> None:
    """Raise MeshError if torch and JAX do not run in the same processes."""
    in_jax = f"process {jax.process_index()} of {jax.process_count()}"
    in_torch = (
        f"process {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else in_jax
    )
    if in_torch != in_jax:
        hint = "jax_bridge.torch_interop.initialize() sets both up, before JAX makes its devices"
        raise MeshError(f"for torch this is {in_torch}, for JAX {in_jax}", hint=hint)


@functools.lru_cache(maxsize=256)
def _matched(jax_mesh: JaxMesh, torch_mesh: TorchMesh | None) -> MeshPair:
    in_jax = in_torch = xshard_mesh(jax_mesh), tuple(jax_mesh.devices.flat)
    if torch_mesh is not None:
        axes = mesh_of(torch_mesh)
        in_torch = axes, _torch_devices(torch_mesh, axes, in_jax[1])
    meshes = MeshPair(jax_mesh, *in_jax, *in_torch)
    if all(d.process_index != jax.process_index() for d in meshes.every):
        torchs = "" if torch_mesh is None else f" or torch's {meshes.axes!r}"
        reason = (
            f"process {jax.process_index()} is outside of JAX's mesh {dict(jax_mesh.shape)}{torchs}"
        )
        raise MeshError(reason, hint="call this in the processes of the mesh only")
    return meshes


def _torch_devices(
    torch_mesh: TorchMesh, axes: Mesh, jax_devices: tuple[jax.Device, ...]
) -> tuple[jax.Device, ...]:
    """The device of JAX for each rank of a `DeviceMesh`, or in order for an `xshard.Mesh`."""
    every = all_devices(jax_devices[0])
    if not isinstance(torch_mesh, DeviceMesh):
        if len(jax_devices) == axes.n_devices:
            return _ordered(jax_devices)
        if len(every) < axes.n_devices:
            hint = "every block of torch is on a device of JAX of its own, in JAX's mesh or not"
            raise MeshError(
                f"torch's {axes!r} has {axes.n_devices} devices, JAX has {len(every)}", hint=hint
            )
        return tuple(every[: axes.n_devices])
    ranks = torch_mesh.mesh.flatten().tolist()
    processes = sorted(d.process_index for d in jax_devices)
    candidates = jax_devices if sorted(ranks) == processes else every
    of_rank = {d.process_index: d for d in candidates}
    if not set(ranks) <= set(of_rank) or len(of_rank) < len(candidates):
        what = f"torch's mesh is of the ranks {sorted(ranks)}, JAX's of devices of the processes {processes}"
        hint = "every rank of a DeviceMesh has one device of JAX; an xshard.Mesh counts devices"
        raise MeshError(what, hint=hint)
    return tuple(of_rank[rank] for rank in ranks)


def _ordered(devices: Iterable[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(sorted(devices, key=lambda d: (d.process_index, d.id)))


# XLA:CPU runs a program's devices, collectives and callbacks in one pool of threads, which wait for each
# other: with too few threads it deadlocks.
THREADS_PER_DEVICE = 4
LEAST_THREADS = 16


def initialize(*, local_devices: int = 1, backend: str | None = None, timeout_s: int = 300) -> None:
    """Start torch's process group and JAX's distributed runtime in the same processes, with equal ranks.

    Call it once in every process started by torchrun, before JAX's first computation, which makes its
    devices. An existing process group of torch stays.

    local_devices: devices of JAX per process, on CPUs; on GPUs both frameworks use the GPU of LOCAL_RANK.
    With `JAX_PLATFORMS=cpu` both use CPUs.
    backend: the backend of torch's process group; by default NCCL for GPUs and gloo for CPUs. JAX uses gloo
    for collectives of CPUs too. timeout_s: how long processes wait for each other at the start.

    Raises MeshError if there are no processes to join, if JAX has made its devices already, or if its
    processes are not torch's.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            hint = "start the program by torchrun, or call torch.distributed.init_process_group() first"
            raise MeshError("no process group is initialised, and RANK is not set", hint=hint)
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if _on_gpus() else "gloo"))
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    if _on_gpus():
        torch.cuda.set_device(local_rank)
    if not jax.distributed.is_initialized():
        _start_jax(local_devices, local_rank, timeout_s)
    check_processes()


def _on_gpus() -> bool:
    """True if there are GPUs, and JAX is not limited to CPUs."""
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    return torch.cuda.is_available() and not platforms.startswith("cpu")


def _start_jax(local_devices: int, local_rank: int, timeout_s: int) -> None:
    os.environ.setdefault("PJRT_NPROC", str(max(LEAST_THREADS, THREADS_PER_DEVICE * local_devices)))
    with socket.socket() as free:
        free.bind(("", 0))
        address = [f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{free.getsockname()[1]}"]
    dist.broadcast_object_list(address, src=0)
    try:
        jax.config.update("jax_num_cpu_devices", local_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        options: Any = {"local_device_ids": [local_rank] if _on_gpus() else None}
        options |= {"num_processes": dist.get_world_size(), "process_id": dist.get_rank()}
        jax.distributed.initialize(address[0], initialization_timeout=timeout_s, **options)
    except RuntimeError as error:
        hint = (
            "call initialize() before JAX makes its devices: before its first array or computation"
        )
        raise MeshError(f"JAX cannot join the processes of torch: {error}", hint=hint) from error
