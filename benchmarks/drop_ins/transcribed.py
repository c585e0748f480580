"""The replaced systems' own steps and copies, written with raw collectives.

Each is a function of a block, over all ranks, and follows the system's code.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

HALO = 2


def zigzag(parts: int) -> Tensor:
    """The chunks as ranks hold them: 0, n-1, 1, n-2, ..."""
    low = torch.arange(parts // 2)
    return torch.stack([low, parts - 1 - low], 1).flatten()


def permuted(x: Tensor, order: Tensor) -> Tensor:
    batch, channels, length = x.shape
    return x.reshape(batch, channels, len(order), -1).index_select(2, order).reshape(batch, channels, length)


def gathered_sequence(x: Tensor) -> Tensor:
    """[B, C, l] -> [B, C/P, L]: an all-to-all of channels, joined along the sequence in natural order."""
    n, (batch, channels, length) = dist.get_world_size(), x.shape
    sent = x.reshape(batch, n, channels // n, length).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    y = received.movedim(0, 2).reshape(batch, channels // n, n * length)
    return permuted(y, zigzag(2 * n).argsort())


def split_sequence(x: Tensor) -> Tensor:
    """[B, C/P, L] -> [B, C, l]: the inverse of `gathered_sequence`."""
    n, (batch, channels, length) = dist.get_world_size(), x.shape
    ordered = permuted(x, zigzag(2 * n))
    sent = ordered.reshape(batch, channels, n, length // n).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.movedim(0, 1).reshape(batch, n * channels, length // n)


class SplitToFull(Function):
    """nvSubquadratic's `AllToAllSingleFunction`, "split_to_full"."""

    @staticmethod
    def forward(ctx, x):
        return gathered_sequence(x)

    @staticmethod
    def backward(ctx, gradient):
        return split_sequence(gradient.contiguous())


class AllGatherGrad(Function):
    """ksuit's `AllGatherGradAutograd`: reduces the gradients of all slots and keeps one."""

    @staticmethod
    def forward(ctx, x):
        blocks = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(blocks, x)
        return tuple(blocks)

    @staticmethod
    def backward(ctx, *gradients):
        stacked = torch.stack(gradients)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


def gathered_overwritten(x: Tensor) -> list[Tensor]:
    """ksuit's `AllGatherGradOverwrite`."""
    with torch.no_grad():
        blocks = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(blocks, x)
    blocks[dist.get_rank()] = x
    return blocks


class ReducedSum(Function):
    """A sum that passes its gradient on unchanged."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SummedGradient(Function):
    """poptorch's sum of gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class AllToAllSingle(Function):
    """poptorch's `all_to_all_single_cross_replica`."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return AllToAllSingle.apply(gradient.contiguous())


class Halo(Function):
    """CREDIT's `HaloExchange` along the rows of [B, C, H, W]: point-to-point, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        before, after = _exchanged(x[:, :, :HALO], x[:, :, -HALO:])
        return torch.cat([before, x, after], 2)

    @staticmethod
    def backward(ctx, gradient):
        before, after = _exchanged(gradient[:, :, :HALO], gradient[:, :, -HALO:])
        own = gradient[:, :, HALO:-HALO].clone()
        own[:, :, :HALO] += before
        own[:, :, -HALO:] += after
        return own


def _exchanged(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks before and after -> their rows; zeros where there is no such rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received, operations = [], []
    for rows, other in ((first.contiguous(), rank - 1), (last.contiguous(), rank + 1)):
        received.append(torch.zeros_like(rows))
        if 0 <= other < n:
            operations.append(dist.P2POp(dist.isend, rows, other))
            operations.append(dist.P2POp(dist.irecv, received[-1], other))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received[0], received[1]
