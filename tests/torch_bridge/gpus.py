"""Ranks with GPUs, several of which may share one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.torch_bridge.helpers import on_ranks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def on_gpus(n: int, backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `on_ranks`, in a world of another backend whose ranks have GPUs."""
    return on_ranks(n, _with_gpu, backend, function, args)


def _with_gpu(backend: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank = dist.get_rank()
    n = dist.get_world_size()
    store = c10d._get_default_store()
    dist.destroy_process_group()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    if n > torch.cuda.device_count():
        # NCCL refuses two ranks of one host on one GPU: let each be a host of its own, behind a socket.
        os.environ |= {
            "NCCL_HOSTID": f"rank {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(backend, store),
        rank=rank,
        world_size=n,
        device_id=None if backend == "gloo" else device,
    )
    return function(*args)
