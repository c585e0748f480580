"""A tree plan as one process executes it, bucket by bucket."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.transfer import cross, run_together
from torch_bridge.mesh.process_groups import rank_in
from xshard.state.progress import Progress, reporting
from xshard.state.tree_plan import ArrayPlan, TreePlan


@torch.no_grad()
def execute(
    plan: TreePlan,
    blocks: MutableMapping[str, Tensor],
    tensor_device: torch.device,
    group: dist.ProcessGroup,
    *,
    donate: bool = False,
    progress: Progress = None,
) -> dict[str, Tensor] | None:
    """Source blocks of this process by name -> its destination blocks; None outside of the destination mesh.

    All of `group` call it; its ranks are the devices of the plan. donate: free a block's memory after the
    last bucket that has a part of it. progress: as in `transfer`.
    """
    rank = rank_in(group)
    src, dst = (
        devices.index(rank) if rank in devices else None for devices in (plan.src_devices, plan.dst_devices)
    )
    last = {move.name: bucket for bucket in plan.buckets for array in bucket for move in array.moves}
    received: dict[str, Tensor] = {}
    with reporting(progress, plan.bytes_moved, group.rank() == 0) as report:
        for bucket in plan.buckets:
            moves = [move for array in bucket for move in array.moves]
            parts = []
            for move in moves:
                dtype = getattr(torch, move.plan.dtype)
                if src is None:
                    parts.append(torch.empty(0, dtype=dtype, device=tensor_device))
                else:
                    part = _part(blocks[move.name], move.src.numpy_index(src))
                    parts.append(part.to(tensor_device, dtype))
            crossings = [cross(move.plan, tensor_device, group) for move in moves]
            results = iter(run_together(crossings, parts))
            for array in bucket:
                arrived = [next(results) for _ in array.moves]
                if dst is not None:
                    received[array.name] = _assembled(array, arrived, dst)
            if donate:
                for name in [name for name in blocks if last.get(name) is bucket]:
                    _free(blocks.pop(name))
            report(sum(array.traffic.total() for array in bucket))
    return received if dst is not None else None


def _assembled(array: ArrayPlan, parts: list[Tensor], device: int) -> Tensor:
    """The block of an array from the parts that its moves bring."""
    dtype = getattr(torch, array.dtype)
    if len(parts) == 1 and not array.moves[0].dst.part.numpy_index:
        return parts[0].to(dtype)
    out = parts[0].new_empty(array.sharding.local_shape(device), dtype=dtype)
    for move, part in zip(array.moves, parts, strict=True):
        _bits(out)[_index(move.dst.numpy_index(device))] = _bits(part.to(dtype))
    return out


def _part(block: Tensor, index: tuple[Any, ...]) -> Tensor:
    return _bits(block)[_index(index)].view(block.dtype) if index else block


def _bits(x: Tensor) -> Tensor:
    """The same bits as a dtype that torch can index and copy."""
    return x.view(CARRIERS.get(x.dtype, x.dtype))


def _index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows for rows in index)


def _free(block: Tensor) -> None:
    """Free the memory of a block, unless it is a view of a larger tensor."""
    storage = block.untyped_storage()
    if storage.nbytes() == block.nbytes and storage.resizable():
        storage.resize_(0)
