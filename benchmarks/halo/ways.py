"""Three ways to widen a block by rows of its neighbours in torch, and how they are measured.

Each takes the block, the rows on either side and the mesh; beyond the edges of the array are zeros.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_bridge as xt
from benchmarks.torch_calls import Calls, Figures, calls, compared, fake_group, medians

DIM = 2  # rows of a (batch, channels, rows, columns) array
AXIS = "sp"
OURS = "xshard"


def ours(block: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    return xt.redistribute(block, f"b c h/{AXIS} w -> b c h/{AXIS}:halo({rows},{rows}) w", mesh)


def index_select(block: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """PhysicsNeMo's way: both edges by index_select, one all-to-all of all ranks, a concatenation."""
    group = mesh.get_group(AXIS)
    rank = mesh.get_local_rank(AXIS)
    n = mesh.size()
    length = block.shape[DIM]
    before = rank > 0
    after = rank < n - 1
    first = torch.arange(rows)
    last = torch.arange(length - rows, length)
    edges = [block.index_select(DIM, first)] * before + [block.index_select(DIM, last)] * after
    shape = edges[0].shape
    edge_size = edges[0].numel()
    sizes = [
        edge_size * ((i == rank - 1 and before) or (i == rank + 1 and after)) for i in range(n)
    ]
    sent = torch.cat([edge.reshape(-1) for edge in edges])
    received = funcol.wait_tensor(funcol.all_to_all_single_autograd(sent, sizes, sizes, group))
    parts = iter(received.split(edge_size))
    zeros = block.new_zeros(shape)
    lo = next(parts).view(shape) if before else zeros
    hi = next(parts).view(shape) if after else zeros
    return torch.cat([lo, block, hi], DIM)


def gathered(block: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """DTensor has no layout with overlaps: it gathers, and every rank cuts its rows out."""
    placed = DTensor.from_local(block, mesh, [Shard(DIM)], run_check=False)
    whole = placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rank = mesh.get_local_rank(AXIS)
    length = block.shape[DIM]
    padded = torch.nn.functional.pad(whole, (0, 0, rows, rows))
    return padded.narrow(DIM, rank * length, length + 2 * rows)


WAYS = {OURS: ours, "index_select + all_to_all": index_select, "DTensor, gathered": gathered}


def end_to_end(shape: Sequence[int], rows: int, rounds: int) -> Figures:
    """Median seconds and received bytes of every way, on one of several gloo ranks."""
    block = torch.arange(float(torch.Size(shape).numel())).view(*shape) % 97
    figures = compared(_calls(block, rows), rounds)
    for each in figures.values():
        each["received_bytes"] = each.pop("forward_bytes") + each.pop("both_bytes")
    return figures


def host(shape: Sequence[int], rows: int, ranks: int, rounds: int) -> Figures:
    """Seconds that the host needs per call: no rank waits for another, nothing is sent."""
    with fake_group(ranks):
        return medians(_calls(torch.ones(*shape), rows), rounds)


def _calls(block: Tensor, rows: int) -> dict[str, Calls]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    return {name: calls(lambda x, way=way: way(x, rows, mesh), block) for name, way in WAYS.items()}
