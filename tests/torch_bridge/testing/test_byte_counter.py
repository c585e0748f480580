"""The byte counter around every collective of torch: what a rank receives from others, and no error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.torch_bridge.helpers import RECENT, check_error, on_ranks
from torch_bridge.testing.byte_counter import Meter


def _sent(rank: int, source: int | None) -> None:
    if rank == 0:
        dist.send(torch.ones(6), 1)
    elif rank == 1:
        dist.recv(torch.ones(6), source)


def new() -> Tensor:
    return torch.ones(6)


def some() -> list[Tensor]:
    return [torch.ones(6) for _ in range(3)]


def _calls(rank: int) -> list[tuple[list[int], Any]]:
    """What this of three ranks receives of 24 bytes per rank, and the call that sends them."""
    x = torch.ones(6)
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (3,))
    ops = functional
    c10d = torch.ops._c10d_functional
    from_one, to_one = ([0], [24]) if rank == 1 else ([24], [0])
    return [
        ([48], lambda: dist.all_gather(some(), x)),
        ([48], lambda: dist.all_gather_into_tensor(torch.empty(18), x)),
        ([32], lambda: dist.all_reduce(new())),  # 2(n-1)/n
        ([64], lambda: dist.all_reduce_coalesced([new(), new()])),
        *([([48], lambda: dist.all_to_all(some(), some()))] if RECENT else []),
        ([16], lambda: dist.all_to_all_single(new(), x)),
        ([], dist.barrier),
        (from_one, lambda: dist.broadcast(new(), 1)),
        ([48 if rank == 1 else 0], lambda: dist.gather(x, some() if rank == 1 else None, 1)),
        ([], dist.monitored_barrier),
        ([24] if rank == 1 else [], lambda: _sent(rank, 0)),
        ([24] if rank == 1 else [], lambda: _sent(rank, None)),
        (to_one, lambda: dist.reduce(new(), 1)),
        ([48], lambda: dist.reduce_scatter(new(), some())),
        ([16], lambda: dist.reduce_scatter_tensor(torch.empty(2), x)),
        (from_one, lambda: dist.scatter(new(), some() if rank == 1 else None, 1)),
        ([48], lambda: ops.all_gather_tensor(x, 0, group).wait()),
        ([96], lambda: ops.all_gather_into_tensor_coalesced([x, x], group)),
        ([32], lambda: ops.all_reduce(x, "sum", group).wait()),
        ([64], lambda: ops.all_reduce_coalesced([x, x], "sum", group)),
        ([32], lambda: c10d.all_reduce_(new(), "sum", "0")),
        ([16], lambda: ops.all_to_all_single(x, None, None, group).wait()),
        (from_one, lambda: ops.broadcast(x, 1, group).wait()),
        ([16], lambda: ops.reduce_scatter_tensor(x, "sum", 0, group).wait()),
        ([32], lambda: ops.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)),
        ([16], lambda: torch.ops._dtensor.shard_dim_alltoall(x.view(2, 3), 0, 1, group.group_name)),
        ([8 if rank else 0, 16], lambda: distribute_tensor(x, mesh, [Shard(0)]).full_tensor()),
    ]


def _counted() -> None:
    for place, (expected, call) in enumerate(_calls(dist.get_rank())):
        with Meter() as meter:
            call()
        assert meter.received == expected, f"call {place} of the list"
    model = torch.nn.Linear(3, 2)
    with Meter() as meter:
        model = DistributedDataParallel(model)
        meter.received.clear()
        model(torch.ones(1, 3)).sum().backward()
    assert meter.received == [44]  # of gradients of 32 bytes, all-reduced

    def unknown() -> None:
        with Meter():
            torch.ops.symm_mem.one_shot_all_reduce(torch.ones(1), "sum", "0")

    check_error(unknown, "XshardError", "symm_mem.one_shot_all_reduce")


def test_every_collective_is_counted() -> None:
    on_ranks(3, _counted)
