"""`initialize`: sets up torch and JAX in the same processes.

torch's processes come from torchrun, or from a process group that exists already.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing

import jax
import torch
import torch.distributed as dist

from jax_bridge.torch_interop.devices import check_processes
from xshard.errors import MeshError

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
            raise MeshError(
                "no process group is initialised, and RANK is not set",
                hint="start the program by torchrun, or call torch.distributed.init_process_group() first",
            )
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
    address = [_free_address() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(address, src=0)
    try:
        jax.config.update("jax_num_cpu_devices", local_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            *(address[0], dist.get_world_size(), dist.get_rank()),
            local_device_ids=[local_rank] if _on_gpus() else None,
            initialization_timeout=timeout_s,
        )
    except RuntimeError as error:
        raise MeshError(
            f"JAX cannot join the {dist.get_world_size()} processes of torch: {error}",
            hint="call initialize() before JAX makes its devices: before its first array or computation",
        ) from error


def _free_address() -> str:
    """The address of this machine for the other processes, with a free port."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"
