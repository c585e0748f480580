"""A plan as a careful user writes it by hand: torch.distributed, and chunk, stack and cat around it.

One function per step, for even cuts into contiguous pieces with axes in mesh order; a plan with any other
step has no such form here.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import xshard as xs
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard.cost.model import LOCAL
from xshard.plans.plan import Stage
from xshard.steps import AllGather, AllReduce, AllToAll, Permute, ReduceScatter, Retag, Slice
from xshard.steps.base import axes_of
from xshard.steps.permute import sender_of_each_device

BlockMove = Callable[[Tensor], Tensor]
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sequence(plan: xs.Plan, processes: ProcessMesh) -> BlockMove | None:
    """The plan's collectives, one after the other; None if one has no such form, or if there are none."""
    moves = [_move(stage, processes) for stage in plan.stages]
    if any(move is None for move in moves) or all(step.kind in LOCAL for step in plan.steps):
        return None

    def run(block: Tensor) -> Tensor:
        for move in moves:
            block = move(block)
        return block

    return run


def _move(stage: Stage, processes: ProcessMesh) -> BlockMove | None:
    step = stage.step
    mesh = processes.mesh
    me = processes.device
    index = stage.before.dim_index

    def group(axes: Sequence[str]) -> dist.ProcessGroup | None:
        in_order = list(axes) == sorted(axes, key=mesh.position)
        return processes.group(axes).process_group if in_order else None

    if isinstance(step, Retag):
        return lambda block: block
    if isinstance(step, AllReduce):
        return lambda block: _reduced(block, group(sorted(step.axes, key=mesh.position)))
    if isinstance(step, Permute):
        sender = sender_of_each_device(stage.before, stage.after)
        ranks = processes.ranks
        return lambda block: _sent(block, ranks[sender.index(me)], ranks[sender[me]])
    if isinstance(step, Slice):
        cuts = [
            (index(dim), mesh.size(*axes_of(cut)), mesh.index(me, axes_of(cut)))
            for dim, cut in step.cuts
        ]
        return lambda block: _sliced(block, cuts)
    if isinstance(step, AllGather | ReduceScatter):
        ranks_ = group(axes_of(step.shards))
        dim = index(step.dim)
        move = _gathered if isinstance(step, AllGather) else _scattered
        return None if ranks_ is None else lambda block: move(block, dim, ranks_)
    if isinstance(step, AllToAll):
        ranks_ = group(axes_of(step.src_shards))
        if ranks_ is None or axes_of(step.src_shards) != axes_of(step.dst_shards):
            return None
        return lambda block: _turned(block, index(step.src_dim), index(step.dst_dim), ranks_)
    return None


def _sliced(block: Tensor, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, n, i in cuts:
        block = block.chunk(n, dim)[i]
    return block.contiguous()


def _reduced(block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    out = block.clone()
    dist.all_reduce(out, group=group)
    return out


def _gathered(block: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    out = block.new_empty((n * block.shape[0], *block.shape[1:]))
    all_gather(out, block.contiguous(), group=group)
    return out if dim == 0 else torch.cat(out.chunk(n), dim)


def _scattered(block: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    parts = block if dim == 0 else torch.cat(block.chunk(n, dim))
    out = parts.new_empty((parts.shape[0] // n, *parts.shape[1:]))
    reduce_scatter(out, parts.contiguous(), group=group)
    return out


def _turned(block: Tensor, src: int, dst: int, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    parts = block.contiguous() if dst == 0 else torch.cat(block.chunk(n, dst))
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out if src == 0 else torch.cat(out.chunk(n), src)


def _sent(block: Tensor, to: int, of: int) -> Tensor:
    if to == of == dist.get_rank():
        return block.clone()
    out = torch.empty_like(block)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, block.contiguous(), to), dist.P2POp(dist.irecv, out, of)]
    )
    for pending in work:
        pending.wait()
    return out
