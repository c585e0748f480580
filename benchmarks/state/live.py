"""A trainer's weights become a server's, on ranks of two nodes with a slow link: ours and torch's own.

Every way starts from the same DTensors; bytes are counted on the link of the busiest node.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, placement_types

import torch_bridge as xt
import xshard as xs
from benchmarks import by_turns
from benchmarks.claim import Row
from benchmarks.planner.traffic import node_elements
from benchmarks.state import weights
from benchmarks.state.torch_loads import as_dtensor
from benchmarks.state.weights import DTENSOR, EXCHANGING, OURS, STATE_DICT
from benchmarks.torch_redistribute.run_time import all_to_all

NODES = 2
PER_NODE = 2
RATE = "400mbit"
SCALE = 4
QUICK_SCALE = 64  # 130 MiB in float32, or half a MiB
# The layouts there, and the mesh of the server; along dp, from node to node, it has all weights twice.
SERVERS = {
    "to tensor parallelism": xs.Mesh(tp=4),
    "to two servers, one a node": xs.Mesh(dp=2, tp=2),
}


def rows(scale: int, rounds: int) -> list[Row]:
    """A row per server. On every rank."""
    return [_row(name, mesh, scale, rounds) for name, mesh in SERVERS.items()]


def _row(name: str, server: xs.Mesh, scale: int, rounds: int) -> Row:
    rank = dist.get_rank()
    n = server.n_devices
    # A DTensor moves on one mesh, so the trainer's has the server's axes; the blocks are as on one axis.
    mesh = init_device_mesh("cpu", server.sizes, mesh_dim_names=server.axes)
    cut = "/".join(("o", *server.axes))
    src, dst = (
        weights.shardings(rules, server, scale) for rules in ({"**": f"{cut} ..."}, weights.SERVED)
    )
    tree = {}
    for i, (key, sharding) in enumerate(src.items()):
        block = torch.rand(
            sharding.local_shape(rank), generator=torch.Generator().manual_seed(n * i + rank)
        )
        tree[key] = as_dtensor(block, sharding, mesh)
    placements = {key: xt.dtensor.to_placements(each.layout, mesh) for key, each in dst.items()}

    def redistributed() -> dict[str, Tensor]:
        return {
            key: x.redistribute(placements=placements[key]).to_local() for key, x in tree.items()
        }

    ways: dict[str, Callable[[], dict[str, Tensor]]] = {
        OURS: lambda: xt.transfer(
            tree, (None, weights.SERVED), dst_mesh=mesh, profile=f"gloo:{PER_NODE}"
        ),
        DTENSOR: redistributed,
        EXCHANGING: lambda: _exchanging(redistributed),
        STATE_DICT: lambda: _by_state_dict(tree, dst, mesh),
    }
    expected = ways[OURS]()
    across = {}
    for way, call in ways.items():
        dist.barrier()
        before = _received()
        received = call()
        dist.barrier()
        across[way] = torch.tensor(_received() - before)
        dist.all_reduce(across[way], dist.ReduceOp.MAX)
        assert all(torch.equal(_local(received[key]), _local(x)) for key, x in expected.items()), (
            way
        )
    lacking = sum(node_elements(src[key], dst[key], PER_NODE) for key in src)
    return {
        "case": name,
        "bound_bytes": 4 * int(lacking.max()),
        "across_bytes": {way: int(n_bytes) for way, n_bytes in across.items()},
        "seconds": by_turns.slowest(ways, rounds, warm_up=0),
    }


def _exchanging(call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The call as DTensor makes it on GPUs: on CPUs it gathers, though gloo has an all-to-all."""
    with mock.patch.object(placement_types, "shard_dim_alltoall", all_to_all):
        return call()


def _by_state_dict(
    tree: dict[str, DTensor], dst: dict[str, xs.Sharding], mesh: Any
) -> dict[str, Tensor]:
    """Gathered on rank 0, and broadcast from there."""
    blocks = {
        key: as_dtensor(torch.empty(x.local_shape(dist.get_rank())), x, mesh)
        for key, x in dst.items()
    }
    trainer, server = (
        nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in each.values())
        for each in (tree, blocks)
    )
    gather = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = state_dict.get_model_state_dict(trainer, options=gather)
    state_dict.set_model_state_dict(server, full, options=broadcast)
    return {key: x.to_local() for key, x in zip(tree, server.parameters(), strict=True)}


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _received() -> int:
    """Bytes that this rank's node has received on its link, with all headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(
        int(line.partition(":")[2].split()[0]) for line in lines if line.strip().startswith("eth0")
    )
