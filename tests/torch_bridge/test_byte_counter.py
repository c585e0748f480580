"""The byte counter around every collective of torch: what a rank receives from others, and no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.torch_bridge.helpers import RECENT, error_of, on_ranks
from torch_bridge.testing.byte_counter import Meter

# What each of three ranks receives of 24 bytes per rank, by the call that sends them.
EXPECTED: dict[str, list[list[int]]] = {
    "all_gather": [[48]] * 3,
    "all_gather_into_tensor": [[48]] * 3,
    "all_reduce": [[32]] * 3,  # 2(n-1)/n
    "all_reduce_coalesced": [[64]] * 3,
    **({"all_to_all": [[48]] * 3} if RECENT else {}),
    "all_to_all_single": [[16]] * 3,
    "barrier": [[]] * 3,
    "broadcast": [[24], [0], [24]],
    "gather": [[0], [48], [0]],
    "monitored_barrier": [[]] * 3,
    "recv": [[], [24], []],
    "recv, from anyone": [[], [24], []],
    "reduce": [[0], [24], [0]],
    "reduce_scatter": [[48]] * 3,
    "reduce_scatter_tensor": [[16]] * 3,
    "scatter": [[24], [0], [24]],
    "functional all_gather": [[48]] * 3,
    "functional all_gather, coalesced": [[96]] * 3,
    "functional all_reduce": [[32]] * 3,
    "functional all_reduce, coalesced": [[64]] * 3,
    "functional all_reduce, in place": [[32]] * 3,
    "functional all_to_all": [[16]] * 3,
    "functional broadcast": [[24], [0], [24]],
    "functional reduce_scatter": [[16]] * 3,
    "functional reduce_scatter, coalesced": [[32]] * 3,
    "shard_dim_alltoall": [[16]] * 3,
    "DTensor": [[0, 16], [8, 16], [8, 16]],
}


def _sent(rank: int, source: int | None) -> None:
    if rank == 0:
        dist.send(torch.ones(6), 1)
    elif rank == 1:
        dist.recv(torch.ones(6), source)


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    x, group = torch.ones(6), dist.group.WORLD
    mesh = init_device_mesh("cpu", (3,))

    def new() -> torch.Tensor:
        return torch.ones(6)

    def some() -> list[torch.Tensor]:
        return [torch.ones(6) for _ in range(3)]

    return {
        "all_gather": lambda: dist.all_gather(some(), x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(18), x),
        "all_reduce": lambda: dist.all_reduce(new()),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([new(), new()]),
        **({"all_to_all": lambda: dist.all_to_all(some(), some())} if RECENT else {}),
        "all_to_all_single": lambda: dist.all_to_all_single(new(), x),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(new(), 1),
        "gather": lambda: dist.gather(x, some() if rank == 1 else None, 1),
        "monitored_barrier": dist.monitored_barrier,
        "recv": lambda: _sent(rank, 0),
        "recv, from anyone": lambda: _sent(rank, None),
        "reduce": lambda: dist.reduce(new(), 1),
        "reduce_scatter": lambda: dist.reduce_scatter(new(), some()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), x),
        "scatter": lambda: dist.scatter(new(), some() if rank == 1 else None, 1),
        "functional all_gather": lambda: functional.all_gather_tensor(x, 0, group).wait(),
        "functional all_gather, coalesced": lambda: functional.all_gather_into_tensor_coalesced(
            [x, x], group
        ),
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group).wait(),
        "functional all_reduce, coalesced": lambda: functional.all_reduce_coalesced([x, x], "sum", group),
        "functional all_reduce, in place": lambda: torch.ops._c10d_functional.all_reduce_(new(), "sum", "0"),
        "functional all_to_all": lambda: functional.all_to_all_single(x, None, None, group).wait(),
        "functional broadcast": lambda: functional.broadcast(x, 1, group).wait(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group).wait(),
        "functional reduce_scatter, coalesced": lambda: functional.reduce_scatter_tensor_coalesced(
            [x, x], "sum", [0, 0], group
        ),
        "shard_dim_alltoall": lambda: torch.ops._dtensor.shard_dim_alltoall(
            x.view(2, 3), 0, 1, group.group_name
        ),
        "DTensor": lambda: distribute_tensor(x, mesh, [Shard(0)]).full_tensor(),
    }


def _counted() -> tuple[dict[str, list[int]], list[int], tuple[str, str]]:
    found = {}
    for name, call in _calls(dist.get_rank()).items():
        with Meter() as meter:
            call()
        found[name] = meter.received
    model = torch.nn.Linear(3, 2)
    with Meter() as meter:
        model = DistributedDataParallel(model)
        meter.received.clear()
        model(torch.ones(1, 3)).sum().backward()

    def unknown() -> None:
        with Meter():
            torch.ops.symm_mem.one_shot_all_reduce(torch.ones(1), "sum", "0")

    return found, meter.received, error_of(unknown)


def test_every_collective_is_counted() -> None:
    for rank, (found, of_gradients, unknown) in enumerate(on_ranks(3, _counted)):
        assert found == {name: counts[rank] for name, counts in EXPECTED.items()}
        assert of_gradients == [44]  # 32 bytes, all-reduced
        assert unknown[0] == "XshardError" and "symm_mem.one_shot_all_reduce" in unknown[1]
