"""Ways to widen a block by rows of its neighbours in torch: ours, and what others do.

Each is a function of the block, the rows on either side and what `prepare` made; beyond the ends are zeros.
Forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_bridge as xt

DIM = 2  # rows of a (batch, channels, rows, columns) array
AXIS = "sp"


@dataclass(frozen=True)
class Way:
    """prepare: runs once, on all ranks. widen: (block, rows, what `prepare` made) -> the widened block."""

    name: str
    prepare: Callable[[], DeviceMesh]
    widen: Callable[[Tensor, int, DeviceMesh], Tensor]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))


def ours(block: Tensor, rows: int, ranks: DeviceMesh) -> Tensor:
    return xt.redistribute(block, f"b c h/{AXIS} w -> b c h/{AXIS}:halo({rows},{rows}) w", ranks)


def index_select(block: Tensor, rows: int, ranks: DeviceMesh) -> Tensor:
    """PhysicsNeMo's way: both edges by index_select, one all-to-all of all ranks, a concatenation."""
    group, rank, n = ranks.get_group(AXIS), ranks.get_local_rank(AXIS), ranks.size()
    length = block.shape[DIM]
    before, after = rank > 0, rank < n - 1
    first, last = torch.arange(rows), torch.arange(length - rows, length)
    edges = [block.index_select(DIM, first)] * before + [block.index_select(DIM, last)] * after
    edge_size = edges[0].numel()
    sizes = [edge_size * ((i == rank - 1 and before) or (i == rank + 1 and after)) for i in range(n)]
    sent = torch.cat([edge.reshape(-1) for edge in edges])
    received = funcol.all_to_all_single_autograd(sent, sizes, sizes, group)
    received = funcol.wait_tensor(received)
    parts = iter(received.split(edge_size))
    shape = edges[0].shape
    zeros = block.new_zeros(shape)
    lo = next(parts).view(shape) if before else zeros
    hi = next(parts).view(shape) if after else zeros
    return torch.cat([lo, block, hi], DIM)


def replicate(block: Tensor, rows: int, ranks: DeviceMesh) -> Tensor:
    """DTensor has no layout with overlaps: it gathers, and every rank cuts its rows out."""
    placed = DTensor.from_local(block, ranks, [Shard(DIM)], run_check=False)
    whole = placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rank, length = ranks.get_local_rank(AXIS), block.shape[DIM]
    padded = torch.nn.functional.pad(whole, (0, 0, rows, rows))
    return padded.narrow(DIM, rank * length, length + 2 * rows)


WAYS = (
    Way("xshard", mesh, ours),
    Way("index_select + all_to_all", mesh, index_select),
    Way("DTensor, gathered", mesh, replicate),
)
