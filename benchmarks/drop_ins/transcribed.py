"""The replaced systems' own steps and copies, written with raw collectives.

Each is a function of a block, over all ranks, and follows the system's code.
"""

from collections.abc import Callable
from typing import Any

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
    return (
        x.reshape(batch, channels, len(order), -1)
        .index_select(2, order)
        .reshape(batch, channels, length)
    )


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[[Tensor], Any]:
    """A function of a block whose gradient is written by hand, as the systems have it."""

    class Written(Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(*gradients)

    return Written.apply


def all_reduced(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def all_gathered(x: Tensor) -> list[Tensor]:
    blocks = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, x)
    return blocks


def exchanged(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def gathered_sequence(x: Tensor, exchange: Callable[[Tensor], Tensor] = exchanged) -> Tensor:
    """[B, C, l] -> [B, C/P, L]: an all-to-all of channels, joined along the sequence in natural order."""
    n, (batch, channels, length) = dist.get_world_size(), x.shape
    sent = x.reshape(batch, n, channels // n, length).movedim(1, 0).contiguous()
    y = exchange(sent).movedim(0, 2).reshape(batch, channels // n, n * length)
    return permuted(y, zigzag(2 * n).argsort())


def split_sequence(x: Tensor) -> Tensor:
    """[B, C/P, L] -> [B, C, l]: the inverse of `gathered_sequence`."""
    n, (batch, channels, length) = dist.get_world_size(), x.shape
    ordered = permuted(x, zigzag(2 * n))
    sent = ordered.reshape(batch, channels, n, length // n).movedim(2, 0).contiguous()
    return exchanged(sent).movedim(0, 1).reshape(batch, n * channels, length // n)


def slots_reduced(*gradients: Tensor) -> Tensor:
    """The gradients of all slots are reduced, and one is kept."""
    stacked = torch.stack(gradients)
    dist.all_reduce(stacked)
    return stacked[dist.get_rank()]


def gathered_overwritten(x: Tensor) -> list[Tensor]:
    """ksuit's `AllGatherGradOverwrite`."""
    with torch.no_grad():
        blocks = all_gathered(x)
    blocks[dist.get_rank()] = x
    return blocks


def widened(x: Tensor) -> Tensor:
    """The rows of neighbours around those of [B, C, H, W], sent point-to-point."""
    before, after = _neighbours(x[:, :, :HALO], x[:, :, -HALO:])
    return torch.cat([before, x, after], 2)


def narrowed(gradient: Tensor) -> Tensor:
    """The gradient of `widened`."""
    before, after = _neighbours(gradient[:, :, :HALO], gradient[:, :, -HALO:])
    own = gradient[:, :, HALO:-HALO].clone()
    own[:, :, :HALO] += before
    own[:, :, -HALO:] += after
    return own


def _neighbours(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks before and after -> their rows; zeros where there is no such rank."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    received = []
    operations = []
    for rows, other in ((first.contiguous(), rank - 1), (last.contiguous(), rank + 1)):
        received.append(torch.zeros_like(rows))
        if 0 <= other < n:
            operations.append(dist.P2POp(dist.isend, rows, other))
            operations.append(dist.P2POp(dist.irecv, received[-1], other))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received[0], received[1]


# nvSubquadratic's `AllToAllSingleFunction` ("split_to_full"); ksuit's `AllGatherGradAutograd`, and its sum
# that passes gradients on; CREDIT's `HaloExchange`; poptorch's sum of gradients, and its all-to-all.
split_to_full = with_gradient(
    gathered_sequence, lambda gradient: split_sequence(gradient.contiguous())
)
all_gather_grad = with_gradient(lambda x: tuple(all_gathered(x)), slots_reduced)
reduced_sum = with_gradient(all_reduced, lambda gradient: gradient)
halo = with_gradient(widened, narrowed)
summed_gradient = with_gradient(lambda x: x.view_as(x), all_reduced)
all_to_all_single = with_gradient(
    exchanged, lambda gradient: all_to_all_single(gradient.contiguous())
)
