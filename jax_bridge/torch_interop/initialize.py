"""Setting up torch and JAX in the same processes, in one call.

Decides where JAX's coordinator is and which devices a process has; torch's own processes are those of
torchrun, or of a world that is there already.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing

import jax
import torch
import torch.distributed as dist

from jax_bridge.torch_interop.devices import check_processes
from xshard import MeshError

# XLA:CPU runs a program's devices, collectives and callbacks on one pool: with fewer threads than wait for
# each other it waits for ever.
THREADS_PER_DEVICE = 4
LEAST_THREADS = 16


def initialize(*, local_devices: int = 1, backend: str | None = None, timeout_s: int = 300) -> None:
    """Make torch's process group and JAX's distributed runtime of the same processes, with equal numbers.

    Called once in every process, started by torchrun, before JAX makes its devices (its first
    computation does). What is set up already is left as it is: a process group of torch's is used.

    local_devices: devices of JAX per process, on CPUs; on GPUs it is the one of LOCAL_RANK, torch's too.
    backend: of torch's process group; NCCL for GPUs and gloo for CPUs by default. JAX's collectives of
    CPUs are gloo's too. timeout_s: how long processes wait for each other at the start.

    Raises MeshError where there are no processes to join, JAX has made its devices already, or has other
    processes than torch.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise MeshError(
                "no process group is initialised, and the environment has no RANK to make one",
                hint="start the program by torchrun, or call torch.distributed.init_process_group() first",
            )
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"))
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if not jax.distributed.is_initialized():
        _start_jax(local_devices, local_rank, timeout_s)
    check_processes()


def _start_jax(local_devices: int, local_rank: int, timeout_s: int) -> None:
    on_gpu = torch.cuda.is_available() and "cpu" not in (jax.config.read("jax_platforms") or "")
    os.environ.setdefault("PJRT_NPROC", str(max(LEAST_THREADS, THREADS_PER_DEVICE * local_devices)))
    address = [_free_address() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(address, src=0)
    try:
        jax.config.update("jax_num_cpu_devices", local_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            *(address[0], dist.get_world_size(), dist.get_rank()),
            local_device_ids=[local_rank] if on_gpu else None,
            initialization_timeout=timeout_s,
        )
    except RuntimeError as error:
        raise MeshError(
            f"JAX cannot join the {dist.get_world_size()} processes of torch: {error}",
            hint="call initialize() before JAX makes its devices: before its first array or computation",
        ) from error


def _free_address() -> str:
    """This machine as the others know it, and a port that nobody uses."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"
