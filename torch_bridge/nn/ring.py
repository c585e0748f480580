"""Attention in rounds: in each, a device uses the keys and values of another, while the next ones travel.

Decides what is kept and when blocks travel. The forward pass keeps no block but the device's own; in the
backward pass they travel again, and the sums of their gradients with them, at last home. Every device passes
on all blocks, also those of which it sees nothing, so that none waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.mesh.process_mesh import ProcessMesh
from torch_bridge.nn.attention_kernels import attend, pull
from torch_bridge.redistribution import redistribute
from xshard.nn.attention import CAUSAL, SOME, Attention, Piece, pieces


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a device computes of an attention. documents: `[batch or 1, rows of the whole sequence]`."""

    given: Attention
    processes: ProcessMesh
    documents: Tensor | None
    scale: float

    @property
    def device(self) -> int:
        return self.processes.device

    @cached_property
    def heads_read(self) -> Tensor | None:
        """For every head of queries, the head of keys that it reads; None if they are as many."""
        return None if self.given.group == 1 else torch.from_numpy(self.given.heads_read(self.device))

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, for every head of queries."""
        if self.heads_read is not None:
            kv = kv.index_select(1, self.heads_read.to(kv.device))
        return kv[..., : -self.given.wide], kv[..., -self.given.wide :]

    def add(self, of_kv: Tensor, found: Tensor) -> None:
        """Add the gradients of what every head of queries has read to those of the block."""
        if self.heads_read is None:
            of_kv += found
        else:
            of_kv.index_add_(1, self.heads_read.to(of_kv.device), found.to(of_kv.dtype))

    def mask(self, piece: Piece, turn: int = 0) -> tuple[Tensor | None, bool]:
        """Which scores of a piece are not empty, `[batch or 1, 1, rows, keys]`, and whether it is causal.

        None for a piece that is full, or causal.
        """
        if self.documents is None and piece.kind != SOME:
            return None, piece.kind == CAUSAL
        rows = self.given.query_rows(self.device)[piece.q]
        keys = self.given.key_rows(self.device, turn)[piece.k]
        seen = torch.from_numpy(self.given.sees(rows[:, None], keys))[None]
        if self.documents is not None:
            of_rows, of_keys = (self.documents[:, torch.from_numpy(x)] for x in (rows, keys))
            seen = seen.to(of_rows.device) & (of_rows[:, :, None] == of_keys[:, None])
        return seen[:, None], False

    def padded(self, kv: Tensor) -> Tensor:
        """A block as long as the longest."""
        return F.pad(kv, (0, 0, 0, self.given.block_rows - kv.shape[2]))

    def passed_on(self, x: Tensor, by: int = 1) -> PendingTensor:
        """Begin to send a block on, and to get that of a device before this one."""
        shape = (*x.shape[:2], len(self.given.devices) * x.shape[2], x.shape[3])
        return redistribute(x, self.given.passed_on(by), self.processes, shape=shape, async_op=True)  # type: ignore[return-value]

    def in_turn(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The blocks of all rounds; the next one travels while one is used."""
        for turn in range(self.given.rounds):
            coming = self.passed_on(kv) if turn + 1 < self.given.rounds else None
            yield turn, kv
            kv = kv if coming is None else coming.wait()


class Ring(torch.autograd.Function):
    """`Ring.apply(blocks, q, kv)`: the result for a device's queries, from blocks of keys beside values."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, q: Tensor, kv: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = q.new_zeros((*q.shape[:3], blocks.given.wide), dtype=wide)
        log_sum = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for turn, block in blocks.in_turn(kv):
            for piece in pieces(blocks.given, blocks.device, turn):
                k, v = blocks.read(block[:, :, piece.k])
                part, found = attend(q[:, :, piece.q], k, v, *blocks.mask(piece, turn), blocks.scale)
                before = log_sum[:, :, piece.q]
                after = torch.logaddexp(before, found)
                finite = after.clamp(min=torch.finfo(wide).min)  # of rows that have seen nothing so far
                y[:, :, piece.q] *= (before - finite).exp()[..., None]
                y[:, :, piece.q] += part * (found - finite).exp()[..., None]
                log_sum[:, :, piece.q] = after
        y = y.to(q.dtype)
        ctx.blocks = blocks
        ctx.save_for_backward(q, kv, y, log_sum)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, y, log_sum = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        coming: Any = None
        of_q = torch.zeros_like(q, dtype=log_sum.dtype)
        for turn, block in blocks.in_turn(kv):
            of_block = torch.zeros_like(block, dtype=log_sum.dtype)
            for piece in pieces(blocks.given, blocks.device, turn):
                k, v = blocks.read(block[:, :, piece.k])
                own, q_own, y_own, sum_own = (x[:, :, piece.q] for x in (cotangent, q, y, log_sum))
                found = pull(own, q_own, y_own, sum_own, k, v, *blocks.mask(piece, turn), blocks.scale)
                of_q[:, :, piece.q] += found[0]
                blocks.add(of_block[:, :, piece.k], torch.cat(found[1:], -1))
            of_kv = of_block if coming is None else coming.wait() + of_block
            last = turn + 1 == blocks.given.rounds
            coming = blocks.passed_on(of_kv, -turn if last else 1)
        return None, of_q.to(q.dtype), coming.wait().to(kv.dtype)
