"""A plan of a tree as one process carries it out, bucket by bucket.

Decides what is held at a time, and when a donated block is given back. Knows no rules.
"""

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
from xshard.state import ArrayPlan, TreePlan
from xshard.state.progress import Progress, reporting


@torch.no_grad()
def carry(
    plan: TreePlan,
    blocks: MutableMapping[str, Tensor],
    tensor_device: torch.device,
    group: dist.ProcessGroup,
    *,
    donate: bool = False,
    progress: Progress = False,
) -> dict[str, Tensor] | None:
    """This process's blocks here, by name -> new ones there, or None where it is not in the destination.

    All of `group`, whose ranks the devices of the plan are, call it. donate: a block's memory is given back
    when the last bucket that has a part of it has gone. progress: as in `transfer`.
    """
    me = rank_in(group)
    at_src, at_dst = (
        devices.index(me) if me in devices else None for devices in (plan.src_devices, plan.dst_devices)
    )
    last = {move.name: bucket for bucket in plan.buckets for array in bucket for move in array.moves}
    found: dict[str, Tensor] = {}
    with reporting(progress, plan.bytes_moved, group.rank() == 0) as report:
        for bucket in plan.buckets:
            moves = [move for array in bucket for move in array.moves]
            crossings = [cross(move.plan, tensor_device, group) for move in moves]
            parts = [
                torch.empty(0, dtype=getattr(torch, move.plan.dtype), device=tensor_device)
                if at_src is None
                else _at(blocks[move.name], move.src.at(at_src)).to(
                    tensor_device, getattr(torch, move.plan.dtype)
                )
                for move in moves
            ]
            results = iter(run_together(crossings, parts))
            for array in bucket:
                own = [next(results) for _ in array.moves]
                if at_dst is not None:
                    found[array.name] = _joined(array, own, at_dst)
            if donate:
                for name in [name for name in blocks if last.get(name) is bucket]:
                    _give_back(blocks.pop(name))
            report(sum(array.traffic.total() for array in bucket))
    return found if at_dst is not None else None


def _joined(array: ArrayPlan, parts: list[Tensor], device: int) -> Tensor:
    """The block of an array, of the parts that its moves bring."""
    dtype = getattr(torch, array.dtype)
    if len(parts) == 1 and not array.moves[0].dst.side.at:
        return parts[0].to(dtype)
    out = parts[0].new_empty(array.sharding.local_shape(device), dtype=dtype)
    for move, part in zip(array.moves, parts, strict=True):
        _bits(out)[_index(move.dst.at(device))] = _bits(part.to(dtype))
    return out


def _at(block: Tensor, index: tuple[Any, ...]) -> Tensor:
    return _bits(block)[_index(index)].view(block.dtype) if index else block


def _bits(x: Tensor) -> Tensor:
    """Values of dtypes that torch only stores, as others of their size."""
    return x.view(CARRIERS.get(x.dtype, x.dtype))


def _index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows for rows in index)


def _give_back(block: Tensor) -> None:
    """Free the memory of a block that has it for itself, which a view of a larger tensor has not."""
    storage = block.untyped_storage()
    if storage.nbytes() == block.nbytes and storage.resizable():
        storage.resize_(0)
